"""Save and load operated models of diffusers: each gets a class of its own, "SiameseNorm" before its host's name.

The saved configuration holds the steps, so that loading builds the host, repeats them, and then reads the weights. No
plain diffusers takes it for the host: the class name is unknown to it, and a DiT's `norm_type` names none it knows.
A pipeline finds the class once this module is imported. It notes the classes of its parts when it is built: build it
after the operation, or call `pipeline.register_modules(transformer=pipeline.transformer)` before saving it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
from diffusers import ModelMixin  # by this name a pipeline knows how to load what this module holds
from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.library import read_config, refuse_loading_info, require_whole, weights_file
from siamesenorm.interop.surgery import Step, replay_steps

PREFIX = "SiameseNorm"
MARK = "siamesenorm:"
"""Stands before `norm_type` in a configuration: DiTTransformer2DModel refuses norm types that it does not know."""


def adopt(model: nn.Module, steps: Sequence[Step]) -> None:
    """Give an operated model the class that saves and loads it, and its configuration the steps."""
    assert isinstance(model, ModelMixin)
    model.__class__ = operated_class(_host_of(type(model)))
    _record(model, steps)


def load(path: str | Path, **options: Any) -> nn.Module:
    """Return the operated model that `save_pretrained` wrote to a directory.

    `options` are those of diffusers' `from_pretrained`. Raises UserError for a directory that holds none, or other
    weights than its own.
    """
    refuse_loading_info(options)
    name = str(read_config(Path(path)).get("_class_name", ""))
    if not name.startswith(PREFIX):
        raise UserError(f"{path} holds no operated model of diffusers: its class is {name or 'not given'}")
    kind: Any = operated_class(_host_named(name))
    weights_file(Path(path))
    model, found = kind.from_pretrained(path, **{"local_files_only": True, **options}, output_loading_info=True)
    require_whole(Path(path), found)
    loaded: nn.Module = model
    return loaded


@cache
def operated_class(host: type) -> type:
    """Return the class of operated models whose host is of class `host`; one for each."""
    members = {"__doc__": f"An operated {host.__name__}.", "__module__": __name__, "__init__": _build_of(host)}
    return type(f"{PREFIX}{host.__name__}", (OperatedModel, host), members)


class OperatedModel:
    """Mixed in before a host's class: a configuration with the steps builds the operated model."""

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> Any:
        """Load a saved model; `options` are those of diffusers' `from_pretrained`.

        The model is built with its constants, never on the meta device, where these would stay. Weights are safetensors
        unless the options say otherwise: diffusers would take a pickle where there are none. Raises UserError for a
        `device_map`, which needs the meta device.
        """
        if options.get("device_map") is not None:
            raise UserError("device_map: operated models of diffusers are built in memory: leave it out, and use .to()")
        options = {"use_safetensors": True, **options, "low_cpu_mem_usage": False}
        return super().from_pretrained(path, **options)  # type: ignore[misc]


def _build_of(host: type) -> Any:
    """Return an `__init__` with the host's arguments, which diffusers reads off its signature, and the steps."""

    def build(self: Any, *, siamesenorm: Sequence[Step] = (), **options: Any) -> None:
        if "norm_type" in options:
            options["norm_type"] = options["norm_type"].removeprefix(MARK)
        host.__init__(self, **options)  # type: ignore[misc]
        replay_steps(self, siamesenorm)
        _record(self, siamesenorm)

    steps = inspect.Parameter("siamesenorm", inspect.Parameter.KEYWORD_ONLY, default=())
    of_host = inspect.signature(host.__init__)  # type: ignore[misc]
    build.__signature__ = of_host.replace(parameters=[*of_host.parameters.values(), steps])  # type: ignore[attr-defined]
    return build


def _record(model: Any, steps: Sequence[Step]) -> None:
    kind = model.config.get("norm_type")
    marked = {} if kind is None else {"norm_type": MARK + kind.removeprefix(MARK)}
    model.register_to_config(siamesenorm=list(steps), **marked)


def _host_of(kind: type) -> type:
    return kind.__mro__[2] if issubclass(kind, OperatedModel) else kind


def _host_named(name: str) -> type:
    host = getattr(diffusers, name.removeprefix(PREFIX), None)
    if not (isinstance(host, type) and issubclass(host, ModelMixin)):
        raise UserError(f"{name}: this diffusers ({diffusers.__version__}) has no {name.removeprefix(PREFIX)}")
    return host


def __getattr__(name: str) -> Any:
    """Return the class of operated models by its name: that is how pipelines ask for it."""
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return operated_class(_host_named(name))
    except UserError as reason:
        raise AttributeError(str(reason)) from reason
