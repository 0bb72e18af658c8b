"""The model of a run, at its newest checkpoint or at one of its others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from siamesenorm.data.manifest import MANIFEST_FILE, Manifest, read_manifest
from siamesenorm.data.tokenizer import Tokenizer, load_tokenizer
from siamesenorm.errors import UserError
from siamesenorm.interop.model_card import model_card
from siamesenorm.interop.model_directory import ModelDirectory
from siamesenorm.interop.stored_model import KINDS, for_use
from siamesenorm.models.language import LanguageModelConfig
from siamesenorm.training.checkpoint import Checkpoint, load_checkpoint, read_checkpoint
from siamesenorm.training.config import RunConfig
from siamesenorm.training.run_directory import RunDirectory

GROUPS = ("model",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A checkpoint of a run, and what the run's record says about it; see `StoredModel`."""

    path: Path
    run: RunDirectory
    run_config: RunConfig
    checkpoint: Checkpoint
    data: Path

    @classmethod
    def of(cls, found: ModelDirectory, data: Path | None = None) -> TrainedModel:
        """Return the newest checkpoint of the run that was found, or the checkpoint; raises UserError without one."""
        path, own = found.path, found.full_path if found.kind == "checkpoint" else None
        run = RunDirectory(own.parent.parent if own else path)
        if not run.config_file.is_file():
            raise UserError(f"{path} is a checkpoint, and its run has no {run.config_file}: {KINDS}")
        config = run.read_config()
        checkpoint = read_checkpoint(own, groups=GROUPS) if own else load_checkpoint(run.checkpoints, groups=GROUPS)
        if checkpoint is None:
            raise UserError(f"{path} has no checkpoint yet: let the run write one (--execution.checkpoint-every)")
        return cls(path=path, run=run, run_config=config, checkpoint=checkpoint, data=data or config.task.data)

    def config(self) -> LanguageModelConfig:
        """Return the configuration, for use."""
        return for_use(self.run_config.task.model)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by their native names."""
        return self.checkpoint.tensors["model"]

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the data that the run was trained on."""
        self._manifest()
        return load_tokenizer(self.data)

    def seed(self) -> int:
        """Return the seed of the initial weights."""
        return self.run_config.seed

    def card(self) -> str:
        """Return a model card, written from the record of the run."""
        return model_card(self.run, self.run_config, self.checkpoint.step, self._manifest())

    def _manifest(self) -> Manifest:
        """Return the manifest of the run's data; their tokens need not be there any more."""
        file = self.data / MANIFEST_FILE
        if not file.is_file():
            raise UserError(
                f"{self.data}: the run's data with its tokenizer are not there: name their place with --data"
            )
        manifest = read_manifest(file)
        if manifest.digest != self.run_config.task.digest:
            raise UserError(
                f"{self.data} holds other data than the run was trained on (digest {manifest.digest[:12]}, not "
                f"{self.run_config.task.digest[:12]}): name their place with --data"
            )
        return manifest
