"""The model of a run, at its newest whole checkpoint or at one of its others, and its card from the run's record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from siamesenorm.data.storage import MANIFEST_FILE, Manifest, read_manifest
from siamesenorm.data.tokenizer import Tokenizer, load_tokenizer
from siamesenorm.errors import UserError
from siamesenorm.interop.native_models import NativeModel, for_use
from siamesenorm.models.language import LanguageModelConfig
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.tasks.task import perplexity
from siamesenorm.topologies import topology_name
from siamesenorm.training.checkpoint import Checkpoint, read_checkpoint
from siamesenorm.training.config import RunConfig
from siamesenorm.training.loss_curve import final_mean, final_steps
from siamesenorm.training.optimizer import OPTIMIZER_TITLES
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.run_record import read_metrics

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
            raise UserError(f"{self.path} is a checkpoint without a run: name a run, a checkpoint in one, or an export")
        config = self.run.read_config()
        if not isinstance(config.task, LanguageTaskConfig):
            raise UserError(f"{self.path} is a run of the task {config.task.tag}: name one of a language model")
        return config

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The newest whole checkpoint of the run, or the one that was named; raises UserError without one."""
        if self.checkpoint_path:
            return read_checkpoint(self.checkpoint_path, groups=GROUPS)
        return self.run.newest_checkpoint(GROUPS)

    @property
    def notes(self) -> tuple[str, ...]:
        """The damaged checkpoints that were skipped."""
        used = f"the older one of step {self.checkpoint.step} is used"
        return tuple(f"{self.path}: a checkpoint was skipped ({reason}), {used}" for reason in self.checkpoint.skipped)

    def contents(self) -> tuple[LanguageModelConfig, dict[str, Tensor]]:
        """Return the configuration, for use, and the weights by their native names."""
        return for_use(self.run_config.task.model), self.checkpoint.tensors["model"]

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the data that the run was trained on."""
        return load_tokenizer(self._prepared()[0])

    def seed(self) -> int:
        """Return the seed of the initial weights."""
        return self.run_config.seed

    def card(self) -> str:
        """Return a model card, written from the record of the run."""
        return model_card(self.run, self.run_config, self.checkpoint.step, self._prepared()[1])

    def _prepared(self) -> tuple[Path, Manifest]:
        """Return the directory of the run's data and their manifest; their tokens need not be there any more."""
        data, wanted = self.data or Path(self.run_config.task.data), self.run_config.task.digest[:12]
        if not (data / MANIFEST_FILE).is_file():
            raise UserError(f"{data}: the run's data with its tokenizer are not there: name their place with --data")
        manifest = read_manifest(data / MANIFEST_FILE)
        if manifest.digest != self.run_config.task.digest:
            raise UserError(
                f"{data} holds other data than the run's (digest {manifest.digest[:12]}, not {wanted}): give --data"
            )
        return data, manifest


def model_card(run: RunDirectory, config: RunConfig, step: int, manifest: Manifest) -> str:
    """Return the card of the checkpoint at `step` as Markdown; raises UserError where the record cannot be read."""
    records = [record for record in read_metrics(run.metrics_file) if record.get("step", 0) <= step]
    introduction = next((record for record in records if record["kind"] == "model"), None)
    if introduction is None:
        raise UserError(f"{run.metrics_file} has no record of the model: restore the run's record")
    origin = config.warm_start and config.warm_start.run[:12]
    model, optimizer, split = config.task.model, config.optimizer, manifest.splits["train"]
    name, parameters, batch = topology_name(model.topology), introduction["parameters"], config.batch * model.context
    newest = next(iter(run.read_environments()), {})  # it may be absent or incomplete
    found = [newest.get(name) for name in ("siamesenorm", "torch", "device")]
    environment = ", siamesenorm {}, torch {}, on {}".format(*found) if None not in found else ""
    facts = {
        "Model": {
            "Topology": f"`{name}`, streams: {', '.join(model.topology.stream_names)}",
            "Norm": f"`{model.norm}`; attention norm `{introduction['attention_norm']}`",
            "Shape": f"{model.depth} blocks of width {model.dim}, {model.heads} heads, {_mlp(model)}",
            "Parameters": f"{parameters:,}, of which {introduction['non_embedding_parameters']:,} outside the "
            "embedding" + (f", and {introduction['active_parameters']:,} active for a token" if model.experts else ""),
            "Context": f"{model.context} tokens",
            "Vocabulary": f"{model.vocabulary:,}, {'tied' if model.tied else 'untied'} head",
        },
        "Training": {
            "Data": f"{Path(manifest.source).name}, {split.tokens:,} tokens in {split.documents:,} documents, digest "
            f"`{manifest.digest[:12]}`",
            "Tokenizer": f"{manifest.tokenizer.name}, {manifest.tokenizer.vocabulary:,} ids",
            "Tokens seen": f"{step * batch:,}, {step * batch / split.tokens:.2f} times the data",
            "Steps": f"{step:,} of {config.steps:,}, {batch:,} tokens each",
            "Optimizer": f"{OPTIMIZER_TITLES[optimizer.name]}, peak learning rate "
            f"{optimizer.learning_rate:g}, {optimizer.shape} after {optimizer.warmup_steps:,} steps of warm-up, weight "
            f"decay {optimizer.weight_decay:g}",
            "Precision": f"{config.precision}, streams in {model.residual_dtype}",
            "Seed": str(config.seed),
            **({"Started from": f"the weights of run `{origin}`; its tokens are not counted here"} if origin else {}),
            "Run": f"`{config.identity[:12]}`{environment}",
        },
        "Result": _results(run, step, records),
    }
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- siamesenorm\n- {name}\n---",
        f"# {introduction['label']}, {parameters / 1e6:,.2f} M parameters",
        f"A decoder-only language model with the residual topology `{name}` ({model.topology.heading}, "
        f"{model.topology.paper}) and the norm `{model.norm}`. This card was written by `siamesenorm export` from the "
        "record of the run.",
        *(f"## {title}\n\n{_table(rows)}" for title, rows in facts.items()),
        LOADING,
        "## Limits",
        "\n".join(f"* {limit}" for limit in _limits(config, manifest)),
    ]
    return "\n\n".join(parts) + "\n"


def _mlp(model: LanguageModelConfig) -> str:
    if model.experts:
        return f"{model.experts} experts of {model.hidden}, {model.active_experts} for a token ({model.activation})"
    return f"MLP {model.hidden} ({model.activation})"


def _results(run: RunDirectory, step: int, records: list[dict[str, Any]]) -> dict[str, str]:
    facts = {}
    if curve := [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]:
        steps, losses = zip(*curve, strict=True)
        last, count = final_mean(steps, losses, steps[-1]), final_steps(steps[-1])
        facts["Training loss"] = f"{last:.4f} nats per token, mean of the last {count} steps"
    if held_out := [record for record in records if record["kind"] == "validation"]:
        newest = held_out[-1]
        facts["Held-out loss"] = (
            f"{newest['loss']:.4f} nats per token (perplexity {perplexity(newest['loss']):.4g}), "
            f"step {newest['step']:,}, over {newest['items']:,} tokens"
        )
    verdict = run.read_verdict()
    facts["Verdict"] = "none: the run is not finished" if verdict is None else verdict.sentence()
    if verdict is not None and step < verdict.steps:
        facts["Verdict"] += f" (on the whole run; these weights are those of step {step:,})"
    return facts


def _limits(config: RunConfig, manifest: Manifest) -> Iterator[str]:
    more = "" if config.warm_start is None else ", after the data of the run it started from"
    yield "A base model: it continues text, follows no instructions, and was neither filtered nor aligned."
    yield f"Trained on {Path(manifest.source).name}{more}, {config.task.model.context} tokens at a time."
    yield "Its code is the package siamesenorm: engines that serve models by code of their own cannot run it."
    yield "Attention is PyTorch's scaled_dot_product_attention, which returns no attention weights."
    if config.precision != "float32":
        yield (
            f"Trained in {config.precision} by autocast over fp32 weights, which are stored: it computes in the dtype "
            "in which it is loaded, and its losses differ from those above by rounding."
        )


def _table(facts: dict[str, str]) -> str:
    rows = (f"| {name} | {value.replace('|', '/')} |" for name, value in facts.items())
    return "\n".join(("| | |", "|---|---|", *rows))
