"""Law 4: what a model computes does not depend on how it is run: compiled, checkpointed, or saved and loaded."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from siamesenorm import LanguageModel, available_norms, available_topologies, build_language_model, build_topology
from siamesenorm.models.block import Block
from siamesenorm.topologies import ResidualSpec, transformer_places
from siamesenorm.training.execution import checkpoint_blocks, compile_blocks

DEEP = 12
COMBINATIONS = [
    *((topology, "rmsnorm") for topology in available_topologies()),
    *((topology, norm) for topology in ("pre", "siamese") for norm in available_norms() if norm != "rmsnorm"),
]
# PyTorch's compiler asks every tensor for its gradient and hides the warning, which "error" brings back.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def tiny_model(topology: str, norm: str = "rmsnorm", *, seed: int = 0, **fields: Any) -> LanguageModel:
    """Return a model whose every parameter is random, gains and gates included."""
    sizes = {"depth": 3, "dim": 16, "heads": 2, "hidden": 24, "vocabulary": 11}
    model = build_language_model("nano", topology=topology, norm=norm, **{**sizes, **fields})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def tokens(seed: int = 3) -> Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(seed))


def run(model: LanguageModel, batch: Tensor) -> dict[str, Tensor]:
    """Return the logits, and the gradient of a loss on them for every parameter."""
    model.zero_grad()
    logits = model(batch).logits
    (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum().backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


# --- compiled = eager


class CountingBackend:
    """A compiler of graphs, forward and backward, that counts them and generates no code."""

    def __init__(self) -> None:
        self.graphs = 0
        self.compile: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled = self.compile(graph, inputs)
        self.graphs += 1
        return compiled


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def kind(block: Block) -> tuple[object, ...]:
    """Return what makes two blocks alike: their modules' types and their tensors' shapes."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    tensors = (*block.named_parameters(), *block.named_buffers())
    return modules, tuple((name, tensor.shape) for name, tensor in tensors)


def streams_entering(model: LanguageModel) -> list[int]:
    """Return the number of streams before each block."""
    found: list[int] = []
    hooks = [block.register_forward_pre_hook(lambda _, inputs: found.append(len(inputs[0]))) for block in model.blocks]
    model(tokens())
    for hook in hooks:
        hook.remove()
    return found


def assert_compiled_equals_eager(model: LanguageModel, backend: Any) -> None:
    """Compile the model's blocks and compare with the eager run, twice, the second time without any new graph."""
    first, second = run(model, tokens()), run(model, tokens(seed=4))
    compile_blocks(model, backend=backend)
    torch.testing.assert_close(run(model, tokens()), first, rtol=1e-4, atol=1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(run(model, tokens(seed=4)), second, rtol=1e-4, atol=1e-5)


@pytest.mark.every_nth(9)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.one_of_each_family
@pytest.mark.parametrize(("topology", "norm"), COMBINATIONS)
def test_one_graph_for_each_kind_of_block(topology: str, norm: str) -> None:
    grows = topology.startswith("attnres")  # a graph for each number of streams: seconds each
    model, backend = tiny_model(topology, norm, depth=2 if grows else DEEP), CountingBackend()
    streams = streams_entering(model)
    assert_compiled_equals_eager(model, backend)
    kinds = {(kind(block), count) for block, count in zip(model.blocks, streams, strict=True)}
    assert backend.graphs == len(kinds) and (grows or len(kinds) < DEEP)


@pytest.mark.usefixtures("fresh_compiler")
def test_every_number_of_streams_has_graphs_in_training_and_in_evaluation() -> None:
    """More graphs of one piece of code than torch allows by itself."""
    model, graphs = tiny_model("attnres:block_size=1", depth=3), 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    assert streams_entering(model) == [1, 2, 3]
    batches = [tokens(), tokens()[:1]]
    expected = [run(model, batch) for batch in batches]
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        compile_blocks(model, backend=count)
        for batch, values in zip(batches, expected, strict=True):
            found = run(model, batch)
            assert all(torch.equal(found[name], value) for name, value in values.items())
            with torch.no_grad():
                assert torch.equal(model(batch).logits, values["logits"])
    assert graphs == 3 * 2 * 2


@pytest.mark.usefixtures("fresh_compiler")
def test_fused_blocks_are_of_two_kinds() -> None:
    """The first block reads streams, the others streams and a pending output."""
    backend = CountingBackend()
    assert_compiled_equals_eager(tiny_model("siamese", depth=DEEP, kernels="fused"), backend)
    assert backend.graphs == 2


CAN_BUILD = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()


def by_inductor(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that generates code."""
    marks = (
        pytest.mark.skipif(not CAN_BUILD, reason="Inductor needs g++ and Python's headers"),
        pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # PyTorch's own, where Inductor is imported
        pytest.mark.usefixtures("fresh_compiler"),
    )
    return reduce(lambda marked, mark: mark(marked), marks, test)


class Layer(nn.Module):
    """A linear map between a read and a write of SiameseNorm: little to compile, which takes seconds a kernel."""

    def __init__(self) -> None:
        super().__init__()
        _, (place, _) = transformer_places(2)
        self.connection = build_topology("siamese").connection(place, ResidualSpec(dim=16))
        self.linear = nn.Linear(16, 16)

    def forward(self, bounded: Tensor, identity: Tensor) -> Tensor:
        bounded, identity = self.connection((bounded, identity), self.linear)
        return bounded + identity


@by_inductor
def test_a_layer_of_inductor_equals_the_eager_one() -> None:
    torch.manual_seed(0)
    layer, streams = Layer(), [torch.randn(2, 6, 16) for _ in range(2)]
    gradients = []
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):  # or it compiles a trial of each instruction set
        for each in (layer, torch.compile(layer, fullgraph=True)):
            layer.zero_grad()
            output = each(*streams)
            output.square().sum().backward()
            gradients.append([output.detach(), *(parameter.grad for parameter in layer.parameters())])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


@pytest.mark.laws
@by_inductor
@pytest.mark.parametrize(("topology", "norm"), [("siamese", "rmsnorm"), ("pre", "seednorm")])
def test_inductor_equals_eager(topology: str, norm: str) -> None:
    assert_compiled_equals_eager(tiny_model(topology, norm, depth=1), "inductor")


# --- checkpointed = not


@pytest.mark.one_of_each_family
@pytest.mark.parametrize(("topology", "norm"), COMBINATIONS)
def test_checkpointed_blocks_have_the_same_gradients(topology: str, norm: str) -> None:
    plain, checkpointed = tiny_model(topology, norm), tiny_model(topology, norm)
    checkpoint_blocks(checkpointed)
    expected, calls = run(plain, tokens()), count_calls([block.mlp for block in checkpointed.blocks])
    torch.testing.assert_close(run(checkpointed, tokens()), expected, rtol=0, atol=0)
    assert calls == [2, 2, 2], "every block is computed again in the backward pass"


def count_calls(modules: list[nn.Module]) -> list[int]:
    """Return a list in which the calls of each module are counted from now on."""
    calls = [0] * len(modules)
    for index, module in enumerate(modules):

        def count(*_: object, index: int = index) -> None:
            calls[index] += 1

        module.register_forward_pre_hook(count)
    return calls


def test_checkpointing_repeats_the_dropout_mask() -> None:
    plain, checkpointed = tiny_model("siamese", dropout=0.3), tiny_model("siamese", dropout=0.3)
    checkpoint_blocks(checkpointed)
    torch.manual_seed(0)
    expected = run(plain, tokens())
    torch.manual_seed(0)
    torch.testing.assert_close(run(checkpointed, tokens()), expected, rtol=0, atol=0)


def test_checkpointing_keeps_less() -> None:
    def kept(model: LanguageModel) -> int:
        bytes_kept = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal bytes_kept
            bytes_kept += 0 if isinstance(x, nn.Parameter) else x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(tokens())
        return bytes_kept

    plain, checkpointed = tiny_model("siamese", depth=DEEP), tiny_model("siamese", depth=DEEP)
    checkpoint_blocks(checkpointed)
    assert kept(checkpointed) < kept(plain) / 5


# --- saved and loaded = before


@pytest.mark.parametrize("norm", available_norms())
@pytest.mark.parametrize("topology", available_topologies())
def test_state_dict_round_trip(topology: str, norm: str, tmp_path: Path) -> None:
    saved, loaded = tiny_model(topology, norm, seed=1), tiny_model(topology, norm, seed=2)
    assert not torch.equal(saved(tokens()).logits, loaded(tokens()).logits)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(saved(tokens()).logits, loaded(tokens()).logits)


@pytest.mark.parametrize("topology", available_topologies())
def test_a_state_dict_holds_parameters_alone(topology: str) -> None:
    """Constants follow from the configuration; compilation and checkpointing rename nothing."""
    model = tiny_model(topology)
    names = list(dict(model.named_parameters()))
    checkpoint_blocks(model)
    compile_blocks(model)
    assert list(model.state_dict()) == names
