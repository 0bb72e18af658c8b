"""Perplexities of a language model: of its training, of the data held out from it, and of further texts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siamesenorm.errors import UserError
from siamesenorm.evaluation.evaluation import ItemDirectory, Subject, TaskMetrics
from siamesenorm.evaluation.language import require_language, scorer_of
from siamesenorm.evaluation.scorer import LanguageScorer, Request
from siamesenorm.files import disk_errors
from siamesenorm.progress import Progress
from siamesenorm.tasks.task import Task, perplexity
from siamesenorm.training.loss_curve import final_mean
from siamesenorm.training.run_record import read_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Perplexities exp(loss in nats per token), named by what they are measured on.

    `train_ppl` is that of the mean training loss over the last 10 % of the steps: the number of the SiameseNorm paper
    (arXiv 2602.08064), and close to a held-out one only if the data were seen at most once (`train_ppl_seen_once`).
    `held_out_ppl` is that of the run's validation split. Each of `files` has `loss`, `ppl`, and `bits_per_byte`, which
    compares models with different tokenizers: the text is read in windows that do not overlap, and every token is
    predicted once, the first of a window from the one before it.
    """

    files: tuple[Path, ...] = ()

    name = "perplexity"
    uses_model = True

    def options(self) -> Mapping[str, Any]:
        """Return the names and digests of the files."""
        return {"texts": {file.name: hashlib.sha256(_read(file).encode()).hexdigest() for file in self.files}}

    def require(self, task: Task) -> None:
        """Raise UserError for a task other than language modelling, and for a file that is no text."""
        require_language(task, "--perplexity")
        require_texts(self.files)

    def run(self, subject: Subject) -> Mapping[str, Any]:
        """Return losses and perplexities of training, held-out data and files."""
        train = _train(subject)
        held_out = TaskMetrics().run(subject)["loss"]
        found = {**train, "held_out_loss": held_out, "held_out_ppl": perplexity(held_out)}
        return {**found, **self.measure(scorer_of(subject), None, subject.on_progress)} if self.files else found

    def measure(self, scorer: LanguageScorer, keep: ItemDirectory | None, on_progress: Progress) -> dict[str, Any]:
        """Return loss, perplexity and bits per byte of each file."""
        results = {}
        for number, file in enumerate(self.files):

            def show(part: float, _: str, number: int = number, file: Path = file) -> None:
                on_progress((number + part) / len(self.files), file.name)

            results[file.name] = text_perplexity(scorer, _read(file), show)
        return results


def text_perplexity(
    scorer: LanguageScorer, text: str, on_progress: Progress = lambda part, text: None
) -> dict[str, Any]:
    """Return nats per token, perplexity and bits per byte of a text; see `Perplexity`.

    A tokenizer without a token that begins a text leaves the first token without a prediction; its bytes count.
    """
    (ids,) = scorer.encode([text])
    tokens = [*([] if scorer.start is None else [scorer.start]), *map(int, ids)]
    if len(tokens) < 2:
        raise UserError("a text of fewer than two tokens has no perplexity: give a longer one")
    size = scorer.model.context
    windows = [[Request(tokens[at - 1 : at], tokens[at : at + size])] for at in range(1, len(tokens), size)]
    total = -sum(value for (value,) in scorer.score(windows, on_progress))
    count, size_in_bytes = len(tokens) - 1, len(text.encode())
    loss, bits = total / count, total / math.log(2) / size_in_bytes
    return {"loss": loss, "ppl": perplexity(loss), "bits_per_byte": bits, "tokens": count, "bytes": size_in_bytes}


def require_texts(files: Sequence[Path]) -> None:
    """Raise UserError unless all files hold text, under names of their own."""
    for file in files:
        _read(file)
    twice = [file.name for number, file in enumerate(files) if file.name in {each.name for each in files[:number]}]
    if twice:
        raise UserError(f"two texts are called {twice[0]}: give one of them another name")


def _train(subject: Subject) -> dict[str, Any]:
    records = [] if subject.directory is None else read_metrics(subject.directory.metrics_file)
    curve = [(each["step"], each["loss"]) for each in records if each.get("kind") == "train"]
    loss = final_mean([step for step, _ in curve], [loss for _, loss in curve], subject.config.steps)
    facts: Mapping[str, Any] = next((each for each in records if each.get("kind") == "model"), {})
    start, items = subject.config.warm_start, subject.task.items_per_sample
    read = (subject.config.steps * subject.config.batch + (start.position if start else 0)) * items
    return {
        "train_loss": loss,
        "train_ppl": None if loss is None else perplexity(loss),
        "train_ppl_seen_once": bool(facts.get("train_items")) and read <= facts["train_items"],
    }


def _read(file: Path) -> str:
    with disk_errors(file):
        content = file.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: byte {error.start} is not UTF-8: give a plain text") from error
    if not text.strip():
        raise UserError(f"{file}: holds no text: give a longer one")
    return text
