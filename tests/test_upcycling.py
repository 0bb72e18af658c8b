"""A topology that starts as a given Pre-Norm computes it, and its silent parameters can wake up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.norms import Norm, NormSpec, build_norm
from siamesenorm.topologies import ResidualSpec, available_topologies, build_topology, topology_name, transformer_places

DIM, DEPTH = 16, 3
CANNOT = {
    "pre-embednorm", "post", "deepnorm", "peri", "olmo2", "rezero", "mixln", "hybridnorm", "hybridnorm-star",
    "spannorm", "keel", "residual", "residual-hybridnorm",
}  # fmt: skip
CAN = [
    *(name for name in available_topologies() if name not in CANNOT),
    "siamese-post-pre:normalized_input=false",
    "siamese-post-pre:post_norm=lazy,readout=code",
    "siamese-post-pre:normalized_input=false,readout=code",
    "mhc-4:readout=learned",
    "mhc-4:streams=3,dynamic=false",
    "shc-2:streams=5",
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


@pytest.mark.parametrize("rms", [0.5, 0.0027])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", CAN)
def test_it_starts_as_the_pre_norm_model_and_wakes_up(name: str, operator: str, rms: float) -> None:
    """Exactly, also where the eps of 1e-5 is larger than the mean square of the embedding."""
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
    assert not differences

    x = rms * torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    streams = opening(x)
    for connection, weight in zip(connections, weights, strict=True):
        streams = connection(streams, lambda h, weight=weight: torch.tanh(h @ weight))
    closed = closing(streams)
    torch.testing.assert_close(closed, written_out(x, norms, weights), atol=1e-12, rtol=0)

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


@pytest.mark.parametrize("operator", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("name", ["siamese", "mhc-4", "shc-2"])
def test_without_exact_eps_the_difference_has_a_bound(name: str, operator: str) -> None:
    topology, spec = build_topology(name), ResidualSpec(dim=DIM, norm=operator)
    *_, (_, last) = transformer_places(DEPTH)
    closing = topology.closing(last, spec).double()
    norm = build_norm(operator, DIM).double()
    (difference,) = closing.init_as_pre_norm(norm.function())
    assert difference.kind.is_tolerated and difference.bound is not None
    for rms in (1.0, 0.01, 1e-4, 1e-8):
        x = rms * torch.randn(3, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        streams = topology.unpack(torch.stack([x, x] if name == "siamese" else topology.streams * [x], dim=-2))
        error = (closing(streams) - norm(x)).norm() / norm(x).norm()
        assert error <= difference.bound * (1 + 1e-9)
    assert error >= 0.9 * difference.bound, "it is reached by small tokens"


def test_the_state_and_the_configuration_suffice() -> None:
    """A model that starts as a Pre-Norm is the same after it was saved: no eps is in its state alone."""
    topology = build_topology("siamese").preserving()
    *_, (_, place) = transformer_places(DEPTH)
    first = topology.connection(place, ResidualSpec(dim=DIM)).double()
    first.init_as_pre_norm(build_norm("rmsnorm", DIM).double().function())
    again = build_topology(topology_name(topology)).connection(place, ResidualSpec(dim=DIM)).double()
    again.load_state_dict(first.state_dict())
    x = 0.0027 * torch.randn(3, DIM, dtype=torch.float64)
    streams = (torch.zeros_like(x), x)
    torch.testing.assert_close(again.read(streams)[0], build_norm("rmsnorm", DIM)(x), rtol=1e-12, atol=0)


def test_a_bias_is_kept_by_the_outer_norm_of_two() -> None:
    """The factor on the outer norm multiplies its bias too, which is therefore divided by it."""
    topology = build_topology("siamese").preserving()
    *_, (_, place) = transformer_places(DEPTH)
    norm = build_norm("layernorm", DIM, eps=0.1).double()
    norm.bias.data += 1.0
    norm.gain.data *= 3.0
    connection = topology.connection(place, ResidualSpec(dim=DIM, norm="layernorm:eps=0.1")).double()
    assert not connection.init_as_pre_norm(norm.function())
    x = 0.3 * torch.randn(3, DIM, dtype=torch.float64)
    torch.testing.assert_close(connection.read((torch.zeros_like(x), x))[0], norm(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "streams"), [("siamese", 2), ("ln-scaling", 1)])
def test_a_gain_stored_with_an_offset_is_kept(name: str, streams: int) -> None:
    """Gemma stores its gain as 1 + w: the sum is copied, and divided by the factor of LayerNorm-Scaling."""
    *_, (_, place) = transformer_places(DEPTH)
    norm = build_norm("rmsnorm", DIM, offset=1.0).double()
    norm.gain.data += torch.linspace(0.5, 2.0, DIM, dtype=torch.float64)
    connection = build_topology(name).preserving().connection(place, ResidualSpec(dim=DIM)).double()
    assert not connection.init_as_pre_norm(norm.function())
    x = 0.3 * torch.randn(3, DIM, dtype=torch.float64)
    h, _ = connection.read((torch.zeros_like(x), x)[-streams:])
    torch.testing.assert_close(h, norm(x), rtol=1e-12, atol=1e-12)


def test_dynamic_hyper_connections_start_with_a_small_scale() -> None:
    """0.01 in the official implementation: the first gradients of the projections are as small (arXiv 2409.19606)."""
    ((place, _),) = transformer_places(1)
    connection = build_topology("dhc-2").connection(place, ResidualSpec(dim=DIM))
    scales = {name: parameter.item() for name, parameter in connection.named_parameters() if name.startswith("scale_")}
    assert scales == {"scale_in": pytest.approx(0.01), "scale_out": pytest.approx(0.01)}


@pytest.mark.parametrize("name", sorted(CANNOT))
def test_the_others_say_why_not(name: str) -> None:
    with pytest.raises(UserError) as refusal:
        build_topology(name).preserving()
    assert "\n" not in str(refusal.value)


def test_every_topology_is_in_one_of_the_lists() -> None:
    assert set(available_topologies()) == CANNOT | {name for name in CAN if ":" not in name}
