"""The task of language modelling: what the train loop trains, on what, and how it is evaluated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.data import PreparedData, TokenSamples, document_ids
from siamesenorm.errors import UserError
from siamesenorm.models.language import LanguageModel, build_language_model
from siamesenorm.training.accounting import count_flops, count_parameters
from siamesenorm.training.config import RunConfig


class LanguageTask:
    """Next-token prediction on prepared tokens."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = _device(config.execution.device)
        self.data = PreparedData.open(config.data_path)
        if self.data.digest != config.data_digest:
            raise UserError(
                f"{config.data_path} holds other data than the run was configured for (digest "
                f"{self.data.digest[:12]}, not {config.data_digest[:12]}): use that data, or start a new run"
            )
        self.data.require_vocabulary(config.model.vocabulary)
        self.train = TokenSamples(self.data, "train", config.model.context, config.seed)
        self.validation = TokenSamples(self.data, "validation", config.model.context)

    def build_model(self) -> LanguageModel:
        """Return the model with its initial weights."""
        return build_language_model(self.config.model, seed=self.config.seed, device=self.device)

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Return what the first record of a run says about model and data."""
        parameters, embedding = count_parameters(model)
        return {
            "label": self.config.model.label,
            "attention_norm": self.config.model.attention_shape.attention_norm,
            "parameters": parameters,
            "non_embedding_parameters": parameters - embedding,
            "flops_per_token": count_flops(self.config.model),
            "floor": self.data.unigram_entropy,
            "scale": 1.0,
            "unit": "nats/token",
            "train_tokens_available": self.train.targets,
            "notes": sorted({module.note for module in model.modules() if getattr(module, "note", "")}),
        }

    def loss(self, model: nn.Module, position: int, count: int) -> Tensor:
        """Return the mean cross-entropy (nats a token) of `count` samples, plus auxiliary losses."""
        batch = torch.from_numpy(self.train.batch(position, count))
        logits, losses = self._forward(model, batch)
        total = _cross_entropy(logits, batch, "mean")
        for loss in losses.values():
            total = total + loss
        return total

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        """Return the mean held-out loss (nats a token) over the first `validation_tokens` of the validation split."""
        count, total, tokens = self.config.samples_per_micro_batch, 0.0, 0
        for window in self.validation.windows(count, self.config.validation_tokens):
            batch = torch.from_numpy(window)
            total += float(_cross_entropy(self._forward(model, batch)[0], batch, "sum"))
            tokens += batch[:, 1:].numel()
        return {"loss": total / tokens, "tokens": tokens}

    def _forward(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        documents = None
        if self.config.model.document_mask:
            documents = torch.from_numpy(document_ids(batch[:, :-1].numpy(), self.data.end_of_text)).to(self.device)
        logits, losses = model(batch[:, :-1].to(self.device), documents=documents)
        return logits, losses


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # Which of them it is depends on how torch was built.
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"device {name!r} is not at hand here: choose cpu, or a device that torch finds") from error
    return device


def _cross_entropy(logits: Tensor, batch: Tensor, reduction: str) -> Tensor:
    targets = batch[:, 1:].to(logits.device)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
