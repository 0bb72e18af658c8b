"""AdamW, or Muon for the matrices and AdamW for the rest: groups, one schedule, and the state in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError, unknown
from siamesenorm.norms import declared_parameters
from siamesenorm.sublayers.sublayer import Projection
from siamesenorm.training.robust_statistics import RunningMedian
from siamesenorm.world import ALONE, World, by_mesh, norms_of, whole

Shape = Literal["cosine", "linear", "wsd", "constant"]
Decay = Literal["declared", "all-but-embeddings"]
OptimizerName = Literal["adamw", "muon"]
OPTIMIZER_TITLES: dict[OptimizerName, str] = {"adamw": "AdamW", "muon": "Muon for hidden matrices, AdamW for the rest"}
OUTER_ROLES = ("head", "router", "other")
"""Roles of projections that are no hidden matrices: their inputs or outputs are classes, experts, pixels or times."""
SKIP_WINDOW, SKIP_HISTORY = 128, 16
"""Gradient norms in the median that skipped steps exceed, and those before the first step that can exceed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule; the defaults are the SiameseNorm paper's (arXiv 2602.08064, Table 4) but warm-up.

    With "muon" the hidden matrices are trained by Muon (arXiv 2502.16982) and the rest by AdamW, at one learning rate:
    Muon's updates are scaled to the root mean square of AdamW's, 0.2 sqrt(max(rows, columns)).
    """

    name: OptimizerName = "adamw"
    """AdamW for all, or Muon for the hidden matrices of attention and MLPs and AdamW for the rest."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int = 0
    """Steps of linear warm-up (the paper: 2000)."""
    shape: Shape = "cosine"
    """Shape of the schedule after the warm-up."""
    final_fraction: float = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """Part of the run in which the wsd schedule decays."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Decay of AdamW's mean of squares."""
    momentum: float = 0.95
    """Decay of Muon's mean of gradients (Nesterov)."""
    epsilon: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    decay: Decay = "declared"
    """What is decayed: matrices and what declares it, or, as in OLMo, everything but embeddings."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    skip_above: float = 0.0
    """Skip an update whose gradient norm before clipping is not finite or above this many medians of the last 128; 0
    skips none."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epsilon"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} is {value}: choose a positive number, such as 1e-3")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} is {value}: choose a number of at least 0")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: choose a number from 0 to below 1")
        if self.skip_above and not 1 < self.skip_above < math.inf:
            raise UserError(f"skip_above is {self.skip_above}: choose a number above 1, such as 5, or 0 to skip none")
        if self.name not in get_args(OptimizerName):
            raise unknown("optimizer", self.name, get_args(OptimizerName))
        if self.decay not in get_args(Decay):
            raise unknown("decay", self.decay, get_args(Decay))

    def schedule(self, steps: int) -> Schedule:
        """Return the schedule of a run of this many steps; raises UserError for values that make none."""
        return Schedule(config=self, total_steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    r"""The learning rate as a pure function of the step: the factor on the peak.

    Updates are counted from 1, as in `metrics.jsonl`: update `warmup_steps` is the first at the peak, update
    `total_steps` the last, at `final_fraction` (all shapes but "constant").

    With warm-up \(w\), total \(T\), final fraction \(f\) and progress \(p = (t - w) / (T - w)\):

    * warm-up: \(t / w\) for \(t < w\);
    * cosine: \(f + (1 - f)(1 + \cos \pi p) / 2\), as OLMo (arXiv 2402.00838);
    * linear: \(1 - (1 - f) p\);
    * wsd: 1, then linear to \(f\) over the last `decay_fraction` of \(T\) (arXiv 2404.06395, 2405.18392);
    * constant: 1.

    Raises `UserError` on values that make no schedule.
    """

    config: OptimizerConfig
    total_steps: int

    def __post_init__(self) -> None:
        config, steps = self.config, self.total_steps
        if config.shape not in get_args(Shape):
            raise unknown("schedule", config.shape, get_args(Shape))
        if steps < 1:
            raise UserError(f"total_steps is {steps}: a schedule needs at least one step")
        if not 0 <= config.warmup_steps < steps:
            raise UserError(
                f"optimizer.warmup_steps is {config.warmup_steps}: choose from 0 to less than the {steps} steps"
            )
        if not 0 <= config.final_fraction <= 1:
            raise UserError(f"final_fraction is {config.final_fraction}: it must be between 0 and 1")
        most = 1 - config.warmup_steps / steps
        if config.shape == "wsd" and not 0 < config.decay_fraction <= most + 1e-9:
            raise UserError(
                f"decay_fraction is {config.decay_fraction}: with {config.warmup_steps} of {steps} steps of warm-up "
                f"it must be above 0 and at most {most:g}"
            )

    def factor(self, step: int) -> float:
        """Return the factor at update `step`, counted from 1; past the end the last value holds.

        Step 0 is where the warm-up starts: 0, or without warm-up the peak. Raises `ValueError` below that.
        """
        config = self.config
        if step < 0:
            raise ValueError(f"step is {step}: steps are counted from 1")
        if step < config.warmup_steps:
            return step / config.warmup_steps
        if config.shape == "constant":
            return 1.0
        start = float(config.warmup_steps)
        if config.shape == "wsd":
            start = self.total_steps * (1 - config.decay_fraction)
        progress = max(0.0, (min(step, self.total_steps) - start) / (self.total_steps - start))
        remaining = (1 + math.cos(math.pi * progress)) / 2 if config.shape == "cosine" else 1 - progress
        return config.final_fraction + (1 - config.final_fraction) * remaining


def decayed_parameters(model: nn.Module, rule: str) -> dict[str, bool]:
    """Return for every trained parameter, by name, whether weight decay applies.

    "declared": matrices of projections, and parameters declared as decayed; neither biases nor embeddings.
    "all-but-embeddings": everything but embeddings, gains and biases included, as in OLMo. A tied head is an embedding.
    """
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    declared = {id(parameter): declaration.decay for _, parameter, declaration in declared_parameters(model)}
    decisions: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings:
            decisions[name] = False
        elif rule == "all-but-embeddings":
            decisions[name] = True
        else:
            decisions[name] = declared.get(id(parameter), parameter.ndim >= 2)
    return decisions


def hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of the matrices that Muon trains: weights of the projections of attention and MLPs.

    Embeddings, heads, routers and biases are not among them, nor experts, whose weights have three dimensions.
    """
    return {
        f"{prefix}.weight"
        for prefix, module in model.named_modules()
        if isinstance(module, Projection) and module.role not in OUTER_ROLES and module.weight.ndim == 2
    }


def build_optimizers(
    model: nn.Module, config: OptimizerConfig, rate_factors: Mapping[str, float] | None = None
) -> tuple[torch.optim.Optimizer, ...]:
    """Return AdamW, and Muon behind it if it is chosen: every trained parameter is in one group of one of them.

    `rate_factors` multiply the learning rate of parameters by name; a missing one is 1. Raises UserError for Muon on a
    model that has nothing for it.
    """
    decisions, factors = decayed_parameters(model, config.decay), rate_factors or {}
    matrices = hidden_matrices(model) & decisions.keys() if config.name == "muon" else set()
    if config.name == "muon" and not matrices:
        raise UserError("optimizer muon: this model has no matrices of attention or MLPs: use adamw")
    rest = [name for name in decisions if name not in matrices]
    adamw = torch.optim.AdamW(
        _groups(model, config, rest, decisions, factors),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
    if not matrices:
        return (adamw,)
    ordered = [name for name in decisions if name in matrices]
    muon = torch.optim.Muon(
        _groups(model, config, ordered, decisions, factors),
        lr=config.learning_rate,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return adamw, muon


def _groups(
    model: nn.Module,
    config: OptimizerConfig,
    names: Sequence[str],
    decisions: Mapping[str, bool],
    factors: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Return a group for each weight decay, learning rate and mesh, in the order of the names."""
    named = dict(model.named_parameters())
    names_of: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
    groups: list[dict[str, Any]] = [
        {
            "params": [(n, named[n]) for n in names if (decisions[n], factors.get(n, 1.0)) == (decayed, factor)],
            "weight_decay": config.weight_decay if decayed else 0.0,
            "rate_factor": factor,
        }
        for factor in dict.fromkeys(factors.get(name, 1.0) for name in decisions)
        for decayed in (True, False)
    ]
    return [
        {**group, "params": [(names_of[each], each) for each in part]}
        for group in groups
        for part in by_mesh(parameter for _, parameter in group["params"])
    ]


class SpikeFilter:
    """Decides by the norms of gradients before clipping which updates to skip.

    Skipped are those with a norm that is not finite, or above `multiple` times the median of the last 128 finite norms,
    skipped ones included: a lasting change of the norms is accepted after 64 steps. The first 16 norms are never too
    large, and a multiple of 0 skips none. OLMo-core's SkipStepAdamW compares with mean and standard deviation instead.
    """

    def __init__(self, multiple: float) -> None:
        self.multiple, self._recent = multiple, RunningMedian(SKIP_WINDOW)

    def skips(self, norm: float, world: World = ALONE) -> bool:
        """Return whether to skip the update with this norm, and remember the norm; one process decides for all."""
        if not self.multiple:
            return False
        finite, known = math.isfinite(norm), len(self._recent) >= SKIP_HISTORY
        skipped = not finite or (known and norm > self.multiple * self._recent.median)
        if finite:
            self._recent.push(norm)
        return bool(world.largest(skipped))  # rounding may differ between devices


def clip_gradients(model: nn.Module, limit: float) -> tuple[Tensor, list[Tensor]]:
    """Scale the gradients so that their norm is at most `limit`; return their norm before, and that of every gradient.

    The first is in one piece. The others are in a tensor for each mesh, in the order of the parameters that have one.
    """
    meshes = by_mesh(model.parameters())
    separate = [norms_of([each.grad for each in part if each.grad is not None]) for part in meshes]
    norms = [whole(torch.linalg.vector_norm(part)) for part in separate]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    for part in meshes:
        nn.utils.clip_grads_with_norm_(part, limit, norm)
    return norm, separate


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of every group: `rate` times the group's factor."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = rate * group["rate_factor"]


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the state as flat tensors by parameter and entry, such as "head.weight/exp_avg"; nothing is copied."""
    tensors: dict[str, Tensor] = {}
    for optimizer in optimizers:
        names = _parameter_names(optimizer)
        state: dict[int, dict[str, Tensor]] = optimizer.state_dict()["state"]
        tensors |= {f"{names[i]}/{entry}": tensor for i, entries in state.items() for entry, tensor in entries.items()}
    return tensors


def empty_state(
    optimizers: Iterable[torch.optim.Optimizer], layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Return empty tensors for a stored state: those of a parameter's shape are sharded as it is, and on its device."""
    parameters = {
        name: parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    tensors = {}
    for key, (dtype, shape) in layout.items():
        parameter = parameters.get(key.rpartition("/")[0])
        if parameter is not None and shape == tuple(parameter.shape):
            tensors[key] = torch.empty_like(parameter, dtype=dtype)
        else:
            tensors[key] = torch.empty(shape, dtype=dtype)
    return tensors


def restore_optimizers(optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """Load what `optimizer_tensors` returned; hyper-parameters stay those of the optimizers.

    Raises UserError, and changes nothing, when the parameters are others.
    """
    places = {
        name: (number, index)
        for number, optimizer in enumerate(optimizers)
        for index, name in enumerate(_parameter_names(optimizer))
    }
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        if name not in places:
            raise UserError(
                f"the checkpoint's optimizer has other parameters than this model ({name}): resume with the "
                "configuration the run was started with"
            )
        number, index = places[name]
        states[number].setdefault(index, {})[entry] = tensor.clone()
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _parameter_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the parameters in the order in which `Optimizer.state_dict` numbers them."""
    return [name for group in optimizer.param_groups for name in group["param_names"]]
