"""The model of a run, at its newest whole checkpoint or at one of its others, and its card from the run's record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from siamesenorm.data.storage import MANIFEST_FILE, Manifest, read_manifest
from siamesenorm.data.tokenizer import Tokenizer, load_tokenizer
from siamesenorm.errors import UserError
from siamesenorm.files import decode_json
from siamesenorm.interop.native_models import NativeModel, for_use
from siamesenorm.models.language import LanguageModelConfig
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.topologies import topology_name
from siamesenorm.training.checkpoint import Checkpoint, load_checkpoint, read_checkpoint
from siamesenorm.training.config import RunConfig
from siamesenorm.training.metrics import read_metrics
from siamesenorm.training.run_directory import RunDirectory

GROUPS = ("model",)
LOADING = """\
## Loading

```python
import siamesenorm.interop.huggingface  # registers the classes; or pass trust_remote_code=True instead
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

As a native model, without transformers: `siamesenorm.from_pretrained("PATH")`. From the command line:
`siamesenorm generate PATH --prompt "..."`. Both need the package siamesenorm."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel(NativeModel):
    """A run or one of its checkpoints; `data` is its prepared data, where they were moved."""

    checkpoint_path: Path | None = None
    """The checkpoint, with the names of its own directory and the one above."""
    data: Path | None = None

    @cached_property
    def run(self) -> RunDirectory:
        """The directory of the run."""
        return RunDirectory(self.checkpoint_path.parent.parent if self.checkpoint_path else self.path)

    @cached_property
    def run_config(self) -> RunConfig:
        """The configuration of the run."""
        if not self.run.config_file.is_file():
            raise UserError(
                f"{self.path} is a checkpoint, and its run has no {self.run.config_file}: name the directory of a run, "
                "of one of its checkpoints, or of an export"
            )
        config = self.run.read_config()
        if not isinstance(config.task, LanguageTaskConfig):
            raise UserError(f"{self.path} is a run of the task {config.task.tag}: name one of a language model")
        return config

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The newest whole checkpoint of the run, or the one that was named; raises UserError without one."""
        if self.checkpoint_path:
            return read_checkpoint(self.checkpoint_path, groups=GROUPS)
        newest = load_checkpoint(self.run.checkpoints, groups=GROUPS)
        if newest is None:
            raise UserError(f"{self.path} has no checkpoint yet: let the run write one (--execution.checkpoint-every)")
        return newest

    @property
    def notes(self) -> tuple[str, ...]:
        """Say which damaged checkpoints were passed over."""
        used = f"the older one of step {self.checkpoint.step} is used"
        return tuple(f"{self.path}: a checkpoint was skipped ({reason}), {used}" for reason in self.checkpoint.skipped)

    def config(self) -> LanguageModelConfig:
        """Return the configuration, for use."""
        return for_use(self.run_config.task.model)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by their native names."""
        return self.checkpoint.tensors["model"]

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the data that the run was trained on."""
        self._manifest()
        return load_tokenizer(self._data)

    def seed(self) -> int:
        """Return the seed of the initial weights."""
        return self.run_config.seed

    def card(self) -> str:
        """Return a model card, written from the record of the run."""
        return model_card(self.run, self.run_config, self.checkpoint.step, self._manifest())

    @property
    def _data(self) -> Path:
        return self.data or Path(self.run_config.task.data)

    def _manifest(self) -> Manifest:
        """Return the manifest of the run's data; their tokens need not be there any more."""
        file = self._data / MANIFEST_FILE
        if not file.is_file():
            raise UserError(
                f"{self._data}: the run's data with its tokenizer are not there: name their place with --data"
            )
        manifest = read_manifest(file)
        if manifest.digest != self.run_config.task.digest:
            raise UserError(
                f"{self._data} holds other data than the run was trained on (digest {manifest.digest[:12]}, not "
                f"{self.run_config.task.digest[:12]}): name their place with --data"
            )
        return manifest


def model_card(run: RunDirectory, config: RunConfig, step: int, manifest: Manifest) -> str:
    """Return the card of the checkpoint at `step` as Markdown; raises UserError where the record cannot be read."""
    records = [record for record in read_metrics(run.metrics_file) if record.get("step", 0) <= step]
    introduction = next((record for record in records if record["kind"] == "model"), None)
    if introduction is None:
        raise UserError(f"{run.metrics_file} has no record of the model: restore the run's record")
    name = topology_name(config.task.model.topology)
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- siamesenorm\n- {name}\n---",
        f"# {introduction['label']}, {_count(introduction['parameters'])} parameters",
        f"A decoder-only language model with the residual topology `{name}` ({config.task.model.topology.heading}, "
        f"{config.task.model.topology.paper}) and the norm `{config.task.model.norm}`. This card was written by "
        "`siamesenorm export` from the record of the run.",
        "## Model",
        _table(_model_facts(config, introduction)),
        "## Training",
        _table(_training_facts(run, config, step, manifest)),
        "## Result",
        _table(_result_facts(run, config, step, records)),
        LOADING,
        "## Limits",
        _limits(config, manifest),
    ]
    return "\n\n".join(parts) + "\n"


def _model_facts(config: RunConfig, introduction: dict[str, Any]) -> dict[str, str]:
    model = config.task.model
    return {
        "Topology": f"`{topology_name(model.topology)}`, streams: {', '.join(model.topology.stream_names)}",
        "Norm": f"`{model.norm}`; attention norm `{introduction['attention_norm']}`",
        "Shape": f"{model.depth} blocks of width {model.dim}, {model.heads} heads, MLP {model.hidden} "
        f"({model.activation})",
        "Parameters": f"{introduction['parameters']:,}, of which {introduction['non_embedding_parameters']:,} outside "
        "the embedding",
        "Context": f"{model.context} tokens",
        "Vocabulary": f"{model.vocabulary:,}, {'tied' if model.tied else 'untied'} head",
    }


def _training_facts(run: RunDirectory, config: RunConfig, step: int, manifest: Manifest) -> dict[str, str]:
    split, optimizer, seen = manifest.splits["train"], config.optimizer, step * config.batch * config.task.model.context
    return {
        "Data": f"{Path(manifest.source).name}, {split.tokens:,} tokens in {split.documents:,} documents, "
        f"digest `{manifest.digest[:12]}`",
        "Tokenizer": f"{manifest.tokenizer.name}, {manifest.tokenizer.vocabulary:,} ids",
        "Tokens seen": f"{seen:,}, {seen / split.tokens:.2f} times the data",
        "Steps": f"{step:,} of {config.steps:,}, {config.batch * config.task.model.context:,} tokens each",
        "Optimizer": f"AdamW, peak learning rate {optimizer.learning_rate:g}, {optimizer.shape} after "
        f"{optimizer.warmup_steps:,} steps of warm-up, weight decay {optimizer.weight_decay:g}",
        "Precision": f"{config.precision}, streams in {config.task.model.residual_dtype}",
        "Seed": str(config.seed),
        **_origin(config),
        "Run": f"`{config.identity[:12]}`{_environment(run)}",
    }


def _origin(config: RunConfig) -> dict[str, str]:
    if config.warm_start is None:
        return {}
    return {"Started from": f"the weights of run `{config.warm_start.run[:12]}`; its tokens are not counted here"}


def _environment(run: RunDirectory) -> str:
    try:
        found = decode_json(run.environment_file.read_bytes())
        return f", siamesenorm {found['siamesenorm']}, torch {found['torch']}, on {found['device']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _result_facts(run: RunDirectory, config: RunConfig, step: int, records: list[dict[str, Any]]) -> dict[str, str]:
    facts = {}
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    last = losses[-max(1, len(losses) // 10) :]
    if last:
        facts["Training loss"] = f"{sum(last) / len(last):.4f} nats a token, mean of the last {len(last)} steps"
    held_out = [record for record in records if record["kind"] == "validation"]
    if held_out:
        newest = held_out[-1]
        facts["Held-out loss"] = (
            f"{newest['loss']:.4f} nats a token (perplexity {_perplexity(newest['loss'])}), step {newest['step']:,}, "
            f"over {newest['items']:,} tokens"
        )
    verdict = run.read_verdict()
    facts["Verdict"] = "none: the run is not finished" if verdict is None else verdict.sentence()
    if verdict is not None and step < verdict.steps:
        facts["Verdict"] += f" (on the whole run; these weights are those of step {step:,})"
    return facts


def _limits(config: RunConfig, manifest: Manifest) -> str:
    alone = "nothing else" if config.warm_start is None else "what the run it started from has seen"
    lines = [
        "* A base model: it continues text, follows no instructions, and was neither filtered nor aligned.",
        f"* It has seen {Path(manifest.source).name} and {alone}, {config.task.model.context} tokens at a time.",
        "* Its code is the package siamesenorm: engines that serve models by code of their own cannot run it.",
        "* Attention is PyTorch's scaled_dot_product_attention; attention weights cannot be put out.",
    ]
    if config.precision != "float32":
        lines.append(
            f"* Trained in {config.precision} by autocast over fp32 weights, which are stored: it computes in the "
            "dtype in which it is loaded, and its losses differ from those above by rounding."
        )
    return "\n".join(lines)


def _table(facts: dict[str, str]) -> str:
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {value.replace('|', '/')} |" for name, value in facts.items())]
    )


def _count(number: int) -> str:
    """Return a count with three digits and a unit: 1.08 M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.2f}" if loss < 100 else "beyond e^100"
