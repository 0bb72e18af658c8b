"""The three scales of the reproductions: what is trained at each of them in place of what the papers trained.

* mini: minutes per run on two cores; the language runs are those of `benchmarks/books`.
* small: one GPU that several runs share, about an hour an item by estimate; not run.
* full: the papers' own settings. They can be built and their cost estimated; none has been run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar, cast

from siamesenorm.errors import UserError
from siamesenorm.models.language import language_model_config
from siamesenorm.models.vision import vision_transformer_config
from siamesenorm.training import presets
from siamesenorm.training.config import Execution, RunConfig

Changes = Mapping[str, Any]
"""Values of a run's fields by their dotted names."""
BOOKS = "8e04f99f73fa1157ba5f8d75ae1cc49893a47e6b00e484d068565b3f78b89f8e"
"""Digest of the prepared books of `benchmarks/books`, whose vocabulary has 1,024 entries."""
GPU_SPEED = 4e14
"""Operations per second in estimates of the scales small and full: 40 % of an H100's dense bfloat16 peak."""
MINI_SPEED = 3.6e10
"""The same of a core at the scale mini: 905,969,664 operations per sample, of 6,400 samples in 160 s (median of the
committed runs of Pre-Norm and SiameseNorm, two at a time on two cores)."""


class Scale(StrEnum):
    """How much is trained."""

    MINI = "mini"
    SMALL = "small"
    FULL = "full"


RUNS_PER_GPU = {Scale.MINI: 1, Scale.SMALL: 6, Scale.FULL: 1}
"""Runs that share a GPU: one of the scale small leaves most of it idle."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained at one scale in one domain.

    Args:
        build: Returns the template of the runs for a path of data.
        changes: Values that differ from the template's.
        rates: Peak learning rates, in place of the paper's conservative, high and aggressive one where there are three.
        seeds: Seeds of runs at given rates; the first also chooses rates.
        weighted: Seeds whose runs have weights to evaluate: committed runs have none.
        shapes: Changes for models of about equal size and growing depth.
        data: The option that names the data; empty where the data is built in.
        digest: Digest of the data of the committed runs, which is used where no data is given.
        vocabulary: Entries of the vocabulary of that data.
        speed: Operations per second, measured or assumed, on which the estimated time is based.
    """

    build: Callable[[Any], RunConfig]
    changes: Changes = field(default_factory=dict)
    rates: tuple[float, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    weighted: tuple[int, ...] = (0, 1, 2)
    shapes: tuple[Changes, ...] = ()
    data: str = ""
    digest: str = "none"
    vocabulary: int = 0
    speed: float = GPU_SPEED

    def template(self, data: Any = None, execution: Execution | None = None) -> RunConfig:
        """Return the run of which the others are made; without data, with the digest of the committed runs."""
        run = changed(self.build(data if data is not None else self.data), self.changes)
        if data is None and self.data:
            run = changed(run, {"task.digest": self.digest})
            if getattr(run.task.model, "vocabulary", None) == 0:
                run = changed(run, {"task.model.vocabulary": self.vocabulary})
        return dataclasses.replace(run, execution=execution or run.execution).with_method("pre").resolved()


Config = TypeVar("Config")


def changed(config: Config, changes: Changes) -> Config:
    """Return a configuration with other values of the fields that dotted names say."""
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        inner = changed(getattr(config, first), {rest: value}) if rest else value
        config = dataclasses.replace(cast(Any, config), **{first: inner})
    return config


def _sized(size: str, tokens: float, **changes: Any) -> Changes:
    """Return the changes that make the paper's run one of a named size on so many tokens."""
    model = language_model_config(size)
    batch = 512 * 2048 // model.context
    return {"task.model": model, "batch": batch, "steps": math.ceil(tokens / (batch * model.context)), **changes}


def _shape(depth: int, dim: int, hidden: int) -> Changes:
    return {"task.model.depth": depth, "task.model.dim": dim, "task.model.hidden": hidden}


GPU = Execution(device="cuda", compile="on", checkpoint_every=200, keep_checkpoints=1)
SMALL_LANGUAGE: Changes = {
    **_shape(12, 384, 1024),
    **{"task.model.heads": 6, "task.model.context": 512, "task.validation_tokens": 2**20},
    **{"steps": 1200, "batch": 64, "precision": "bfloat16", "validation_every": 300},
    **{"optimizer.warmup_steps": 120, "execution": GPU},
}
MINI_LANGUAGE: Changes = {"task.model.dim": 96, "task.model.hidden": 256, "validation_every": 200}
BOOKS_DATA: dict[str, Any] = {"data": "data", "digest": BOOKS, "vocabulary": 1024, "speed": MINI_SPEED}

WORKLOADS: dict[str, dict[Scale, Workload]] = {
    "language": {
        Scale.MINI: Workload(
            build=presets.mini,
            changes=MINI_LANGUAGE,
            rates=(2e-3, 8e-3, 3e-2),
            weighted=(5, 6, 7),
            shapes=(_shape(4, 128, 344), {}, _shape(16, 64, 176), _shape(32, 48, 128)),
            **BOOKS_DATA,
        ),
        Scale.SMALL: Workload(
            build=presets.mini,
            changes=SMALL_LANGUAGE,
            rates=(1e-3, 3e-3, 1e-2),
            shapes=(_shape(6, 528, 1408), {}, _shape(24, 264, 704), _shape(48, 192, 512)),
            data="data",
            vocabulary=1024,
        ),
        Scale.FULL: Workload(
            build=presets.paper,
            rates=(4e-4, 1e-3, 2e-3),
            seeds=(0,),
            weighted=(0,),
            shapes=tuple(_sized(size, 12e9) for size in ("390m-l10", "390m-l17", "390m-l33", "390m-l80")),
            data="data",
        ),
    },
    "moe": {
        Scale.MINI: Workload(
            build=presets.mini_moe, changes={"validation_every": 150}, rates=(2e-3, 8e-3), **BOOKS_DATA
        ),
        Scale.SMALL: Workload(
            build=presets.mini_moe,
            changes={**SMALL_LANGUAGE, "task.model.hidden": 448, "task.model.experts": 16},
            rates=(1e-3, 3e-3),
            data="data",
            vocabulary=1024,
        ),
        Scale.FULL: Workload(
            build=presets.paper,
            changes=_sized("moe-15b-a2b", 100e9),
            rates=(4e-4, 1e-3),
            seeds=(0,),
            weighted=(0,),
            data="data",
        ),
    },
    "images": {
        Scale.MINI: Workload(
            build=presets.cifar,
            rates=(6e-4, 2e-3, 6e-3),
            data="images",
            digest="b15f5515113af88f53ea32784985e01f5bc860d98d3e0683a42197df33df3716",
            speed=MINI_SPEED,
        ),
        Scale.SMALL: Workload(
            build=presets.cifar,
            changes={
                **_shape(12, 192, 768),
                **{"task.model.heads": 3, "steps": 7800, "batch": 128, "optimizer.warmup_steps": 400},
                **{"precision": "bfloat16", "validation_every": 1560, "execution": GPU},
            },
            rates=(5e-4, 1e-3, 2e-3),
            data="images",
        ),
        Scale.FULL: Workload(build=presets.deit_s, rates=(1e-3,), seeds=(0,), weighted=(0,), data="images"),
    },
    "diffusion": {
        Scale.MINI: Workload(
            build=presets.mnist_dit,
            changes={"steps": 300},
            rates=(4e-3, 1.2e-2, 3.6e-2),
            data="drawings",
            digest="4c86eebdcd8f6c8ab4f7bbf0e2e59b31f93df3c4fb218b8be7efef8ab8f91dd3",
            speed=MINI_SPEED,
        ),
        Scale.SMALL: Workload(
            build=presets.mnist_dit,
            changes={"steps": 8000, "batch": 128, "optimizer.warmup_steps": 400, "execution": GPU},
            rates=(5e-4, 1e-3, 2e-3),
            data="drawings",
        ),
        Scale.FULL: Workload(build=presets.dit_l_4, rates=(1e-4,), seeds=(0,), weighted=(0,), data="drawings"),
    },
    "autoencoder": {
        Scale.MINI: Workload(build=presets.digits_mae, rates=(2e-3, 6e-3), speed=MINI_SPEED),
        Scale.FULL: Workload(build=presets.mae_b, rates=(2.4e-3,), seeds=(0,), weighted=(0,), data="images"),
    },
    "convnext": {
        Scale.FULL: Workload(build=presets.convnext_b, rates=(4e-3,), seeds=(0,), weighted=(0,), data="images"),
    },
}
"""What is trained, by domain and scale."""
WORKLOADS["vit-b"] = {
    **WORKLOADS["images"],
    Scale.FULL: dataclasses.replace(
        WORKLOADS["images"][Scale.FULL], changes={"task.model": vision_transformer_config("vit-b", drop_path=0.1)}
    ),
}
for _name, _size in {"olmoe": "olmoe-1.3b", "olmo2": "olmo2-1b"}.items():
    WORKLOADS[_name] = {
        **WORKLOADS["moe" if _name == "olmoe" else "language"],
        Scale.FULL: Workload(
            build=presets.paper,
            changes=_sized(_size, 500e9),
            rates=(4e-4,),
            seeds=(0,),
            weighted=(0,),
            data="data",
        ),
    }


def find_workload(domain: str, scale: Scale) -> Workload:
    """Return what is trained; raises UserError for a scale that the domain does not have."""
    scales = WORKLOADS[domain]
    if scale not in scales:
        raise UserError(f"no scale {scale} for {domain}: choose from {', '.join(scales)}")
    return scales[scale]
