"""`siamesenorm evaluate`: what it computes of each kind of run, what it keeps, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint_stages import watch_stages
from refusals import refusal
from siamesenorm.cli import main
from siamesenorm.comparison.results import read_run
from siamesenorm.errors import UserError
from siamesenorm.evaluation.choice_items import read_tasks
from siamesenorm.evaluation.evaluation import TrainedRun
from siamesenorm.evaluation.evaluation_instrument import EvaluationOptions
from siamesenorm.evaluation.frechet import FeatureStatistics, PixelFeatures, frechet_distance
from siamesenorm.evaluation.images import ImageEncoding, real_images
from siamesenorm.evaluation.multiple_choice import MultipleChoice
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.loop import Instrument, TrainingLoop, train
from siamesenorm.training.presets import presets
from siamesenorm.training.run_record import read_metrics
from training_runs import records, tiny_plan, tiny_run, with_model, write_data

EXECUTION = Execution(threads=1, compile="off")


def short(preset: str, steps: int, **model: Any) -> RunConfig:
    """Return a preset with few steps and a small model."""
    config = presets(Path())[preset]
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1e-2, warmup_steps=2)
    changes = {"steps": steps, "batch": 32, "validation_every": steps, "execution": EXECUTION, "optimizer": optimizer}
    return with_model(dataclasses.replace(config, **changes), depth=1, dim=16, hidden=32, **model).resolved()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "classifier"
    train(dataclasses.replace(short("digits", 60), ema=0.9), run)
    return run


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "generator"
    train(dataclasses.replace(short("digits-dit", 3), ema=0.0), run)
    return run


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of a run, in which nothing was evaluated before."""
    return Path(shutil.copytree(request.getfixturevalue(request.param), tmp_path / "run"))


def evaluate(capsys: pytest.CaptureFixture[str], *words: object) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the results that the command prints as JSON, by evaluation and kind of weights."""
    capsys.readouterr()
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {(record["evaluation"], record["weights"]): record["results"] for record in found}


@pytest.mark.parametrize("copied", ["classifier"], indirect=True)
def test_a_classifier_has_the_metrics_of_its_training_with_both_kinds_of_weights(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate(capsys, copied, "--knn", 5, "--linear-probe")
    last = records(copied, "validation")[-1]
    for kind, prefix in (("raw", ""), ("ema", "ema_")):
        held_out = found["held-out", kind]
        assert held_out["accuracy"] == last[f"{prefix}accuracy"]
        assert held_out["loss"] == pytest.approx(last[f"{prefix}loss"], rel=1e-5)
        assert found["knn", kind]["top1"] > 0.6 and found["linear probe", kind]["top1"] > 0.6
        assert found["knn", kind]["top5"] > found["knn", kind]["top1"]
    assert found["held-out", "raw"] != found["held-out", "ema"]


@pytest.mark.parametrize("copied", ["classifier"], indirect=True)
def test_results_are_records_of_the_run_one_for_each_evaluation(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (copied / "metrics.jsonl").read_bytes()
    for neighbours in (3, 4, 3):
        evaluate(capsys, copied, "--knn", neighbours)
    kept = read_metrics(copied / "evaluations.jsonl")
    names = sorted((each["weights"], each["evaluation"], each["options"].get("neighbours", 0)) for each in kept)
    assert names == [
        ("ema", "held-out", 0), ("ema", "knn", 3), ("ema", "knn", 4),
        ("raw", "held-out", 0), ("raw", "knn", 3), ("raw", "knn", 4),
    ]  # fmt: skip
    assert {each["step"] for each in kept} == {60} and (copied / "metrics.jsonl").read_bytes() == before
    assert main(["evaluate", str(copied)]) == 0
    assert "accuracy" in capsys.readouterr().out


def test_features_are_what_the_head_reads(classifier: Path) -> None:
    run = TrainedRun(classifier)
    model: Any = run.build_model()
    encoding = ImageEncoding.of(run.task, model, option="")
    some = encoding.data.held_out.part(range(20))
    with torch.no_grad():
        features = encoding.labelled(some).features
        images = torch.stack([some.image(number) for number in range(20)])
        torch.testing.assert_close(model.head(features), model(encoding.data.normalised(images)).logits)
        white = images.float() * (255 / 16)
        torch.testing.assert_close(encoding.encode(white), features)


@pytest.mark.parametrize("copied", ["generator"], indirect=True)
def test_samples_have_a_distance_to_the_training_images(
    copied: Path, classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = TrainedRun(copied)
    assert run.kinds == ("raw",)
    few = ["--frechet", "--samples", 20, "--sampling-steps", 2]
    found = evaluate(capsys, copied, *few)["frechet", "raw"]
    images: Any = run.task
    drawn = images.sample(run.build_model(), [number % 10 for number in range(20)], 1.0, 0, steps=2)
    data = ImageEncoding.of(TrainedRun(classifier).task, option="").data
    sides = [FeatureStatistics.of(each, PixelFeatures()) for each in (real_images(data, 8), [drawn])]
    assert found["Frechet distance (features: pixels, at most 8 x 8)"] == pytest.approx(frechet_distance(*sides))
    assert (found["real"], found["samples"]) == (1437, 20)
    np.savez(tmp_path / "samples.npz", arr_0=drawn.permute(0, 2, 3, 1).numpy())
    again = evaluate(capsys, copied, "--frechet", "--samples", 20, "--sample-file", tmp_path / "samples.npz")
    assert again["frechet", "none"] == found
    np.savez(tmp_path / "samples.npz", arr_0=drawn.permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy())
    again = evaluate(capsys, copied, "--frechet", "--samples", 20, "--sample-file", tmp_path / "samples.npz")
    assert again["frechet", "none"] == found, "grey written as RGB, as siamesenorm sample does"
    (name, *_), (distance, *_) = zip(
        *evaluate(capsys, copied, *few, "--features", classifier)["frechet", "raw"].items(), strict=True
    )
    assert name.startswith("Frechet distance (features: siamese") and distance > 0


def test_real_images_have_the_white_of_samples(classifier: Path) -> None:
    data = ImageEncoding.of(TrainedRun(classifier).task, option="").data
    images = torch.cat(list(real_images(data, 8)))
    assert images.dtype == torch.uint8 and images.max() == 255 and len(images) == len(data.train)
    assert FeatureStatistics.of([images], PixelFeatures()).mean.mean() == pytest.approx(4.88 / 16, abs=0.01)


def test_a_language_model_has_its_metrics_and_no_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(tiny_run(write_data(tmp_path / "data"), steps=4, validation_every=4), run)
    found = evaluate(capsys, run)
    assert found["held-out", "raw"]["loss"] == pytest.approx(records(run, "validation")[-1]["loss"], rel=1e-5)
    (run / "evaluations.jsonl").unlink()
    for option in (["--knn", 3], ["--linear-probe"], ["--frechet"]):
        assert str(option[0]) in refusal(capsys, "evaluate", run, *option)
    assert not (run / "evaluations.jsonl").exists(), "refused before anything is computed"
    shutil.move(tmp_path / "data", tmp_path / "moved")
    refusal(capsys, "evaluate", run)
    assert evaluate(capsys, run, "--data", tmp_path / "moved") == found


@pytest.mark.parametrize("copied", ["generator"], indirect=True)
def test_what_cannot_be_evaluated_gets_one_line(
    copied: Path, classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = tmp_path / "samples.npz"
    file = ["--frechet", "--samples", 3, "--sample-file", samples]
    assert "samples.npz" in refusal(capsys, "evaluate", copied, *file)
    np.savez(samples, other=np.zeros(3))
    assert "arr_0" in refusal(capsys, "evaluate", copied, *file)
    np.savez(samples, arr_0=np.zeros((3, 8, 8, 1)))
    assert "float64" in refusal(capsys, "evaluate", copied, *file)
    np.savez(samples, arr_0=np.zeros((2, 8, 8, 1), np.uint8))
    assert "2 samples" in refusal(capsys, "evaluate", copied, *file)
    np.savez(samples, arr_0=np.arange(3 * 8 * 8 * 3).reshape(3, 8, 8, 3).astype(np.uint8))
    assert "3 channels" in refusal(capsys, "evaluate", copied, *file)
    assert "--samples 1" in refusal(capsys, "evaluate", copied, "--frechet", "--samples", 1)
    assert "--frechet" in refusal(capsys, "evaluate", copied, "--features", classifier)
    assert "--knn" in refusal(capsys, "evaluate", copied, "--knn", 3)
    assert "--knn 2000" in refusal(capsys, "evaluate", classifier, "--knn", 2000)
    assert "weights.pth" in refusal(
        capsys, "evaluate", copied, "--frechet", "--inception-weights", tmp_path / "weights.pth"
    )
    assert not (copied / "evaluations.jsonl").exists()
    shutil.rmtree(copied / "checkpoints")
    assert "checkpoint" in refusal(capsys, "evaluate", copied)
    refusal(capsys, "evaluate", tmp_path / "nowhere")


# --- tasks and texts of language models


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two runs on bytes, tasks and a text."""
    root = tmp_path_factory.mktemp("language")
    line = "What sinks? A stone sinks, and cork floats."
    (root / "text.txt").write_text(f"{line}\n" * 60)
    (root / "lines.jsonl").write_text("".join(json.dumps({"text": f"{n} {line}"}) + "\n" for n in range(60)))
    assert main(["prepare", "--source", str(root / "lines.jsonl"), "--out", str(root / "data")]) == 0
    items = (
        {"id": str(n), "question": f"{n}: What sinks?", "choices": ["stone", "cork"], "label": 0} for n in range(9)
    )
    (root / "arc_easy_validation.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    for seed in (0, 1):
        config = tiny_plan(root / "data", steps=6, seed=seed, validation_every=6, ema=0.5 if seed == 0 else 0.0)
        train(config.resolved(), root / f"seed-{seed}")
    return root


def test_a_language_model_is_scored_on_tasks_and_texts(language: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = language / "seed-0"
    words = ["--tasks", language, "--perplexity", "--text", language / "text.txt"]
    found = evaluate(capsys, run, *words)
    last = records(run, "validation")[-1]
    losses = [record["loss"] for record in records(run, "train")]
    perplexity = found["perplexity", "raw"]
    assert perplexity["held_out_loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert perplexity["held_out_ppl"] == pytest.approx(math.exp(perplexity["held_out_loss"]))
    assert perplexity["train_loss"] == losses[-1] and perplexity["train_ppl"] == pytest.approx(math.exp(losses[-1]))
    assert perplexity["train_ppl_seen_once"] is True
    assert perplexity["text.txt"]["tokens"] == (language / "text.txt").stat().st_size
    choice = {kind: found["multiple-choice", kind] for kind in ("raw", "ema")}
    assert choice["raw"]["arc_easy"]["items"] == 9 and choice["raw"] != choice["ema"]
    assert choice["raw"]["average"] == choice["raw"]["arc_easy"]["acc"]
    evaluate(capsys, run, "--tasks", language, "--limit", 1)
    kept = [each for each in read_metrics(run / "evaluations.jsonl") if each["evaluation"] == "multiple-choice"]
    choices = [each for each in kept if each["weights"] == "raw"]
    items = {each["options"]["digest"]: each["results"]["arc_easy"]["items"] for each in choices}
    files = {digest: run / f"items/step-00000006-raw/{digest[:12]}/arc_easy_validation.jsonl" for digest in items}
    assert {digest: len(file.read_text().splitlines()) for digest, file in files.items()} == items
    assert sorted(items.values()) == [1, 9]
    lines = files[next(digest for digest, count in items.items() if count == 9)].read_text().splitlines()
    assert json.loads(lines[8])["id"] == "8" and len(list((run / "scores").glob("*.jsonl"))) == 2
    assert evaluate(capsys, run, *words) == found, "from the cache"
    assert main(["report", str(run), "--out", str(language / "page")]) == 0
    page = (language / "page/report.md").read_text()
    assert f"{perplexity['text.txt']['bits_per_byte']:.6g}" in page and f"{perplexity['held_out_ppl']:.6g}" in page
    assert page.count("Accuracy on tasks") == page.count("Bits per byte of the right answers") == 2, "two sets of items"


def test_two_runs_are_compared_on_the_same_items(language: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = language / "seed-0", language / "seed-1"
    found = evaluate(capsys, first, "--against", second, "--tasks", language)
    paired = found["paired-multiple-choice", "raw"]["arc_easy"]
    means = [
        evaluate(capsys, run, "--tasks", language)["multiple-choice", "raw"]["arc_easy"] for run in (first, second)
    ]
    for metric in ("acc", "bits_per_byte"):
        assert paired[metric]["difference"] == pytest.approx(means[0][metric] - means[1][metric])
    kept = read_metrics(first / "evaluations.jsonl")
    options = next(each["options"] for each in kept if each["evaluation"] == "paired-multiple-choice")
    assert options["against"] == TrainedRun(second).identity
    assert main(["evaluate", str(first), "--against", str(second), "--tasks", str(language)]) == 0
    shown = capsys.readouterr().out
    assert "McNemar" in shown and "seed-0 minus seed-1" in shown


def test_a_model_without_a_run_has_the_scores_of_the_run(
    language: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = language / "seed-1"
    assert main(["export", str(run), "--out", str(tmp_path / "model")]) == 0
    words = ["--tasks", language, "--text", language / "text.txt"]
    mine, theirs = (
        evaluate(capsys, run, *words),
        evaluate(capsys, tmp_path / "model", *words, "--out", tmp_path / "out"),
    )
    assert theirs["multiple-choice", "raw"] == mine["multiple-choice", "raw"]
    assert theirs["perplexity", "raw"]["text.txt"] == mine["perplexity", "raw"]["text.txt"]
    (kept,) = (tmp_path / "out").iterdir()
    assert kept.name.startswith("model-") and len(read_metrics(kept / "evaluations.jsonl")) == 2
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(capsys, "evaluate", tmp_path / "model", "--tasks", language)


class TrainingModes(Instrument):
    """Whether the model is in training mode after the instruments before this one."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_step(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        self.found.append(loop.model.training)


def test_tasks_inside_training_change_no_number_of_it(
    language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainedRun(language / "seed-0").config
    config = dataclasses.replace(config, execution=dataclasses.replace(config.execution, checkpoint_every=2))
    options = EvaluationOptions(every=3, tasks=str(language), limit=4)
    stages: list[str] = []

    def interrupt(stage: str) -> None:
        stages.append(stage)
        if stages.count(stage) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        watch_stages(interrupt, patch.setattr)
        train(config, tmp_path / "run", instruments=options.instruments(config))
    modes = TrainingModes()
    train(config, tmp_path / "run", instruments=(*options.instruments(config), modes))
    assert modes.found and all(modes.found), "scoring puts the model back in training mode"
    rest = [record for record in records(tmp_path / "run") if record["kind"] != "evaluation"]
    assert rest == records(language / "seed-0")
    found = records(tmp_path / "run", "evaluation")
    assert [(each["step"], each["weights"]) for each in found] == [(3, "raw"), (3, "ema"), (6, "raw"), (6, "ema")]
    tasks = read_tasks(str(language), limit=4)
    after = TrainedRun(language / "seed-0").evaluate([MultipleChoice(tasks=tasks)])
    assert [each["results"] for each in found[2:]] == [each["results"] for each in after]
    assert read_run(tmp_path / "run").evaluations[0]["step"] == 3
    assert EvaluationOptions().instruments(config) == ()
    with pytest.raises(UserError, match="every"):
        EvaluationOptions(tasks=str(language))
    with pytest.raises(UserError, match="scores texts"):
        options.instruments(short("digits", 3))


def test_what_cannot_be_scored_gets_one_line(
    language: Path, classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = language / "seed-1"
    assert "--tasks" in refusal(capsys, "evaluate", classifier, "--tasks", language)
    assert "--tasks" in refusal(capsys, "evaluate", run, "--against", run)
    assert "--tasks" in refusal(capsys, "evaluate", run, "--against", classifier, "--tasks", language)
    assert "did you mean" in refusal(capsys, "evaluate", run, "--tasks", language, "--task-names", "arc_esy")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    assert "UTF-8" in refusal(capsys, "evaluate", run, "--text", tmp_path / "bad.txt")
    assert "two texts" in refusal(capsys, "evaluate", run, "--text", language / "text.txt", language / "text.txt")
    assert main(["export", str(run), "--out", str(tmp_path / "model")]) == 0
    assert "--tasks" in refusal(capsys, "evaluate", tmp_path / "model")
    assert "--perplexity" in refusal(capsys, "evaluate", tmp_path / "model", "--perplexity")
    assert "knn" in refusal(capsys, "evaluate", tmp_path / "model", "--knn", 3)
