"""The experiments on theory by name, each a matter of seconds."""

from __future__ import annotations

from collections.abc import Callable

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
