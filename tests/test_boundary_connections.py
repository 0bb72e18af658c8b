"""Fused connections equal the plain ones: every topology that has them, in every way that a model is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from siamesenorm import LanguageModel, ResidualSpec, available_topologies, build_language_model, build_topology
from siamesenorm.errors import UserError
from siamesenorm.interop.swap_norms import swap_norms
from siamesenorm.kernels import launch
from siamesenorm.norms import NormSpec, RMSNorm, available_norms
from siamesenorm.sublayers.sublayer import Context
from siamesenorm.topologies import boundary_family as family
from siamesenorm.topologies import transformer_places
from siamesenorm.training.execution import checkpoint_blocks, compile_blocks

FUSED = [name for name in available_topologies() if build_topology(name).has_fused_kernels]
VARIANTS = [
    *FUSED,
    "hybridnorm:depth_scale=code",
    "mixln:post_blocks=2",
    "post:final_norm=true",
    "residual:dual_scale=0.5,bounded_scale=0.7",
    "residual:body=hybridnorm",
    "siamese:normalized_input=false",
    "siamese:depth_scale=none",
    "siamese-post-pre:normalized_input=false",
    "siamese-post-pre:post_norm=lazy,readout=code,gated_opening=true",
]
NORMS = ("rmsnorm", "layernorm", "layernorm:bias=false")
DEPTH = 3


def tiny_model(topology: str, **fields: Any) -> LanguageModel:
    """Return a model in fp64 whose every parameter is random."""
    sizes = {"depth": DEPTH, "dim": 16, "heads": 2, "hidden": 24, "vocabulary": 11}
    model = build_language_model("nano", topology=topology, **{**sizes, **fields}).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1)
    return model


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(3))


def run(model: LanguageModel) -> dict[str, Tensor]:
    """Return the logits, and the gradient of a loss on them for every parameter."""
    model.zero_grad()
    logits = model(tokens()).logits
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)
    (logits * weights.reshape(logits.shape)).sum().backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


class Calls(TorchDispatchMode):
    """Count the calls of the operator, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [0, 0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[0] += func is torch.ops.siamesenorm.boundary.default
        self.counts[1] += func is torch.ops.siamesenorm.boundary_backward.default
        return func(*args, **(kwargs or {}))


def boundaries(topology: str) -> int:
    """Return how many boundaries have something to fuse: all but the first, or those of HybridNorm's MLPs."""
    return DEPTH if "hybridnorm" in topology else 2 * DEPTH - 1


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("topology", VARIANTS)
def test_fused_equals_plain(topology: str, norm: str) -> None:
    plain, fused = (tiny_model(topology, norm=norm, kernels=kernels) for kernels in ("plain", "fused"))
    assert list(fused.state_dict()) == list(plain.state_dict())
    fused.load_state_dict(plain.state_dict())
    with Calls() as calls:
        found = run(fused)
    assert calls.counts == [boundaries(topology)] * 2
    torch.testing.assert_close(found, run(plain), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("topology", FUSED)
def test_a_write_stays_pending_across_block_edges(topology: str) -> None:
    model = tiny_model(topology, kernels="fused")
    streams = model.opening(model.embedding(tokens()))
    count = len(streams)
    for block in model.blocks:
        streams, _ = block(streams, Context(model.rotary(torch.arange(6))))
        assert len(streams) == count + 1, "the streams, and the output not yet added"


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("norm", ["rmsnorm", "seednorm", "dyt", "rmsnorm:offset=1"])
@pytest.mark.parametrize("topology", available_topologies())
def test_auto_is_plain_on_a_cpu_to_the_last_bit(topology: str, norm: str) -> None:
    plain, auto = (tiny_model(topology, norm=norm, kernels=kernels).float() for kernels in ("plain", "auto"))
    with Calls() as calls:
        found = run(auto)
    assert calls.counts == [0, 0]
    torch.testing.assert_close(found, run(plain), rtol=0, atol=0)


def pretend_kernels(monkeypatch: pytest.MonkeyPatch, smallest: int = 0) -> None:
    """Let there be kernels for every tensor of so many bytes."""
    monkeypatch.setattr(family, "has_boundary_kernels", lambda x: True)
    monkeypatch.setattr(launch, "SMALLEST_FUSED_BYTES", smallest)


class OperatorCalls(TorchDispatchMode):
    """Count the calls of the package's operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "siamesenorm"
        return func(*args, **(kwargs or {}))


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("norm", available_norms())
@pytest.mark.parametrize("topology", available_topologies())
def test_plain_calls_no_operator_on_a_gpu(topology: str, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for boundaries, norms outside of them, or the attention's norms; all other kernels do."""
    pretend_kernels(monkeypatch)
    monkeypatch.setattr("siamesenorm.norms.norm.has_norm_kernels", lambda x: True)
    calls = {}
    for kernels in ("plain", "auto", *(["fused"] if topology in FUSED and norm in ("rmsnorm", "layernorm") else [])):
        with OperatorCalls() as counted:
            run(tiny_model(topology, norm=norm, kernels=kernels, attention_norm="auto", context_norm=True, depth=2))
        calls[kernels] = counted.count
    assert calls.pop("plain") == 0
    assert min(calls.values()) > 0


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("topology", FUSED)
def test_auto_is_fused_where_there_are_kernels(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernels(monkeypatch)
    auto = tiny_model(topology, kernels="auto")
    with Calls() as calls:
        found = run(auto)
    assert calls.counts == [boundaries(topology)] * 2
    torch.testing.assert_close(found, run(tiny_model(topology)), rtol=1e-12, atol=1e-12)


def test_a_subclass_with_its_own_formula_is_not_fused() -> None:
    class Half(RMSNorm):
        def formula(self, x: Tensor) -> Tensor:
            return super().formula(x) / 2

    with pytest.raises(UserError, match="supports RMSNorm and LayerNorm"):
        family.FusedNorms.of([Half(8)])
    assert family.FusedNorms.of([RMSNorm(8)]).eps == RMSNorm(8).eps


def test_auto_is_plain_under_torch_func_and_fused_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transformations do not see through operators: a function's gradient is that of the plain formulas."""
    pretend_kernels(monkeypatch)

    def gradients(kernels: str) -> dict[str, Tensor]:
        model = tiny_model("siamese", kernels=kernels)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return torch.func.grad(lambda p: torch.func.functional_call(model, p, (tokens(),)).logits.sin().sum())(
            parameters
        )

    torch.testing.assert_close(gradients("auto"), gradients("plain"), rtol=0, atol=0)
    for kernels in ("fused", "lean"):
        with pytest.raises(UserError):
            gradients(kernels)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own use
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("topology", ["pre", "siamese"])
def test_auto_is_plain_under_forward_mode_and_fused_is_refused(
    topology: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator would lose the tangent, in silence where nothing asks for gradients."""
    pretend_kernels(monkeypatch)

    def tangent(kernels: str) -> Tensor:
        model = tiny_model(topology, kernels=kernels)
        embedding = model.embedding(tokens()).detach()
        with torch.set_grad_enabled(grad), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
            streams = model.opening(forward_ad.make_dual(embedding, embedding.sin()))
            for block in model.blocks:
                streams, _ = block(streams, Context(model.rotary(torch.arange(6))))
            return forward_ad.unpack_dual(model.closing(streams)).tangent

    torch.testing.assert_close(tangent("auto"), tangent("plain"), rtol=0, atol=0)
    for kernels in ("fused", "lean") if topology == "siamese" else ("fused",):
        with pytest.raises(UserError):
            tangent(kernels)


def test_a_compiled_read_sees_forward_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph without it and one with it, each used again."""
    pretend_kernels(monkeypatch)
    fused: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        fused.append("siamesenorm.boundary" in graph.code)
        return graph.forward

    torch._dynamo.reset()
    read = torch.compile(read_of("auto"), fullgraph=True, backend=backend)
    streams = torch.ones(2, 4), torch.ones(2, 4)
    for _ in range(2):
        read(streams)
        with forward_ad.dual_level():
            read(streams)
    assert fused == [True, False]


def read_of(kernels: str) -> Any:
    """Return the read of a connection of Pre-Norm."""
    _, (place, _) = transformer_places(2)
    return build_topology("pre").connection(place, ResidualSpec(dim=4, kernels=kernels)).read


def test_auto_is_plain_for_small_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where launching takes the host longer than the plain formulas; the operator is used on request."""
    pretend_kernels(monkeypatch, smallest=8 * 4 * 4)
    for kernels, rows, fused in (("auto", 7, 0), ("auto", 8, 1), ("fused", 7, 1)):
        with Calls() as calls:
            read_of(kernels)((torch.ones(rows, 4), torch.ones(rows, 4)))
        assert calls.counts == [fused, 0]


def test_a_compiled_read_of_any_length_sees_small_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph for all small ones, and in one for all large ones."""
    pretend_kernels(monkeypatch, smallest=8 * 4 * 4)
    fused: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        fused.append("siamesenorm.boundary" in graph.code)
        return graph.forward

    torch._dynamo.reset()
    read = torch.compile(read_of("auto"), fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 5, 7, 8, 20, 6, 100):
        read((torch.ones(rows, 4), torch.ones(rows, 4)))
    assert fused == [False, True]


@pytest.mark.parametrize("kernels", ["fused", "lean"])
def test_one_compiled_graph_for_streams_of_any_length(kernels: str) -> None:
    _, (_, place) = transformer_places(2)
    graphs: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    read = torch.compile(
        build_topology("siamese").connection(place, ResidualSpec(dim=4, kernels=kernels)).read,
        fullgraph=True,
        dynamic=True,
        backend=lambda graph, _: graphs.append(graph) or graph.forward,
    )
    for rows in (3, 5, 20):
        read(tuple(torch.ones(rows, 4) for _ in range(3)))
    assert len(graphs) == 1


def test_auto_is_plain_for_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shard(Tensor):
        pass

    pretend_kernels(monkeypatch)
    read, streams = read_of("auto"), (torch.ones(2, 4), torch.ones(2, 4))
    with Calls() as calls:
        read(streams)
        assert calls.counts == [1, 0]
        read(tuple(stream.as_subclass(Shard) for stream in streams))
    assert calls.counts == [1, 0]


@pytest.mark.parametrize("norm", ["seednorm", "dyt", "rmsnorm:offset=1"])
def test_auto_is_plain_for_norms_that_the_operator_does_not_know(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernels(monkeypatch)
    with Calls() as calls:
        found = run(tiny_model("siamese", norm=norm, kernels="auto"))
    assert calls.counts == [0, 0]
    torch.testing.assert_close(found, run(tiny_model("siamese", norm=norm)), rtol=0, atol=0)


@pytest.mark.parametrize("topology", FUSED)
def test_fused_refuses_norms_that_the_operator_does_not_know(topology: str) -> None:
    with pytest.raises(UserError):
        tiny_model(topology, norm="dyt", kernels="fused")


@pytest.mark.parametrize("topology", ["pre", "siamese", "siamese-post-pre:normalized_input=false", "ln-scaling"])
@pytest.mark.parametrize("norm", NORMS)
def test_fused_norms_without_gain(topology: str, norm: str) -> None:
    """Those of conditioned sublayers, as in the official DiT."""
    _, (place, last) = transformer_places(2, conditioned=True)
    for at in (place, last):
        connections = [
            build_topology(topology).connection(at, ResidualSpec(dim=8, norm=norm, kernels=kernels)).double()
            for kernels in ("plain", "fused")
        ]
        generator = torch.Generator().manual_seed(0)
        count = len(build_topology(topology).stream_names)
        streams = [torch.randn(3, 8, generator=generator, dtype=torch.float64) for _ in range(count)]
        output = torch.randn(3, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        found = []
        for connection in connections:
            with Calls() as calls:
                written = (*streams, output) if connection.pends else connections[1].previous(tuple(streams), output)
                h, after = connection.read(written)
            found.append((h, *after, *torch.autograd.grad((h.sin().sum() + after[0].sum()), output)))
        assert calls.counts[0] == 1
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_fused_refuses_other_axes() -> None:
    (_, place), *_ = transformer_places(1)
    with pytest.raises(UserError):
        build_topology("pre").connection(place, ResidualSpec(dim=8, axis=1, kernels="fused"))


def test_fused_refuses_different_norms() -> None:
    norms = [NormSpec.parse(spec).build(8) for spec in ("rmsnorm", "rmsnorm:eps=1e-6")]
    with pytest.raises(UserError, match=r"eps 1e-05, RMSNorm with eps 1e-06"):
        family.FusedNorms.of(norms)


def test_kernels_that_do_not_exist_are_refused() -> None:
    for build in (lambda: ResidualSpec(dim=8, kernels="triton"), lambda: tiny_model("pre", kernels="triton")):
        with pytest.raises(UserError, match="triton"):
            build()


@pytest.mark.parametrize("kernels", ["fused", "lean", "auto"])
def test_norms_of_fused_connections_are_not_swapped(kernels: str) -> None:
    """The operator computes them, whatever module would stand there."""
    (_, place), *_ = transformer_places(1)
    connection = build_topology("siamese").connection(place, ResidualSpec(dim=8, kernels=kernels))
    report = swap_norms(nn.ModuleDict({"connection": connection}), "layernorm")
    assert not report.replaced
    assert [name for name, _ in report.refused] == [
        f"connection.{n}" for n in ("post_norm", "identity_norm", "input_norm")
    ]
    assert all("kernels='plain'" in reason for _, reason in report.refused)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # PyTorch's compiler asks for it, and hides this
@pytest.mark.parametrize(
    ("topology", "checkpointed"),
    [
        ("siamese", True),
        *(
            pytest.param(*case, marks=pytest.mark.laws)
            for case in [("siamese", False), ("pre", True), ("residual", False), ("deepnorm", False)]
        ),
    ],
)
def test_compiled(topology: str, checkpointed: bool) -> None:
    plain, fused = tiny_model(topology, depth=4), tiny_model(topology, depth=4, kernels="fused")
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        graphs.append([str(node.target) for part in parts for node in part.graph.nodes])
        return compiled

    torch._dynamo.reset()
    if checkpointed:
        checkpoint_blocks(fused)
    compile_blocks(fused, backend=backend)
    torch.testing.assert_close(run(fused), run(plain), rtol=1e-12, atol=1e-12)
    assert checkpointed or len(graphs) == 2, "the first block reads streams, the others streams and a pending output"
    assert all(any("siamesenorm.boundary" in node for node in graph) for graph in graphs)


@pytest.mark.parametrize("topology", FUSED)
def test_streams_keep_their_dtype(topology: str) -> None:
    """bf16 streams between fp32 sublayers: the fused form rounds once where the plain one rounds at every step."""
    plain, fused = (
        tiny_model(topology, kernels=kernels, residual_dtype="bfloat16", compute_dtype="float32").float()
        for kernels in ("plain", "fused")
    )
    streams = fused.opening(fused.embedding(tokens()))
    for block in fused.blocks:
        streams, _ = block(streams, Context(fused.rotary(torch.arange(6))))
        assert {stream.dtype for stream in streams[:-1]} == {torch.bfloat16}
        acts_on_output = topology in ("peri", "layerscale")
        assert streams[-1].dtype == (torch.bfloat16 if acts_on_output else torch.float32)
    torch.testing.assert_close(run(fused)["logits"], run(plain)["logits"], rtol=0, atol=0.05)


def test_generation_with_caches() -> None:
    prompt = tokens()[:, :3]
    for topology in FUSED:
        generated = [tiny_model(topology, kernels=kernels).generate(prompt, 4) for kernels in ("plain", "fused")]
        assert torch.equal(*generated)
