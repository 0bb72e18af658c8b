"""Law 9, costs: the passes and the kept tensors that a topology declares for a boundary are those counted."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from reference_topologies import REFERENCES, randomise, variants
from siamesenorm.norms import Norm
from siamesenorm.topologies import (
    BoundaryCost,
    Connection,
    Place,
    ResidualSpec,
    Topology,
    available_topologies,
    build_topology,
    transformer_places,
)

TOKENS, DIM, DEPTH = 11, 64, 4
NAMES = [name for name in available_topologies() if type(build_topology(name)) in REFERENCES]
VARIANTS = {topology: text for name in NAMES for topology, text in variants(name).items()}
del VARIANTS[build_topology("shc-2:streams=1")]  # PyTorch keeps fewer views of one stream
PLACES = list(itertools.chain(*transformer_places(DEPTH)))


def passes(tensors: dict[int, Tensor]) -> float:
    """Return the memory of tensors in units of one stream, [tokens, dim]; matrices and statistics do not count."""
    elements = [tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in tensors.values()]
    return sum(count for count in elements if count % (TOKENS * DIM) == 0) / (TOKENS * DIM)


def memory(*tensors: Tensor) -> dict[int, Tensor]:
    """Return tensors by the address of their memory: views of one tensor are one."""
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


def without(tensors: dict[int, Tensor], *others: dict[int, Tensor]) -> dict[int, Tensor]:
    known = set().union(*others)
    return {address: tensor for address, tensor in tensors.items() if address not in known}


def drawn(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def build(topology: Topology, place: Place, norm: str) -> Connection:
    spec = ResidualSpec(dim=DIM, norm=norm, kernels="fused" if topology.has_fused_kernels else "plain")
    connection = topology.connection(place, spec)
    randomise(connection, place.index)
    for module in connection.modules():
        if isinstance(module, Norm):
            module.kernels = "fused"
    return connection


def count(topology: Topology, norm: str) -> dict[Place, BoundaryCost]:
    """Run the boundaries of a model one by one, forward and backward.

    Each tensor that enters a boundary, leaves it, or is kept for the backward pass counts once; in the backward pass,
    the gradients of those that leave and enter, and those that were kept.
    """
    connections = {place: build(topology, place, norm) for place in PLACES}
    streams: tuple[Tensor, ...] = topology.opening(ResidualSpec(dim=DIM))(drawn(torch.empty(TOKENS, DIM), 0))
    h, streams = connections[PLACES[0]].read(streams)
    costs = {}
    for place in PLACES[1:]:
        assert place.previous is not None
        before, after = connections[place.previous], connections[place]
        entering = tuple(drawn(x, 1 + k).requires_grad_() for k, x in enumerate((*streams, h)))
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept.update(memory(tensor))  # noqa: B023 - called in this iteration alone
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            h, streams = after.read(before.write(entering[:-1], entering[-1]))
        inputs, outputs = memory(*entering), memory(h, *streams)
        incoming = tuple(drawn(x, 50 + k) for k, x in enumerate((h, *streams)))
        gradients = memory(*torch.autograd.grad((h, *streams), entering, incoming))
        costs[place] = BoundaryCost(
            forward=passes(inputs) + passes(without(outputs, inputs)) + passes(without(kept, inputs, outputs)),
            backward=passes(memory(*incoming)) + passes(kept) + passes(without(gradients, memory(*incoming))),
            saved=passes(kept),
        )
    return costs


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("name", NAMES)
def test_the_declared_cost_is_the_counted_one(name: str, norm: str) -> None:
    topology = build_topology(name)
    assert {place: topology.boundary_cost(place) for place in PLACES[1:]} == count(topology, norm)


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("topology", [pytest.param(topology, id=text) for topology, text in VARIANTS.items()])
def test_options_change_the_declared_cost_as_the_counted_one(topology: Topology) -> None:
    assert {place: topology.boundary_cost(place) for place in PLACES[1:]} == count(topology, "rmsnorm")


def test_the_mean_is_that_of_a_deep_model() -> None:
    assert build_topology("siamese").cost == BoundaryCost(6.5, 8, 2)
    assert build_topology("mixln").cost == BoundaryCost(4.25, 4, 1)
    assert build_topology("hybridnorm").cost == BoundaryCost(4, 3.5, 0.5)
