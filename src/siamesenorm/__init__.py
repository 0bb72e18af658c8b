"""Where and how should a Transformer normalise its residual path?

The library: residual topologies (SiameseNorm first), normalisation operators, and models that combine them freely. It
needs torch alone. The laboratory (training, comparison, command line) is in the subpackages and the `lab` extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from siamesenorm.analysis import StreamMonitor
    from siamesenorm.interop.rewire import rewire
    from siamesenorm.interop.stored import from_pretrained
    from siamesenorm.interop.swap_norms import swap_norms
    from siamesenorm.models.language import (
        LanguageModel,
        LanguageModelConfig,
        build_language_model,
        language_model_config,
    )
    from siamesenorm.norms import Norm, available_norms, build_norm
    from siamesenorm.topologies import (
        ResidualSpec,
        Topology,
        available_topologies,
        build_topology,
        register_topology,
        transformer_places,
    )

__version__ = "0.1.0"

__all__ = [
    "LanguageModel",
    "LanguageModelConfig",
    "ResidualSpec",
    "Norm",
    "StreamMonitor",
    "Topology",
    "available_norms",
    "available_topologies",
    "build_language_model",
    "build_norm",
    "build_topology",
    "from_pretrained",
    "language_model_config",
    "register_topology",
    "rewire",
    "swap_norms",
    "transformer_places",
]

_MODULES = (
    "siamesenorm.models.language",
    "siamesenorm.norms",
    "siamesenorm.topologies",
    "siamesenorm.interop.stored",
    "siamesenorm.interop.rewire",
    "siamesenorm.interop.swap_norms",
)
_LABORATORY = {"StreamMonitor": "siamesenorm.analysis"}
"""What needs the `lab` extra is imported for itself alone."""


def __getattr__(name: str) -> Any:
    """Import the public names at the first use of one: the command line shows its help without loading torch."""
    if name not in __all__:
        raise AttributeError(f"module 'siamesenorm' has no attribute {name!r}")
    if name in _LABORATORY:
        globals()[name] = getattr(importlib.import_module(_LABORATORY[name]), name)
        return globals()[name]
    for module in map(importlib.import_module, _MODULES):
        globals().update({public: getattr(module, public) for public in __all__ if hasattr(module, public)})
    return globals()[name]
