"""Boundaries to test, and the slow, obvious formula that they must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from siamesenorm.kernels.boundary_plain import Constants, Gains, Parts

EPS = 1e-5
NUMBERS = {"skip": 1.3, "scale": 0.6, "identity_scale": 0.8}


@dataclass(frozen=True)
class Case:
    """Which parts a boundary has."""

    name: str
    gains: str
    two_streams: bool = True
    constants: str = ""

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("siamese-mlp", "post_norm_gain identity_gain input_gain", constants="scale"),
    Case("siamese-attention", "gate identity_gain", constants="scale"),
    Case("siamese-post-pre", "post_norm_gain identity_gain", constants="scale"),
    Case("siamese-first", "identity_gain"),
    Case("pre", "input_gain", two_streams=False),
    Case("post", "post_norm_gain", two_streams=False),
    Case("deepnorm", "post_norm_gain", two_streams=False, constants="skip"),
    Case("mix-ln-switch", "post_norm_gain input_gain", two_streams=False),
    Case("residual", "post_norm_gain", constants="identity_scale"),
    Case("everything", "post_norm_gain gate identity_gain input_gain", constants="skip scale identity_scale"),
    Case("nothing", "", two_streams=False),
)


@dataclass
class Inputs:
    """The arguments of the operator."""

    bounded: Tensor
    output: Tensor
    identity: Tensor | None
    constants: Constants
    gains: Gains
    centred: bool

    @property
    def parts(self) -> Parts:
        return Parts(self.constants, self.gains, EPS, self.centred)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.bounded, self.output, self.identity, *self.constants, *self.gains, EPS, self.centred)

    @property
    def learned(self) -> list[Tensor]:
        """Everything that has a gradient."""
        rows = [part for part in (self.bounded, self.output, self.identity) if part is not None]
        return [*rows, *self.gains.present]

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        def changed(part: Tensor | None) -> Tensor | None:
            return None if part is None else change(part)

        rows = map(changed, (self.bounded, self.output, self.identity))
        constants, gains = Constants(*map(changed, self.constants)), Gains(*map(changed, self.gains))
        return Inputs(*rows, constants, gains, self.centred)

    def double(self) -> Inputs:
        """Return copies in fp64 that ask for gradients."""
        copies = self.map(lambda part: part.detach().double())
        for part in copies.learned:
            part.requires_grad_()
        return copies


def draw_inputs(
    case: Case,
    shape: tuple[int, ...],
    *,
    centred: bool = False,
    streams: torch.dtype = torch.float64,
    output: torch.dtype | None = None,
    gain: torch.dtype | None = None,
    zero: str = "",
    seed: int = 5,
) -> Inputs:
    """Return random inputs; `zero` names the gains that are 0."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    gain = gain or torch.promote_types(streams, torch.float32)
    present = case.gains.split()
    present += [name.replace("gain", "bias") for name in present if centred and name != "gate"]

    def draw_gain(name: str) -> Tensor | None:
        if name not in present:
            return None
        return torch.zeros(shape[-1], dtype=gain, requires_grad=True) if name in zero else draw(shape[-1], dtype=gain)

    numbers = (torch.tensor(value, dtype=gain) if name in case.constants else None for name, value in NUMBERS.items())
    return Inputs(
        draw(*shape, dtype=streams),
        draw(*shape, dtype=output or streams),
        draw(*shape, dtype=streams) if case.two_streams else None,
        Constants(*numbers),
        Gains(*map(draw_gain, Gains._fields)),
        centred,
    )


def reference(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return (X', Y', H), or (X', H) of one stream, by PyTorch's own norms and gradients."""
    skip, scale, identity_scale = (1.0 if number is None else number for number in inputs.constants)
    gains = inputs.gains

    def normalised(x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        if gain is None:
            return x
        if inputs.centred:
            return F.layer_norm(x, x.shape[-1:], gain, bias, EPS)
        return F.rms_norm(x, x.shape[-1:], gain, EPS)

    bounded = normalised(skip * inputs.bounded + scale * inputs.output, gains.post_norm_gain, gains.post_norm_bias)
    total, identity = bounded if gains.gate is None else gains.gate * bounded, None
    if inputs.identity is not None:
        identity = inputs.identity + identity_scale * inputs.output
        if gains.identity_gain is not None:
            total = total + normalised(identity, gains.identity_gain, gains.identity_bias)
    h = normalised(total, gains.input_gain, gains.input_bias)
    return (bounded, h) if identity is None else (bounded, identity, h)


def weighted(results: tuple[Tensor, ...], seed: int = 7) -> Tensor:
    """Return a loss on every result, with weights of its own for each element."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(result.shape, generator=generator, dtype=torch.float64) for result in results]
    return sum((result.double() * weight).sum() for result, weight in zip(results, weights, strict=True))
