"""The multiple-choice tasks: how an item is read from the original files, how it is prompted, and which metric counts.

Prompts are those of OLMo's in-loop evaluation, zero-shot; lm-evaluation-harness has the same for six of the seven. A
prompt ends without a blank, and every continuation begins with one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Primary = Literal["acc", "acc_per_char"]
Row = Mapping[str, Any]
QUESTION = "Question: {question}\nAnswer:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceItem:
    """A question with its choices, of which `label` is the index of the right one."""

    id: str
    question: str
    choices: tuple[str, ...]
    label: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {"id": self.id, "question": self.question, "choices": list(self.choices), "label": self.label}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTask:
    """A task: its name in files, its label in tables, its prompt, its primary metric, and its dataset on the Hub.

    `read` returns question, choices and label of a row of the original files. With `fills_blank` the question is a
    sentence with a `_`, each choice is put in its place, and what follows is the continuation of all of them (partial
    evaluation, arXiv 1806.02847).
    """

    name: str
    label: str
    primary: Primary
    prompt: str = QUESTION
    fills_blank: bool = False
    repository: str = ""
    configuration: str | None = None
    revision: str | None = None
    read: Callable[[Row], tuple[str, list[str], int]]

    def requests(self, item: ChoiceItem) -> list[tuple[str, str]]:
        """Return context and continuation of each choice; a sentence without `_` has none."""
        if self.fills_blank:
            before, blank, after = item.question.partition("_")
            return [(before + choice, f" {after.strip()}") for choice in item.choices] if blank else []
        return [(self.prompt.format(question=item.question), f" {choice}") for choice in item.choices]


def read_lettered(row: Row) -> tuple[str, list[str], int]:
    """Read ARC, OpenBookQA and basic_arithmetic: choices with letters or digits, of which the key names one."""
    question = row["question"] if "question" in row else row["question_stem"]
    marks, key = [str(each) for each in row["choices"]["label"]], str(row["answerKey"])
    if key not in marks:  # some keys are digits where the choices have letters, or the other way round
        key = "ABCDEFGHI"[int(key) - 1] if key.isdecimal() and key != "0" else str("ABCDEFGHI".index(key) + 1)
    return question, list(row["choices"]["text"]), marks.index(key)


def read_hellaswag(row: Row) -> tuple[str, list[str], int]:
    """Read HellaSwag: activity and context, without the remains of WikiHow's markup."""
    question = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _without_markup(question), [_without_markup(ending) for ending in row["endings"]], int(row["label"])


def read_piqa(row: Row) -> tuple[str, list[str], int]:
    """Read PIQA."""
    return row["goal"], [row["sol1"], row["sol2"]], int(row["label"])


def read_winogrande(row: Row) -> tuple[str, list[str], int]:
    """Read WinoGrande, whose answer is 1 or 2."""
    return row["sentence"], [row["option1"], row["option2"]], int(row["answer"]) - 1


def _without_markup(text: str) -> str:
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _task(name: str, label: str, primary: Primary, **fields: Any) -> ChoiceTask:
    return ChoiceTask(name=name, label=label, primary=primary, **{"read": read_lettered, **fields})


PARQUET = "refs/convert/parquet"
"""The Hub's own conversion of a dataset; datasets 4 and later refuse the loading script of the main revision."""
GENERATED = "generated_arithmetic"
"""The task that needs no data."""
TASKS = {
    task.name: task
    for task in (
        _task("hellaswag", "HellaSwag", "acc_per_char", prompt="{question}", repository="Rowan/hellaswag",
              read=read_hellaswag),
        _task("arc_easy", "ARC-E", "acc", repository="allenai/ai2_arc", configuration="ARC-Easy"),
        _task("arc_challenge", "ARC-C", "acc_per_char", repository="allenai/ai2_arc", configuration="ARC-Challenge"),
        _task("openbookqa", "OBQA", "acc_per_char", prompt="{question}", repository="allenai/openbookqa",
              configuration="main"),
        _task("piqa", "PIQA", "acc_per_char", repository="ybisk/piqa", revision=PARQUET, read=read_piqa),
        _task("winogrande", "WinoGrande", "acc", fills_blank=True, repository="allenai/winogrande",
              configuration="winogrande_xl", read=read_winogrande),
        _task("basic_arithmetic", "Arithmetic", "acc", repository="allenai/basic_arithmetic"),
        _task(GENERATED, "Arithmetic (generated)", "acc", prompt="{question}"),
    )
}  # fmt: skip
"""The seven tasks of the SiameseNorm paper (arXiv 2602.08064), and one that is generated."""
