"""Normalisation operators: one file an operator, one contract, one registry."""

from siamesenorm.norms.declared import Declared, declared_parameters
from siamesenorm.norms.norm import Norm, Role
from siamesenorm.norms.registry import NORMS, NormSpec, available_norms, build_norm

__all__ = [
    "NORMS",
    "Declared",
    "Norm",
    "NormSpec",
    "Role",
    "available_norms",
    "build_norm",
    "declared_parameters",
]
