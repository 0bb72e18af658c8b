"""Weights of models of other libraries in ours, and back: the same outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.native_weights import foreign_fields, foreign_state, load_foreign_weights
from siamesenorm.models.language import LanguageModel, LanguageModelConfig, build_language_model

transformers = pytest.importorskip("transformers")


def random_weights(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


# --- OLMoE


def olmoe(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    sizes = {
        "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3, "max_position_embeddings": 64,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    model = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**{**sizes, **changes})).to(dtype)
    model.set_experts_implementation("eager")  # its grouped products refuse fp64
    return random_weights(model)


def ours(foreign: Any, **changes: Any) -> LanguageModel:
    fields = {**foreign_fields(foreign), "context": 64, **changes}
    return build_language_model(LanguageModelConfig(**fields), seed=3).to(next(foreign.parameters()).dtype).eval()


def tokens() -> Tensor:
    return torch.randint(0, 37, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-4}])
def test_an_olmoe_has_the_same_outputs_both_ways(changes: dict[str, Any], dtype: torch.dtype) -> None:
    foreign = olmoe(dtype, **changes)
    model = ours(foreign)
    load_foreign_weights(model, foreign)
    expected = foreign(tokens()).logits
    torch.testing.assert_close(model(tokens()).logits, expected, rtol=0, atol=1e-6)
    again = olmoe(dtype, **changes)
    nn.init.zeros_(again.model.layers[1].mlp.experts.gate_up_proj)
    assert not torch.equal(again(tokens()).logits, expected)
    again.load_state_dict(foreign_state(model))
    assert torch.equal(again(tokens()).logits, expected)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_theta": 500.0}, "rope_theta"),
        ({"active_experts": 2}, "active_experts"),
        ({"renormalise_experts": True}, "renormalise_experts"),
        ({"depth": 3}, "depth"),
        ({"attention_norm": "qk-head"}, "attention_norm"),
    ],
)
def test_a_model_of_another_function_is_refused_unchanged(changes: dict[str, Any], word: str) -> None:
    foreign = olmoe()
    model = ours(foreign, **changes)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(UserError, match=f"^{word} of the OlmoeForCausalLM") as error:
        load_foreign_weights(model, foreign)
    assert "\n" not in str(error.value)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_options_that_ours_has_not_are_refused() -> None:
    with pytest.raises(UserError, match="clip_qkv"):
        foreign_fields(olmoe(clip_qkv=1.0))


# --- other models


def test_models_without_a_table_are_refused() -> None:
    foreign = olmoe()
    with pytest.raises(UserError, match=r"torch\.nn\.modules\.linear\.Linear"):
        load_foreign_weights(ours(foreign), nn.Linear(2, 2))
    with pytest.raises(UserError, match="LanguageModel"):
        load_foreign_weights(nn.Linear(2, 2), foreign)
    for model in (ours(foreign, topology=LanguageModelConfig().topology, attention_norm="auto"), nn.Linear(2, 2)):
        with pytest.raises(UserError, match="no other library has"):
            foreign_state(model)
