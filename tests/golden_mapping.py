"""How the official models' parameters map to ours, and how a case of `tests/golden` becomes one of our models.

Our parameters are pieces of the official ones: an official tensor is cut along one of its axes, in order, into tensors
of our shapes, plus a constant where the official code stores a gain less 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from siamesenorm import LanguageModel, build_language_model

DIRECTORY = Path(__file__).with_name("golden")


@dataclass(frozen=True)
class Cut:
    """Our names for the pieces of an official tensor, the axis along which it is cut, and what is added to it."""

    ours: tuple[str, ...]
    axis: int = 0
    offset: float = 0.0

    def pieces(self, official: Tensor, model: nn.Module) -> dict[str, Tensor]:
        """Return our tensors by name, in our shapes."""
        official = torch.atleast_1d(official)
        shapes = [model.get_parameter(name).shape for name in self.ours]
        widths = [shape.numel() * official.shape[self.axis] // official.numel() for shape in shapes]
        parts = official.split(widths, self.axis)
        return {name: part.reshape(shape) for name, part, shape in zip(self.ours, parts, shapes, strict=True)}


Mapping = dict[str, Cut]


@dataclass(frozen=True)
class Case:
    """Numbers of an official implementation, fp64 throughout."""

    description: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def load(cls, name: str) -> Case:
        """Read a case by its name."""
        return cls(json.loads((DIRECTORY / f"{name}.json").read_text()), load_file(DIRECTORY / f"{name}.safetensors"))

    def group(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors under a prefix ("param.", "grad.", "hidden."), without it."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len([name for name in self.tensors if name.startswith("param.") and name.endswith(".att_proj.weight")])


def olmo_model(case: Case, topology: str, **fields: Any) -> LanguageModel:
    """Return our model of an OLMo model's sizes, read from its tensors, in fp64."""
    parameters = case.group("param.transformer.")
    vocabulary, dim = parameters["wte.weight"].shape
    config = case.description["config"]
    heads = config.get("n_heads", 4)
    return build_language_model(
        "nano",
        topology=topology,
        norm=f"rmsnorm:eps={config.get('layer_norm_eps', 1e-5)}",
        attention_norm=attention_norm(parameters, dim // heads),
        depth=case.depth,
        dim=dim,
        heads=heads,
        kv_heads=config.get("n_kv_heads") or heads,
        hidden=parameters["blocks.0.ff_out.weight"].shape[1],
        vocabulary=vocabulary,
        rope_theta=float(config.get("rope_theta", 10_000)),
        tied=config.get("weight_tying", False),
        bias="blocks.0.att_proj.bias" in parameters,
        **fields,
    ).double()


def attention_norm(parameters: dict[str, Tensor], head_dim: int) -> str:
    """Return the name of the attention norm that an OLMo block's parameters belong to."""
    if "blocks.0.v_norm.weight" in parameters:
        return "qkv-head"
    if "blocks.0.q_norm.weight" in parameters:
        return "qk-head" if parameters["blocks.0.q_norm.weight"].numel() == head_dim else "qk"
    return "none"


def olmo_mapping(case: Case, norms: Mapping) -> Mapping:
    """Return the mapping of an OLMo model: its sublayers, and for the residual path `norms`.

    In `norms`, `{l}` stands for each block.
    """
    per_head = "head_" if attention_norm(case.group("param.transformer."), case_head_dim(case)) != "qk" else ""
    block = {
        "att_proj.weight": Cut(tuple(f"attention.{part}.weight" for part in ("query", "key", "value"))),
        "attn_out.weight": Cut(("attention.output.weight",)),
        "ff_proj.weight": Cut(("mlp.up.weight", "mlp.gate.weight")),
        "ff_out.weight": Cut(("mlp.output.weight",)),
        "q_norm.weight": Cut((f"attention.query_{per_head}norm.gain",)),
        "k_norm.weight": Cut((f"attention.key_{per_head}norm.gain",)),
        "v_norm.weight": Cut((f"attention.value_{per_head}norm.gain",)),
    }
    mapping = {
        "transformer.wte.weight": Cut(("embedding.weight",)),
        "transformer.ff_out.weight": Cut(("head.weight",)),
        **{
            f"transformer.blocks.{{l}}.{official}": Cut(tuple(f"blocks.{{l}}.{name}" for name in cut.ours), cut.axis)
            for official, cut in block.items()
        },
        **norms,
    }
    return {name: cut for name, cut in for_each_block(mapping, case.depth).items() if f"param.{name}" in case.tensors}


def case_head_dim(case: Case) -> int:
    """Return the width of a head."""
    heads: int = case.description["config"].get("n_heads", 4)
    return case.tensors["param.transformer.wte.weight"].shape[1] // heads


def for_each_block(mapping: Mapping, depth: int) -> Mapping:
    """Return the mapping with `{l}` replaced by each block's index, in official names and in ours.

    `{after_mlp}` is our name for what normalises after block l's MLP: the next block's reader, or the closing.
    """
    result = {}
    for official, cut in mapping.items():
        for index in range(depth if "{l}" in official else 1):
            reader = f"blocks.{index + 1}.attention_connection" if index + 1 < depth else "closing"
            ours = tuple(name.format(l=index, after_mlp=reader) for name in cut.ours)
            result[official.format(l=index)] = Cut(ours, cut.axis, cut.offset)
    return result


def load_parameters(model: nn.Module, case: Case, mapping: Mapping) -> None:
    """Give our model the official parameters; every one of theirs and every one of ours is used once."""
    official = case.group("param.")
    assert mapping.keys() == official.keys()
    state = {}
    for name, cut in mapping.items():
        pieces = cut.pieces(official[name] + cut.offset, model)
        assert not state.keys() & pieces.keys()
        state.update(pieces)
    model.load_state_dict(state, strict=True)


def expected_gradients(model: nn.Module, case: Case, mapping: Mapping) -> dict[str, Tensor]:
    """Return the official gradients under our names."""
    official = case.group("grad.")
    return {ours: g for name, cut in mapping.items() for ours, g in cut.pieces(official[name], model).items()}


def actual_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return our gradients by name."""
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
