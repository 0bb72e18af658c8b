"""Which topology is which at what parameters: exactly where mathematics allows, with the stated error where not."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from reference_topologies import DEPTH, DIM, TanhNet, Wired, embedding, norms_after, randomise, tanh_nets, wire
from siamesenorm import build_language_model, language_model_config, transformer_places
from siamesenorm.errors import UserError
from siamesenorm.norms import NormSpec, available_norms
from siamesenorm.topologies import build_topology

over_norms = pytest.mark.parametrize("norm", available_norms())
EXACT = "rmsnorm:eps=0.0"
"""Facts that hold up to eps hold at eps 0 to rounding: with this norm they are tested to 1e-12."""


def run(model: Wired) -> Tensor:
    with torch.no_grad():
        return model(embedding(), tanh_nets())


def assert_same(first: Wired, second: Wired) -> None:
    """Bit for bit."""
    assert torch.equal(run(first), run(second))


def assert_close(first: Wired, second: Wired, bound: float = 1e-12) -> None:
    torch.testing.assert_close(run(first), run(second), rtol=0, atol=bound)


def distance(first: Wired, second: Wired) -> float:
    return float((run(first) - run(second)).abs().max())


def copy_norm(source: nn.Module, *targets: nn.Module) -> None:
    for target in targets:
        target.load_state_dict(source.state_dict())


def unit(*norms: nn.Module) -> None:
    for norm in norms:
        norm.reset_parameters()


def zero(*norms: nn.Module) -> None:
    for norm in norms:
        norm.zero_()


@torch.no_grad()
def fill(value: float, *parameters: Tensor) -> None:
    for parameter in parameters:
        parameter.fill_(value)


# --- 5.1 and 5.2: Post-Pre is Pre-Norm, Post-Norm --------------------------------------------------------------------


def post_pre_as_pre(pre: Wired, **options: object) -> Wired:
    """Return a Post-Pre without input norm that has Pre-Norm's gains and zero N^X, and that is otherwise random."""
    model = wire(build_topology("siamese-post-pre", normalized_input=False, **options), pre.norm_text, seed=21)
    for ours, theirs in zip(model.connections, pre.connections, strict=True):
        copy_norm(theirs.norm, ours.identity_norm)
    copy_norm(pre.closing.norm, model.closing.identity_norm)
    zero(*norms_after(model))
    return model


def pre_norm(norm: str) -> Wired:
    model = wire("pre", norm, seed=20)
    model.norm_text = norm
    return model


@over_norms
@pytest.mark.parametrize("depth_scale", ["code", "paper_block", "paper_sublayer", "none"])
def test_post_pre_is_pre_norm_once_the_opening_is_gated(norm: str, depth_scale: str) -> None:
    pre = pre_norm(norm)
    model = post_pre_as_pre(pre, gated_opening=True, depth_scale=depth_scale)
    fill(0.0, model.opening.gate.gain)
    assert_same(model, pre)


@over_norms
def test_post_pre_is_pre_norm_when_lazy(norm: str) -> None:
    pre = pre_norm(norm)
    model = post_pre_as_pre(pre, post_norm="lazy")
    zero(model.connections[0].post_norm)
    assert_same(model, pre)


@over_norms
def test_post_pre_with_zero_gains_alone_is_not_pre_norm(norm: str) -> None:
    """X_0 = e reaches the first sublayer: the paper's claim misses this term."""
    pre = pre_norm(norm)
    model = post_pre_as_pre(pre)
    assert distance(model, pre) > 0.05
    with torch.no_grad():
        e = embedding()
        _, streams = model.connections[0].read(model.opening(e))
        assert torch.equal(streams[0], e)


@over_norms
def test_post_pre_is_post_norm(norm: str) -> None:
    post = wire("post", norm, seed=22)
    model = wire(build_topology("siamese-post-pre", normalized_input=False, depth_scale="none"), norm, seed=23)
    for ours, theirs in zip(norms_after(model), norms_after(post), strict=True):
        copy_norm(theirs, ours)
    zero(*(connection.identity_norm for connection in model.connections))
    assert distance(model, post) > 0.1, "a live N_f breaks it"
    zero(model.closing.identity_norm)
    assert_same(model, post)


def test_post_pre_with_input_norm_is_not_post_norm_for_learned_gains() -> None:
    post = wire("post", EXACT, seed=22)
    model = wire(build_topology("siamese-post-pre", depth_scale="none"), EXACT)
    for ours, theirs in zip(norms_after(model), norms_after(post), strict=True):
        copy_norm(theirs, ours)
    zero(*(connection.identity_norm for connection in model.connections), model.closing.identity_norm)
    assert distance(model, post) > 0.05


# --- 5.3: Mix-LN -----------------------------------------------------------------------------------------------------


@over_norms
def test_mix_ln_is_pre_norm_or_post_norm_at_its_ends(norm: str) -> None:
    pre, post = wire("pre", norm, seed=24), wire(build_topology("post", final_norm=True), norm, seed=25)
    all_pre = wire(build_topology("mixln", post_fraction=0.0), norm)
    all_pre.load_state_dict(pre.state_dict())
    assert_same(all_pre, pre)
    all_post = wire(build_topology("mixln", post_fraction=1.0), norm)
    all_post.load_state_dict(post.state_dict())
    assert_same(all_post, post)


def test_mix_ln_floors_its_fraction() -> None:
    for fraction, depth, expected in ((0.25, 16, 4), (0.25, 3, 0), (0.29, 100, 29), (0.1, 30, 3), (1.0, 7, 7)):
        model = wire(build_topology("mixln", post_fraction=fraction), depth=depth)
        inputs = [connection.norm for connection in model.connections]
        assert sum(isinstance(norm, nn.Identity) for norm in inputs) == 2 * expected


def test_no_zero_pattern_of_post_pre_is_mix_ln() -> None:
    """After the switch Y is e plus all outputs, not the normalised stream: order-one error."""
    mixln = wire(build_topology("mixln", post_blocks=1), seed=26)
    post_pre = build_topology("siamese-post-pre", normalized_input=False, depth_scale="none")
    model = wire(post_pre)
    for k, (ours, theirs) in enumerate(zip(model.connections, mixln.connections, strict=True)):
        if k < 2:
            zero(ours.identity_norm)
            copy_norm(mixln.connections[k + 1].post_norm, model.connections[k + 1].post_norm)
        else:
            copy_norm(theirs.norm, ours.identity_norm)
            zero(norms_after(model)[k])
    copy_norm(mixln.closing.norm, model.closing.identity_norm)
    assert distance(model, mixln) > 0.1
    zero(model.connections[2].post_norm)
    assert distance(model, mixln) > 0.1


# --- 5.4 and 5.5: Hybrid-Pre is Pre-Norm, HybridNorm -----------------------------------------------------------------


def hybrid_pre_as_pre(pre: Wired, **options: object) -> Wired:
    """Return a Hybrid-Pre with Pre-Norm's gains in the outer norms, unit inner norms, and everything of X zero."""
    model = wire(build_topology("siamese", **options), pre.norm_text, seed=27)
    for attention, mlp, theirs_a, theirs_m in zip(
        model.connections[::2], model.connections[1::2], pre.connections[::2], pre.connections[1::2], strict=True
    ):
        fill(0.0, attention.gate.gain)
        copy_norm(theirs_a.norm, attention.identity_norm)
        zero(mlp.post_norm)
        unit(mlp.identity_norm)
        copy_norm(theirs_m.norm, mlp.input_norm)
    zero(model.closing.post_norm)
    unit(model.closing.identity_norm)
    copy_norm(pre.closing.norm, model.closing.output_norm)
    return model


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_hybrid_pre_is_pre_norm_up_to_the_double_norm(norm: str) -> None:
    """The error is first order in eps, and vanishes with it: a double norm is a single one with eps^2 for eps."""
    errors = {}
    for eps in (0.0, 1e-8, 1e-6):
        pre = pre_norm(f"{norm}:eps={eps}")
        errors[eps] = distance(hybrid_pre_as_pre(pre), pre)
    assert errors[0.0] < 1e-12
    assert 1e-9 < errors[1e-8] < 1e-7 and 1e-7 < errors[1e-6] < 1e-5
    assert errors[1e-6] / errors[1e-8] == pytest.approx(100, rel=0.01)


def test_a_double_norm_is_a_single_one_with_another_eps() -> None:
    """N2(N1(x)) = x / sqrt(m + eps (m + eps)), m = mean(x^2): a relative gap of eps (1 - m)/(2m) to the single norm.

    That is the eps/(2m) of a small embedding, m << 1; at m = 1 the two agree to second order.
    """
    eps = 1e-5
    norm, x = wire("pre", f"rmsnorm:eps={eps}").closing.norm, embedding()
    mean = x.square().mean(-1, keepdim=True)
    double = norm(norm(x))
    torch.testing.assert_close(double, x / torch.sqrt(mean + eps * (mean + eps)), rtol=1e-12, atol=0)
    gap = double / norm(x) - 1
    torch.testing.assert_close(gap, (eps * (1 - mean) / (2 * mean)).expand_as(gap), rtol=0.001, atol=1e-8)
    small = x / 100
    gap = norm(norm(small)) / norm(small) - 1
    torch.testing.assert_close(gap, (eps / (2 * mean / 1e4)).expand_as(gap), rtol=0.2, atol=0)


def test_hybrid_pre_with_the_gain_in_the_inner_norm_is_not_pre_norm() -> None:
    pre = pre_norm(EXACT)
    model = hybrid_pre_as_pre(pre)
    for mlp, theirs in zip(model.connections[1::2], pre.connections[1::2], strict=True):
        copy_norm(theirs.norm, mlp.identity_norm)
        unit(mlp.input_norm)
    assert distance(model, pre) > 0.1


@pytest.mark.parametrize("block", range(DEPTH))
def test_hybrid_pre_needs_every_gate_at_zero(block: int) -> None:
    """X leaves the MLP as s O, so that an open gate in any block, not only in the first, lets it back in."""
    pre = pre_norm(EXACT)
    model = hybrid_pre_as_pre(pre)
    assert_close(model, pre)
    fill(1.0, model.connections[2 * block].gate.gain)
    assert distance(model, pre) > 0.01


def test_double_norms_fail_for_a_norm_that_is_not_idempotent() -> None:
    pre = pre_norm("dyt")
    assert distance(hybrid_pre_as_pre(pre), pre) > 0.05


def hybrid_pre_as_hybridnorm(hybrid: Wired) -> Wired:
    model = wire(build_topology("siamese", depth_scale="none"), EXACT, seed=28)
    for attention, mlp, theirs in zip(
        model.connections[::2], model.connections[1::2], hybrid.connections[1::2], strict=True
    ):
        fill(1.0, attention.gate.gain)
        zero(attention.identity_norm, mlp.identity_norm)
        copy_norm(theirs.post_norm, mlp.post_norm, mlp.input_norm)
    zero(model.closing.identity_norm)
    unit(model.closing.post_norm)
    copy_norm(hybrid.closing.norm, model.closing.output_norm)
    return model


def test_hybrid_pre_is_hybridnorm_for_constant_gains_only() -> None:
    hybrid = wire("hybridnorm", EXACT, seed=29)
    assert distance(hybrid_pre_as_hybridnorm(hybrid), hybrid) > 0.05, "learned gains are not representable"
    for number, mlp in enumerate(hybrid.connections[1::2]):
        fill(0.5 + number, mlp.post_norm.gain)
    assert_close(hybrid_pre_as_hybridnorm(hybrid), hybrid)


# --- 5.6: conversion of a Pre-Norm model -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"post_norm": "lazy"}, {"gated_opening": True}], ids=str)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_post_pre_with_input_norm_and_three_final_norms_is_pre_norm(norm: str, options: dict[str, object]) -> None:
    errors = {}
    for eps in (0.0, 1e-6):
        pre = pre_norm(f"{norm}:eps={eps}")
        model = wire(build_topology("siamese-post-pre", readout="code", **options), pre.norm_text, seed=30)
        for ours, theirs in zip(model.connections, pre.connections, strict=True):
            unit(ours.identity_norm)
            copy_norm(theirs.norm, ours.input_norm)
        unit(model.closing.identity_norm)
        copy_norm(pre.closing.norm, model.closing.output_norm)
        zero(*norms_after(model), *([model.connections[0].post_norm] if "post_norm" in options else []))
        if "gated_opening" in options:
            fill(0.0, model.opening.gate.gain)
        errors[eps] = distance(model, pre)
    assert errors[0.0] < 1e-12 and 1e-8 < errors[1e-6] < 1e-5


def gradients(model: Wired) -> dict[str, float]:
    model(embedding(), tanh_nets()).square().sum().backward()
    return {name: float(parameter.grad.norm()) for name, parameter in model.named_parameters()}


def test_zeroed_streams_wake_up() -> None:
    """N^X's input is not zero, so that its gain has a gradient; and so has every gate."""
    gated = post_pre_as_pre(pre_norm("rmsnorm"), gated_opening=True)
    fill(0.0, gated.opening.gate.gain)
    hybrid = hybrid_pre_as_pre(pre_norm("rmsnorm"))
    for model in (gated, hybrid):
        dead = {name: g for name, g in gradients(model).items() if "post_norm" in name or "gate" in name}
        assert len(dead) == 2 * DEPTH + 1 and all(gradient > 1e-3 for gradient in dead.values())


def test_the_identity_norms_of_a_converted_post_norm_wake_up() -> None:
    model = wire(build_topology("siamese-post-pre", normalized_input=False, depth_scale="none"), seed=31)
    zero(*(connection.identity_norm for connection in model.connections), model.closing.identity_norm)
    dead = {name: g for name, g in gradients(model).items() if "identity_norm" in name}
    assert len(dead) == 2 * DEPTH + 1 and all(gradient > 1e-3 for gradient in dead.values())


MULTI_STREAM = [
    "shc-2",
    "dhc-2",
    "dhc-2:streams=4",
    "mhc-4",
    "mhc-4:streams=2",
    "mhc-4:dynamic=false",
    "mhc-4:order=rows-first",
    "mhc-4:start=softmax,eps=0.0",
    "mhc-4:readout=learned",
    "mhc-4:mixing=identity",
    "mhc-4:mixing=permutations",
    "mhc-4:projection=per-stream",
    "mhc-4:single_pass=true",
    "mhc-4:temperature=0.05",
]


def multi_stream_as_pre(text: str, pre: Wired) -> Wired:
    model = wire(build_topology(text), pre.norm_text)
    for ours, theirs in zip(model.connections, pre.connections, strict=True):
        copy_norm(theirs.norm, ours.norm)
    copy_norm(pre.closing.norm, model.closing.norm)
    return model


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("text", MULTI_STREAM)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_hyper_connections_start_as_pre_norm(text: str, norm: str) -> None:
    """Every stream is Pre-Norm's; their weighted sum is cancelled by the next norm, but for its eps."""
    pre = pre_norm(f"{norm}:eps=0.0")
    assert_close(multi_stream_as_pre(text, pre), pre)
    pre = pre_norm(f"{norm}:eps=1e-6")
    assert 0 < distance(multi_stream_as_pre(text, pre), pre) < 2e-5


@pytest.mark.parametrize("name", ["shc-2", "dhc-2"])
def test_hyper_connections_read_one_stream_in_turn(name: str) -> None:
    """A_m starts one-hot at k mod n, k counting sublayers; A_r as I; B as ones."""
    model = wire(build_topology(name, streams=4))
    for k, connection in enumerate(model.connections):
        assert connection.mix_in.tolist() == [float(stream == k % 4) for stream in range(4)]
        assert torch.equal(connection.mix_residual, torch.eye(4).double())
        assert connection.mix_out.tolist() == [1.0] * 4


def test_static_and_dynamic_hyper_connections_start_equal() -> None:
    static, dynamic = wire("shc-2"), wire("dhc-2")
    assert_same(static, dynamic)
    randomise(dynamic, 1)
    assert distance(static, dynamic) > 1e-3


@pytest.mark.parametrize("text", ["mhc-4", "mhc-4:start=softmax,eps=0.0", "mhc-4:streams=2"])
def test_manifold_streams_stay_equal_whatever_pre_and_comb(text: str) -> None:
    """With W = 0 and post = 1: comb's rows sum to 1, so equal streams stay equal; pre is cancelled by the norm."""
    pre = pre_norm(EXACT)
    model = multi_stream_as_pre(text, pre)
    n = model.topology.streams
    for k, connection in enumerate(model.connections):
        with torch.no_grad():
            connection.logits.mix_in.copy_(embedding(40 + k, n))
            connection.logits.mix_residual.copy_(2 * embedding(60 + k, n, n))
    assert_close(model, pre)
    with torch.no_grad():
        model.connections[0].logits.mix_out.copy_(embedding(80, n))
    assert distance(model, pre) > 0.01, "post must be 1"


@pytest.mark.parametrize("start", ["exp", "softmax"])
@pytest.mark.parametrize(("order", "last"), [("columns-first", -1), ("rows-first", -2)])
def test_comb_is_doubly_stochastic(start: str, order: str, last: int) -> None:
    """The side that comes last sums to 1 exactly; the other only in the limit: 20 rounds leave a percent here."""
    for iterations, gap in ((20, 0.02), (500, 1e-5)):
        topology = build_topology("mhc-4", start=start, order=order, eps=0.0, iterations=iterations)
        model = wire(topology, seed=32)
        comb = model.connections[0].mixing_weights(model.opening(embedding())[0])[1].mT
        ones = torch.ones(comb.shape[:-1]).double()
        torch.testing.assert_close(comb.sum(last), ones, rtol=0, atol=1e-13)
        torch.testing.assert_close(comb.sum(-3 - last), ones, rtol=0, atol=gap)
        assert comb.min() > 0


def test_comb_survives_extreme_logits() -> None:
    """In the logarithmic domain no sum underflows: where exp would give 0/0, comb and its gradient are finite."""
    model = wire(build_topology("mhc-4", dynamic=False), dtype=torch.float32)
    logits = model.connections[0].logits.mix_residual
    with torch.no_grad():
        logits.copy_(1000 * embedding(33, 4, 4).float())
    comb = model.connections[0].mixing_weights(model.opening(embedding().float())[0])[1]
    comb.square().sum().backward()
    assert comb.isfinite().all() and logits.grad.isfinite().all()
    torch.testing.assert_close(comb.mT.sum(-1), torch.ones(4), rtol=0, atol=1e-5)


def test_manifold_streams_can_come_to_differ() -> None:
    """Sublayers favour different streams at the start, so that the gradients of post and comb tell streams apart."""
    model = wire("mhc-4")
    reads = [int(c.logits.mix_in.argmax()) for c in model.connections]
    assert reads == [0, 1, 2, 3, 0, 1]
    model(embedding(), tanh_nets()).square().sum().backward()
    post = model.connections[0].logits.mix_out.grad
    assert (post - post.mean()).abs().max() > 1e-6
    assert model.connections[0].logits.project_residual.grad.abs().max() > 0


def test_permutations_are_doubly_stochastic_without_iterations() -> None:
    model = wire(build_topology("mhc-4", mixing="permutations"), seed=35)
    mixing = model.connections[0].mixing_weights(model.opening(embedding())[0])[1]
    for side in (-1, -2):
        torch.testing.assert_close(mixing.sum(side), torch.ones(mixing.shape[:-1]).double(), rtol=0, atol=1e-14)
    fresh = wire(build_topology("mhc-4", mixing="permutations")).connections[0]
    assert float(fresh.mixing_weights(embedding(1, 4, DIM))[1].diagonal().min().detach()) > 0.99


def test_softmax_gates_write_the_output_once() -> None:
    """The writes of all streams sum to the output, and the start is no Pre-Norm: preserving is refused."""
    model = wire(build_topology("mhc-4", gates="softmax"), seed=36)
    pre, _, post = model.connections[0].mixing_weights(model.opening(embedding())[0])
    for gates in (pre, post):
        torch.testing.assert_close(gates.sum(-1), torch.ones(gates.shape[:-1]).double(), rtol=0, atol=1e-14)
    with pytest.raises(UserError):
        model.topology.preserving()


# --- Attention Residuals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sources", ["blocks", "outputs"])
@pytest.mark.parametrize("norm", ["rmsnorm:eps=0.1", "layernorm:eps=0.1", "dyt", "seednorm"])
def test_rescaled_attention_residuals_start_as_pre_norm(sources: str, norm: str) -> None:
    """Zero queries weigh the sources alike, and n times their mean is Pre-Norm's stream: with any norm."""
    pre = pre_norm(norm)
    model = multi_stream_as_pre(f"attnres:sources={sources},block_size=1,rescale=true", pre)
    assert_close(model, pre)


def test_attention_residuals_without_rescaling_are_pre_norm_up_to_eps() -> None:
    pre = pre_norm("rmsnorm:eps=0.0")
    assert_close(multi_stream_as_pre("attnres", pre), pre)
    pre = pre_norm("rmsnorm:eps=1e-6")
    assert 0 < distance(multi_stream_as_pre("attnres", pre), pre) < 2e-5


def test_the_sum_of_all_sources_is_the_stream_of_pre_norm() -> None:
    """Whatever the queries are: the sources are a partition of the embedding and the outputs."""
    model = wire(build_topology("attnres", block_size=2), seed=37)
    streams, total, nets = model.opening(embedding()), embedding(), tanh_nets()
    for connection, net in zip(model.connections, nets, strict=True):
        h, streams = connection.read(streams)
        output = net(h)
        total, streams = total + output, connection.write(streams, output)
    torch.testing.assert_close(sum(streams), total, rtol=0, atol=1e-13)
    assert len(streams) == 1 + math.ceil(DEPTH / 2)


def test_every_query_of_attention_residuals_has_a_gradient_at_the_start() -> None:
    model = wire(build_topology("attnres", rescale=True))
    found = {name: g for name, g in gradients(model).items() if "query" in name}
    assert len(found) == 2 * DEPTH and all(gradient > 1e-8 for gradient in found.values())


def test_attention_residuals_keep_the_sources_and_scalars() -> None:
    """For the backward pass a read keeps each source once, in its dtype, and two numbers per token of each."""
    for dtype in (torch.float32, torch.bfloat16):
        model = wire("attnres-full", dtype=torch.float32)
        sources = tuple(embedding(k).to(dtype).requires_grad_() for k in range(5))
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            model.connections[4].mix(sources)
        storages = {x.untyped_storage().data_ptr() for x in sources}
        others = {x.untyped_storage().data_ptr(): x for x in kept}
        others = {at: x for at, x in others.items() if at not in storages}
        assert all(x.numel() <= max(DIM, len(sources) * sources[0][..., 0].numel()) for x in others.values())


# --- depth scaling is DeepNorm's alpha; lazy is eager, shifted -------------------------------------------------------


def test_depth_scaling_is_deepnorm_with_an_alpha_a_block() -> None:
    """At eps 0: N(X + s O) = N(X/s + O), so the code's reading is DeepNorm with alpha_l = sqrt(2(l+1))."""
    model = wire(build_topology("siamese-post-pre", normalized_input=False), EXACT, seed=34)
    zero(*(connection.identity_norm for connection in model.connections), model.closing.identity_norm)
    norms, nets, x = norms_after(model), tanh_nets(), embedding()
    with torch.no_grad():
        for k in model.sublayers:
            x = norms[k](math.sqrt(2 * (k // 2 + 1)) * x + nets[k](x))
    torch.testing.assert_close(run(model), x, rtol=0, atol=1e-12)


def test_readings_of_the_depth_scale() -> None:
    """The code equals the reading by sublayers at the MLPs only."""
    scales = {}
    for reading in ("code", "paper_block", "paper_sublayer", "none"):
        model = wire(build_topology("siamese", depth_scale=reading))
        scales[reading] = [float(connection.addition.scale) ** -2 for connection in model.connections]
    assert scales["code"] == pytest.approx([2, 2, 4, 4, 6, 6])
    assert scales["paper_block"] == pytest.approx([1, 1, 2, 2, 3, 3])
    assert scales["paper_sublayer"] == pytest.approx([1, 2, 3, 4, 5, 6])
    assert scales["none"] == [1] * 6


@over_norms
@pytest.mark.parametrize("normalized_input", [True, False])
def test_lazy_is_eager_with_shifted_norms(norm: str, normalized_input: bool) -> None:
    """Bit for bit, once the eager form starts at X_0 = N^X_0(e); from the paper's X_0 = e it differs."""
    options = {"normalized_input": normalized_input}
    lazy = wire(build_topology("siamese-post-pre", post_norm="lazy", **options), norm, seed=35)
    eager = wire(build_topology("siamese-post-pre", post_norm="eager", **options), norm)
    missing = eager.load_state_dict(lazy.state_dict(), strict=False)
    assert missing.missing_keys == [] and all(
        key.startswith("connections.0.post_norm") for key in missing.unexpected_keys
    )
    e, nets = embedding(), tanh_nets()
    with torch.no_grad():
        streams = (lazy.connections[0].post_norm(e), e)
        for connection, net in eager.steps(nets):
            streams = connection(streams, net)
        assert torch.equal(eager.closing(streams), run(lazy))
    assert distance(eager, lazy) > 1e-3


# --- sums ------------------------------------------------------------------------------------------------------------

SUMMING = {  # topology -> the stream that is what it was at the start plus every output
    "pre": 0,
    "pre-embednorm": 0,
    "ln-scaling": 0,
    "siamese": 1,
    "siamese-post-pre": 1,
    "siamese-post-pre:post_norm=lazy": 1,
    "residual": 1,
    "residual-hybridnorm": 1,
}


@pytest.mark.parametrize("text", SUMMING)
def test_the_identity_stream_is_the_sum_of_all_outputs(text: str) -> None:
    """Y_K = Y_0 + sum of O_k, whatever the parameters; exactly, as the sum runs in the same order."""
    model, nets, e = wire(build_topology(text), seed=36), tanh_nets(), embedding()
    with torch.no_grad():
        streams = model.opening(e)
        total = streams[SUMMING[text]]
        assert torch.equal(total, e) == (text != "pre-embednorm")
        for connection, net in model.steps(nets):
            h, streams = connection.read(streams)
            output = net(h)
            streams, total = connection.write(streams, output), total + output
    assert torch.equal(streams[SUMMING[text]], total)


@pytest.mark.parametrize("name", ["peri", "peri:embedding_norm=true", "olmo2"])
def test_the_stream_of_output_norms_is_the_sum_of_normalised_outputs(name: str) -> None:
    model, e = wire(name, seed=36), embedding()
    with torch.no_grad():
        streams = model.opening(e)
        (total,) = streams
        for connection, net in model.steps(tanh_nets()):
            h, streams = connection.read(streams)
            output = net(h)
            streams, total = connection.write(streams, output), total + connection.output(output)
    assert torch.equal(streams[0], total)


# --- ResiDual, LayerScale, ReZero, SpanNorm --------------------------------------------------------------------------


@over_norms
@pytest.mark.parametrize(("dual", "single"), [("residual", "post"), ("residual-hybridnorm", "hybridnorm")])
def test_residual_without_its_dual_norm_is_its_body(norm: str, dual: str, single: str) -> None:
    body, model = wire(single, norm, seed=37), wire(dual, norm, seed=38)
    for ours, theirs in zip(model.connections, body.connections, strict=True):
        copy_norm(theirs.post_norm, ours.post_norm)
    copy_norm(body.closing.post_norm if single == "post" else body.closing.norm, model.closing.post_norm)
    assert distance(model, body) > 0.1
    zero(model.closing.dual_norm)
    assert_same(model, body)


def test_the_dual_norm_cancels_its_scale_but_for_eps() -> None:
    """With c = 0.05 an eps of 1e-5 is not harmless; the official 1e-7 is a hundred times less so; at 0 c cancels."""

    def gap(**options: float) -> float:
        whole, small = (wire(build_topology("residual", dual_scale=c, **options), seed=39) for c in (1.0, 0.05))
        return distance(whole, small)

    assert gap() > 1e-3
    assert gap(dual_eps=1e-7) == pytest.approx(gap() / 100, rel=0.05)
    whole, small = (wire(build_topology("residual", dual_scale=c), EXACT, seed=39) for c in (1.0, 0.05))
    assert_close(whole, small)


def test_dual_eps_changes_the_dual_norm_alone() -> None:
    model = wire(build_topology("residual", dual_eps=1e-7))
    assert model.closing.dual_norm.eps == 1e-7
    assert {norm.eps for norm in norms_after(model)} == {1e-5}
    assert [wire(f"residual:dual_eps={eps}").closing.dual_norm.eps for eps in ("auto", 0)] == [1e-5, 0.0]


def test_a_silent_sublayer_of_deepnorm_leaves_the_norm_of_the_weighted_stream() -> None:
    model, silent = wire("deepnorm", "dyt", seed=43, depth=1), TanhNet(0)
    silent.second = torch.zeros_like(silent.second)
    first, second = norms_after(model)
    alpha = 2**0.25
    torch.testing.assert_close(model(embedding(), [silent, silent]), second(alpha * first(alpha * embedding())))


@over_norms
def test_layer_scale_at_one_is_pre_norm(norm: str) -> None:
    pre, model = wire("pre", norm, seed=40), wire(build_topology("layerscale", initial=1.0), norm)
    model.load_state_dict(pre.state_dict(), strict=False)
    assert_same(model, pre)
    fill(0.0, *(connection.output.gain for connection in model.connections))
    assert torch.equal(run(model), model.closing.norm(embedding()))


def test_rezero_starts_as_the_identity() -> None:
    model = wire("rezero")
    assert torch.equal(run(model), embedding())
    assert {name: p.shape for name, p in model.named_parameters()} == {
        f"connections.{k}.output.gain": (1,) for k in model.sublayers
    }
    assert all(gradient > 1e-3 for gradient in gradients(model).values())


def test_hybridnorm_star_differs_in_its_first_block_only() -> None:
    plain, star = wire("hybridnorm"), wire("hybridnorm-star")
    assert plain.topology.attention_norm == star.topology.attention_norm == "qkv-head"
    for k, (ours, theirs) in enumerate(zip(star.connections, plain.connections, strict=True)):
        assert (ours.state_dict().keys() == theirs.state_dict().keys()) == (k > 1)
    for connection in star.connections[:2]:
        assert isinstance(connection.post_norm, nn.Identity) and not isinstance(connection.norm, nn.Identity)


NORM_COUNTS = {  # of width d, at L blocks
    "pre": lambda L: 2 * L + 1,
    "post": lambda L: 2 * L,
    "deepnorm": lambda L: 2 * L,
    "peri": lambda L: 4 * L + 1,
    "olmo2": lambda L: 2 * L + 1,
    "mixln": lambda L: 2 * L + 1,
    "hybridnorm": lambda L: L + 1,
    "hybridnorm-star": lambda L: L + 2,
    "keel": lambda L: 4 * L,
    "lambdas": lambda L: 2 * L + 1,
    "attnres": lambda L: 2 * L + 1,
    "spannorm": lambda L: 2 * L + 1,
    "residual": lambda L: 2 * L + 1,
    "rezero": lambda L: 0,
    "siamese": lambda L: 4 * L + 3,  # N^Y_a, N^X, N^Y_m, N^in; the gates are counted below
    "siamese-post-pre": lambda L: 6 * L + 1,
}


@pytest.mark.parametrize("name", NORM_COUNTS)
def test_number_of_norms(name: str) -> None:
    for depth in (1, 4):
        model = wire(name, depth=depth)
        norms = sum(type(module).__name__ == "RMSNorm" for module in model.modules())
        assert norms == NORM_COUNTS[name](depth)


def test_parameters_of_hybrid_pre() -> None:
    """5d a block and 3d at the end, where Pre-Norm has 2d and d."""
    assert sum(p.numel() for p in wire("siamese", depth=4).parameters()) == (5 * 4 + 3) * 8
    assert sum(p.numel() for p in wire("pre", depth=4).parameters()) == (2 * 4 + 1) * 8


def test_span_norm_spans_the_block() -> None:
    """In reading A the block's input skips both sublayers: silent sublayers leave N2 of it, not N2 of N1."""
    model, e = wire("spannorm", EXACT, seed=41, depth=1), embedding()
    silent = TanhNet(0)
    silent.second = torch.zeros_like(silent.second)
    assert torch.equal(model(e, [silent, silent]), model.closing.post_norm(e))
    assert len(model.connections[0](model.opening(e), silent)) == 2
    assert len(model.connections[1](model.connections[0](model.opening(e), silent), silent)) == 1


def test_embedding_norms() -> None:
    e = embedding()
    opened = wire("pre-embednorm", "layernorm").opening(e)[0]
    torch.testing.assert_close(opened, e / torch.sqrt(e.square().mean(-1, keepdim=True) + 1e-5), rtol=1e-12, atol=0)
    assert not list(wire("pre-embednorm", "layernorm").opening.parameters())
    peri = wire(build_topology("peri", embedding_norm=True), "layernorm", seed=42)
    assert {name for name, _ in peri.opening.named_parameters()} == {"norm.gain", "norm.bias"}


def test_eager_copies_share_nothing() -> None:
    """Norms are modules of their own: no two places share parameters by accident."""
    for name in ("siamese", "siamese-post-pre", "residual", "peri", "hybridnorm", "mhc-4"):
        model = wire(name)
        assert len({p.data_ptr() for p in model.parameters()}) == len(list(copy.deepcopy(model).parameters()))


def test_the_factor_of_keel_is_the_number_of_sublayers() -> None:
    for kinds, count in (((("attention", False), ("mlp", False)), 6), ((("mlp", False),), 3)):
        places = transformer_places(3, sublayers=kinds)
        assert build_topology("keel").write_factors(places[1][0]).skip == count


@pytest.mark.parametrize("topology", ["mhc-4", "dhc-2"])
def test_parameters_may_be_given_to_a_call(topology: str) -> None:
    model = build_language_model("nano", topology=topology, vocabulary=11, depth=2, seed=0)
    tokens = torch.arange(6)[None]
    parameters = {name: parameter.detach() * 1.5 for name, parameter in model.named_parameters()}
    found = torch.func.functional_call(model, parameters, (tokens,)).logits
    model.load_state_dict(parameters)
    torch.testing.assert_close(found, model(tokens).logits)


def test_the_length_of_a_scalenorm_is_no_eps_of_other_norms() -> None:
    config = language_model_config("nano", topology="pre", norm="scalenorm:eps=0.1", vocabulary=11)
    assert config.attention_shape.norm == NormSpec.parse("rmsnorm")
    assert config.with_method("pre + rmsnorm").norm == NormSpec.parse("rmsnorm")
