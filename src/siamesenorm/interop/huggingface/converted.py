"""Converted models of Hugging Face: each gets a class of its own, "SiameseNorm" before its host's name.

The class builds the host and repeats the steps of its configuration; then transformers loads the weights. `register`
adds the classes to the Auto classes; importing this package does so for the families that `rewire` supports.

On disk the host's configuration is nested under "host", so that nothing takes the model for its host: the type is
unknown to plain transformers, and the host's own class finds null in place of a number that it needs. With
`trust_remote_code=True` a short file of code beside the weights imports the classes.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from siamesenorm.errors import UserError
from siamesenorm.interop.backbones import keep_recording
from siamesenorm.interop.block_families import MODEL_TYPES
from siamesenorm.interop.huggingface.configuration import OwnRemoteCode
from siamesenorm.interop.huggingface.modeling import is_initialised, mark_initialised, refill_constants
from siamesenorm.interop.rewired_blocks import RewiredBlock, derive, original_class, without
from siamesenorm.interop.stored_model import Step
from siamesenorm.interop.wiring import replay_steps, scale_drawn_weights
from siamesenorm.norms import DeclaredModule
from siamesenorm.norms.parameters import assign, declared_parameters

PREFIX = "SiameseNorm"
"""Precedes the name of the host's class."""
REWIRED = "Rewired"
"""Precedes the name of a backbone inside a converted model."""
TYPE_PREFIX = "siamesenorm-"
"""Precedes the host's `model_type`."""
HOST = "host"
"""The field of config.json with the host's configuration."""
REMOTE_CODE_MODULE = "modeling_siamesenorm_converted"
REMOTE_CODE = '''\
"""The classes of this model are made by the package siamesenorm, which has to be installed."""

from siamesenorm.interop.huggingface.converted import __getattr__  # noqa: F401
'''

COMMON = {
    "model_type", "transformers_version", "siamesenorm", "quantization_config",
    *(field.name for field in fields(PreTrainedConfig)),
}  # fmt: skip
"""Fields of config.json that every converted model has; the others are the host's own."""

# --- the configuration


class ConvertedConfig(OwnRemoteCode):
    """A host's configuration; `siamesenorm` holds the steps of the conversion."""

    siamesenorm: Sequence[Step] = ()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Build a configuration from the content of config.json, or from the host's own fields and the steps."""
        register(original_class(cls))
        nested = config_dict.get(HOST)
        own = {name: value for name, value in config_dict.items() if name not in (HOST, "auto_map")}
        if isinstance(nested, dict):
            own = {**{name: value for name, value in own.items() if value is not None}, **nested}
        return super().from_dict(own, **options)  # type: ignore[misc]

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return the content of config.json."""
        host = original_class(type(self))
        whole = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        record = {name: value for name, value in whole.items() if name in COMMON}
        if required := _required_number(host):
            record[required] = None
        # Without "model_type", by which transformers would find the host's configuration in here.
        record[HOST] = {name: value for name, value in whole.items() if name not in COMMON}
        names = {auto.__name__: PREFIX + kind.__name__ for auto, kind in host_classes(host).items()}
        names["AutoConfig"] = type(self).__name__
        record["auto_map"] = {auto: f"{REMOTE_CODE_MODULE}.{name}" for auto, name in names.items()}
        return json.dumps(record, indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write the configuration, and beside it the file of code that it names."""
        Path(json_file_path).with_name(f"{REMOTE_CODE_MODULE}.py").write_text(REMOTE_CODE)
        super().to_json_file(json_file_path, use_diff)  # type: ignore[misc]


def converted_config(host: type) -> type[Any]:
    """Return the class of the configurations of converted models whose host has configurations of class `host`."""
    host = original_class(host)
    name, model_type = f"{PREFIX}{host.__name__}", f"{TYPE_PREFIX}{host.model_type}"  # type: ignore[attr-defined]
    return derive(ConvertedConfig, host, name, converted_config, model_type=model_type)


def host_classes(config: type) -> dict[type[Any], type[Any]]:
    """Return the host's class for each Auto class with the host's class of configurations."""
    found: dict[type[Any], type[Any]] = {}
    for auto in vars(modeling_auto).values():
        is_auto_class = isinstance(auto, type) and issubclass(auto, _BaseAutoModelClass)
        if is_auto_class and (mapping := auto._model_mapping) is not None:
            known = mapping.get(config, None)
            kind = known[0] if isinstance(known, (tuple, list)) else known
            if kind is not None and kind.config_class is config:
                found[auto] = kind
    return found


def _required_number(host: type[Any]) -> str | None:
    """Return a field of the host's own configuration that must be a number, best a whole one."""
    own = [field for field in fields(host) if field.name not in COMMON]
    whole = [field.name for field in own if field.type is int]
    return next(iter(whole or [field.name for field in own if field.type is float]), None)


# --- the model


class ConvertedTransformersModel(OwnRemoteCode):
    """A converted model, which a configuration with steps builds from its host."""

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
        _set_class(self)

    @torch.no_grad()
    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Initialise what no checkpoint gave; new parameters and constants with the model itself, which comes last."""
        model: Any = self
        if module is model:
            if not is_initialised(model):
                for _, parameter, declaration in declared_parameters(model):
                    if not is_initialised(parameter):
                        dtype, device = parameter.dtype, parameter.device
                        assign(parameter, torch.tensor(declaration.initial, dtype=dtype, device=device))
                scale_drawn_weights(model, keep=is_initialised)
            refill_constants(model)
        super()._initialize_weights(module, is_custom_code)  # type: ignore[misc]


def converted_class(host: type) -> type[Any]:
    """Return the class of converted models whose host is of class `host`."""
    host = without(ConvertedTransformersModel, host)
    original: Any = original_class(host)
    name, config = f"{PREFIX}{original.__name__}", converted_config(original.config_class)
    return derive(ConvertedTransformersModel, host, name, converted_class, config_class=config)


def register(host: type) -> None:
    """Add converted models to the Auto classes that have configurations of class `host`."""
    config, original = converted_config(host), original_class(host)
    AutoConfig.register(config.model_type, config, exist_ok=True)
    host_type = original.model_type  # type: ignore[attr-defined]
    for auto, kind in host_classes(original).items():
        register_class(auto, converted_class(kind))
    if host_type in TOKENIZER_MAPPING_NAMES:
        TOKENIZER_MAPPING_NAMES[config.model_type] = TOKENIZER_MAPPING_NAMES[host_type]


def register_class(auto: type[Any], model: type[Any]) -> None:
    """Add a class of models to an Auto class."""
    auto.register(model.config_class, model, exist_ok=True)
    # By this list of names the Trainer decides whether a model shifts its labels, and a pipeline whether it fits.
    auto._model_mapping._model_mapping[model.config_class.model_type] = model.__name__


def register_families() -> None:
    """Register the configurations of tested families; reading one from a file registers its models."""
    for model_type in MODEL_TYPES:
        with suppress(KeyError):  # a family that this version of transformers lacks has no models either
            config = converted_config(CONFIG_MAPPING[model_type])
            AutoConfig.register(config.model_type, config, exist_ok=True)


def adopt(model: nn.Module, steps: Sequence[Step]) -> None:
    """Give a converted model the class that saves it as what it is, and a configuration of its own with the steps."""
    assert isinstance(model, PreTrainedModel)
    register(type(model.config))
    copies: dict[int, Any] = {}
    config = copy.deepcopy(model.config, copies)
    config.__class__ = converted_config(type(config))
    config.siamesenorm = copy.deepcopy(list(steps))
    config.name_or_path = ""  # that path holds another model
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                vars(module)[name] = copies[id(value)]
    model.name_or_path = ""
    if not any(parameter.is_meta for parameter in model.parameters()):
        mark_initialised(model)
    _set_class(model)


def _set_class(model: Any) -> None:
    """Set the class of a converted model, and register the new names of its parts with transformers."""
    model.__class__ = converted_class(type(model))
    keep_recording(model)
    rewired = {type(module).__name__ for module in model.modules() if isinstance(module, RewiredBlock)}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._no_split_modules = {*(module._no_split_modules or ()), *rewired}
        if isinstance(module, DeclaredModule):  # Gemma would take our RMSNorm, by its name, for its own
            mark_initialised(module)
    # Conversions between the names of a checkpoint and those of the host: files of this model have its own names.
    vars(model).pop("_weight_conversions", None)


def __getattr__(name: str) -> Any:
    """Return the class of converted models or configurations by its name, for stored models and remote code."""
    ours = name.startswith((PREFIX, REWIRED))
    host: Any = getattr(transformers, name.removeprefix(PREFIX).removeprefix(REWIRED), None) if ours else None
    is_config, is_model = (isinstance(host, type) and issubclass(host, c) for c in (PreTrainedConfig, PreTrainedModel))
    if not (is_config or is_model):
        raise AttributeError(f"no host of {name} in transformers {transformers.__version__}: use converted_class(host)")
    register(host if is_config else host.config_class)
    return converted_config(host) if is_config else converted_class(host)
