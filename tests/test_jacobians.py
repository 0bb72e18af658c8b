"""The Jacobian identities of every topology's transition, block by block, against torch.func.jacrev in fp64.

J_F is the Jacobian of the sublayer at what it sees, J_X of the norm on the bounded stream at X + s O, J_Y of the
identity stream's norm at Y. Each identity is checked for one token, and for three that the sublayer mixes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from reference_topologies import DIM, TanhNet, Wired, embedding, norms_after, wire
from siamesenorm.topologies import Streams, build_topology

Map = Callable[..., Tensor]
TOLERANCE = 1e-12

over_shapes = pytest.mark.parametrize("shape", [(DIM,), (3, DIM)], ids=["token", "tokens"])


def jacobian(function: Map, *inputs: Tensor) -> Tensor:
    """Return d function(inputs) / d inputs as one matrix, all outputs and inputs flattened in order."""
    sizes, shapes = [x.numel() for x in inputs], [x.shape for x in inputs]

    def flattened(flat: Tensor) -> Tensor:
        output = function(*(part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)))
        return torch.cat([x.flatten() for x in (output if isinstance(output, tuple) else (output,))])

    return torch.func.jacrev(flattened)(torch.cat([x.flatten() for x in inputs])).detach()


def blocks(rows: list[list[Tensor]]) -> Tensor:
    return torch.cat([torch.cat(row, dim=1) for row in rows])


def transition(model: Wired, k: int, sublayer: Map, post_norm: Map | None = None) -> Callable[..., Streams]:
    """Return the map of the streams before sublayer k to those after it, the first one normalised if asked for."""

    def step(*streams: Tensor) -> Streams:
        first, *others = model.connections[k](streams, sublayer)
        return (first if post_norm is None else post_norm(first), *others)

    return step


def assert_identity(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def net(shape: tuple[int, ...], seed: int = 0) -> TanhNet:
    return TanhNet(seed, tokens=shape[0] if len(shape) > 1 else 0)


def eye(x: Tensor) -> Tensor:
    return torch.eye(x.numel(), dtype=x.dtype)


def diagonal(gain: Tensor, x: Tensor) -> Tensor:
    return torch.diag((gain * torch.ones_like(x)).flatten()).detach()


# --- one stream ------------------------------------------------------------------------------------------------------


@over_shapes
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "seednorm"])
@pytest.mark.parametrize("name", ["pre", "ln-scaling", "peri", "layerscale"])
def test_normalised_inputs(name: str, norm: str, shape: tuple[int, ...]) -> None:
    """I + J_out J_F J_N, with J_out of what stands on the output."""
    model, F, x = wire(name, norm, seed=1), net(shape), embedding(1, *shape)
    connection = model.connections[2]
    r = connection.constant_value("input_scale")
    h = r * connection.norm(x)
    J_N, J_F, J_out = r * jacobian(connection.norm, x), jacobian(F, h), jacobian(connection.output, F(h))
    assert_identity(jacobian(transition(model, 2, F), x), eye(x) + J_out @ J_F @ J_N)


@over_shapes
@pytest.mark.parametrize("name", ["olmo2", "rezero", "hybridnorm"])
def test_raw_inputs(name: str, shape: tuple[int, ...]) -> None:
    """I + J_out J_F (HybridNorm's MLP too, after its post_norm)."""
    model, F, x = wire(name, seed=2), net(shape), embedding(2, *shape)
    connection = model.connections[0]
    J_F, J_out = jacobian(F, x), jacobian(connection.output, F(x))
    assert_identity(jacobian(transition(model, 0, F), x), eye(x) + J_out @ J_F)


@over_shapes
@pytest.mark.parametrize(("name", "alpha"), [("post", 1.0), ("deepnorm", 6**0.25), ("hybridnorm", 1.0)])
def test_normalised_additions(name: str, alpha: float, shape: tuple[int, ...]) -> None:
    """J_N (alpha I + J_F)."""
    model, F, x = wire(name, seed=3), net(shape), embedding(3, *shape)
    post_norm = model.connections[1].post_norm
    J_N = jacobian(post_norm, alpha * x + F(x))
    found = jacobian(transition(model, 0, F, post_norm), x)
    assert_identity(found, J_N @ (alpha * eye(x) + jacobian(F, x)))


@over_shapes
def test_span_norm(shape: tuple[int, ...]) -> None:
    """Reading A: J_N2 (I + J_MLP J_N1 (I + J_Attention)). Reading B: J_N2 (I + J_MLP J_N1')(I + J_Attention J_N1)."""
    attention, mlp, x = net(shape, 0), net(shape, 1), embedding(4, *shape)
    for reading in ("A", "B"):
        model = wire(build_topology("spannorm", reading=reading, initial_norm=False), seed=4)
        first, second, N2 = model.connections[0], model.connections[1], model.connections[2].post_norm

        def block(x: Tensor, first: nn.Module = first, second: nn.Module = second, N2: Map = N2) -> Tensor:
            (x,) = second(first((x,), attention), mlp)
            return N2(x)

        I = eye(x)  # noqa: E741
        if reading == "A":
            total = x + attention(x)
            z = second.post_norm(total)
            J_inner = jacobian(mlp, z) @ jacobian(second.post_norm, total) @ (I + jacobian(attention, x))
            expected = jacobian(N2, x + mlp(z)) @ (I + J_inner)
        else:
            middle = x + attention(first.norm(x))
            J_first = I + jacobian(attention, first.norm(x)) @ jacobian(first.norm, x)
            J_second = I + jacobian(mlp, second.norm(middle)) @ jacobian(second.norm, middle)
            expected = jacobian(N2, middle + mlp(second.norm(middle))) @ J_second @ J_first
        assert_identity(jacobian(block, x), expected)


@pytest.mark.parametrize("norm", ["rmsnorm:eps=0.0", "layernorm:eps=0.0", "scalenorm"])
def test_a_scale_invariant_norm_is_blind_along_its_input(norm: str) -> None:
    """J_N(x) x = 0 at eps 0 (and J_N(x) x = -x . grad eps elsewhere)."""
    model, x = wire("pre", norm, seed=5), embedding(5, DIM)
    J_N = jacobian(model.closing.norm, x)
    assert J_N.abs().max() > 0.05
    torch.testing.assert_close(J_N @ x, torch.zeros_like(x), rtol=0, atol=TOLERANCE)


# --- two streams -----------------------------------------------------------------------------------------------------


@over_shapes
@pytest.mark.parametrize("dual_scale", [1.0, 0.05])
def test_residual(dual_scale: float, shape: tuple[int, ...]) -> None:
    """[[J_X (I + J_F), 0], [c J_F, I]]: the dual stream never informs a sublayer."""
    model, F = wire(build_topology("residual", dual_scale=dual_scale), seed=6), net(shape)
    X, D = embedding(6, *shape), embedding(7, *shape)
    post_norm = model.connections[1].post_norm
    J_F, J_X = jacobian(F, X), jacobian(post_norm, X + F(X))
    expected = blocks([[J_X @ (eye(X) + J_F), 0 * eye(X)], [dual_scale * J_F, eye(X)]])
    assert_identity(jacobian(transition(model, 0, F, post_norm), X, D), expected)


def post_pre_matrix(connection: nn.Module, N_X: Map, F: Map, X: Tensor, Y: Tensor) -> Tensor:
    """[[J_X (I + s J_in), s J_X J_in J_Y], [J_in, I + J_in J_Y]], J_in = J_F J_{N^in}: equation 8 with s."""
    s, total = float(connection.addition.scale), X + connection.identity_norm(Y)
    h = connection.input_norm(total)
    J_in = jacobian(F, h) @ jacobian(connection.input_norm, total)
    J_Y, J_X = jacobian(connection.identity_norm, Y), jacobian(N_X, X + s * F(h))
    return blocks(
        [[J_X @ (eye(X) + s * J_in), s * J_X @ J_in @ J_Y], [J_in, eye(X) + J_in @ J_Y]],
    )


POST_PRE = [{"normalized_input": i, "depth_scale": s} for i in (True, False) for s in ("code", "paper_block", "none")]


@over_shapes
@pytest.mark.parametrize("options", POST_PRE, ids=str)
def test_siamese_post_pre(options: dict[str, object], shape: tuple[int, ...]) -> None:
    model, F = wire(build_topology("siamese-post-pre", **options), seed=8), net(shape)
    X, Y = embedding(8, *shape), embedding(9, *shape)
    post_norm = model.connections[1].post_norm
    expected = post_pre_matrix(model.connections[0], post_norm, F, X, Y)
    assert_identity(jacobian(transition(model, 0, F, post_norm), X, Y), expected)


def lazy_matrix(connection: nn.Module, F: Map, X: Tensor, Y: Tensor) -> Tensor:
    """[[(I + s J_in) J_X', s J_in J_Y], [J_in J_X', I + J_in J_Y]], J_X' the Jacobian of N^X at X."""
    s, normalised = float(connection.addition.scale), connection.post_norm(X)
    total = normalised + connection.identity_norm(Y)
    J_in = jacobian(F, connection.input_norm(total)) @ jacobian(connection.input_norm, total)
    J_X, J_Y = jacobian(connection.post_norm, X), jacobian(connection.identity_norm, Y)
    return blocks([[(eye(X) + s * J_in) @ J_X, s * J_in @ J_Y], [J_in @ J_X, eye(X) + J_in @ J_Y]])


@over_shapes
@pytest.mark.parametrize("text", ["siamese-post-pre:post_norm=lazy", "siamese", "siamese:normalized_input=false"])
def test_lazily_normalised_siamese(text: str, shape: tuple[int, ...]) -> None:
    """Lazy Post-Pre at every sublayer, and the MLP of Hybrid-Pre."""
    model, F = wire(build_topology(text), seed=10), net(shape)
    X, Y = embedding(10, *shape), embedding(11, *shape)
    assert_identity(jacobian(transition(model, 3, F), X, Y), lazy_matrix(model.connections[3], F, X, Y))


@over_shapes
def test_siamese_hybrid_pre_attention(shape: tuple[int, ...]) -> None:
    """[[I + s J_F Gamma, s J_F J_Y], [J_F Gamma, I + J_F J_Y]], Gamma = diag(gamma)."""
    model, F = wire("siamese", seed=12), net(shape)
    X, Y = embedding(12, *shape), embedding(13, *shape)
    connection = model.connections[2]
    s, gamma = float(connection.addition.scale), connection.gate.gain
    J_F = jacobian(F, gamma * X + connection.identity_norm(Y))
    J_Y, G = jacobian(connection.identity_norm, Y), diagonal(gamma, X)
    expected = blocks([[eye(X) + s * J_F @ G, s * J_F @ J_Y], [J_F @ G, eye(X) + J_F @ J_Y]])
    assert_identity(jacobian(transition(model, 2, F), X, Y), expected)


@over_shapes
@pytest.mark.parametrize("name", ["siamese-post-pre", "siamese", "residual"])
def test_outputs_reach_both_streams(name: str, shape: tuple[int, ...]) -> None:
    """d S_{k+1} / d O_k = [s J_X; I]."""
    model, output = wire(name, seed=14), embedding(16, *shape)
    X, Y = embedding(14, *shape), embedding(15, *shape)
    connection, post_norm = model.connections[0], model.connections[1].post_norm
    s = connection.addition.constant_value("scale")

    def written(output: Tensor) -> Streams:
        bounded, other = connection.write((X, Y), output)
        return post_norm(bounded), other

    expected = torch.cat([s * jacobian(post_norm, X + s * output), eye(X)])
    assert_identity(jacobian(written, output), expected)


def test_the_whole_stack_is_the_product_of_its_transitions() -> None:
    """Post-Pre, all sublayers: the library's stack = the product of the matrices of equation 8."""
    model = wire("siamese-post-pre", seed=17)
    nets = [TanhNet(k) for k in model.sublayers]
    N_X = norms_after(model)
    X, Y = embedding(17, DIM), embedding(18, DIM)

    def stack(X: Tensor, Y: Tensor) -> Streams:
        streams: Streams = (X, Y)
        for connection, F in model.steps(nets):
            streams = connection(streams, F)
        return N_X[-1](streams[0]), streams[1]

    found, product = jacobian(stack, X, Y), torch.eye(2 * DIM, dtype=torch.float64)
    with torch.no_grad():
        for connection, F, norm in zip(model.connections, nets, N_X, strict=True):
            product = post_pre_matrix(connection, norm, F, X, Y) @ product
            output = F(connection.input_norm(X + connection.identity_norm(Y)))
            X, Y = norm(X + connection.addition.scale * output), Y + output
    assert_identity(found, product)


# --- n streams -------------------------------------------------------------------------------------------------------


def mixing_matrix(connection: nn.Module, F: Map, H: Tensor) -> Tensor:
    """A_r^T (x) I + B (x) (J_F J_N) A_m^T for weights that do not depend on H [n, dim]."""
    mix_in, mix_residual, mix_out = (weights.detach().contiguous() for weights in connection.mixing_weights(H))
    h = mix_in @ H
    J = jacobian(F, connection.norm(h)) @ jacobian(connection.norm, h)
    return torch.kron(mix_residual.T.contiguous(), torch.eye(DIM).double()) + torch.kron(
        torch.outer(mix_out, mix_in), J
    )


@pytest.mark.parametrize(
    ("text", "seed"),
    [("shc-2", 19), ("shc-2:streams=3", 19), ("mhc-4:dynamic=false", 19), ("dhc-2", None), ("mhc-4", None)],
)
def test_hyper_connections(text: str, seed: int | None) -> None:
    """Static ones at any parameters; dynamic ones at the start, where W = 0 leaves no further term."""
    topology = build_topology(text)
    model, F = wire(topology, seed=seed), TanhNet(0)
    H = embedding(19, topology.streams, DIM)
    expected = mixing_matrix(model.connections[1], F, H)
    assert_identity(jacobian(transition(model, 1, F), H), expected)


@pytest.mark.parametrize("text", ["dhc-2", "mhc-4"])
def test_dynamic_weights_add_terms_once_trained(text: str) -> None:
    topology = build_topology(text)
    model, F = wire(topology, seed=20), TanhNet(0)
    H = embedding(20, topology.streams, DIM)
    gap = jacobian(transition(model, 1, F), H) - mixing_matrix(model.connections[1], F, H)
    assert gap.abs().max() > 1e-3


def test_stream_mixing_of_mhc_does_not_expand() -> None:
    """A doubly stochastic matrix has spectral norm 1: the identity part of mHC's transition cannot explode."""
    model = wire(build_topology("mhc-4", iterations=500, eps=0.0), seed=21)
    H = embedding(21, 4, DIM)
    _, mix_residual, _ = model.connections[1].mixing_weights(H)
    assert float(torch.linalg.matrix_norm(mix_residual, ord=2).detach()) == pytest.approx(1.0, abs=1e-5)
