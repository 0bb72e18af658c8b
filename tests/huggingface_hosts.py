"""Small models of the first Hugging Face families of `rewire`, with weights that are all moved at random."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

DIM, DEPTH, VOCABULARY = 16, 2, 48
TOKENS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
SHAPE: dict[str, Any] = {
    "hidden_size": DIM, "intermediate_size": 24, "num_hidden_layers": DEPTH, "num_attention_heads": 2,
    "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SHAPE, "num_key_value_heads": 1}
HOSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "llama-tied": ("Llama", {**GROUPED, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 4}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "gemma3": ("Gemma3Text", {**GROUPED, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2}),
    "gpt2": ("GPT2", {"n_embd": DIM, "n_layer": DEPTH, "n_head": 2, "vocab_size": VOCABULARY, "bos_token_id": 1,
                      "eos_token_id": None, "pad_token_id": 0}),
    "gpt-neox": ("GPTNeoX", SHAPE),
    "gpt-neox-sequential": ("GPTNeoX", {**SHAPE, "use_parallel_residual": False}),
    "olmo": ("Olmo", {**GROUPED, "clip_qkv": 1.5}),
    "olmoe": ("Olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", GROUPED),
}  # fmt: skip
PRE_NORM = tuple(name for name in HOSTS if name != "olmo2")


def build_config(family: str, **options: Any) -> Any:
    """Return the configuration of a small model; whatever is random in training is off."""
    kind, own = HOSTS[family]
    config = getattr(transformers, f"{kind}Config")(**{**own, **options})
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


def build_host(family: str, auto: Any = transformers.AutoModelForCausalLM, **options: Any) -> Any:
    """Return a host in evaluation mode whose every parameter, the gains of norms too, was moved at random."""
    torch.manual_seed(0)
    return moved(auto.from_config(build_config(family, **options)))


def moved(model: nn.Module) -> Any:
    """Move all parameters at random and return the model in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor = TOKENS, **options: Any) -> Tensor:
    return model(tokens, **options).logits


def gradients(model: nn.Module, tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    """Return the gradient of each parameter under the language-modelling loss."""
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


class Wrapped(transformers.PreTrainedModel):
    """What people put around a model: a model of transformers that initialises what has no weights yet."""

    config_class = transformers.PreTrainedConfig

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(transformers.PreTrainedConfig())
        self.inner, self.score = inner, nn.Linear(DIM, 1)
        self.post_init()
