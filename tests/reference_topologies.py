"""Slow, obvious references of every topology, and the small models that the laws compare them with.

A reference is a function of the topology's options, the embedding, the sublayers and the library's norms and parameters
by name. It writes the papers' equations in the papers' order: norms after an addition stand at the end of the sublayer
that added, streams are a list, mixing is a loop. To test a new topology, register a reference of its class:

    @reference(MyTopology, my_number=(0.5, 2.0))
    def my_topology(options, e, F, model): ...

Options that are bool or Literal are enumerated from their annotation; the values of others are given as keywords.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.norms import NormSpec, declared_parameters
from siamesenorm.topologies import (
    Closing,
    Connection,
    Opening,
    ResidualSpec,
    Streams,
    Topology,
    build_topology,
    transformer_places,
)
from siamesenorm.topologies.attention_residuals import AttentionResiduals
from siamesenorm.topologies.hyper_connections import HyperConnections
from siamesenorm.topologies.manifold_hyper_connections import ManifoldHyperConnections
from siamesenorm.topologies.post_norm_family import DeepNorm, HybridNorm, Keel, MixLN, PostNorm, ResiDual, SpanNorm
from siamesenorm.topologies.pre_norm_family import (
    Lambdas,
    LayerNormScaling,
    LayerScale,
    OutputNorm,
    PeriNorm,
    PreNorm,
    ReZero,
)
from siamesenorm.topologies.siamese import SiameseHybridPre, SiamesePostPre

DIM, TOKENS, BATCH, DEPTH = 8, 4, 2, 3

Sublayer = Callable[[Tensor], Tensor]


# --- small models ----------------------------------------------------------------------------------------------------


class Wired(nn.Module):
    """The modules of a topology at a small depth: its opening, one connection a sublayer, its closing."""

    def __init__(self, topology: Topology, spec: ResidualSpec, *, depth: int, conditioned: bool) -> None:
        super().__init__()
        self.topology = topology
        self.depth = depth
        places = list(itertools.chain(*transformer_places(depth, conditioned=conditioned)))
        self.opening: Opening = topology.opening(spec)
        self.connections = nn.ModuleList(topology.connection(place, spec) for place in places)
        self.closing: Closing = topology.closing(places[-1], spec)

    @property
    def sublayers(self) -> range:
        return range(2 * self.depth)

    def steps(self, sublayers: list[Sublayer]) -> Iterator[tuple[Connection, Sublayer]]:
        return zip(self.connections, sublayers, strict=True)

    def forward(self, embedding: Tensor, sublayers: list[Sublayer]) -> Tensor:
        streams: Streams = self.opening(embedding)
        for connection, sublayer in self.steps(sublayers):
            streams = connection(streams, sublayer)
        return self.closing(streams)


def wire(
    topology: Topology | str,
    norm: str = "rmsnorm",
    *,
    depth: int = DEPTH,
    conditioned: bool = False,
    dtype: torch.dtype | None = torch.float64,
    seed: int | None = None,
    **spec: Any,
) -> Wired:
    """Build a small model, with every declared parameter moved at random if a seed is given."""
    wiring = build_topology(topology) if isinstance(topology, str) else topology
    chosen = ResidualSpec(dim=DIM, norm=NormSpec.parse(norm), **spec)
    model = Wired(wiring, chosen, depth=depth, conditioned=conditioned)
    if seed is not None:
        randomise(model, seed)
    return model if dtype is None else model.to(dtype)


@torch.no_grad()
def randomise(model: nn.Module, seed: int, spread: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, parameter, _ in declared_parameters(model):
        parameter += spread * torch.randn(parameter.shape, generator=generator).to(parameter)


def embedding(seed: int = 0, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(shape or (BATCH, TOKENS, DIM), generator=generator, dtype=torch.float64)


class TanhNet:
    """F(h) = W_2 tanh(W_1 h), optionally mixed over tokens: a stand-in for a sublayer; it keeps what it has seen."""

    def __init__(self, seed: int, tokens: int = 0) -> None:
        generator = torch.Generator().manual_seed(2000 + seed)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator, dtype=torch.float64) / math.sqrt(columns)

        self.first, self.second = weight(2 * DIM, DIM), weight(DIM, 2 * DIM)
        self.mix = weight(tokens, tokens) if tokens else None
        self.seen: list[Tensor] = []

    def __call__(self, h: Tensor) -> Tensor:
        self.seen.append(h)
        output = torch.tanh(h @ self.first.T.to(h.dtype)) @ self.second.T.to(h.dtype)
        return output if self.mix is None else self.mix.to(h.dtype) @ output


def tanh_nets(count: int = 2 * DEPTH, tokens: int = TOKENS) -> list[TanhNet]:
    return [TanhNet(seed, tokens) for seed in range(count)]


# --- the registry of references --------------------------------------------------------------------------------------

Formula = Callable[[Any, Tensor, list[Sublayer], Any], Tensor]


@dataclasses.dataclass(frozen=True)
class Reference:
    formula: Formula
    values: dict[str, tuple[Any, ...]]


REFERENCES: dict[type[Topology], Reference] = {}


def reference(family: type[Topology], **values: tuple[Any, ...]) -> Callable[[Formula], Formula]:
    def register(formula: Formula) -> Formula:
        REFERENCES[family] = Reference(formula, values)
        return formula

    return register


def reference_of(topology: Topology) -> Reference:
    family = type(topology)
    if family not in REFERENCES:
        raise AssertionError(
            f"{family.__name__} has no reference: write its equations in tests/reference_topologies.py as "
            f"@reference({family.__name__}) def formula(options, e, F, model) -> Tensor"
        )
    return REFERENCES[family]


def choices(topology: Topology) -> dict[str, tuple[Any, ...]]:
    """Return every value of every option that is bool or Literal."""
    hints = typing.get_type_hints(type(topology))
    found: dict[str, tuple[Any, ...]] = {}
    for field in dataclasses.fields(topology):
        if hints[field.name] is bool:
            found[field.name] = (False, True)
        elif typing.get_origin(hints[field.name]) is Literal:
            found[field.name] = typing.get_args(hints[field.name])
    return found


def replaced(topology: Topology, **values: Any) -> Topology | None:
    """Return the topology with options replaced, or None where it refuses the combination."""
    try:
        return dataclasses.replace(topology, **values)
    except UserError:
        return None


def variants(name: str) -> dict[Topology, str]:
    """Return the registered topology with one option changed, for every other value of every option, and its text."""
    topology = build_topology(name)
    found: dict[Topology, str] = {}
    for option, values in {**choices(topology), **reference_of(topology).values}.items():
        for value in values:
            variant = replaced(topology, **{option: value})
            if variant not in (None, topology):
                found[variant] = f"{name}, {option}={value}"
    return found


def combinations(name: str) -> dict[Topology, str]:
    """Return the topology with its bool and Literal options combined, in pairs where they are many, and its text."""
    topology = build_topology(name)
    options = choices(topology)
    together = 2 if math.prod(map(len, options.values())) > 64 else len(options)
    found: dict[Topology, str] = {}
    for names in itertools.combinations(options, together):
        for values in itertools.product(*(options[each] for each in names)):
            chosen = dict(zip(names, values, strict=True))
            text = ",".join(f"{key}={value}" for key, value in chosen.items())
            variant = replaced(topology, **chosen)
            if variant is not None:
                found.setdefault(variant, f"{name}, {text}" if text else name)
    return found


# --- one stream ------------------------------------------------------------------------------------------------------


def norms_after(model: Any) -> list[Any]:
    """Return the norm after each sublayer's addition: the next reader's post_norm, at last the closing's."""
    return [connection.post_norm for connection in model.connections][1:] + [model.closing.post_norm]


def depth_scale(reading: str, k: int) -> float:
    block = k // 2
    if reading == "code":
        return 1 / math.sqrt(2 * (block + 1))
    if reading == "paper_block":
        return 1 / math.sqrt(block + 1)
    if reading == "paper_sublayer":
        return 1 / math.sqrt(k + 1)
    assert reading == "none"
    return 1.0


@reference(PreNorm)
def pre(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    x = e * torch.rsqrt((e * e).mean(-1, keepdim=True) + 1e-5) if options.embedding_norm else e
    for k in model.sublayers:
        x = x + F[k](model.connections[k].norm(x))
    return model.closing.norm(x)


@reference(LayerNormScaling)
def layer_norm_scaling(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    x = e * torch.rsqrt((e * e).mean(-1, keepdim=True) + 1e-5) if options.embedding_norm else e
    for k in model.sublayers:
        norm = model.connections[k].norm
        x = x + F[k](norm(x) / math.sqrt(k // 2 + 1))
    return model.closing.norm(x)


@reference(PostNorm)
def post(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    N = norms_after(model)
    x = e
    for k in model.sublayers:
        x = N[k](x + F[k](x))
    return model.closing.norm(x) if options.final_norm else x


@reference(DeepNorm)
def deepnorm(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    N = norms_after(model)
    alpha = (2 * model.depth) ** (1 / 4)
    x = e
    for k in model.sublayers:
        x = N[k](alpha * x + F[k](x))
    return model.closing.norm(x) if options.final_norm else x


@reference(Keel)
def keel(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    N, K = norms_after(model), 2 * model.depth
    x = e
    for k in model.sublayers:
        x = N[k](K * x + F[k](model.connections[k].norm(x)))
    return x


@reference(Lambdas)
def lambdas(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    x = e
    for k in model.sublayers:
        c = model.connections[k]
        if k % 2 == 0:
            x = c.residual_scale * x + c.embedding_scale * e
        x = x + F[k](c.norm(x))
    return model.closing.norm(x)


@reference(PeriNorm)
def peri(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    x = model.opening.norm(e) if options.embedding_norm else e
    for k in model.sublayers:
        x = x + model.connections[k].output(F[k](model.connections[k].norm(x)))
    return model.closing.norm(x)


@reference(OutputNorm)
def olmo2(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    x = e
    for k in model.sublayers:
        x = x + model.connections[k].output(F[k](x))
    return model.closing.norm(x)


@reference(MixLN, post_fraction=(0.0, 0.34, 0.67, 1.0), post_blocks=("auto", 0, 1, 2, 3))
def mixln(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    post_blocks = options.post_blocks
    if post_blocks == "auto":
        post_blocks = math.floor(options.post_fraction * model.depth)
    N = norms_after(model)
    x = e
    for block in range(model.depth):
        for k in (2 * block, 2 * block + 1):
            x = N[k](x + F[k](x)) if block < post_blocks else x + F[k](model.connections[k].norm(x))
    return model.closing.norm(x)


@reference(LayerScale, initial=("auto", 0.0, 0.5, 1.0))
def layerscale(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    x = e
    for k in model.sublayers:
        x = x + model.connections[k].output.gain * F[k](model.connections[k].norm(x))
    return model.closing.norm(x)


@reference(ReZero)
def rezero(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    x = e
    for k in model.sublayers:
        x = x + model.connections[k].output.gain * F[k](x)
    return x


@reference(HybridNorm)
def hybridnorm(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    x = e
    for block in range(model.depth):
        a, m = 2 * block, 2 * block + 1
        s_a, s_m = depth_scale(options.depth_scale, a), depth_scale(options.depth_scale, m)
        if options.first_block == "pre" and block == 0:
            x = x + s_a * F[a](model.connections[a].norm(x))
            x = x + s_m * F[m](model.connections[m].norm(x))
        else:
            x = model.connections[m].post_norm(x + s_a * F[a](x))
            x = x + s_m * F[m](x)
    return model.closing.norm(x)


@reference(SpanNorm)
def spannorm(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    N = norms_after(model)
    x = e
    for block in range(model.depth):
        a, m = 2 * block, 2 * block + 1
        if options.reading == "A":
            h = model.connections[0].norm(x) if options.initial_norm and block == 0 else x
            z = model.connections[m].post_norm(x + F[a](h))
            x = N[m](x + F[m](z))
        else:
            h = x + F[a](model.connections[a].norm(x))
            x = N[m](h + F[m](model.connections[m].norm(h)))
    return x


# --- two streams -----------------------------------------------------------------------------------------------------


@reference(ResiDual, bounded_scale=(0.5, 2.0), dual_scale=(0.05, 3.0), dual_eps=("auto", 0.0, 0.3))
def residual(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    a, c = options.bounded_scale, options.dual_scale
    N = norms_after(model)
    X, D = e, c * e
    for k in model.sublayers:
        out = F[k](X)
        D = D + c * out
        X = X + out
        if options.body == "post":
            X = N[k](X)
        elif k % 2 == 0:
            X = model.connections[k + 1].post_norm(X)
    if options.body == "hybridnorm":
        X = model.closing.post_norm(X)
    return a * X + model.closing.dual_norm(D)


@reference(SiamesePostPre)
def siamese_post_pre(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    X, Y = (model.opening.gate.gain * e if options.gated_opening else e), e
    N_X = norms_after(model)
    if options.post_norm == "lazy":
        X = model.connections[0].post_norm(X)
    for k in model.sublayers:
        connection = model.connections[k]
        h = X + connection.identity_norm(Y)
        out = F[k](outer(options, connection.input_norm, h) if options.normalized_input else h)
        X = N_X[k](X + depth_scale(options.depth_scale, k) * out)
        Y = Y + out
    fused = X + model.closing.identity_norm(Y)
    return outer(options, model.closing.output_norm, fused) if options.readout == "code" else fused


def outer(options: Any, norm: Any, x: Tensor) -> Tensor:
    """The outer norm of two: with exact eps, it is multiplied by sqrt(1 + e)."""
    return norm(x) * math.sqrt(1 + norm.eps) if options.exact_eps and hasattr(norm, "eps") else norm(x)


@reference(SiameseHybridPre)
def siamese_hybrid_pre(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    X = Y = e
    for block in range(model.depth):
        a, m = 2 * block, 2 * block + 1
        attention, mlp = model.connections[a], model.connections[m]
        out = F[a](attention.gate.gain * X + attention.identity_norm(Y))
        X, Y = X + depth_scale(options.depth_scale, a) * out, Y + out
        X = mlp.post_norm(X)
        h = X + mlp.identity_norm(Y)
        out = F[m](outer(options, mlp.input_norm, h) if options.normalized_input else h)
        X, Y = X + depth_scale(options.depth_scale, m) * out, Y + out
    fused = model.closing.post_norm(X) + model.closing.identity_norm(Y)
    return outer(options, model.closing.output_norm, fused)


# --- n streams -------------------------------------------------------------------------------------------------------


@reference(HyperConnections, streams=(1, 3), stream_eps=(0.0, 0.3))
def hyper_connections(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    n = options.streams
    squash = torch.tanh if options.tanh else lambda x: x
    H = [e] * n
    for k in model.sublayers:
        c = model.connections[k]
        A_m = [c.mix_in[i] for i in range(n)]
        A_r = [[c.mix_residual[i, j] for j in range(n)] for i in range(n)]
        B = [c.mix_out[i] for i in range(n)]
        if options.dynamic:
            for i in range(n):
                normed = c.stream_norm(H[i])
                A_m[i] = A_m[i] + c.scale_in * squash((normed * c.project_in).sum(-1, keepdim=True))
                for j in range(n):
                    W_rj = c.project_residual[:, j]
                    A_r[i][j] = A_r[i][j] + c.scale_in * squash((normed * W_rj).sum(-1, keepdim=True))
                B[i] = B[i] + c.scale_out * squash((normed * c.project_out).sum(-1, keepdim=True))
        h = sum(A_m[i] * H[i] for i in range(n))
        mixed = [sum(A_r[i][j] * H[i] for i in range(n)) for j in range(n)]
        out = F[k](c.norm(h))
        H = [mixed[i] + B[i] * out for i in range(n)]
    return model.closing.norm(sum(H))


def sinkhorn_by_loops(logits: Tensor, options: Any) -> Tensor:
    """Return the doubly stochastic matrix (from, to) of one token's logits [n, n]; columns are those of (to, from)."""
    n = logits.shape[0]
    eps = options.eps if options.start == "softmax" else 0.0
    first = "columns" if options.order == "columns-first" else "rows"
    sides = [first, "rows" if first == "columns" else "columns"] * options.iterations
    M = [[math.exp(logits[i, j] / options.temperature) for j in range(n)] for i in range(n)]
    for step, side in enumerate(sides):
        for line in range(n):
            cells = [(line, j) if side == "columns" else (i, line) for i, j in zip(range(n), range(n), strict=True)]
            total = sum(M[i][j] for i, j in cells)
            for i, j in cells:
                M[i][j] = M[i][j] / total + eps if step == 0 else M[i][j] / (total + eps)
    return torch.tensor(M, dtype=torch.float64)


@reference(
    ManifoldHyperConnections, streams=(1, 2), iterations=(1, 3), gate=(0.5,), eps=(0.0, 0.02), temperature=(0.5,)
)
def manifold_hyper_connections(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    n = options.streams

    def rms(u: Tensor) -> Tensor:
        return u / torch.sqrt((u * u).mean() + options.eps)

    def logits(module: Any, name: str, H: Tensor) -> Tensor:
        """H [n, d] of one token."""
        static = getattr(module, f"mix_{name}")
        if not options.dynamic:
            return static
        W, a = getattr(module, f"project_{name}"), getattr(module, f"scale_{name}")
        if options.projection == "joint":
            return static + a * (rms(H.reshape(-1)) @ W).reshape(static.shape)
        return static + a * torch.stack([rms(H[i]) @ W for i in range(n)]).reshape(static.shape)

    def gates(module: Any, name: str, H: Tensor) -> Tensor:
        found = logits(module, name, H)
        if options.gates == "softmax":
            return torch.exp(found) / torch.exp(found).sum()
        return torch.sigmoid(found) + options.eps if name == "in" else 2 * torch.sigmoid(found)

    def mixing(module: Any, H: Tensor) -> Tensor:
        if options.mixing == "identity":
            return torch.eye(n, dtype=torch.float64)
        if options.mixing == "sinkhorn":
            return sinkhorn_by_loops(logits(module, "residual", H), options)
        weights = torch.exp(logits(module, "residual", H))
        R = torch.zeros(n, n, dtype=torch.float64)
        for weight, order in zip(weights / weights.sum(), itertools.permutations(range(n)), strict=True):
            for i in range(n):
                R[i, order[i]] += weight
        return R

    H = e.unsqueeze(-2).repeat(1, 1, n, 1)
    carried = torch.zeros_like(H[..., 0])
    carried[..., 0] = 1
    for k in model.sublayers:
        c = model.connections[k]
        h, mixed, post = torch.zeros_like(e), torch.zeros_like(H), torch.zeros_like(carried)
        pre = torch.zeros_like(carried)
        for b, t in itertools.product(range(e.shape[0]), range(e.shape[1])):
            pre[b, t] = gates(c.logits, "in", H[b, t])
            post[b, t] = gates(c.logits, "out", H[b, t])
            R = mixing(c.logits, H[b, t])
            for i in range(n):
                h[b, t] += (carried if options.single_pass else pre)[b, t, i] * H[b, t, i]
                for j in range(n):
                    mixed[b, t, i] += R[j, i] * H[b, t, j]
        out = F[k](c.norm(h))
        H = mixed + post.unsqueeze(-1) * out.unsqueeze(-2)
        carried = pre
    if options.readout == "sum" and not options.single_pass:
        return model.closing.norm(H.sum(-2))
    collapsed = torch.zeros_like(e)
    for b, t in itertools.product(range(e.shape[0]), range(e.shape[1])):
        weights = carried[b, t]
        if options.readout == "learned":
            weights = torch.sigmoid(logits(model.closing.logits, "in", H[b, t])) + options.eps
        for i in range(n):
            collapsed[b, t] += weights[i] * H[b, t, i]
    return model.closing.norm(collapsed)


# --- a growing number of streams -------------------------------------------------------------------------------------


@reference(AttentionResiduals, block_size=(1, 2), eps=(0.0, 0.3))
def attention_residuals(options: Any, e: Tensor, F: list[Sublayer], model: Any) -> Tensor:
    """The published pseudocode: a bank of finished sources, and a prefix that restarts at every B-th block."""
    L = model.depth
    B = math.ceil(L / 8) if options.block_size == "auto" else options.block_size

    def read(mix: Any, V: list[Tensor]) -> Tensor:
        if len(V) == 1:
            return V[0]
        keys = [v / torch.sqrt((v * v).mean(-1, keepdim=True) + options.eps) * mix.gain for v in V]
        scores = torch.cat([(k * mix.query).sum(-1, keepdim=True) for k in keys], dim=-1)
        w = torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)
        return sum(w[..., i : i + 1] * V[i] for i in range(len(V))) * (len(V) if options.rescale else 1)

    bank, prefix = [], e
    for block in range(L):
        for k in (2 * block, 2 * block + 1):
            c = model.connections[k]
            out = F[k](c.norm(read(c.mix, [*bank, prefix])))
            if options.sources == "outputs" or (k == 2 * block and block % B == 0):
                bank, prefix = [*bank, prefix], out
            else:
                prefix = prefix + out
    return model.closing.norm(read(model.closing.mix, [*bank, prefix]))
