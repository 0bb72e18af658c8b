"""Weights of a DiT of diffusers in the diffusion Transformer of this library, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")

from siamesenorm import build_topology  # noqa: E402
from siamesenorm.errors import UserError  # noqa: E402
from siamesenorm.interop.native_weights import foreign_fields, foreign_state, load_foreign_weights  # noqa: E402
from siamesenorm.models.diffusion import (  # noqa: E402
    DiffusionTransformer,
    DiffusionTransformerConfig,
    build_diffusion_transformer,
)


def dit(seed: int = 0, **changes: Any) -> nn.Module:
    """Return a model of diffusers whose every parameter is random: an embedding of its own in each block."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 3, "out_channels": 6, "num_layers": 2,
        "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 5, "norm_eps": 1e-6,
    }  # fmt: skip
    model = diffusers.DiTTransformer2DModel(**{**options, **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    return model


def share_embedding(model: Any) -> None:
    """Give every block the embedding of the first, as the published models have it."""
    first = model.transformer_blocks[0].norm1.emb.state_dict()
    for block in model.transformer_blocks:
        block.norm1.emb.load_state_dict(first)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1)),
        torch.tensor([0, 417, 999]),
        torch.tensor([4, 5, 0]),
    )


def ours(model: Any) -> DiffusionTransformer:
    config = DiffusionTransformerConfig(**foreign_fields(model))
    return build_diffusion_transformer(config, seed=3).eval()


@torch.no_grad()
def outputs(model: nn.Module) -> Tensor:
    if isinstance(model, DiffusionTransformer):
        found = model(*inputs())
        return found.noise if found.variance is None else torch.cat((found.noise, found.variance), dim=1)
    output: Tensor = model(*inputs()).sample
    return output


@pytest.mark.parametrize("shared", [False, True], ids=["an embedding a block", "one embedding"])
def test_outputs_are_those_of_diffusers(shared: bool) -> None:
    theirs = dit()
    if shared:
        share_embedding(theirs)
    native = ours(theirs)
    assert native.config.condition_embeddings == ("shared" if shared else "per-block")
    load_foreign_weights(native, theirs)
    expected = outputs(theirs)
    assert expected.std() > 0.1
    torch.testing.assert_close(outputs(native), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True], ids=["an embedding a block", "one embedding"])
def test_and_back(shared: bool) -> None:
    source = dit(7)
    if shared:
        share_embedding(source)
    native = ours(source)
    with torch.no_grad():
        for parameter in native.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    theirs = dit(9)
    theirs.load_state_dict(foreign_state(native))
    torch.testing.assert_close(outputs(theirs), outputs(native), rtol=1e-4, atol=1e-5)


def test_noise_alone_without_a_learned_variance() -> None:
    theirs = dit(out_channels=3)
    native = ours(theirs)
    load_foreign_weights(native, theirs)
    torch.testing.assert_close(outputs(native), outputs(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"norm_eps": 1e-5}, {"activation_fn": "gelu"}, {"attention_bias": False}])
def test_models_of_another_function_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refusal:
        foreign_fields(dit(**changes))
    assert "\n" not in str(refusal.value)


def test_the_eps_that_is_asked_for_is_enough() -> None:
    theirs = dit(norm_eps=1e-5)
    for block in theirs.transformer_blocks:
        block.norm3.eps = 1e-6
    assert foreign_fields(theirs)["depth"] == 2


def test_models_of_another_form_are_refused() -> None:
    theirs = dit()
    config = DiffusionTransformerConfig(**foreign_fields(theirs))
    for changes in ({"topology": build_topology("siamese")}, {"frequencies": "dit"}, {"depth": 1}, {"classes": 6}):
        native = build_diffusion_transformer(dataclasses.replace(config, **{"attention_norm": "auto", **changes}))
        before = {name: tensor.clone() for name, tensor in native.state_dict().items()}
        with pytest.raises(UserError):
            load_foreign_weights(native, theirs)
        assert all(torch.equal(tensor, before[name]) for name, tensor in native.state_dict().items())
    with pytest.raises(UserError):
        foreign_state(build_diffusion_transformer(dataclasses.replace(config, frequencies="dit")))
