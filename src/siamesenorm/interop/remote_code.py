"""The names that an exported model carries, and the short file of code that goes with it.

Hugging Face runs that file where this package was not imported; it imports it. So an exported model has no second copy
of its code, and does what the installed version does.
"""

from __future__ import annotations

MODEL_TYPE = "siamesenorm"
ARCHITECTURE = "SiameseNormForCausalLM"
PREFIX = "model."
"""Stands before the native name of every parameter."""

REMOTE_CODE_FILE = "modeling_siamesenorm.py"
REMOTE_CODE = '''\
"""The classes of this model are those of the package siamesenorm, which has to be installed."""

try:
    from siamesenorm.interop.huggingface import SiameseNormConfig, SiameseNormForCausalLM, SiameseNormModel
except ImportError as error:
    raise ImportError(
        f"this model needs the package siamesenorm with its extra 'hf' ({error}): pip install 'siamesenorm[hf]'"
    ) from error

__all__ = ["SiameseNormConfig", "SiameseNormForCausalLM", "SiameseNormModel"]
'''
AUTO_MAP = {
    "AutoConfig": "modeling_siamesenorm.SiameseNormConfig",
    "AutoModel": "modeling_siamesenorm.SiameseNormModel",
    "AutoModelForCausalLM": "modeling_siamesenorm.SiameseNormForCausalLM",
}
