"""The arguments of commands that train: the name of a preset, then overrides of its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from siamesenorm.errors import UserError
from siamesenorm.models.config import inherited_operator
from siamesenorm.norms import NormSpec
from siamesenorm.topologies import Topology, build_topology, topology_name
from siamesenorm.training.config import RunConfig
from siamesenorm.training.presets import SUMMARIES, presets
from siamesenorm.training.warm_start import start_defaults


@dataclasses.dataclass(frozen=True, slots=True)
class RunArguments:
    """The arguments of a command whose dataclass has a field `run`, a `RunConfig` with its prefix left out.

    Two options set the defaults of others, so they are read first: `--model.size`, and `--start` where the command has
    it: the model of that run.
    """

    command: Any

    def prepare(self, words: Sequence[str]) -> tuple[Any, list[str], tyro.constructors.ConstructorRegistry]:
        """Return the type that tyro reads, the words left for it, and how it reads topologies and norms."""
        size, rest = _take(words, "--model.size")
        start, _ = _take(words, "--start") if "start" in self.command.__dataclass_fields__ else (None, rest)
        runs = presets(tyro.MISSING)
        named = next((word for word in words if word in runs), None)
        if named is not None:
            runs[named] = _with_defaults(runs[named], size, start)
        kind = tyro.extras.subcommand_type_from_defaults(
            {name: self.command(run=run) for name, run in runs.items()},
            {name: f"{SUMMARIES[name]}{_sizes(run)}" for name, run in runs.items()},
            prefix_names=False,
        )
        return kind, rest, text_constructors(runs[named].task.model.norm if named else NormSpec())


def _with_defaults(run: RunConfig, size: str | None, start: str | None) -> RunConfig:
    if start is not None:
        if size is not None:
            raise UserError(f"--model.size {size}: the model is that of the run to start from: leave it out")
        return start_defaults(run, Path(start))
    return run if size is None else dataclasses.replace(run, task=run.task.of_size(size))


def _sizes(run: RunConfig) -> str:
    sizes = run.task.available_sizes
    return f"; --model.size sets the model's fields: {', '.join(sizes)}" if sizes else ""


def _take(words: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """Return the last value of an option, and the words without it; raises UserError for one without a value."""
    value, rest, given = None, [], iter(words)
    for word in given:
        if word == option or word.startswith(f"{option}="):
            _, equals, inline = word.partition("=")
            value = inline if equals else next(given, "")
            if not value:
                raise UserError(f"{option} has no value: write {option} VALUE")
        else:
            rest.append(word)
    return value, rest


def text_constructors(operator: NormSpec) -> tyro.constructors.ConstructorRegistry:
    """Return how tyro reads topologies and norms from text; a norm has eps and offset of `operator` unless given."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if isinstance(info.type, type) and issubclass(info.type, Topology):
            return tyro.constructors.PrimitiveConstructorSpec(
                nargs=1,
                metavar="NAME",
                instance_from_str=lambda words: build_topology(words[0]),
                is_instance=lambda value: isinstance(value, Topology),
                str_from_instance=lambda value: [topology_name(value)],
            )
        if info.type is NormSpec:
            return tyro.constructors.PrimitiveConstructorSpec(
                nargs=1,
                metavar="NAME",
                instance_from_str=lambda words: inherited_operator(operator, words[0]),
                is_instance=lambda value: isinstance(value, NormSpec),
                str_from_instance=lambda value: [str(value)],
            )
        return None

    return registry
