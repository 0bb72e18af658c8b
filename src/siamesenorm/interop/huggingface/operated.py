"""Operated models of Hugging Face: each gets a class of its own, "SiameseNorm" before its host's name.

The class builds the host and repeats on it the steps that its configuration holds; then weights are loaded into it. So
saving and loading are the library's own, in safetensors alone. `register` makes the classes known to the Auto classes;
importing this package does so for the families that `rewire` knows.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from siamesenorm.errors import UserError
from siamesenorm.interop.derived_class import made, original_class, without
from siamesenorm.interop.huggingface.initialisation import is_initialised, mark_initialised, refill_constants
from siamesenorm.interop.huggingface.operated_configuration import (
    PREFIX,
    host_classes,
    operated_config,
)
from siamesenorm.interop.library import refuse_loading_info, require_whole
from siamesenorm.interop.rewire.attention_norms import scale_drawn_weights
from siamesenorm.interop.rewire.block import RewiredBlock
from siamesenorm.interop.rewire.families import FAMILIES
from siamesenorm.interop.rewire.hidden_states import keep_recording
from siamesenorm.interop.surgery import Step, replay_steps
from siamesenorm.norms import DeclaredModule
from siamesenorm.norms.parameters import assign, declared_parameters

REWIRED = "Rewired"
"""Stands before the name of a backbone inside an operated model."""


class OperatedModel:
    """Mixed in before a host's class: a configuration with steps builds the operated model."""

    config: Any

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        """Build the host and repeat the steps on it; raises UserError for a configuration that holds none."""
        steps, kind = getattr(config, "siamesenorm", ()), type(config)
        if not steps:
            raise UserError(f"a {type(self).__name__} needs the steps that made it: its configuration holds none")
        self.__class__ = host = original_class(type(self))
        config.__class__ = original_class(kind)  # by its class a host with a head builds its backbone
        try:
            host.__init__(self, config, *args, **options)  # type: ignore[misc]
        finally:
            config.__class__ = kind
        replay_steps(self, steps)  # type: ignore[arg-type]
        _settle(self)

    @torch.no_grad()
    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Initialise what no checkpoint gave; new parameters and constants with the model itself, which comes last."""
        model: Any = self
        if module is model:
            if not is_initialised(model):
                _initialise_declared(model)
                scale_drawn_weights(model, keep=is_initialised)
            refill_constants(model)
        super()._initialize_weights(module, is_custom_code)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: saving writes the file of code, where transformers would copy this one."""


def _initialise_declared(model: nn.Module) -> None:
    for _, parameter, declaration in declared_parameters(model):
        if not is_initialised(parameter):
            assign(parameter, torch.tensor(declaration.initial, dtype=parameter.dtype, device=parameter.device))


def operated_class(host: type) -> type[Any]:
    """Return the class of operated models whose host is of class `host`."""
    host = without(OperatedModel, host)
    original: Any = original_class(host)
    members = {
        "__doc__": f"An operated {original.__name__}.",
        "__module__": __name__,
        "config_class": operated_config(original.config_class),
        "_auto_class": None,
    }
    return made(OperatedModel, host, f"{PREFIX}{original.__name__}", members, (operated_class, (host,)))


def register(host: type) -> None:
    """Make operated models known to the Auto classes that know configurations of class `host`."""
    config, original = operated_config(host), original_class(host)
    AutoConfig.register(config.model_type, config, exist_ok=True)
    host_type = original.model_type  # type: ignore[attr-defined]
    for auto, kind in host_classes(original).items():
        auto.register(config, operated_class(kind), exist_ok=True)
        # By this list of names the Trainer knows which models shift their labels, and pipelines which ones they take.
        auto._model_mapping._model_mapping[config.model_type] = operated_class(kind).__name__
    if host_type in TOKENIZER_MAPPING_NAMES:
        TOKENIZER_MAPPING_NAMES[config.model_type] = TOKENIZER_MAPPING_NAMES[host_type]


def register_families() -> None:
    """Register the hosts that `rewire` knows."""
    for module in sorted({block.rpartition(".")[0] for block in FAMILIES if block.startswith("transformers.")}):
        with suppress(ModuleNotFoundError):  # a family that this version of transformers lacks has no models either
            kinds = vars(importlib.import_module(module)).values()
            hosts = {kind.config_class: None for kind in kinds if isinstance(kind, type) and kind.__module__ == module
                     and issubclass(kind, PreTrainedModel)}  # fmt: skip
            for host in filter(None, hosts):
                register(host)


def adopt(model: nn.Module, steps: Sequence[Step]) -> None:
    """Give an operated model the class that saves and loads it, and a configuration of its own with the steps.

    The old configuration, which other models may share, is left as it is; so is its `name_or_path`, for what is there
    is not this model.
    """
    assert isinstance(model, PreTrainedModel)
    register(type(model.config))
    copies: dict[int, Any] = {}
    config = copy.deepcopy(model.config, copies)
    config.__class__ = operated_config(type(config))
    config.siamesenorm = copy.deepcopy(list(steps))
    config.name_or_path = ""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                vars(module)[name] = copies[id(value)]
    model.name_or_path = ""
    if not any(parameter.is_meta for parameter in model.parameters()):
        mark_initialised(model)
    _settle(model)


def _settle(model: Any) -> None:
    """Give a model that was operated on its class, and tell transformers what its parts are called now."""
    model.__class__ = operated_class(type(model))
    keep_recording(model)
    rewired = {type(module).__name__ for module in model.modules() if isinstance(module, RewiredBlock)}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._no_split_modules = {*(module._no_split_modules or ()), *rewired}
        if isinstance(module, DeclaredModule):  # Gemma would take our RMSNorm, by its name, for its own
            mark_initialised(module)
    # Conversions between the names of a checkpoint and those of the host: files of this model have its own names.
    vars(model).pop("_weight_conversions", None)


def load(path: str | Path, **options: Any) -> nn.Module:
    """Return the operated model that `save_pretrained` wrote to a directory.

    `options` are those of transformers' `from_pretrained`. Raises UserError for a directory that holds none, or other
    weights than its own.
    """
    refuse_loading_info(options)
    record = json.loads((Path(path) / "config.json").read_bytes())
    architecture = (record.get("architectures") or ["model of no named architecture"])[0]
    host = getattr(transformers, architecture.removeprefix(PREFIX).removeprefix(REWIRED), None)
    if not (isinstance(host, type) and issubclass(host, PreTrainedModel)):
        raise UserError(
            f"{path} is a {architecture}, whose host is none of transformers {transformers.__version__}: load it with "
            "operated_class(host).from_pretrained of siamesenorm.interop.huggingface"
        )
    register(host.config_class)  # type: ignore[arg-type]
    defaults: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "ignore_mismatched_sizes": True}
    if "torch_dtype" not in options:  # the old name of dtype, which gives way to the new one
        defaults["dtype"] = "auto"
    model, found = operated_class(host).from_pretrained(path, **{**defaults, **options}, output_loading_info=True)
    if options.get("ignore_mismatched_sizes"):
        found = {**found, "mismatched_keys": ()}
    require_whole(Path(path), found)
    loaded: nn.Module = model
    return loaded


def __getattr__(name: str) -> Any:
    """Return the class of operated models or configurations by its name: that is how remote code asks for it."""
    host = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if isinstance(host, type) and issubclass(host, PreTrainedConfig):
        register(host)
        return operated_config(host)
    if isinstance(host, type) and issubclass(host, PreTrainedModel):
        register(host.config_class)  # type: ignore[arg-type]
        return operated_class(host)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
