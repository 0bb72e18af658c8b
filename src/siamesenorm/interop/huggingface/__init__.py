"""Models in Hugging Face transformers, native and operated: importing this package makes their classes known."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from siamesenorm.interop.huggingface.configuration import SiameseNormConfig
from siamesenorm.interop.huggingface.modeling import SiameseNormForCausalLM, SiameseNormModel
from siamesenorm.interop.huggingface.operated import operated_class, register, register_families
from siamesenorm.interop.remote_code import MODEL_TYPE

__all__ = ["SiameseNormConfig", "SiameseNormForCausalLM", "SiameseNormModel", "operated_class", "register"]

AutoConfig.register(MODEL_TYPE, SiameseNormConfig, exist_ok=True)
AutoModel.register(SiameseNormConfig, SiameseNormModel, exist_ok=True)
AutoModelForCausalLM.register(SiameseNormConfig, SiameseNormForCausalLM, exist_ok=True)
register_families()
