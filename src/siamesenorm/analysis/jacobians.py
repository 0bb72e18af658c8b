"""Transition Jacobians of the streams (Eq. 8 of arXiv 2602.08064): their spectra by depth, and the identity itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from siamesenorm.analysis.held_out import Analysis, HeldOut, PathParts, Results, stack_of
from siamesenorm.analysis.stream_terms import stream_count
from siamesenorm.analysis.transitions import Map, Transition, find_transitions, first_inputs, in_double
from siamesenorm.errors import UserError
from siamesenorm.topologies import Topology


@dataclass(frozen=True, kw_only=True)
class Jacobians(Analysis):
    r"""Singular values of the transition \(\partial S_{k+1} / \partial S_k\) of every sublayer, in fp64.

    S are all streams of the first `tokens` tokens of one held-out sample, the other tokens held fixed. In the boundary
    family \(S_k\) has its first stream post-normalised, as in Eq. 8; elsewhere it is the state before the k-th read.
    Lists by sublayer:

    * "largest", "smallest", "rank", and "mean_log", the mean of the logarithms of as many singular values: those below
      n eps times the largest one, of n in all, are zeros up to rounding;
    * "to_end": the largest singular value and the root mean square of them of \(\partial S_K / \partial S_k\), the
      product of the transitions from k on, by which gradients at the end reach depth k;
    * "streams": the largest singular value of each stream's own diagonal block;
    * "identity" of the boundary family: the largest difference of each block of the transition from its formula,
      relative to the transition's largest entry. With \(J_h = J_F J_{in}\), \(\Gamma\) the gate, \(J_o\) of what acts
      on the output and factors a, s, c of the write: first to first \(J_X (a I + s J_o J_h \Gamma)\), which is
      Post-Norm's \(J_X (I + J_F)\); second to second \(I + c J_o J_h J_Y\), Pre-Norm's \(I + J_F J_Y\); second to first
      \(s J_X J_o J_h J_Y\), first to second \(c J_o J_h \Gamma\);
    * "forward": the largest difference of a transition's result from the state that the model itself has before the
      next sublayer, relative to the largest entry of that stream: the transitions are those of the model.

    Refused for streams of more than `largest` numbers: all of the matrix is computed.
    """

    name: ClassVar[str] = "jacobians"

    samples: int = 1
    tokens: int = 4
    largest: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1 or self.largest < 1:
            raise UserError(f"tokens is {self.tokens}, largest is {self.largest}: choose at least 1")

    def require_model(self, model: nn.Module) -> None:
        """Raise UserError for a model whose streams are too wide."""
        super().require_model(model)
        config: Any = getattr(model, "config", None)
        dim: int = getattr(config, "dim", 0) or getattr(config, "hidden_size", 0)
        self._require_size(stream_count(PathParts.of(model).topology) * dim * self.tokens)

    def _require_size(self, numbers: int) -> None:
        if numbers > self.largest:
            raise UserError(
                f"{self.name}: the streams of {self.tokens} tokens are {numbers:,} numbers, more than largest "
                f"{self.largest:,}: choose fewer tokens, a smaller model, or more memory and time by a larger one"
            )

    def measure(self, held_out: HeldOut) -> Results:
        """Return the spectra and the differences from the identity."""
        model = in_double(held_out.model)
        path = PathParts.of(model)
        with torch.no_grad():
            transitions = find_transitions(model, path, *first_inputs(held_out, self.tokens))
            for each in transitions:
                self._require_size(sum(x[:, : self.tokens].numel() for x in each.state))
            matrices = [jacobian(each.step, each.state, self.tokens) for each in transitions]
            identity = [deviations(each, J, self.tokens) for each, J in zip(transitions, matrices, strict=True)]
            return {
                "samples": 1,
                "blocks": len(path.blocks),
                "sublayers": [each.name for each in transitions],
                **_spectra(matrices),
                "to_end": _products(matrices, [stack_of(each.name) for each in transitions]),
                "streams": _diagonal(path.topology, transitions, matrices, self.tokens),
                "identity": _largest_by_name([found for found in identity if found]),
                "forward": forward_difference(transitions),
            }


def jacobian(function: Map, state: Sequence[Tensor], tokens: int) -> Tensor:
    """Return d function(state) / d state, [1, tokens, ...] of the first tokens, as one matrix: stream after stream."""
    kept = [x[:, :tokens] for x in state]

    def flattened(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [x.numel() for x in kept])
        whole = (torch.cat((p.view(k.shape), x[:, tokens:]), 1) for p, k, x in zip(parts, kept, state, strict=True))
        output = function(*whole)
        several = output if isinstance(output, tuple) else (output,)
        return torch.cat([y[:, :tokens].flatten() for y in several])

    point = torch.cat([x.flatten() for x in kept])
    # Row by row: functorch does not transform the operator of the experts, and on a CPU is no faster.
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        matrix: Tensor = torch.autograd.functional.jacobian(flattened, point)  # type: ignore[no-untyped-call]
    return matrix.detach()


def deviations(transition: Transition, found: Tensor, tokens: int) -> dict[str, float]:
    """Return the largest difference of each block of a transition from its formula, relative to the largest entry."""
    if transition.next_post_norm is None:
        return {}
    connection: Any = transition.connection
    X, *others = transition.state
    J = partial(jacobian, tokens=tokens)
    h, addition = transition.read(X, *others), connection.addition
    a, s, c = (
        1.0 if each is None else float(each) for each in (addition.skip, addition.scale, addition.identity_scale)
    )
    Y = others[0] if connection.identity_norm is not None else None
    total = connection.gate(X) + (0 if Y is None else connection.identity_norm(Y))
    output = transition.sublayer(h)
    written = connection.write(transition.state, output)[0]
    J_h = J(connection.output, [output]) @ J(transition.sublayer, [h]) @ J(transition.normalised, [total])
    J_X, gate = J(transition.next_post_norm, [written]), J(connection.gate, [X])
    eye, size = torch.eye(len(gate), dtype=gate.dtype, device=gate.device), len(gate)
    expected = {"first to first": J_X @ (a * eye + s * J_h @ gate)}
    if others:
        J_Y = torch.zeros_like(gate) if Y is None else J(connection.identity_norm, [Y])
        expected["second to second"] = eye + c * J_h @ J_Y
        expected["second to first"] = s * J_X @ J_h @ J_Y
        expected["first to second"] = c * J_h @ gate
    places = {"first": slice(0, size), "second": slice(size, None)}
    scale, differences = float(found.abs().max()), {}
    for name, block in expected.items():
        source, target = name.split(" to ")
        differences[name] = float((found[places[target], places[source]] - block).abs().max()) / scale
    return differences


def forward_difference(transitions: Sequence[Transition]) -> float:
    """Return the largest difference of a transition's result from the next state, relative to its largest entry.

    0 where no transition follows another.
    """
    return max(
        (
            float((computed - stream).abs().max() / stream.abs().max().clamp_min(torch.finfo(stream.dtype).tiny))
            for each, following in pairwise(transitions)
            if stack_of(each.name) == stack_of(following.name)
            for computed, stream in zip(each.step(*each.state), following.state, strict=True)
        ),
        default=0.0,
    )


def _largest_by_name(several: list[dict[str, float]]) -> dict[str, float] | None:
    return {name: max(each[name] for each in several) for name in several[0]} if several else None


def _spectra(matrices: Sequence[Tensor]) -> dict[str, list[float] | list[int]]:
    values = [torch.linalg.svdvals(matrix) for matrix in matrices]
    nonzero = [each[each > len(each) * torch.finfo(each.dtype).eps * each.max()] for each in values]
    return {
        "largest": [float(each.max()) for each in values],
        "smallest": [float(each.min()) for each in values],
        "rank": [len(each) for each in nonzero],
        "mean_log": [float(each.log().mean()) for each in nonzero],
    }


def _products(matrices: Sequence[Tensor], stacks: Sequence[str]) -> dict[str, list[float]]:
    """Return the spectra of the products from each matrix to the last one of its stack."""
    largest, mean_squares, product, current = [], [], None, ""
    for matrix, stack in zip(reversed(matrices), reversed(stacks), strict=True):
        product = matrix if product is None or stack != current else product @ matrix
        current = stack
        values = torch.linalg.svdvals(product)
        largest.append(float(values.max()))
        mean_squares.append(float(values.square().mean().sqrt()))
    return {"largest": largest[::-1], "rms": mean_squares[::-1]}


def _diagonal(
    topology: Topology, transitions: Sequence[Transition], matrices: Sequence[Tensor], tokens: int
) -> dict[str, list[float | None]]:
    """Return the largest singular value of each stream's own block; None where the number of streams changes."""
    found: dict[str, list[float | None]] = {}
    names = list(dict.fromkeys(name for each in transitions for name in topology.name_streams(len(each.state))))
    for each, matrix in zip(transitions, matrices, strict=True):
        sizes = [x[:, :tokens].numel() for x in each.state]
        square = matrix.shape[0] == matrix.shape[1]
        here = dict(zip(topology.name_streams(len(sizes)), range(len(sizes)), strict=False)) if square else {}
        for name in names:
            start = sum(sizes[: here[name]]) if name in here else 0
            place = slice(start, start + sizes[here[name]]) if name in here else None
            own = None if place is None else float(torch.linalg.matrix_norm(matrix[place, place], ord=2))
            found.setdefault(name, []).append(own)
    return found
