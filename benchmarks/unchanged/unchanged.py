"""Train short runs of many configurations, and compare their records bit for bit with a committed record.

    python benchmarks/unchanged/unchanged.py write record.json      # record the present code's numbers
    python benchmarks/unchanged/unchanged.py compare record.json    # compare the present code with them
    python benchmarks/unchanged/unchanged.py compare record.json pre dhc-2      # only these configurations

Every run is a command, so that the script does not depend on modules of the package. A reference value is exact
(`float.hex`); the compiled run is compared to 1e-6, because a compiler may order operations differently.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FIELDS = ("loss", "learning_rate", "gradient_norm")
COMPILED_TOLERANCE = 1e-6
STEPS = ["--steps", "60", "--validation-every", "30", "--no-stop-early", "--execution.threads", "1"]
CASES: dict[str, list[str]] = {
    "pre": ["--model.topology", "pre"],
    "post": ["--model.topology", "post"],
    "deepnorm": ["--model.topology", "deepnorm"],
    "siamese": ["--model.topology", "siamese"],
    "siamese-post-pre-seednorm": ["--model.topology", "siamese-post-pre", "--model.norm", "seednorm"],
    "siamese-post-pre-lazy": ["--model.topology", "siamese-post-pre:post_norm=lazy,readout=code"],
    "residual-layernorm": ["--model.topology", "residual", "--model.norm", "layernorm"],
    "hybridnorm-star": ["--model.topology", "hybridnorm-star"],
    "peri": ["--model.topology", "peri"],
    "ln-scaling": ["--model.topology", "ln-scaling"],
    "layerscale": ["--model.topology", "layerscale"],
    "rezero": ["--model.topology", "rezero"],
    "mixln": ["--model.topology", "mixln"],
    "spannorm": ["--model.topology", "spannorm:initial_norm=false"],
    "dhc-2": ["--model.topology", "dhc-2"],
    "mhc-4": ["--model.topology", "mhc-4"],
    "dyt-dropout": ["--model.topology", "pre", "--model.norm", "dyt", "--model.dropout", "0.1"],
    "document-mask": ["--model.topology", "siamese", "--model.document-mask"],
    "accumulation": ["--model.topology", "siamese", "{micro_batch}"],
    "bfloat16-gelu": ["--model.topology", "siamese", "--precision", "bfloat16", "--model.activation", "gelu"],
    "paper-decay-megatron": [
        "--model.topology", "pre", "--optimizer.decay", "all-but-embeddings", "--optimizer.shape", "wsd",
        "--model.initialisation", "megatron", "--model.tied", "--model.kv-heads", "2",
    ],
    "checkpointed": ["--model.topology", "siamese", "--checkpoint-activations"],
    "compiled": ["--model.topology", "siamese", "--execution.compile", "on"],
    "warm-start": ["--model.topology", "siamese-post-pre", "{start}"],
}  # fmt: skip
# Spellings of this version: the batch of a step and of a micro-batch in samples, and the run to start from.
SPELLING = {
    "batch": ["--batch", "8"],
    "micro_batch": ["--micro-batch", "2"],
    "start": ["--start", "{runs}/pre"],
    "rename": {},
}


def make_text(path: Path) -> None:
    """Write 400 documents of an artificial language, the same on every machine."""
    source = random.Random(7)
    words = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 9))) for _ in range(400)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    with path.open("w") as file:
        for _ in range(400):
            text = " ".join(source.choices(words, weights, k=source.randint(60, 300)))
            file.write(json.dumps({"text": text}) + "\n")


def command(*words: str) -> None:
    """Run a command of siamesenorm; raises CalledProcessError when it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "siamesenorm", *words], check=True, env=environment, stderr=subprocess.PIPE)


def spell(word: str, runs: Path) -> list[str]:
    """Return the words of this version for a word of a case."""
    if word.startswith("{"):
        return [each.format(runs=runs) for each in SPELLING[word.strip("{}")]]
    for new, old in SPELLING["rename"].items():
        word = word.replace(new, old)
    return [word]


def train_all(runs: Path, names: list[str]) -> dict[str, Any]:
    """Prepare the data, train the named cases, and return the numbers by case."""
    make_text(runs / "text.jsonl")
    data = runs / "data"
    command("prepare", "--source", str(runs / "text.jsonl"), "--tokenizer", "bpe:300", "--out", str(data))
    record: dict[str, Any] = {}
    for name in names:
        words = CASES[name]
        given = [part for word in words for part in spell(word, runs)]
        size = [] if "{start}" in words else ["--model.size", "nano"]  # a warm start has the size of its source
        common = ["--data", str(data), *size, *SPELLING["batch"], *STEPS]
        command("train", "mini", *common, *given, "--out", str(runs / name))
        record[name] = read_numbers(runs / name / "metrics.jsonl")
        record.setdefault("data", digest(json.loads((runs / name / "config.json").read_text())))
        print(f"{name}: loss {float.fromhex(record[name][-1]['loss']):.6f}", flush=True)
    return record


def digest(record: Any) -> Any:
    """Return the digest of the data, wherever a configuration holds it."""
    if not isinstance(record, dict):
        return None
    return record.get("digest") or next((found for each in record.values() if (found := digest(each))), None)


def read_numbers(path: Path) -> list[dict[str, Any]]:
    """Return kind, step and exact numbers of every training and validation record."""
    records = map(json.loads, path.read_text().splitlines())
    return [
        {"kind": each["kind"], "step": each["step"], **{k: float(each[k]).hex() for k in FIELDS if k in each}}
        for each in records
        if each["kind"] in ("train", "validation")
    ]


def differences(name: str, expected: Any, found: Any) -> list[str]:
    """Return a line for the first place where a case differs; an empty list where it does not."""
    if name == "data" or len(expected) != len(found):
        return [] if expected == found else [f"{name}: {str(expected)[:40]} became {str(found)[:40]}"]
    for old, new in zip(expected, found, strict=True):
        for field, value in old.items():
            if value != new[field] and not (name == "compiled" and close(value, new[field])):
                return [f"{name}: {field} of {old['kind']} step {old['step']}: {value} became {new[field]}"]
    return []


def close(a: Any, b: Any) -> bool:
    """Return whether two recorded numbers agree to the tolerance of compiled runs."""
    if not (isinstance(a, str) and isinstance(b, str) and "p" in a and "p" in b):
        return False
    first, second = float.fromhex(a), float.fromhex(b)
    return abs(first - second) <= COMPILED_TOLERANCE * max(abs(first), abs(second))


def main() -> int:
    """Write a record, or compare with one; returns 1 where numbers differ."""
    task, path, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or list(CASES)
    with tempfile.TemporaryDirectory() as directory:
        record = train_all(Path(directory), names)
    if task == "write":
        path.write_text(json.dumps(record) + "\n")
        return 0
    expected = json.loads(path.read_text())
    found = [line for name in ["data", *names] for line in differences(name, expected[name], record[name])]
    print("\n".join(found) or f"{len(names)} configurations: every number is the same")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
