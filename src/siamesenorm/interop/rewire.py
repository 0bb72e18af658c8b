"""Give a model another residual topology: find its blocks, exchange their residual path, and report on every norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop import wiring
from siamesenorm.interop.converted_models import record_step, refuse_unsavable
from siamesenorm.interop.find_blocks import find_blocks
from siamesenorm.interop.rewired_blocks import BlockStack, RewiredBlock
from siamesenorm.interop.verify import confirm, verify
from siamesenorm.interop.wiring import FROM_SCRATCH, HostNorms
from siamesenorm.models.block import ResidualPath
from siamesenorm.models.conversion import convert, converted_config
from siamesenorm.models.language import LanguageModel
from siamesenorm.norms import Inexact, Norm, NormFunction, NormSpec
from siamesenorm.norms.foreign_norms import inheriting, looks_like_norm, norms_of
from siamesenorm.topologies import Topology, build_topology, topology_name, topology_to_json
from siamesenorm.topologies.pre_norm_family import PreNorm


def rewire(
    model: nn.Module,
    topology: str | Topology = "siamese",
    *,
    preserve: bool = True,
    norm: str | NormSpec | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> RewireReport:
    """Give `model`, in place, another residual topology ("siamese", "dhc-2:streams=4", ...), and return a report.

    Supports Pre-Norm blocks of transformers, timm and diffusers' DiT whose modules have a known form (docs/rewire.md),
    sequential or parallel; of an encoder-decoder both stacks, of a multimodal model the language model. Before anything
    is changed, every block and the whole model run on a copy as the host calls them, and the form must reproduce their
    outputs; `inputs` are arguments of the model's forward for that check, small random ones by default. Attention, MLP,
    dropout, cache, the names of their weights, checkpointing and hooks stay; blocks return the streams packed, [batch,
    tokens, streams, dim]. A `LanguageModel` of this library is rewired with its configuration, and packs nothing.

    `preserve=True` keeps the function: exactly where the topology allows it, else up to the eps of a norm of a norm, as
    the report says with a bound; the attention is not changed. `preserve=False` leaves the new norms and gates at their
    initial values, adds the attention norm that the topology requires, and multiplies weights by the factors that it
    declares for their initialisation (DeepNorm): that is for a model that was not trained. `norm` is the operator of
    the new norms; the host's own, with its eps, by default.

    New parameters are made: build the optimizer afterwards. A Hugging Face or diffusers model gets a class and a copy
    of its configuration that save it as what it is. Raises UserError, with the model unchanged, for a structure that is
    not understood or computes something else, a model that was rewired before, a shared norm, and a topology that
    cannot keep the function.
    """
    wanted = build_topology(topology) if isinstance(topology, str) else topology
    if isinstance(model, LanguageModel):
        return _rewire_native(model, wanted, preserve=preserve, norm=norm)
    refuse_unsavable(model, "rewire")
    stacks = find_blocks(model)
    resolved, *_ = [_resolve(wanted, stack, preserve=preserve) for stack in stacks]
    if not any(each.spec.pre_norm_refusal for each in stacks) and not any(map(_without_weights, stacks)):
        verify(model, stacks, inputs)
    old = [wiring.read_norms(model, stack) for stack in stacks]
    chosen, first = NormSpec.parse(norm) if isinstance(norm, str) else norm, old[0].first
    operator = old[0].operator if chosen is None else inheriting(chosen, first)
    paths = [wiring.build_parts(stack, resolved, operator, norms) for stack, norms in zip(stacks, old, strict=True)]
    parts = list(zip(stacks, paths, old, strict=True))
    differences = attention_norm = None
    if preserve:
        remedy = "make them alike with swap_norms first" if norm is None else "leave norm out"
        each = (_small_differences(*part, resolved, operator, remedy) for part in parts)
        differences = tuple(dict.fromkeys(chain.from_iterable(each)))
        if not differences:
            confirm(model, stacks, resolved, operator, inputs)
    elif resolved.attention_norm == "qkv-head":
        # Of the host's operator and eps, whatever the operator of the residual path.
        eps = {} if first.eps is None else {"eps": first.eps}
        attention_norm = NormSpec.parse(first.statistic, **eps)
    before, known = _fates_of_old_norms(model, stacks, old, preserve=preserve), norms_of(model)
    step = {
        "operation": "rewire",
        "topology": topology_to_json(resolved),
        "norm": operator.to_json(),
        "attention_norm": attention_norm and attention_norm.to_json(),
        "preserve": preserve,
    }
    # Nothing of the model was changed above, and nothing can fail below.
    for stack, path, norms in parts:
        kept = norms if preserve else None
        wiring.install(model, stack, path, resolved, attention_norm=attention_norm, kept=kept, scratch=not preserve)
    record_step(model, step)
    fates = (*before, *_fates_of_new_norms(model, known.values(), preserve=preserve))
    names = ", ".join(stack.name for stack in stacks)
    return RewireReport(topology=resolved, blocks=names, norms=fates, differences=differences)


def _without_weights(stack: BlockStack) -> bool:
    return any(parameter.is_meta for parameter in stack.backbone.parameters())


def _small_differences(
    stack: BlockStack, path: ResidualPath, old: HostNorms, topology: Topology, operator: NormSpec, remedy: str
) -> tuple[Inexact, ...]:
    """Set new parts and return by what they differ from the host's; raises UserError where that is more than an eps."""
    found = wiring.init_as_pre_norm(path, stack, old, topology)
    for name, one in ((name, one) for name, each in found.items() for one in each):
        if not one.kind.is_tolerated:
            what = f"norm {operator} cannot keep the function of the host's norms ({name}: {one.detail})"
            raise UserError(f"{what}: {remedy}, or {FROM_SCRATCH}")
    differences = tuple(chain.from_iterable(found.values()))
    if differences and old.final is None and not stack.spec.keeps_final_norm:
        raise UserError(
            f"{topology_name(topology)} on {stack.name}, which no norm of every token follows: the sum of its "
            f"streams has another scale; use attnres, which keeps it, or {FROM_SCRATCH}"
        )
    return differences


def _resolve(topology: Topology, stack: BlockStack, *, preserve: bool) -> Topology:
    """Return the topology with the options that the host needs; raises UserError where the two do not compose."""
    spec, what = stack.spec, type(stack.blocks[0]).__name__
    if len(spec.sublayers) == 1 and topology.distinguishes_sublayers:
        raise UserError(
            f"{topology_name(topology)} on {what}, with attention and MLP in parallel: use siamese-post-pre"
        )
    if spec.keeps_final_norm and topology.modulation_refusal:
        raise UserError(f"{topology_name(topology)} on {what}: {topology.modulation_refusal}")
    if not preserve:
        wiring.refuse_fused_projections(stack, topology)
        return topology
    resolved = topology.preserving()
    if spec.pre_norm_refusal:
        raise UserError(
            f"{stack.name} has blocks of class {what}, {spec.pre_norm_refusal}: no function-preserving "
            f"{topology_name(topology)} exists; {FROM_SCRATCH}"
        )
    if _without_weights(stack):
        raise UserError(f"{stack.name} is on the meta device: load the weights first, or {FROM_SCRATCH}")
    return resolved


def _rewire_native(
    model: LanguageModel, topology: Topology, *, preserve: bool, norm: str | NormSpec | None
) -> RewireReport:
    """Rewire a Pre-Norm model of this library, whose configuration changes with it, and keep its function."""
    train = f"train one that has it, siamesenorm train --model.topology {topology_name(topology)}"
    if not preserve:
        raise UserError(f"preserve=False, --scratch: a model of this library is not changed from scratch: {train}")
    if isinstance(model.config.topology, PreNorm) and topology.pre_norm_refusal:
        raise UserError(
            f"{topology.title} cannot keep the function of a Pre-Norm model: {topology.pre_norm_refusal}; {train}, or "
            "choose a topology that can, such as siamese-post-pre"
        )
    target = converted_config(model.config, topology, norm)
    old = norms_of(model)
    differences = convert(model, target)
    new = norms_of(model)
    fates = [
        NormFate(name, "kept", "in the attention" if ".attention." in name else "in its place")
        if new.get(name) is module
        else NormFate(name, "moved", _move(module.function(), "a new norm"))
        for name, module in old.items()
    ]
    fates += _fates_of_new_norms(model, old.values(), preserve=True)
    return RewireReport(topology=target.topology, blocks="blocks", norms=tuple(fates), differences=differences)


@contextmanager
def record_streams(model: nn.Module) -> Iterator[list[dict[str, Tensor]]]:
    """Collect, for every block that runs inside the context, its streams by name, [batch, tokens, dim] each.

    Hyper-Connections have one, "streams", [batch, tokens, streams, dim]. Raises UserError for a model not rewired.
    """
    blocks = [module for module in model.modules() if isinstance(module, RewiredBlock)]
    if not blocks:
        raise UserError(f"{type(model).__name__} has no rewired blocks: call siamesenorm.rewire first")
    found: list[dict[str, Tensor]] = []

    def keep(block: RewiredBlock, packed: Tensor) -> None:
        streams = block.topology.unpack(packed)
        found.append(dict(zip(block.topology.name_streams(len(streams)), streams, strict=True)))

    def keep_output(block: nn.Module, _: object, output: Any) -> None:
        assert isinstance(block, RewiredBlock)
        keep(block, output[0] if isinstance(output, tuple) else output)

    handles = [
        block.register_forward_hook(keep_output)
        if block.closing is None
        else block.closing.register_forward_pre_hook(lambda _, given, block=block: keep(block, given[0]))
        for block in blocks
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


# --- the report


@dataclass(frozen=True, slots=True)
class NormFate:
    """The outcome of one norm: its parameters moved into a connection, or it was kept, dropped, or made new."""

    name: str
    outcome: Literal["moved", "kept", "dropped", "new"]
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewireReport:
    """The topology as installed, the norms old and new, and in what the function differs.

    `differences` is empty where the function is kept up to rounding, and None where nothing was to be preserved.
    """

    topology: Topology
    blocks: str
    norms: tuple[NormFate, ...]
    differences: tuple[Inexact, ...] | None

    @property
    def function_kept(self) -> bool:
        """Whether the model computes what it did, up to rounding alone."""
        return self.differences == ()

    @property
    def bound(self) -> float | None:
        """The largest relative difference of a norm's output, over all tokens; None where it has no bound."""
        bounds = None if self.differences is None else [difference.bound for difference in self.differences]
        return None if bounds is None or None in bounds else max(filter(None, bounds), default=0.0)

    def __str__(self) -> str:
        """Return the report as a table, one norm a line."""
        if self.differences is None:
            function = "starting from scratch, function not kept"
        else:
            function = "; ".join(map(str, self.differences))
            function = f"function kept but for: {function}" if function else "function kept"
        width = max(len(norm.name) for norm in self.norms)
        lines = [f"{norm.name:<{width}}  {norm.outcome:<7}  {norm.detail}" for norm in self.norms]
        return "\n".join([f"{self.blocks} rewired to {topology_name(self.topology)}: {function}", *lines])


def _fates_of_new_norms(model: nn.Module, known: Iterable[Norm], *, preserve: bool) -> tuple[NormFate, ...]:
    """Return every norm of a rewired model, except those that it had before, and the state of its gain."""
    old = {id(norm) for norm in known}
    return tuple(
        NormFate(name, "new", _gain(norm, preserve=preserve))
        for name, norm in norms_of(model).items()
        if id(norm) not in old
    )


def _gain(norm: Norm, *, preserve: bool) -> str:
    """Return an operator and the state of its gain: zero, one, carried over, or at another initial value."""
    function = norm.function()
    if function.gain is None or function.gain.is_meta:
        return type(norm).__name__
    gain = function.gain.detach().double() + function.offset
    other = "carried over" if preserve else "at its initial value"
    state = "zero" if not gain.any() else "one" if bool((gain == 1).all()) else other
    return f"{type(norm).__name__}, gain {state}"


def _move(norm: NormFunction | None, target: str) -> str:
    """Return which parameters of a norm move to another one."""
    parameters = [] if norm is None else [name for name in ("gain", "bias") if getattr(norm, name) is not None]
    if not parameters:
        return f"it has no gain and no bias; {target} replaces it"
    return f"its {' and '.join(parameters)} {'go' if len(parameters) > 1 else 'goes'} to {target}"


def _fates_of_old_norms(
    model: nn.Module, stacks: Sequence[BlockStack], old: Sequence[HostNorms], *, preserve: bool
) -> list[NormFate]:
    """Return the outcomes of a host's norms, before it is rewired."""
    fates = []

    def moved(name: str, norm: NormFunction | None, place: str) -> NormFate:
        if not preserve:
            return NormFate(name, "dropped", "the new norms start at their initial values")
        return NormFate(name, "moved", _move(norm, f"the last norm {place}"))

    for name in (name for name, module in model.named_modules() if looks_like_norm(module)):
        for stack, norms in zip(stacks, old, strict=True):
            spec, in_blocks = stack.spec, name.startswith(f"{stack.name}.")
            if name in norms.inputs:
                fates.append(moved(name, norms.inputs[name], "before the sublayer"))
            elif name == stack.final_norm and not spec.keeps_final_norm:
                fates.append(moved(name, norms.final, "of the closing"))
            elif name == stack.final_norm:
                fates.append(NormFate(name, "kept", "after the closing"))
            elif in_blocks and name.removeprefix(f"{stack.name}.").partition(".")[2] in spec.output_norms:
                fates.append(NormFate(name, "dropped", "the topology decides where outputs are normalised"))
            elif in_blocks and any(name in kept for kept in norms.kept.values()):
                fates.append(NormFate(name, "kept", "the sublayer normalises its own input with it"))
            elif in_blocks:
                fates.append(NormFate(name, "kept", "part of the sublayer"))
            else:
                continue
            break
        else:
            fates.append(NormFate(name, "kept", "outside of the blocks"))
    return fates
