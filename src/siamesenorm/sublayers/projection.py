"""A linear map with a role, so that an initialisation is a table of roles."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

ProjectionRole = Literal[
    "query", "key", "value", "attention_output", "mlp_up", "mlp_gate", "mlp_output", "head", "other"
]


class Projection(nn.Linear):
    """nn.Linear with a role, by which initialisations choose its distribution."""

    def __init__(self, in_features: int, out_features: int, *, role: ProjectionRole, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.role = role


def to_autocast(h: Tensor) -> Tensor:
    """Return h in the dtype to which autocast lowers the input of a projection.

    Each of several projections of one h would cast it by itself and keep its own copy for the backward pass.
    """
    device = h.device.type
    if h.dtype == torch.float64 or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return h
    return h.to(torch.get_autocast_dtype(device))
