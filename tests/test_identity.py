"""The identity of a run: what it is made of, what never changes it, and that of the committed runs.

`python tests/test_identity.py` writes the names and defaults of the schema anew. A line that changes or disappears
changes identities: keep the default, and give a renamed field its old name in `FROZEN_NAMES`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from siamesenorm.data.augmentation import Augmentation
from siamesenorm.models.convnext import ConvNextConfig
from siamesenorm.models.diffusion import DiffusionTransformerConfig
from siamesenorm.models.language import LanguageModelConfig
from siamesenorm.models.masked_autoencoder import MaskedAutoencoderConfig
from siamesenorm.models.vision import VisionTransformerConfig
from siamesenorm.norms import NORMS, NormSpec
from siamesenorm.tasks import TASKS
from siamesenorm.topologies import TOPOLOGIES, build_topology
from siamesenorm.training.config import (
    FROZEN_NAMES,
    Execution,
    RunConfig,
    WarmStart,
    default_of,
    described,
    identity,
)
from siamesenorm.training.optimizer import OptimizerConfig
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.verdict import Thresholds
from training_runs import tiny_plan, tiny_run, with_model, with_task, write_data

ROOT = Path(__file__).parents[1]
SCHEMA = Path(__file__).with_name("identity_schema.json")
COMMITTED = sorted(path.parent for path in (ROOT / "benchmarks").glob("*/runs/*/config.json"))
CLASSES = (
    RunConfig,
    OptimizerConfig,
    WarmStart,
    LanguageModelConfig,
    VisionTransformerConfig,
    DiffusionTransformerConfig,
    MaskedAutoencoderConfig,
    ConvNextConfig,
    Augmentation,
    *TASKS.values(),
)


def schema() -> dict[str, dict[str, Any]]:
    """Return every name in the hash with its default, "required" without one, by class or tag."""
    families = dict.fromkeys(type(topology) for topology in TOPOLOGIES.values())
    table = {
        kind.__name__: {
            FROZEN_NAMES.get((kind.__name__, field.name), field.name): (
                "required" if default_of(field) is dataclasses.MISSING else described(default_of(field))
            )
            for field in dataclasses.fields(kind)
            if field.metadata.get("hashed", True)
        }
        for kind in (*CLASSES, *families)
    }
    return table | {f"norm {name}": dict(operator.option_defaults()) for name, operator in NORMS.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "counting")


@pytest.fixture
def config(data: Path) -> RunConfig:
    return tiny_run(data)


def test_names_and_defaults_are_the_committed_ones() -> None:
    """A new field with a default may be added to the file; a default or a name in it never changes."""
    assert json.loads(json.dumps(schema())) == json.loads(SCHEMA.read_text())


def test_a_new_field_with_a_default_changes_no_identity() -> None:
    @dataclass
    class Old:
        width: int
        bias: bool = False

    @dataclass
    class New:
        width: int
        bias: bool = False
        mask: str = "none"

    assert identity(Old(width=3)) == identity(New(width=3)) != identity(New(width=3, mask="all"))
    assert identity(Old(width=3)) == identity(Old(width=3, bias=False)) != identity(Old(width=3, bias=True))


def test_required_fields_and_tags_always_count(config: RunConfig) -> None:
    record = described(config)
    assert {"task", "steps", "batch"} <= record.keys()
    assert record["task"]["tag"] == "language"
    assert record["task"]["model"]["topology"] == {"tag": "SiameseHybridPre"}
    assert record["task"]["model"]["norm"] == {"tag": "rmsnorm"}
    assert "thresholds" not in record and "execution" not in record and "data" not in record["task"]


def test_a_renamed_field_keeps_its_name_in_the_hash(data: Path) -> None:
    lazy = tiny_run(data, model={"topology": "siamese-post-pre:post_norm=lazy"})
    assert described(lazy)["task"]["model"]["topology"]["settle"] == "lazy"


@pytest.mark.parametrize(
    "execution",
    [
        Execution(device="cuda"),
        Execution(kernels="fused"),
        Execution(compile="on"),
        Execution(compile="off", threads=7, checkpoint_every=3, keep_checkpoints=9, keep_states=True),
        Execution(trackers=("wandb",)),
    ],
)
def test_execution_does_not_count(config: RunConfig, execution: Execution) -> None:
    assert dataclasses.replace(config, execution=execution).identity == config.identity


def test_neither_a_compiler_nor_paths_nor_thresholds_count(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = config.identity
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert config.identity == before
    assert dataclasses.replace(config, thresholds=Thresholds(rise=0.7)).identity == before
    assert with_task(config, data=tmp_path).identity == before
    assert dataclasses.replace(config, stop_early=False).identity != before


def test_automatic_choices_count_as_what_they_became(config: RunConfig, data: Path) -> None:
    assert tiny_plan(data).identity == config.identity, "resolved or not"
    for changes in ({"attention_norm": "qkv-head"}, {"kv_heads": 2}, {"residual_dtype": "float32"}):
        assert with_model(config, **changes).identity == config.identity
    for changes in ({"kv_heads": 1}, {"residual_dtype": "bfloat16"}, {"context_norm": True}):
        assert with_model(config, **changes).identity != config.identity


def test_a_warm_start_counts_by_its_run_and_position(config: RunConfig, tmp_path: Path) -> None:
    def started(**changes: Any) -> str:
        start = WarmStart(**{"run": "a" * 64, "path": tmp_path, "position": 4, **changes})
        return dataclasses.replace(config, warm_start=start).identity

    assert started() == started(path=tmp_path / "moved")
    assert len({started(), started(run="b" * 64), started(position=0), config.identity}) == 4


def test_equal_numbers_have_one_spelling(data: Path) -> None:
    whole = tiny_run(data, optimizer={"clip": 2, "learning_rate": 1})
    assert whole.identity == tiny_run(data, optimizer={"clip": 2.0, "learning_rate": 1.0}).identity
    assert described(whole)["optimizer"]["clip"] == 2 and type(described(1.0)) is int


def test_the_optimizer_counts_unless_it_is_adamw(data: Path) -> None:
    found = {tiny_run(data, optimizer=each).identity for each in ({}, {"name": "adamw"}, {"name": "muon"})}
    assert len(found) == 2
    assert described(tiny_run(data, optimizer={"name": "muon"}))["optimizer"]["name"] == "muon"


def test_a_revision_makes_other_runs(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {config.identity}
    for kind in (TASKS["language"], type(build_topology("siamese")), NORMS["rmsnorm"]):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "revision", 1, raising=False)
            found.add(config.identity)
    assert len(found) == 4


def test_options_of_norms_count_beyond_their_defaults(config: RunConfig) -> None:
    given = with_model(config, norm=NormSpec.parse("rmsnorm:eps=1e-5"))
    assert given.identity == config.identity != with_model(config, norm=NormSpec.parse("rmsnorm:eps=1e-6")).identity


def test_an_identity_can_be_recomputed_from_its_file(config: RunConfig) -> None:
    record = json.loads(json.dumps(config.to_json()))
    assert RunConfig.from_json(record).identity == config.identity
    del record["validation_every"], record["micro_batch"], record["task"]["model"]["positions"]
    missing = RunConfig.from_json(record)
    assert missing.identity == dataclasses.replace(config, validation_every=100).identity


@pytest.mark.parametrize("run", COMMITTED, ids=lambda path: f"{path.parents[1].name}/{path.name}")
def test_committed_runs_keep_their_identity(run: Path) -> None:
    assert RunDirectory(run).read_config().identity[:12] == run.name


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n")
