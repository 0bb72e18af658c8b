"""Multiple-choice tasks: prompts, items of all forms, metrics, models whose results are known, paired tests."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from siamesenorm.data.builtin import builtin_equations
from siamesenorm.data.tokenizer import ByteTokenizer
from siamesenorm.errors import UserError
from siamesenorm.evaluation.causal_models import Batch
from siamesenorm.evaluation.choice_items import generate_arithmetic, read_item, read_tasks
from siamesenorm.evaluation.choice_tasks import TASKS, ChoiceItem
from siamesenorm.evaluation.multiple_choice import (
    ItemScore,
    MultipleChoice,
    mean_of_tasks,
    read_item_scores,
    score_items,
    summarise,
)
from siamesenorm.evaluation.paired_tests import compare_items, compare_tasks
from siamesenorm.evaluation.scorer import LanguageScorer

VOCABULARY = 257
ITEMS: dict[str, list[dict[str, Any]]] = {
    "arc_easy": [
        {"id": "a", "question": "What sinks?", "choices": ["a stone", "cork", "oil"], "label": 0},
        {"id": "b", "question": "What floats?", "choices": ["lead", "tin", "iron", "gold", "cork"], "label": 4},
    ],
    "winogrande": [
        {"id": "0", "question": "Sarah met Maria so _ was glad.", "choices": ["Sarah", "Maria"], "label": 1},
        {"id": "1", "question": "The cup is on the mat, for the _ is flat.", "choices": ["cup", "mat"], "label": 1},
    ],
    "piqa": [{"id": "0", "question": "Cut bread.", "choices": ["With a knife ", "With a spoon"], "label": 0}],
}


def write_tasks(directory: Path, tasks: dict[str, list[Any]] = ITEMS, suffix: str = "") -> Path:
    directory.mkdir(exist_ok=True)
    for name, rows in tasks.items():
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file = directory / f"{name}_validation.jsonl{suffix}"
        file.write_bytes(gzip.compress(text) if suffix else text)
    return directory


class Oracle:
    """Gives all probability to the next token of texts that it has, and equal ones after others."""

    packs, context = False, 512

    def __init__(self, texts: list[str]) -> None:
        self.next = {bytes(text.encode()[:at]): text.encode()[at] for text in texts for at in range(len(text.encode()))}

    def logits(self, batch: Batch, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        found = torch.zeros(len(rows), VOCABULARY)
        for place, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            token = self.next.get(bytes(batch.tokens[row, : column + 1].tolist()))
            if token is not None:
                found[place, token] = 50.0
        yield found


def scorer_of(model: Any) -> LanguageScorer:
    return LanguageScorer(
        model=model,
        encode=lambda texts: [ids.tolist() for ids in ByteTokenizer().encode_batch(texts)],
        identity="",
        device=torch.device("cpu"),
    )


def test_an_oracle_is_right_everywhere_and_a_uniform_model_where_chance_is(tmp_path: Path) -> None:
    tasks = read_tasks(write_tasks(tmp_path), names=(*ITEMS, "generated_arithmetic"), limit=40)
    right = ["".join(each.task.requests(item)[item.label]) for each in tasks for item in each.items]
    found = MultipleChoice(tasks=tasks).measure(scorer_of(Oracle(right)), None)
    assert found["average"] == 1.0
    for each in tasks:
        result = found[each.task.name]
        assert (result["acc"], result["acc_per_char"], result["items"]) == (1.0, 1.0, len(each.items))
        assert result["bits_per_byte"] == pytest.approx(0.0, abs=1e-9)
    uniform = MultipleChoice(tasks=tasks).measure(scorer_of(Oracle([])), None)
    arithmetic = uniform["generated_arithmetic"]
    assert arithmetic["bits_per_byte"] >= math.log2(VOCABULARY), "the blank is predicted, too, and is no byte of it"
    assert 0.1 < arithmetic["acc"] < 0.5


def test_prompts_are_those_of_olmo() -> None:
    item = ChoiceItem(id="0", question="A _ is {flat}.", choices=("mat", "cup "), label=0)
    assert TASKS["winogrande"].requests(item) == [("A mat", " is {flat}."), ("A cup ", " is {flat}.")]
    for name in ("arc_easy", "arc_challenge", "piqa", "basic_arithmetic"):
        assert TASKS[name].requests(item)[1] == ("Question: A _ is {flat}.\nAnswer:", " cup ")
    for name in ("hellaswag", "openbookqa"):
        assert TASKS[name].requests(item)[0] == ("A _ is {flat}.", " mat")
    primaries = {name: task.primary for name, task in TASKS.items() if task.repository}
    assert [name for name, primary in primaries.items() if primary == "acc"] == [
        "arc_easy", "winogrande", "basic_arithmetic",
    ]  # fmt: skip
    assert len(primaries) == 7


def test_metrics_by_hand() -> None:
    """The first choice is the likeliest, the second per character; sizes leave the leading blank out."""
    item = ChoiceItem(id="x", question="Q", choices=("ab", "äbcdefgh"), label=1)
    score = ItemScore.of(TASKS["arc_easy"], item, (-4.0, -8.0))
    assert (score.characters, score.bytes) == ((2, 8), (2, 9))
    assert (score.acc, score.acc_per_char) == (0.0, 1.0)
    assert score.bits_per_byte == pytest.approx(8.0 / math.log(2) / 9)
    broken = dataclasses.replace(score, log_probabilities=(math.nan, -1.0))
    assert (broken.acc, broken.acc_per_char) == (0.0, 0.0)
    other = dataclasses.replace(score, log_probabilities=(-4.0, -1.0))
    found = summarise(TASKS["arc_challenge"], [score, other, broken])
    assert (found["acc"], found["primary"], found["items"]) == (pytest.approx(1 / 3), "acc_per_char", 3)
    assert found["acc_stderr"] == pytest.approx(np.std([0, 1, 0], ddof=1) / math.sqrt(3))
    assert summarise(TASKS["arc_easy"], [score])["acc_stderr"] is None
    assert mean_of_tasks([(0.2, 0.03), (0.4, 0.04)]) == (pytest.approx(0.3), pytest.approx(0.025))
    assert mean_of_tasks([(0.2, 0.03), (0.4, None)])[1] is None


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_are_found_by_name_and_split(suffix: str, tmp_path: Path) -> None:
    tasks = read_tasks(write_tasks(tmp_path, suffix=suffix))
    assert [each.task.name for each in tasks] == ["arc_easy", "piqa", "winogrande"]
    assert [len(item.choices) for item in tasks[0].items] == [3, 5]
    (limited,) = read_tasks(tmp_path, names=("arc_easy",), limit=1)
    assert len(limited.items) == 1 and limited.digest != tasks[0].digest


ORIGINALS = [
    (
        "arc_easy",
        {"question": "Q", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}, "answerKey": "B"},
        1,
    ),
    ("arc_easy", {"question": "Q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}, 1),
    ("arc_easy", {"question": "Q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "2"}, 1),
    ("openbookqa", {"question_stem": "Q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"}, 0),
    ("piqa", {"goal": "Q", "sol1": "x", "sol2": "y", "label": 1}, 1),
    ("winogrande", {"sentence": "Q _ more", "option1": "x", "option2": "y", "answer": "2"}, 1),
]


@pytest.mark.parametrize(("name", "row", "label"), ORIGINALS)
def test_rows_of_the_original_files_are_items(name: str, row: dict[str, Any], label: int) -> None:
    item = read_item(TASKS[name], row, "here", "7")
    assert (item.id, item.question[0], item.choices[:2], item.label) == ("7", "Q", ("x", "y"), label)


def test_rows_of_the_hub_are_items(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    row = {
        "ind": 4, "activity_label": "Roofing", "ctx_a": "A man [header] sits. [title] On a roof.", "ctx_b": "he",
        "endings": ["[substeps] sings.", "falls  off."], "label": "1",
    }  # fmt: skip
    asked = []

    def load_dataset(*words: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((*words, options["split"], options["revision"]))
        return [row]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    ((item,),) = (each.items for each in read_tasks("hf", names=("hellaswag",)))
    assert asked == [("Rowan/hellaswag", None, "validation", None)]
    assert TASKS["piqa"].revision == "refs/convert/parquet"
    assert (item.question, item.choices) == ("Roofing: A man sits.. On a roof. He", (" sings.", "falls off."))


def test_generated_arithmetic_is_right_and_its_distractors_are_near() -> None:
    items = list(generate_arithmetic(200))
    assert items == list(generate_arithmetic(200)) != list(generate_arithmetic(200, seed=1))
    for item in items:
        left, operator, right = item.question.removeprefix("Calculate ").removesuffix(" =").split()
        value = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}.get(operator)
        value = int(left) // int(right) if value is None else value
        assert int(item.choices[item.label]) == value and len(set(item.choices)) == 4
    assert {item.label for item in items} == {0, 1, 2, 3}
    lines = [f"{item.question} {item.choices[item.label]}" for item in generate_arithmetic()]
    assert len(set(lines)) == len(lines) == 300
    assert not set(lines) & set(builtin_equations())


# --- two models


def score(right: bool, bits: float = 1.0, number: int = 0) -> ItemScore:
    values = (-bits, -2 * bits) if right else (-bits, -bits / 2)
    return ItemScore(id=str(number), label=0, log_probabilities=values, characters=(1, 1), bytes=(1, 1))


def test_paired_tests_are_those_of_the_textbook() -> None:
    answers = [(True, True)] * 5 + [(True, False)] * 9 + [(False, True)] * 2 + [(False, False)] * 4
    generator = np.random.default_rng(0)
    bits = generator.uniform(1, 2, (20, 2))
    first = [score(one, b, n) for n, ((one, _), (b, _)) in enumerate(zip(answers, bits, strict=True))]
    second = [score(other, b, n) for n, ((_, other), (_, b)) in enumerate(zip(answers, bits, strict=True))]
    found = compare_items(first, second)
    assert (found["acc"]["only_first"], found["acc"]["only_second"]) == (9, 2)
    assert found["acc"]["difference"] == pytest.approx(7 / 20)
    tail = sum(math.comb(11, k) for k in range(9, 12)) / 2**11
    assert found["acc"]["p_value"] == pytest.approx(2 * tail)
    expected = stats.ttest_rel(bits[:, 0], bits[:, 1])
    assert found["bits_per_byte"]["p_value"] == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert found["bits_per_byte"]["low"] == pytest.approx(interval.low / math.log(2))
    same = compare_items(first, first)
    assert same["acc"]["p_value"] == 1.0 and same["bits_per_byte"]["p_value"] == 1.0
    p, q = 10 / 22, 3 / 22
    assert found["acc"]["stderr"] == pytest.approx(math.sqrt((p + q - (p - q) ** 2) / 22))
    assert found["acc"]["high"] == pytest.approx(p - q + 1.959964 * found["acc"]["stderr"])
    agreed = compare_tasks({"a": first[:12]}, {"a": first[:12]}, {"a": "acc"})
    for each in (agreed["a"]["acc"], agreed["average"]):
        assert each["difference"] == 0.0 and -each["low"] == each["high"] == pytest.approx(1.959964 / math.sqrt(98))
    both = compare_tasks({"a": first, "b": first}, {"a": second, "b": first}, {"a": "acc", "b": "acc"})
    assert both["average"]["difference"] == pytest.approx(7 / 40)
    assert both["average"]["stderr"] == pytest.approx(
        math.hypot(found["acc"]["stderr"], both["b"]["acc"]["stderr"]) / 2
    )
    with pytest.raises(UserError, match="different items"):
        compare_items(first, second[:-1])


def test_scores_of_items_are_kept(tmp_path: Path) -> None:
    tasks = read_tasks(write_tasks(tmp_path / "tasks"))
    first = MultipleChoice(tasks=(dataclasses.replace(tasks[0], items=tasks[0].items[:1]),))
    for choice in (MultipleChoice(tasks=tasks), first):
        choice.measure(scorer_of(Oracle([])), lambda digest: tmp_path / digest)
    assert len(read_item_scores(tmp_path / first.digest)["arc_easy_validation"]) == 1
    kept = read_item_scores(tmp_path / MultipleChoice(tasks=tasks).digest)
    assert list(kept) == ["arc_easy_validation", "piqa_validation", "winogrande_validation"]
    assert list(kept["arc_easy_validation"]) == score_items(scorer_of(Oracle([])), tasks[0])


# --- bad input

GOOD = ITEMS["arc_easy"][0]
BAD = [
    ([{**GOOD, "label": None}], "label is None"),
    ([{key: value for key, value in GOOD.items() if key != "label"}], "label is None"),
    ([{**GOOD, "label": 3}], "label is 3"),
    ([{**GOOD, "label": "0"}], "label is '0'"),
    ([{**GOOD, "choices": ["one"]}], "at least two"),
    ([GOOD, {**GOOD, "choices": ["a", " "]}], "line 2"),
    ([{**GOOD, "question": " "}], "question is"),
    ([{"text": "no item"}], "no item of arc_easy"),
    ([], "holds no item"),
]


@pytest.mark.parametrize(("rows", "said"), BAD)
def test_a_line_that_is_no_item_is_named(rows: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        read_tasks(write_tasks(tmp_path, {"arc_easy": rows}))


def test_tasks_that_are_not_there_are_named(tmp_path: Path) -> None:
    write_tasks(tmp_path, {"winogrande": [{**GOOD, "question": "No blank"}]})
    for names, source, said in (
        (("arc_esy",), tmp_path, "did you mean arc_easy"),
        (("piqa",), tmp_path, "piqa_validation.jsonl"),
        (("piqa",), None, "--tasks"),
        ((), tmp_path / "nowhere", "no such directory"),
        ((), tmp_path, "no _"),
    ):
        with pytest.raises(UserError, match=said):
            read_tasks(source, names=names)
    with pytest.raises(UserError, match="no task"):
        read_tasks(tmp_path, split="test")


def test_the_scores_of_the_harness_were_the_same() -> None:
    root = Path(__file__).parents[1]
    rows = json.loads((root / "benchmarks/scorer_agreement.json").read_text())["rows"]
    compared = [row for row in rows if row["model"] != "known"]
    assert Counter(row["model"] for row in compared) == {"run": 7, "llama": 7, "small": 7}
    # Whole files have continuations of hundreds of nats, summed in fp32.
    assert all(row["largest_difference_in_nats"] < (2e-4 if row["model"] == "small" else 1e-4) for row in compared)
    assert all(row["other_answers"] == 0 and row.get("with_other_tokens", 0) == 0 for row in compared)
    assert all(row["ratio"] > 1 for row in compared if row["model"] != "small")
