"""The analyses of a trained model by name."""

from __future__ import annotations

from typing import Any

from siamesenorm.analysis.depth import EffectiveDepth, Pruning
from siamesenorm.analysis.held_out import Analysis
from siamesenorm.analysis.jacobians import Jacobians
from siamesenorm.analysis.logit_lens import LogitLens
from siamesenorm.analysis.magnitudes import Fusion, HiddenMagnitude, StreamShare
from siamesenorm.analysis.outliers import Outliers
from siamesenorm.analysis.quantisation import Quantisation
from siamesenorm.errors import unknown

ANALYSES: dict[str, type[Analysis]] = {
    kind.name: kind
    for kind in (
        HiddenMagnitude, StreamShare, Fusion, LogitLens, Pruning, EffectiveDepth, Outliers, Quantisation, Jacobians,
    )
}  # fmt: skip
"""Analyses by the names of their records."""


def available_analyses() -> tuple[str, ...]:
    """Return the names of all analyses of a trained model."""
    return tuple(ANALYSES)


def build_analysis(name: str, **options: Any) -> Analysis:
    """Return an analysis with its options; raises UserError for an unknown name, option or value."""
    if name not in ANALYSES:
        raise unknown("analysis", name, ANALYSES)
    known = ANALYSES[name].__dataclass_fields__
    for option in options:
        if option not in known:
            raise unknown(f"option of {name}", option, known)
    return ANALYSES[name](**options)
