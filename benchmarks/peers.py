"""Our residual paths beside those of public packages, as whole forward and backward passes of a stack.

    python benchmarks/peers.py [--device cuda] [--rounds 9]    # writes performance/peers.json

The hyper-connections package gets our attention and MLP, so that only the residual path differs. x-transformers and
Hugging Face's OLMo 2 have their own: width, depth, heads and MLP are the same, and `same_sublayers` is false.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from siamesenorm.benchmark.measurement import (
    allow_many_graphs,
    kept_for_backward,
    measure,
    milliseconds,
    ratio,
    resolve_device,
)
from siamesenorm.benchmark.results import Results, Row
from siamesenorm.models.block import Block, build_residual_path
from siamesenorm.models.initialisation import initialise
from siamesenorm.norms import build_norm
from siamesenorm.sublayers.attention import Attention, AttentionShape, rotation
from siamesenorm.sublayers.mlp import build_mlp
from siamesenorm.sublayers.sublayer import Context, Rotation
from siamesenorm.topologies import ResidualSpec, build_topology, transformer_places
from siamesenorm.training.execution import compile_blocks


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """The stack: width, depth, heads and MLP of every candidate; the batch; rounds."""

    dim: int = 512
    depth: int = 4
    heads: int = 8
    hidden: int = 1408
    batch: int = 2
    context: int = 512
    rounds: int = 9


class Stack(nn.Module):
    """Our blocks without embedding and head: [batch, tokens, dim] in and out."""

    def __init__(self, topology: str, settings: PeerSettings) -> None:
        super().__init__()
        resolved, spec = build_topology(topology), ResidualSpec(dim=settings.dim)
        path = build_residual_path(resolved, spec, transformer_places(settings.depth))
        qkv = resolved.attention_norm == "qkv-head"
        self.opening, self.closing = path.opening, path.closing
        self.blocks = nn.ModuleList(
            Block(dict(zip(("attention", "mlp"), sublayers(settings, qkv=qkv), strict=True)), connections)
            for connections in path.connections
        )
        initialise(self, self.blocks, scheme="mitchell", topology=resolved, dim=settings.dim, seed=0)

    def forward(self, x: Tensor, rotary: Rotation) -> Tensor:
        """Return what the head would see."""
        streams = self.opening(x)
        for block in self.blocks:
            streams, _ = block(streams, Context(rotary))
        closed: Tensor = self.closing(streams)
        return closed


def sublayers(settings: PeerSettings, *, qkv: bool = False) -> tuple[Attention, nn.Module]:
    """Return our attention and our SwiGLU."""
    shape = AttentionShape(
        dim=settings.dim, heads=settings.heads, kv_heads=settings.heads, attention_norm="qkv-head" if qkv else "qk"
    )
    return Attention(shape), build_mlp("swiglu", settings.dim, settings.hidden)


class Normed(nn.Module):
    """A sublayer behind its input norm: what the hyper-connections package calls a branch."""

    def __init__(self, sublayer: nn.Module, dim: int) -> None:
        super().__init__()
        self.norm, self.sublayer = build_norm("rmsnorm", dim), sublayer

    def forward(self, x: Tensor, *rest: object) -> Tensor:
        """Return F(N(x))."""
        output: Tensor = self.sublayer(self.norm(x), *rest)
        return output


class HyperConnectionsStack(nn.Module):
    """The public package's connections around our sublayers."""

    def __init__(self, streams: int, settings: PeerSettings, *, manifold: bool) -> None:
        super().__init__()
        import hyper_connections

        make = (
            hyper_connections.mc_get_init_and_expand_reduce_stream_functions
            if manifold
            else hyper_connections.get_init_and_expand_reduce_stream_functions
        )
        connect, self.expand, self.reduce = make(streams, dim=settings.dim)
        self.blocks = nn.ModuleList(
            connect(dim=settings.dim, branch=Normed(sublayer, settings.dim))
            for _ in range(settings.depth)
            for sublayer in sublayers(settings)
        )
        self.norm = build_norm("rmsnorm", settings.dim)
        for projection in self.modules():
            if isinstance(projection, nn.Linear):
                nn.init.normal_(projection.weight, std=settings.dim**-0.5)

    def forward(self, x: Tensor, rotary: Rotation) -> Tensor:
        """Return what the head would see."""
        x = self.expand(x)
        for number, block in enumerate(self.blocks):
            x = block(x, rotary) if number % 2 == 0 else block(x)
        closed: Tensor = self.norm(self.reduce(x))
        return closed


class XTransformersStack(nn.Module):
    """x-transformers' decoder with rotary positions, RMSNorm, QK-norm off, SwiGLU."""

    def __init__(self, settings: PeerSettings) -> None:
        super().__init__()
        from x_transformers import Decoder

        self.decoder = Decoder(
            dim=settings.dim, depth=settings.depth, heads=settings.heads, attn_dim_head=settings.dim // settings.heads,
            use_rmsnorm=True, rotary_pos_emb=True, ff_swish=True, ff_glu=True, ff_no_bias=True, attn_flash=True,
            ff_mult=settings.hidden / settings.dim,
        )  # fmt: skip

    def forward(self, x: Tensor, rotary: Rotation) -> Tensor:
        """Return what the head would see; its positions are its own."""
        output: Tensor = self.decoder(x)
        return output


class Olmo2Stack(nn.Module):
    """Hugging Face's OLMo 2 without embedding and head."""

    def __init__(self, settings: PeerSettings) -> None:
        super().__init__()
        from transformers import Olmo2Config, Olmo2Model

        self.model = Olmo2Model(
            Olmo2Config(
                hidden_size=settings.dim, intermediate_size=settings.hidden, num_hidden_layers=settings.depth,
                num_attention_heads=settings.heads, vocab_size=8, use_cache=False, max_position_embeddings=8192,
                pad_token_id=None, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip

    def forward(self, x: Tensor, rotary: Rotation) -> Tensor:
        """Return what the head would see; its positions are its own."""
        output: Tensor = self.model(inputs_embeds=x).last_hidden_state
        return output


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A public implementation: its package, how to build its stack, and the topology of ours beside it."""

    package: str
    build: Callable[[PeerSettings], nn.Module]
    ours: str
    same_sublayers: bool = False


PEERS = {
    "hyper-connections, n = 2": Peer(
        package="hyper-connections", ours="dhc-2", same_sublayers=True,
        build=lambda settings: HyperConnectionsStack(2, settings, manifold=False),
    ),
    "hyper-connections, mHC n = 4": Peer(
        package="hyper-connections", ours="mhc-4", same_sublayers=True,
        build=lambda settings: HyperConnectionsStack(4, settings, manifold=True),
    ),
    "x-transformers, pre": Peer(package="x-transformers", ours="pre", build=XTransformersStack),
    "transformers, OLMo 2": Peer(package="transformers", ours="olmo2", build=Olmo2Stack),
}  # fmt: skip
ALWAYS = ("pre", "siamese", "siamese-post-pre")
"""Topologies of ours that have a row without a peer."""


def measure_peers(settings: PeerSettings, device_name: str = "auto") -> Results:
    """Measure every peer that is installed beside ours, in eager mode and compiled, all in one interleaved run."""
    device = resolve_device(device_name)
    stacks: dict[str, nn.Module] = {}
    missing, versions = [], {}
    for name in dict.fromkeys((*ALWAYS, *(peer.ours for peer in PEERS.values()))):
        stacks[f"ours, {name}"] = Stack(name, settings)
    for name, peer in PEERS.items():
        try:
            versions[peer.package] = importlib.metadata.version(peer.package)
            stacks[name] = peer.build(settings)
        except ImportError as reason:  # the package, or one that it needs, is not installed
            missing.append(f"{name}: {reason}")
    for stack in stacks.values():
        stack.to(device)
    rows = [row for compiled in (False, True) for row in compare(stacks, settings, device, compiled, missing)]
    return Results(
        benchmark="peers", device=str(device), settings={**vars(settings), "versions": versions}, rows=rows,
        not_measured=missing,
    )  # fmt: skip


def compare(
    stacks: dict[str, nn.Module], settings: PeerSettings, device: torch.device, compiled: bool, missing: list[str]
) -> list[Row]:
    """Return a row for each stack: time of forward and backward, ratio to its counterpart of ours, kept bytes."""
    x = torch.randn(settings.batch, settings.context, settings.dim, device=device)
    rotary = rotation(torch.arange(settings.context, device=device), settings.dim // settings.heads, 1e4, x.dtype)
    actions: dict[str, Callable[[], object]] = {}
    kept: dict[str, int] = {}
    with allow_many_graphs():
        for name, stack in stacks.items():
            if compiled:
                compile_stack(stack)
            run = passes(stack, x, rotary)
            try:
                kept[name] = kept_bytes(stack, x, rotary)
                run()
            except torch._dynamo.exc.TorchDynamoException as reason:
                missing.append(f"{name}, compiled: {str(reason).partition(chr(10))[0]}")
                continue
            actions[name] = run
        timings = measure(actions, device=device, rounds=settings.rounds, warmup=1)
    rows = []
    for name in actions:
        peer = PEERS.get(name)
        row: Row = {
            "stack": name,
            "compiled": compiled,
            "ms": milliseconds(timings, name),
            "to_pre": ratio(timings, name, "ours, pre"),
            "kept_bytes": kept[name],
        }
        if peer is not None:
            row["ours_to_peer"] = ratio(timings, f"ours, {peer.ours}", name)
            row["same_sublayers"] = peer.same_sublayers
        rows.append(row)
    return rows


def compile_stack(stack: nn.Module) -> None:
    """Compile ours by block; a peer as a whole, as its users would."""
    if isinstance(stack, Stack):
        compile_blocks(stack)
    else:
        stack.compile(dynamic=False)


def kept_bytes(stack: nn.Module, x: Tensor, rotary: Rotation) -> int:
    """Return the bytes that the graph of a forward pass keeps besides parameters."""
    return sum(kept_for_backward(lambda: stack(x, rotary), besides=stack.parameters()))


def passes(stack: nn.Module, x: Tensor, rotary: Rotation) -> Callable[[], object]:
    """Return the forward and backward pass."""

    def run() -> None:
        stack.zero_grad(set_to_none=True)
        stack(x, rotary).square().mean().backward()

    return run


def main() -> None:
    """Measure, write the file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "performance/peers.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=PeerSettings.rounds)
    given = parser.parse_args()
    measure_peers(PeerSettings(rounds=given.rounds), given.device).show(given.out)


if __name__ == "__main__":
    main()
