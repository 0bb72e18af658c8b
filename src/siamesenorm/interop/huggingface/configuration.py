"""The configuration of a native model as transformers holds it: the same fields, by their own and the usual names."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from siamesenorm.interop.native_models import AUTO_MAP, DIGEST, MODEL_TYPE, REMOTE_CODE, REMOTE_CODE_FILE
from siamesenorm.models.language import LanguageModelConfig
from siamesenorm.norms import NormSpec
from siamesenorm.topologies import build_topology, topology_from_json

FIELDS = tuple(field.name for field in dataclasses.fields(LanguageModelConfig))


class OwnRemoteCode:
    """Mixed in before a class of transformers whose saving writes the file of code that config.json names."""

    _auto_class: ClassVar[str | None] = None

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: transformers would copy the file of the class."""


class SiameseNormConfig(OwnRemoteCode, PreTrainedConfig):
    """A `LanguageModelConfig` for transformers: its fields, resolved, and those of `PreTrainedConfig`.

    `topology` and `norm` are texts ("dhc-2:streams=4"), what their `to_json` gives, or the objects; they are kept as
    JSON. `seed` is that of the weights that a new model draws; None draws one from torch's generator. `rope_parameters`
    scale the rotation as elsewhere in transformers. Raises UserError for a model that cannot be built.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim", "intermediate_size": "hidden", "num_hidden_layers": "depth",
        "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
        "vocab_size": "vocabulary", "max_position_embeddings": "context", "tie_word_embeddings": "tied",
    }  # fmt: skip
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "embedding": "free_full_weight", "blocks.*": "free_full_weight", "closing": "keep_full_weight",
    }  # fmt: skip
    # Declared, or transformers takes them for parameters of generation.
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    seed: int | None = None
    rope_parameters: dict[str, Any] | None = None

    def __init__(self, **fields: Any) -> None:
        fields = {self.attribute_map.get(name, name): value for name, value in fields.items()}
        self.rope_parameters = dict(fields.pop("rope_parameters", None) or fields.pop("rope_scaling", None) or {})
        if "rope_theta" in self.rope_parameters:
            fields["rope_theta"] = self.rope_parameters["rope_theta"]
        record = _native({name: fields.pop(name) for name in FIELDS if name in fields}).to_json()
        others = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "seed")
        for name in FIELDS:
            setattr(self, name, record[name])
        for name in others:
            setattr(self, name, fields.pop(name, getattr(type(self), name)))
        fields.pop(DIGEST, None)  # of the file that was read; other weights may be saved
        super().__init__(**{**fields, "auto_map": dict(AUTO_MAP)})

    @classmethod
    def from_native(cls, config: LanguageModelConfig, **options: Any) -> Self:
        """Return the configuration of a native model; `options` are the other arguments of the class."""
        return cls(**{name: getattr(config, name) for name in FIELDS}, **options)

    def to_native(self) -> LanguageModelConfig:
        """Return the configuration of the native model; raises UserError for one that cannot be built."""
        return _native({name: getattr(self, name) for name in FIELDS})

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """The plan of tensor parallelism: heads and hidden units are divided, experts and the residual path are not."""
        attention, plan = self.to_native().attention_shape, {"embedding": "embedding_rowwise"}
        # A norm over the whole width needs all heads.
        columns, rows = ("colwise_gather_output", "rowwise_split_input") if attention.attention_norm == "qk" else (
            "colwise", "rowwise"
        )  # fmt: skip
        plan |= {f"blocks.*.attention.{name}": columns for name in ("query", "key", "value")}
        plan["blocks.*.attention.output"] = rows
        norms = {"qk-head": ("query", "key"), "qkv-head": ("query", "key", "value")}.get(attention.attention_norm, ())
        for name in (*norms, *(["context"] if attention.context_norm else [])):
            plan[f"blocks.*.attention.{name}_head_norm"] = "replicated_with_grad_allreduce"
        if not self.experts:
            gated = ("up", "gate") if self.activation == "swiglu" else ("up",)
            plan |= {f"blocks.*.mlp.{name}": "colwise" for name in gated} | {"blocks.*.mlp.output": "rowwise"}
        return plan

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write config.json, and beside it the file of code that it names."""
        Path(json_file_path).with_name(REMOTE_CODE_FILE).write_text(REMOTE_CODE)
        super().to_json_file(json_file_path, use_diff)


def _native(fields: dict[str, Any]) -> LanguageModelConfig:
    """Return the native configuration of fields, whose topology and norm are objects, texts or JSON."""
    readers: dict[str, tuple[Any, Any]] = {
        "topology": (build_topology, topology_from_json),
        "norm": (NormSpec.parse, NormSpec.from_json),
    }
    for name, (parse, from_json) in readers.items():
        if isinstance(fields.get(name), str):
            fields[name] = parse(fields[name])
        elif isinstance(fields.get(name), dict):
            fields[name] = from_json(fields[name])
    return LanguageModelConfig(**fields)
