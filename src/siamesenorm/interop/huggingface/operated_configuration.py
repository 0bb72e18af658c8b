"""The configuration of an operated model: its host's, a `model_type` of its own, and the steps that were done.

On disk nothing takes it for the host's: the type is unknown to plain transformers; and one number is written as text,
so that the host's own class, called by name, refuses it instead of drawing the norms that it misses at random. A short
file of code goes with it, by which `trust_remote_code=True` finds the classes of this package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from siamesenorm.interop.derived_class import made, original_class
from siamesenorm.interop.surgery import Step

PREFIX = "SiameseNorm"
"""Stands before the name of the host's class."""
TYPE_PREFIX = "siamesenorm-"
"""Stands before the host's `model_type`."""
MARK = "siamesenorm:"
"""Stands before a number of the configuration on disk."""
READ_BY_ANY = ("vocab_size", "num_hidden_layers")
"""Numbers that transformers compares in files of any type (the Trainer does, when it resumes): they stay numbers."""
REMOTE_CODE_MODULE = "modeling_siamesenorm_operated"
REMOTE_CODE = '''\
"""The classes of this model are made by the package siamesenorm, which has to be installed."""

from siamesenorm.interop.huggingface.operated import __getattr__  # noqa: F401
'''


class OperatedConfig:
    """Mixed in before a host's configuration; `siamesenorm` holds the steps."""

    siamesenorm: Sequence[Step] = ()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Build a configuration from what is on disk, or from the host's own fields and the steps."""
        given = {name: _unmarked(value) for name, value in config_dict.items() if name != "auto_map"}
        return super().from_dict(given, **options)  # type: ignore[misc]

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return the configuration as it stands on disk."""
        record = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        host = original_class(type(self))
        for name in _marked_fields(host):
            record[name] = MARK + json.dumps(record.get(name))
        names = {auto.__name__: PREFIX + kind.__name__ for auto, kind in host_classes(host).items()}
        names["AutoConfig"] = type(self).__name__
        record["auto_map"] = {auto: f"{REMOTE_CODE_MODULE}.{name}" for auto, name in names.items()}
        return json.dumps(record, indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write the configuration, and beside it the file of code that it names."""
        Path(json_file_path).with_name(f"{REMOTE_CODE_MODULE}.py").write_text(REMOTE_CODE)
        super().to_json_file(json_file_path, use_diff)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: saving writes the file of code, where transformers would copy this one."""


def operated_config(host: type) -> type[Any]:
    """Return the class of the configurations of operated models whose host has configurations of class `host`."""
    host = original_class(host)
    members = {
        "__doc__": f"A {host.__name__} with what was done to its model.",
        "__module__": "siamesenorm.interop.huggingface.operated",
        "model_type": f"{TYPE_PREFIX}{host.model_type}",  # type: ignore[attr-defined]
        "_auto_class": None,
    }
    return made(OperatedConfig, host, f"{PREFIX}{host.__name__}", members, (operated_config, (host,)))


def host_classes(config: type) -> dict[type[Any], type[Any]]:
    """Return the host's class for each Auto class that knows the host's class of configurations."""
    found: dict[type[Any], type[Any]] = {}
    for auto in vars(modeling_auto).values():
        if isinstance(auto, type) and issubclass(auto, _BaseAutoModelClass) and auto._model_mapping is not None:
            known = auto._model_mapping.get(config, None)
            kind = known[0] if isinstance(known, (tuple, list)) else known
            if kind is not None and kind.config_class is config:
                found[auto] = kind
    return found


def _marked_fields(host: type[Any]) -> list[str]:
    """Return one field of the host's own, as against all configurations, that must be a number, best a whole one."""
    common = {*READ_BY_ANY, *(field.name for field in fields(PreTrainedConfig))}
    own = [field for field in fields(host) if field.name not in common]
    whole = [field.name for field in own if field.type in (int, int | None)]
    return (whole or [field.name for field in own if field.type in (float, float | None)])[:1]


def _unmarked(value: Any) -> Any:
    return json.loads(value.removeprefix(MARK)) if isinstance(value, str) and value.startswith(MARK) else value
