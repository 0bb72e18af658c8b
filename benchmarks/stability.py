"""What the stability tools cost: steps of the training loop with each of them and without, in turn.

    python benchmarks/stability.py    # writes stability.json and fills the table of docs/stability.md from it

One process with one thread. Times are those of the processor, which other processes on the machine disturb less than
the clock on the wall; a ratio is that of the medians.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pages import fill_tables
from siamesenorm.analysis.monitor_instrument import MonitorInstrument
from siamesenorm.analysis.post_mortem import PostMortem
from siamesenorm.benchmark.measurement import Timings, at_common_pace, milliseconds, ratio
from siamesenorm.benchmark.results import Results, Row
from siamesenorm.training.loop import Instrument, TrainingLoop
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.run_record import MetricsLog
from siamesenorm.world import ALONE

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))
from training_runs import tiny_run, write_data  # type: ignore[import-not-found]  # noqa: E402

FILE, PAGE = HERE / "stability.json", HERE.parent / "docs/stability.md"
NOTHING = "nothing"
TOOLS: dict[str, tuple[dict[str, float], tuple[type[Instrument], ...]]] = {
    NOTHING: ({}, ()),
    "skipping": ({"skip_above": 1e6}, ()),
    "post-mortem": ({}, (PostMortem,)),
    "monitored step": ({}, (MonitorInstrument,)),
}
"""Options of the optimizer and instruments of each."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model, the batch, and how often each step is taken; `every` is the interval of monitored steps."""

    topology: str = "siamese"
    depth: int = 4
    dim: int = 256
    heads: int = 4
    hidden: int = 704
    vocabulary: int = 1024
    context: int = 256
    batch: int = 2
    rounds: int = 30
    every: int = 50
    candidates: tuple[str, ...] = ("plain", "compiled")


class Step:
    """A training loop, one step at a time."""

    def __init__(self, tool: str, candidate: str, settings: Settings, directory: Path) -> None:
        optimizer, kinds = TOOLS[tool]
        shape = ("topology", "depth", "dim", "heads", "hidden", "vocabulary", "context")
        config = tiny_run(
            directory / "data",
            model={name: getattr(settings, name) for name in shape},
            batch=settings.batch,
            steps=10**6,
            optimizer={"learning_rate": 1e-4, **optimizer},
            execution={"compile": "on" if candidate == "compiled" else "off"},
        )
        run = RunDirectory(directory / f"{tool}-{candidate}")
        run.prepare(config)
        instruments = tuple(kind(1) if kind is MonitorInstrument else kind() for kind in kinds)
        self.loop, self.step, self.instruments = TrainingLoop(config, run, ALONE, instruments), 0, instruments
        self.loop.log, self.loop.clock = MetricsLog(run.metrics_file), time.perf_counter()
        for instrument in instruments:
            instrument.on_start(self.loop, 0)

    def run(self) -> float:
        """Take the next step, and return the processor's seconds."""
        self.step, begin = self.step + 1, time.process_time()
        self.loop._train_step(self.step)
        return time.process_time() - begin

    def close(self) -> None:
        """Close the record and the instruments: a monitor that is measuring keeps compiled code from running."""
        self.loop.log.close()
        for instrument in self.instruments:
            instrument.close()


def measure(settings: Settings) -> list[Row]:
    """Return a row for every tool and candidate."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for candidate in settings.candidates:
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as name:
            write_data(Path(name) / "data")
            steps = {tool: Step(tool, candidate, settings, Path(name)) for tool in TOOLS}
            timings: Timings = {tool: [] for tool in TOOLS}
            tools = list(TOOLS)
            for number in range(-3, settings.rounds):
                for tool in tools[number % len(tools) :] + tools[: number % len(tools)]:
                    seconds = steps[tool].run()
                    if number >= 0:
                        timings[tool].append(seconds)
            for each in steps.values():
                each.close()
        rows += rows_of(candidate, at_common_pace(timings), settings.every)
    return rows


def rows_of(candidate: str, timings: Timings, every: int) -> list[Row]:
    """Return the rows of a candidate; of monitored steps also what one in so many adds to the time of all."""
    rows: list[Row] = []
    for tool in timings:
        row: Row = {"blocks": candidate, "tool": tool, "step_ms": milliseconds(timings, tool)}
        row["to_nothing"] = found = ratio(timings, tool, NOTHING)
        if tool == "monitored step":
            row[f"percent_every_{every}"] = {name: 100 * (value - 1) / every for name, value in found.items()}
        rows.append(row)
    return rows


def main() -> None:
    """Measure, write the file and fill the page."""
    settings, load = Settings(), [os.getloadavg()[0]]
    rows = measure(settings)
    recorded = {**asdict(settings), "load_average_before_and_after": [*load, os.getloadavg()[0]]}
    Results(benchmark="stability", device="cpu", settings=recorded, rows=rows).show(FILE)
    PAGE.write_text(fill_tables(PAGE.read_text(), PAGE.parent))


if __name__ == "__main__":
    main()
