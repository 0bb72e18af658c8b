"""What a person asks for, with names where a configuration has objects; `resolve` makes a configuration of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from typing_extensions import Doc

from siamesenorm.data import PreparedData
from siamesenorm.errors import unknown
from siamesenorm.models.initialisation import Initialisation
from siamesenorm.models.language_config import LanguageModelConfig, language_model_config
from siamesenorm.models.sizes import SIZES, size_fields
from siamesenorm.norms import available_norms
from siamesenorm.sublayers.mlp import Activation
from siamesenorm.topologies import AttentionNorm, Kernels, available_topologies
from siamesenorm.training.compiler import compiler_for_cpu
from siamesenorm.training.config import Execution, OptimizerConfig, Precision, RunConfig

# The help of a command lists what the registries hold.
SizeName = Annotated[str, Doc(f"Named size: {', '.join(SIZES)}.")]
TopologyName = Annotated[
    str, Doc(f"Topology, with options as in dhc-2:streams=4: {', '.join(available_topologies())}.")
]
NormName = Annotated[
    str | None,
    Doc(
        f"Operator, with options as in seednorm:heads=4: {', '.join(available_norms())}; "
        "rmsnorm unless the size says otherwise."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A size, and what to change in it; None keeps what the size says."""

    size: SizeName = "mini"
    topology: TopologyName = "siamese"
    norm: NormName = None
    attention_norm: AttentionNorm = "auto"
    """Norm inside the attention; auto is what the topology needs, else whole-width QK-norm."""
    depth: int | None = None
    """Number of blocks."""
    dim: int | None = None
    """Width of the residual streams."""
    heads: int | None = None
    """Attention heads."""
    kv_heads: int | None = None
    """Key/value heads."""
    hidden: int | None = None
    """Width of the MLP."""
    context: int | None = None
    """Tokens of a sequence."""
    vocabulary: int | None = None
    """Number of token ids; that of the data unless the size has one."""
    activation: Activation | None = None
    """Kind of MLP."""
    initialisation: Initialisation | None = None
    """Distribution of the initial weights."""
    tied: bool | None = None
    """Whether the head shares the embedding's weights."""
    dropout: float | None = None
    """Dropout on the embedding and on the output of every sublayer."""
    document_mask: bool | None = None
    """Whether attention stays inside a document of a packed sequence."""
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the residual streams."""
    kernels: Kernels = "auto"
    """Boundaries between sublayers: plain PyTorch, fused or lean operators; auto is fused on a GPU, plain on a CPU."""

    def resolve(self, vocabulary: int, compute_dtype: str) -> LanguageModelConfig:
        """Return the model's configuration; raises UserError for what cannot be built."""
        named = {"size", "topology", "norm"}
        fields: dict[str, Any] = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name not in named and getattr(self, each.name) is not None
        }
        if "vocabulary" not in size_fields(self.size):
            fields.setdefault("vocabulary", vocabulary)
        return language_model_config(
            self.size, topology=self.topology, norm=self.norm, compute_dtype=compute_dtype, **fields
        )


Compile = Literal["auto", "on", "off"]
COMPILING_PAYS = 2e14
"""Operations of training from which compiling saves more than it costs: 2 to 4 % of a step of width 512 (performance
page) against 15 to 30 s for the first call, or more on a loaded machine, at some 1e11 operations a second."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run as a person asks for it."""

    data: Path
    """Directory of prepared data."""
    model: ModelPlan = ModelPlan()
    """The model."""
    optimizer: OptimizerConfig = OptimizerConfig(warmup_steps=40)
    """AdamW and its schedule."""
    steps: int = 400
    """Optimizer steps."""
    batch_tokens: int = 2048
    """Tokens of an optimizer step."""
    micro_batch_tokens: int = 0
    """Tokens that go through the model at once, the rest is accumulated; 0 is the whole batch."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    precision: Precision = "float32"
    """Precision of the sublayers; bfloat16 keeps fp32 weights."""
    compile: Compile = "auto"
    """Compile the blocks; auto does on a CPU with a C++ compiler, for runs so long that it pays."""
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    validation_every: int = 100
    """Steps between evaluations on the validation split."""
    validation_tokens: int = 65_536
    """Tokens of an evaluation."""
    stop_early: bool = True
    """End a run once it has diverged for longer than the patience."""
    execution: Execution = field(default=Execution())
    """How the run is carried out; not part of its identity."""

    def resolve(self) -> RunConfig:
        """Return the run's configuration; raises UserError for data that are not there and for what cannot be run."""
        data = PreparedData.open(self.data)
        return self.of_model(data, self.model.resolve(data.vocabulary, self.precision))

    def of_model(self, data: PreparedData, model: LanguageModelConfig) -> RunConfig:
        """Return the run of a model on data; raises UserError for data that do not fit and for what cannot be run."""
        if self.compile not in get_args(Compile):
            raise unknown("compile", str(self.compile), get_args(Compile))
        data.require_vocabulary(model.vocabulary)
        if model.kernels == "auto" and self.execution.device == "cpu":
            model = dataclasses.replace(model, kernels="plain")
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(RunPlan) if each.name != "data"}
        fields["compile"] = self.compile == "on" or (self.compile == "auto" and self._pays_to_compile(model))
        return RunConfig(**{**fields, "model": model, "data_path": data.path.resolve(), "data_digest": data.digest})

    def _pays_to_compile(self, model: LanguageModelConfig) -> bool:
        operations = 6 * model.depth * model.dim * (4 * model.dim + 3 * model.hidden) * self.steps * self.batch_tokens
        return self.execution.device == "cpu" and operations >= COMPILING_PAYS and compiler_for_cpu() is not None


def presets(data: Path) -> dict[str, RunPlan]:
    """Return the named recipes on prepared data: `mini` for a CPU, `paper` the SiameseNorm paper's Table 4."""
    return {
        "mini": RunPlan(data=data),
        "paper": RunPlan(
            data=data,
            model=ModelPlan(size="olmo-1.3b"),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2000, decay="all-but-embeddings"),
            steps=95_367,
            batch_tokens=512 * 2048,
            micro_batch_tokens=16 * 2048,
            precision="bfloat16",
            compile="on",
            validation_every=1000,
            validation_tokens=2**21,
            execution=Execution(device="cuda", checkpoint_every=1000),
        ),
    }
