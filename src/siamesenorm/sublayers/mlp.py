"""The MLPs: gated (SwiGLU, arXiv 2002.05202) and plain (GELU)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.errors import unknown
from siamesenorm.sublayers.cache import NO_CONTEXT, Context
from siamesenorm.sublayers.projection import Projection, to_autocast

Activation = Literal["swiglu", "gelu"]


class GatedMLP(nn.Module):
    """SwiGLU: output(silu(gate(h)) * up(h)), h [..., dim], `hidden` the width of up and gate."""

    def __init__(self, dim: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = Projection(dim, hidden, role="mlp_up", bias=bias)
        self.gate = Projection(dim, hidden, role="mlp_gate", bias=bias)
        self.output = Projection(hidden, dim, role="mlp_output", bias=bias)

    def forward(self, h: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Return [..., dim]."""
        h = to_autocast(h)
        output: Tensor = self.output(F.silu(self.gate(h)) * self.up(h))
        return output


class PlainMLP(nn.Module):
    """output(gelu(up(h))), h [..., dim]."""

    def __init__(self, dim: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = Projection(dim, hidden, role="mlp_up", bias=bias)
        self.output = Projection(hidden, dim, role="mlp_output", bias=bias)

    def forward(self, h: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Return [..., dim]."""
        output: Tensor = self.output(F.gelu(self.up(h)))
        return output


def build_mlp(activation: Activation, dim: int, hidden: int, *, bias: bool = False) -> nn.Module:
    """Return the MLP of this activation; raises UserError for an unknown one."""
    classes: dict[str, type[GatedMLP] | type[PlainMLP]] = {"swiglu": GatedMLP, "gelu": PlainMLP}
    if activation not in classes:
        raise unknown("activation", activation, classes)
    return classes[activation](dim, hidden, bias=bias)
