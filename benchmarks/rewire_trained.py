"""Train a Llama of five million parameters on real text, rewire it to every topology, and measure what changed.

`python benchmarks/rewire_trained.py train DATA WEIGHTS` trains on data that `siamesenorm prepare` made, with
transformers' own model and a plain loop: 15 minutes of one core. `measure DATA WEIGHTS OUT.json` rewires the trained
model and one with initial weights, and compares logits on held-out text.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import siamesenorm
from siamesenorm.errors import UserError
from siamesenorm.topologies import available_topologies
from siamesenorm.training.execution import describe_environment

CONTEXT, BATCH, STEPS, WARM_UP, RATE = 256, 8, 500, 50, 2e-3


def tokens_of(data: Path, split: str) -> Tensor:
    """Return all tokens of a split."""
    shards = sorted(data.glob(f"shards/{split}-*.bin"))
    return torch.from_numpy(np.concatenate([np.fromfile(shard, dtype=np.uint16) for shard in shards]).astype(np.int64))


def build(data: Path) -> LlamaForCausalLM:
    """Return the model with initial weights."""
    torch.manual_seed(0)
    vocabulary = json.loads((data / "manifest.json").read_text())["tokenizer"]["vocabulary"]
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4,
        max_position_embeddings=CONTEXT, tie_word_embeddings=False,
    ))  # fmt: skip


def train(data: Path, weights: Path) -> None:
    """Train on random windows of the text, and save the model and its losses."""
    model, tokens = build(data), tokens_of(data, "train")
    generator = torch.Generator().manual_seed(0)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    losses, start = [], time.process_time()
    for step in range(STEPS):
        decay = 0.55 + 0.45 * math.cos(math.pi * step / STEPS)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / WARM_UP, decay)
        first = torch.randint(len(tokens) - CONTEXT, (BATCH, 1), generator=generator)
        batch = tokens[first + torch.arange(CONTEXT)]
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            print(
                f"step {step + 1}: loss {sum(losses[-50:]) / 50:.3f}, {time.process_time() - start:.0f} s", flush=True
            )
    model.save_pretrained(weights)
    record = {
        "steps": STEPS, "tokens": STEPS * BATCH * CONTEXT, "parameters": sum(map(torch.numel, model.parameters())),
        "first_loss": losses[0], "last_loss": sum(losses[-50:]) / 50, "core_seconds": time.process_time() - start,
    }  # fmt: skip
    (weights / "training.json").write_text(json.dumps(record))


@torch.no_grad()
def measure(data: Path, weights: Path, out: Path) -> None:
    """Rewire both models to every topology that keeps the function, and write the differences."""
    batch = tokens_of(data, "validation")[: 8 * CONTEXT].reshape(8, CONTEXT)
    hosts = {"initial": build(data), "trained": LlamaForCausalLM.from_pretrained(weights)}
    rows = []
    for name, host in hosts.items():
        for topology in ("siamese-post-pre:normalized_input=false", *available_topologies()):
            row = compare(host.eval(), topology, batch)
            if row is not None:
                rows.append({"streams": name, **row})
                print(json.dumps(rows[-1]), flush=True)
    record = {
        "benchmark": "rewire_trained", "environment": describe_environment("cpu"),
        "training": json.loads((weights / "training.json").read_text()),
        "embedding_mean_square": {name: mean_squares(host, batch) for name, host in hosts.items()}, "rows": rows,
    }  # fmt: skip
    out.write_text(json.dumps(record, indent=1) + "\n")


def compare(host: LlamaForCausalLM, topology: str, batch: Tensor) -> dict[str, Any] | None:
    """Return what rewiring changes in fp32 and in bf16, None for a topology that cannot keep the function."""
    row: dict[str, Any] = {"topology": topology}
    for dtype, suffix in ((torch.float32, ""), (torch.bfloat16, "_bf16")):
        plain: Any = copy.deepcopy(host)
        model = copy.deepcopy(plain.to(dtype))
        try:
            report = siamesenorm.rewire(model, topology)
        except UserError:
            return None
        before, after = plain(batch, labels=batch), model(batch, labels=batch)
        change = (after.logits - before.logits).abs().max() / before.logits.abs().max()
        row |= {
            "outcome": "exact" if report.function_kept else "up to eps",
            f"relative_difference{suffix}": float(change),
            f"same_best_token{suffix}": float((after.logits.argmax(-1) == before.logits.argmax(-1)).float().mean()),
            f"loss{suffix}": float(before.loss), f"loss_change{suffix}": float(after.loss - before.loss),
        }  # fmt: skip
    return row


def mean_squares(host: LlamaForCausalLM, batch: Tensor) -> dict[str, float]:
    """Return the smallest and the median mean square of a token's embedding, which an eps is added to."""
    squares = host.model.embed_tokens(batch).square().mean(-1)
    return {"smallest": float(squares.min()), "median": float(squares.median())}


if __name__ == "__main__":
    verb, *given = sys.argv[1:]
    if verb == "train":
        train(*map(Path, given))
    else:
        measure(*map(Path, given))
