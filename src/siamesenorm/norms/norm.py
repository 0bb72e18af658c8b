"""The contract of a normalisation operator."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Self, get_type_hints

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.kernels.launch import is_plain, refuse_transformations, suits_operator
from siamesenorm.kernels.norm_plain import Form, NarrowNorm, Weights, widest
from siamesenorm.kernels.operators import has_norm_kernels, normalise
from siamesenorm.norms.function import Inexact, NormFunction, compare_statistic, copy_bias_from, copy_gain_from
from siamesenorm.norms.parameters import DeclaredModule
from siamesenorm.options import Scalar

STRUCTURE = ("self", "dim", "affine", "axis")
"""Arguments of an operator that follow from its place; all others are its options."""


@dataclass(frozen=True, slots=True)
class Role:
    """The place of a norm and the domain of its model.

    `kind` is that of the sublayer after it ("attention", "mlp"), or "final" (before the head), "output" (of a sublayer)
    or "embedding".
    """

    kind: str = "mlp"
    domain: Literal["language", "vision"] = "language"


_hints_of = cache(get_type_hints)
"""A configuration reads the annotations of its norms many times."""


class Norm(DeclaredModule):
    """A map of one token's vector x of width `dim`, applied along `axis` (-1; 1 for channels-first images).

    Statistics and gains are computed in fp32 (fp64 for fp64 input) whatever the input's dtype and the gains' storage;
    the result has the input's dtype. Autocast lowers no operation of a norm.
    """

    statistic: ClassVar[str] = "unknown"
    """Registered name of the operator with this formula at unit gain and zero bias."""
    eps_in_mean_square: ClassVar[bool] = False
    """Whether the formula divides by sqrt(m + eps), m the mean square or the variance."""
    scale_invariant: bool
    """Whether N(c x) = N(x) for c > 0, up to eps, at the initial parameters and at any other."""
    idempotent: bool
    """Whether N(N(x)) = N(x) at the initial parameters, up to eps."""
    scales_embedding: ClassVar[bool] = False
    """Whether the language recipe multiplies the embedding by a learned scalar of initial value sqrt(d)."""
    kernels: Literal["auto", "plain", "fused"] = "auto"
    """Whether `forward` uses the formula ("plain") or one fused operator; a model sets it (`select_kernels`).

    "auto" uses the operator where a Triton kernel computes it and is faster: on CUDA, below fp64, channels last, from 1
    MiB on; the formula under torch.compile, which fuses it, and under the transformations that the operator does not
    support (torch.func, forward-mode differentiation). "fused" always uses the operator.
    """
    revision: ClassVar[int] = 0
    """Part of a run's identity, raised when a mended defect changes numbers."""
    note: str = ""
    """A line for a run's record where the recipe has no value for this width; usually empty."""
    offset: float = 0.0
    """Number that is added to the stored gain."""

    def __init__(self, dim: int, *, affine: bool = True, axis: int = -1) -> None:
        super().__init__()
        if dim < 1:
            raise UserError(f"dim is {dim}: a norm needs at least one channel")
        self.dim = dim
        self.affine = affine
        self.axis = axis

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Inherit no operator in a class with a formula of its own."""
        super().__init_subclass__(**keywords)
        if "formula" in vars(cls) and "operator_form" not in vars(cls):
            cls.fusible = False  # type: ignore[assignment, method-assign]

    @classmethod
    def for_role(cls, dim: int, role: Role, **options: Any) -> Self:
        """Build the operator with the published values for this role; most recipes do not depend on it."""
        return cls(dim, **options)

    @classmethod
    def option_hints(cls) -> dict[str, object]:
        """Return the annotations of the options."""
        hints = _hints_of(cls.__init__)
        return {name: hints.get(name, type(default)) for name, default in cls.option_defaults().items()}

    @classmethod
    def option_defaults(cls) -> dict[str, Scalar]:
        """Return the options with their default values; "auto" stands for the recipe's value for the role."""
        parameters = inspect.signature(cls.__init__).parameters
        return {name: value.default for name, value in parameters.items() if name not in STRUCTURE}

    def settings(self) -> dict[str, Scalar]:
        """Return the value of every option, with "auto" resolved; that of a parameter is whether it exists."""
        values = {name: getattr(self, name) for name in self.option_defaults()}
        present = {k: v is not None for k, v in values.items() if v is None or isinstance(v, nn.Parameter)}
        return {**values, **present}

    def select_kernels(self, kernels: str) -> Self:
        """Set `kernels` to "plain" if a model's are, else to "auto"; return the norm."""
        self.kernels = "plain" if kernels == "plain" else "auto"
        return self

    def formula(self, x: Tensor) -> Tensor:
        """Return the operator's value; x and the result are [..., dim] in fp32 or fp64."""
        raise NotImplementedError

    @property
    def fusible(self) -> bool:
        """Whether `fused` computes the formula with the options as they are."""
        return False

    def operator_form(self) -> tuple[Weights, Form]:
        """Return the weights and constants with which the fused operator computes the formula."""
        raise NotImplementedError

    def fused(self, x: Tensor) -> Tensor:
        """Return the formula's value by one fused operator; x and the result are [..., dim] of any float dtype."""
        weights, form = self.operator_form()
        y: Tensor = normalise(x, *weights, *form)[0]
        return y

    def takes_fused(self, x: Tensor) -> bool:
        """Return whether the operator computes an input; raises UserError if "fused" is chosen and it cannot."""
        if self.kernels == "fused":
            if not self.fusible:
                raise UserError(f"{self} has no fused operator: leave kernels at auto")
            refuse_transformations("norm")
            return True
        if self.kernels == "plain" or not self.fusible or self.axis != -1 or torch.compiler.is_compiling():
            return False
        return has_norm_kernels(x) and suits_operator(x)

    def _apply_formula(self, x: Tensor) -> Tensor:
        """Return the formula's value in the dtype of x [..., dim]; below fp32 the backward pass needs x alone."""
        wide = widest(x)
        if wide != x.dtype and self.fusible and is_plain(x) and not torch.compiler.is_compiling():
            weights, form = self.operator_form()
            y: Tensor = NarrowNorm.apply(x, self.formula, form, *weights)  # type: ignore[no-untyped-call]
            return y
        return self.formula(x.to(wide)).to(x.dtype)

    @torch.no_grad()
    def zero_(self) -> None:
        """Set gain and bias so that the operator returns 0 for every input; raises UserError without a gain."""
        gain, bias = getattr(self, "gain", None), getattr(self, "bias", None)
        if gain is None:
            raise UserError(f"{self} has no gain: it cannot be set to zero")
        gain.fill_(-self.offset)
        if bias is not None:
            bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the operator along the channel axis, in at least fp32, and return the input's dtype."""
        if x.shape[self.axis] != self.dim:
            raise UserError(
                f"the input has {x.shape[self.axis]} channels on axis {self.axis}: this norm has {self.dim}"
            )
        rows = x.movedim(self.axis, -1)
        y = self.fused(rows) if self.takes_fused(x) else self._apply_formula(rows)
        return y.movedim(-1, self.axis)

    def function(self) -> NormFunction:
        """Return the operator's function at its present parameters, as a gain and a bias around a statistic."""
        return NormFunction(
            statistic=self.statistic, dim=self.dim, axis=self.axis, eps=getattr(self, "eps", None),
            gain=getattr(self, "gain", None), offset=self.offset, bias=getattr(self, "bias", None),
        )  # fmt: skip

    def copy_from(self, source: NormFunction) -> list[Inexact]:
        """Copy gain and bias of the norm that this one replaces; return the differences of the two functions."""
        return [
            *compare_statistic(self.statistic, getattr(self, "eps", None), source),
            *copy_gain_from(source, getattr(self, "gain", None), self.offset),
            *copy_bias_from(source, getattr(self, "bias", None)),
        ]

    def extra_repr(self) -> str:
        """Show the width and the options that differ from their defaults."""
        defaults = {**self.option_defaults(), "affine": True, "axis": -1}
        shown = {**self.settings(), "affine": self.affine, "axis": self.axis}
        return ", ".join([f"{self.dim}", *(f"{k}={v}" for k, v in shown.items() if v != defaults[k])])


def check_number(what: str, value: float, least: float = -math.inf) -> float:
    """Return a number; raises UserError if it is not finite, or below `least`."""
    if not (math.isfinite(value) and value >= least):
        raise UserError(f"{what} is {value}: write a finite number{f' from {least:g} on' if least == 0 else ''}")
    return value
