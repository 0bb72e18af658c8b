"""Train a small SiameseNorm model, export it for Hugging Face, and generate with transformers: one model both times."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import siamesenorm.interop.huggingface  # noqa: F401  registers our model type with transformers
from siamesenorm import from_pretrained
from siamesenorm.cli import main

SUMS = "\n\n".join(f"{number} and {number + 1} are {2 * number + 1}." for number in range(2000))


def run(command):
    """Run a command as a shell would; its words hold no blanks here."""
    if main(command.split()):
        sys.exit(f"failed: siamesenorm {command}")


@torch.no_grad()
def compare(directory):
    native = from_pretrained(f"{directory}/run")
    model, tokenizer = (auto.from_pretrained(f"{directory}/exported") for auto in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer("7 and 8", return_tensors="pt")
    difference = (model(**prompt).logits - native(prompt.input_ids).logits).abs().max().item()
    greedy = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    cached, uncached = (model.generate(**prompt, **greedy, use_cache=use) for use in (True, False))
    print(f"{type(model).__name__} continues {tokenizer.decode(cached[0])!r}")
    print(f"largest difference of logits: {difference:.1e}; with and without cache: {torch.equal(cached, uncached)}")
    return difference == 0 and torch.equal(cached, uncached)


with TemporaryDirectory() as directory:
    Path(directory, "sums.txt").write_text(SUMS)
    run(
        f"prepare --source {directory}/sums.txt --out {directory}/data --documents paragraphs --validation-fraction 0.1"
    )
    run(
        f"train mini --data {directory}/data --out {directory}/run --model.size nano --model.depth 2 --steps 60 "
        "--batch 4 --optimizer.warmup-steps 6 --optimizer.learning-rate 1e-2 --execution.compile off"
    )
    run(f"export {directory}/run --out {directory}/exported")
    sys.exit(not compare(directory))
