"""Small models of the further families of transformers that `rewire` recognises by their modules."""

from __future__ import annotations

import inspect
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
OF_BART = {"d_model": DIM, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
           "forced_eos_token_id": None, "decoder_start_token_id": 1, "max_position_embeddings": 64,
           **{f"{part}_{name}": value for part in ("encoder", "decoder")
              for name, value in (("layers", DEPTH), ("attention_heads", 2), ("ffn_dim", 24))}}  # fmt: skip
OF_T5 = {"d_model": DIM, "d_kv": 8, "d_ff": 24, "num_layers": DEPTH, "num_heads": 2, "vocab_size": VOCABULARY,
         "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 1}  # fmt: skip
OF_WHISPER = {**OF_BART, "num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 32}
TWO_STACKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5", "T5ForConditionalGeneration", {**OF_T5, "num_decoder_layers": 1, "feed_forward_proj": "gated-gelu"}),
    "whisper": ("Whisper", "WhisperForConditionalGeneration", OF_WHISPER),
    "pegasus": ("Pegasus", "PegasusForConditionalGeneration", OF_BART),
    "mbart": ("MBart", "MBartForConditionalGeneration", OF_BART),
}
ENCODERS |= {
    "whisper-encoder": ("Whisper", "WhisperForAudioClassification", OF_WHISPER),
    "t5-encoder": ("T5", "T5EncoderModel", OF_T5),
    "modernbert": ("ModernBert", "ModernBertForMaskedLM", {**SHAPE, "num_hidden_layers": 3, "local_attention": 4,
                                                           "cls_token_id": 1, "sep_token_id": 2}),
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
SOUND = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(2))


def build_family(family: str, **options: Any) -> Any:
    """Return a model in evaluation mode whose every parameter was moved at random."""
    torch.manual_seed(0)
    if family in DECODERS:
        kind, own = DECODERS[family]
        name = "AutoModelForCausalLM"
    else:
        kind, name, own = {**ENCODERS, **TWO_STACKS, **POST_NORM}[family]
    config = getattr(transformers, f"{kind}Config")(**{**own, **options})
    if family in DECODERS:
        return moved(transformers.AutoModelForCausalLM.from_config(config))
    return moved(getattr(transformers, name)(config))


def small_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Return the arguments of a model's forward."""
    name = str(model.main_input_name)
    given = {name: {"pixel_values": IMAGE, "input_features": SOUND}.get(name, TOKENS)}
    decodes = "decoder_input_ids" in inspect.signature(model.forward).parameters
    return {**given, "decoder_input_ids": TOKENS} if decodes else given


@torch.no_grad()
def first_output(model: nn.Module) -> Tensor:
    """Return the logits, or the last hidden states of a model without a head."""
    found = model(**small_inputs(model))
    return found["logits"] if "logits" in found else found[0]


SEEN = {**IMAGES, "image_size": 16}
SPOKEN = {**GROUPED, "head_dim": 8}
MULTIMODAL: dict[str, tuple[str, tuple[str, dict[str, Any]], tuple[str, dict[str, Any]], dict[str, Any], int]] = {
    "llava": ("Llava", ("CLIPVision", SEEN), ("Llama", SPOKEN), {}, 16),
    "paligemma2": ("PaliGemma", ("SiglipVision", SEEN), ("Gemma2", SPOKEN), {"projection_dim": DIM}, 16),
    "internvl": ("InternVL", ("InternVLVision", {**SEEN, "image_size": [16, 16], "patch_size": [4, 4]}),
                 ("Qwen2", GROUPED), {}, 4),
    "mistral3": ("Mistral3", ("PixtralVision", {**SEEN, "head_dim": 8}), ("Mistral", SPOKEN),
                 {"spatial_merge_size": 2}, 4),
    "idefics3": ("Idefics3", ("Idefics3Vision", SEEN), ("Llama", SPOKEN), {"scale_factor": 2, "pad_token_id": 0}, 4),
}  # fmt: skip
"""Names of configurations: of the model, its images and its text, and the number of tokens of an image."""


def of_images_and_text(family: str) -> tuple[Any, dict[str, Tensor]]:
    """Return a small model of images and text, whose language model is rewired, and the arguments of its forward."""
    name, (vision, seen), (text, spoken), own, count = MULTIMODAL[family]
    kind, image = getattr(transformers, f"{name}Config"), VOCABULARY - 1
    config = kind(
        vision_config=getattr(transformers, f"{vision}Config")(**seen),
        text_config=getattr(transformers, f"{text}Config")(**spoken),
        **{"image_token_index" if "image_token_index" in kind.__annotations__ else "image_token_id": image, **own},
    )
    torch.manual_seed(0)
    model = moved(transformers.AutoModelForImageTextToText.from_config(config))
    tokens = torch.cat((torch.full((2, count), image), TOKENS.clamp(max=VOCABULARY - 2)), dim=1)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    sizes = {"image_sizes": torch.tensor([[16, 16]] * 2)} if family == "mistral3" else {}
    return model, {**given, "pixel_values": pixels[:, None] if family == "idefics3" else pixels, **sizes}
