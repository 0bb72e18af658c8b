"""timm's registry, files and `create_model` with models of this library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.data import resolve_model_data_config
from torch import nn
from vision_models import DIM, IMAGES, SMALL, build_host, moved

import siamesenorm
from siamesenorm import rewire
from siamesenorm.errors import UserError
from siamesenorm.interop import timm as interop
from siamesenorm.interop.wiring import steps_of
from siamesenorm.norms import RMSNorm
from siamesenorm.topologies import build_topology, topology_from_json

NAME = "siamesenorm_vit_tiny_patch16_224"


def topology_of(model: nn.Module) -> Any:
    [step] = steps_of(model)
    return topology_from_json(step["topology"])


# --- names


@pytest.mark.parametrize("host", interop.HOSTS)
def test_a_name_is_its_host_with_another_residual_path(host: str) -> None:
    name = f"siamesenorm_{host}"
    assert name in timm.list_models("siamesenorm_*")
    with torch.device("meta"):
        model, plain = timm.create_model(name, depth=2), timm.create_model(host, depth=2)
    sublayers = {key for key in plain.state_dict() if not key.startswith(("norm.", "blocks.0.norm", "blocks.1.norm"))}
    assert sublayers <= model.state_dict().keys()
    assert all(model.state_dict()[key].shape == plain.state_dict()[key].shape for key in sublayers)
    assert resolve_model_data_config(model) == resolve_model_data_config(plain)
    assert model.default_cfg["architecture"] == name
    assert topology_of(model) == build_topology("siamese-post-pre", post_norm="lazy", readout="code")


def test_names_take_a_topology_and_a_norm() -> None:
    model = timm.create_model(NAME, topology="dhc-2:streams=3", norm="rmsnorm", **SMALL)
    assert topology_of(model) == build_topology("dhc-2", streams=3)
    assert isinstance(model.norm.closing.norm, RMSNorm)
    assert model(IMAGES).shape == (2, 5)


def test_names_have_the_initial_weights_of_their_host() -> None:
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_patch16_224", **SMALL)
    torch.manual_seed(0)
    model = timm.create_model(NAME, **SMALL)
    for key, value in model.state_dict().items():
        if key in plain.state_dict():
            assert torch.equal(value, plain.state_dict()[key])


def test_a_model_made_on_the_meta_device_is_the_same() -> None:
    model = timm.create_model(NAME, device="meta", **SMALL).to_empty(device="cpu").eval()
    model.init_weights(needs_reset=True)
    same = timm.create_model(NAME, **SMALL).eval()
    same.load_state_dict(model.state_dict())
    assert torch.equal(model(IMAGES), same(IMAGES))


def test_features_only_has_the_channels_of_one_stream() -> None:
    features = timm.create_model(NAME, features_only=True, out_indices=(0, -1), **SMALL)
    assert features.feature_info.channels() == [DIM, DIM]
    assert [tuple(found.shape) for found in features(IMAGES)] == [(2, DIM, 2, 2)] * 2


def test_no_weights_are_promised() -> None:
    assert not timm.list_models("siamesenorm_*", pretrained=True)
    with pytest.raises(UserError, match="has no pretrained weights: create vit_tiny_patch16_224 with pretrained=True"):
        timm.create_model(NAME, pretrained=True)
    with pytest.raises(UserError, match="is the architecture of saved models"):
        timm.create_model("siamesenorm_converted")


# --- files


def registered() -> nn.Module:
    return moved(timm.create_model(NAME, topology="siamese-post-pre:depth_scale=none", drop_path_rate=0.1, **SMALL))


def converted() -> nn.Module:
    model = build_host("registers", init_values=0.1, drop_path_rate=0.1)
    rewire(model, "siamese")
    return moved(model)


def adapted() -> nn.Module:
    """A converted model with another input size and head, as for fine-tuning."""
    model = converted()
    model.set_input_size((48, 32))
    model.reset_classifier(3, "avg")
    return moved(model)


@pytest.mark.parametrize("build", [registered, converted, adapted])
@pytest.mark.parametrize(
    "read", [siamesenorm.from_pretrained, lambda path: timm.create_model(f"local-dir:{path}", pretrained=True)]
)
@torch.no_grad()
def test_saving_and_loading_changes_nothing(build: Any, read: Any, tmp_path: Path) -> None:
    model = build()
    interop.save_pretrained(model, tmp_path / "model")
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    loaded = read(tmp_path / "model").eval()
    assert type(loaded) is type(model)
    assert steps_of(loaded) == steps_of(model)
    assert resolve_model_data_config(loaded)["input_size"] == (3, *model.patch_embed.img_size)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    assert torch.equal(loaded(images), model(images))
    interop.save_pretrained(loaded, tmp_path / "again")
    assert [(tmp_path / "again" / name).read_bytes() for name in ("config.json", "model.safetensors")] == [
        (tmp_path / "model" / name).read_bytes() for name in ("config.json", "model.safetensors")
    ]


def test_options_of_create_model_apply_on_loading(tmp_path: Path) -> None:
    interop.save_pretrained(registered(), tmp_path)
    loaded = siamesenorm.from_pretrained(tmp_path, num_classes=9, drop_path_rate=0.3)
    assert loaded(IMAGES).shape == (2, 9)
    assert loaded.blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)


@pytest.mark.parametrize("build", [registered, converted])
@torch.no_grad()
def test_another_size_of_images_resamples_the_position_embedding(build: Any, tmp_path: Path) -> None:
    model = build()
    interop.save_pretrained(model, tmp_path)
    loaded = siamesenorm.from_pretrained(tmp_path, img_size=96).eval()
    model.set_input_size((96, 96))
    images = torch.randn(2, 3, 96, 96)
    assert torch.equal(loaded(images), model(images))


def test_an_error_of_timm_is_reported_whole_in_one_line(tmp_path: Path) -> None:
    interop.save_pretrained(converted(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["blocks.1.mlp.fc1.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"^\S+ cannot be loaded: Error\(s\) .*: .* \"blocks.1.mlp.fc1.weight\"\.$"):
        siamesenorm.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="use siamese-post-pre"):
        timm.create_model(NAME, topology="siamese", **SMALL)


TIMM_ALONE = """
import conftest, sys, timm
for path in sys.argv[1:]:
    try: timm.create_model(f"local-dir:{path}", pretrained=True)
    except RuntimeError as error: print(error)
"""


def test_timm_alone_does_not_take_it_for_its_host(tmp_path: Path) -> None:
    paths = [str(tmp_path / build.__name__) for build in (registered, converted)]
    for build, path in zip((registered, converted), paths, strict=True):
        interop.save_pretrained(build(), path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", TIMM_ALONE, *paths], env=environment, capture_output=True, text=True)
    assert result.stdout.split("\n") == [f"Unknown model ({NAME})", "Unknown model (siamesenorm_converted)", ""]


def test_what_cannot_be_saved_or_loaded_is_refused(tmp_path: Path) -> None:
    plain = build_host()
    with pytest.raises(UserError, match="was not converted"):
        interop.save_pretrained(plain, tmp_path)
    handmade = timm.models.VisionTransformer(**{**SMALL, "depth": 1})
    rewire(handmade, "siamese")
    with pytest.raises(UserError, match="not made by timm.create_model"):
        interop.save_pretrained(handmade, tmp_path)
    with pytest.raises(UserError, match="no config.json"):
        siamesenorm.from_pretrained(tmp_path)
    timm.models.save_for_hf(plain, tmp_path, safe_serialization=True)
    with pytest.raises(UserError, match="unconverted vit_tiny_patch16_224: load it with timm"):
        siamesenorm.from_pretrained(tmp_path)
    interop.save_pretrained(converted(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pytorch_model.bin"):
        siamesenorm.from_pretrained(tmp_path)
    for damaged in ("{", "[]"):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(UserError, match=r"config\.json"):
            siamesenorm.from_pretrained(tmp_path)
