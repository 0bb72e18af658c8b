"""A classifier from the encoder of another model: an autoencoder's for fine-tuning and linear probes, a classifier's.

The encoder is copied: patches, positions, tokens, blocks, closing. The head is copied where both classify into as many
classes, else it is a new one, drawn from the seed of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.models.vision import (
    ImageEncoderConfig,
    VisionTransformerConfig,
    build_vision_transformer,
    layer_of,
)

FREE = ("dropout", "drop_path", "residual_dtype", "compute_dtype")
"""Fields of an encoder that change neither its weights nor, up to rounding, its function in evaluation."""


def with_encoder_of(own: VisionTransformerConfig, source: ImageEncoderConfig) -> VisionTransformerConfig:
    """Return a classifier's configuration with the encoder of `source`, its attention norm open.

    Its head, its fields in `FREE` and its kind of positions stay: learned ones may start as sines and cosines.
    """
    fields = {each.name: getattr(source, each.name) for each in dataclasses.fields(ImageEncoderConfig)}
    kept = {name: getattr(own, name) for name in (*FREE, "positions")}
    distillation = isinstance(source, VisionTransformerConfig) and source.distillation
    return dataclasses.replace(own, **{**fields, **kept, "attention_norm": "auto", "distillation": distillation})


def continued_from(own: VisionTransformerConfig, source: ImageEncoderConfig) -> VisionTransformerConfig:
    """Return a classifier's configuration with the attention norm of `source`, if its own is open.

    Raises UserError where it cannot have the weights of `source`.
    """
    if own.attention_norm == "auto":
        own = dataclasses.replace(own, attention_norm=source.attention_shape.attention_norm)
    require_encoder(source, own)
    return own


def require_encoder(source: ImageEncoderConfig, target: VisionTransformerConfig) -> None:
    """Raise UserError unless a classifier of `target` can have the encoder of a model of `source`."""
    there, here = source.to_json(), target.to_json()
    for field in dataclasses.fields(ImageEncoderConfig):
        name = field.name
        learned = name == "positions" and here[name] == "learned"
        if name not in FREE and not learned and there[name] != here[name]:
            raise UserError(f"{name} of the model to start from is {there[name]}, not {here[name]}: leave it out")
    if source.tokens != target.tokens:
        raise UserError("the model to start from has no distillation token: leave --model.distillation out")


def classifier_weights(
    source: ImageEncoderConfig, weights: Mapping[str, Tensor], target: VisionTransformerConfig, seed: int
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the weights of a classifier of `target` that has the encoder of `source`, and what is new in it.

    Raises UserError as `require_encoder` does.
    """
    require_encoder(source, target)
    own = build_vision_transformer(target, seed=seed).state_dict()
    keeps_head = isinstance(source, VisionTransformerConfig) and source.classes == target.classes
    copied = {name: weights[name] for name in own if keeps_head or not _of_head(name)}
    return {**own, **copied}, () if keeps_head else (f"the head of {target.classes} classes is new",)


def layer_decay_factors(model: nn.Module, depth: int, decay: float) -> dict[str, float]:
    """Return the factor on the learning rate of each parameter: decay^(layers above it), 1 at the head.

    As BEiT and MAE fine-tune (arXiv 2106.08254, 2111.06377); layers are those of `layer_of`.
    """
    return {name: decay ** (depth + 1 - layer_of(name, depth)) for name, _ in model.named_parameters()}


def freeze_encoder(model: nn.Module) -> None:
    """Leave only the heads trainable: a linear probe."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_of_head(name))


def _of_head(name: str) -> bool:
    return name.partition(".")[0] in ("head", "distillation_head")
