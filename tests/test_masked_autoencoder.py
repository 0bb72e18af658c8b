"""The masked autoencoder: what encoder and decoder read, for every topology, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from siamesenorm import available_topologies, build_topology
from siamesenorm.errors import UserError
from siamesenorm.models.cost import count_parameters
from siamesenorm.models.masked_autoencoder import (
    MaskedAutoencoder,
    MaskedAutoencoderConfig,
    build_masked_autoencoder,
    masked_autoencoder_config,
)
from siamesenorm.models.vision import VisionTransformerConfig, build_vision_transformer, cut
from siamesenorm.norms import NormSpec

TINY = MaskedAutoencoderConfig(
    depth=2, dim=16, heads=2, hidden=24, image_size=6, patch_size=2, channels=3, bias=True, mask_ratio=0.5,
    decoder_depth=1, decoder_dim=12, decoder_heads=3, decoder_hidden=16,
)  # fmt: skip
VISIBLE = torch.tensor([[7, 0, 4, 2, 5], [3, 1, 8, 6, 2]])


def model_of(**changes: Any) -> MaskedAutoencoder:
    return build_masked_autoencoder(dataclasses.replace(TINY, **changes)).double()


def images() -> Tensor:
    return torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", available_topologies())
def test_every_topology_reads_the_visible_patches_alone_and_trains_every_parameter(topology: str) -> None:
    """Hidden pixels and the order of the visible patches change nothing; visible pixels change all predictions."""
    model = model_of(topology=build_topology(topology), pooling="mean" if topology == "pre" else "token")
    with torch.no_grad():  # at its start, ReZero's attention adds nothing
        for parameter in model.parameters():
            parameter += 0.1
    before = model(images(), VISIBLE).logits
    assert before.shape == (2, 9, 12)
    shown = torch.zeros(2, 9, 1, dtype=torch.bool).scatter(1, VISIBLE.unsqueeze(-1), True)
    noise = cut(torch.randn(2, 3, 6, 6, dtype=torch.float64), 2).masked_fill(shown, 0.0)
    changed = torch.nn.functional.fold((cut(images(), 2) + noise).transpose(1, 2), (6, 6), 2, stride=2)
    torch.testing.assert_close(model(changed, VISIBLE.flip(1)).logits, before, rtol=0, atol=1e-12)
    other = model(images().flip(0), VISIBLE).logits
    assert ((other - before).abs().amax(dim=-1) > 1e-9).all()
    before.square().mean().backward()
    assert not [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]


def test_the_decoder_reads_mask_tokens_and_encoded_patches_at_their_places() -> None:
    model = model_of()
    seen: list[Tensor] = []
    model.decoder.opening.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    encoded = torch.randn(2, 1 + 5, 16, dtype=torch.float64)
    model.decoder(encoded, VISIBLE)
    embedded = model.decoder.input(encoded)
    torch.testing.assert_close(seen[0][:, 0], embedded[:, 0])
    read = seen[0][:, 1:] - model.decoder.position.weight
    for row in range(2):
        for patch in range(9):
            where = (VISIBLE[row] == patch).nonzero()
            expected = embedded[row, 1 + int(where)] if len(where) else model.decoder.mask_token.weight[0]
            torch.testing.assert_close(read[row, patch], expected)


def test_positions_are_sines_and_cosines_of_column_and_row() -> None:
    """As in the paper's code: the first half of the width is the column, the second the row."""
    model = build_masked_autoencoder(dataclasses.replace(TINY, token_position=True))
    weight = model.position.weight
    assert not weight.requires_grad and torch.equal(weight[0], torch.zeros(16))
    for patch in (0, 5, 7):
        row, column = divmod(patch, 3)
        for axis, where in enumerate((column, row)):
            for index in range(4):
                angle = where / 10_000 ** (index / 4)
                found = weight[1 + patch, 8 * axis + index], weight[1 + patch, 8 * axis + 4 + index]
                assert [float(each) for each in found] == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-6)
    assert model.decoder.position.weight.shape == (9, 12) and not model.decoder.position.weight.requires_grad


def test_the_encoder_starts_as_a_vision_transformer_and_the_decoder_with_weights_of_its_own() -> None:
    shared = {each.name: getattr(TINY, each.name) for each in dataclasses.fields(VisionTransformerConfig)
              if each.name not in ("classes", "distillation")}  # fmt: skip
    same = dataclasses.replace(TINY, decoder_dim=16, decoder_heads=2, decoder_hidden=24)
    encoder, whole = build_vision_transformer(VisionTransformerConfig(**shared)), build_masked_autoencoder(same)
    weights = whole.state_dict()
    copied = {name: each for name, each in encoder.state_dict().items() if not name.startswith("head")}
    assert copied.keys() <= weights.keys()
    assert all(torch.equal(each, weights[name]) for name, each in copied.items())
    up = "blocks.0.mlp.up.weight"
    assert weights[up].shape == weights[f"decoder.{up}"].shape
    assert not torch.equal(weights[up], weights[f"decoder.{up}"])


def test_the_published_size_has_the_published_number_of_parameters() -> None:
    """MAE with ViT-B has 111.9 million, fixed positions included."""
    config = masked_autoencoder_config("mae-b", topology="pre")
    assert (config.visible, config.masked) == (49, 147)
    assert count_parameters(build_masked_autoencoder(config, device="meta"))[0] == pytest.approx(111.9e6, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"mask_ratio": 0.0}, "0.0"),
        ({"mask_ratio": float("nan")}, "nan"),
        ({"mask_ratio": float("inf")}, "inf"),
        ({"mask_ratio": 0.99}, "0.99"),
        ({"patch_size": 4}, "4"),
        ({"decoder_heads": 5}, "5"),
        ({"decoder_dim": 6, "decoder_heads": 2}, "6"),
        ({"decoder_depth": 0}, "0"),
        ({"topology": build_topology("siamese"), "attention_norm": "qk"}, "qkv-head"),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], value: str) -> None:
    with pytest.raises(UserError, match=value):
        dataclasses.replace(TINY, **changes)


def test_a_configuration_survives_json() -> None:
    config = dataclasses.replace(TINY, topology=build_topology("dhc-2:streams=4"), norm=NormSpec("seednorm")).resolved()
    assert MaskedAutoencoderConfig.from_json(config.to_json()) == config
