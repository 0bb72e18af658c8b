"""Copies of a model that share its weights, and small inputs to run them on: a model is tried before it is changed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.backbones import is_timm, is_transformers, owner_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
AWAKE = 0.3
"""The standard deviation of what is added to gains and biases, and the probability of a dropout that is off."""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Compute without gradients, and leave the random state as it was."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(list(devices)):
        torch.manual_seed(0)
        yield


def share_copy(model: nn.Module, replaced: Callable[[nn.Parameter], nn.Parameter] = lambda weight: weight) -> Any:
    """Return a copy without hooks that shares the weights, or has what `replaced` returns for them."""
    memo: dict[int, Any] = {id(parameter): replaced(parameter) for parameter in model.parameters()}
    for module in model.modules():
        for name in HOOKS:
            hooks = getattr(module, name, None)
            if hooks:
                memo[id(hooks)] = type(hooks)()
    try:
        shadow = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as reason:
        raise UserError(f"{type(model).__name__} cannot be copied for a check: {reason}") from reason
    for module in shadow.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
    return shadow


def awake_copy(model: nn.Module) -> Any:
    """Return a copy in evaluation mode that shares large weights, and in which no part is silent."""
    shadow = share_copy(model, lambda weight: _moved(weight) if _may_be_silent(weight) else weight)
    for module in (*shadow.modules(), *_configurations(shadow)):
        for name, value in list(vars(module).items()):
            if (
                type(value) is float
                and value == 0.0
                and (name.endswith("dropout") or (name == "p" and isinstance(module, nn.Dropout)))
            ):
                setattr(module, name, AWAKE)
    return shadow.eval()


def _configurations(model: nn.Module) -> list[Any]:
    """Return the configurations that modules of a model read, each once."""
    found = {id(config): config for config in (vars(module).get("config") for module in model.modules()) if config}
    return [config for config in found.values() if hasattr(config, "__dict__")]


def _may_be_silent(parameter: nn.Parameter) -> bool:
    """Return whether a weight is a gain, a bias, a layer scale, or equal everywhere."""
    if not parameter.is_floating_point() or parameter.dtype.itemsize < 2 or parameter.numel() < 2:
        return False
    flat = parameter.detach().flatten()
    return parameter.dim() == 1 or bool((flat[:64] == flat[0]).all() and (flat == flat[0]).all())


def _moved(parameter: nn.Parameter) -> nn.Parameter:
    scale = AWAKE / (1 if parameter.dim() == 1 else parameter.shape[-1] ** 0.5)
    noise = torch.randn(parameter.shape, device=parameter.device, dtype=torch.float32)
    return nn.Parameter(parameter.detach() + (scale * noise).to(parameter.dtype), parameter.requires_grad)


# --- small inputs of the libraries' models


def small_inputs(model: Any, part: str = "") -> dict[str, Any] | None:
    """Return small random inputs of a model of transformers, timm or diffusers, for its `part`; None for any other."""
    floating = next((p for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1), torch.empty(0))
    if is_timm(model):
        embed = model.patch_embed
        return {"x": torch.randn(2, embed.proj.in_channels, *embed.img_size).to(floating)}
    config = getattr(model, "config", None)
    with suppress(AttributeError, NotImplementedError, TypeError):  # a configuration of another form: not known
        return _inputs_of(model, config, part, floating)
    return None


def _inputs_of(model: Any, config: Any, part: str, floating: Tensor) -> dict[str, Any] | None:
    device = floating.device
    if is_transformers(model):
        decodes = "decoder_input_ids" in inspect.signature(model.forward).parameters
        owner: Any = model if decodes else owner_of(model, part)
        kind, settings = str(owner.main_input_name), owner.config
        decoded = {"decoder_input_ids": torch.randint(settings.vocab_size, (1, 5), device=device)} if decodes else {}
        if kind == "input_ids":
            rows = owner.get_input_embeddings().weight.shape[0]
            tokens = torch.randint(0, min(rows, 1000), (1, 9), device=device)
            return {kind: tokens, "attention_mask": torch.ones_like(tokens), **decoded}
        if kind == "pixel_values":
            height, width = (settings.image_size,) * 2 if isinstance(settings.image_size, int) else settings.image_size
            return {kind: torch.randn(2, settings.num_channels, height, width, device=device).to(floating)}
        if kind == "input_features":
            frames = 2 * settings.max_source_positions
            return {kind: torch.randn(1, settings.num_mel_bins, frames, device=device).to(floating), **decoded}
    if type(model).__module__.startswith("diffusers.") and hasattr(config, "num_embeds_ada_norm"):
        shape = (2, config.in_channels, config.sample_size, config.sample_size)
        labels = torch.tensor([0, config.num_embeds_ada_norm - 1], device=device)
        return {"hidden_states": torch.randn(shape, device=device).to(floating),
                "timestep": torch.tensor([3, 700], device=device), "class_labels": labels}  # fmt: skip
    return None
