"""Score a model with lm-evaluation-harness, offline: as the run that trained it, and as its export for Hugging Face."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from siamesenorm.cli import main
from siamesenorm.interop.lm_eval import evaluate, local_task

SUMS = [(f"{number} and {number + 1} are", 2 * number + 1) for number in range(1000)]


def question(text, answer):
    return {"question": text, "choices": [f"{answer + wrong}." for wrong in (0, 10, 20, 30)], "label": 0}


def run(command):
    """Run a command as a shell would; its words hold no blanks here."""
    if main(command.split()):
        sys.exit(f"failed: siamesenorm {command}")


with TemporaryDirectory() as name:
    directory = Path(name)
    (directory / "sums.txt").write_text("\n\n".join(f"{text} {answer}." for text, answer in SUMS))
    run(f"prepare --source {name}/sums.txt --out {name}/data --documents paragraphs --validation-fraction 0.1")
    run(
        f"train mini --data {name}/data --out {name}/run --model.size nano --model.depth 2 --steps 60 "
        "--batch 4 --optimizer.warmup-steps 6 --optimizer.learning-rate 1e-2 --execution.compile off"
    )
    run(f"export {name}/run --out {name}/exported")

    tasks = directory / "two_sums.jsonl"  # the name of a task is that of its file
    tasks.write_text("\n".join(json.dumps(question(*pair)) for pair in SUMS[::50]))
    results = []
    for model in ("run", "exported"):
        task = local_task(tasks, prompt="{{question}}", cache=directory / "cache")
        results.append(evaluate(directory / model, [task])["two_sums"])
        print(f"{model}: accuracy {results[-1]['acc,none']:.3f}, chance {1 / 4}, {len(SUMS[::50])} questions")
    sys.exit(results[0] != results[1])
