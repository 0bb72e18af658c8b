"""Small models of the further families of transformers that `rewire` recognises by their modules."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from huggingface_hosts import DEPTH, DIM, GROUPED, SHAPE, TOKENS, VOCABULARY, moved

MIXTURE = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
OF_GPT2 = {"n_embd": DIM, "n_layer": DEPTH, "n_head": 2, "vocab_size": VOCABULARY, "bos_token_id": 1,
           "eos_token_id": None, "pad_token_id": 0}  # fmt: skip
IMAGES = {"hidden_size": DIM, "intermediate_size": 24, "num_hidden_layers": DEPTH, "num_attention_heads": 2,
          "image_size": 8, "patch_size": 4}  # fmt: skip
FALCON = {**SHAPE, "ffn_hidden_size": 24}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", GROUPED),
    "qwen2-moe": ("Qwen2Moe", {**MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 8,
                               "mlp_only_layers": [0]}),
    "qwen3-moe": ("Qwen3Moe", {**MIXTURE, "num_experts": 4, "head_dim": 8}),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4}),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 8}),
    "phi3": ("Phi3", {**GROUPED, "resid_pdrop": 0.1}),
    "phi": ("Phi", {**GROUPED, "resid_pdrop": 0.1}),
    "phimoe": ("Phimoe", {**GROUPED, "num_local_experts": 4}),
    "smollm3": ("SmolLM3", GROUPED),
    "granite": ("Granite", {**GROUPED, "residual_multiplier": 0.22, "embedding_multiplier": 12.0,
                            "attention_multiplier": 0.25, "logits_scaling": 4.0}),
    "granite-moe": ("GraniteMoe", {**GROUPED, "residual_multiplier": 0.22, "num_local_experts": 4,
                                   "num_experts_per_tok": 2}),
    "stablelm": ("StableLm", {**GROUPED, "hidden_dropout": 0.1}),
    "stablelm-parallel": ("StableLm", {**GROUPED, "use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2", GROUPED),
    "glm": ("Glm", {**GROUPED, "head_dim": 8}),
    "glm4": ("Glm4", {**GROUPED, "head_dim": 8}),
    "glm4-moe": ("Glm4Moe", {**MIXTURE, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
                             "topk_group": 1, "first_k_dense_replace": 1}),
    "deepseek-v3": ("DeepseekV3", {**MIXTURE, **LATENT, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1,
                                   "topk_group": 1, "first_k_dense_replace": 1}),
    "gpt-oss": ("GptOss", {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gptj": ("GPTJ", {**OF_GPT2, "rotary_dim": 4}),
    "codegen": ("CodeGen", {**OF_GPT2, "n_head": 4, "rotary_dim": 4}),
    "gpt-bigcode": ("GPTBigCode", OF_GPT2),
    "opt": ("OPT", {**SHAPE, "ffn_dim": 24, "word_embed_proj_dim": DIM, "max_position_embeddings": 64}),
    "bloom": ("Bloom", {**SHAPE, "n_head": 2}),
    "mpt": ("Mpt", {"d_model": DIM, "n_heads": 2, "n_layers": DEPTH, "vocab_size": VOCABULARY, "max_seq_len": 64}),
    "falcon": ("Falcon", {**FALCON, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False}),
    "falcon-two-norms": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 1}),
    "falcon-sequential": ("Falcon", {**FALCON, "parallel_attn": False, "new_decoder_architecture": False,
                                     "alibi": True}),
    "cohere": ("Cohere", GROUPED),
    "cohere2": ("Cohere2", {**GROUPED, "sliding_window": 4}),
    "nemotron": ("Nemotron", GROUPED),
    "helium": ("Helium", {**GROUPED, "head_dim": 8}),
    "seed-oss": ("SeedOss", {**GROUPED, "head_dim": 8}),
    "ministral": ("Ministral", {**GROUPED, "sliding_window": 4, "head_dim": 8}),
    "llama4": ("Llama4Text", {**GROUPED, "intermediate_size_mlp": 24, "num_local_experts": 4, "head_dim": 8,
                              "interleave_moe_layer_step": 2}),
    "nanochat": ("NanoChat", {**GROUPED, "head_dim": 8}),
}  # fmt: skip
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hf-vit": ("ViT", "ViTModel", IMAGES),
    "hf-deit": ("DeiT", "DeiTModel", IMAGES),
    "dinov2": ("Dinov2", "Dinov2Model", {**IMAGES, "mlp_ratio": 2}),
    "dinov3": ("DINOv3ViT", "DINOv3ViTModel", IMAGES),
    "siglip": ("SiglipVision", "SiglipVisionModel", IMAGES),
    "clip-vision": ("CLIPVision", "CLIPVisionModel", IMAGES),
    "clip-text": ("CLIPText", "CLIPTextModel", {**SHAPE, "eos_token_id": 2}),
    "siglip-text": ("SiglipText", "SiglipTextModel", {**SHAPE, "projection_size": DIM}),
    "roberta-prelayernorm": ("RobertaPreLayerNorm", "RobertaPreLayerNormForMaskedLM", {**SHAPE, "pad_token_id": 1}),
}  # fmt: skip
POST_NORM: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "BertModel", SHAPE),
    "roberta": ("Roberta", "RobertaModel", SHAPE),
    "distilbert": ("DistilBert", "DistilBertModel", {"dim": DIM, "hidden_dim": 24, "n_layers": DEPTH, "n_heads": 2,
                                                     "vocab_size": VOCABULARY}),
    "opt-post-norm": ("OPT", "OPTForCausalLM", {**DECODERS["opt"][1], "do_layer_norm_before": False}),
}  # fmt: skip
# PEFT on every linear map also takes routers, whose output is a tuple, and one that SigLIP's pooling reads itself.
LORA = {**dict.fromkeys(("mixtral", "phimoe", "qwen2-moe", "qwen3-moe", "granite-moe", "llama4", "gpt-oss",
                         "deepseek-v3", "glm4-moe"), ["o_proj"]), "siglip": ["q_proj"]}  # fmt: skip
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def build_family(family: str, **options: Any) -> Any:
    """Return a model in evaluation mode whose every parameter was moved at random."""
    torch.manual_seed(0)
    if family in DECODERS:
        kind, own = DECODERS[family]
        name = "AutoModelForCausalLM"
    else:
        kind, name, own = {**ENCODERS, **POST_NORM}[family]
    config = getattr(transformers, f"{kind}Config")(**{**own, **options})
    if family in DECODERS:
        return moved(transformers.AutoModelForCausalLM.from_config(config))
    return moved(getattr(transformers, name)(config))


@torch.no_grad()
def first_output(model: nn.Module) -> Tensor:
    """Return the logits, or the last hidden states of a model without a head."""
    return model(IMAGE)[0] if model.main_input_name == "pixel_values" else model(TOKENS)[0]
