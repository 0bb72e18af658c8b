"""siamesenorm train: one run, from a preset with overrides; the arguments of all commands that begin from one."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro
from typing_extensions import Doc

from siamesenorm.analysis.monitor_instrument import MonitorOptions
from siamesenorm.analysis.post_mortem import PostMortem
from siamesenorm.errors import UserError
from siamesenorm.evaluation.evaluation_instrument import EvaluationOptions
from siamesenorm.files import encode_json
from siamesenorm.models.transformer import inherited_operator
from siamesenorm.norms import NormSpec, available_norms
from siamesenorm.tasks import TASKS
from siamesenorm.topologies import Topology, available_topologies, build_topology, topology_name
from siamesenorm.training.config import RunConfig
from siamesenorm.training.console_and_trackers import Console, build_trackers
from siamesenorm.training.loop import train
from siamesenorm.training.presets import PRESETS, presets
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.slurm import IN_JOB, SlurmJob, require_slurm
from siamesenorm.training.warm_start import continue_run, start_defaults
from siamesenorm.world import is_first_process

SIZES = ", ".join(size for task in TASKS.values() for size in task.available_sizes)
Size = Annotated[str | None, tyro.conf.arg(name="model.size"), Doc(f"Size that sets the model's shape: {SIZES}.")]


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """A command that trains: a run with its prefix left out."""

    set_by: ClassVar[Mapping[str, str]] = {}
    """Options of a run that another option of the command sets, with that option."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    size: Size = None


@dataclass(frozen=True, slots=True)
class RunArguments:
    """The arguments of a `RunCommand`: the name of a preset, then overrides of its fields.

    Two options set the defaults of others, so they are read first: `--model.size`, and `--start` where the command has
    it, which sets the model to that of a finished run.
    """

    command: type[RunCommand]

    def prepare(self, words: Sequence[str]) -> tuple[Any, list[str], tyro.constructors.ConstructorRegistry]:
        """Return the type that tyro reads, the words, and how tyro reads topologies and norms."""
        for option, grid in self.command.set_by.items():
            if _value_of(words, option) is not None:
                raise UserError(f"{option}: every run has that of {grid}: leave it out")
        size = _value_of(words, "--model.size")
        start = _value_of(words, "--start") if "start" in self.command.__dataclass_fields__ else None
        runs = presets(tyro.MISSING)
        named = words[0] if words and words[0] in runs else None
        if named is not None:
            runs[named] = _with_defaults(runs[named], size, start)
        kind = tyro.extras.subcommand_type_from_defaults(
            {name: self.command(run=run) for name, run in runs.items()},
            {name: preset.summary for name, preset in PRESETS.items()},
            prefix_names=False,
        )
        return kind, list(words), text_constructors(runs[named].task.model.norm if named else NormSpec())


def _with_defaults(run: RunConfig, size: str | None, start: str | None) -> RunConfig:
    if start and size:
        raise UserError(f"--model.size {size}: the model is that of the run to start from: leave it out")
    if start:
        return start_defaults(run, Path(start))
    return dataclasses.replace(run, task=run.task.of_size(size)) if size else run


def _value_of(words: Sequence[str], option: str) -> str | None:
    """Return the last value of an option; the parser refuses an option without one."""
    found = [following for word, following in pairwise(words) if word == option]
    found += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return found[-1] if found else None


def text_constructors(operator: NormSpec) -> tyro.constructors.ConstructorRegistry:
    """Return how tyro reads topologies and norms from text; a norm has eps and offset of `operator` unless given."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if isinstance(info.type, type) and issubclass(info.type, Topology):
            return _from_text(Topology, available_topologies(), build_topology, topology_name)
        if info.type is NormSpec:
            return _from_text(NormSpec, available_norms(), lambda text: inherited_operator(operator, text), str)
        return None

    return registry


def _from_text(
    kind: type, names: Sequence[str], read: Callable[[str], Any], write: Callable[[Any], str]
) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(names)}}}",
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [write(value)],
    )


@dataclass(frozen=True, kw_only=True)
class Train(RunCommand):
    """Train one model, or resume it where it stopped."""

    start: Path | None = None
    """Directory of a finished run whose weights to start from, converted to --model.topology and --model.norm."""
    out: Path | None = None
    """Directory of the run; runs/<id> if not given."""
    monitor: MonitorOptions = MonitorOptions()
    """Streams, gradients and updates in the record."""
    evaluation: EvaluationOptions = EvaluationOptions()
    """Accuracy on multiple-choice tasks in the record."""
    json: bool = False
    """Print the verdict as JSON."""


Arguments = RunArguments(Train)


def run(arguments: Train) -> None:
    """Train, showing progress, and print the verdict."""
    start = arguments.start
    config = arguments.run.resolved() if start is None else continue_run(arguments.run, start)
    directory = arguments.out or Path("runs") / config.identity[:12]
    if config.execution.slurm and IN_JOB not in os.environ:
        require_slurm()
        RunDirectory(directory).prepare(config)
        job = SlurmJob(directory, ["-m", "siamesenorm", *sys.argv[1:]], config.execution.read_slurm_options())
        print(f"job {job.id} trains {directory}: siamesenorm runs {directory.parent} shows it")
        return
    watching = (*arguments.monitor.instruments(), *arguments.evaluation.instruments(config))
    instruments = (Console(), *build_trackers(config, directory), *watching, PostMortem())
    verdict = train(config, directory, instruments=instruments)
    if not is_first_process():
        return
    if arguments.json:
        print(encode_json(verdict.to_json()))
    else:
        print(f"{directory}: {verdict.sentence()}\n(siamesenorm report {directory} makes a page of it)")
