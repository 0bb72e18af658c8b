"""DyT, the dynamic tanh (arXiv 2503.10622), and its recipe; Derf, the dynamic erf (arXiv 2512.10938).

The published language recipe has initial values for three widths. Between them they are interpolated linearly in the
width; below and above, those of the nearest width are taken. The norm's `note` then says so, for the run's record.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from torch import Tensor

from siamesenorm.norms.function import Inexact, InexactKind, NormFunction
from siamesenorm.norms.norm import Norm, Role
from siamesenorm.options import check_option

VISION_ALPHA = 0.5
LANGUAGE_ALPHA: dict[int, tuple[float, float]] = {4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}
"""Width -> initial a before attention, and everywhere else (before the MLP, final)."""


class DyT(Norm):
    """Squash each element instead of normalising: N(x) = g tanh(a x) + b, a one learned number (arXiv 2503.10622).

    g and b [dim] start at 1 and 0; a [1] starts at `alpha_initial`. "auto" is the recipe's value for the role: in
    vision and without a role a = 0.5 with bias; in language a depends on width and place, and there is no bias.
    Without `affine` there is neither g nor b. Weight decay applies to none of them.
    The language recipe also multiplies the embedding by a learned number: see `scales_embedding`.
    """

    statistic = "dyt"
    scale_invariant = False
    idempotent = False
    scales_embedding = True
    alpha: Tensor
    gain: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        dim: int,
        *,
        alpha_initial: float | Literal["auto"] = "auto",
        bias: bool | Literal["auto"] = "auto",
        affine: bool = True,
        axis: int = -1,
    ) -> None:
        super().__init__(dim, affine=affine, axis=axis)
        name = type(self).__name__
        self.alpha_initial = VISION_ALPHA if alpha_initial == "auto" else alpha_initial
        check_option(f"alpha_initial of {name}", alpha_initial, float | Literal["auto"])
        check_option(f"bias of {name}", bias, bool | Literal["auto"])
        self.declare("alpha", (1,), initial=self.alpha_initial)
        self.declare("gain", (dim,) if affine else None, initial=1.0)
        self.declare("bias", (dim,) if affine and bias else None, initial=0.0)  # "auto" without a role is with bias

    @classmethod
    def for_role(cls, dim: int, role: Role, **options: Any) -> Self:
        """Build it by the recipe of the role's domain; an explicit `alpha_initial` or `bias` has priority."""
        note = ""
        if role.domain == "language":
            if options.get("alpha_initial", "auto") == "auto":
                options["alpha_initial"], note = language_alpha(dim, role.kind)
            if options.get("bias", "auto") == "auto":
                options["bias"] = False
        norm = cls(dim, **options)
        norm.note = note
        return norm

    def copy_from(self, source: NormFunction) -> list[Inexact]:
        """Copy gain and bias; a starts anew."""
        found = super().copy_from(source)
        if source.statistic == self.statistic:
            found.append(Inexact(InexactKind.COEFFICIENT, "a starts at its initial value"))
        return found

    def squash(self, x: Tensor) -> Tensor:
        """Return tanh(a x)."""
        return torch.tanh(self.alpha.to(x.dtype) * x)

    def formula(self, x: Tensor) -> Tensor:
        """Return g tanh(a x) + b."""
        squashed = self.squash(x)
        if self.gain is not None:
            squashed = squashed * self.gain.to(x.dtype)
        return squashed if self.bias is None else squashed + self.bias.to(x.dtype)


class Derf(DyT):
    """Squash each element by the error function: N(x) = g erf(a x + s) + b (arXiv 2512.10938).

    g and b [dim] start at 1 and 0, a [1] at `alpha_initial` (0.5), s [1] at 0, whatever the role. Without `affine`
    there is neither g nor b. Weight decay applies to none of them.
    """

    statistic = "derf"
    scales_embedding = False
    shift: Tensor

    def __init__(
        self, dim: int, *, alpha_initial: float = 0.5, bias: bool = True, affine: bool = True, axis: int = -1
    ) -> None:
        super().__init__(dim, alpha_initial=alpha_initial, bias=bias, affine=affine, axis=axis)
        self.declare("shift", (1,), initial=0.0)

    @classmethod
    def for_role(cls, dim: int, role: Role, **options: Any) -> Self:
        """Build it: the recipe does not depend on the role."""
        return cls(dim, **options)

    def squash(self, x: Tensor) -> Tensor:
        """Return erf(a x + s)."""
        return torch.erf(self.alpha.to(x.dtype) * x + self.shift.to(x.dtype))


def language_alpha(dim: int, kind: str) -> tuple[float, str]:
    """Return the initial a of the language recipe at this width before a sublayer of this kind, and a note.

    The note is empty at a published width.
    """
    column = 0 if kind == "attention" else 1
    if dim in LANGUAGE_ALPHA:
        return LANGUAGE_ALPHA[dim][column], ""
    narrower = max((width for width in LANGUAGE_ALPHA if width < dim), default=min(LANGUAGE_ALPHA))
    wider = min((width for width in LANGUAGE_ALPHA if width > dim), default=max(LANGUAGE_ALPHA))
    low, high = LANGUAGE_ALPHA[narrower][column], LANGUAGE_ALPHA[wider][column]
    if narrower == wider:
        return low, f"DyT alpha {low:g} for {kind}: no published value at width {dim}, that of {wider} is taken"
    value = low + (high - low) * (dim - narrower) / (wider - narrower)
    return value, f"DyT alpha {value:.4g} for {kind}: interpolated at width {dim} between {narrower} and {wider}"
