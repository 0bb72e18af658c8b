"""`rewire` on the DiT of diffusers, its pipeline, and the class that saves and loads it."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

diffusers = pytest.importorskip("diffusers")

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import siamesenorm  # noqa: E402
from siamesenorm import available_topologies, rewire  # noqa: E402
from siamesenorm.errors import UserError  # noqa: E402
from siamesenorm.interop.wiring import steps_of  # noqa: E402

DEPTH = 3
SMALL: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 8, "out_channels": 8, "num_layers": DEPTH, "sample_size": 4,
    "num_embeds_ada_norm": 10,
}  # fmt: skip
LATENTS = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(1))
CONDITION: dict[str, Tensor] = {"timestep": torch.tensor([3, 700]), "class_labels": torch.tensor([1, 9])}
KEEPING = ("pre", "layerscale", "dhc-2", "mhc-4", "siamese-post-pre", "siamese")
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


def build_host(**options: Any) -> Any:
    """Return a DiT in evaluation mode whose every parameter was moved at random: no gate is zero."""
    return moved(diffusers.DiTTransformer2DModel(**{**SMALL, **options}))


def moved(model: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def rewired(topology: str = "siamese", **options: Any) -> tuple[Any, Any]:
    """Return a host and its rewired copy."""
    host = build_host(**options)
    model = copy.deepcopy(host)
    rewire(model, topology)
    return host, model


def denoise(model: nn.Module) -> Tensor:
    return model(LATENTS, **CONDITION).sample


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of each parameter under one loss, with the random numbers of one seed."""
    model.zero_grad()
    torch.manual_seed(0)
    denoise(model).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


# --- the function


@pytest.mark.every_nth(5)
@pytest.mark.parametrize("topology", KEEPING)
@pytest.mark.parametrize("options", [{}, {"norm_elementwise_affine": True}, {"activation_fn": "geglu"}], ids=str)
@torch.no_grad()
def test_the_function_is_kept(topology: str, options: dict[str, Any]) -> None:
    host = build_host(**options)
    model = copy.deepcopy(host)
    assert rewire(model, topology).function_kept
    torch.testing.assert_close(denoise(model), denoise(host), **CLOSE)


def test_the_conditioned_norms_stay_where_they_are() -> None:
    model = build_host()
    report = rewire(model, "siamese")
    kept = {fate.name for fate in report.norms if fate.outcome == "kept"}
    blocks = {f"transformer_blocks.{i}.{name}" for i in range(DEPTH) for name in ("norm1.norm", "norm3")}
    assert kept == {*blocks, "norm_out"}
    assert model.norm_out.final_norm.elementwise_affine is False


@torch.no_grad()
def test_gates_of_zero_silence_a_sublayer_in_both_streams() -> None:
    """AdaLN-Zero from scratch: where all modulations are zero, the model is its embedding and its head."""
    model = build_host()
    rewire(model, "siamese-post-pre", preserve=False)
    for block in model.transformer_blocks:
        block.norm1.linear.weight.zero_()
        block.norm1.linear.bias.zero_()
    closed: list[Tensor] = []
    model.norm_out.closing.register_forward_hook(lambda module, given, output: closed.append(output))
    denoise(model)
    embedding = model.pos_embed(LATENTS)
    bounded = embedding
    for _ in range(2 * DEPTH):
        bounded = nn.functional.layer_norm(bounded, embedding.shape[-1:], eps=1e-6)
    identity = nn.functional.layer_norm(embedding, embedding.shape[-1:], eps=1e-6)
    torch.testing.assert_close(closed[0], bounded + identity, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("topology", ["siamese", "siamese-post-pre", "siamese-post-pre:post_norm=lazy,readout=code"])
def test_every_zeroed_gain_gets_a_gradient(topology: str) -> None:
    _, model = rewired(topology)
    found = gradients(model)
    silent = [name for name, parameter in model.named_parameters() if not parameter.any()]
    assert len(silent) > DEPTH
    assert all(found[name].abs().max() > 0 for name in silent)


# --- training


def test_checkpointing_changes_no_gradient() -> None:
    _, model = rewired(dropout=0.2)
    model.train()
    plain = gradients(model)
    model.enable_gradient_checkpointing()
    torch.testing.assert_close(gradients(model), plain, rtol=0, atol=0)


@torch.no_grad()
def test_feed_forward_in_chunks_changes_nothing() -> None:
    _, model = rewired()
    expected = denoise(model)
    for block in model.transformer_blocks:
        block.set_chunk_feed_forward(2, dim=1)
    torch.testing.assert_close(denoise(model), expected)


@pytest.mark.laws
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_training_step_is_the_plain_one() -> None:
    _, model = rewired()
    plain = gradients(model)
    compiled = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    for name, expected in plain.items():
        torch.testing.assert_close(compiled[f"_orig_mod.{name}"], expected, rtol=1e-4, atol=1e-4)


def test_lora_attaches() -> None:
    peft = pytest.importorskip("peft")
    _, model = rewired()
    expected = denoise(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["to_q", "to_v"]))
    torch.testing.assert_close(denoise(adapted), expected, rtol=0, atol=0)
    trained = gradients(adapted)
    assert len(trained) == 2 * 2 * DEPTH
    assert all("lora" in name for name in trained)


# --- saving and loading


@pytest.mark.parametrize("topology", KEEPING)
@torch.no_grad()
def test_saving_and_loading_changes_nothing(topology: str, tmp_path: Path) -> None:
    _, model = rewired(topology)
    moved(model).save_pretrained(tmp_path)
    loaded: Any = siamesenorm.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert steps_of(loaded) == steps_of(model)
    assert not loaded.training
    assert torch.equal(denoise(loaded), denoise(model))
    loaded.save_pretrained(tmp_path / "again")
    again = [json.loads((directory / "config.json").read_text()) for directory in (tmp_path, tmp_path / "again")]
    assert {**again[1], "_name_or_path": None} == {**again[0], "_name_or_path": None}


def test_from_scratch_with_norms_of_queries_keys_and_values(tmp_path: Path) -> None:
    model = build_host()
    rewire(model, "siamese", preserve=False)
    assert model.transformer_blocks[0].attn1.to_v.head_norm.dim == 8
    moved(model).save_pretrained(tmp_path)
    assert torch.equal(denoise(siamesenorm.from_pretrained(tmp_path)), denoise(model))


def test_options_of_from_pretrained_apply_on_loading(tmp_path: Path) -> None:
    _, model = rewired()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16, low_cpu_mem_usage=True)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(
        loaded(LATENTS.bfloat16(), **CONDITION).sample.float(), denoise(model), rtol=0.2, atol=0.2
    )


@pytest.mark.parametrize("plain", ["DiTTransformer2DModel", "Transformer2DModel", "AutoModel"])
def test_diffusers_alone_does_not_take_it_for_its_host(plain: str, tmp_path: Path) -> None:
    _, model = rewired()
    model.save_pretrained(tmp_path)
    with pytest.raises((NotImplementedError, ValueError)):
        getattr(diffusers, plain).from_pretrained(tmp_path)


def test_what_was_not_saved_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no config.json"):
        siamesenorm.from_pretrained(tmp_path)
    build_host().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="DiTTransformer2DModel: load it with diffusers"):
        siamesenorm.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "_class_name": "SiameseNormNoModel"}))
    with pytest.raises(UserError, match="host of SiameseNormNoModel"):
        siamesenorm.from_pretrained(tmp_path)


WEIGHTS = "diffusion_pytorch_model.safetensors"


def lacks_a_weight(directory: Path) -> None:
    weights = load_file(directory / WEIGHTS)
    del weights["norm_out.closing.identity_norm.bias"]
    save_file(weights, directory / WEIGHTS)


def has_a_stray_weight(directory: Path) -> None:
    save_file({**load_file(directory / WEIGHTS), "stray": torch.zeros(2)}, directory / WEIGHTS)


def has_no_steps(directory: Path) -> None:
    record = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**record, "siamesenorm": []}))


def has_a_pickle(directory: Path) -> None:
    torch.save(load_file(directory / WEIGHTS), directory / "diffusion_pytorch_model.bin")
    (directory / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (has_a_stray_weight, r"no place in the model, 1 weight \(stray\)"),
        (lacks_a_weight, r"lacks 1 weight \(norm_out.closing.identity_norm.bias\)"),
        (has_no_steps, "the configuration is damaged"),
        (has_a_pickle, "has no safetensors weights"),
        (lambda directory: (directory / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda directory: (directory / "config.json").write_text("[]"), "holds a list"),
    ],
)
def test_damaged_files_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    _, model = rewired()
    model.save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        siamesenorm.from_pretrained(tmp_path)


def test_a_configuration_draws_weights_with_the_factors_of_the_topology() -> None:
    model = build_host()
    rewire(model, "deepnorm", preserve=False)
    attention = type(model).from_config(model.config).transformer_blocks[0].attn1
    expected = (8 * len(model.transformer_blocks)) ** -0.25
    assert (attention.to_v.weight.std() / attention.to_q.weight.std()).item() == pytest.approx(expected, rel=0.15)


def test_options_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    _, model = rewired()
    model.save_pretrained(tmp_path)
    for option in ({"device_map": "auto"}, {"output_loading_info": True}):
        with pytest.raises(UserError, match=f"^{next(iter(option))}: .* leave it out"):
            siamesenorm.from_pretrained(tmp_path, **option)


# --- the pipeline


def build_pipeline(transformer: nn.Module) -> Any:
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, layers_per_block=1, sample_size=4)
    return quiet(diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler()))


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: Any) -> Tensor:
    # Guidance asks for class 1000, the null class, whatever the model's number of classes.
    generator = torch.Generator().manual_seed(0)
    return torch.from_numpy(pipeline([1, 3], num_inference_steps=2, generator=generator, output_type="np").images)


def test_the_pipeline_draws_what_it_drew_and_comes_back_from_disk(tmp_path: Path) -> None:
    host = build_host(num_embeds_ada_norm=1000)
    pipeline = build_pipeline(host)
    before = draw(pipeline)
    rewire(host, "siamese")
    torch.testing.assert_close(draw(pipeline), before, **CLOSE)
    pipeline.register_modules(transformer=host)
    pipeline.save_pretrained(tmp_path)
    noted = json.loads((tmp_path / "model_index.json").read_text())["transformer"]
    assert noted == ["siamesenorm.interop.diffusers", "SiameseNormDiTTransformer2DModel"]
    assert torch.equal(draw(quiet(diffusers.DiTPipeline.from_pretrained(tmp_path))), draw(pipeline))


def test_a_pipeline_that_was_built_before_does_not_reload_as_its_host(tmp_path: Path) -> None:
    host = build_host(num_embeds_ada_norm=1000)
    pipeline = build_pipeline(host)
    rewire(host, "siamese")
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError):
        diffusers.DiTPipeline.from_pretrained(tmp_path)


def test_a_pipeline_asks_for_the_import_of_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = rewired(num_embeds_ada_norm=1000)
    build_pipeline(model).save_pretrained(tmp_path)
    monkeypatch.delitem(sys.modules, "siamesenorm.interop.diffusers")
    with pytest.raises(ValueError, match=r"import siamesenorm\.interop\.diffusers before calling"):
        diffusers.DiTPipeline.from_pretrained(tmp_path)


# --- refusals


def refusal(model: nn.Module, topology: str = "siamese", **options: Any) -> str:
    """Return the reason why a model cannot be rewired, which leaves it as it was."""
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(UserError) as caught:
        rewire(model, topology, **options)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_other_blocks_of_the_class_are_refused() -> None:
    pixart = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, cross_attention_dim=16, caption_channels=16,
        sample_size=8,
    )  # fmt: skip
    assert "norm_type ada_norm_single and attn2" in refusal(pixart)


def test_other_backbones_are_refused() -> None:
    holder = nn.Module()
    holder.transformer_blocks = build_host().transformer_blocks
    assert "BasicTransformerBlocks in a torch.nn.modules.module.Module" in refusal(holder)


def test_a_second_rewiring_is_refused() -> None:
    assert "rewired already" in refusal(rewired()[1], "siamese-post-pre")


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", available_topologies())
def test_every_topology_starts_from_scratch_or_says_why_not(topology: str) -> None:
    model = build_host()
    if topology in ("peri", "olmo2", "rezero"):
        assert "gate" in refusal(model, topology, preserve=False)
    elif topology == "ln-scaling":
        assert "the scale would be lost" in refusal(model, topology, preserve=False)
    else:
        assert rewire(model, topology, preserve=False).differences is None
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())
