"""A linear map with a role, so that an initialisation is a table of roles."""

from __future__ import annotations

from typing import Literal

from torch import nn

ProjectionRole = Literal[
    "query", "key", "value", "attention_output", "mlp_up", "mlp_gate", "mlp_output", "head", "other"
]


class Projection(nn.Linear):
    """nn.Linear with a role, by which initialisations choose its distribution."""

    def __init__(self, in_features: int, out_features: int, *, role: ProjectionRole, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.role = role
