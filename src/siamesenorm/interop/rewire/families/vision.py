"""timm's Vision Transformers and DeiT: LayerScale and drop-path belong to the sublayer and stay.

Where tokens are pooled before the last norm (`fc_norm`), the model is refused: a closing of two streams normalises each
token, and a norm of a mean is not a mean of norms.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.derived_class import derive
from siamesenorm.interop.rewire.anatomy import Anatomy, Reading, Slot, qualified_name
from siamesenorm.interop.rewire.block import RewiredBlock
from siamesenorm.norms.parameters import declared_parameters
from siamesenorm.topologies import Connection

BACKBONES = ("timm.models.vision_transformer.VisionTransformer", "timm.models.deit.VisionTransformerDistilled")


class VisionBlock(RewiredBlock):
    """A ViT block: drop_path(LayerScale(sublayer(h))) is what each connection writes."""

    attention_connection: Connection
    mlp_connection: Connection
    attn: nn.Module
    ls1: nn.Module
    drop_path1: nn.Module
    mlp: nn.Module
    ls2: nn.Module
    drop_path2: nn.Module

    def forward(self, x: Tensor, *args: Any, **masks: Any) -> Tensor:
        """Return the packed streams after both sublayers; masks are the attention's."""

        def attend(h: Tensor) -> Tensor:
            attended: Tensor = self.drop_path1(self.ls1(self.attn(h, *args, **masks)))
            return attended

        def transform(h: Tensor) -> Tensor:
            transformed: Tensor = self.drop_path2(self.ls2(self.mlp(h)))
            return transformed

        return self.leave(self.mlp_connection(self.attention_connection(self.enter(x), attend), transform))


class ClosedIntermediates(nn.Module):
    """Mixed in before a Vision Transformer's class: its features have the channels of one stream."""

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        **options: Any,
    ) -> Any:
        """Return timm's intermediates, closed: what the head would see after each block, whether `norm` is set or not.

        The streams have no other view with the channels of one: what they add up to before their norms means nothing.
        """
        return super().forward_intermediates(x, indices, return_prefix_tokens, True, **options)  # type: ignore[misc]

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last index; the closing stays even under `prune_norm`, for features need it."""
        kept: list[int] = super().prune_intermediate_layers(indices, False, prune_head)  # type: ignore[misc]
        return kept

    def no_weight_decay(self) -> set[str]:
        """Return timm's names, and those of the new parameters that weight decay does not apply to."""
        ours = {name for name, _, declaration in declared_parameters(self) if not declaration.decay}
        theirs: set[str] = super().no_weight_decay()  # type: ignore[misc]
        return theirs | ours


def check_backbone(backbone: nn.Module) -> None:
    """Raise UserError for a model that is no VisionTransformer of timm, or one without a norm of each last token."""
    name = qualified_name(backbone)
    if name not in BACKBONES:
        raise UserError(f"timm blocks in a {name}: rewire knows them in {' and '.join(BACKBONES)}")
    if isinstance(backbone.norm, nn.Identity):
        raise UserError(
            "norm of the VisionTransformer is an Identity: its tokens are pooled, or given out, before any last norm, "
            "so that no closing keeps the function; create it with final_norm=True, fc_norm=False, not as features_only"
        )


def close_intermediates(backbone: nn.Module) -> None:
    """Give a backbone the class whose intermediate features are closed."""
    backbone.__class__ = derive(ClosedIntermediates, type(backbone))


ANATOMY = Anatomy(
    rewired=VisionBlock,
    slots=(
        Slot(kind="attention", connection="attention_connection", norm="norm1"),
        Slot(kind="mlp", connection="mlp_connection", norm="norm2"),
    ),
    domain="vision",
    attention="attn",
    projections={"attention_output": "attn.proj", "mlp_up": "mlp.fc1", "mlp_output": "mlp.fc2"},
    check_backbone=check_backbone,
    adapt_backbone=close_intermediates,
)
BLOCKS: dict[str, Reading] = {"timm.models.vision_transformer.Block": lambda block: ANATOMY}
