"""The models of other libraries around their blocks: outputs that rewired blocks leave packed are closed.

A closed state is what the head would see after a block: one stream [batch, tokens, dim].
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewired_blocks import RewiredBlock, RewiredClosing
from siamesenorm.norms.parameters import declared_parameters


def is_transformers(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers, which is not imported for the question."""
    utils = sys.modules.get("transformers.modeling_utils")
    return utils is not None and isinstance(module, utils.PreTrainedModel)


def is_timm(module: nn.Module) -> bool:
    """Return whether a module is a Vision Transformer of timm."""
    return hasattr(module, "forward_intermediates") and hasattr(module, "patch_embed")


def owner_of(model: nn.Module, name: str) -> nn.Module:
    """Return the innermost model of transformers around a module, the outermost module for other libraries."""
    while name:
        name = name.rpartition(".")[0]
        if is_transformers(model.get_submodule(name)):
            return model.get_submodule(name)
    return model


def closing_mixin(backbone: nn.Module) -> type[nn.Module] | None:
    """Return the class to mix in before that of a backbone, which closes its hidden states."""
    return ClosedHiddenStates if is_transformers(backbone) else ClosedIntermediates if is_timm(backbone) else None


class ClosedHiddenStates(nn.Module):
    """Mixed in before a backbone's class: `output_hidden_states` returns what the head would see after each block."""

    config: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the backbone's output with its packed hidden states closed; the first one is the embedding."""
        # The library turns its output into a tuple, which has no names, only after the states were collected.
        wanted = kwargs.pop("return_dict", None)
        output = super().forward(*args, **kwargs, return_dict=True)
        states = getattr(output, "hidden_states", None)
        if states is not None:
            closing = next(module for module in self.modules() if isinstance(module, RewiredClosing))
            output["hidden_states"] = tuple(closing(x) if x is not None and x.dim() == 4 else x for x in states)
        names = getattr(self.config, "return_dict", True) if wanted is None else wanted
        return output.to_tuple() if names is False else output

    def __setstate__(self, state: Any) -> None:
        """Restore a pickled backbone, whose class this process may not have seen."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        keep_recording(self)


def keep_recording(model: nn.Module) -> None:
    """Register a model of a new class with transformers, so that it records the same outputs as before."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is not None and hasattr(model, "_can_record_outputs"):
        registry = capturing._CAN_RECORD_REGISTRY
        recorders: Any = model._can_record_outputs or {}
        called = {name: _of_core(model, each, capturing.OutputRecorder) for name, each in recorders.items()}
        # A dictionary, up to some 5.x, by the text of the class; then a registry that takes the model itself.
        registry[str(type(model)) if type(registry) is dict else model] = called


def _of_core(model: nn.Module, recorder: Any, kind: type) -> Any:
    """Return a recorder of an attention's outputs for one of the module around it, which a rewired block skips."""
    if isinstance(recorder, kind):
        for block in (module for module in model.modules() if isinstance(module, RewiredBlock)):
            for core in (branch.core for sublayer in block.form.sublayers for branch in sublayer.branches):
                owner, _, name = core.rpartition(".")
                if owner and isinstance(block.get_submodule(owner), recorder.target_class):  # type: ignore[attr-defined]
                    return replace(recorder, target_class=type(block.get_submodule(core)), layer_name=name)  # type: ignore[type-var]
    return recorder


class ClosedIntermediates(nn.Module):
    """Mixed in before a Vision Transformer's class: its features have the channels of one stream."""

    def forward_intermediates(self, *args: Any, **options: Any) -> Any:
        """Return timm's intermediates closed, `norm` or not: the sum of streams before their norms has no meaning."""
        if not isinstance(self.norm, RewiredClosing):
            raise UserError(
                f"features of the blocks of a rewired {type(self).__name__}: only its last block closes them"
            )
        host: Any = super()
        given = inspect.signature(host.forward_intermediates).bind(*args, **options)
        given.arguments["norm"] = True
        return host.forward_intermediates(*given.args, **given.kwargs)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last index; the closing stays even under `prune_norm`, since features need it."""
        kept: list[int] = super().prune_intermediate_layers(indices, False, prune_head)  # type: ignore[misc]
        return kept

    def no_weight_decay(self) -> set[str]:
        """Return timm's names, and those of the new parameters that weight decay does not apply to."""
        ours = {name for name, _, declaration in declared_parameters(self) if not declaration.decay}
        theirs: set[str] = super().no_weight_decay()  # type: ignore[misc]
        return theirs | ours
