"""What a person sees of a preparation: plain lines in a pipe, a bar on a terminal."""

from __future__ import annotations

import io
import sys
import time

import pytest

from siamesenorm.data import Progress, show_progress


def progress(position: int, stage: str = "tokens") -> Progress:
    return Progress(stage=stage, documents=1234, tokens=5_678_901, position=position, size=2_000_000)


def test_lines_come_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([100.0, 100.0, 102.0, 110.0, 111.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    with show_progress() as report:
        for position in (0, 100_000, 500_000, 600_000):
            report(progress(position))
    assert capsys.readouterr().err.splitlines() == [
        "tokens: 0% of 2.0 MB, 1,234 documents, 5,678,901 tokens",
        # A quarter took ten seconds, so three quarters are left, and thirty seconds.
        "tokens: 25% of 2.0 MB, 1,234 documents, 5,678,901 tokens, 30 s left",
    ]


def test_a_new_stage_has_a_line_and_a_clock_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([0.0, 0.0, 1.0, 7.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    with show_progress() as report:
        report(Progress(stage="training the tokenizer"))
        report(progress(1_000_000))
        report(progress(1_500_000))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["training the tokenizer", "tokens", "tokens"]
    assert lines[-1].endswith("6 s left")


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with show_progress() as report:
        report(progress(500_000))
        report(Progress(stage="tokens", documents=5))
    assert "tokens: 1,234 documents, 5,678,901 tokens" in terminal.getvalue() or "5 documents" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()
