"""Families that `rewire` recognises by their modules: function, generation, gradients, saving, LoRA, checkpointing.

Some run by default, one of each form; `make laws` runs all.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import siamesenorm  # noqa: E402
from huggingface_families import (  # noqa: E402
    DECODERS,
    ENCODERS,
    LORA,
    TWO_STACKS,
    build_family,
    first_output,
    of_images_and_text,
    small_inputs,
)
from huggingface_hosts import TOKENS, moved  # noqa: E402
from siamesenorm import rewire  # noqa: E402

REPRESENTATIVES = ("granite", "phi", "gptj", "bloom", "falcon", "hf-vit", "t5", "modernbert")
PARALLEL = ("phi", "stablelm-parallel", "gptj", "codegen", "falcon", "falcon-two-norms", "cohere", "cohere2")
GENERATED: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning"),
]


def cases(*families: str) -> list[Any]:
    """Return the families as parameters, all but the representatives marked for `make laws`."""
    return [
        family if family in REPRESENTATIVES else pytest.param(family, marks=pytest.mark.laws) for family in families
    ]


def generate(model: Any, **options: Any) -> Tensor:
    """Return greedy tokens; Whisper's own `generate` cuts sound in pieces."""
    given = {name: value for name, value in small_inputs(model).items() if name != "decoder_input_ids"}
    if "input_ids" in given:
        given["attention_mask"] = torch.ones_like(TOKENS)
    tokens: Tensor = transformers.GenerationMixin.generate(model, **given, **GENERATED, **options)
    return tokens


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    found = model(**small_inputs(model))
    (found["logits"] if "logits" in found else found[0]).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


FAMILIES = (
    *DECODERS,
    *TWO_STACKS,
    *(family for family in ENCODERS if family != "clip-vision"),
)


@pytest.mark.parametrize("family", cases(*FAMILIES))
def test_a_family_is_rewired(family: str, tmp_path: Path) -> None:
    host = build_family(family)
    expected = first_output(host)
    exact = copy.deepcopy(host)
    assert rewire(exact, "siamese-post-pre:normalized_input=false").function_kept
    torch.testing.assert_close(first_output(exact), expected, rtol=1e-3, atol=1e-5)
    model = copy.deepcopy(host)
    assert rewire(model, "siamese-post-pre" if family in PARALLEL else "siamese").function_kept
    torch.testing.assert_close(first_output(model), expected, rtol=1e-3, atol=5e-5)
    plain = gradients(model)
    silent = [name for name, one in model.named_parameters() if name in plain and one.numel() and not one.any()]
    assert silent and all(plain[name].any() for name in silent)
    if family in (*DECODERS, *TWO_STACKS):
        generated = generate(model)
        assert torch.equal(generated, generate(host))
        assert torch.equal(generated, generate(model, use_cache=False))
        if model.supports_gradient_checkpointing:
            model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            torch.manual_seed(0)
            found = gradients(model)
            model.gradient_checkpointing_disable()
            torch.manual_seed(0)
            torch.testing.assert_close(found, gradients(model), rtol=1e-4, atol=1e-5)
    moved(model).save_pretrained(tmp_path)
    loaded = siamesenorm.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and torch.equal(first_output(loaded), first_output(model))
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=LORA.get(family, "all-linear")))
    frozen = loaded.requires_grad_(False)  # torch may compute frozen weights by another kernel
    assert torch.equal(first_output(adapted.eval().base_model.model), first_output(frozen))


@pytest.mark.parametrize("family", ["t5", pytest.param("whisper", marks=pytest.mark.laws)])
def test_an_encoder_decoder_records_what_its_host_does(family: str) -> None:
    """Both stacks are rewired; states are those of one stream, and attention weights those of the host."""
    host = build_family(family)
    host.set_attn_implementation("eager")
    model = copy.deepcopy(host)
    report = rewire(model, "siamese-post-pre:normalized_input=false")
    assert {name.partition(".")[0] for name in report.blocks.removeprefix("model.").split(", ")} >= {"encoder"}
    assert len(report.blocks.split(", ")) == 2
    options = {**small_inputs(host), "output_attentions": True, "output_hidden_states": True}
    expected, found = host(**options), model(**options)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert len(found[name]) == len(expected[name]) > 0
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        assert [state.shape for state in found[name]] == [state.shape for state in expected[name]]
    with pytest.raises(siamesenorm.errors.UserError, match="attends to the states of an encoder"):
        rewire(build_family(family).get_decoder(), "siamese")


def test_blocks_that_training_skips_are_refused() -> None:
    with pytest.raises(
        siamesenorm.errors.UserError, match=r"layerdrop of WhisperEncoder is 0\.1: it skips whole blocks"
    ):
        rewire(build_family("whisper", encoder_layerdrop=0.1), "siamese")


def test_a_sublayer_without_an_input_norm_stays_without() -> None:
    """ModernBERT's first attention reads the normalised embedding; mHC would give it a multiple of that."""
    host = build_family("modernbert")
    with pytest.raises(siamesenorm.errors.UserError, match=r"layers\.0\.attn_norm is no norm, and mhc-4"):
        rewire(host, "mhc-4")
    expected = first_output(host)
    rewire(host, "siamese-post-pre:normalized_input=false")
    assert torch.equal(first_output(host), expected)


@pytest.mark.parametrize("topology", ["siamese-post-pre", "mhc-4"])
@pytest.mark.parametrize("rms", [1.0, 0.0027])
def test_norms_that_stay_in_parallel_sublayers_are_those_of_the_host(topology: str, rms: float) -> None:
    """Exact in fp64 behind another norm, and behind a multiple of the stream, where the eps is larger than a token."""
    host = build_family("falcon-two-norms", layer_norm_epsilon=1e-5).double()
    with torch.no_grad():
        weight = host.get_input_embeddings().weight
        weight.mul_(rms / weight.square().mean().sqrt())
    expected = first_output(host)
    report = rewire(host, topology)
    assert report.function_kept and report.bound == 0
    torch.testing.assert_close(first_output(host), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "family",
    [
        "llava",
        *(pytest.param(each, marks=pytest.mark.laws) for each in ("paligemma2", "internvl", "mistral3", "idefics3")),
    ],
)
def test_the_language_model_of_images_and_text_is_rewired(family: str, tmp_path: Path) -> None:
    host, given = of_images_and_text(family)
    with torch.no_grad():
        expected = host(**given).logits
        model = copy.deepcopy(host)
        report = rewire(model, "siamese")
        assert report.function_kept and "language_model" in report.blocks or "text_model" in report.blocks
        torch.testing.assert_close(model(**given).logits, expected, rtol=1e-3, atol=5e-5)
        assert not torch.allclose(model(**{**given, "pixel_values": 2 * given["pixel_values"]}).logits, expected)
        options = {**GENERATED, **given}
        assert torch.equal(model.generate(**options), host.generate(**options))
        moved(model).save_pretrained(tmp_path)
        loaded = siamesenorm.from_pretrained(tmp_path)
        assert torch.equal(loaded(**given).logits, model(**given).logits)


def test_a_model_without_a_norm_of_every_token_keeps_its_raw_output() -> None:
    """CLIP's vision model returns the stream after its blocks: only topologies that close to it can be had."""
    host = build_family("clip-vision")
    expected = first_output(host)
    with pytest.raises(siamesenorm.errors.UserError, match=r"encoder\.layers, which no norm of every token follows"):
        rewire(host, "siamese")
    assert rewire(host, "attnres").function_kept
    torch.testing.assert_close(first_output(host), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["olmo3", "exaone4"])
def test_output_norms_are_refused(family: str) -> None:
    kind = {"olmo3": "Olmo3", "exaone4": "Exaone4"}[family]
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=48, sliding_window=4, pad_token_id=0, layer_types=["full_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(siamesenorm.errors.UserError, match="sublayers read the raw stream and normalise their output"):
        rewire(model, "siamese")
    assert rewire(model, "siamese", preserve=False).differences is None
    assert model(TOKENS).logits.isfinite().all()


def test_the_dropout_of_the_host_stays_where_it_was() -> None:
    """In training the same random numbers give the host's output: the same elements are dropped at the same places."""
    for family, options in (("phi3", {"resid_pdrop": 0.3}), ("bloom", {"hidden_dropout": 0.3}),
                            ("opt", {"dropout": 0.3}), ("falcon", {"hidden_dropout": 0.3})):  # fmt: skip
        host = build_family(family, **options).train()
        model = copy.deepcopy(host)
        rewire(model, "pre")
        outputs = []
        for one in (host, model):
            torch.manual_seed(3)
            outputs.append(one(TOKENS).logits)
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(outputs[0], host.eval()(TOKENS).logits, rtol=1e-2, atol=1e-2)
