"""What `siamesenorm demo` trains: for each task a run, its data, and the methods and learning rates of a small grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from siamesenorm.training.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """A small comparison of methods that takes minutes on a CPU."""

    run: Callable[[Path], RunConfig]
    """Returns the run from which those of the grid are made, for the directory of its data."""
    methods: tuple[str, ...]
    learning_rates: tuple[float, ...]
    disk: str
    """The room that it takes."""
    source: str = ""
    """The text that is prepared as its data, if any."""
    out: str
    """Directory of data, runs and report."""


def language(data: Path) -> RunConfig:
    """Return the run of a small language model on bytes of prepared text."""
    from siamesenorm.models.language import language_model_config
    from siamesenorm.tasks.language import LanguageTaskConfig
    from siamesenorm.training.config import Execution, RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    model = language_model_config("mini", topology="pre", dim=96, hidden=256, vocabulary=0)
    return RunConfig(
        task=LanguageTaskConfig(data=data, model=model, validation_tokens=16_384),
        optimizer=OptimizerConfig(warmup_steps=40),
        steps=220,
        batch=8,
        validation_every=110,
        execution=Execution(threads=1),
    )


def classification(data: Path) -> RunConfig:
    """Return the run of a small vision Transformer on scikit-learn's digits, which need no data."""
    from siamesenorm.training.config import Execution
    from siamesenorm.training.presets import digits

    return dataclasses.replace(digits(data), execution=Execution(threads=1))


DEMOS: dict[str, Demo] = {
    "language": Demo(
        run=language,
        methods=("pre", "post", "hybridnorm", "siamese-post-pre", "siamese"),
        learning_rates=(2e-3, 8e-3, 3e-2),
        disk="about 75 MB",
        source="builtin",
        out="runs/demo",
    ),
    "classification": Demo(
        run=classification,
        methods=("pre", "post", "siamese-post-pre", "siamese"),
        learning_rates=(2e-3, 8e-3, 3e-2),
        disk="about 15 MB",
        out="runs/demo-classification",
    ),
}
"""The demos by task."""
