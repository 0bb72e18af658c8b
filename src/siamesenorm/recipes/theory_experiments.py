"""The experiments on theory by name, each a matter of seconds."""

from __future__ import annotations

from collections.abc import Callable

from siamesenorm.errors import unknown
from siamesenorm.recipes.gradient_theory import gradient_at_init, gradient_spikes
from siamesenorm.recipes.seednorm_theory import (
    dynamic_variance,
    dyt_equivalence,
    gradient_scaling,
    unbounded_activation,
)
from siamesenorm.recipes.theory import TheoryResult

THEORY: dict[str, Callable[[], TheoryResult]] = {
    "gradient-at-init": gradient_at_init,
    "gradient-spikes": gradient_spikes,
    "dynamic-variance": dynamic_variance,
    "gradient-scaling": gradient_scaling,
    "dyt-equivalence": dyt_equivalence,
    "unbounded-activation": unbounded_activation,
}


def run_theory(name: str) -> TheoryResult:
    """Run an experiment; raises UserError for an unknown name."""
    if name not in THEORY:
        raise unknown("experiment on theory", name, THEORY)
    return THEORY[name]()
