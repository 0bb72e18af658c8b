"""Progress as people see it: plain lines in a pipe, a bar on a terminal."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.text import Text

from siamesenorm.cli import prepare as prepare_command
from siamesenorm.data import PrepareConfig, PrepareProgress
from siamesenorm.progress import ProgressDisplay, format_duration

Report = Callable[[PrepareProgress], None]


class Clock:
    """A clock for `time.monotonic` that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Replace standard error by a terminal; not a fixture, because pytest replaces it again before the test."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return terminal


def progress(position: int, stage: str = "tokens") -> PrepareProgress:
    return PrepareProgress(stage=stage, documents=1234, tokens=5_678_901, position=position, size=2_000_000)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (89, "89 s"),
        (90, "2 min"),
        (89 * 60, "89 min"),
        (90 * 60, "1 h 30 min"),
        (7199, "2 h 0 min"),
        (47 * 3600, "47 h 0 min"),
        (3 * 86400, "3 days"),
        (1.6e20, "more than 1,000 days"),
        (float("nan"), "more than 1,000 days"),
    ],
)
def test_durations_are_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_lines_come_now_and_then_with_speed_and_time_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(1000, 200, unit="tokens", line_seconds=10) as display:
        for seconds, done in ((0, 200), (5, 250), (10, 300), (15, 400), (16, 1000), (17, 1000)):
            clock.now = 100 + seconds
            display.update(done, f"step {done}")
    assert capsys.readouterr().err.splitlines() == [
        "step 200",
        # A hundred in ten seconds: the 200 that were done before do not count.
        "step 300, 10 tokens/s, 70 s left",
        # The end has a line whenever it comes, and only one.
        "step 1000, 50 tokens/s",
    ]


def test_unknown_totals_have_no_time_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(unit="tokens") as display:
        clock.now += 2
        display.update(10, "some")
    assert capsys.readouterr().err == "some, 5 tokens/s\n"


def report_to_command(monkeypatch: pytest.MonkeyPatch, work: Callable[[Report], None]) -> None:
    """Run the command with a preparation that only reports."""
    monkeypatch.setattr(prepare_command, "prepare", lambda config, report: work(report))
    prepare_command.prepare_with_progress(PrepareConfig(source="builtin", out=Path("nowhere")))


def test_a_stage_of_a_preparation_has_a_line_and_a_clock_of_its_own(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(report: Report) -> None:
        report(PrepareProgress(stage="training the tokenizer"))
        for seconds, position in ((1, 1_000_000), (4, 1_200_000), (2, 1_500_000)):
            clock.now += seconds
            report(progress(position))

    report_to_command(monkeypatch, work)
    assert capsys.readouterr().err.splitlines() == [
        "training the tokenizer",
        "tokens: 50% of 2.0 MB, 1,234 documents, 5,678,901 tokens",
        "tokens: 75% of 2.0 MB, 1,234 documents, 5,678,901 tokens, 6 s left",
    ]


def test_a_terminal_has_a_bar_and_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)

    def work(report: Report) -> None:
        report(progress(500_000))
        report(PrepareProgress(stage="tokens", documents=5))

    report_to_command(monkeypatch, work)
    assert "5 documents" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()
    display = ProgressDisplay(10, above=lambda: Text("a table"), keep=True)
    display.update(5, "half")
    display.line("a line [b]as it is[/b]")
    display.close()
    display.line("after the end")
    shown = terminal.getvalue()
    assert "a table" in shown and "half" in shown and "a line [b]as it is[/b]" in shown
    assert shown.endswith("after the end\n")


def test_a_dumb_terminal_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    ProgressDisplay(10).update(5, "half")
    assert terminal.getvalue().startswith("half") and "\x1b" not in terminal.getvalue()
