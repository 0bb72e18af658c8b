"""What rewire does not understand it refuses, naming the module, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from siamesenorm import rewire
from siamesenorm.errors import UserError

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 31,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL))


def shared_norm() -> nn.Module:
    model = llama()
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
    return model


def shared_gain() -> nn.Module:
    model = llama()
    model.model.layers[1].input_layernorm.weight = model.model.norm.weight
    return model


def shared_block() -> nn.Module:
    model = llama()
    model.model.layers[1] = model.model.layers[0]
    return model


def mixed_blocks() -> nn.Module:
    model = llama()
    model.model.layers[1] = nn.Linear(16, 16)
    return model


def another_forward() -> nn.Module:
    model = llama()
    kind = type("Mine", (type(model.model.layers[0]),), {})
    for layer in model.model.layers:
        layer.__class__ = kind
    return model


def rewired() -> nn.Module:
    model = llama()
    rewire(model, "siamese")
    return model


def unknown() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))


def cross_attention() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=31, add_cross_attention=True, bos_token_id=1, eos_token_id=2
        )
    )


def neox() -> nn.Module:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL))


def olmo2() -> nn.Module:
    return hf.Olmo2ForCausalLM(hf.Olmo2Config(**SMALL))


CASES: list[tuple[Callable[[], nn.Module], str, str]] = [
    (shared_norm, "siamese", "model.layers.1.input_layernorm"),
    (shared_gain, "siamese", "model.norm"),
    (shared_block, "siamese", "model.layers.1"),
    (mixed_blocks, "siamese", "model.layers.1"),
    (another_forward, "siamese", "model.layers"),
    (rewired, "siamese", "already"),
    (unknown, "siamese", "Linear"),
    (cross_attention, "siamese", "cross-attention"),
    (neox, "siamese", "parallel"),
    (olmo2, "siamese", "Olmo2DecoderLayer"),
    (olmo2, "siamese-post-pre", "preserve=False"),
    (llama, "post", "preserve=False"),
    (llama, "siamse", "siamese"),
]


@pytest.mark.parametrize(("build", "topology", "named"), CASES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_a_refusal_names_the_module_and_changes_nothing(
    build: Callable[[], nn.Module], topology: str, named: str
) -> None:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    classes = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(UserError) as refusal:
        rewire(model, topology)
    assert named in str(refusal.value) and "\n" not in str(refusal.value)
    assert [(name, type(module)) for name, module in model.named_modules()] == classes
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_a_norm_that_computes_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="dyt"):
        rewire(llama(), "siamese", norm="dyt")


def test_from_scratch_fused_projections_cannot_have_qkv_norm() -> None:
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, bos_token_id=1, eos_token_id=2)
    )
    with pytest.raises(UserError, match="one projection|of its own|of their own|QKV"):
        rewire(model, "siamese", preserve=False)


def test_olmo2_starts_from_scratch() -> None:
    model = olmo2()
    report = rewire(model, "siamese", preserve=False)
    assert not report.function_kept
    assert model(torch.arange(3, 11)[None]).logits.isfinite().all()
