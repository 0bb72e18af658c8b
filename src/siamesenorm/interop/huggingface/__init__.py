"""Models in Hugging Face transformers, native and converted: importing this package registers their classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from siamesenorm.interop.huggingface.configuration import SiameseNormConfig
from siamesenorm.interop.huggingface.converted import converted_class, register, register_class, register_families
from siamesenorm.interop.huggingface.modeling import (
    SiameseNormForCausalLM,
    SiameseNormForSequenceClassification,
    SiameseNormForTokenClassification,
    SiameseNormModel,
)
from siamesenorm.interop.native_models import MODEL_TYPE

__all__ = [
    "SiameseNormConfig",
    "SiameseNormForCausalLM",
    "SiameseNormForSequenceClassification",
    "SiameseNormForTokenClassification",
    "SiameseNormModel",
    "converted_class",
    "register",
]

AutoConfig.register(MODEL_TYPE, SiameseNormConfig, exist_ok=True)
register_class(AutoModel, SiameseNormModel)
register_class(AutoModelForCausalLM, SiameseNormForCausalLM)
register_class(AutoModelForSequenceClassification, SiameseNormForSequenceClassification)
register_class(AutoModelForTokenClassification, SiameseNormForTokenClassification)
# Files have the native name of the head.
renaming = WeightRenaming(r"^model\.head\.", "lm_head.")
register_checkpoint_conversion_mapping(SiameseNormForCausalLM.__name__, [renaming], overwrite=True)
register_families()
