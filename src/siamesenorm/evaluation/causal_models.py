"""Causal language models as the scorer calls them: the logits of some places of a batch of packed sequences."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from siamesenorm.models.language import LanguageModel

HEAD_ELEMENTS = {"cpu": 2**22}
"""Logits that are computed at once: more than fit a CPU's caches would be read from memory."""
HEAD_ELEMENTS_ELSEWHERE = 2**27
SAME = 1e-3
"""The largest difference by rounding between logits of a packed and of a single sequence, in units of their largest."""


class Batch(NamedTuple):
    """Rows of tokens [rows, length] (int64), and what packed rows need.

    `positions` [rows, length] are those inside each sequence, and `mask` [rows, length, length] is True where a token
    may attend to another; without them a row is one sequence from its first token. Padding is at the end of a row.
    """

    tokens: Tensor
    positions: Tensor | None = None
    mask: Tensor | None = None


class CausalModel(Protocol):
    """A language model that predicts the next token."""

    context: int
    """The most tokens it reads."""
    packs: bool
    """Whether several sequences with a common beginning can share a row."""

    def logits(self, batch: Batch, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        """Yield the logits, in at least fp32, [some, vocabulary], at places (row, column) of a batch, in their order.

        `rows` and `columns` are [places] int64 on the batch's device.
        """


class NativeCausalModel:
    """A language model of this library; only attention mixes tokens, so that rows can be packed in every topology."""

    packs = True

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.context = model, model.config.context

    def logits(self, batch: Batch, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        """Yield the logits; the head reads nothing but the places."""
        hidden = self.model.hidden(batch.tokens, positions=batch.positions, mask=batch.mask)[rows, columns]
        elements = HEAD_ELEMENTS.get(hidden.device.type, HEAD_ELEMENTS_ELSEWHERE)
        for part in torch.split(hidden, max(1, elements // self.model.config.vocabulary)):
            yield self.model.logits(part)


class LibraryCausalModel:
    """A causal language model of transformers, or any module with its interface.

    Its head reads nothing but the places, where it has a module for it. Whether it can be packed is found out by a
    small batch: by position ids and a mask of its own, which not every model takes into account.
    """

    def __init__(self, model: Any) -> None:
        self.model, config = model, model.config
        self.context = next(
            (
                int(getattr(config, name))
                for name in ("max_position_embeddings", "n_positions")
                if hasattr(config, name)
            ),
            2048,
        )
        local = any(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        takes = inspect.signature(model.forward).parameters
        self.packs = not local and {"position_ids", "attention_mask"} <= takes.keys() and self._packs_exactly()

    def logits(self, batch: Batch, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        """Yield the logits of all places at once."""
        selected = False

        def select(head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            nonlocal selected
            selected = True
            return (inputs[0][rows, columns][None], *inputs[1:])

        head = self.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(select) if isinstance(head, nn.Module) else None
        try:
            logits = self.model(input_ids=batch.tokens, use_cache=False, **self._packing(batch)).logits
        finally:
            if hook is not None:
                hook.remove()
        yield (logits[0] if selected else logits[rows, columns]).float()

    def _packing(self, batch: Batch) -> dict[str, Tensor]:
        if batch.mask is None or batch.positions is None:
            return {}
        dtype = self.model.dtype
        mask = torch.zeros(batch.mask.shape, dtype=dtype, device=batch.mask.device)
        mask.masked_fill_(~batch.mask, torch.finfo(dtype).min)
        return {"position_ids": batch.positions, "attention_mask": mask[:, None]}

    @torch.no_grad()
    def _packs_exactly(self) -> bool:
        """Whether two sequences in one row have the logits of each alone."""
        device = next(self.model.parameters()).device
        tokens = torch.arange(6, device=device)[None] + 3
        alone = Batch(tokens[:, [0, 1, 4, 5]])
        positions = torch.tensor([[0, 1, 2, 3, 2, 3]], device=device)
        branch = torch.tensor([[0, 0, 1, 1, 2, 2]], device=device)
        packed = Batch(tokens, positions, sharing_mask(branch))
        try:
            (found,) = self.logits(packed, torch.zeros_like(branch[0, 4:]), torch.tensor([4, 5], device=device))
            (wanted,) = self.logits(alone, torch.zeros_like(branch[0, 4:]), torch.tensor([2, 3], device=device))
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
        rounding = SAME if self.model.dtype in (torch.float32, torch.float64) else 30 * SAME
        return bool((found - wanted).abs().max() <= rounding * wanted.abs().max())


def sharing_mask(branch: Tensor) -> Tensor:
    """Return the mask [rows, length, length] of packed rows: a token attends to the past of its branch and of branch 0.

    `branch` [rows, length] is 0 for the common beginning, and otherwise the number of the sequence.
    """
    length = branch.shape[1]
    past = torch.ones(length, length, dtype=torch.bool, device=branch.device).tril()
    return past & ((branch[:, None, :] == 0) | (branch[:, :, None] == branch[:, None, :]))


def model_digest(model: nn.Module, **settings: Any) -> str:
    """Return the SHA-256 of a model's configuration and weights, and of settings: of all that its numbers depend on."""
    config: Any = getattr(model, "config", None)
    described = config.to_json() if hasattr(config, "to_json") else _foreign_config(config)
    text = json.dumps([type(model).__name__, described, settings], sort_keys=True, default=str)
    found = hashlib.sha256(text.encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _foreign_config(config: Any) -> Any:
    fields = config.to_dict() if hasattr(config, "to_dict") else repr(config)
    if isinstance(fields, dict):
        return {name: value for name, value in fields.items() if name not in ("_name_or_path", "transformers_version")}
    return fields
