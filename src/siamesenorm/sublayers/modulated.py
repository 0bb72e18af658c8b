"""Conditioning as an adapter around a sublayer (DiT's AdaLN-Zero, arXiv 2212.09748), independent of topologies."""

from __future__ import annotations

from torch import Tensor, nn

from siamesenorm.norms.conditioned import Modulation, modulate
from siamesenorm.sublayers.cache import Context

Losses = dict[str, Tensor]


class Modulated(nn.Module):
    """Scale, shift and gate a sublayer by a condition: gate(c) F(h (1 + scale(c)) + shift(c)) (arXiv 2212.09748).

    All three are zero at the start (AdaLN-Zero), so that the output is exactly 0. The norm before such a sublayer is
    built with `affine=False`; with SeeDNorm the whole is AdaSeeDNorm (arXiv 2510.22777).
    """

    def __init__(self, sublayer: nn.Module, dim: int, condition_dim: int) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.modulation = Modulation(dim, condition_dim, parts=3)

    def forward(self, h: Tensor, context: Context) -> Tensor | tuple[Tensor, Losses]:
        """Return the sublayer's gated output for h [batch, tokens, dim], and its losses if it has any."""
        shift, scale, gate = self.modulation(context.condition, like=h)
        output = self.sublayer(modulate(h, shift, scale), context)
        value, *losses = output if isinstance(output, tuple) else (output,)
        gated: Tensor = (gate * value).to(value.dtype)
        return (gated, *losses) if losses else gated
