"""ConvNeXt of timm with norms of this library: its function, its initial weights, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.convnext import ConvNeXt
from torch import nn

from siamesenorm.cli import main
from siamesenorm.cli.sweep import template_of
from siamesenorm.comparison.sweep_grid import comparisons_of
from siamesenorm.errors import UserError
from siamesenorm.models.convnext import SIZES, ConvNext, ConvNextConfig, build_convnext, convnext_config
from siamesenorm.models.cost import count_flops, count_parameters
from siamesenorm.norms import Norm, NormSpec, declared_parameters
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.loop import train
from siamesenorm.training.presets import presets
from training_runs import assert_resumes, records

TINY = ConvNextConfig(depths=(1, 2, 1, 1), dims=(8, 16, 16, 24), image_size=8, patch_size=1, channels=1, classes=5)
DIGITS = dataclasses.replace(TINY, dims=(16, 16, 24, 32), classes=10, layer_scale=0.1)
IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def tiny(norm: str = "layernorm", **changes: Any) -> ConvNext:
    return build_convnext(dataclasses.replace(TINY, norm=NormSpec.parse(norm), **changes))


def moved(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def timm_names(model: ConvNext, host: ConvNeXt) -> dict[str, str]:
    """Return timm's name of each parameter, from the order of its stages."""
    places = []
    for number, stage in enumerate(host.stages):
        if not isinstance(stage.downsample, nn.Identity):
            places.append(f"stages.{number}.downsample")
        places += [f"stages.{number}.blocks.{block}" for block in range(len(stage.blocks))]
    named = {}
    for name, _ in model.named_parameters():
        first, *rest = name.split(".")
        theirs = [places[int(rest[0])], *rest[1:]] if first == "blocks" else [first, *rest]
        named[name] = ".".join(theirs).replace("norm.gain", "norm.weight")
        if first in ("stem", "blocks") and named[name].endswith("gain"):
            named[name] = f"{named[name].removesuffix('gain')}weight"
    return named


def test_with_layernorm_it_is_the_model_of_timm() -> None:
    model = moved(tiny())
    assert isinstance(model, ConvNext)
    host = ConvNeXt(in_chans=1, num_classes=5, depths=TINY.depths, dims=TINY.dims, patch_size=1)
    names = timm_names(model, host)
    host.load_state_dict({names[name]: value for name, value in model.state_dict().items()})
    torch.testing.assert_close(model(IMAGES).logits, host(IMAGES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "dyt", "seednorm", "seednorm:heads=2"])
def test_every_norm_is_replaced_and_learns(norm: str) -> None:
    model = tiny(norm, layer_scale=0.1)
    kinds = {type(module) for module in model.modules() if isinstance(module, Norm)}
    assert len(kinds) == 1 and not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    axes = [module.axis for module in model.modules() if isinstance(module, Norm)]
    assert len(axes) == 1 + 3 + 5 + 1 and axes.count(1) == 5, "stem, downsampling and head: channels first"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    labels, losses = torch.tensor([0, 1, 2]), []
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(IMAGES).logits, labels)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    moved_norms = [
        name for name, p, declared in declared_parameters(model) if (p != torch.tensor(declared.initial)).any()
    ]
    assert len(moved_norms) == len(list(declared_parameters(model))), "every parameter of a norm was trained"


def test_seednorm_has_its_settings_for_vision_and_the_eps_of_timm() -> None:
    norms = [module for module in tiny("seednorm").modules() if isinstance(module, Norm)]
    assert {(norm.dim, norm.settings()["heads"], norm.settings()["scale"]) for norm in norms} == {
        (8, 8, "1/d"), (16, 16, "1/d"), (24, 8, "1/d")
    }  # fmt: skip
    assert {(norm.settings()["eps"], norm.settings()["dropout"]) for norm in norms} == {(1e-6, 0.0)}
    dropped = [each for each in tiny("seednorm", drop_path=0.2).modules() if isinstance(each, Norm)]
    assert {norm.settings()["dropout"] for norm in dropped} == {0.2}


def test_initial_weights_follow_from_the_seed_alone() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = tiny()
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not touched"
    torch.manual_seed(1)
    second, third = tiny(), build_convnext(TINY, seed=1)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.get_parameter(name))
        if weight.ndim > 1:
            assert not torch.equal(weight, third.get_parameter(name))
            assert weight.abs().max() <= 0.06
            assert weight.numel() < 200 or float(weight.std()) == pytest.approx(0.02, rel=0.2)
    seed_norm = tiny("seednorm")
    assert torch.equal(seed_norm.blocks[0].mlp.fc1.weight, first.blocks[0].mlp.fc1.weight)
    assert float(first.state_dict()["blocks.0.gamma"][0]) == pytest.approx(1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_the_sizes_have_the_published_numbers_of_parameters_and_operations(size: str) -> None:
    """28, 50, 89 and 198 M parameters, 4.5, 8.7, 15.4 and 34.4 G multiply-adds (arXiv 2201.03545, Table 1)."""
    published = {"convnext-t": (28, 4.5), "convnext-s": (50, 8.7), "convnext-b": (89, 15.4), "convnext-l": (198, 34.4)}
    model = build_convnext(convnext_config(size), device="meta")
    millions, multiply_adds = published[size]
    assert count_parameters(model)[0] / 1e6 == pytest.approx(millions, rel=0.03)
    operations = count_flops(model, torch.zeros(1, 3, 224, 224, device="meta"))
    assert operations / 6e9 == pytest.approx(multiply_adds, rel=0.03)


def test_a_configuration_survives_json_and_takes_norms_as_methods() -> None:
    config = dataclasses.replace(TINY, drop_path=0.1).with_method("pre + seednorm:heads=4")
    assert config.norm == NormSpec.parse("seednorm:heads=4") and config.label == "convnext + seednorm:heads=4"
    assert ConvNextConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert config.with_method("pre") == config
    with pytest.raises(UserError):
        ConvNextConfig.from_json({"depth": 3})


@pytest.mark.parametrize("method", ["siamese", "pre + qkv", "pre + seednorm + qkv"])
def test_methods_that_need_a_transformer_are_refused(method: str) -> None:
    with pytest.raises(UserError, match="pre \\+ NORM"):
        TINY.with_method(method)


@pytest.mark.parametrize(
    "changes",
    [
        {"depths": (1, 1, 1)}, {"dims": (8, 0, 8, 8)}, {"patch_size": 2}, {"image_size": 0}, {"classes": 0},
        {"drop_path": 1.0}, {"layer_scale": float("inf")},
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        dataclasses.replace(TINY, **changes)


# --- trained by the loop


def run_of(norm: str = "seednorm", **changes: Any) -> RunConfig:
    """Return a run of a small model on the digits."""
    model = dataclasses.replace(DIGITS, norm=NormSpec.parse(norm), **changes.pop("model", {}))
    config = presets(Path())["digits"]
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1e-2, warmup_steps=2)
    fixed = {"batch": 16, "execution": Execution(threads=1, checkpoint_every=4, compile="off", keep_states=True)}
    task = dataclasses.replace(config.task, model=model)
    return dataclasses.replace(config, task=task, optimizer=optimizer, **fixed, **changes).resolved()


@pytest.mark.every_nth(2)
@pytest.mark.parametrize("norm", ["seednorm", "layernorm"])
def test_the_train_loop_trains_it_on_the_digits(norm: str, tmp_path: Path) -> None:
    config = run_of(norm, steps=60, validation_every=60, checkpoint_activations=norm == "seednorm")
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    train(config, tmp_path / "run")
    last = records(tmp_path / "run", "validation")[-1]
    assert last["accuracy"] > 0.5 and records(tmp_path / "run", "model")[0]["attention_norm"] == "none"
    assert records(tmp_path / "run", "model")[0]["label"].startswith(f"convnext + {norm}")


def test_interrupted_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = run_of(steps=8, validation_every=8, model={"drop_path": 0.2})
    assert_resumes(config, tmp_path, after=6)


def test_the_command_trains_and_evaluates_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--data digits --model.image-size 8 --model.patch-size 1 --model.channels 1 --model.classes 10"
    words += " --augmentation.magnitude 0"
    small = "--model.depths 1 1 1 1 --model.dims 8 16 16 24 --model.norm seednorm:heads=4 --fit exact --ema 0"
    rest = "--steps 2 --batch 8 --micro-batch 8 --optimizer.warmup-steps 1 --precision float32 --execution.device cpu"
    run = str(tmp_path / "run")
    assert main(["train", "convnext-b", *words.split(), *small.split(), *rest.split(), "--out", run]) == 0
    assert main(["evaluate", run, "--knn", "5"]) == 0
    assert "top1" in capsys.readouterr().out


def test_without_timm_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.models.convnext", None)
    with pytest.raises(UserError, match="siamesenorm\\[vision\\]"):
        build_convnext(TINY)


def test_a_size_is_chosen_by_name_and_keeps_images_and_norm() -> None:
    task = run_of("seednorm").task.of_size("convnext-t")
    assert (task.model.dims, task.model.classes, task.model.norm.name) == (SIZES["convnext-t"]["dims"], 10, "seednorm")
    with pytest.raises(UserError, match="multiple of 32"):
        presets(Path())["digits"].task.of_size("convnext-t")
    for refused in (lambda: task.of_size("vit-s"), lambda: dataclasses.replace(task, layer_decay=0.5)):
        with pytest.raises(UserError, match="convnext"):
            refused()


def test_a_sweep_compares_norms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its processes need a torchvision that imports, so no run is trained here."""
    template = template_of(run_of("layernorm", steps=4))
    methods = ("pre", "pre + dyt", "pre + seednorm")
    found = [(each.method, each.baseline, each.kind.value) for each in comparisons_of(methods, template)]
    assert found == [("pre + dyt", "pre", "operator"), ("pre + seednorm", "pre", "operator")]
    assert (
        main(["sweep", "convnext-b", "--data", "digits", "--methods", "siamese", "--out", str(tmp_path / "out")]) == 2
    )
    assert "pre + NORM" in capsys.readouterr().err and not (tmp_path / "out").exists()
