"""Run the structure that `rewire` assumes against the host, on a copy, before anything of the host is changed.

The copy shares the large weights. Its gains, biases, layer scales and all-equal weights are moved at random, and its
dropout drops, so that no part of a block is silent. Random state, mode, hooks and caches of the host are not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop import wiring
from siamesenorm.interop.find_blocks import find_blocks, norms_first
from siamesenorm.interop.rewired_blocks import BlockSpec, BlockStack
from siamesenorm.interop.shadow import awake_copy, share_copy, small_inputs, undisturbed
from siamesenorm.models.block import ResidualPath
from siamesenorm.norms import NormSpec
from siamesenorm.norms.foreign_norms import looks_like_norm
from siamesenorm.topologies import (
    Closing,
    Connection,
    Opening,
    ResidualSpec,
    Streams,
    Topology,
    build_topology,
    topology_name,
)

Call = tuple[tuple[Any, ...], dict[str, Any]]
Stacks = tuple[BlockStack, ...]
_VERIFIED: set[int] = set()
"""The structures that were run in this process, without their weights."""
TOLERANCE = {2: 2e-2, 4: 1e-3, 8: 1e-3}
"""The largest difference from what a block adds to its input, relative to its size, by the bytes of a number."""
TOPOLOGY, SPEC = build_topology("pre"), ResidualSpec(dim=1)


class _Residual(Connection):
    """The residual path of a Pre-Norm host, x + F(N(x)), with its own norm N: what `rewire` assumes of a sublayer."""

    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__(SPEC)
        self.norm = nn.Identity() if norm is None else norm

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return the input of the sublayer, and the stream."""
        return self.norm(streams[0]), streams

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Return the stream with the output of the sublayer."""
        return (streams[0] + output,)


class _Closing(Closing):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__(SPEC)
        self.norm = norm

    def forward(self, streams: Streams) -> Any:
        return self.norm(streams[0])


def verify(model: nn.Module, stacks: Stacks, inputs: Mapping[str, Any] | None = None) -> None:
    """Raise UserError, with the module and the difference, unless the host computes what its specification says.

    Every block runs as the host calls it, in evaluation and in training mode with the same random numbers, and then the
    whole model, with its own norms in the form in which it will be rewired. `inputs` are arguments of its forward.
    """
    structure = _fingerprint(model, stacks)
    if inputs is None and structure in _VERIFIED:
        return
    with undisturbed(model):
        shadow = awake_copy(model)
        given = small_inputs(shadow, stacks[-1].name) if inputs is None else dict(inputs)
        if given is None:
            what = type(model).__name__
            raise UserError(f"how to run a {what} is not known: give arguments of its forward, inputs={{...}}")
        calls, before = _run(shadow, stacks, given)
        blocks = {
            f"{stack.name}.{index}": (shadow.get_submodule(f"{stack.name}.{index}"), stack)
            for stack in stacks
            for index in range(len(stack.blocks))
        }
        for stack in stacks:
            first = f"{stack.name}.0"
            _refuse_post_norm(first, blocks[first][0], calls[first])
        expected = {name: _both_modes(block, calls[name]) for name, (block, _) in blocks.items()}
        kinds = {name: type(block).__name__ for name, (block, _) in blocks.items()}
        _assume(shadow)
        for name, (block, stack) in blocks.items():
            _compare(f"{name} ({kinds[name]})", block, calls[name], expected[name], stack.spec)
        after = _attempt(shadow, given, "these inputs once rewired")
    norms, names = (
        ", ".join(parts) for parts in zip(*((s.final_norm or "nothing", s.name) for s in stacks), strict=True)
    )
    what = f"{norms} is not all that follows {names}: with its blocks and this norm"
    _refuse_other_outputs(before, after, what)
    _VERIFIED.add(structure)


def confirm(
    model: nn.Module, stacks: Stacks, topology: Topology, norm: NormSpec, inputs: Mapping[str, Any] | None = None
) -> None:
    """Raise UserError unless a copy that was rewired to `topology`, where that is exact, has the model's outputs."""
    structure = hash((_fingerprint(model, stacks), repr(topology), repr(norm)))
    if inputs is None and structure in _VERIFIED:
        return
    name = ", ".join(stack.name for stack in stacks)
    with undisturbed(model):
        shadow = share_copy(model).eval()
        given = small_inputs(shadow, stacks[-1].name) if inputs is None else dict(inputs)
        before = _outputs(shadow(**given or {}))
        for stack in find_blocks(shadow):
            old = wiring.read_norms(shadow, stack)
            path = wiring.build_parts(stack, topology, norm, old)
            wiring.init_as_pre_norm(path, stack, old, topology)
            wiring.install(shadow, stack, path, topology, attention_norm=None, kept=old)
        after = _attempt(shadow, given or {}, f"small inputs with {topology_name(topology)}")
    _refuse_other_outputs(before, after, f"{name} is not all that uses the streams: with {topology_name(topology)}")
    _VERIFIED.add(structure)


def _refuse_other_outputs(before: list[Tensor], after: list[Tensor], what: str) -> None:
    """Raise UserError unless the outputs are the same up to rounding."""
    same = [(one, host) for one, host in zip(after, before, strict=True) if one.shape == host.shape]
    difference = max((_difference(one, host, host) for one, host in same), default=0.0)
    if len(same) < len(before):
        raise UserError(f"{what} an output has another shape; see docs/rewire.md")
    if difference > 3 * TOLERANCE[before[0].dtype.itemsize] * (1 if before[0].dtype.itemsize > 2 else 3):
        raise UserError(f"{what} the output is off by {difference:.2g} of its size; see docs/rewire.md")


def _fingerprint(model: nn.Module, stacks: Stacks) -> int:
    """Return a number of everything that decides the structure: classes, their code, numbers, shapes and dtypes."""
    parts: list[Any] = [str(getattr(model, "config", ""))]
    parts += [(repr(stack.spec), stack.name, stack.final_norm) for stack in stacks]
    for name, module in model.named_modules():
        own = ((key, value) for key, value in vars(module).items() if key != "training")
        numbers = tuple((key, value) for key, value in own if isinstance(value, (int, float, str)))
        parts.append((name, type(module), type(module).forward, *numbers))
    parts += [(name, value.shape, value.dtype) for name, value in model.named_parameters()]
    return hash(tuple(parts))


def _refuse_post_norm(name: str, block: nn.Module, call: Call) -> None:
    """Raise UserError for a block whose output is that of one of its norms."""
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda module, args, output, path=path: seen.update({path: output}))
        for path, module in block.named_modules()
        if path and looks_like_norm(module)
    ]
    args, options = copy.deepcopy(call)
    output = block(*args, **options)
    for handle in handles:
        handle.remove()
    output = output[0] if isinstance(output, tuple) else output
    for path, normed in seen.items():
        if isinstance(normed, Tensor) and torch.equal(normed, output):
            what = f"{name} ({type(block).__name__}) is a Post-Norm block"
            raise UserError(
                f"{what}, its output is that of {path}: no topology keeps the function; {wiring.FROM_SCRATCH}"
            )


def _assume(shadow: nn.Module) -> None:
    """Rewire a copy to the residual path that it should have already."""
    for stack in find_blocks(shadow):
        norms = [sublayer.norm for sublayer in stack.spec.sublayers]
        replaced = stack.final_norm and not stack.spec.keeps_final_norm
        path = ResidualPath(
            opening=Opening(SPEC),
            connections=tuple(
                tuple(_Residual(None if norm is None else block.get_submodule(norm)) for norm in norms)
                for block in stack.blocks
            ),
            closing=_Closing(shadow.get_submodule(stack.final_norm) if replaced else nn.Identity()),
        )
        wiring.install(shadow, stack, path, TOPOLOGY, attention_norm=None)


def _compare(name: str, block: nn.Module, call: Call, wanted: list[Any], spec: BlockSpec) -> None:
    """Raise UserError unless a block of the copy gives the host's outputs, in evaluation and in training."""
    (x, *rest), options = call
    packed = x if block.opening is not None else TOPOLOGY.pack((x,))
    found = _both_modes(block, ((packed, *rest), options))
    for mode, one, host in zip(("", " in training"), found, wanted, strict=True):
        if isinstance(one, tuple) != isinstance(host, tuple):
            raise UserError(
                f"{name} returns a {type(host).__name__}, which the form {spec} does not: see docs/rewire.md"
            )
        closed, plain = (each[0] if isinstance(each, tuple) else each for each in (one, host))
        state = closed if block.closing is not None else TOPOLOGY.unpack(closed)[0]
        difference = _difference(state, plain, plain - x)
        if difference > TOLERANCE[plain.dtype.itemsize]:
            raise UserError(
                f"{name}{mode} does not compute {spec}, which rewire assumed: its output is off by {difference:.2g} of "
                "what it adds to its input; see docs/rewire.md"
            )


def _run(shadow: nn.Module, stacks: Stacks, inputs: Mapping[str, Any]) -> tuple[dict[str, Call], list[Tensor]]:
    """Return how the host calls each block, and its outputs; raises UserError where a block does not run once."""
    calls: dict[str, list[Call]] = {}
    for stack in stacks:
        names = [f"{stack.name}.{index}" for index in range(len(stack.blocks))]
        calls |= {name: [] for name in (*names, *filter(None, [stack.final_norm]))}

    def keep(name: str) -> Any:
        return lambda module, args, options: calls[name].append(copy.deepcopy((args, options)))

    handles = [shadow.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True) for name in calls]
    try:
        outputs = _attempt(shadow, inputs, "small inputs")
    finally:
        for handle in handles:
            handle.remove()
    for stack in stacks:
        if norms_first(stack):
            del calls[stack.final_norm][:1]
    for name, found in calls.items():
        if len(found) != 1:
            raise UserError(f"{name} runs {len(found)} times in one forward of the model: rewire needs it to run once")
    return {name: _positional(call) for name, [call] in calls.items()}, outputs


def _attempt(shadow: nn.Module, inputs: Mapping[str, Any], what: str) -> list[Tensor]:
    """Return the outputs of a copy; raises UserError for any error of its own."""
    try:
        return _outputs(shadow(**inputs))
    except UserError:
        raise
    except Exception as reason:  # a model of unknown origin may raise anything
        text = f"{type(reason).__name__}: {str(reason).partition(chr(10))[0]:.120}"
        raise UserError(
            f"{type(shadow).__name__} does not run on {what} ({text}): give rewire others, inputs="
        ) from reason


def _positional(call: Call) -> Call:
    """Return a call whose first argument is positional."""
    args, options = call
    if args:
        return call
    name = next(iter(options))
    return (options[name],), {key: value for key, value in options.items() if key != name}


def _both_modes(block: nn.Module, call: Call) -> list[Any]:
    """Return the outputs in evaluation and in training, each with the same random numbers and an unused cache."""
    outputs = []
    for training in (False, True):
        args, options = copy.deepcopy(call)
        torch.manual_seed(1)
        outputs.append(block.train(training)(*args, **options))
    block.eval()
    return outputs


def _outputs(result: Any) -> list[Tensor]:
    """Return the floating tensors of a model's output."""
    several = result if isinstance(result, (tuple, list)) else (result,)
    values = result.values() if isinstance(result, Mapping) else several
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _difference(found: Tensor, expected: Tensor, size: Tensor) -> float:
    """Return the median over tokens of the largest difference, relative to the largest entry of `size`.

    A mixture of experts may choose other experts for a token whose two best are close: hence no maximum over tokens.
    """
    rounding = 16 * torch.finfo(expected.dtype).eps * expected.abs()
    off = ((found - expected).abs() - rounding).clamp(min=0).flatten(0, -2) if expected.dim() > 1 else found - expected
    largest = off.abs().amax(-1) / size.reshape(off.shape).abs().amax(-1).clamp(min=1e-12)
    return float(largest.float().nan_to_num(nan=float("inf")).median())
