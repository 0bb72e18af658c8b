"""Where and how should a Transformer normalise its residual path?

The library: residual topologies (SiameseNorm first), normalisation operators, and models that combine them freely. It
needs only torch. The laboratory (training, comparison, command line) is in the subpackages and the `lab` extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from siamesenorm.analysis import StreamMonitor
    from siamesenorm.errors import UserError
    from siamesenorm.interop.rewire import rewire
    from siamesenorm.interop.stored import from_pretrained
    from siamesenorm.interop.swap_norms import swap_norms
    from siamesenorm.models.block import Block, build_residual_path
    from siamesenorm.models.language import (
        LanguageModel,
        LanguageModelConfig,
        build_language_model,
        language_model_config,
    )
    from siamesenorm.models.vision import (
        VisionTransformer,
        VisionTransformerConfig,
        build_vision_transformer,
        vision_transformer_config,
    )
    from siamesenorm.norms import (
        AdaLN,
        AdaSeeDNorm,
        Inexact,
        Norm,
        NormFunction,
        NormSpec,
        available_norms,
        build_norm,
        register_norm,
    )
    from siamesenorm.sublayers.attention import Attention
    from siamesenorm.sublayers.sublayer import Context, Modulated
    from siamesenorm.tasks import available_tasks
    from siamesenorm.topologies import (
        BoundaryCost,
        Closing,
        Connection,
        Opening,
        Place,
        ResidualSpec,
        Topology,
        available_topologies,
        build_topology,
        register_topology,
        transformer_places,
    )
    from siamesenorm.training.verdict import StabilityMonitor

__version__ = "0.1.0"

__all__ = [
    "AdaLN",
    "AdaSeeDNorm",
    "Attention",
    "Block",
    "BoundaryCost",
    "Closing",
    "Connection",
    "Context",
    "Inexact",
    "LanguageModel",
    "LanguageModelConfig",
    "Modulated",
    "Norm",
    "NormFunction",
    "NormSpec",
    "Opening",
    "Place",
    "ResidualSpec",
    "StabilityMonitor",
    "StreamMonitor",
    "Topology",
    "UserError",
    "VisionTransformer",
    "VisionTransformerConfig",
    "available_norms",
    "available_tasks",
    "available_topologies",
    "build_language_model",
    "build_norm",
    "build_residual_path",
    "build_topology",
    "build_vision_transformer",
    "from_pretrained",
    "language_model_config",
    "register_norm",
    "register_topology",
    "rewire",
    "swap_norms",
    "transformer_places",
    "vision_transformer_config",
]

_MODULES = (
    "errors",
    "topologies",
    "norms",
    "models.language",
    "models.block",
    "models.vision",
    "sublayers.attention",
    "sublayers.sublayer",
    "interop.stored",
    "interop.rewire",
    "interop.swap_norms",
    "training.verdict",
    "analysis",
    "tasks",
)
"""Where the public names are, in the order in which they are searched: the last ones load the most."""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: the command line shows its help without loading torch."""
    if name in __all__:
        for module in _MODULES:
            found = importlib.import_module(f"siamesenorm.{module}")
            if hasattr(found, name):
                globals()[name] = getattr(found, name)
                return globals()[name]
    raise AttributeError(f"module 'siamesenorm' has no attribute {name!r}")
