"""Rewire every known family of Hugging Face, timm's Vision Transformers, and DiT, and say what was kept.

Models are built from their own configuration classes with random weights, norms included; nothing is downloaded. Run
`python benchmarks/rewire_table.py OUT.json [FAMILY ...]`; with `PYTHONPATH=.timm` the family `timm` measures all of
timm's. Rows of families that are not asked for stay in the file, which is written after every family.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import siamesenorm
from siamesenorm.errors import UserError
from siamesenorm.norms import Norm
from siamesenorm.training.execution import describe_environment

TOPOLOGIES = ("siamese-post-pre:normalized_input=false", "siamese-post-pre", "siamese", "attnres")
COMPILED = "siamese-post-pre"
"""The topology whose training step is compiled too: a minute each."""
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {"init_values": 0.1}),
    "deit": ("deit_tiny_patch16_224", {}),
    "deit-distilled": ("deit_tiny_distilled_patch16_224", {}),
    "eva02": ("eva02_tiny_patch14_224", {"img_size": 28, "use_fc_norm": False, "init_values": 0.1}),
    "eva02, mean of tokens": ("eva02_tiny_patch14_224", {"img_size": 28}),
    "beit": ("beit_base_patch16_224", {"use_fc_norm": False}),
    "cait": ("cait_xxs24_224", {}),
}
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build a model, call it, save it, and where LoRA goes."""

    build: Callable[[], nn.Module]
    call: Callable[[nn.Module], Tensor]
    save: Callable[[nn.Module, str], object]
    lora: tuple[str, ...] | str
    prompt: Mapping[str, Tensor] | None = None
    """The inputs of generation, None for a model that does not generate."""
    backend: str = "inductor"
    """With which torch.compile compiles the step: a minute each, or, without generated code, seconds."""


def decoders() -> dict[str, Family]:
    """Return the families of Hugging Face decoders."""
    import transformers as hf

    grouped = {**SMALL, "num_key_value_heads": 2}
    gpt2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97, "n_positions": 64, "bos_token_id": 1}
    configs: dict[str, Callable[[], Any]] = {
        "Llama": lambda: hf.LlamaConfig(**grouped),
        "Qwen3": lambda: hf.Qwen3Config(**grouped, head_dim=8),
        "Mistral": lambda: hf.MistralConfig(**grouped),
        "Gemma 2": lambda: hf.Gemma2Config(**grouped, head_dim=8),
        "Gemma 3": lambda: hf.Gemma3TextConfig(**grouped, head_dim=8),
        "GPT-2": lambda: hf.GPT2Config(**gpt2, eos_token_id=2, pad_token_id=0),
        "GPT-NeoX": lambda: hf.GPTNeoXConfig(**SMALL),
        "GPT-NeoX, sequential": lambda: hf.GPTNeoXConfig(**SMALL, use_parallel_residual=False),
        "OLMo": lambda: hf.OlmoConfig(**grouped),
        "OLMoE": lambda: hf.OlmoeConfig(**grouped, num_experts=4, num_experts_per_tok=2),
        "OLMo 2": lambda: hf.Olmo2Config(**grouped),
    }
    targets = {"GPT-2": ("c_attn",), "GPT-NeoX": ("query_key_value",), "GPT-NeoX, sequential": ("query_key_value",)}
    tokens = torch.arange(3, 25).reshape(2, 11)
    return {
        name: Family(
            build=lambda config=config: hf.AutoModelForCausalLM.from_config(config()),
            call=lambda model: model(tokens.to(next(model.parameters()).device)).logits,
            save=lambda model, directory: model.save_pretrained(directory),
            lora=targets.get(name, ("q_proj", "v_proj")),
            prompt={"input_ids": torch.arange(3, 15).reshape(2, 6)},
        )
        for name, config in configs.items()
    }


def further() -> dict[str, Family]:
    """Return the families whose small configurations are those of the tests; compiled without a code generator."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import huggingface_families as small

    def call(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        found = model(**inputs)
        output: Tensor = found["logits"] if "logits" in found else found[0]
        return output

    def of(name: str, model: nn.Module, inputs: Mapping[str, Tensor]) -> Family:
        prompt = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
        return Family(
            build=lambda: copy.deepcopy(model),
            call=lambda model: call(model, inputs),
            save=lambda model, directory: model.save_pretrained(directory),
            lora=small.LORA.get(name, "all-linear"),
            prompt=prompt if name in (*small.DECODERS, *small.TWO_STACKS, *small.MULTIMODAL) else None,
            backend="aot_eager",
        )

    names = (*small.DECODERS, *small.TWO_STACKS, *small.ENCODERS, *small.POST_NORM)
    models = ((name, small.build_family(name)) for name in names)
    families = {name: of(name, model, small.small_inputs(model)) for name, model in models}
    return families | {name: of(name, *small.of_images_and_text(name)) for name in small.MULTIMODAL}


def diffusion() -> dict[str, Family]:
    """Return diffusers' DiT and PixArt."""
    from diffusers import DiTTransformer2DModel, PixArtTransformer2DModel

    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, 4, 4, generator=generator)
    steps, labels = torch.tensor([3, 700]), torch.tensor([1, 9])
    return {
        "DiT": Family(
            build=lambda: DiTTransformer2DModel(
                num_attention_heads=2, attention_head_dim=8, out_channels=8, num_layers=3, sample_size=4,
                num_embeds_ada_norm=10,
            ),
            call=lambda model: model(latents, timestep=steps, class_labels=labels).sample,
            save=lambda model, directory: model.save_pretrained(directory),
            lora=("to_q", "to_v"),
        ),
        "PixArt": Family(
            build=lambda: PixArtTransformer2DModel(
                num_attention_heads=2, attention_head_dim=8, num_layers=1, cross_attention_dim=16, caption_channels=16,
                sample_size=8,
            ),
            call=lambda model: model(latents.repeat(1, 1, 2, 2), torch.zeros(2, 3, 16), steps).sample,
            save=lambda model, directory: model.save_pretrained(directory),
            lora=("to_q", "to_v"),
        ),
    }  # fmt: skip


def vision() -> dict[str, Family]:
    """Return timm's ViT and DeiT; beside a torch for the CPU, torchvision needs one module that it cannot import."""
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
    import timm

    from siamesenorm.interop.timm import save_pretrained

    def build(name: str, options: dict[str, Any]) -> nn.Module:
        return timm.create_model(
            name, **{"img_size": 32, "depth": 3, "embed_dim": 24, "num_heads": 2, "num_classes": 5, **options}
        )

    def call(model: nn.Module) -> Tensor:
        size = model.patch_embed.img_size
        return model(torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0)))

    return {
        name: Family(
            build=lambda entry=entry: build(*entry), call=call, save=save_pretrained,
            lora="all-linear" if "eva" in name else ("qkv", "fc1"),
        )
        for name, entry in TIMM.items()
    }  # fmt: skip


def perturbed(model: nn.Module) -> nn.Module:
    """Move every parameter away from its initial value, norms' gains too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def measure(name: str, family: Family, topology: str) -> dict[str, Any]:
    """Return one row of the table."""
    torch.manual_seed(0)
    model = perturbed(family.build())
    with torch.no_grad():
        before = family.call(model)
    generated = greedy(model, family.prompt) if family.prompt else None
    row: dict[str, Any] = {"family": name, "topology": topology}
    try:
        report = siamesenorm.rewire(model, topology)
    except UserError as reason:
        return {**row, "outcome": f"refused: {reason}"}
    with torch.no_grad():
        difference = float((family.call(model) - before).abs().max())
    row |= {
        "outcome": "exact" if report.function_kept else "up to eps",
        "largest_difference": difference,
        "largest_output": float(before.abs().max()),
    }
    if generated is not None:
        row["same_generation"] = bool(torch.equal(greedy(model, family.prompt), generated))
    row["zeroed_gains_with_gradient"] = awake(family, model)
    row["reload_bit_equal"] = reloads(family, model)
    row["lora_starts_equal"] = attaches(family, model)
    if topology == COMPILED:
        row["compiled_step_equal"] = compiles(family, model)
    return row


def greedy(model: nn.Module, prompt: Mapping[str, Tensor]) -> Tensor:
    """Return twelve tokens generated with a cache; Whisper's own `generate` cuts sound in pieces."""
    from transformers import GenerationMixin

    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "use_cache": True}
    out: Tensor = GenerationMixin.generate(model, **prompt, **options)
    return out


def awake(family: Family, model: nn.Module) -> str:
    """Return how many of the zeroed gains, gates and biases receive a gradient that is not zero."""
    model.zero_grad()
    family.call(model).square().mean().backward()
    zeroed = [parameter for parameter in model.parameters() if parameter.numel() and not parameter.any()]
    for norm in model.modules():
        # A gain that is stored as 1 + w is zero at w = -1.
        if isinstance(norm, Norm) and norm.function().offset and (norm.gain == -norm.function().offset).all():
            zeroed.append(norm.gain)
    alive = sum(parameter.grad is not None and bool(parameter.grad.any()) for parameter in zeroed)
    model.zero_grad()
    return f"{alive} of {len(zeroed)}"


def reloads(family: Family, model: nn.Module) -> bool:
    """Return whether the saved and loaded model gives the same bits."""
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        family.save(model, directory)
        loaded = siamesenorm.from_pretrained(directory).eval()
        return torch.equal(family.call(loaded), family.call(model))


def attaches(family: Family, model: nn.Module) -> bool:
    """Return whether LoRA attaches, and the model with fresh adapters computes what it did."""
    import peft

    adapted = peft.get_peft_model(
        copy.deepcopy(model),
        peft.LoraConfig(target_modules="all-linear" if "all-linear" in family.lora else list(family.lora)),
    )
    with torch.no_grad():  # torch may compute frozen weights by another kernel
        return torch.equal(
            family.call(adapted.base_model.model), family.call(copy.deepcopy(model).requires_grad_(False))
        )


def compiles(family: Family, model: nn.Module) -> bool:
    """Return whether one step of SGD under torch.compile moves the parameters as one in eager mode does, to 1e-5."""
    torch._dynamo.reset()
    eager, compiled = copy.deepcopy(model), copy.deepcopy(model)
    for candidate, forward in ((eager, eager), (compiled, torch.compile(compiled, backend=family.backend))):
        optimizer = torch.optim.SGD(candidate.parameters(), lr=1e-2)
        family.call(forward).square().mean().backward()
        optimizer.step()
    pairs = zip(eager.parameters(), compiled.parameters(), strict=True)
    return all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)


def main() -> None:
    """Measure the families named on the command line, or all that this session can import."""
    path, asked = Path(sys.argv[1]), sys.argv[2:]
    warnings.filterwarnings("ignore")
    families = vision() if asked == ["timm"] else {**decoders(), **diffusion(), **further()}
    chosen = {name: family for name, family in families.items() if not asked or name in asked or asked == ["timm"]}
    for name, family in chosen.items():
        rows = [measure(name, family, topology) for topology in TOPOLOGIES]
        print(*map(json.dumps, rows), sep="\n", flush=True)
        kept = json.loads(path.read_text())["rows"] if path.exists() else []
        order = list(dict.fromkeys([*(row["family"] for row in kept), name]))
        rows += [row for row in kept if row["family"] != name]
        rows.sort(key=lambda row: order.index(row["family"]))
        record = {"benchmark": "rewire", "environment": describe_environment("cpu"), "rows": rows}
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
