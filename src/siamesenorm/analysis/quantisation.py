"""The loss of a model whose linear layers compute with rounded weights and activations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from siamesenorm.analysis.held_out import Analysis, HeldOut, PathParts, Results
from siamesenorm.errors import UserError
from siamesenorm.sublayers.moe import ExpertProjection

SCHEME = re.compile(r"w(\d+)a(\d+)")
BITS = range(2, 17)


@dataclass(frozen=True, kw_only=True)
class Quantisation(Analysis):
    r"""Held-out loss with the linear layers of the blocks rounded to integers, without calibration or training.

    In "w8a8" weights have 8 bits, with one scale for each output channel, and inputs 8, with one for each token: with b
    bits
    \(x \to s\,\mathrm{round}(x/s)\), \(s = \max|x| / (2^{b-1} - 1)\), symmetric, rounded to even, computed in at
    least fp32. Rounded are the linear layers of all blocks, experts included; routers, norms, the attention itself,
    embedding and head are not. 16 bits leave values as they are. "loss" is the model's own; "schemes" by name: "loss"
    and "rise".
    """

    name: ClassVar[str] = "quantisation"

    schemes: tuple[str, ...] = ("w8a8", "w4a4")

    def __post_init__(self) -> None:
        super().__post_init__()
        for scheme in self.schemes:
            bits = SCHEME.fullmatch(scheme)
            if bits is None or any(int(number) not in BITS for number in bits.groups()):
                raise UserError(f"scheme {scheme!r}: write bits of weights and activations, 2 to 16, such as w8a8")

    def require_model(self, model: nn.Module) -> None:
        """Raise UserError for a model whose blocks have no linear layers of PyTorch, or experts of another library."""
        super().require_model(model)
        if stacked := next(stacked_weights(model), None):
            raise UserError(
                f"{self.name}: the experts of a {type(model).__name__} are one parameter, {stacked}, that would not be "
                "rounded: choose a dense model, or one of this package"
            )
        if not linear_layers(model):
            raise UserError(f"{self.name}: the blocks of a {type(model).__name__} have no torch.nn.Linear to round")

    def measure(self, held_out: HeldOut) -> Results:
        """Return the losses."""
        layers, whole, schemes = linear_layers(held_out.model), held_out.loss(), {}
        for scheme in self.schemes:
            weight_bits, input_bits = map(int, SCHEME.fullmatch(scheme).groups())  # type: ignore[union-attr]
            with quantised(layers, weight_bits, input_bits):
                loss = held_out.loss()
            schemes[scheme] = {"loss": loss, "rise": loss - whole}
        return {"layers": len(layers), "unit": held_out.unit, "loss": whole, "schemes": schemes}


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers of the blocks, experts included and routers not."""
    blocks = PathParts.of(model).blocks.values()
    found = (module for block in blocks for module in block.modules())
    kept = (each for each in found if isinstance(each, (nn.Linear, ExpertProjection)))
    return [each for each in kept if getattr(each, "role", "") != "router"]


def stacked_weights(model: nn.Module) -> Iterator[str]:
    """Yield the names of three-dimensional parameters of blocks: stacked weights of experts of another library."""
    for path, block in PathParts.of(model).blocks.items():
        for place, module in block.named_modules():
            if not isinstance(module, (ExpertProjection, nn.Conv1d)):
                own = module.named_parameters(prefix=f"{path}.{place}".rstrip("."), recurse=False)
                yield from (name for name, weight in own if weight.dim() == 3)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Return x [..., n] with each row rounded to a multiple of its largest magnitude / (2^(bits - 1) - 1)."""
    if bits == 16:
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = wide.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.where(scale > 0, (wide / scale).round() * scale, wide).to(x.dtype)


@contextmanager
def quantised(layers: list[nn.Module], weight_bits: int, input_bits: int) -> Iterator[None]:
    """Round the weights of layers, and their inputs, inside the context; the weights return after it."""

    def round_input(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounded(arguments[0], input_bits), *arguments[1:])

    with torch.no_grad(), ExitStack() as contexts:
        for layer in layers:
            weight: Tensor = layer.weight  # type: ignore[assignment]
            contexts.callback(weight.copy_, weight.clone())
            weight.copy_(rounded(weight, weight_bits))
            contexts.callback(layer.register_forward_pre_hook(round_input).remove)
        yield
