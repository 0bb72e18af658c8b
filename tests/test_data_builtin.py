"""The built-in corpus: deterministic English of the right size, with arithmetic that is right."""

from __future__ import annotations

import re
import sys
from itertools import islice

import pytest

from siamesenorm.data import builtin
from siamesenorm.errors import UserError

EQUATION = re.compile(r"Calculate (-?\d+) ([-+*/]) (\d+) = (-?\d+)")


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return list(builtin.builtin_documents())


def test_about_two_and_a_half_megabytes_of_documents_of_like_size(corpus: list[str]) -> None:
    assert 1_500_000 < sum(map(len, corpus)) < 4_000_000
    assert 1_000 < len(corpus) < 4_000
    assert all(document.strip() for document in corpus)


def test_the_reference_and_the_library_are_there(corpus: list[str]) -> None:
    text = "\n".join(corpus)
    assert 'The "assert" statement' in text
    assert any(document.startswith("Module json") and "JavaScript" in document for document in corpus)


def test_every_docstring_stands_once(corpus: list[str]) -> None:
    """Of long paragraphs, which nobody writes twice by accident, hardly any comes twice."""
    docstrings = [document for document in corpus if document.startswith("Module ")]
    paragraphs = [part for document in docstrings for part in document.split("\n\n") if len(part) > 200]
    assert len(paragraphs) > 500
    assert len(set(paragraphs)) > 0.95 * len(paragraphs)


def test_arithmetic_is_right_and_about_a_tenth(corpus: list[str]) -> None:
    documents = [document for document in corpus if EQUATION.match(document)]
    equations = [EQUATION.fullmatch(line) for document in documents for line in document.split("\n")]
    assert len(equations) == builtin.EQUATIONS
    exact = {"-": int.__sub__, "+": int.__add__, "*": int.__mul__}
    for match in equations:
        assert match is not None
        left, operator, right, result = int(match[1]), match[2], int(match[3]), int(match[4])
        # A quotient is checked by multiplying, for the corpus promises that it is whole.
        assert result * right == left if operator == "/" else exact[operator](left, right) == result
    share = sum(map(len, documents)) / sum(map(len, corpus))
    assert 0.05 < share < 0.15


def test_two_readings_agree(corpus: list[str]) -> None:
    assert list(islice(builtin.builtin_documents(), 250)) == corpus[:250]
    arithmetic = list(builtin._arithmetic_documents())
    assert arithmetic == corpus[-len(arithmetic) :]


def test_a_python_without_its_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match="pydoc_data"):
        next(builtin.builtin_documents())
