"""The analyses of trained models against values by hand: each on a tiny model with parameters away from their start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm import build_language_model
from siamesenorm.analysis import HeldOut, available_analyses, build_analysis
from siamesenorm.analysis.depth import needed_blocks, participation_ratio
from siamesenorm.analysis.held_out import PathParts, observed_reads, replaced
from siamesenorm.analysis.jacobians import forward_difference, jacobian
from siamesenorm.analysis.outliers import attention_to_first, outliers
from siamesenorm.analysis.quantisation import linear_layers, quantised, rounded
from siamesenorm.analysis.stream_terms import closing_terms, input_terms, mean_of_copies
from siamesenorm.analysis.transitions import Transition, in_double
from siamesenorm.errors import UserError
from siamesenorm.sublayers.sublayer import Context
from siamesenorm.topologies import ResidualSpec, Streams
from siamesenorm.topologies.topology import Gate
from siamesenorm.training.presets import presets
from siamesenorm.world import World
from training_runs import with_model

TOKENS = torch.randint(17, (3, 7), generator=torch.Generator().manual_seed(1))
SHAPE = {"depth": 2, "dim": 16, "heads": 2, "hidden": 24, "vocabulary": 17, "context": 6}
MANY = ["pre", "post", "siamese", "siamese-post-pre", "residual", "dhc-2", "mhc-4", "attnres", "lambdas", "spannorm"]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def loss_of(model: Any) -> dict[str, float]:
    with torch.no_grad():
        logits = model(TOKENS[:, :-1]).logits
        return {"loss": float(F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()))}


def subject(topology: str, **changes: Any) -> HeldOut:
    """Return a model whose parameters are all away from their initial values, and its loss on a few tokens."""
    model = build_language_model("nano", **{**SHAPE, "topology": topology, **changes}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return HeldOut(model, loss_of)


def measure(name: str, held_out: HeldOut, **options: Any) -> dict[str, Any]:
    return build_analysis(name, **options).measure(held_out)


def fill(parameter: Tensor | None, value: float) -> None:
    assert parameter is not None
    with torch.no_grad():
        parameter.fill_(value)


def silence(block: Any) -> None:
    """Make both sublayers of a block return 0."""
    fill(block.attention.output.weight, 0.0)
    fill(block.mlp.output.weight, 0.0)


def embedded(model: Any) -> Streams:
    streams: Streams = model.open(model.embedding(TOKENS[:, :-1]))
    return streams


# --- magnitudes and shares


@pytest.mark.parametrize("topology", ["pre", "post", "siamese", "residual", "attnres-full"])
def test_magnitudes_are_those_of_the_streams_that_reads_return(topology: str) -> None:
    held_out = subject(topology)
    model: Any = held_out.model
    found = measure("hidden-magnitude", held_out)
    streams, seen, context = embedded(model), [], Context(model.rotary(torch.arange(6)))
    with torch.no_grad():
        for block in model.blocks:
            for name, connection in zip(block.names, block.connections, strict=True):
                h, streams = connection.read(streams)
                seen.append(streams)
                streams = connection.write(streams, getattr(block, name)(h, context))
    assert found["blocks"] == 2 and len(found["sublayers"]) == 4
    if topology in ("post", "residual"):  # the closing's first norm is that of the last addition
        streams = (model.closing.post_norm(streams[0]), *streams[1:])
    for number, state in enumerate([*seen, streams]):
        named = zip(model.config.topology.name_streams(len(state)), state, strict=True)
        for name, x in named:
            rms = float(x.square().mean(-1).sqrt().mean())
            assert found["streams"][name]["rms"][number] == pytest.approx(rms, rel=1e-5)
            assert found["streams"][name]["max"][number] == pytest.approx(float(x.abs().max()), rel=1e-5)


def test_a_stream_that_does_not_exist_yet_has_no_magnitude() -> None:
    rms = measure("hidden-magnitude", subject("attnres-full"))["streams"]["source_2"]["rms"]
    assert rms[:3] == [None] * 3 and None not in rms[3:]


def test_magnitudes_of_a_model_of_another_library_are_those_at_its_blocks() -> None:
    blocks = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    for block in blocks:
        with torch.no_grad():
            block.weight.copy_(2 * torch.eye(4))
    x = torch.ones(2, 5, 4)
    held_out = HeldOut(blocks, lambda model: {"loss": float(model(x).sum())})
    with torch.no_grad():
        assert measure("hidden-magnitude", held_out)["streams"]["residual"]["rms"] == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("topology", MANY)
def test_terms_add_up_to_what_sublayers_and_the_head_read(topology: str) -> None:
    held_out = subject(topology, norm="rmsnorm:eps=0.3")  # with which a multiple of the sum has another norm
    path, seen = PathParts.of(held_out.model), []

    def observe(name: str, before: Streams, h: Tensor, after: Streams) -> None:
        connection: Any = path.connections[name]
        total = torch.stack(tuple(input_terms(path.topology, connection, before, after).values())).sum(0)
        norm = getattr(connection, "last_norm", None) or getattr(connection, "norm", None)
        torch.testing.assert_close(norm(total), h, rtol=1e-5, atol=1e-6)
        seen.append(name)

    def close(streams: Streams) -> Tensor:
        terms, finish = closing_terms(path.topology, path.closings[0], streams)
        closed = finish(torch.stack(tuple(terms.values())).sum(0))
        torch.testing.assert_close(closed, forward(streams), rtol=1e-5, atol=1e-6)
        seen.append("closing")
        return closed

    forward = path.closings[0].forward
    with observed_reads(path.connections, observe), replaced(path.closings[0], "forward", close):
        held_out.run()
    assert seen == [*path.connections, "closing"]


def test_shares_follow_the_gains() -> None:
    held_out = subject("siamese")
    blocks: Any = held_out.model.blocks
    for block in blocks:
        fill(block.mlp_connection.post_norm.gain, 3.0)
        fill(block.mlp_connection.identity_norm.gain, -1.0)
        fill(block.attention_connection.gate.gain, 0.5)
        fill(block.attention_connection.identity_norm.gain, 0.5)
    blocks[1].mlp_connection.gate = Gate(ResidualSpec(dim=16), initial=3.0)
    found = measure("stream-share", held_out)
    assert found["gains"] == {"bounded": [0.5, 0.75, 0.5, 0.9], "identity": [0.5, 0.25, 0.5, pytest.approx(0.1)]}
    assert found["activations"]["bounded"][1::2] == pytest.approx([0.75, 0.9], abs=1e-4)


def test_the_weights_of_the_fusion_are_the_gains_of_the_last_norms() -> None:
    held_out = subject("siamese")
    closing: Any = held_out.model.closing
    fill(closing.post_norm.gain, 1.05)
    fill(closing.identity_norm.gain, 0.42)
    found = measure("fusion", held_out)
    assert found["gains"] == pytest.approx({"bounded": 1.05, "identity": 0.42})
    assert found["shares"] == pytest.approx({"bounded": 1.05 / 1.47, "identity": 0.42 / 1.47}, abs=1e-4)


def test_numbered_streams_are_averaged() -> None:
    values = {"streams[0]": 1.0, "streams[1]": 3.0, "source_0": 2.0, "source_12": 4.0, "prefix": 5.0}
    assert mean_of_copies(values) == {"streams": 2.0, "source": 3.0, "prefix": 5.0}


# --- logit lens and pruning


@pytest.mark.parametrize("topology", MANY)
def test_the_lens_ends_at_the_model_and_begins_at_the_closed_embedding(topology: str) -> None:
    held_out = subject(topology)
    model: Any = held_out.model
    found, whole = measure("logit-lens", held_out), loss_of(model)["loss"]
    assert found["loss"][-1] == whole and found["agreement"][-1] == 1.0 and len(found["loss"]) == 3
    with torch.no_grad():
        logits = model.logits(model.closing(embedded(model)))
    assert found["loss"][0] == pytest.approx(float(F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())))
    assert loss_of(model)["loss"] == whole, "the model is as it was"


@pytest.mark.parametrize("topology", ["siamese", "siamese-post-pre", "residual"])
def test_a_stream_alone_goes_through_its_own_norms(topology: str) -> None:
    held_out = subject(topology)
    closing: Any = held_out.model.closing
    names = held_out.model.config.topology.stream_names  # type: ignore[union-attr]
    fill(closing.second_norm.gain, 0.0)
    found = measure("logit-lens", held_out)
    assert found["streams"][names[0]]["loss"] == found["loss"]
    assert found["streams"][names[0]]["agreement"] == [*found["agreement"]]
    assert found["streams"][names[1]]["loss"][-1] == pytest.approx(math.log(17)), "the head of a zero is uniform"
    assert found["divergent"]["agreement"][names[0]] == 1.0 > found["divergent"]["agreement"][names[1]]


@pytest.mark.parametrize("topology", MANY)
def test_pruning_restores_the_model(topology: str) -> None:
    held_out = subject(topology)
    found, whole = measure("pruning", held_out), loss_of(held_out.model)["loss"]
    assert found["loss"] == found["last_removed"][0] == found["last_zeroed"][0] == whole
    assert found["last_removed"][1] == found["removed"][-1] != whole
    assert found["last_zeroed"][1] == found["zeroed"][-1] != whole
    assert found["last_removed"][2] == measure("logit-lens", held_out)["loss"][0]
    if topology in ("pre", "post", "siamese", "residual", "dhc-2"):
        same = found["removed"] == pytest.approx(found["zeroed"], abs=1e-6)
        assert same == (topology == "pre"), "elsewhere a write acts without an output, too"


@pytest.mark.parametrize("topology", ["post", "siamese", "siamese-post-pre", "mixln:post_blocks=2"])
@pytest.mark.parametrize("removed", [[1], [2], [1, 2]])
def test_the_norm_after_the_last_kept_block_acts_without_later_ones(topology: str, removed: list[int]) -> None:
    held_out = subject(topology, depth=3)
    found = measure("pruning", held_out)
    losses = {(1,): found["removed"][1], (2,): found["removed"][2], (1, 2): found["last_removed"][2]}
    model: Any = held_out.model
    norm = model.blocks[removed[0]].attention_connection.post_norm
    kept = [block for index, block in enumerate(model.blocks) if index not in removed]
    if topology != "siamese":  # which has no norm at the end of a block
        (model.closing if len(kept) == removed[0] else kept[removed[0]].attention_connection).post_norm = norm
    model.blocks = nn.ModuleList(kept)
    assert losses[tuple(removed)] == loss_of(model)["loss"] != found["loss"]


@pytest.mark.parametrize("topology", ["pre", "post", "siamese", "dhc-2"])
def test_a_silent_block_is_not_needed(topology: str) -> None:
    held_out = subject(topology)
    silence(held_out.model.blocks[1])  # type: ignore[index]
    found = measure("pruning", held_out)
    assert found["zeroed"][1] == found["loss"] != found["zeroed"][0]
    if topology == "pre":
        assert found["removed"][1] == pytest.approx(found["loss"], abs=1e-6)
        effective = measure("effective-depth", held_out)
        assert effective["influence"]["residual"] == pytest.approx([effective["influence"]["residual"][0], 0], abs=1e-6)
        assert effective["angle"]["residual"][1] == pytest.approx(0, abs=1e-3) and effective["harm"][1] < 1e-6
        assert effective["effective_blocks"] == (pytest.approx(1.0, abs=1e-4) if effective["harm"][0] else 0.0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("topology", ["post", "siamese", "siamese-post-pre"])
def test_the_last_post_norm_is_in_the_closing(topology: str, depth: int) -> None:
    held_out = subject(topology, depth=depth)
    closing: Any = held_out.model.closing
    norm = PathParts.of(held_out.model).last_post_norm("blocks")
    assert (norm is closing.post_norm) == (topology != "siamese"), "of which the closing's norms are final ones"


def test_the_influence_of_the_last_block_is_that_on_the_normalised_stream() -> None:
    held_out = subject("post")
    model: Any = held_out.model
    fill(model.closing.post_norm.gain, 0.0)
    with torch.no_grad():
        model.closing.post_norm.gain[0] = 1.0
    streams, context, seen = embedded(model), Context(model.rotary(torch.arange(6))), []
    for block in model.blocks:
        seen.append(block.attention_connection.read(streams)[1][0])
        streams, _ = block(streams, context)
    cosine = F.cosine_similarity(seen[-1], model.closing.post_norm(streams[0]), dim=-1)
    found = measure("effective-depth", held_out)
    assert found["influence"]["residual"][-1] == pytest.approx(float(1 - cosine.mean()), abs=1e-6)
    assert found["angle"]["residual"][-1] == pytest.approx(float(cosine.arccos().mean() / math.pi), abs=1e-6)


@pytest.mark.parametrize("name", ["hidden-magnitude", "stream-share", "fusion", "effective-depth", "outliers"])
def test_means_are_over_tokens_and_samples_whatever_the_batches(name: str) -> None:
    model = subject("siamese").model

    def evaluate(*sizes: int) -> HeldOut:
        def run(changed: Any) -> dict[str, float]:
            logits = torch.cat([changed(batch).logits for batch in torch.split(TOKENS[:, :-1], sizes)])
            return {"loss": float(F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()))}

        return HeldOut(model, run)

    whole, unequal = (build_analysis(name).results(evaluate(*sizes)) for sizes in ((3,), (2, 1)))
    assert whole["samples"] == unequal["samples"] == 3
    assert numbers(unequal) == pytest.approx(numbers(whole), rel=1e-4, abs=1e-6)


def numbers(found: Any) -> list[float]:
    """Return all numbers in results, in their order."""
    if isinstance(found, dict | list | tuple):
        return [n for each in (found.values() if isinstance(found, dict) else found) for n in numbers(each)]
    return [float(found)] if isinstance(found, int | float) else []


def test_effective_depth_counts_what_blocks_gain() -> None:
    model, gains = subject("siamese", depth=3).model, (4.0, 2.0, 0.1)

    def evaluate(changed: Any) -> dict[str, float]:
        loss_of(changed)
        active = ("forward" not in vars(block) for block in changed.blocks)
        return {"loss": 10.0 - sum(gain for gain, here in zip(gains, active, strict=True) if here)}

    found = measure("effective-depth", HeldOut(model, evaluate))
    assert found["harm"] == pytest.approx(gains) and found["needed_blocks"] == 2
    assert found["effective_blocks"] == pytest.approx(6.1**2 / (16 + 4 + 0.01))
    assert measure("effective-depth", HeldOut(model, evaluate), tolerance=0.01)["needed_blocks"] == 3


def test_measures_of_depth() -> None:
    assert participation_ratio([1.0] * 5) == 5.0 and participation_ratio([2.0, 0, 0]) == 1.0
    assert participation_ratio([0.0, 0.0]) == 0.0
    assert needed_blocks([5.0, 3.0, 2.1, 2.0], 0.05) == 2 and needed_blocks([5.0, 3.0, 2.1, 2.0], 0.0) == 3
    assert needed_blocks([5.0, 2.0, 4.0, 2.0], 0.05) == 3, "from there on"


# --- outliers


def test_massive_activations_exceed_both_thresholds() -> None:
    x = torch.full((2, 3, 4), 0.1)
    x[0, 1, 2], x[0, 2, 2], x[1, 0, 0] = 150.0, -99.0, 101.0
    found = {name: float(value) for name, value in outliers(x, 100, 1000).items()}
    assert found == pytest.approx({"max": 150, "median": 0.1, "ratio": (1500 + 1010) / 2, "massive": 1.0})
    assert float(outliers(x, 100, 1200)["massive"]) == float(outliers(x, 120, 500)["massive"]) == 0.5
    assert float(outliers(x, 50, 900)["massive"]) == 1.5


def test_a_planted_entry_is_found_where_it_is() -> None:
    held_out = subject("pre")
    with torch.no_grad():
        held_out.model.embedding.weight[:, 3] = 1e4  # type: ignore[index,union-attr]
    found = measure("outliers", held_out)["streams"]["residual"]
    assert found["massive"][0] == 6.0 and found["max"][0] == 1e4 and found["ratio"][0] > 1000


def test_uniform_attention_gives_the_first_token_harmonic_shares() -> None:
    held_out, harmonic = subject("pre"), sum(1 / n for n in range(2, 7)) / 5
    found = measure("outliers", held_out)["attention"]
    assert found["first"] != pytest.approx([harmonic] * 2, rel=1e-3)
    for block in held_out.model.blocks:  # type: ignore[union-attr]
        fill(block.attention.query.weight, 0.0)
    found = measure("outliers", held_out)["attention"]
    assert found["first"] == pytest.approx([harmonic] * 2) == found["uniform"]
    assert found["sink_heads"] == [0.0, 0.0]


@pytest.mark.parametrize("masked", ["causal", "bool", "two dimensions", "float", "none"])
def test_attention_is_that_of_pytorch(masked: str) -> None:
    torch.manual_seed(0)
    q, k, T = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), 5
    lower = torch.ones(T, T, dtype=torch.bool).tril()
    bias = torch.randn(1, 1, T, T).masked_fill(~lower, -math.inf)
    options: dict[str, Any] = {
        "causal": {"is_causal": True}, "bool": {"attn_mask": lower[None, None]}, "float": {"attn_mask": bias},
        "two dimensions": {"attn_mask": lower}, "none": {},
    }[masked]  # fmt: skip
    values = torch.eye(T).expand(2, 2, T, T)  # the output is then the attention itself
    weights = F.scaled_dot_product_attention(q, k, values, enable_gqa=True, **options)
    first, uniform = attention_to_first(q, k, values, enable_gqa=True, **options)
    torch.testing.assert_close(first, weights[:, :, 1:, 0].mean(-1))
    expected = 1 / 5 if masked == "none" else (1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4
    torch.testing.assert_close(uniform, torch.full((2, 4), expected).double())


# --- quantisation


def test_rows_are_rounded_to_multiples_of_their_scale() -> None:
    x = torch.tensor([[7.0, 3.4, -1.6, 0.4], [0.0, 0.0, 0.0, 0.0], [14.0, 3.0, -3.1, 13.2]])
    expected = torch.tensor([[7.0, 3.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0], [14.0, 4.0, -4.0, 14.0]])
    assert torch.equal(rounded(x, 4), expected) and torch.equal(rounded(x, 16), x)


def test_what_can_be_represented_is_exact_and_weights_return() -> None:
    held_out = subject("pre")
    layers = [module for block in held_out.model.blocks for module in block.modules()]  # type: ignore[union-attr]
    for layer in (module for module in layers if isinstance(module, nn.Linear)):
        with torch.no_grad():
            layer.weight.copy_(torch.randint(-127, 128, layer.weight.shape) / 1024)
            layer.weight[:, 0] = 127 / 1024
    before = {name: weight.clone() for name, weight in held_out.model.state_dict().items()}
    found = measure("quantisation", held_out, schemes=("w8a16", "w8a8", "w4a4", "w16a16"))
    schemes = found["schemes"]
    assert schemes["w8a16"]["rise"] == schemes["w16a16"]["rise"] == 0.0 and found["layers"] == 14
    assert 0 < abs(schemes["w8a8"]["rise"]) < abs(schemes["w4a4"]["rise"])
    assert schemes["w4a4"]["loss"] - found["loss"] == schemes["w4a4"]["rise"]
    assert all(torch.equal(weight, before[name]) for name, weight in held_out.model.state_dict().items())
    assert loss_of(held_out.model)["loss"] == found["loss"]


def test_experts_are_rounded_and_routers_are_not() -> None:
    model: Any = subject("pre", experts=4, active_experts=2).model
    layers, mixture = linear_layers(model), model.blocks[0].mlp
    assert len(layers) == 2 * (4 + 3)
    before = mixture.up.weight.clone(), mixture.router.weight.clone()
    with quantised(layers, 4, 16):
        assert torch.equal(mixture.up.weight, rounded(before[0], 4)) and not torch.equal(mixture.up.weight, before[0])
        assert torch.equal(mixture.router.weight, before[1])
    assert torch.equal(mixture.up.weight, before[0])


def test_the_inputs_of_experts_are_rounded() -> None:
    model: Any = subject("pre", experts=4, active_experts=2).model
    inputs: list[Tensor] = []
    with quantised(linear_layers(model), 16, 4):
        mixture = model.blocks[0].mlp
        mixture.up.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
        model(TOKENS)
    assert torch.equal(inputs[0], rounded(inputs[0], 4)), "rounded before the last hook"


def test_stacked_experts_of_another_library_are_refused() -> None:
    model: Any = subject("pre").model
    model.blocks[1].mlp.gate_up_proj = nn.Parameter(torch.zeros(4, 8, 6))
    with pytest.raises(UserError, match=r"blocks\.1\.mlp\.gate_up_proj"):
        build_analysis("quantisation").require_model(model)


# --- Jacobians


BOUNDARY = ("pre", "post", "peri", "siamese-post-pre", "siamese", "residual")


@pytest.mark.parametrize("topology", BOUNDARY)
def test_transitions_are_those_of_equation_8(topology: str) -> None:
    found = measure("jacobians", subject(topology, residual_dtype="float32"), tokens=2)
    names = {"first to first", "second to second", "second to first", "first to second"}
    assert found["identity"].keys() == (
        names if topology in ("siamese-post-pre", "siamese", "residual") else {"first to first"}
    )
    assert max(found["identity"].values()) < 1e-13 and found["forward"] < 1e-13
    assert len(found["largest"]) == 4 and min(found["largest"]) > 0.5


def test_a_stream_of_zeros_and_a_lone_transition_have_no_difference() -> None:
    assert forward_difference([]) == 0.0
    found = measure("jacobians", subject("siamese-post-pre:gated_opening=true", residual_dtype="float32"), tokens=2)
    assert found["forward"] < 1e-13
    assert measure("jacobians", subject("attnres-full", residual_dtype="float32"), tokens=2)["forward"] < 1e-13


def test_a_transition_that_is_not_the_model_s_own_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transition, "read", lambda self, *streams: self.normalised(self.connection.gate(streams[0])))
    found = measure("jacobians", subject("siamese", residual_dtype="float32"), tokens=2)
    assert found["forward"] > 1e-3


@pytest.mark.parametrize("topology", [*BOUNDARY, "dhc-2", "attnres-full"])
def test_the_product_of_the_transitions_is_the_jacobian_of_the_stack(topology: str) -> None:
    held_out = subject(topology)
    found = measure("jacobians", held_out, tokens=2)
    model = in_double(held_out.model)
    with torch.no_grad():
        state = model.open(model.embedding(TOKENS[:1, :2]))
        context = Context(model.rotary(torch.arange(2)))
        second = model.blocks[1].connections[0]
        normalised = topology in BOUNDARY and not isinstance(second.post_norm, nn.Identity)  # what follows a block

        def stack(*streams: Tensor) -> Streams:
            for block in model.blocks:
                streams, _ = block(streams, context)
            return (model.closing.post_norm(streams[0]), *streams[1:]) if normalised else streams

        values = torch.linalg.svdvals(jacobian(stack, state, 2))
    assert found["to_end"]["largest"][0] == pytest.approx(float(values.max()), rel=1e-9)
    assert found["to_end"]["rms"][0] == pytest.approx(float(values.square().mean().sqrt()), rel=1e-9)
    assert found["to_end"]["largest"][-1] == pytest.approx(found["largest"][-1])


def test_wide_streams_are_refused_before_anything_is_computed() -> None:
    with pytest.raises(UserError, match="128 numbers"):
        build_analysis("jacobians", largest=127).require_model(subject("siamese").model)


# --- runs and tasks


@pytest.mark.parametrize("preset", ["digits", "digits-mae", "digits-dit"])
def test_tasks_are_analysed_on_a_part_of_their_held_out_samples(preset: str, tmp_path: Path) -> None:
    config = with_model(presets(tmp_path)[preset], depth=1, dim=16, hidden=16).resolved()
    task = config.task.build(0)
    part: Any = task.on_part(3)
    held_out = HeldOut(
        task.build_model(torch.device("cpu")).eval(), lambda model: part.evaluate(model, 2, World()), task.unit
    )
    assert held_out.evaluate(held_out.model)["items"] == 3
    lens = build_analysis("logit-lens")
    if preset == "digits":
        lens.require(task)
        one: Any = task.on_part(1)
        image, label = task.data.held_out.image(0), task.data.held_out.labels[:1]  # type: ignore[attr-defined]
        logits: Tensor = held_out.model(task.data.normalised(image)[None]).logits  # type: ignore[attr-defined]
        assert one.evaluate(held_out.model, 2, World())["loss"] == pytest.approx(float(F.cross_entropy(logits, label)))
        everything: Any = task.on_part(10**6)
        assert everything.evaluate(held_out.model, 400, World()) == task.evaluate(held_out.model, 400, World())
    else:
        with pytest.raises(UserError, match="predicted classes"):
            lens.require(task)
    if preset == "digits-mae":
        assert len(measure("effective-depth", held_out)["influence"]["identity"]) == 3
        assert len(measure("jacobians", held_out, tokens=1)["to_end"]["rms"]) == 6, "of the encoder and of the decoder"
        assert measure("pruning", held_out)["unit"] == "mean squared error"


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    model = subject("pre").model
    for name in ("stream-share", "fusion"):
        with pytest.raises(UserError, match="one stream"):
            build_analysis(name).require_model(model)
    for name in available_analyses():
        if name != "hidden-magnitude":
            with pytest.raises(UserError, match="no residual topology"):
                build_analysis(name).require_model(nn.Linear(2, 2))
    for name, options in (
        ("prunning", {}), ("pruning", {"sample": 1}), ("pruning", {"samples": 0}), ("jacobians", {"largest": 0}),
        ("quantisation", {"schemes": ("w1a8",)}),
        ("outliers", {"ratio": 0}), ("effective-depth", {"tolerance": 1}), ("jacobians", {"tokens": 0}),
    ):  # fmt: skip
        with pytest.raises(UserError):
            build_analysis(name, **options)


def test_options_are_part_of_a_record() -> None:
    assert build_analysis("outliers").options() == {"samples": 64, "above": 100.0, "ratio": 1000.0}
