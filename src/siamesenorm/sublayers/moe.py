"""The mixture of experts: every token passes through some of many gated MLPs, as in OLMoE (arXiv 2409.02060)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.errors import UserError
from siamesenorm.kernels.grouped import grouped_linear
from siamesenorm.sublayers.sublayer import NO_CONTEXT, Context, Losses, Projection, ProjectionRole, to_autocast
from siamesenorm.world import local

STATISTICS = ("largest_expert_load", "expert_load_entropy", "dropped_tokens")
"""Scalars of a mixture that are recorded and are no losses."""
Experts = Callable[[Tensor, Tensor], Tensor]
"""From rows [rows, dim] that are sorted by expert, and their ends (int32), to the outputs of their experts."""


@dataclass(frozen=True, kw_only=True)
class MixtureShape:
    """Widths and options of a mixture: `experts` MLPs of width `hidden`, `active` of them for a token.

    `renormalise` divides the weights of a token's experts by their sum.
    """

    dim: int
    hidden: int
    experts: int
    active: int
    renormalise: bool = False

    def __post_init__(self) -> None:
        if self.experts < 2:
            raise UserError(f"experts is {self.experts}: choose at least 2, or 0 for a dense MLP")
        if not 1 <= self.active <= self.experts:
            raise UserError(f"active_experts is {self.active}: choose a number from 1 to the {self.experts} experts")


class ExpertProjection(nn.Module):
    """The projections of all experts, without biases: weight [experts, out_features, in_features]."""

    def __init__(self, shape: MixtureShape, in_features: int, out_features: int, *, role: ProjectionRole) -> None:
        super().__init__()
        self.in_features, self.role, self.shape = in_features, role, shape
        self.weight = nn.Parameter(torch.empty(shape.experts, out_features, in_features))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return [rows, out_features] of rows sorted by expert, whose ends are `offsets`; see `grouped_linear`."""
        output: Tensor = grouped_linear(x, local(self.weight).to(x.dtype), offsets)
        return output


class MixtureOfExperts(nn.Module):
    r"""A weighted sum of `active` SwiGLU experts, chosen for each token by a router, without a limit of their load.

    With router logits \(z = W h\) and \(p = \mathrm{softmax}(z)\) over all experts, the output is
    \(\sum_e w_e F_e(h)\) over the experts of the largest \(p_e\), with \(w_e = p_e\), or, renormalised,
    \(w_e = p_e / \sum p\) over them: the softmax of the chosen logits alone. The router computes in at least fp32
    (arXiv 2202.08906). No token is dropped.

    Besides, it returns scalars of all tokens that it reads together, with f_e the share of the choices that are e, and
    E experts:

    * "load_balancing_loss": \(E \sum_e f_e \overline{p_e}\), 1 where the load is even (arXiv 2101.03961), and
      "router_z_loss": the mean of \((\log \sum_e \exp z_e)^2\) (arXiv 2202.08906). A task weighs them.
    * statistics without a gradient: "largest_expert_load", \(E \max_e f_e\), 1 where the load is even;
      "expert_load_entropy" in parts of \(\ln E\); "dropped_tokens", the share of the choices that no expert computed.

    `exchange(experts, rows, offsets)` may compute the experts' outputs where they are divided over processes.
    """

    couples_samples = True
    """Its losses are no means over samples: they depend on which samples are read together."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        self.shape = shape
        self.router = Projection(shape.dim, shape.experts, role="router")
        self.up = ExpertProjection(shape, shape.dim, shape.hidden, role="mlp_up")
        self.gate = ExpertProjection(shape, shape.dim, shape.hidden, role="mlp_gate")
        self.output = ExpertProjection(shape, shape.hidden, shape.dim, role="mlp_output")
        self.exchange: Callable[[Experts, Tensor, Tensor], Tensor] | None = None

    def forward(self, h: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Losses]:
        """Return the output [..., dim] for h [..., dim], and losses and statistics by name."""
        tokens = h.flatten(0, -2)
        logits = self._router_logits(tokens)
        probabilities = logits.softmax(dim=-1)
        weights, chosen = probabilities.topk(self.shape.active, dim=-1)
        if self.shape.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        by_expert, order = chosen.flatten().sort(stable=True)
        experts = torch.arange(self.shape.experts, device=h.device)
        offsets = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        output = self._experts(to_autocast(tokens), weights, order, offsets)
        return output.view(h.shape), _scalars(logits, probabilities, offsets, rows=len(order))

    def _router_logits(self, tokens: Tensor) -> Tensor:
        device, wide = tokens.device.type, torch.promote_types(tokens.dtype, torch.float32)
        autocasts = torch.amp.is_autocast_available(device)
        with torch.autocast(device, enabled=False) if autocasts else nullcontext():
            return F.linear(tokens.to(wide), self.router.weight.to(wide))

    def _experts(self, tokens: Tensor, weights: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        """Return [tokens, dim]; row i of the experts is choice order[i], of token order[i] // active."""
        # Copies are made before they are put in order: no row is taken twice, so that no gradient is a sum whose order
        # differs between runs.
        copies = tokens.unsqueeze(1).expand(-1, self.shape.active, -1).flatten(0, 1)
        rows = copies.index_select(0, order)
        outputs = self.exchange(self._outputs, rows, offsets) if self.exchange else self._outputs(rows, offsets)
        outputs = outputs.index_select(0, order.argsort()).view(len(tokens), self.shape.active, -1)
        return (outputs * weights.unsqueeze(-1).to(outputs.dtype)).sum(dim=1)

    def _outputs(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Return the outputs of the experts of this process."""
        hidden = F.silu(self.gate(rows, offsets)) * self.up(rows, offsets)
        outputs: Tensor = self.output(hidden, offsets)
        return outputs


def _scalars(logits: Tensor, probabilities: Tensor, offsets: Tensor, rows: int) -> Losses:
    """Return losses and statistics of a batch; see `MixtureOfExperts`."""
    experts = logits.shape[-1]
    share = offsets.diff(prepend=offsets.new_zeros(1)).to(logits.dtype) / rows
    return {
        "load_balancing_loss": experts * (share * probabilities.mean(dim=0)).sum(),
        "router_z_loss": logits.logsumexp(dim=-1).square().mean(),
        "largest_expert_load": experts * share.max(),
        "expert_load_entropy": torch.special.entr(share).sum() / math.log(experts),
        "dropped_tokens": 1 - offsets[-1] / rows,
    }
