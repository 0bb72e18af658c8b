"""What a foreign model that starts from scratch needs beside connections: QKV-norm, and factors on initial weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewire.anatomy import Host
from siamesenorm.interop.rewire.parts import like
from siamesenorm.norms import Norm, NormFunction, NormSpec
from siamesenorm.topologies import Topology, topology_name

ATTENTION_ROLES = ("query", "key", "value")
SCALED_ROLES = (*ATTENTION_ROLES, "attention_output", "mlp_up", "mlp_gate", "mlp_output")


class NormedProjection(nn.Module):
    """A projection, and a norm of each head of its output [..., heads * head_dim].

    No `nn.Linear` itself: what adds to or replaces a linear map (LoRA, quantisation) would pass over the norm.
    """

    def __init__(self, projection: nn.Module, head_norm: Norm) -> None:
        super().__init__()
        self.projection = projection
        self.head_norm = head_norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection with every head normalised."""
        heads = self.projection(x).unflatten(-1, (-1, self.head_norm.dim))
        normalised: Tensor = self.head_norm(heads).flatten(-2)
        return normalised


def adds_qkv_norm(topology: Topology, *, preserve: bool) -> bool:
    """Return whether rewiring gives the attention the QKV-norm of the topology: never to a trained one."""
    return not preserve and topology.attention_norm == "qkv-head"


def attention_operator(host: NormFunction) -> NormSpec:
    """Return the host's operator with its eps: attention keeps it, whatever stands on the residual path."""
    return NormSpec.parse(host.statistic, **({} if host.eps is None else {"eps": host.eps}))


def refuse_fused_projections(host: Host, topology: Topology) -> None:
    """Raise UserError where the topology concerns projections that are no maps of their own in the host."""
    known, name = host.anatomy.projections, topology_name(topology)
    if adds_qkv_norm(topology, preserve=False) and not all(role in known for role in ATTENTION_ROLES):
        raise UserError(
            f"{host.name}.0.{host.anatomy.attention} has no projections of its own for queries, keys and values: it "
            f"cannot have the QKV-norm of {name}; use siamese-post-pre, or siamesenorm.rewire with preserve=True"
        )
    for role in SCALED_ROLES:
        if topology.initial_factor(role, len(host.blocks)) != 1.0 and role not in known:
            raise UserError(
                f"{name} scales the initial weights of role {role}, which have no tensor of their own in "
                f"{host.name}.0: use post instead, or deepnorm:initial_scaling=false"
            )


def normalise_projections(host: Host, operator: NormSpec) -> None:
    """Give queries, keys and values a norm per head, those apart that the host normalises itself."""
    anatomy = host.anatomy
    for block in host.blocks:
        head_dim = anatomy.head_dim(block.get_submodule(anatomy.attention))
        for role in ATTENTION_ROLES:
            if role not in anatomy.head_norms:
                path = anatomy.projections[role]
                projection = block.get_submodule(path)
                norm = operator.build(head_dim).to(**like(projection))
                block.set_submodule(path, NormedProjection(projection, norm).train(projection.training))


def scale_initial_weights(host: Host, topology: Topology) -> None:
    """Multiply weights by the factors that a topology declares for their initialisation, and note these beside them."""
    for block in host.blocks:
        for role, path in host.anatomy.projections.items():
            factor = topology.initial_factor(role, len(host.blocks))
            if factor != 1.0:
                block.get_submodule(path).initial_factor = factor  # type: ignore[assignment]
    scale_drawn_weights(host.backbone)


@torch.no_grad()
def scale_drawn_weights(model: nn.Module, keep: Callable[[nn.Parameter], bool] = lambda weight: False) -> None:
    """Multiply weights that were just drawn by the factors noted beside them, those apart that are to be kept."""
    for module in model.modules():
        factor = vars(module).get("initial_factor")
        if factor is not None and not keep(weight := module.get_parameter("weight")):
            weight.mul_(factor)
