"""The language model: fair initial weights (law 5), attention norms, masks, the cache, sizes and bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm import (
    LanguageModel,
    LanguageModelConfig,
    available_norms,
    available_topologies,
    build_language_model,
    build_topology,
    language_model_config,
)
from siamesenorm.errors import UserError
from siamesenorm.models.language import SIZES
from siamesenorm.norms import NormSpec
from siamesenorm.sublayers.attention import Attention, AttentionCache, AttentionShape, rotation
from siamesenorm.sublayers.sublayer import Context, Projection

TOPOLOGIES = available_topologies()
TINY = {"depth": 3, "dim": 16, "heads": 4, "hidden": 24, "vocabulary": 11}


def tiny_model(topology: str = "siamese", *, seed: int = 0, **fields: Any) -> LanguageModel:
    """Return an fp64 model whose every parameter is random, gains and gates included."""
    model = build_language_model("nano", topology=topology, seed=seed, **{**TINY, **fields}).double()
    randomise(model)
    return model


def randomise(module: nn.Module, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.2)


def tokens(batch: int = 2, count: int = 7, seed: int = 3) -> Tensor:
    return torch.randint(0, TINY["vocabulary"], (batch, count), generator=torch.Generator().manual_seed(seed))


# --- law 5: the same initial sublayer weights for every topology


def sublayer_weights(model: LanguageModel) -> dict[str, Tensor]:
    projections = {name: module for name, module in model.named_modules() if isinstance(module, Projection)}
    return {"embedding": model.embedding.weight, **{name: module.weight for name, module in projections.items()}}


def declared_factors(model: LanguageModel) -> dict[str, float]:
    roles = {name: module.role for name, module in model.named_modules() if isinstance(module, Projection)}
    return {name: model.config.topology.initial_factor(role, TINY["depth"]) for name, role in roles.items()}


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_same_seed_gives_the_same_sublayer_weights(topology: str) -> None:
    weights = sublayer_weights(build_language_model("nano", topology="pre", seed=4, **TINY))
    model = build_language_model("nano", topology=topology, seed=4, **TINY)
    factors = declared_factors(model)
    ours = sublayer_weights(model)
    assert ours.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight * factors.get(name, 1.0), rtol=1e-6, atol=0)
    if topology != "deepnorm":
        assert all(torch.equal(ours[name], weight) for name, weight in weights.items())


def test_weights_depend_on_the_seed_alone() -> None:
    config = language_model_config("nano", **TINY)
    from_meta = build_language_model(config, seed=4)
    constructed = LanguageModel(config)
    torch.manual_seed(123)
    constructed.reset_parameters(seed=4)
    assert_same_parameters(constructed, from_meta)
    for name, weight in sublayer_weights(build_language_model(config, seed=5)).items():
        assert not torch.equal(weight, sublayer_weights(from_meta)[name])


def test_weights_of_a_block_do_not_depend_on_the_depth() -> None:
    shallow, deep = (build_language_model("nano", **{**TINY, "depth": depth}) for depth in (2, 4))
    assert torch.equal(shallow.blocks[1].mlp.output.weight, deep.blocks[1].mlp.output.weight)


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    build_language_model("nano", topology="dhc-2", **TINY)
    assert torch.equal(torch.get_rng_state(), before)


def assert_same_parameters(model: nn.Module, other: nn.Module) -> None:
    expected = dict(other.named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
    buffers = dict(other.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


# --- initial weights, role by role

WIDTH, HIDDEN, DEPTH = 128, 192, 3
MEGATRON = math.sqrt(2 / (5 * WIDTH))


def mitchell(role: str, block: int) -> float:
    fan_in = HIDDEN if role == "mlp_output" else WIDTH
    return fan_in**-0.5 / math.sqrt(2 * (block + 1)) if role.endswith("_output") else WIDTH**-0.5


STANDARD_DEVIATIONS = {
    "mitchell": mitchell,
    "normal": lambda role, block: 0.02,
    "megatron": lambda role, block: MEGATRON / (math.sqrt(2 * DEPTH) if role.endswith("_output") else 1),
}
TRUNCATION = 0.98658
"""Standard deviation of a unit normal cut at three standard deviations: sqrt(1 - 6 phi(3) / (2 Phi(3) - 1))."""


@pytest.mark.parametrize("topology", ["pre", "deepnorm"])
@pytest.mark.parametrize("scheme", STANDARD_DEVIATIONS)
def test_initial_standard_deviations(scheme: str, topology: str) -> None:
    sizes = {"depth": DEPTH, "dim": WIDTH, "heads": 2, "hidden": HIDDEN, "vocabulary": 300}
    model = build_language_model("nano", topology=topology, initialisation=scheme, **sizes)
    tamed = ("value", "attention_output", "mlp_up", "mlp_output") if topology == "deepnorm" else ()
    samples = [("embedding", 0, model.embedding.weight), ("head", 0, model.head.weight)]
    for index, block in enumerate(model.blocks):
        samples += [(m.role, index, m.weight) for m in block.modules() if isinstance(m, Projection)]
    assert {role for role, _, _ in samples} == {
        "embedding", "query", "key", "value", "attention_output", "mlp_up", "mlp_gate", "mlp_output", "head",
    }  # fmt: skip
    for role, block, weight in samples:
        expected = STANDARD_DEVIATIONS[scheme](role, block) * ((8 * DEPTH) ** -0.25 if role in tamed else 1)
        error_of_std = 1 / math.sqrt(2 * weight.numel())
        assert weight.std().item() == pytest.approx(TRUNCATION * expected, rel=5 * error_of_std), (role, block)
        assert abs(weight.mean().item()) < 5 * expected / math.sqrt(weight.numel())
        assert 2.5 * expected < weight.abs().max() <= 3 * expected * (1 + 1e-6)


def test_biases_start_at_zero_and_gains_at_one() -> None:
    model = build_language_model("nano", topology="siamese", bias=True, **TINY)
    biases = [p for name, p in model.named_parameters() if name.endswith(".bias")]
    gains = [p for name, p in model.named_parameters() if name.endswith(".gain")]
    assert len(biases) == 7 * TINY["depth"] and not any(bias.any() for bias in biases)
    # A block: four norms and the gate of the residual path, three norms in attention. Three norms close.
    assert len(gains) == (5 + 3) * TINY["depth"] + 3 and all((gain == 1).all() for gain in gains)


# --- attention


def slow_attention(attention: Attention, h: Tensor, theta: float) -> Tensor:
    """Return the attention's output token by token and head by head, from its definition."""
    shape = attention.shape
    width, eps = shape.head_dim, 1e-5

    def rms(x: Tensor, gain: Tensor) -> Tensor:
        return gain * x / math.sqrt(x.square().mean().item() + eps)

    def turn(x: Tensor, position: int) -> Tensor:
        half, turned = width // 2, x.clone()
        for i in range(half):
            angle = position * theta ** (-2 * i / width)
            turned[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
            turned[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
        return turned

    def project(name: str, position: int, x: Tensor) -> list[Tensor]:
        y = getattr(attention, name).weight @ x
        if shape.attention_norm == "qk" and name != "value":
            y = rms(y, getattr(attention, f"{name}_norm").gain)
        heads = list(y.split(width))
        if shape.attention_norm == "qkv-head" or (shape.attention_norm == "qk-head" and name != "value"):
            heads = [rms(head, getattr(attention, f"{name}_head_norm").gain) for head in heads]
        return heads if name == "value" else [turn(head, position) for head in heads]

    rows = []
    for sequence in h:
        parts = {n: [project(n, t, x) for t, x in enumerate(sequence)] for n in ("query", "key", "value")}
        for t in range(len(sequence)):
            context = []
            for head in range(shape.heads):
                group = head // (shape.heads // shape.kv_heads)
                scores = torch.stack(
                    [parts["query"][t][head] @ parts["key"][s][group] / math.sqrt(width) for s in range(t + 1)]
                )
                weights = scores.exp() / scores.exp().sum()
                mixed = sum(weights[s] * parts["value"][s][group] for s in range(t + 1))
                context.append(rms(mixed, attention.context_head_norm.gain) if shape.context_norm else mixed)
            rows.append(attention.output.weight @ torch.cat(context))
    return torch.stack(rows).reshape(h.shape)


@pytest.mark.parametrize("context_norm", [False, True])
@pytest.mark.parametrize("attention_norm", ["none", "qk", "qk-head", "qkv-head"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_equals_its_definition(attention_norm: Any, context_norm: bool, kv_heads: int) -> None:
    shape = AttentionShape(dim=16, heads=4, kv_heads=kv_heads, attention_norm=attention_norm, context_norm=context_norm)
    attention = Attention(shape).double()
    randomise(attention)
    h = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotary = rotation(torch.arange(5), shape.head_dim, 100.0, torch.float64)
    torch.testing.assert_close(attention(h, Context(rotary)), slow_attention(attention, h, 100.0), rtol=0, atol=1e-12)


def test_grouped_query_attention_is_attention_with_repeated_heads() -> None:
    grouped = Attention(AttentionShape(dim=16, heads=4, kv_heads=2, attention_norm="qk")).double()
    randomise(grouped)
    full = Attention(AttentionShape(dim=16, heads=4, kv_heads=4, attention_norm="qk")).double()
    state = grouped.state_dict()
    for name in ("key.weight", "value.weight", "key_norm.gain"):
        state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    h = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(grouped(h), full(h), rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_auto_is_the_attention_norm_that_the_topology_needs(topology: str) -> None:
    needed = build_topology(topology).attention_norm
    resolved = language_model_config("nano", topology=topology).attention_shape.attention_norm
    assert resolved == ("qk" if needed == "auto" else needed)
    explicit = language_model_config("nano", topology=topology, attention_norm="qkv-head")
    assert explicit.attention_shape.attention_norm == "qkv-head"


@pytest.mark.parametrize("topology", ["siamese", "hybridnorm", "hybridnorm-star", "residual-hybridnorm"])
@pytest.mark.parametrize("attention_norm", ["none", "qk", "qk-head"])
def test_a_conflicting_attention_norm_is_refused(topology: str, attention_norm: str) -> None:
    with pytest.raises(UserError, match=attention_norm):
        language_model_config("nano", topology=topology, attention_norm=attention_norm)


@pytest.mark.parametrize("norm", available_norms())
def test_attention_norms_do_not_follow_the_operator_of_the_residual_path(norm: str) -> None:
    specification = language_model_config("nano", topology="siamese", norm=norm).attention_shape.norm
    assert specification.name == ("layernorm" if norm == "layernorm" else "rmsnorm")


def test_attention_norms_take_the_eps_of_the_model() -> None:
    assert dict(language_model_config("olmo2-1b").attention_shape.norm.options)["eps"] == 1e-6


# --- masks: packed documents


def packed_documents() -> tuple[Tensor, Tensor]:
    """Return two rows of tokens [2, 9] in documents of 4 and 5, 6 and 3 tokens, and the documents' numbers."""
    return tokens(count=9), torch.tensor([[0] * 4 + [1] * 5, [0] * 6 + [1] * 3])


@pytest.mark.parametrize("topology", ["pre", "siamese"])
def test_masked_documents_are_separate_documents(topology: str) -> None:
    model = tiny_model(topology, document_mask=True)
    packed, documents = packed_documents()
    logits = model(packed, documents=documents).logits
    for row, lengths in enumerate(((4, 5), (6, 3))):
        for together, alone in zip(logits[row].split(lengths), packed[row].split(lengths), strict=True):
            torch.testing.assert_close(together, model(alone[None]).logits[0], rtol=0, atol=1e-11)


def test_packed_documents_see_each_other_by_default() -> None:
    packed, documents = packed_documents()
    changed = packed.clone()
    changed[:, 0] = (packed[:, 0] + 1) % TINY["vocabulary"]
    for document_mask in (False, True):
        model = tiny_model(document_mask=document_mask)
        before, after = (model(rows, documents=documents).logits[0, 4:] for rows in (packed, changed))
        assert torch.equal(before, after) == document_mask


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_future_is_not_seen(topology: str) -> None:
    model, batch = tiny_model(topology), tokens()
    changed = batch.clone()
    changed[:, 5:] = (batch[:, 5:] + 1) % TINY["vocabulary"]
    torch.testing.assert_close(model(batch).logits[:, :5], model(changed).logits[:, :5], rtol=0, atol=1e-12)


# --- the cache


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_generation_with_a_cache_equals_generation_without(topology: str) -> None:
    model = tiny_model(topology, kv_heads=2)
    prompt = tokens(count=4)
    expected = prompt
    with torch.no_grad():
        for _ in range(6):
            expected = torch.cat((expected, model(expected).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(model.generate(prompt, 6), expected)


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_logits_with_a_cache_equal_those_without(topology: str) -> None:
    model, batch = tiny_model(topology, kv_heads=2), tokens(count=9)
    caches = [AttentionCache() for _ in model.blocks]
    pieces = [model(piece, caches=caches).logits for piece in batch.split((4, 1, 3, 1), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(batch).logits, rtol=0, atol=1e-11)
    assert caches[0].tokens == 9 and caches[0].keys is not None and caches[0].keys.shape[1] == 2


@pytest.mark.every_nth(4)
@pytest.mark.parametrize(
    ("topology", "kernels"),
    [(name, "plain") for name in TOPOLOGIES]
    + [(name, "fused") for name in TOPOLOGIES if build_topology(name).has_fused_kernels],
)
def test_last_only_is_the_last_token(topology: str, kernels: str) -> None:
    model, batch = tiny_model(topology, kernels=kernels), tokens()
    torch.testing.assert_close(model(batch, last_only=True).logits, model(batch).logits[:, -1:], rtol=0, atol=1e-12)


def test_sampling_follows_its_generator_and_temperature() -> None:
    model, prompt = tiny_model(), tokens(batch=1, count=3)
    draws = [
        model.generate(prompt, 8, temperature=5.0, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    cold = model.generate(prompt, 8, temperature=1e-4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cold, model.generate(prompt, 8))


# --- embeddings, losses, dtypes


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = (build_language_model("nano", tied=tied, **TINY) for tied in (True, False))
    assert count(untied) - count(tied) == TINY["vocabulary"] * TINY["dim"]
    assert untied.state_dict().keys() - tied.state_dict().keys() == {"head.weight"}
    assert torch.equal(tied.embedding.weight, untied.embedding.weight), "tying changes no draw"
    with torch.no_grad():
        untied.head.weight.copy_(untied.embedding.weight)
    torch.testing.assert_close(tied(tokens()).logits, untied(tokens()).logits)
    tied(tokens()).logits.sum().backward()
    assert tied.embedding.weight.grad is not None


def test_options_beside_a_configuration_are_refused() -> None:
    config = language_model_config("nano", **TINY)
    with pytest.raises(UserError, match="topology"):
        build_language_model(config, topology="pre")


def test_kernels_a_topology_does_not_have_are_refused() -> None:
    with pytest.raises(UserError):
        build_language_model("nano", topology="olmo2", kernels="fused", device="meta")


def test_documents_on_a_cache_are_refused() -> None:
    model = build_language_model("nano", document_mask=True, **TINY)
    caches = [AttentionCache() for _ in model.blocks]
    with pytest.raises(UserError):
        model(tokens(), caches=caches, documents=torch.zeros_like(tokens()))


def test_several_tokens_on_a_cache_equal_the_whole_sequence() -> None:
    attention = Attention(AttentionShape(dim=16, heads=4, kv_heads=2)).double()
    h = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cache = AttentionCache()
    parts = [attention(part, Context(cache=cache)) for part in h.split((3, 1, 3), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), attention(h))


def test_initial_weights_do_not_depend_on_the_default_dtype() -> None:
    usual = build_language_model("nano", **TINY).state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        other = build_language_model("nano", **TINY).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(value.float(), usual[name]) for name, value in other.items())


def test_generation_runs_without_dropout() -> None:
    model = build_language_model("nano", dropout=0.5, **TINY)
    prompt = tokens()[:, :3]
    assert torch.equal(model.generate(prompt, 8), model.train().generate(prompt, 8))


def test_the_attention_keeps_the_eps_of_the_size_whatever_the_operator() -> None:
    for norm in (None, "seednorm", "layernorm", "dyt"):
        shape = language_model_config("olmo2-1b", norm=norm).attention_shape
        assert shape.norm.to_json()["eps"] == (1e-5 if norm == "dyt" else 1e-6)
    config = language_model_config("nano", norm="rmsnorm:eps=1e-3,offset=1")
    assert config.attention_shape.norm.to_json() == {"name": "rmsnorm", "eps": 1e-3, "offset": 0.0}


@pytest.mark.parametrize(
    "method", ["pre", "pre + qkv", "pre + qk-head", "pre + rmsnorm:eps=1e-06", "dhc-2 + seednorm", "pre + init-normal"]
)
def test_a_label_reads_back_as_the_method(method: str) -> None:
    assert language_model_config("nano").with_method(method).label == method


def test_dyt_scales_the_embedding_by_a_learned_number() -> None:
    model = build_language_model("nano", norm="dyt", topology="pre", **TINY)
    (streams,) = model.opening(model.embedding_scale(model.embedding(tokens())))
    torch.testing.assert_close(streams, 4.0 * model.embedding(tokens()))
    assert isinstance(build_language_model("nano", topology="pre", **TINY).embedding_scale, nn.Identity)


class RoutedMLP(nn.Module):
    """An MLP with two auxiliary losses, as a mixture of experts returns them."""

    def __init__(self, mlp: nn.Module, balance: float) -> None:
        super().__init__()
        self.mlp = mlp
        self.balance = balance

    def forward(self, h: Tensor, context: Context) -> tuple[Tensor, dict[str, Tensor]]:
        return self.mlp(h), {"balance": h.new_tensor(self.balance), "z": h.square().mean()}


def test_losses_of_sublayers_are_means_over_the_blocks_that_have_them() -> None:
    model = tiny_model()
    assert model(tokens()).losses == {}
    seen: list[Tensor] = []
    for index, block in enumerate(model.blocks[:2]):  # the last block stays dense
        block.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].square().mean()))
        block.mlp = RoutedMLP(block.mlp, balance=10.0**index)
    losses = model(tokens()).losses
    assert losses["balance"].item() == 5.5
    torch.testing.assert_close(losses["z"], torch.stack(seen).mean())


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_dtypes_are_a_configuration(topology: str) -> None:
    """Streams have the residual dtype, sublayers see the compute dtype, and autocast has no say in the streams."""
    for residual, compute, autocast in (
        ("float32", "bfloat16", False),
        ("bfloat16", "bfloat16", False),
        ("float32", "inherit", True),
        ("bfloat16", "inherit", True),
    ):
        model = build_language_model("nano", topology=topology, residual_dtype=residual, compute_dtype=compute, **TINY)
        if not autocast:
            model.bfloat16()
        streams, inputs = record_dtypes(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(tokens()).logits
        assert streams == {getattr(torch, residual)}
        assert inputs == {torch.bfloat16 if compute == "bfloat16" else getattr(torch, residual)}
        assert logits.dtype == torch.float32


def record_dtypes(model: LanguageModel) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Return two sets that the next run fills: dtypes of the streams between blocks, and of the sublayers' inputs."""
    streams: set[torch.dtype] = set()
    inputs: set[torch.dtype] = set()
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, output: streams.update(s.dtype for s in output[0]))
        for sublayer in (block.attention, block.mlp):
            sublayer.register_forward_pre_hook(lambda _, args: inputs.add(args[0].dtype))
    return streams, inputs


# --- sizes


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("size", "millions", "without_embeddings", "digit"),
    [
        ("390m-l10", 390.9, 262.1, 0.1),
        ("390m-l17", 388.2, 285.2, 0.1),
        ("390m-l33", 388.7, 311.4, 0.1),
        ("390m-l80", 387.1, 335.5, 0.1),
        ("olmo-1.3b", 1280, 1074, 1),
    ],
)
def test_published_parameter_counts(size: str, millions: float, without_embeddings: float, digit: float) -> None:
    """The published numbers, in millions to the digit given, are those of the matrices; gains come on top."""
    model = build_language_model(size, topology="pre", device="meta")
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    body = matrices - model.embedding.weight.numel() - model.head.weight.numel()
    assert matrices / 1e6 == pytest.approx(millions, abs=digit / 2)
    assert body / 1e6 == pytest.approx(without_embeddings, abs=digit / 2)
    # A block: two norms, and QK-norm over the whole width of the queries and of the keys. A final norm.
    assert count(model) - matrices == (4 * model.config.depth + 1) * model.config.dim


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("size", [size for size, fields in SIZES.items() if fields["dim"] >= 1024])
@pytest.mark.parametrize("topology", ["siamese", "siamese-post-pre"])
def test_siamese_norm_adds_less_than_a_thousandth(size: str, topology: str) -> None:
    pre = count(build_language_model(size, topology="pre", device="meta"))
    siamese = count(build_language_model(size, topology=topology, device="meta"))
    assert 0 < siamese - pre < 0.001 * pre


def test_meta_models_hold_nothing() -> None:
    model = build_language_model("olmo-1.3b", device="meta")
    assert all(tensor.is_meta for tensor in model.state_dict().values())


# --- configuration


@pytest.mark.parametrize("norm", available_norms())
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_configuration_survives_json(topology: str, norm: str) -> None:
    config = language_model_config("nano", topology=topology, norm=norm, kv_heads=2, residual_dtype="bfloat16")
    record = json.loads(json.dumps(config.to_json()))
    read = LanguageModelConfig.from_json(record)
    assert read.to_json() == config.to_json()
    assert (read.topology, read.norm, read.kv_heads) == (config.topology, config.norm, 2)
    assert LanguageModelConfig.from_json(read.to_json()) == read


def test_options_survive_json() -> None:
    config = language_model_config(
        "nano", topology="siamese-post-pre:post_norm=lazy,depth_scale=none", norm="seednorm:heads=4,activation=sigmoid"
    )
    read = LanguageModelConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert read.topology == build_topology("siamese-post-pre", post_norm="lazy", depth_scale="none")
    assert read.norm == NormSpec.parse("seednorm", heads=4, activation="sigmoid")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "olmo-1.3"}, "unknown size 'olmo-1.3': did you mean olmo-1.3b"),
        ({"topology": "siamse"}, "unknown topology 'siamse': did you mean siamese"),
        ({"topology": "siamese:depth_scal=none"}, "unknown option .*depth_scal.*did you mean depth_scale"),
        ({"topology": "siamese:depth_scale=nothing"}, "depth_scale.*'nothing'"),
        ({"topology": "dhc-2:streams=two"}, "streams.*'two'.*integer"),
        ({"topology": "dhc-2:streams=0"}, "streams.* is 0: choose at least one"),
        ({"norm": "rmsnrom"}, "unknown norm 'rmsnrom': did you mean rmsnorm"),
        ({"norm": "rmsnorm:epsilon=1"}, "epsilon"),
        ({"norm": "seednorm:heads=7"}, "64"),
        ({"widht": 3}, "widht"),
        ({"heads": 5}, "64"),
        ({"heads": 0}, "0"),
        ({"kv_heads": 3}, "3"),
        ({"kv_heads": -1}, "-1"),
        ({"dim": 12, "heads": 4}, "3"),
        ({"depth": 0}, "depth"),
        ({"vocabulary": -1}, "-1"),
        ({"attention_norm": "kq"}, "'kq'"),
        ({"attention_norm": "qk"}, "'qkv-head'"),
        ({"residual_dtype": "fp32"}, "'fp32'"),
        ({"compute_dtype": "half"}, "'half'"),
        ({"initialisation": "michell"}, "mitchell"),
        ({"activation": "tanh"}, "'tanh'"),
        ({"kernels": "triton"}, "'triton'"),
    ],
)
def test_bad_input_is_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        build_language_model(**{"size": "nano", "device": "meta", **options})
    assert "\n" not in str(refusal.value)


def test_a_record_with_an_unknown_field_is_refused() -> None:
    record = language_model_config("nano").to_json()
    with pytest.raises(UserError, match="'colour'"):
        LanguageModelConfig.from_json({**record, "colour": "blue"})


# --- the compiler sees a whole model


@pytest.mark.every_nth(8)
@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_graph_serves_every_length(topology: str) -> None:
    """No graph breaks, and a second graph, for the first other length, is the last one."""
    torch.compiler.reset()
    graphs = []
    model = tiny_model(topology)
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for count in (7, 5, 9, 3):
        x = tokens(count=count)
        torch.testing.assert_close(compiled(x).logits, model(x).logits)
    assert len(graphs) == 2


def test_no_two_weights_are_alike_and_none_depends_on_the_name_of_its_module() -> None:
    model = build_language_model("nano", topology="pre", **{**TINY, "depth": 3})
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    assert len({tuple(matrix.flatten()[:4].tolist()) for matrix in matrices}) == len(matrices) == 3 * 7 + 2
    renamed = build_language_model("nano", topology="pre", **{**TINY, "depth": 3})
    for block in renamed.blocks:
        block.names = ("mixer", "mlp")
        block.mixer, block.mixer_connection = block.attention, block.attention_connection
        del block.attention, block.attention_connection
    renamed.reset_parameters(0)
    query = [block.mixer.query.weight for block in renamed.blocks]
    assert all(torch.equal(a, block.attention.query.weight) for a, block in zip(query, model.blocks, strict=True))


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("gelu", lambda x: F.gelu(x)),
        ("gelu-tanh", lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2),
        ("relu", lambda x: x.clamp_min(0)),
    ],
)
def test_plain_mlps(activation: str, formula: Callable[[Tensor], Tensor]) -> None:
    model = build_language_model("nano", topology="pre", activation=activation, **TINY).double()
    mlp, h = model.blocks[0].mlp, torch.randn(3, TINY["dim"], dtype=torch.float64)
    torch.testing.assert_close(mlp(h), formula(h @ mlp.up.weight.T) @ mlp.output.weight.T)
    assert LanguageModelConfig.from_json(model.config.to_json()).activation == activation


def test_dropout_acts_on_the_output_of_every_sublayer() -> None:
    model = build_language_model("nano", topology="pre", dropout=0.5, **TINY).train()
    block, outputs, dropped = model.blocks[0], [], []
    for sublayer in (block.attention, block.mlp):
        sublayer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    block.dropout.register_forward_hook(lambda module, inputs, output: dropped.append((inputs[0], output)))
    (before,) = model.opening(model.embedding(tokens()))
    (after,), _ = block((before,))
    assert len(outputs) == len(dropped) == 2
    assert all(given is output for output, (given, _) in zip(outputs, dropped, strict=True))
    torch.testing.assert_close(after, before + dropped[0][1] + dropped[1][1])
