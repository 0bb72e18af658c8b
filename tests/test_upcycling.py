"""A topology that starts as a given Pre-Norm computes it, and its silent parameters can wake up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.norms import Norm, NormSpec, build_norm
from siamesenorm.topologies import ResidualSpec, available_topologies, build_topology, transformer_places

DIM, DEPTH = 16, 3
CANNOT = {
    "pre-embednorm", "post", "deepnorm", "peri", "olmo2", "rezero", "mixln", "hybridnorm", "hybridnorm-star",
    "spannorm", "residual", "residual-hybridnorm",
}  # fmt: skip
EXACT = {"pre", "ln-scaling", "layerscale", "siamese-post-pre:normalized_input=false"}
CAN = [
    *(name for name in available_topologies() if name not in CANNOT),
    "siamese-post-pre:normalized_input=false",
    "siamese-post-pre:post_norm=lazy,readout=code",
]
OPERATORS = {"rmsnorm": "rmsnorm", "layernorm": "layernorm", "seednorm": "rmsnorm"}
"""The operator of the new norms, and that of the Pre-Norm model."""


def pre_norm_model(operator: str) -> tuple[list[Norm], list[Tensor]]:
    """Return the norms, with gains of their own, and the weights of a model of 2 DEPTH sublayers tanh(N(x) W)."""
    generator = torch.Generator().manual_seed(0)
    norms = [build_norm(operator, DIM).double() for _ in range(2 * DEPTH + 1)]
    for norm in norms:
        for parameter in norm.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    weights = [0.3 * torch.randn(DIM, DIM, generator=generator, dtype=torch.float64) for _ in range(2 * DEPTH)]
    return norms, weights


def written_out(x: Tensor, norms: list[Norm], weights: list[Tensor]) -> Tensor:
    for norm, weight in zip(norms, weights, strict=False):
        x = x + torch.tanh(norm(x) @ weight)
    return norms[-1](x)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", CAN)
def test_it_starts_as_the_pre_norm_model_and_wakes_up(name: str, operator: str) -> None:
    topology, spec = build_topology(name).preserving(), ResidualSpec(dim=DIM, norm=NormSpec(operator))
    places = [place for block in transformer_places(DEPTH) for place in block]
    opening = topology.opening(spec).double()
    connections = [topology.connection(place, spec).double() for place in places]
    closing = topology.closing(places[-1], spec).double()
    norms, weights = pre_norm_model(OPERATORS[operator])
    opening.init_as_pre_norm()
    differences = [
        difference
        for part, norm in zip([*connections, closing], norms, strict=True)
        for difference in part.init_as_pre_norm(norm.function())
    ]
    assert bool(differences) == (name not in EXACT)

    x = 0.5 * torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    streams = opening(x)
    for connection, weight in zip(connections, weights, strict=True):
        streams = connection(streams, lambda h, weight=weight: torch.tanh(h @ weight))
    closed = closing(streams)
    bound = 1e-13 if name in EXACT else 1e-3
    torch.testing.assert_close(closed, written_out(x, norms, weights), atol=bound, rtol=0)

    if "siamese" in name:
        closed.square().sum().backward()
        parts = [opening, *connections, closing]
        learned = {id(p): p for part in parts for p in part.parameters()}.values()
        silent = [p for p in learned if not p.any() and p.numel() == DIM]
        # SeeDNorm's alpha waits for its beta, and both wait for gamma.
        waiting = {id(m.alpha) for part in parts for m in part.modules() if getattr(m, "beta", None) is not None}
        woken = [p for p in silent if id(p) not in waiting]
        betas = {id(m.beta) for part in parts for m in part.modules() if getattr(m, "beta", None) is not None}
        gains = [p for p in woken if id(p) not in betas]
        assert gains and all(p.grad is not None and bool(p.grad.any()) for p in gains)


@pytest.mark.parametrize("name", sorted(CANNOT))
def test_the_others_say_why_not(name: str) -> None:
    with pytest.raises(UserError) as refusal:
        build_topology(name).preserving()
    assert "\n" not in str(refusal.value)


def test_every_topology_is_in_one_of_the_lists() -> None:
    assert set(available_topologies()) == CANNOT | {name for name in CAN if ":" not in name}
