"""Compare the scorer with lm-evaluation-harness, item by item and in items per second, on the same model and files.

    python benchmarks/scorer_agreement.py TASKS run=RUN llama=DIRECTORY --known --out benchmarks/scorer_agreement.json

TASKS is a directory of TASK_validation.jsonl; the models are runs, exports, or causal language models of transformers.

*Agreement*: the harness runs its own task on each file, and its log-probability of every choice is set beside ours.
It encodes context and continuation together, OLMo's rules encode them apart: ours is computed on the harness's tokens,
too, so that a difference is that of the tokens or one of the scorers; on all items the tokens alone are compared.
*Speed*: both score the same requests, encoding included, in turns; the median of the rounds counts. *Known models*: one
that gives all probability to the right texts, and one that gives equal ones to every byte, on all items.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from siamesenorm.cli.evaluate import Arguments, open_model
from siamesenorm.data.tokenizer import ByteTokenizer
from siamesenorm.evaluation.causal_models import Batch
from siamesenorm.evaluation.choice_items import TaskItems, read_tasks
from siamesenorm.evaluation.evaluation import TrainedRun
from siamesenorm.evaluation.language import scorer_of
from siamesenorm.evaluation.multiple_choice import MultipleChoice, score_items
from siamesenorm.evaluation.scorer import LanguageScorer, Request
from siamesenorm.interop.language_models import open_language_model
from siamesenorm.interop.lm_eval import SiameseNormLM, local_task
from siamesenorm.interop.native_models import NativeModel
from siamesenorm.interop.stored import detect
from siamesenorm.training.execution import describe_environment

BLANK = {
    "doc_to_text": "{{label}}",
    "doc_to_choice": "{{[question.split('_', 1)[0] + choices[0], question.split('_', 1)[0] + choices[1]]}}",
    "doc_to_target": "{{question.split('_', 1)[1].strip()}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
"""WinoGrande in the words of the harness: partial evaluation."""
BATCH_SIZES = (8, 32)
"""The harness's time is that of the faster one."""


# --- agreement


def harness_samples(model: HFLM, file: Path, tasks: TaskItems) -> list[dict[str, Any]]:
    """Return what the harness's own task says of each item: log-probabilities of the choices, acc, acc_norm."""
    prompt = tasks.task.prompt.replace("{question}", "{{question}}")
    options: dict[str, Any] = BLANK if tasks.task.fills_blank else {}
    with tempfile.TemporaryDirectory() as cache:
        task = local_task(file, name=tasks.task.name, prompt=prompt, cache=cache, **options)
        found = lm_eval.evaluate(
            lm=model, task_dict={tasks.task.name: task}, limit=len(tasks.items), log_samples=True, bootstrap_iters=0
        )
    samples: list[dict[str, Any]] = sorted(found["samples"][tasks.task.name], key=lambda each: int(each["doc_id"]))
    return samples


def agreement(scorer: LanguageScorer, model: HFLM, file: Path, tasks: TaskItems) -> dict[str, Any]:
    """Return how far both are apart on the items of a task."""
    pairs = [tasks.task.requests(item) for item in tasks.items]
    mine = score_items(scorer, tasks)
    apart = iter(scorer.requests([pair for group in pairs for pair in group]))
    joint = [[Request(*model._encode_pair(*pair)) for pair in group] for group in pairs]
    on_joint = scorer.score(joint)
    differing, worst, worst_joint, flips, flips_joint = 0, 0.0, 0.0, [], 0
    for number, sample in enumerate(harness_samples(model, file, tasks)):
        theirs = [float(one[0]) for one in sample["filtered_resps"]]
        score = mine[number]
        differs = [tuple(next(apart)) != tuple(joint[number][at]) for at in range(len(theirs))]
        differing += sum(differs)
        same = [abs(a - b) for a, b, d in zip(theirs, score.log_probabilities, differs, strict=True) if not d]
        worst = max([worst, *same])
        worst_joint = max([worst_joint, *(abs(a - b) for a, b in zip(theirs, on_joint[number], strict=True))])
        metrics = {"acc": "acc"} if tasks.task.fills_blank else {"acc": "acc", "acc_norm": "acc_per_char"}
        for name, ours in metrics.items():
            if float(sample[name]) != getattr(score, ours):
                flips.append({"item": score.id, "metric": ours, "tokens_differ": any(differs)})
        flips_joint += int(max(range(len(theirs)), key=theirs.__getitem__)) != int(
            max(range(len(theirs)), key=on_joint[number].__getitem__)
        )
    return {
        "items": len(tasks.items),
        "requests": sum(map(len, pairs)),
        "requests_with_other_tokens": differing,
        "largest_difference_on_equal_tokens": worst,
        "largest_difference_on_the_harness_tokens": worst_joint,
        "items_with_another_answer": flips,
        "items_with_another_likeliest_choice_on_the_harness_tokens": flips_joint,
    }


def other_tokens(scorer: LanguageScorer, model: HFLM, tasks: TaskItems) -> dict[str, int]:
    """Return how many requests of a task have other tokens where both texts are encoded together."""
    pairs = [pair for item in tasks.items for pair in tasks.task.requests(item)]
    apart = scorer.requests(pairs)
    together = (tuple(map(list, model._encode_pair(*pair))) for pair in pairs)
    return {
        "requests": len(pairs),
        "with_other_tokens": sum(tuple(map(list, one)) != both for one, both in zip(apart, together, strict=True)),
    }


# --- speed


def speed(scorer: LanguageScorer, models: Sequence[HFLM], tasks: TaskItems, rounds: int) -> dict[str, float]:
    """Return medians of items per second, and of the ratio within a round; without rows shared by choices, too."""
    pairs = [pair for item in tasks.items for pair in tasks.task.requests(item)]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0, metadata=("", number, 1))
        for number, pair in enumerate(pairs)
    ]
    single: Any = copy.copy(scorer.model)
    single.packs = False
    alone = dataclasses.replace(scorer, model=single)
    times: dict[str, list[float]] = {"ours": [], "without_sharing": [], "lm_eval": []}
    for _ in range(rounds):
        times["ours"].append(_seconds(partial(score_items, scorer, tasks)))
        times["without_sharing"].append(_seconds(partial(score_items, alone, tasks)))
        harness = (_seconds(partial(model.loglikelihood, requests, disable_tqdm=True)) for model in models)
        times["lm_eval"].append(min(harness))
    ratios = [theirs / own for own, theirs in zip(times["ours"], times["lm_eval"], strict=True)]
    sharing = [other / own for own, other in zip(times["ours"], times["without_sharing"], strict=True)]
    found = {name: len(tasks.items) / statistics.median(seconds) for name, seconds in times.items()}
    return {**found, "ratio": statistics.median(ratios), "gain_of_sharing": statistics.median(sharing)}


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# --- models whose results are known


class Oracle:
    """Gives all probability to the next byte of texts that it has, and equal ones after others."""

    packs, context = False, 4096

    def __init__(self, texts: Sequence[str]) -> None:
        contents = [text.encode() for text in texts]
        self.next = {hash(content[:at]): content[at] for content in contents for at in range(len(content))}

    def logits(self, batch: Batch, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        """Yield the logits."""
        contents = [bytes(row) for row in batch.tokens.to(torch.uint8).tolist()]
        found = torch.zeros(len(rows), 257)
        for place, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            token = self.next.get(hash(contents[row][: column + 1]))
            if token is not None:
                found[place, token] = 50.0
        yield found


def known_models(tasks: Sequence[TaskItems]) -> dict[str, Any]:
    """Return the accuracies of an oracle and of a uniform model on all items, and chance."""
    found: dict[str, Any] = {}
    for each in tasks:
        right = ["".join(each.task.requests(item)[item.label]) for item in each.items]
        chance = sum(1 / len(item.choices) for item in each.items) / len(each.items)
        found[each.task.name] = {"items": len(each.items), "chance": chance}
        for name, texts in {"oracle": right, "uniform": []}.items():
            scorer = LanguageScorer(
                model=Oracle(texts),
                encode=lambda texts: [ids.tolist() for ids in ByteTokenizer().encode_batch(texts)],
                identity="",
                device=torch.device("cpu"),
                tokens_at_once=2**16,
            )
            result = MultipleChoice(tasks=(each,)).measure(scorer, None)[each.task.name]
            found[each.task.name][name] = {metric: result[metric] for metric in ("acc", "acc_per_char")}
    return found


# --- both scorers of one model


def open_both(path: str) -> tuple[LanguageScorer, list[HFLM]]:
    """Return our scorer of a model, without a cache, and the harness's models of it, one for each batch size."""
    opened = open_model(Arguments(model=path, out=Path(tempfile.mkdtemp())), path)
    if isinstance(opened, TrainedRun):
        scorer = scorer_of(dataclasses.replace(opened.subject(), directory=None))
    else:
        scorer = dataclasses.replace(opened.scorer, cache=None)
    if isinstance(detect(path), NativeModel):
        return scorer, [SiameseNormLM(path, device="cpu", batch_size=size) for size in BATCH_SIZES]
    model: Any = open_language_model(path, device=torch.device("cpu")).model
    options = {"pretrained": model, "tokenizer": path, "max_length": scorer.model.context, "device": "cpu"}
    return scorer, [HFLM(**options, batch_size=size) for size in BATCH_SIZES]


def measure(path: str, label: str, tasks: Sequence[TaskItems], files: Path, rounds: int) -> dict[str, Any]:
    """Return agreement and speed on each task, and over all."""
    scorer, models = open_both(path)
    found: dict[str, Any] = {}
    for each in tasks:
        whole = read_tasks(files, names=(each.task.name,))[0]
        file = next(files.glob(f"{each.task.name}_{each.split}.jsonl*"))
        result = agreement(scorer, models[-1], file, each)
        result["of_all_items"] = other_tokens(scorer, models[0], whole)
        if rounds:
            result["items_per_second"] = speed(scorer, models, each, rounds)
        found[each.task.name] = result
        print(label, each.task.name, json.dumps(result), flush=True)
    return found


def table_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results as rows for the tables of a page."""
    rows: list[dict[str, Any]] = []
    for model, tasks in results.get("models", {}).items():
        for name, found in tasks.items():
            row = {
                "model": model,
                "task": name,
                "items": found["items"],
                "largest_difference_in_nats": float(f"{found['largest_difference_on_the_harness_tokens']:.1e}"),
                "other_answers": len(found["items_with_another_answer"]),
                "requests_of_all_items": found["of_all_items"]["requests"],
                "with_other_tokens": found["of_all_items"]["with_other_tokens"],
            }
            if speeds := found.get("items_per_second"):
                row["items_per_second"] = round(speeds["ours"], 1)
                row["lm-eval's"] = round(speeds["lm_eval"], 1)
                row["ratio"] = round(speeds["ratio"], 2)
                row["gain_of_shared_rows"] = round(speeds["gain_of_sharing"], 2)
            rows.append(row)
    for name, found in results.get("known_models", {}).items():
        shares = {
            f"{model}_{metric}_in_%": round(100 * found[model][metric], 1)
            for model in ("oracle", "uniform")
            for metric in ("acc", "acc_per_char")
        }
        chance = {"chance_in_%": round(100 * found["chance"], 1)}
        rows.append({"model": "known", "task": name, "items": found["items"], **shares, **chance})
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path, help="directory of TASK_validation.jsonl")
    parser.add_argument("models", nargs="*", help="LABEL=PATH of each model")
    parser.add_argument("--names", nargs="*", default=[], help="names of tasks; all if not given")
    parser.add_argument("--items", type=int, default=60, help="first items of each task")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each scorer; 0 leaves speed out")
    parser.add_argument("--known", action="store_true", help="score the oracle and the uniform model on all items")
    parser.add_argument("--out", type=Path, required=True, help="file of results; others in it are kept")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    tasks = read_tasks(arguments.tasks, names=arguments.names, limit=arguments.items)
    for model in arguments.models:
        label, _, path = model.partition("=")
        measured = measure(path, label, tasks, arguments.tasks, arguments.rounds)
        results.setdefault("models", {}).setdefault(label, {}).update(measured)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.known:
        whole = read_tasks(arguments.tasks, names=arguments.names)
        results.setdefault("known_models", {}).update(known_models(whole))
    packages = ("torch", "lm_eval", "transformers", "tokenizers")
    results["environment"] = {
        **{name: version(name) for name in packages}, "machine": platform.machine(), "threads": 1,
        "commit": describe_environment("cpu")["commit"],
    }  # fmt: skip
    results["rows"] = table_rows(results)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
