"""The MLPs: gated (SwiGLU, arXiv 2002.05202), and plain with GELU or ReLU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.sublayers.sublayer import NO_CONTEXT, Context, Projection, to_autocast

Activation = Literal["swiglu", "gelu", "gelu-tanh", "relu"]
PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


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
    """output(activate(up(h))), h [..., dim]; `activation` is a key of `PLAIN_ACTIVATIONS`."""

    def __init__(self, dim: int, hidden: int, *, activation: str = "gelu", bias: bool = False) -> None:
        super().__init__()
        self.activate = PLAIN_ACTIVATIONS[activation]
        self.up = Projection(dim, hidden, role="mlp_up", bias=bias)
        self.output = Projection(hidden, dim, role="mlp_output", bias=bias)

    def forward(self, h: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Return [..., dim]."""
        output: Tensor = self.output(self.activate(self.up(h)))
        return output


def build_mlp(activation: Activation, dim: int, hidden: int, *, bias: bool = False) -> nn.Module:
    """Return the MLP of this activation."""
    if activation == "swiglu":
        return GatedMLP(dim, hidden, bias=bias)
    return PlainMLP(dim, hidden, activation=activation, bias=bias)
