"""Where and how should a Transformer normalise its residual path?

The library: residual topologies (SiameseNorm first), normalisation operators, and models that combine them freely. It
needs torch alone. The laboratory (training, comparison, command line) is in the subpackages and the `lab` extra.
"""

from siamesenorm.models.language import LanguageModel, LanguageModelConfig, build_language_model, language_model_config
from siamesenorm.norms import Norm, available_norms, build_norm
from siamesenorm.topologies import Materials, Topology, available_topologies, build_topology, register_topology

__version__ = "0.1.0"

__all__ = [
    "LanguageModel",
    "LanguageModelConfig",
    "Materials",
    "Norm",
    "Topology",
    "available_norms",
    "available_topologies",
    "build_language_model",
    "build_norm",
    "build_topology",
    "language_model_config",
    "register_topology",
]
