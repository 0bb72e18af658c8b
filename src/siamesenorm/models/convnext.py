"""ConvNeXt (arXiv 2201.03545): the stem, the blocks and the head of timm, with any norm in the place of theirs.

* timm builds the modules (extra `vision`); `blocks` lists its blocks and the downsampling between its stages, so that
  they are recomputed, compiled and sharded as those of a Transformer are
* every LayerNorm, channels first in stem and downsampling, channels last in the blocks, becomes the operator `norm` in
  its setting for vision, with the eps of timm's; SeeDNorm's dropout is the rate of stochastic depth
* every weight is drawn from the seed and its own name, N(0, 0.02^2) truncated at three standard deviations; biases
  are 0
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError, optional, unknown
from siamesenorm.models.block import TransformerOutput
from siamesenorm.models.initialisation import build_initialised, fill_normal
from siamesenorm.models.transformer import inherited_operator, read_method, require_positive
from siamesenorm.norms import DeclaredModule, Norm, NormSpec, Role, norm_options
from siamesenorm.norms.foreign_norms import looks_like_norm, replace_norm
from siamesenorm.topologies import Kernels, build_topology

STAGES = 4
WEIGHT_STD = 0.02
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "convnext-t": {"depths": (3, 3, 9, 3), "dims": (96, 192, 384, 768)},
    "convnext-s": {"depths": (3, 3, 27, 3), "dims": (96, 192, 384, 768)},
    "convnext-b": {"depths": (3, 3, 27, 3), "dims": (128, 256, 512, 1024)},
    "convnext-l": {"depths": (3, 3, 27, 3), "dims": (192, 384, 768, 1536)},
}
"""The published sizes."""


@dataclass(frozen=True, kw_only=True)
class ConvNextConfig:
    """Everything that determines a ConvNeXt's function and its initial weights, apart from the seed.

    Raises UserError for values from which no model can be built.
    """

    tag: ClassVar[str] = "convnext"

    depths: tuple[int, ...] = SIZES["convnext-b"]["depths"]
    """Blocks of the four stages."""
    dims: tuple[int, ...] = SIZES["convnext-b"]["dims"]
    """Channels of the four stages."""
    norm: NormSpec = NormSpec("layernorm")
    """Norm operator, with options as in seednorm:heads=4; `siamesenorm explain` lists them."""
    drop_path: float = 0.0
    """Stochastic depth: rate of the last block, from 0 at the first."""
    layer_scale: float = 1e-6
    """Initial value of the learned scale of each block's output."""
    image_size: int = 224
    """Height and width of an image in pixels."""
    patch_size: int = 4
    """Height and width of a patch of the stem in pixels; the stages after the first halve the size again."""
    channels: int = 3
    """Channels of an image."""
    classes: int = 1000
    """Number of classes."""

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "channels", "classes"):
            require_positive(self, name)
        for name in ("depths", "dims"):
            values = getattr(self, name)
            if len(values) != STAGES or min(values) < 1:
                raise UserError(f"{name} is {values}: give {STAGES} numbers of at least 1, one a stage")
        if self.image_size % self.reduction:
            raise UserError(f"image_size is {self.image_size}: choose a multiple of {self.reduction}")
        if not 0 <= self.drop_path < 1:
            raise UserError(f"drop_path is {self.drop_path}: choose a number from 0 to below 1")
        if not math.isfinite(self.layer_scale):
            raise UserError(f"layer_scale is {self.layer_scale}: choose a finite number, such as 1e-6")

    @property
    def reduction(self) -> int:
        """Pixels of the image for one place before the head; behind a patch of 2 pixels timm halves in every stage."""
        return int(self.patch_size * 2 ** (STAGES if self.patch_size == 2 else STAGES - 1))

    @property
    def operator(self) -> NormSpec:
        """The norm; a dropout of it (SeeDNorm's) is the rate of stochastic depth, unless it sets its own."""
        takes_rate = "dropout" in norm_options(self.norm.name) and "dropout" not in dict(self.norm.options)
        return self.norm.with_options(dropout=self.drop_path) if takes_rate else self.norm

    @property
    def label(self) -> str:
        """A short name for tables."""
        return f"convnext + {self.norm}"

    def with_method(self, method: str) -> Self:
        """Return the configuration with the norm that "pre + NORM" names; raises UserError for other methods."""
        fields = read_method(method)
        if fields.pop("topology") != build_topology("pre") or fields.keys() - {"norm"}:
            raise UserError(
                f"method {method!r}: a ConvNeXt has its own residual path and no attention: write pre + NORM"
            )
        return dataclasses.replace(self, norm=inherited_operator(self.norm, fields.get("norm", self.norm)))

    def resolved(self, precision: str = "float32") -> Self:
        """Return the configuration: nothing of it is chosen automatically."""
        return self

    def build(self, *, seed: int, device: torch.device, kernels: Kernels = "plain") -> ConvNext:
        """Return the model with its initial weights, as `build_convnext` does."""
        return build_convnext(self, seed=seed, device=device, kernels=kernels)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return one sample of the model's inputs, on the meta device: an image."""
        return (torch.zeros(1, self.channels, self.image_size, self.image_size, device="meta"),)

    def to_json(self) -> dict[str, Any]:
        """Return every field as JSON values, with the tag."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **fields,
            "tag": self.tag,
            "depths": list(self.depths),
            "dims": list(self.dims),
            "norm": self.norm.to_json(),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Read a record of `to_json`; a missing field has its default. Raises UserError for an unknown field."""
        known = {field.name for field in dataclasses.fields(cls)}
        fields: dict[str, Any] = {}
        for name, value in record.items():
            if name not in (*known, "tag"):
                raise unknown("field of a model", name, known)
            if name != "tag":
                fields[name] = tuple(value) if isinstance(value, list) else value
        if "norm" in fields:
            fields["norm"] = NormSpec.from_json(fields["norm"])
        return cls(**fields)


def convnext_config(size: str, **fields: Any) -> ConvNextConfig:
    """Return the configuration of a named size with other fields; raises UserError for an unknown size."""
    if size not in SIZES:
        raise unknown("size", size, SIZES)
    return ConvNextConfig(**{**SIZES[size], **fields})


class ConvNext(nn.Module):
    """A classifier of images: stem, blocks, and a head on the mean of all places; raises UserError without timm."""

    def __init__(self, config: ConvNextConfig, kernels: Kernels = "plain") -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        host = _build_with_timm(config)
        self.stem, self.head = host.stem, host.head
        self.blocks = nn.ModuleList()
        for stage in host.stages:
            downsampling = [] if isinstance(stage.downsample, nn.Identity) else [stage.downsample]
            self.blocks.extend([*downsampling, *stage.blocks])
        role = Role(kind="mlp", domain="vision")
        for name in [name for name, module in self.named_modules() if looks_like_norm(module)]:
            replace_norm(self, name, config.operator, role)
        for module in self.modules():
            if isinstance(module, Norm):
                module.select_kernels(kernels)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the initial weights."""
        for name, module in self.named_modules():
            if isinstance(module, DeclaredModule):
                module.reset_parameters()
            elif isinstance(module, nn.Conv2d | nn.Linear):
                fill_normal(module.weight, WEIGHT_STD, seed, f"{name}.weight")
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(scale := getattr(module, "gamma", None), Tensor):
                scale.fill_(self.config.layer_scale)

    def forward(self, images: Tensor) -> TransformerOutput:
        """Return the logits, in at least fp32, of images [batch, channels, height, width]."""
        logits = self.head.fc(self.features(images))
        return TransformerOutput(logits.to(torch.promote_types(logits.dtype, torch.float32)), {})

    def features(self, images: Tensor) -> Tensor:
        """Return [batch, dims[-1]]: what the head's projection reads."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        pooled: Tensor = self.head(x, pre_logits=True)
        return pooled


def build_convnext(
    config: ConvNextConfig, *, seed: int = 0, device: str | torch.device = "cpu", kernels: Kernels = "plain"
) -> ConvNext:
    """Return an initialised model; with `device="meta"` nothing is allocated and nothing drawn."""
    return build_initialised(lambda: ConvNext(config, kernels), seed, device)


def _build_with_timm(config: ConvNextConfig) -> Any:
    """Return timm's model, on torch's default device; raises UserError where timm is not installed."""
    return optional("timm.models.convnext", "vision", "ConvNeXt").ConvNeXt(
        in_chans=config.channels,
        num_classes=config.classes,
        depths=config.depths,
        dims=config.dims,
        patch_size=config.patch_size,
        ls_init_value=config.layer_scale,
        drop_path_rate=config.drop_path,
    )
