"""Normalisation operators: one file an operator, one contract, one registry."""

from siamesenorm.norms.conditioned import AdaLN, AdaSeeDNorm, Modulation, modulate
from siamesenorm.norms.dyt import DyT
from siamesenorm.norms.function import Inexact, InexactKind, NormFunction
from siamesenorm.norms.norm import Norm, Role
from siamesenorm.norms.parameters import DeclaredModule, assign, declared_parameters
from siamesenorm.norms.registry import NORMS, NormSpec, available_norms, build_norm, norm_options, register_norm
from siamesenorm.norms.scale_invariant_norms import LayerNorm, RMSNorm, ScaleNorm
from siamesenorm.norms.seed_norm import SeeDNorm

__all__ = [
    "NORMS",
    "AdaLN",
    "AdaSeeDNorm",
    "DeclaredModule",
    "DyT",
    "Inexact",
    "InexactKind",
    "LayerNorm",
    "Modulation",
    "Norm",
    "NormFunction",
    "NormSpec",
    "RMSNorm",
    "Role",
    "ScaleNorm",
    "SeeDNorm",
    "assign",
    "available_norms",
    "build_norm",
    "declared_parameters",
    "modulate",
    "norm_options",
    "register_norm",
]
