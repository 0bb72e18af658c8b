"""Give a model another residual topology: find its blocks, exchange their residual path, carry its norms over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.converted_models import record_step, refuse_unsavable
from siamesenorm.interop.hosts.blocks import BlockStack, RewiredBlock
from siamesenorm.interop.hosts.find import find_blocks
from siamesenorm.interop.hosts.wiring import (
    FROM_SCRATCH,
    ResidualParts,
    Wiring,
    needs_qkv_norm,
    new_norm,
    read_norms,
    refuse_fused_projections,
    refuse_other_functions,
)
from siamesenorm.interop.rewire_report import (
    NormFate,
    NormOutcome,
    RewireReport,
    describe_move,
    fates_of_new_norms,
    fates_of_old_norms,
    norms_of,
)
from siamesenorm.models.conversion import convert, converted_config
from siamesenorm.models.language import LanguageModel
from siamesenorm.norms import Norm, NormFunction, NormSpec
from siamesenorm.topologies import Topology, build_topology, topology_name
from siamesenorm.topologies.pre_norm_family import PreNorm

__all__ = ["NormFate", "NormOutcome", "RewireReport", "record_streams", "rewire"]

StreamsOfBlock = dict[str, Tensor]


def rewire(
    model: nn.Module, topology: str | Topology = "siamese", *, preserve: bool = True, norm: str | NormSpec | None = None
) -> RewireReport:
    """Give `model`, in place, another residual topology ("siamese", "dhc-2:streams=4", ...), and return a report.

    Supports the blocks of Hugging Face's Llama, Qwen3, Mistral, Gemma 2 and 3, GPT-2, GPT-NeoX, OLMo, OLMoE and OLMo 2,
    timm's ViT and DeiT, and diffusers' DiT. Attention, MLP, cache, the names of their weights, checkpointing and hooks
    stay; blocks return the streams packed, [batch, tokens, streams, dim]. A `LanguageModel` of this library is rewired
    with its configuration, and packs nothing.

    `preserve=True` keeps the function: exactly where the topology allows it, else up to the eps of a norm of a norm, as
    the report says with a bound; the attention is not changed. `preserve=False` leaves the new norms and gates at their
    initial values, adds the attention norm that the topology requires, and multiplies weights by the factors that it
    declares for their initialisation (DeepNorm): that is for a model that was not trained. `norm` is the operator of
    the new norms; the host's own, with its eps, by default.

    New parameters are made: build the optimizer afterwards. A Hugging Face or diffusers model gets a class and a copy
    of its configuration that save it as what it is. Raises UserError, with the model unchanged, for a structure that is
    not understood, a model that was rewired before, a norm shared between sublayers, and a topology that cannot keep
    the function.
    """
    if isinstance(model, LanguageModel):
        return _rewire_native(model, topology, preserve=preserve, norm=norm)
    refuse_unsavable(model, "rewire")
    stack = find_blocks(model)
    wanted = build_topology(topology) if isinstance(topology, str) else topology
    resolved = _resolve(wanted, stack, preserve=preserve)
    old = read_norms(stack)
    operator = new_norm(norm, old)
    parts = ResidualParts.build(stack, resolved, operator, old)
    differences = None
    if preserve:
        found = parts.init_as_pre_norm(stack, old)
        refuse_other_functions(operator, found, chosen=norm)
        differences = tuple(dict.fromkeys(chain.from_iterable(found.values())))
    attention_norm = _attention_operator(old.first) if not preserve and needs_qkv_norm(resolved) else None
    before = fates_of_old_norms(model, stack, old, preserve=preserve)
    known = norms_of(model)
    # Nothing of the model was changed above, and nothing can fail below.
    wiring = Wiring(topology=resolved, norm=operator, attention_norm=attention_norm, preserve=preserve)
    wiring.install(stack, parts)
    record_step(model, wiring.to_json())
    fates = (*before, *fates_of_new_norms(model, known.values(), preserve=preserve))
    return RewireReport(topology=resolved, blocks=stack.name, norms=fates, differences=differences)


def _attention_operator(host: NormFunction) -> NormSpec:
    """Return the host's operator with its eps, which attention keeps, whatever the operator of the residual path."""
    return NormSpec.parse(host.statistic, **({} if host.eps is None else {"eps": host.eps}))


def _resolve(topology: Topology, stack: BlockStack, *, preserve: bool) -> Topology:
    """Return the topology with the options that the host needs; raises UserError where the two do not compose."""
    spec, what = stack.spec, type(stack.blocks[0]).__name__
    if spec.parallel and topology.tells_sublayers_apart:
        raise UserError(
            f"{topology_name(topology)} has different connections for attention and MLP, but {what} ({stack.name}) "
            "computes the two in parallel: use siamese-post-pre, or another topology with one kind of connection"
        )
    if spec.keeps_final_norm and topology.modulation_refusal:
        raise UserError(f"{topology_name(topology)} on {what}: {topology.modulation_refusal}")
    if not preserve:
        refuse_fused_projections(stack, topology)
        return topology
    resolved = topology.preserving()
    if spec.pre_norm_refusal:
        raise UserError(
            f"{stack.name} has blocks of class {what}, {spec.pre_norm_refusal}: no function-preserving "
            f"{topology_name(topology)} exists; {FROM_SCRATCH}"
        )
    if any(parameter.is_meta for parameter in stack.backbone.parameters()):
        raise UserError(
            f"{stack.name} is on the meta device, so that there is no function to preserve: load the weights first, or "
            f"{FROM_SCRATCH}"
        )
    return resolved


def _rewire_native(
    model: LanguageModel, topology: str | Topology, *, preserve: bool, norm: str | NormSpec | None
) -> RewireReport:
    """Give a Pre-Norm model of this library, in place, another topology, operator, or both, keeping its function.

    Nothing is packed and no class changes: the result is the model that its new configuration describes. Raises
    UserError, with the model unchanged, where its function cannot be kept, and for `preserve=False`.
    """
    wanted = build_topology(topology) if isinstance(topology, str) else topology
    train = f"train one that has it, siamesenorm train --model.topology {topology_name(wanted)}"
    if not preserve:
        raise UserError(
            f"a model of this library does not start from scratch here (preserve=False, --scratch): {train}, or build "
            "it with build_language_model"
        )
    if isinstance(model.config.topology, PreNorm) and wanted.pre_norm_refusal:
        raise UserError(
            f"{wanted.title} cannot keep the function of a Pre-Norm model: {wanted.pre_norm_refusal}; {train}, or "
            "choose a topology that can, such as siamese-post-pre"
        )
    target = converted_config(model.config, topology, norm)
    old = norms_of(model)
    differences = convert(model, target)
    return RewireReport(
        topology=target.topology, blocks="blocks", norms=_native_fates(model, old), differences=differences
    )


def _native_fates(model: LanguageModel, old: dict[str, Norm]) -> tuple[NormFate, ...]:
    """Return what became of every norm of the model before, and every new one."""
    new = norms_of(model)
    fates = []
    for name, norm in old.items():
        stays = new.get(name) is norm
        outcome = NormOutcome.KEPT if stays else NormOutcome.MOVED
        detail = "in the attention" if stays else describe_move(norm.function(), "a new norm")
        fates.append(NormFate(name=name, outcome=outcome, detail=detail))
    return (*fates, *fates_of_new_norms(model, old.values(), preserve=True))


@contextmanager
def record_streams(model: nn.Module) -> Iterator[list[StreamsOfBlock]]:
    """Collect, for every block that runs inside the context, its streams by name, [batch, tokens, dim] each.

    Hyper-Connections have one entry, "streams", [batch, tokens, streams, dim]. Raises UserError for a model that
    was not rewired.
    """
    blocks = [module for module in model.modules() if isinstance(module, RewiredBlock)]
    if not blocks:
        raise UserError(f"{type(model).__name__} has no rewired blocks: call siamesenorm.rewire first")
    found: list[StreamsOfBlock] = []

    def keep(block: nn.Module, _: object, packed: Tensor) -> None:
        assert isinstance(block, RewiredBlock)
        topology = block.topology
        found.append(dict(zip(topology.stream_names, topology.unpack(packed), strict=True)))

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
