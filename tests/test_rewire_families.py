"""Families that `rewire` recognises by their modules: function, generation, gradients, saving, LoRA, checkpointing.

Some run by default, one of each form; `make laws` runs all.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import siamesenorm  # noqa: E402
from huggingface_families import DECODERS, ENCODERS, LORA, build_family, first_output  # noqa: E402
from huggingface_hosts import TOKENS, gradients, moved  # noqa: E402
from siamesenorm import rewire  # noqa: E402

REPRESENTATIVES = ("granite", "phi", "gptj", "bloom", "falcon", "hf-vit")
PARALLEL = ("phi", "stablelm-parallel", "gptj", "codegen", "falcon", "falcon-two-norms", "cohere", "cohere2")
TWO_NORMS = ("falcon-two-norms",)
"""Families whose parallel sublayers keep their norms: a norm of a norm differs by its eps."""
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(TOKENS)}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning"),
]


def cases(*families: str) -> list[Any]:
    """Return the families as parameters, all but the representatives marked for `make laws`."""
    return [
        family if family in REPRESENTATIVES else pytest.param(family, marks=pytest.mark.laws) for family in families
    ]


@pytest.mark.parametrize("family", cases(*DECODERS, *(family for family in ENCODERS if family != "clip-vision")))
def test_a_family_is_rewired(family: str, tmp_path: Path) -> None:
    host = build_family(family)
    expected = first_output(host)
    exact = copy.deepcopy(host)
    report = rewire(exact, "siamese-post-pre:normalized_input=false")
    assert report.function_kept == (family not in TWO_NORMS)
    torch.testing.assert_close(first_output(exact), expected, rtol=1e-3, atol=1e-3 if family in TWO_NORMS else 1e-5)
    model = copy.deepcopy(host)
    rewire(model, "siamese-post-pre" if family in PARALLEL else "siamese")
    torch.testing.assert_close(first_output(model), expected, rtol=1e-3, atol=1e-3 if family in TWO_NORMS else 5e-5)
    if family in DECODERS:
        generated = model.generate(TOKENS, **GREEDY)
        assert torch.equal(generated, host.generate(TOKENS, **GREEDY))
        assert torch.equal(generated, model.generate(TOKENS, use_cache=False, **GREEDY))
        plain = gradients(model)
        silent = [name for name, parameter in model.named_parameters() if name in plain and not parameter.any()]
        assert silent and all(plain[name].any() for name in silent)
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
    assert torch.equal(first_output(adapted.eval().base_model.model), first_output(loaded))


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
