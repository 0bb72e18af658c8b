"""Massive activations in the streams, and attention sinks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from siamesenorm.analysis.held_out import Analysis, HeldOut, PathParts, Results, observed_reads
from siamesenorm.analysis.measurements import Measurements
from siamesenorm.analysis.probes import name_streams
from siamesenorm.errors import UserError
from siamesenorm.topologies import Streams

SINK_SHARE = 0.3
"""The mean share of the first token from which on a head is counted as a sink (arXiv 2410.10781)."""


@dataclass(frozen=True, kw_only=True)
class Outliers(Analysis):
    r"""Massive activations of every stream, and the attention to the first token, by depth.

    * An entry of a stream is massive (arXiv 2402.17762) if \(|x|\) is above `above` (100) and above `ratio` (1,000)
      times the median of \(|x|\) over the tokens and channels of its sample. "streams" by name: "massive", their number
      in a sample, "max", the largest \(|x|\) of all samples, "median" and "ratio", max / median, means over samples, as
      each of "sublayers" reads the stream. Small models have no massive entries in this sense: their ratio can be
      compared.
    * "attention" (arXiv 2309.17453): "first", the share of the softmax that goes to the first token, mean over heads
      and the queries after the first token; "uniform", the same if every query attended alike to all that it may see;
      "sink_heads", the part of the heads with a share above 0.3. The first token of an image is the class token, or the
      first patch.

    Attention weights are computed again from the queries and keys that the model passes to PyTorch's
    scaled_dot_product_attention; the model itself is not changed. None where it calls another function.
    """

    name: ClassVar[str] = "outliers"

    above: float = 100.0
    ratio: float = 1000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.above >= 0 and self.ratio > 0):
            raise UserError(f"above is {self.above}, ratio is {self.ratio}: choose 0 or more, and a positive ratio")

    def measure(self, held_out: HeldOut) -> Results:
        """Return outliers and attention by depth."""
        path, values, watch = PathParts.of(held_out.model), Measurements(), AttentionWatch()

        def observe(name: str, before: Streams, h: Tensor, after: Streams) -> None:
            for stream, x in name_streams(after, path.topology.name_streams, h).items():
                for quantity, value in outliers(x, self.above, self.ratio).items():
                    values.add((name, stream, quantity), value, len(x))

        with observed_reads(path.connections, observe), watch.following(held_out.model):
            held_out.run()
        found = values.fetch()
        streams = dict.fromkeys(key[1] for key in found)
        return {
            "blocks": len(path.blocks),
            "sublayers": list(path.connections),
            "streams": {
                stream: {q: [found.get((name, stream, q)) for name in path.connections] for q in QUANTITIES}
                for stream in streams
            },
            "attention": watch.results(),
        }


QUANTITIES = ("max", "median", "ratio", "massive")


def outliers(x: Tensor, above: float, ratio: float) -> dict[str, Tensor]:
    """Return the outliers of a stream [batch, ..., dim], means over samples, but for the max."""
    size = x.detach().abs().float().flatten(1)
    median, largest = size.median(1).values, size.amax(1)
    massive = ((size > above) & (size > ratio * median[:, None])).sum(1)
    return {
        "max": largest.max(),
        "median": median.mean(),
        "ratio": (largest / median.clamp_min(torch.finfo(median.dtype).tiny)).mean(),
        "massive": massive.double().mean(),
    }


class AttentionWatch(TorchFunctionMode):
    """Measures every call of scaled_dot_product_attention, by its turn in the forward pass of a model."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0
        self._first: dict[int, list[Tensor]] = {}
        self._uniform: dict[int, list[Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Measure the attention, then call any function as it is."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            first, uniform = attention_to_first(*args, **kwargs)
            self._first.setdefault(self._turn, []).append(first)
            self._uniform.setdefault(self._turn, []).append(uniform)
            self._turn += 1
        return func(*args, **kwargs)

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Count the calls from 0 in each forward pass of a model, inside the context."""

        def begin(module: nn.Module, arguments: Any) -> None:
            self._turn = 0

        handle = model.register_forward_pre_hook(begin)
        try:
            with self:
                yield
        finally:
            handle.remove()

    def results(self) -> dict[str, list[float]] | None:
        """Return the shares by depth, means over samples."""
        if not self._first:
            return None
        heads = [torch.cat(self._first[turn]).mean(0) for turn in sorted(self._first)]
        uniform = [torch.cat(self._uniform[turn]).mean() for turn in sorted(self._uniform)]
        return {
            "first": [float(each.mean()) for each in heads],
            "uniform": [float(each) for each in uniform],
            "sink_heads": [float((each > SINK_SHARE).double().mean()) for each in heads],
        }


@torch.no_grad()
def attention_to_first(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the share of the first key, [batch, heads], mean over the queries after the first, and the uniform one.

    The arguments are those of scaled_dot_product_attention, [batch, heads, tokens, head_dim].
    """
    queries, keys = query.shape[-2], key.shape[-2]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    bias = torch.zeros(queries, keys, device=query.device)
    if is_causal:
        bias.masked_fill_(torch.ones(queries, keys, dtype=torch.bool, device=query.device).triu(1), -math.inf)
    found, even = [], []
    for sample in range(len(query)):  # one at a time: the weights of a batch may not fit the memory
        q, k = query[sample].float(), key[sample].float()
        if q.shape[0] != k.shape[0]:
            k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
        scores = q @ k.mT * scale + bias
        allowed = bias
        if attn_mask is not None:
            mask = attn_mask.expand(*query.shape[:-2], queries, keys)[sample]
            mask = (
                torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
                if mask.dtype == torch.bool
                else mask
            )
            scores, allowed = scores + mask, bias + mask
        visible = allowed.isfinite() & (allowed > torch.finfo(torch.float32).min / 2)
        visible = visible.expand(scores.shape).double()
        found.append(scores.softmax(-1)[:, 1:, 0].mean(-1))
        even.append((visible[..., 0] / visible.sum(-1).clamp_min(1))[:, 1:].mean(-1))
    return torch.stack(found), torch.stack(even)
