"""Laws that hold for every registered topology with every registered norm: formula, locality, state, dtypes, names."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reference_topologies import (
    BATCH,
    DEPTH,
    DIM,
    REFERENCES,
    TOKENS,
    Wired,
    choices,
    combinations,
    embedding,
    randomise,
    reference_of,
    tanh_nets,
    variants,
    wire,
)
from siamesenorm import language_model_config
from siamesenorm.errors import UserError
from siamesenorm.norms import DeclaredModule, DyT, available_norms, declared_parameters
from siamesenorm.norms.dyt import LANGUAGE_ALPHA
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.topologies import (
    TOPOLOGIES,
    ResidualSpec,
    Topology,
    available_topologies,
    build_topology,
    register_topology,
    topology_from_json,
    topology_name,
    topology_to_json,
    transformer_places,
)
from siamesenorm.topologies.hyper_connections import MultiStream
from siamesenorm.topologies.topology import Connection
from siamesenorm.training.config import OptimizerConfig, RunConfig

# Variants as someone may register them: the laws know families, not names.
NAMES = (*available_topologies(), "dhc-2:streams=4", "post:final_norm=true", "mixln:post_blocks=2")
NORMS = available_norms()
REFERENCED = [name for name in NAMES if type(build_topology(name)) in REFERENCES]

VARIANTS = {topology: text for name in REFERENCED for topology, text in variants(name).items()}
COMBINATIONS = {topology: text for name in REFERENCED for topology, text in combinations(name).items()}


def in_words(cases: dict[Topology, str]) -> list[object]:
    return [pytest.param(topology, id=text) for topology, text in cases.items()]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Topology]:
    """The registered topologies, as they were once the test is over."""
    topologies = dict(TOPOLOGIES)
    monkeypatch.setattr("siamesenorm.topologies.registry.TOPOLOGIES", topologies)
    monkeypatch.setitem(globals(), "TOPOLOGIES", topologies)
    return topologies


over_topologies = pytest.mark.parametrize("name", NAMES)
over_norms = pytest.mark.parametrize("norm", NORMS)


# --- law 1: the formula ----------------------------------------------------------------------------------------------


@torch.no_grad()
def assert_equals_reference(model: Wired) -> None:
    """The library and the slow reference agree in the output and in what every sublayer has seen."""
    e = embedding()
    ours, theirs = tanh_nets(), tanh_nets()
    expected = reference_of(model.topology).formula(model.topology, e, theirs, model)
    torch.testing.assert_close(model(e, ours), expected, rtol=0, atol=1e-10)
    assert [len(net.seen) for net in ours] == [len(net.seen) for net in theirs] == [1] * (2 * DEPTH)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.seen[0], other.seen[0], rtol=0, atol=1e-10)
    assert expected.abs().max() > 1e-3, "a reference of zeros would agree with anything"


@over_topologies
@over_norms
def test_topology_equals_its_reference(name: str, norm: str) -> None:
    assert_equals_reference(wire(name, norm, seed=1))


@pytest.mark.every_nth(2)
@pytest.mark.parametrize("norm", ["rmsnorm", "seednorm"])
@pytest.mark.parametrize("topology", in_words(VARIANTS))
def test_every_option_value_equals_the_reference(topology: Topology, norm: str) -> None:
    assert_equals_reference(wire(topology, norm, seed=2))


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("topology", in_words(COMBINATIONS))
def test_options_combine(topology: Topology) -> None:
    assert_equals_reference(wire(topology, "layernorm", seed=3))


@pytest.mark.parametrize(
    "text",
    [
        "mhc-4:start=softmax,eps=0.02,iterations=2",
        "mhc-4:start=softmax,order=rows-first,eps=0.02",
        "mhc-4:readout=learned,eps=0.02,streams=3,gate=0.5",
        "dhc-2:streams=3,stream_norm=rmsnorm,tanh=false",
        "residual-hybridnorm:bounded_scale=2.0,dual_scale=0.5,dual_eps=0.1",
        "hybridnorm-star:depth_scale=paper_sublayer",
    ],
)
def test_options_interact(text: str) -> None:
    assert_equals_reference(wire(text, "rmsnorm", seed=3))


@over_topologies
def test_vision_final_norm_and_other_depths(name: str) -> None:
    assert_equals_reference(wire(name, "rmsnorm", seed=4, domain="vision", final_norm=False))
    model, e = wire(name, "rmsnorm", seed=4, depth=5), embedding()
    with torch.no_grad():
        expected = reference_of(model.topology).formula(model.topology, e, tanh_nets(10), model)
        torch.testing.assert_close(model(e, tanh_nets(10)), expected, rtol=0, atol=1e-10)


@over_topologies
def test_every_option_has_values_to_test(name: str) -> None:
    """A number or a text is not enumerable: its reference lists values for it."""
    topology = build_topology(name)
    numbers = {field.name for field in dataclasses.fields(topology)} - set(choices(topology))
    missing = numbers - set(reference_of(topology).values)
    assert not missing, f"list values to test at @reference({type(topology).__name__}, {missing}=(...))"


# --- law 3: locality -------------------------------------------------------------------------------------------------


@torch.no_grad()
def assert_commutes(model: Wired, select: nn.Module) -> None:
    """Selecting tokens, then opening, reading, writing and closing = the same after selecting nothing."""

    def agree(whole: Tensor, part: Tensor) -> None:
        torch.testing.assert_close(select(whole), part, rtol=0, atol=1e-12)

    e = embedding()
    streams, selected = model.opening(e), model.opening(select(e))
    for k, connection in enumerate(model.connections):
        for whole, part in zip(streams, selected, strict=True):
            agree(whole, part)
        output = embedding(10 + k)
        h, streams = connection.read(streams)
        h_selected, selected = connection.read(selected)
        agree(h, h_selected)
        streams = connection.write(streams, output)
        selected = connection.write(selected, select(output))
    agree(model.closing(streams), model.closing(selected))


@over_topologies
@over_norms
def test_permuting_tokens_commutes(name: str, norm: str) -> None:
    permutation = torch.tensor([2, 0, 3, 1])
    assert_commutes(wire(name, norm, seed=5), lambda x: x[:, permutation])


@over_topologies
@over_norms
def test_samples_and_tokens_are_independent(name: str, norm: str) -> None:
    assert_commutes(wire(name, norm, seed=6), lambda x: x[1:2])
    assert_commutes(wire(name, norm, seed=6), lambda x: x[:, -1:])


@over_topologies
def test_any_number_of_leading_axes(name: str) -> None:
    model, e = wire(name, seed=6), embedding()
    nets = tanh_nets(tokens=0)
    expected = model(e, nets)
    torch.testing.assert_close(model(e[0, 0], nets), expected[0, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(model(e.unsqueeze(0), nets)[0], expected, rtol=0, atol=1e-12)


# --- state -----------------------------------------------------------------------------------------------------------


def transplant(source: Wired, target: Wired) -> None:
    """Give the target the source's parameters, by name, nothing missing and nothing left over."""
    target.load_state_dict(source.state_dict())


@over_topologies
@over_norms
def test_state_dict_round_trip(name: str, norm: str) -> None:
    source, target, e = wire(name, norm, seed=7), wire(name, norm, seed=8), embedding()
    expected = source(e, tanh_nets())
    assert not source.state_dict() or not torch.equal(target(e, tanh_nets()), expected)
    transplant(source, target)
    assert torch.equal(target(e, tanh_nets()), expected)


@over_topologies
@over_norms
def test_every_parameter_is_declared_and_every_parameter_learns(name: str, norm: str) -> None:
    model = wire(name, norm, seed=7)
    declared = {name for name, _, _ in declared_parameters(model)}
    assert declared == {name for name, _ in model.named_parameters()} == set(model.state_dict())
    model(embedding(), tanh_nets()).square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not without


@over_topologies
def test_no_parameter_has_no_axis(name: str) -> None:
    """FSDP2 refuses to shard parameters without an axis."""
    assert all(p.dim() > 0 for p in wire(name).parameters())


@over_topologies
@over_norms
def test_construction_is_deterministic_and_draws_no_random_number(name: str, norm: str) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = wire(name, norm), wire(name, norm)
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key])


def built_on_meta(name: str) -> Wired:
    with torch.device("meta"):
        model = wire(name, dtype=None)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, DeclaredModule):
            module.reset_parameters()
    return model


@over_topologies
def test_meta_construction_starts_like_any_other(name: str) -> None:
    late, direct = (
        {**m.state_dict(), **dict(m.named_buffers())} for m in (built_on_meta(name), wire(name, dtype=None))
    )
    assert late.keys() == direct.keys()
    assert all(torch.equal(late[key], direct[key]) for key in late)


@over_topologies
def test_constants_follow_every_cast_unrounded(name: str) -> None:
    """A model that was bf16, or made on the meta device, is in fp64 exactly the model that always was in fp64."""
    e = embedding()
    source = wire(name, seed=9)
    expected = source(e, tanh_nets())
    half = wire(name, dtype=torch.bfloat16)
    assert all(buffer.dtype == torch.float32 for buffer in half.buffers())
    for target in (half.double(), wire(name, dtype=None).float().double(), built_on_meta(name).double()):
        transplant(source, target)
        assert torch.equal(target(e, tanh_nets()), expected)


# --- streams ---------------------------------------------------------------------------------------------------------


@over_topologies
def test_pack_and_unpack(name: str) -> None:
    """A foreign loop that passes one tensor from block to block computes the same."""
    model, e, nets = wire(name, seed=10), embedding(), tanh_nets()
    topology = model.topology

    def block(index: int, packed: Tensor) -> Tensor:
        streams = topology.unpack(packed)
        for k in (2 * index, 2 * index + 1):
            streams = model.connections[k](streams, nets[k])
        return topology.pack(streams)

    packed = topology.pack(model.opening(e))
    assert packed.shape[:-2] == e.shape[:-1] and packed.shape[-1] == DIM
    for index in range(DEPTH):
        packed = block(index, packed)
    assert torch.equal(model.closing(topology.unpack(packed)), model(e, nets))


@over_topologies
def test_stream_names_name_the_streams(name: str) -> None:
    model = wire(name)
    streams = model.opening(embedding())
    names = model.topology.name_streams(len(streams))
    assert len(streams) == len(names) == len(set(names))
    for attention, mlp in zip(model.connections[::2], model.connections[1::2], strict=True):
        streams = mlp(attention(streams, tanh_nets()[0]), tanh_nets()[1])
        assert len(streams) == len(model.topology.name_streams(len(streams))), (
            "what lives inside a block may not leave it"
        )


@pytest.mark.every_nth(4)
@over_topologies
@pytest.mark.parametrize("compute_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residual_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_dtypes_of_streams(name: str, residual_dtype: torch.dtype | None, compute_dtype: torch.dtype | None) -> None:
    model = wire(name, dtype=None, residual_dtype=residual_dtype, compute_dtype=compute_dtype)
    residual, compute = residual_dtype or torch.bfloat16, compute_dtype or residual_dtype or torch.bfloat16
    streams = model.opening(embedding().to(torch.bfloat16))
    for k, connection in enumerate(model.connections):
        assert {stream.dtype for stream in streams} == {residual}
        h, streams = connection.read(streams)
        assert h.dtype == compute
        streams = connection.write(streams, embedding(k).to(compute))
    assert {stream.dtype for stream in streams} == {residual}
    assert model.closing(streams).dtype == compute


@over_topologies
def test_bf16_parameters_with_fp32_streams(name: str) -> None:
    """Parameters stored in bf16 do not lower the streams' dtype, and autocast has no say."""
    model = wire(name, dtype=torch.bfloat16, residual_dtype=torch.float32, compute_dtype=torch.float32)
    e = embedding().float()
    nets = tanh_nets()
    expected = model(e, nets)
    assert expected.dtype == torch.float32
    for net in nets:
        net.seen.clear()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        streams = model.opening(e)
        for connection, net in model.steps(nets):
            h, streams = connection.read(streams)
            with torch.autocast("cpu", enabled=False):
                output = net(h)
            streams = connection.write(streams, output)
        torch.testing.assert_close(model.closing(streams), expected, rtol=0, atol=0)


@over_topologies
def test_writes_are_out_of_place(name: str) -> None:
    """Streams may alias at the opening, so that no operation may write into them."""
    model, e, nets = wire(name, seed=11), embedding(), tanh_nets()
    before, streams = e.clone(), model.opening(e)
    for connection, net in model.steps(nets):
        kept = tuple(stream.clone() for stream in streams)
        following = connection(streams, net)
        assert all(torch.equal(now, then) for now, then in zip(streams, kept, strict=True))
        streams = following
    assert torch.equal(e, before)


# --- conditioning ----------------------------------------------------------------------------------------------------


@over_topologies
def test_conditioned_sublayers_compose_or_are_refused(name: str) -> None:
    topology = build_topology(name)
    if topology.modulation_refusal is not None:
        with pytest.raises(UserError) as refusal:
            wire(name, conditioned=True)
        assert topology.modulation_refusal in str(refusal.value) and "\n" not in str(refusal.value)
        return
    assert_equals_reference(wire(name, conditioned=True, seed=12))
    plain, conditioned = (sum(p.numel() for p in wire(name, conditioned=c).parameters()) for c in (False, True))
    assert conditioned <= plain


@pytest.mark.parametrize("name", ["pre", "siamese", "siamese-post-pre", "layerscale", "shc-2", "mhc-4"])
def test_the_last_norm_before_a_conditioned_sublayer_has_no_gain(name: str) -> None:
    for connection in wire(name, conditioned=True).connections:
        last = [norm for norm in (getattr(connection, at, None) for at in ("identity_norm", "input_norm", "norm"))
                if norm is not None and not isinstance(norm, nn.Identity)][-1]  # fmt: skip
        assert not last.affine


def test_a_norm_that_is_also_the_residual_keeps_its_gain() -> None:
    """SpanNorm's N1 feeds the MLP alone, N2 the residual too: conditioning takes the gain of N1 only."""
    for k, connection in enumerate(wire("spannorm", conditioned=True).connections):
        assert k == 0 or connection.post_norm.affine == (k % 2 == 0)
    post_norms = [connection.post_norm for connection in wire("post", conditioned=True).connections[1:]]
    assert all(post_norm.affine for post_norm in post_norms)


# --- roles -----------------------------------------------------------------------------------------------------------


@over_topologies
def test_a_norm_is_set_up_for_what_reads_it(name: str) -> None:
    """DyT's recipe has one initial alpha before attention, another elsewhere: before MLPs, on outputs, at the end."""
    model = wire(name, "dyt")
    attention, elsewhere = LANGUAGE_ALPHA[4096]
    for place, connection in zip(itertools.chain(*transformer_places(DEPTH)), model.connections, strict=True):
        for part, norm in ((part, n) for part, n in connection.named_modules() if isinstance(n, DyT)):
            reads = part.split(".")[0] != "output" and place.kind == "attention"
            assert norm.alpha.item() == pytest.approx(attention if reads else elsewhere), (place, part)
    for norm in (module for module in model.closing.modules() if isinstance(module, DyT)):
        assert norm.alpha.item() == pytest.approx(elsewhere)


# --- names -----------------------------------------------------------------------------------------------------------


@over_topologies
def test_names_round_trip(name: str) -> None:
    topology = build_topology(name)
    assert build_topology(topology_name(topology)) == topology
    record = topology_to_json(topology)
    assert record["name"] in TOPOLOGIES and record["family"] == type(topology).__name__
    assert topology_from_json(json.loads(json.dumps(record))) == topology


@pytest.mark.parametrize("topology", in_words({**VARIANTS, **COMBINATIONS}))
def test_names_with_options_round_trip(topology: Topology) -> None:
    assert build_topology(topology_name(topology)) == topology
    assert topology_from_json(json.loads(json.dumps(topology_to_json(topology)))) == topology


@pytest.mark.parametrize(
    ("spelled", "usual"),
    [
        ("residual:dual_scale=1", "residual"),
        ("mixln:post_fraction=1", "mixln:post_fraction=1.0"),
        ("layerscale:initial=1", "layerscale:initial=1.0"),
        ("layerscale:initial=auto", "layerscale"),
        ("dhc-2: streams = 4 , tanh=false", "dhc-2:streams=4,tanh=false"),
        (" pre ", "pre"),
    ],
)
def test_equal_topologies_have_equal_json(spelled: str, usual: str) -> None:
    first, second = build_topology(spelled), build_topology(usual)
    assert first == second
    assert json.dumps(topology_to_json(first)) == json.dumps(topology_to_json(second))
    assert json.dumps(topology_to_json(build_topology("residual", dual_scale=2))).count("2.0") == 1


def test_an_option_of_a_registered_variant_goes_back_to_its_rule(registry: dict[str, Topology]) -> None:
    register_topology("mixln-two", build_topology("mixln", post_blocks=2))
    assert build_topology("mixln-two:post_blocks=auto") == build_topology("mixln")
    assert build_topology("mixln-two:post_blocks=3").post_blocks == 3


def test_a_record_outlives_the_name_it_was_written_under(registry: dict[str, Topology]) -> None:
    topology = build_topology("dhc-2", streams=4)
    register_topology("dhc-four", topology)
    record = topology_to_json(topology)
    assert record["name"] == "dhc-four"
    del registry["dhc-four"]
    assert topology_from_json(record) == topology
    for family in ({}, {"family": "Elsewhere"}):
        with pytest.raises(UserError, match="dhc-four"):
            topology_from_json({"name": "dhc-four", **family})


@pytest.mark.parametrize("topology", ["siamese", "dhc-2:streams=4", "deepnorm"])
def test_another_registered_name_changes_no_identity(topology: str, registry: dict[str, Topology]) -> None:
    def identity(**changes: Any) -> str:
        model = language_model_config("nano", topology=topology)
        task = LanguageTaskConfig(data=Path("data"), digest="0", model=model)
        return RunConfig(task=task, batch=1, **{"steps": 10, **changes}).identity

    before = identity()
    assert identity(steps=11) != before == identity(optimizer=OptimizerConfig(clip=1, epsilon=1e-8))
    register_topology("ahead", build_topology(topology))
    registry.update({"ahead": registry.pop("ahead"), **{n: registry.pop(n) for n in list(registry) if n != "ahead"}})
    assert topology_to_json(build_topology(topology))["name"] == "ahead"
    assert identity() == before


def test_names_are_those_of_the_specification() -> None:
    one_stream = {"pre", "pre-embednorm", "post", "deepnorm", "mixln", "hybridnorm", "hybridnorm-star", "spannorm"}
    one_stream |= {"peri", "olmo2", "ln-scaling", "layerscale", "rezero"}
    several = {"residual", "shc-2", "dhc-2", "mhc-4", "siamese", "siamese-post-pre"}
    assert one_stream | several <= set(NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "siamees",
        "hybrid-norm",
        "dhc-2:stream=4",
        "dhc-2:streams=four",
        "dhc-2:streams=0",
        "dhc-2:stream_norm=layer",
        "pre:embedding_norm=maybe",
        "siamese:depth_scale=paper",
        "siamese-post-pre:post_norm=eagre",
        "siamese-post-pre:readout",
        "mixln:post_fraction=1.5",
        "mixln:post_blocks=-2",
        "layerscale:initial=-0.5",
        "layerscale:initial=nan",
        "layerscale:initial=small",
        "mixln:post_blocks=1.5",
        "residual:dual_scale=0",
        "residual:dual_eps=-1",
        "mixln:post_fraction=1e999",
        "hybridnorm:first_block=post",
        "mhc-4:iterations=0",
        "mhc-4:start=softmx",
        "mhc-4:eps=-1",
        "olmo2:streams=2",
    ],
)
def test_a_wrong_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError) as refusal:
        build_topology(text)
    assert str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dhc-2", {"streams": 2.5}),
        ("dhc-2", {"streams": True}),
        ("dhc-2", {"tanh": 1}),
        ("mixln", {"post_fraction": "half"}),
        ("mixln", {"post_fraction": False}),
        ("mixln", {"post_fraction": 10**400}),
        ("mixln", {"post_blocks": True}),
        ("spannorm", {"reading": "C"}),
        ("pre", {"embeding_norm": True}),
    ],
)
def test_a_wrong_value_is_refused_in_python_too(name: str, options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        build_topology(name, **options)


def test_a_name_is_not_given_twice() -> None:
    register_topology("pre", TOPOLOGIES["pre"])
    with pytest.raises(ValueError, match="taken"):
        register_topology("pre", TOPOLOGIES["post"])


def test_two_families_do_not_share_a_name(registry: dict[str, Topology]) -> None:
    namesake = dataclasses.make_dataclass("PreNorm", [], bases=(type(build_topology("rezero")),), frozen=True)
    with pytest.raises(ValueError, match="PreNorm"):
        register_topology("other", namesake())
    assert "other" not in registry


def test_an_option_of_another_kind_is_refused_by_name() -> None:
    odd = dataclasses.make_dataclass(
        "Odd", [("sizes", list, dataclasses.field(default_factory=list))], bases=(type(build_topology("rezero")),),
        frozen=True, kw_only=True,
    )  # fmt: skip
    with pytest.raises(UserError, match="sizes"):
        odd()


def test_dual_eps_needs_a_norm_with_eps() -> None:
    with pytest.raises(UserError, match="1e-07"):
        wire(build_topology("residual", dual_eps=1e-7), "dyt")


# --- names that installed packages add -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    """A stand-in for importlib.metadata.EntryPoint."""

    value: str
    load: Callable[[], object]
    name: str = "entry"


def install(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> list[str]:
    """Pretend that a package with these entry points is installed; return the groups asked for."""
    asked: list[str] = []

    def entry_points(*, group: str) -> tuple[EntryPoint, ...]:
        asked.append(group)
        return entries

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr("siamesenorm.topologies.registry.ENTRY_POINTS.loaded", False)
    return asked


def import_of_a_module() -> object:
    register_topology("by-module", build_topology("dhc-2", streams=3))  # looks up a name while entry points load
    return json


def by_function() -> None:
    register_topology("by-function", build_topology("dhc-2", streams=5))


LOOKUPS: dict[str, Callable[[], object]] = {
    "list": available_topologies,
    "build": lambda: build_topology("by-module"),
    "json": lambda: topology_from_json({"name": "by-function"}),
    "name": lambda: topology_name(TOPOLOGIES["pre"]),
}


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_entry_points_load_once_when_a_name_is_needed(
    lookup: Callable[[], object], registry: dict[str, Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = EntryPoint("a.module", import_of_a_module), EntryPoint("a.module:register", lambda: by_function)
    asked = install(monkeypatch, *entries)
    assert not asked and "by-module" not in registry
    lookup()
    assert build_topology("by-module").streams == 3 and build_topology("by-function").streams == 5
    assert {"by-module", "by-function"} < set(available_topologies())
    assert asked == ["siamesenorm.topologies"]


def test_an_entry_point_that_fails_leaves_the_others(
    registry: dict[str, Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> object:
        raise ImportError("no module named absent")

    install(monkeypatch, EntryPoint("broken.module", broken), EntryPoint("a.module:register", lambda: by_function))
    with pytest.warns(RuntimeWarning, match="broken.module"):
        assert "by-function" in available_topologies()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bare(Topology):
    """A topology that declares neither title nor cost."""


def test_a_title_and_a_cost_are_optional() -> None:
    assert (Bare().title, Bare().cost, Bare().heading) == ("Bare", None, "Bare")


def test_only_topologies_are_registered(registry: dict[str, Topology]) -> None:
    for other in (Bare, 3):
        with pytest.raises(ValueError):
            register_topology("other", other)


def test_a_parameter_that_is_not_declared_is_refused() -> None:
    class Undeclared(Connection):
        def __init__(self, spec: ResidualSpec) -> None:
            super().__init__(spec)
            self.alpha = nn.Parameter(torch.ones(spec.dim))

    with pytest.raises(UserError) as refusal:
        Undeclared(ResidualSpec(dim=4))
    assert "alpha" in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("kernels", ["fused", "lean"])
@over_topologies
def test_kernels_that_a_topology_lacks_are_refused(name: str, kernels: str) -> None:
    """By every module that is built from a specification, and not only by the language model."""
    topology, spec = build_topology(name), ResidualSpec(dim=8, norm="rmsnorm", kernels=kernels)
    *_, (place, last) = transformer_places(2)
    exists = topology.has_fused_kernels if kernels == "fused" else topology.has_lean_kernels
    for build in (lambda: topology.connection(place, spec), lambda: topology.closing(last, spec)):
        if exists:
            build()
        else:
            with pytest.raises(UserError):
                build()


def test_an_entry_point_may_name_a_class_or_an_instance(
    registry: dict[str, Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = build_topology("dhc-2", streams=6)
    entries = [
        EntryPoint("a.module:Class", lambda: type(instance), "by-class"),
        EntryPoint("a.module:instance", lambda: instance, "by-instance"),
    ]
    install(monkeypatch, *entries, EntryPoint("a.module:NUMBER", lambda: 3, "number"))
    with pytest.warns(RuntimeWarning, match="a.module:NUMBER"):
        assert {"by-class", "by-instance"} < set(available_topologies())
    assert build_topology("by-class") == type(instance)()
    assert build_topology("by-instance") == instance


@over_topologies
def test_channels_first_or_refused(name: str) -> None:
    """Along axis 1 of [batch, dim, height, width] a topology computes what it does along the last, or says why not."""
    try:
        first = wire(name, seed=13, axis=1)
    except UserError as refusal:
        assert "channels last" in str(refusal) and isinstance(build_topology(name), MultiStream)
        return
    model = wire(name, seed=13)
    e, nets = embedding(0, BATCH, 2, 2, DIM), tanh_nets(tokens=0)
    turned = [lambda x, net=net: net(x.movedim(1, -1)).movedim(-1, 1) for net in nets]
    expected = model(e, nets).movedim(-1, 1)
    torch.testing.assert_close(first(e.movedim(-1, 1), turned), expected, rtol=0, atol=1e-12)


# --- what `explain` prints -------------------------------------------------------------------------------------------


@over_topologies
def test_lines_of_diagrams_meet(name: str) -> None:
    """A corner or branch that points up or down meets something there that is neither blank nor a horizontal line."""
    lines = build_topology(name).diagram.split("\n")
    width = max(map(len, lines))
    grid = ["", *(line.ljust(width) for line in lines), ""]
    for above, line, below in zip(grid, grid[1:], grid[2:], strict=False):
        for column, character in enumerate(line):
            for arms, neighbour in (("└┘│├┤┼┴", above), ("┬│├┤┼┐┌", below)):
                if character in arms:
                    assert neighbour and neighbour[column] not in " ─", f"{character} at column {column} of {line!r}"


@over_topologies
def test_texts_fit(name: str) -> None:
    topology = build_topology(name)
    assert topology.title and topology.paper
    for text in (topology.formula, topology.diagram):
        lines = text.split("\n")
        assert all(line.strip() and len(line) <= 120 and line == line.rstrip() for line in lines)
        assert min(len(line) - len(line.lstrip()) for line in lines) == 8, "indented as the source is"
    assert all(case and "\n" not in case for case in topology.special_cases)


@over_topologies
def test_every_option_is_explained_where_it_is_offered(name: str) -> None:
    """In the formula or in the summary of its own family: an inherited option is not taken for granted."""
    topology = build_topology(name)
    described = topology.formula + (type(topology).__doc__ or "")
    assert not [option.name for option in dataclasses.fields(topology) if option.name not in described]


def test_what_is_not_published_is_said() -> None:
    for name, words in {
        "post": "baseline has one is not published",
        "deepnorm": "is not published: `initial_scaling=False` leaves",
        "siamese-post-pre": "language model is not published",
        "dhc-2": "could not be verified: it is not applied",
    }.items():
        assert words in " ".join((type(build_topology(name)).__doc__ or "").split())


ROLES = ("query", "key", "value", "attention_output", "mlp_up", "mlp_gate", "mlp_output")


@over_topologies
def test_initial_factors_are_positive(name: str) -> None:
    assert all(build_topology(name).initial_factor(role, DEPTH) > 0 for role in ROLES)


def test_deepnorm_tames_values_outputs_and_mlp_but_neither_queries_nor_keys_nor_gates() -> None:
    factors = {role: TOPOLOGIES["deepnorm"].initial_factor(role, 16) for role in ROLES}
    untouched = {role for role, factor in factors.items() if factor == 1}
    assert untouched == {"query", "key", "mlp_gate"}
    assert {round(factor, 4) for factor in factors.values()} == {1.0, 0.2973}
    plain = build_topology("deepnorm", initial_scaling=False)
    assert {plain.initial_factor(role, 16) for role in ROLES} == {1.0}
    assert float(wire("deepnorm", depth=16).connections[0].addition.skip) == pytest.approx(2.3784, abs=5e-5)


def test_layer_scale_follows_the_depth() -> None:
    for depth, initial in ((18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)):
        place = transformer_places(depth)[0][0]
        connection = TOPOLOGIES["layerscale"].connection(place, ResidualSpec(dim=DIM)).double()
        randomise(connection, 0, spread=0.0)
        torch.testing.assert_close(connection.output.gain, torch.full((DIM,), initial).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "decayed"),
    [("dhc-2", {"project_in", "project_residual", "project_out"}),
     ("mhc-4", {"project_in", "project_residual", "project_out"}), ("shc-2", set()), ("siamese", set()),
     ("layerscale", set()), ("rezero", set()), ("pre", set())],
)  # fmt: skip
def test_weight_decay_touches_only_dynamic_weights(name: str, decayed: set[str]) -> None:
    found = {key.rpartition(".")[2] for key, _, declaration in declared_parameters(wire(name)) if declaration.decay}
    assert found == decayed


def test_tokens_are_few() -> None:
    assert TOKENS <= 4 and DIM <= 8 and DEPTH <= 3, "the full product must stay cheap"
