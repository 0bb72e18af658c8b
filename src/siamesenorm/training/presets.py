"""Named runs that `siamesenorm train` and `siamesenorm sweep` begin from; every field can be overridden.

What a run needs is imported where it is built: the list of names costs no import of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from siamesenorm.training.config import RunConfig


class Preset(NamedTuple):
    """A sentence for people, and a function that returns the run for a path of data, which it may not need."""

    summary: str
    build: Callable[[Any], RunConfig]


def mini(data: Any) -> RunConfig:
    """Return a run of a small language model on the prepared data in `data`."""
    from siamesenorm.models.language import language_model_config
    from siamesenorm.tasks.language import LanguageTaskConfig
    from siamesenorm.training.config import RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    return RunConfig(
        task=LanguageTaskConfig(data=data, model=language_model_config("mini", vocabulary=0)),
        optimizer=OptimizerConfig(warmup_steps=40),
        steps=400,
        batch=16,
    )


def mini_moe(data: Any) -> RunConfig:
    """Return a run of a small mixture of experts on the prepared data in `data`."""
    from siamesenorm.models.language import language_model_config
    from siamesenorm.tasks.language import LanguageTaskConfig
    from siamesenorm.training.config import RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    return RunConfig(
        task=LanguageTaskConfig(data=data, model=language_model_config("mini-moe", vocabulary=0)),
        optimizer=OptimizerConfig(warmup_steps=40),
        steps=300,
        batch=8,
    )


def digits(data: Any) -> RunConfig:
    """Return a run of a vision Transformer on scikit-learn's digits."""
    from siamesenorm.tasks.classification import ClassificationTaskConfig
    from siamesenorm.training.config import RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    return RunConfig(
        task=ClassificationTaskConfig(),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=20),
        steps=300,
        batch=64,
        validation_every=50,
    )


def cifar(data: Any) -> RunConfig:
    """Return a run of a small vision Transformer on 10,000 images of 32 x 32 pixels in `data`, eight epochs."""
    from siamesenorm.data.augmentation import Augmentation
    from siamesenorm.models.vision import VisionTransformerConfig
    from siamesenorm.tasks.classification import ClassificationTaskConfig
    from siamesenorm.training.config import RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    model = VisionTransformerConfig(
        depth=8, dim=64, heads=2, hidden=128, activation="gelu", bias=True, image_size=32, patch_size=4, classes=10
    )
    return RunConfig(
        task=ClassificationTaskConfig(data=data, model=model, augmentation=Augmentation(crop="pad", flip=0.5)),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
        steps=1250,
        batch=64,
        validation_every=625,
    )


def digits_mae(data: Any) -> RunConfig:
    """Return a run of a masked autoencoder on scikit-learn's digits."""
    from siamesenorm.tasks.autoencoding import AutoencodingTaskConfig
    from siamesenorm.training.config import RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    return RunConfig(
        task=AutoencodingTaskConfig(),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=20, weight_decay=0.05),
        steps=600,
        batch=64,
        validation_every=100,
    )


def mae_b(data: Any) -> RunConfig:
    """Return the pre-training of MAE's ViT-B (arXiv 2111.06377), 800 epochs of ImageNet, on the images in `data`."""
    from siamesenorm.data.augmentation import Augmentation
    from siamesenorm.models.masked_autoencoder import masked_autoencoder_config
    from siamesenorm.tasks.autoencoding import AutoencodingTaskConfig
    from siamesenorm.training.config import Execution, RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    return RunConfig(
        task=AutoencodingTaskConfig(
            data=data,
            model=masked_autoencoder_config("mae-b"),
            fit="resize",
            crop_fraction=0.875,
            augmentation=Augmentation(crop="resized", least_area=0.2, flip=0.5),
        ),
        optimizer=OptimizerConfig(
            learning_rate=1.5e-4 * 4096 / 256, warmup_steps=40 * 312, final_fraction=0.0, weight_decay=0.05, clip=0.0
        ),
        steps=800 * 312,
        batch=4096,
        precision="bfloat16",
        validation_every=3120,
        execution=Execution(device="cuda", compile="on", checkpoint_every=1560),
    )


def deit_s(data: Any) -> RunConfig:
    """Return DeiT-S (arXiv 2012.12877) with SiameseNorm, 300 epochs of ImageNet, on the images in `data`."""
    from siamesenorm.data.augmentation import Augmentation
    from siamesenorm.models.vision import vision_transformer_config
    from siamesenorm.tasks.classification import ClassificationTaskConfig
    from siamesenorm.training.config import Execution, RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    return RunConfig(
        task=ClassificationTaskConfig(
            data=data,
            model=vision_transformer_config("vit-s", drop_path=0.1),
            fit="resize",
            crop_fraction=0.875,
            augmentation=Augmentation(
                crop="resized", flip=0.5, magnitude=9, erasing=0.25, mixup=0.8, cutmix=1.0, repeats=3,
                label_smoothing=0.1,
            ),
        ),
        optimizer=OptimizerConfig(
            learning_rate=5e-4 * 1024 / 512, warmup_steps=5 * 1251, final_fraction=0.01, beta2=0.999, weight_decay=0.05,
            clip=0.0,
        ),
        steps=300 * 1251,
        batch=1024,
        precision="bfloat16",
        ema=0.99996,
        validation_every=1251,
        execution=Execution(device="cuda", compile="on", checkpoint_every=1251),
    )  # fmt: skip


def convnext_b(data: Any) -> RunConfig:
    """Return the run of ConvNeXt-B's paper (arXiv 2201.03545, Table 5) on ImageNet, given by `data`; it was not run."""
    from siamesenorm.data.augmentation import Augmentation
    from siamesenorm.models.convnext import convnext_config
    from siamesenorm.tasks.classification import ClassificationTaskConfig
    from siamesenorm.training.config import Execution, RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    steps = 1_281_167 // 4096  # of an epoch
    augmentation = Augmentation(
        crop="resized", flip=0.5, magnitude=9.0, erasing=0.25, mixup=0.8, cutmix=1.0, label_smoothing=0.1
    )
    model = convnext_config("convnext-b", drop_path=0.5)
    return RunConfig(
        task=ClassificationTaskConfig(
            data=data, model=model, fit="resize", crop_fraction=0.875, augmentation=augmentation
        ),
        optimizer=OptimizerConfig(
            learning_rate=4e-3, warmup_steps=20 * steps, final_fraction=0.0, beta2=0.999, weight_decay=0.05, clip=0.0
        ),
        steps=300 * steps,
        batch=4096,
        micro_batch=256,
        precision="bfloat16",
        ema=0.9999,
        validation_every=10 * steps,
        execution=Execution(device="cuda", checkpoint_every=steps),
    )


def paper(data: Any) -> RunConfig:
    """Return the run of the SiameseNorm paper's Table 4 on the prepared data in `data`."""
    from siamesenorm.models.language import language_model_config
    from siamesenorm.tasks.language import LanguageTaskConfig
    from siamesenorm.training.config import Execution, RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    return RunConfig(
        task=LanguageTaskConfig(data=data, model=language_model_config("olmo-1.3b"), validation_tokens=2**21),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2000, decay="all-but-embeddings"),
        steps=95_367,
        batch=512,
        micro_batch=16,
        precision="bfloat16",
        validation_every=1000,
        execution=Execution(device="cuda", compile="on", checkpoint_every=1000),
    )


def digits_dit(data: Any) -> RunConfig:
    """Return a run of a diffusion Transformer on scikit-learn's digits."""
    from siamesenorm.tasks.diffusion import DiffusionTaskConfig
    from siamesenorm.training.config import RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    return RunConfig(
        task=DiffusionTaskConfig(),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, weight_decay=0.0),
        steps=1500,
        batch=64,
        ema=0.995,
        validation_every=250,
    )


def mnist_dit(data: Any) -> RunConfig:
    """Return a run of a diffusion Transformer on MNIST's images in `data`."""
    from siamesenorm.models.diffusion import DiffusionTransformerConfig
    from siamesenorm.tasks.diffusion import DiffusionTaskConfig
    from siamesenorm.training.config import RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    model = DiffusionTransformerConfig(
        depth=8, dim=64, heads=4, hidden=256, image_size=28, patch_size=4, channels=1, classes=10
    )
    return RunConfig(
        task=DiffusionTaskConfig(data=data, model=model, validation_images=500),
        optimizer=OptimizerConfig(learning_rate=1.2e-2, warmup_steps=50, weight_decay=0.0),
        steps=500,
        batch=32,
        ema=0.99,
        validation_every=100,
    )


def dit_l_4(data: Any) -> RunConfig:
    """Return the run of DiT-L/4 in the SiameseNorm paper on latents of the images in `data`."""
    from siamesenorm.models.diffusion import diffusion_transformer_config
    from siamesenorm.tasks.diffusion import DiffusionTaskConfig
    from siamesenorm.training.config import Execution, RunConfig
    from siamesenorm.training.optimizer import OptimizerConfig

    return RunConfig(
        task=DiffusionTaskConfig(
            data=data, vae="vae", model=diffusion_transformer_config("dit-l-4"), flip=0.5, validation_images=5000
        ),
        optimizer=OptimizerConfig(learning_rate=1e-4, shape="constant", beta2=0.999, weight_decay=0.0, clip=0.0),
        steps=400_000,
        batch=256,
        precision="bfloat16",
        ema=0.9999,
        validation_every=5000,
        execution=Execution(device="cuda", compile="on", checkpoint_every=5000),
    )


PRESETS: dict[str, Preset] = {
    "mini": Preset("a small language model on a CPU: minutes", mini),
    "mini-moe": Preset("a small mixture of experts on a CPU: minutes", mini_moe),
    "digits": Preset("a vision Transformer on scikit-learn's digits: a minute on a CPU", digits),
    "digits-dit": Preset("a diffusion Transformer on scikit-learn's digits: two minutes on a CPU", digits_dit),
    "mnist-dit": Preset("a diffusion Transformer on MNIST, given by --data: minutes on a CPU", mnist_dit),
    "dit-l-4": Preset("DiT-L/4 on latents of ImageNet, given by --data and --vae, on GPUs", dit_l_4),
    "cifar": Preset("a vision Transformer on images of 32 x 32 pixels in ten classes: minutes on a CPU", cifar),
    "deit-s": Preset("DeiT-S by its recipe: 300 epochs of ImageNet, on GPUs", deit_s),
    "digits-mae": Preset("a masked autoencoder on scikit-learn's digits: a minute on a CPU", digits_mae),
    "mae-b": Preset("MAE's pre-training of ViT-B: 800 epochs of ImageNet, on GPUs", mae_b),
    "convnext-b": Preset("ConvNeXt-B on ImageNet, given by --data: 300 epochs, on GPUs", convnext_b),
    "paper": Preset("Table 4 of the SiameseNorm paper: 1.3 B parameters, 100 B tokens, on GPUs", paper),
}
"""The runs by name."""


def presets(data: Any) -> dict[str, RunConfig]:
    """Return all named runs; those on text or images of the user's are of the data in `data`."""
    return {name: preset.build(data) for name, preset in PRESETS.items()}
