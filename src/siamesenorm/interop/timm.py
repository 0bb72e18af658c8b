"""timm: registered names of models with another topology, and converted models that save and load in timm's own format.

Importing this module registers "siamesenorm_vit_tiny_patch16_224" and the like: timm's model of the rest of that name,
to train from scratch, with `topology` and `norm` as further arguments of `timm.create_model`. What is saved names
"siamesenorm_converted", or its registered name, as its architecture, which timm has only after this import.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
from timm.models import build_model_with_cfg, generate_default_cfgs, model_entrypoint, register_model, save_for_hf
from timm.models.vision_transformer import checkpoint_filter_fn  # by which position embeddings fit another size
from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewire import rewire
from siamesenorm.interop.stored_model import Step
from siamesenorm.interop.wiring import replay_steps, steps_of

PREFIX = "siamesenorm_"
CONVERTED = f"{PREFIX}converted"
SIZES = ("vit_tiny", "vit_small", "vit_base", "vit_large", "deit_tiny", "deit_small", "deit_base")
HOSTS = tuple(f"{size}_patch16_224" for size in SIZES)
TOPOLOGY = "siamese-post-pre:post_norm=lazy,readout=code"
"""The form of the released SiameseNorm DeiT (arXiv 2602.08064)."""
DATA = ("input_size", "fixed_input_size", "interpolation", "crop_pct", "mean", "std", "num_classes", "first_conv",
        "classifier")  # fmt: skip
"""What a registered name copies of its host's configuration: everything but weights and their origin."""

default_cfgs = generate_default_cfgs(
    {f"{PREFIX}{host}": {name: getattr(timm.get_pretrained_cfg(host), name) for name in DATA} for host in HOSTS}
)
__all__ = ["save_pretrained"]


def save_pretrained(model: nn.Module, directory: str | Path) -> None:
    """Save a converted model in timm's format with its steps; raises UserError for one that timm cannot build again."""
    steps = steps_of(model)
    if not steps:
        raise UserError(f"{type(model).__name__} was not converted: call siamesenorm.rewire first, or save_for_hf")
    if not hasattr(model, "_model_args"):  # where create_model notes its arguments
        raise UserError(f"{type(model).__name__} was not made by timm.create_model: timm could not build it again")
    architecture = str(model.pretrained_cfg["architecture"])  # type: ignore[index]
    arguments: dict[str, Any] = {"siamesenorm": steps}
    if not architecture.startswith(PREFIX):
        architecture, arguments = CONVERTED, {"host": architecture, **arguments}
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target) as written:
        config = {"pretrained_cfg": {"architecture": architecture}}
        save_for_hf(model, written, model_config=config, model_args=arguments, safe_serialization=True)
        for name in ("model.safetensors", "config.json"):  # the configuration last: without it nothing loads
            os.replace(Path(written, name), target / name)


def _entry_point(host: str, name: str) -> Callable[..., nn.Module]:
    def create(
        pretrained: bool = False,
        topology: str = TOPOLOGY,
        norm: str | None = None,
        siamesenorm: list[Step] | None = None,
        **options: Any,
    ) -> nn.Module:
        """Build the host, and rewire it or repeat the steps of a saved model."""
        if pretrained and not (options.get("pretrained_cfg") or options.get("pretrained_cfg_overlay")):
            raise UserError(f"{name} has no pretrained weights: create {host} with pretrained=True, and rewire it")

        def build(**arguments: Any) -> nn.Module:
            model: nn.Module = model_entrypoint(host)(pretrained=False, **arguments)
            if siamesenorm:
                replay_steps(model, siamesenorm)
            else:
                rewire(model, topology, preserve=False, norm=norm)
            return model

        features = {"out_indices": 3, "feature_cls": "getter"}
        built: nn.Module = build_model_with_cfg(
            build, name, pretrained, feature_cfg=features, pretrained_filter_fn=checkpoint_filter_fn, **options
        )
        return built

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"Build timm's {host} with the residual path of `topology` and the operator `norm`."
    return create


def siamesenorm_converted(
    pretrained: bool = False, host: str = "", siamesenorm: list[Step] | None = None, **options: Any
) -> nn.Module:
    """Build timm's model `host` and repeat the steps on it: the architecture that a saved converted model names."""
    if not host or not siamesenorm:
        raise UserError(f"{CONVERTED} is the architecture of saved models: load one with siamesenorm.from_pretrained")
    return _entry_point(host, CONVERTED)(pretrained, siamesenorm=siamesenorm, **options)


for _create in (siamesenorm_converted, *(_entry_point(host, f"{PREFIX}{host}") for host in HOSTS)):
    register_model(_create)
