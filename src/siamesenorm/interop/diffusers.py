"""Save and load converted models of diffusers: each gets a class of its own, "SiameseNorm" before its host's name.

The saved configuration holds the steps, so that loading builds the host, repeats them, and then reads the weights; the
host's configuration is nested in it, under "host". Plain diffusers refuses it: the class name is unknown to it, and to
a DiT so is a `norm_type` of null. A pipeline finds the class once this module is imported. It records the classes of
its parts when it is built: build it after the conversion, or call
`pipeline.register_modules(transformer=pipeline.transformer)` before saving it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ModelMixin  # by this name a pipeline finds the loading of this module's classes
from diffusers.configuration_utils import ConfigMixin
from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewired_blocks import derive, original_class
from siamesenorm.interop.stored_model import Step
from siamesenorm.interop.wiring import replay_steps

PREFIX = "SiameseNorm"
HOST = "host"
"""The field of config.json with the host's configuration."""
COMMON = ("_class_name", "_diffusers_version", "_name_or_path", "siamesenorm", "quantization_config")
"""Fields of every converted model."""


def adopt(model: nn.Module, steps: Sequence[Step]) -> None:
    """Give a converted model the class that saves and loads it, and its configuration the steps."""
    assert isinstance(model, ModelMixin)
    model.__class__ = converted_class(type(model))
    model.register_to_config(siamesenorm=list(steps))


def converted_class(host: type) -> type:
    """Return the class of converted models whose host is of class `host`; one for each."""
    host = original_class(host)
    # The modules that stay in fp32 are cast after loading, since diffusers would need the meta device for them.
    members = {"__init__": _build_of(host), "_keep_in_fp32_modules": None}
    return derive(ConvertedDiffusersModel, host, f"{PREFIX}{host.__name__}", converted_class, **members)


class ConvertedDiffusersModel:
    """A converted model, which a configuration with the steps builds from its host."""

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> Any:
        """Load a saved model; `options` are those of diffusers' `from_pretrained`.

        The model is built with its constants, never on the meta device, where these would stay. Weights are safetensors
        unless the options say otherwise: diffusers would take a pickle where there are none. Raises UserError for a
        `device_map`, which needs the meta device.
        """
        if options.get("device_map") is not None:
            raise UserError("device_map: a converted model is built in memory: leave it out, and use .to()")
        options = {"use_safetensors": True, **options, "low_cpu_mem_usage": False}
        wide, dtype = vars(original_class(cls)).get("_keep_in_fp32_modules"), options.get("torch_dtype")
        if wide and dtype is not None:
            options["torch_dtype"] = torch.float32
        # Of ModelMixin itself: hosts that diffusers replaces by others look these up by the name of the class.
        loaded = ModelMixin.from_pretrained.__func__(cls, path, **options)
        if wide and dtype is not None:
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                if value.is_floating_point() and not set(wide) & set(name.split(".")):
                    value.data = value.data.to(dtype)
        return loaded

    @classmethod
    def from_config(cls, config: Any = None, **options: Any) -> Any:
        """Build a model from its configuration, never one of a class by which diffusers replaces the host."""
        return ConfigMixin.from_config.__func__(cls, config, **options)

    @classmethod
    def extract_init_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Return the arguments of `__init__` in the content of config.json or in a configuration in memory."""
        host = config_dict.get(HOST)
        own = {name: value for name, value in config_dict.items() if name in COMMON} if host else config_dict
        return super().extract_init_dict({**own, **(host or {})}, **options)  # type: ignore[misc]

    def to_json_string(self) -> str:
        """Return the content of config.json."""
        whole = json.loads(super().to_json_string())  # type: ignore[misc]
        record = {name: value for name, value in whole.items() if name in COMMON}
        record[HOST] = {name: value for name, value in whole.items() if name not in COMMON}
        record |= {"norm_type": None} if "norm_type" in whole else {}
        return json.dumps(record, indent=2, sort_keys=True) + "\n"


def _build_of(host: type) -> Any:
    """Return an `__init__` with the host's arguments, which diffusers reads off its signature, and the steps."""

    def build(self: Any, *, siamesenorm: Sequence[Step] = (), **options: Any) -> None:
        host.__init__(self, **options)  # type: ignore[misc]
        replay_steps(self, siamesenorm)
        self.register_to_config(siamesenorm=list(siamesenorm))

    steps = inspect.Parameter("siamesenorm", inspect.Parameter.KEYWORD_ONLY, default=())
    of_host = inspect.signature(host.__init__)  # type: ignore[misc]
    build.__signature__ = of_host.replace(parameters=[*of_host.parameters.values(), steps])  # type: ignore[attr-defined]
    return build


def __getattr__(name: str) -> Any:
    """Return the class of converted models by its name, by which stored models and pipelines find it."""
    host = getattr(diffusers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if not (isinstance(host, type) and issubclass(host, ModelMixin)):
        raise AttributeError(f"the host of {name} is none of diffusers {diffusers.__version__}: install a newer one")
    return converted_class(host)
