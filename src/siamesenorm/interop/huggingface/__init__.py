"""Models in Hugging Face transformers, native and converted: importing this package registers their classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from siamesenorm.interop.huggingface.configuration import SiameseNormConfig
from siamesenorm.interop.huggingface.converted import converted_class, register, register_families
from siamesenorm.interop.huggingface.modeling import SiameseNormForCausalLM, SiameseNormModel
from siamesenorm.interop.native_models import MODEL_TYPE

__all__ = ["SiameseNormConfig", "SiameseNormForCausalLM", "SiameseNormModel", "converted_class", "register"]

AutoConfig.register(MODEL_TYPE, SiameseNormConfig, exist_ok=True)
AutoModel.register(SiameseNormConfig, SiameseNormModel, exist_ok=True)
AutoModelForCausalLM.register(SiameseNormConfig, SiameseNormForCausalLM, exist_ok=True)
register_families()
