"""The memory of a step as it is counted is that of a step as it is taken."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from siamesenorm.benchmark.measurement import allocated_by, kept_for_backward
from siamesenorm.benchmark.memory import Memory, StepLayout, loss_of, memory_of
from siamesenorm.cli import main
from siamesenorm.errors import UserError
from siamesenorm.models.language import LanguageModelConfig, build_language_model, language_model_config
from siamesenorm.training.execution import checkpoint_blocks

CPU = torch.device("cpu")
TOKENS = torch.randint(101, (2, 33), generator=torch.Generator().manual_seed(0))


def config_of(topology: str, **fields: Any) -> LanguageModelConfig:
    shape = {"depth": 3, "dim": 32, "heads": 2, "hidden": 96, "vocabulary": 101, "context": 32}
    return language_model_config("nano", topology=topology, **{**shape, **fields})


@pytest.mark.parametrize(
    ("config", "precision"),
    [(config_of("siamese").resolved("bfloat16"), "bfloat16"), (config_of("attnres", experts=4).resolved(), "float32")],
    ids=["siamese in bf16", "attnres with experts"],
)
def test_the_parts_are_those_of_a_step(config: LanguageModelConfig, precision: Any) -> None:
    model = build_language_model(config)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = kept_for_backward(lambda: loss_of(model, TOKENS, precision), besides=model.parameters())
    loss_of(model, TOKENS, precision).backward()
    optimizer.step()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    moments = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if x.ndim)
    assert memory_of(config, StepLayout(samples=2, precision=precision)) == Memory(
        parameters=weights,
        gradients=sum(parameter.grad.nbytes for parameter in model.parameters()),
        optimizer=moments,
        gathered=0,
        kept=sum(kept),
        recomputed=0,
    )


@pytest.mark.parametrize("recomputation", ["full", "selective"])
def test_what_a_checkpointed_step_keeps(recomputation: Any) -> None:
    config = config_of("siamese")
    layout = StepLayout(samples=2, checkpoint_activations=True, recomputation=recomputation)
    model = build_language_model(config)
    loss_of(model, TOKENS, "float32").backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    checkpoint_blocks(model, recomputation)
    loss_of(model, TOKENS, "float32").backward()
    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in model.named_parameters())
    model.zero_grad()
    end, peak = allocated_by(lambda: loss_of(model, TOKENS, "float32"), CPU)
    found, whole = memory_of(config, layout), memory_of(config, StepLayout(samples=2))
    assert found.kept + 3 * torch.get_rng_state().nbytes == pytest.approx(end, rel=0.03), "each keeps a random state"
    assert found.kept < {"full": 0.4, "selective": 0.8}[recomputation] * whole.kept
    assert peak > end


def test_rounded_parameters_are_gathered_by_a_process_alone() -> None:
    config = language_model_config("nano", topology="pre", vocabulary=64)
    alone = {rounded: memory_of(config, StepLayout(bf16_parameters=rounded)) for rounded in (False, True)}
    assert alone[False].gathered == 0 < alone[True].gathered


def test_shards_divide_what_is_held() -> None:
    config = config_of("pre", experts=4)
    alone = memory_of(config, StepLayout())
    shared = memory_of(config, StepLayout(processes=4, shards=4))
    assert shared.parameters == pytest.approx(alone.parameters / 4, abs=4)
    assert shared.total - shared.gathered < alone.total
    experts = 3 * 4 * 3 * 32 * 96 * 4
    divided = memory_of(config, StepLayout(processes=4, shards=2, expert_shards=2))
    assert divided.parameters == pytest.approx((alone.parameters - experts) / 2 + experts / 4, abs=4)
    assert divided.gathered < shared.gathered
    with pytest.raises(UserError, match="shards is 3"):
        StepLayout(processes=4, shards=3)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sizes", "--memory", "nano", "--topologies", "pre", "--step.samples", "2"]
    assert main(arguments) == 0
    row = capsys.readouterr().out
    memory = memory_of(language_model_config("nano", topology="pre", vocabulary=50304), StepLayout(samples=2))
    assert all(f"{part / 2**30:.3g}" in row for part in dataclasses.astuple(memory))
    assert main(["sizes", "--memory", "nonesuch"]) == 2


def test_what_is_counted_was_measured() -> None:
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    rows = json.loads((benchmarks / "memory.json").read_text())["rows"]
    assert len(rows) >= 6 and all(row["counted_to_measured"] == pytest.approx(1, abs=0.1) for row in rows)
    alone, *together = json.loads((benchmarks / "sharded_memory.json").read_text())["rows"]
    assert len(together) == 2 and all(row["peak_MB"] < alone["peak_MB"] for row in together)
