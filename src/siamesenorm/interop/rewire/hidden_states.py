"""Hidden states of a rewired Hugging Face backbone: the closed state of each block, [batch, tokens, dim]."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from siamesenorm.interop.derived_class import derive
from siamesenorm.interop.rewire.block import RewiredClosing


class ClosedHiddenStates(nn.Module):
    """Mixed in before a backbone's class: `output_hidden_states` gives what the head would see after each block."""

    config: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the backbone's output with its packed hidden states closed; the first, the embedding, is as it was."""
        # The library turns its output into a tuple, which has no names, only after the states were collected.
        wanted = kwargs.pop("return_dict", None)
        output = super().forward(*args, **kwargs, return_dict=True)
        states = getattr(output, "hidden_states", None)
        if states is not None:
            closing = next(module for module in self.modules() if isinstance(module, RewiredClosing))
            output["hidden_states"] = tuple(close(closing, state) for state in states)
        names = getattr(self.config, "return_dict", True) if wanted is None else wanted
        return output.to_tuple() if names is False else output

    def __setstate__(self, state: Any) -> None:
        """Take the state of a pickled backbone, whose class this process may not have seen."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        keep_recording(self)


def close(closing: RewiredClosing, state: Tensor | None) -> Tensor | None:
    """Return a packed state [batch, tokens, streams, dim] closed; others as they are."""
    return closing(state) if state is not None and state.dim() == 4 else state


def close_hidden_states(backbone: nn.Module) -> None:
    """Give a backbone the class whose hidden states are closed."""
    backbone.__class__ = derive(ClosedHiddenStates, type(backbone))
    keep_recording(backbone)


def keep_recording(model: nn.Module) -> None:
    """Tell transformers, which looks it up by class, that a model of a new class records what it did before."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is not None:
        registry = capturing._CAN_RECORD_REGISTRY
        # A dictionary, up to some 5.x, by the text of the class; then a registry that takes the model itself.
        key = str(type(model)) if type(registry) is dict else model
        registry[key] = getattr(model, "_can_record_outputs", None)
