"""Law 1 against official implementations: outputs, streams, losses and gradients, to 1e-10 in fp64.

The numbers in `tests/golden` were made by running the repositories that each JSON file names.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from golden_mapping import (
    Case,
    Cut,
    Mapping,
    actual_gradients,
    expected_gradients,
    for_each_block,
    load_parameters,
    olmo_mapping,
    olmo_model,
)
from siamesenorm import LanguageModel, ResidualSpec, build_topology
from siamesenorm.norms import NormSpec
from siamesenorm.topologies import Connection, Streams, transformer_places

EXACT = {"rtol": 1e-10, "atol": 1e-10}

FINAL_NORM = {"transformer.ln_f.weight": Cut(("closing.norm.gain",))}
PRE_NORM = {
    "transformer.blocks.{l}.attn_norm.weight": Cut(("blocks.{l}.attention_connection.norm.gain",)),
    "transformer.blocks.{l}.ff_norm.weight": Cut(("blocks.{l}.mlp_connection.norm.gain",)),
    **FINAL_NORM,
}
OUTPUT_NORM = {
    "transformer.blocks.{l}.attn_norm.weight": Cut(("blocks.{l}.attention_connection.output.gain",)),
    "transformer.blocks.{l}.ff_norm.weight": Cut(("blocks.{l}.mlp_connection.output.gain",)),
    **FINAL_NORM,
}
HYBRID_NORM = {
    "transformer.blocks.{l}.ff_norm.weight": Cut(("blocks.{l}.mlp_connection.post_norm.gain",)),
    **FINAL_NORM,
}
SIAMESE_HYBRID_PRE = {
    "transformer.blocks.{l}.c1": Cut(("blocks.{l}.attention_connection.gate.gain",)),
    "transformer.blocks.{l}.attn_y_norm.weight": Cut(("blocks.{l}.attention_connection.identity_norm.gain",)),
    "transformer.blocks.{l}.ff_norm.weight": Cut(("blocks.{l}.mlp_connection.post_norm.gain",)),
    "transformer.blocks.{l}.ff_y_norm.weight": Cut(("blocks.{l}.mlp_connection.identity_norm.gain",)),
    "transformer.blocks.{l}.ff_input_norm.weight": Cut(("blocks.{l}.mlp_connection.input_norm.gain",)),
    "transformer.ln_f.weight": Cut(("closing.post_norm.gain",)),
    "transformer.ln_y_f.weight": Cut(("closing.identity_norm.gain",)),
    "transformer.ln_final_f.weight": Cut(("closing.output_norm.gain",)),
}
OLMO_CASES = {
    "siamese_hybrid_pre_olmo": ("siamese", SIAMESE_HYBRID_PRE),
    "hybridnorm_olmo": ("hybridnorm", HYBRID_NORM),
    "olmo2_norm_after": ("olmo2", OUTPUT_NORM),
}


def hyper_connections(depth: int) -> Mapping:
    """Return the mapping of lucidrains' hyper-connections around OLMo's Pre-Norm branches."""
    mapping: Mapping = dict(PRE_NORM)
    for k in range(2 * depth):
        ours = f"blocks.{k // 2}.{'attention' if k % 2 == 0 else 'mlp'}_connection"
        mapping |= {
            f"hc.{k}.static_alpha": Cut((f"{ours}.mix_in", f"{ours}.mix_residual"), axis=-1),
            f"hc.{k}.static_beta": Cut((f"{ours}.mix_out",)),
            f"hc.{k}.dynamic_alpha_fn": Cut((f"{ours}.project_in", f"{ours}.project_residual"), axis=-1),
            f"hc.{k}.dynamic_beta_fn": Cut((f"{ours}.project_out",)),
            f"hc.{k}.dynamic_alpha_scale": Cut((f"{ours}.scale_in",)),
            f"hc.{k}.dynamic_beta_scale": Cut((f"{ours}.scale_out",)),
            f"hc.{k}.norm.gamma": Cut((f"{ours}.stream_norm.gain",), offset=1.0),
        }
    return mapping


def assert_equal_to_official(model: nn.Module, logits: Tensor, case: Case, mapping: Mapping) -> None:
    """Compare the output, the loss and the gradient of every parameter."""
    loss = (logits * case.tensors["loss_weight"]).sum()
    loss.backward()
    torch.testing.assert_close(logits, case.tensors["output"], **EXACT)
    torch.testing.assert_close(loss, case.tensors["loss"], **EXACT)
    expected = expected_gradients(model, case, mapping)
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    torch.testing.assert_close(actual_gradients(model), expected, **EXACT)


def assert_equal_in_fp32(model: LanguageModel, case: Case) -> None:
    """Compare with the untouched official source, run in fp32."""
    output = model.float()(case.tensors["input.token_ids"]).logits
    torch.testing.assert_close(output, case.tensors["output_official_fp32"], rtol=1e-4, atol=1e-5)


def observe_streams(model: LanguageModel) -> dict[str, Tensor]:
    """Return a dict that the model's next run fills with the streams between blocks, under the cases' names."""
    hidden: dict[str, Tensor] = {}

    def record(index: int, streams: Streams) -> None:
        names = (f"{index}",) if len(streams) == 1 else (f"x.{index}", f"y.{index}")
        hidden.update(zip(names, streams, strict=True))

    model.embedding.register_forward_hook(lambda _, inputs, embedding: hidden.update({"0": embedding}))
    for index, block in enumerate(model.blocks, start=1):
        block.register_forward_hook(lambda _, inputs, output, index=index: record(index, output[0]))
    return hidden


@pytest.mark.parametrize("name", OLMO_CASES)
def test_olmo_models(name: str) -> None:
    topology, norms = OLMO_CASES[name]
    case = Case.load(name)
    model, mapping = olmo_model(case, topology), olmo_mapping(case, norms)
    load_parameters(model, case, mapping)
    final: list[Tensor] = []
    model.closing.register_forward_hook(lambda _, inputs, output: final.append(output))

    hidden = observe_streams(model)
    logits = model(case.tensors["input.token_ids"]).logits
    torch.testing.assert_close(hidden, case.group("hidden."), **EXACT)
    torch.testing.assert_close(final[0], case.tensors["final_hidden"], **EXACT)
    assert_equal_to_official(model, logits, case, mapping)
    assert_equal_in_fp32(model, case)


def test_fused_siamese_model() -> None:
    case = Case.load("siamese_hybrid_pre_olmo")
    model, mapping = olmo_model(case, "siamese", kernels="fused"), olmo_mapping(case, SIAMESE_HYBRID_PRE)
    load_parameters(model, case, mapping)
    assert_equal_to_official(model, model(case.tensors["input.token_ids"]).logits, case, mapping)


def test_hyper_connections() -> None:
    case = Case.load("hyper_connections_dynamic")
    model = olmo_model(case, "dhc-2:stream_norm=rmsnorm,stream_eps=0")  # theirs divides by the norm itself
    mapping = olmo_mapping(case, hyper_connections(case.depth))
    load_parameters(model, case, mapping)
    connections = [c for block in model.blocks for c in (block.attention_connection, block.mlp_connection)]
    observed = observe_connections(connections)
    logits = model(case.tensors["input.token_ids"]).logits
    torch.testing.assert_close(observed, case.group("sub."), **EXACT)
    assert_equal_to_official(model, logits, case, mapping)
    assert_equal_in_fp32(model, case)


def observe_connections(connections: list[Connection]) -> dict[str, Tensor]:
    """Return a dict that the next run fills with what enters each branch and with the streams that leave each write."""
    observed: dict[str, Tensor] = {}

    def observed_write(k: int, write: Any) -> Any:
        def record(streams: Streams, output: Tensor) -> Streams:
            written: Streams = write(streams, output)
            observed[f"streams.{k}"] = written[0]
            return written

        return record

    for k, connection in enumerate(connections):
        connection.norm.register_forward_pre_hook(lambda _, inputs, k=k: observed.update({f"read.{k}": inputs[0]}))
        connection.write = observed_write(k, connection.write)  # type: ignore[method-assign]
    return observed


# --- ResiDual stands on fairseq, whose sublayers are not ours: attention with biases and no positions, a ReLU MLP


class FairseqAttention(nn.Module):
    """Causal attention with biases, queries scaled before the product."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(dim, dim))

    def forward(self, h: Tensor) -> Tensor:
        batch, tokens, dim = h.shape
        width = dim // self.heads
        query, key, value = (
            projection(h).view(batch, tokens, self.heads, width).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = (query / math.sqrt(width)) @ key.mT
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        context = scores.masked_fill(future, -math.inf).softmax(-1) @ value
        return self.out_proj(context.transpose(1, 2).reshape(batch, tokens, dim))


class FairseqBlock(nn.Module):
    """Their sublayers, our connections."""

    def __init__(self, dim: int, heads: int, hidden: int, connections: list[Connection]) -> None:
        super().__init__()
        self.self_attn = FairseqAttention(dim, heads)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.attention_connection, self.mlp_connection = connections

    def forward(self, streams: Streams) -> Streams:
        streams = self.attention_connection(streams, self.self_attn)
        return self.mlp_connection(streams, lambda h: self.fc2(F.relu(self.fc1(h))))


class FairseqDecoder(nn.Module):
    """A decoder whose residual path is our ResiDual."""

    def __init__(self, config: dict[str, Any], depth: int, vocabulary: int) -> None:
        super().__init__()
        decoder = config["decoder"]
        topology = build_topology(
            "residual",
            dual_eps=1e-7,
            bounded_scale=config["dec_alpha"],
            dual_scale=config["dec_res_input_norm_scale"],
        )
        spec = ResidualSpec(dim=decoder["embed_dim"], norm=NormSpec.parse("layernorm"))
        places = transformer_places(depth)
        sizes = (decoder["embed_dim"], decoder["attention_heads"], decoder["ffn_embed_dim"])
        self.embed_tokens = nn.Embedding(vocabulary, sizes[0])
        self.output_projection = nn.Linear(sizes[0], vocabulary, bias=False)
        self.opening = topology.opening(spec)
        self.blocks = nn.ModuleList(
            FairseqBlock(*sizes, [topology.connection(place, spec) for place in pair]) for pair in places
        )
        self.closing = topology.closing(places[-1][1], spec)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Streams]]:
        """Return the logits, and the streams after each block, settled."""
        streams, hidden = self.opening(self.embed_tokens(tokens)), []
        for block in self.blocks:
            streams = block(streams)
            hidden.append(streams)
        readers = [*(block.attention_connection.post_norm for block in self.blocks[1:]), self.closing.post_norm]
        settled = [(post_norm(x), d) for post_norm, (x, d) in zip(readers, hidden, strict=True)]
        return self.output_projection(self.closing(streams)), settled


FAIRSEQ = {
    "embed_tokens.weight": Cut(("embed_tokens.weight",)),
    "output_projection.weight": Cut(("output_projection.weight",)),
    **{
        f"layers.{{l}}.{module}.{kind}": Cut((f"blocks.{{l}}.{module}.{kind}",))
        for module in ("fc1", "fc2", *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")))
        for kind in ("weight", "bias")
    },
    **{
        f"{official}.{theirs}": Cut((f"{reader}.{ours}",))
        for official, reader in (
            ("layers.{l}.self_attn_layer_norm", "blocks.{l}.mlp_connection.post_norm"),
            ("layers.{l}.final_layer_norm", "{after_mlp}.post_norm"),
            ("layer_norm", "closing.dual_norm"),
        )
        for theirs, ours in (("weight", "gain"), ("bias", "bias"))
    },
}


def test_residual() -> None:
    case = Case.load("residual")
    config = case.description["config"]
    depth, vocabulary = config["decoder"]["layers"], case.tensors["param.embed_tokens.weight"].shape[0]
    model = FairseqDecoder(config, depth, vocabulary).double()
    mapping = for_each_block(FAIRSEQ, depth)
    load_parameters(model, case, mapping)
    logits, settled = model(case.tensors["input.token_ids"])
    for index, (bounded, dual) in enumerate(settled, start=1):
        torch.testing.assert_close(bounded, case.tensors[f"hidden.x.{index}"], **EXACT)
        torch.testing.assert_close(dual, case.tensors[f"hidden.d.{index}"], **EXACT)
    assert_equal_to_official(model, logits, case, mapping)


@torch.no_grad()
def test_mhc_equals_deepseek_v4_of_transformers() -> None:
    """Its hyper-connection and its head, with weights mapped, to 1e-6 in fp32."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    n, dim = 4, 12
    config = SimpleNamespace(hidden_size=dim, hc_mult=n, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6)
    theirs, head = deepseek.DeepseekV4HyperConnection(config), deepseek.DeepseekV4HyperHead(config)
    generator = torch.Generator().manual_seed(3)
    for parameter in (*theirs.parameters(), *head.parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    topology = build_topology("mhc-4", start="softmax", readout="learned", eps=1e-6)
    spec, (place, last) = ResidualSpec(dim=dim), transformer_places(1)[0]
    ours, closing = topology.connection(place, spec), topology.closing(last, spec)
    sizes = [n, n, n * n]
    for logits, weight, static, scale, names in (
        (ours.logits, theirs.fn, theirs.base, theirs.scale, ("in", "out", "residual")),
        (closing.logits, head.hc_fn, head.hc_base, head.hc_scale, ("in",)),
    ):
        for index, name in enumerate(names):
            rows = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
            logits.get_parameter(f"project_{name}").copy_(weight[rows].T)
            logits.get_parameter(f"mix_{name}").copy_(static[rows].view_as(logits.get_parameter(f"mix_{name}")))
            logits.get_parameter(f"scale_{name}").copy_(scale[index])
    streams, output = torch.randn(2, 3, n, dim, generator=generator), torch.randn(2, 3, dim, generator=generator)
    post, comb, collapsed = theirs(streams)
    h, state = ours.read((streams,))
    torch.testing.assert_close(h, ours.norm(collapsed), rtol=1e-6, atol=1e-6)
    expected = post.unsqueeze(-1) * output.unsqueeze(-2) + torch.matmul(comb.mT, streams)
    torch.testing.assert_close(ours.write(state, output)[0], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(closing((streams,)), closing.norm(head(streams)), rtol=1e-6, atol=1e-6)
