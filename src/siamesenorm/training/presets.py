"""Named runs to begin from: `mini` and `digits` for a CPU, `paper` the SiameseNorm paper's Table 4."""

from __future__ import annotations

from typing import Any

from siamesenorm.models.language import language_model_config
from siamesenorm.tasks.classification import ClassificationTaskConfig
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.optimizer import OptimizerConfig


def presets(data: Any) -> dict[str, RunConfig]:
    """Return the runs by name; those on text are of the prepared data in `data`."""
    return {
        "mini": RunConfig(
            task=LanguageTaskConfig(data=data, model=language_model_config("mini", vocabulary=0)),
            optimizer=OptimizerConfig(warmup_steps=40),
            steps=400,
            batch=16,
        ),
        "digits": RunConfig(
            task=ClassificationTaskConfig(),
            optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=20),
            steps=300,
            batch=64,
            validation_every=50,
        ),
        "paper": RunConfig(
            task=LanguageTaskConfig(data=data, model=language_model_config("olmo-1.3b"), validation_tokens=2**21),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2000, decay="all-but-embeddings"),
            steps=95_367,
            batch=512,
            micro_batch=16,
            precision="bfloat16",
            validation_every=1000,
            execution=Execution(device="cuda", compile="on", checkpoint_every=1000),
        ),
    }
