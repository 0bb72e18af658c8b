"""Exchange the residual path of a stack of blocks: build the parts of a topology, set them, and install them.

A saved model records its conversions as steps, which `replay_steps` repeats on a freshly built model, for weights to be
loaded into. A step is a JSON object whose "operation" names the conversion: "rewire" or "swap_norms".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError, unknown
from siamesenorm.interop.backbones import closing_mixin, keep_recording
from siamesenorm.interop.find_blocks import find_blocks, norms_first
from siamesenorm.interop.rewired_blocks import BlockStack, RewiredBlock, RewiredClosing, ScaledNorm, derive
from siamesenorm.interop.stored_model import Step
from siamesenorm.models.block import ResidualPath, build_residual_path
from siamesenorm.norms import NORMS, Inexact, Norm, NormFunction, NormSpec, foreign_norms
from siamesenorm.norms.foreign_norms import EPS_NAMES, Unreadable, inheriting, read_norm
from siamesenorm.topologies import (
    Connection,
    ResidualSpec,
    Topology,
    topology_from_json,
    topology_name,
    transformer_places,
)
from siamesenorm.topologies.topology import Kind, Reader

FROM_SCRATCH = "start from scratch (preserve=False or --scratch)"

# --- the norms of a host as functions, and the operator that replaces them


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNorms:
    """The functions of a host's norms: one a connection, None where the sublayer keeps its own, and the final one.

    `inputs` are by the name of the norm, or of the connection where none is replaced. `raw` are the names of those that
    are the identity. `kept` are by connection the names and functions of norms that stay behind it, by "" those behind
    the closing. `first` is a norm that exists, which gives the width; `operator` is that one's, with its eps, offset
    and options.
    """

    inputs: Mapping[str, NormFunction | None]
    final: NormFunction | None
    raw: tuple[str, ...]
    kept: Mapping[str, Mapping[str, NormFunction]]
    first: NormFunction
    operator: NormSpec


def read_norms(model: nn.Module, stack: BlockStack) -> HostNorms:
    """Return the functions of the norms on the residual path; raises UserError for one that is not understood."""
    found = dict[str, tuple[nn.Module, NormFunction]]()
    width = getattr(getattr(stack.backbone, "config", None), "hidden_size", None)

    def read(owner: nn.Module, path: str, name: str) -> NormFunction:
        """Return the function of the norm at `path` in `owner`, with `name` in errors."""
        try:
            module = owner.get_submodule(path)
            found[name] = module, read_norm(module, width)
        except (Unreadable, AttributeError) as reason:
            raise UserError(f"{name} is no norm that rewire understands: {reason}") from reason
        return found[name][1]

    inputs: dict[str, NormFunction | None] = {}
    kept: dict[str, dict[str, NormFunction]] = {}
    raw = []
    for index, block in enumerate(stack.blocks):
        for sublayer in stack.spec.sublayers:
            place = f"{stack.name}.{index}"
            name = f"{place}.{sublayer.norm or sublayer.connection}"
            inputs[name] = None
            kept[name] = {f"{place}.{path}": read(block, path, f"{place}.{path}") for path in sublayer.kept}
            if sublayer.norm and isinstance(block.get_submodule(sublayer.norm), nn.Identity):
                raw.append(name)
            elif sublayer.norm:
                inputs[name] = read(block, sublayer.norm, name)
    final = None
    if stack.final_norm and not isinstance(model.get_submodule(stack.final_norm), nn.Identity):
        final = read(model, stack.final_norm, stack.final_norm)
    if final is not None and stack.spec.keeps_final_norm:
        kept[""], final = {stack.final_norm: final}, None
    module, first = next(iter(found.values()))
    if isinstance(module, Norm):  # one of ours, with its own options
        registered = next((name for name, operator in NORMS.items() if type(module) is operator), None)
        if registered is None:
            raise UserError(f"{type(module).__name__} is not registered: call siamesenorm.register_norm first")
        operator = NormSpec.parse(registered, **module.settings())
    else:
        operator = inheriting(NormSpec(first.statistic), first, bias=True)
    return HostNorms(inputs=inputs, final=final, raw=tuple(raw), kept=kept, first=first, operator=operator)


# --- the parts of a topology: nothing is installed yet


def build_parts(stack: BlockStack, topology: Topology, norm: NormSpec, old: HostNorms) -> ResidualPath:
    """Build opening, connections and closing on the devices and in the dtypes of the host's weights."""
    spec = ResidualSpec(dim=old.first.dim, norm=norm, domain=stack.domain, final_norm=old.final is not None)
    sublayers: list[tuple[Kind, bool]] = [
        ("mlp" if each.kind == "mlp" else "attention", bool(each.kept)) for each in stack.spec.sublayers
    ]
    path = build_residual_path(topology, spec, transformer_places(len(stack.blocks), sublayers=sublayers))
    norms = iter(old.inputs.items())
    for block, connections in zip(stack.blocks, path.connections, strict=True):
        for connection, (name, norm_function) in zip(connections, norms, strict=False):
            if name in old.raw:
                _read_raw(connection)
            connection.to(**like(block, norm_function))
    path.opening.to(**like(stack.blocks[0]))
    path.closing.to(**like(stack.blocks[-1], old.final))
    return path


def _read_raw(connection: Connection) -> None:
    """Take the norms before the sublayer out of a connection, since the host has none there."""
    for name in ("identity_norm", "input_norm", "norm"):
        if isinstance(getattr(connection, name, None), Norm):
            setattr(connection, name, nn.Identity())
    if getattr(connection, "input_scale", None) is not None:
        connection.constant("input_scale", 1.0)


def init_as_pre_norm(
    path: ResidualPath, stack: BlockStack, old: HostNorms, topology: Topology
) -> dict[str, list[Inexact]]:
    """Set the parts to where the rewired model computes what the host does; return what differs at each norm.

    Raises UserError where a sublayer without an input norm would read a multiple of the stream.
    """
    path.opening.init_as_pre_norm()
    found: dict[str, list[Inexact]] = {}
    for connection, (name, norm) in zip(chain(*path.connections), old.inputs.items(), strict=True):
        found[name] = connection.init_as_pre_norm(norm)
        if name in old.raw and found[name]:
            what = f"{name} is no norm, and {topology_name(topology)} gives its sublayer a multiple of the stream"
            raise UserError(f"{what}: use siamese, or {FROM_SCRATCH}")
        if _kept_eps(old.kept[name], connection):
            found[name] = []
    closing = path.closing.init_as_pre_norm(old.final)
    found[stack.final_norm or "the closing"] = [] if _kept_eps(old.kept.get("", {}), path.closing) else closing
    # Where the sublayer keeps its own norm, the connection reports no bound: its eps is that of the other norms.
    twice = Inexact.norm_of_norm(old.first.eps, old.first.eps)
    for differences in found.values():
        differences[:] = [twice if (one.kind, one.bound) == (twice.kind, None) else one for one in differences]
    return found


def _kept_eps(norms: Mapping[str, NormFunction], reader: Reader) -> dict[str, tuple[float, float]]:
    """Return eps and factor by name with which norms behind a read are the host's; none where one cannot be."""
    found = {name: reader.eps_behind(norm) for name, norm in norms.items()}
    return {} if None in found.values() else {name: each for name, each in found.items() if each is not None}


def _keep_functions(model: nn.Module, path: ResidualPath, old: HostNorms) -> None:
    """Give norms that stay behind a read the eps and the factor with which they are the host's."""
    readers = dict(zip((*old.inputs, ""), (*chain(*path.connections), path.closing), strict=True))
    for place, norms in old.kept.items():
        for name, (eps, factor) in _kept_eps(norms, readers[place]).items():
            norm: Any = model.get_submodule(name)
            if eps != norms[name].eps:
                norm.__class__, norm.factor = derive(ScaledNorm, type(norm)), factor
                setattr(norm, next(name for name in EPS_NAMES if hasattr(norm, name)), eps)


def like(module: nn.Module, norm: NormFunction | None = None) -> dict[str, Any]:
    """Return the device and dtype of a norm's gain, else of a module's first parameter that is not quantised."""
    gains = () if norm is None or norm.gain is None else (norm.gain,)
    for parameter in (*gains, *module.parameters()):
        if parameter.is_floating_point() and parameter.dtype.itemsize >= 2:
            return {"device": parameter.device, "dtype": parameter.dtype}
    return {"device": torch.get_default_device(), "dtype": torch.get_default_dtype()}


# --- additions of a model that starts from scratch: QKV-norm, and factors on initial weights

ATTENTION_ROLES = ("query", "key", "value")
SCALED_ROLES = (*ATTENTION_ROLES, "attention_output", "mlp_up", "mlp_gate", "mlp_output")


class NormedProjection(nn.Module):
    """A projection and a norm of each head of its output; no `nn.Linear`, which LoRA would replace."""

    def __init__(self, projection: nn.Module, head_norm: Norm) -> None:
        super().__init__()
        self.projection = projection
        self.head_norm = head_norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection with every head normalised."""
        heads = self.projection(x).unflatten(-1, (-1, self.head_norm.dim))
        normalised: Tensor = self.head_norm(heads).flatten(-2)
        return normalised


def refuse_fused_projections(stack: BlockStack, topology: Topology) -> None:
    """Raise UserError where the topology concerns projections that are no separate maps in the host."""
    known, name = stack.spec.projections, topology_name(topology)
    if topology.attention_norm == "qkv-head" and not all(role in known for role in ATTENTION_ROLES):
        keep = "" if topology.pre_norm_refusal else ", or keep the function, which adds no norm to the attention"
        raise UserError(
            f"{stack.name}.0.{stack.spec.attention} has no separate projections for queries, keys and values: it "
            f"cannot have the QKV-norm of {name}; use siamese-post-pre{keep}"
        )
    for role in SCALED_ROLES:
        scaled = topology.initial_factor(role, len(stack.blocks)) != 1.0
        if scaled and stack.spec.crosses:
            raise UserError(
                f"{name} scales initial weights, otherwise in a model with cross-attention: use post instead"
            )
        if scaled and role not in known:
            raise UserError(f"{name} scales {role}, which has no tensor of its own in {stack.name}.0: use post instead")


def _normalise_projections(stack: BlockStack, operator: NormSpec) -> None:
    """Give queries, keys and values a norm per head, except where the host has its own."""
    spec = stack.spec
    paths = [path for role in ATTENTION_ROLES if role not in spec.head_norms for path in spec.projections[role]]
    for block in stack.blocks:
        head_dim = _head_dim(block.get_submodule(spec.attention))
        for path in paths:
            projection = block.get_submodule(path)
            norm = operator.build(head_dim).to(**like(projection))
            block.set_submodule(path, NormedProjection(projection, norm).train(projection.training))


def _head_dim(attention: Any) -> int:
    """Return the width of a head of an attention of transformers, T5, timm or diffusers."""
    named = (getattr(attention, name, None) for name in ("head_dim", "key_value_proj_dim"))
    width: int = next(filter(None, named), None) or attention.inner_dim // attention.heads
    return width


def _scale_initial_weights(stack: BlockStack, topology: Topology) -> None:
    """Multiply weights by the factors that a topology declares for their initialisation, and store these on modules."""
    factors = {role: topology.initial_factor(role, len(stack.blocks)) for role in stack.spec.projections}
    for block in stack.blocks:
        for role, factor in factors.items():
            for path in stack.spec.projections[role] if factor != 1.0 else ():
                block.get_submodule(path).initial_factor = factor  # type: ignore[assignment]
    scale_drawn_weights(stack.backbone)


@torch.no_grad()
def scale_drawn_weights(model: nn.Module, keep: Callable[[nn.Parameter], bool] = lambda weight: False) -> None:
    """Multiply weights that were just drawn by the factors stored on their modules, except those to keep."""
    for module in model.modules():
        factor = vars(module).get("initial_factor")
        if factor is not None and not keep(weight := module.get_parameter("weight")):
            weight.mul_(factor)


# --- the whole conversion


def install(
    model: nn.Module,
    stack: BlockStack,
    path: ResidualPath,
    topology: Topology,
    *,
    attention_norm: NormSpec | None,
    kept: HostNorms | None = None,
    scratch: bool = False,
) -> None:
    """Replace the host's residual path; from scratch, scale its initial weights; nothing here can fail.

    Norms that stay behind a read get the functions in `kept`.
    """
    spec = stack.spec
    if scratch:
        _scale_initial_weights(stack, topology)
    if kept:
        _keep_functions(model, path, kept)
    if attention_norm:
        _normalise_projections(stack, attention_norm)
    for index, (block, connections) in enumerate(zip(stack.blocks, path.connections, strict=True)):
        block.__class__ = derive(spec.rewired, type(block))
        assert isinstance(block, RewiredBlock)
        block.form, block.topology = spec.form, topology
        block.opening = path.opening.train(block.training) if index == 0 else None
        block.closing = None
        for sublayer, connection in zip(spec.sublayers, connections, strict=True):
            setattr(block, sublayer.connection, connection.train(block.training))
        for norm in (*(sublayer.norm for sublayer in spec.sublayers if sublayer.norm), *spec.output_norms):
            owner, _, name = norm.rpartition(".")
            delattr(block.get_submodule(owner), name)
    last = stack.blocks[-1]
    final = model.get_submodule(stack.final_norm) if stack.final_norm else last
    closing = RewiredClosing(
        topology,
        path.closing,
        final_norm=final if spec.keeps_final_norm else None,
        embedding_norm=final if norms_first(stack) else None,
    ).train(final.training)
    if stack.final_norm:
        model.set_submodule(stack.final_norm, closing)
    else:
        last.closing = closing
    if mixin := closing_mixin(stack.backbone):
        stack.backbone.__class__ = derive(mixin, type(stack.backbone))
        keep_recording(stack.backbone)


# --- the record of conversions


def steps_of(model: nn.Module) -> list[Step]:
    """Return the steps recorded on a model."""
    return list(getattr(model, "siamesenorm_steps", ()))


def replay_steps(model: nn.Module, steps: Sequence[Step]) -> None:
    """Repeat recorded steps on a freshly built model; raises UserError for an unknown or damaged record."""
    if not steps or not isinstance(steps, (list, tuple)) or not all(isinstance(step, Mapping) for step in steps):
        raise UserError("siamesenorm in the configuration is no list of conversions: the configuration is damaged")
    operations = {"rewire": _replay, "swap_norms": foreign_norms.replay}
    for step in steps:
        name = step.get("operation", "")
        if name not in operations:
            raise unknown("operation of siamesenorm", str(name), operations)
        try:
            operations[name](model, step)
        except KeyError as missing:
            raise UserError(f"the record of {name} lacks {missing}: the configuration is damaged") from missing
    model.siamesenorm_steps = list(steps)  # type: ignore[assignment]


def _replay(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Repeat a rewiring on a freshly built host; raises UserError for a damaged record."""
    for name in ("topology", "norm", "attention_norm"):
        if not isinstance(record[name], Mapping) and not (name == "attention_norm" and record[name] is None):
            raise UserError(f"{name} in the record of rewire is {record[name]!r}: the configuration is damaged")
    topology, norm = topology_from_json(record["topology"]), NormSpec.from_json(record["norm"])
    attention_norm = record["attention_norm"] and NormSpec.from_json(record["attention_norm"])
    for stack in find_blocks(model):
        old = read_norms(model, stack)
        path = build_parts(stack, topology, norm, old)
        kept, scratch = (old, False) if record["preserve"] else (None, True)
        install(model, stack, path, topology, attention_norm=attention_norm, kept=kept, scratch=scratch)
