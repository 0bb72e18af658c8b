"""The command line: every command works and shows its help; bad input gets one line and exit code 2, and no files."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import siamesenorm
from siamesenorm import available_norms, available_topologies, build_language_model
from siamesenorm.cli import COMMANDS, explain, main, sizes
from siamesenorm.data import PreparedData
from siamesenorm.files import decode_json
from siamesenorm.models.sizes import SIZES
from siamesenorm.training.accounting import count_parameters
from siamesenorm.training.loop import TrainingLoop
from training_runs import edit_json, records, write_data

TINY = {
    "--model.size": "nano", "--model.depth": 1, "--model.dim": 8, "--model.heads": 2, "--model.hidden": 8,
    "--model.context": 16, "--steps": 8, "--batch-tokens": 32, "--optimizer.warmup-steps": 1,
    "--validation-every": 4, "--validation-tokens": 64, "--execution.checkpoint-every": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "counting")


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two finished runs, of other seeds."""
    runs = [tmp_path_factory.mktemp("runs") / f"seed-{seed}" for seed in (0, 1)]
    for seed, run in enumerate(runs):
        assert main(train(data, run, **{"--seed": seed})) == 0
    return runs


def train(data: Path, out: Path, **options: Any) -> list[str]:
    """Return a command that trains a tiny run; an option given replaces the tiny one."""
    given = {"--data": data, "--out": out, **TINY, **options}
    return ["train", "mini", *(str(part) for option in given.items() for part in option)]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that succeeds and return what it prints."""
    assert main(arguments) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that refuses and return its one line."""
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("siamesenorm: ")
    assert not set("╭│╰─") & set(line)
    return line.removeprefix("siamesenorm: ")


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_and_version_do_without_torch() -> None:
    program = "import sys; from siamesenorm.cli import main; main([sys.argv[1]]); print('torch' in sys.modules)"
    for option in ("--help", "--version"):
        arguments = [sys.executable, "-c", program, option]
        said = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
        assert said.splitlines()[-1] == "False"
        assert siamesenorm.__version__ in said or all(name in said for name in COMMANDS)


def test_the_module_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "siamesenorm", "trian"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "siamesenorm: unknown command 'trian': did you mean train?\n"


@pytest.mark.parametrize("command", ["train mini", "sweep mini", *COMMANDS])
def test_every_command_shows_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, *command.split(), "--help").startswith(f"usage: siamesenorm {command}")


@pytest.mark.parametrize("command", ["train mini", "sweep mini", "explain", "sizes"])
def test_where_a_topology_is_asked_for_the_help_lists_them_all(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = set(re.split(r"[^\w-]+", output(capsys, *command.split(), "--help")))
    assert set(available_topologies()) <= words


def test_the_help_lists_norms_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    words = {word.strip(",.;:") for word in output(capsys, "train", "mini", "--help").split()}
    assert {*available_norms(), *SIZES} <= words


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "siamesenorm.cli.explain", raising=False)
    assert refusal(capsys, "explain") == "tyro is not installed: pip install 'siamesenorm[lab]'"


@pytest.mark.parametrize("arguments", [["--help"], ["explain"], ["sizes", "--help"]])
def test_a_reader_that_leaves_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "siamesenorm", *arguments]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (run.returncode, run.stderr) == (141, "")


def test_an_interruption_is_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingLoop, "_validate", interrupt)
    assert main(train(data, tmp_path / "run")) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "siamesenorm: interrupted; repeat the command to go on"
    monkeypatch.undo()
    assert main(train(data, tmp_path / "run")) == 0
    assert "resumes after step 2" in capsys.readouterr().err


# --- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "unknown command 'trian': did you mean train"),
        ("--verbose", "unknown command '--verbose': choose from bench, calibrate, demo"),
        ("train", "no recipe given: choose from mini, paper"),
        ("train min --data DATA", "unknown recipe 'min': did you mean mini"),
        ("train --data DATA", "no recipe before --data: choose from mini, paper"),
        ("train mini", "missing --data PATH: Directory of prepared data"),
        ("train mini --data DATA --model.topolgy pre", "unknown option --model.topolgy: did you mean --model.topology"),
        ("train mini --data DATA --modle.size=nano", "unknown option --modle.size: did you mean --model.size"),
        ("train mini --data DATA --qqq 3", "unknown option --qqq"),
        ("train mini --data DATA extra", "unexpected argument 'extra'"),
        ("train mini --data DATA --steps", "--steps has no value"),
        ("train mini --data DATA --steps 1.5", "--steps is '1.5': write a whole number"),
        ("train mini --data DATA --optimizer.learning-rate abc", "--optimizer.learning-rate is 'abc': write a number"),
        ("train mini --data DATA --optimizer.learning-rate nan", "learning_rate is nan: choose a positive number"),
        ("train mini --data DATA --optimizer.learning-rate inf", "learning_rate is inf: choose a positive number"),
        ("train mini --data DATA --optimizer.learning-rate 0", "learning_rate is 0.0: choose a positive number"),
        ("train mini --data DATA --optimizer.learning-rate -1", "learning_rate is -1.0: choose a positive number"),
        ("train mini --data DATA --precision bf16", "unknown --precision 'bf16': did you mean bfloat16"),
        ("train mini --data DATA --model.topology siamse", "unknown topology 'siamse': did you mean siamese"),
        ("train mini --data DATA --model.topology dhc-2:stream=4", "unknown option of topology dhc-2 'stream': did"),
        ("train mini --data DATA --model.topology dhc-2:streams=x", "streams of topology dhc-2 is 'x': write an"),
        ("train mini --data DATA --model.norm rmsnrm", "unknown norm 'rmsnrm': did you mean rmsnorm"),
        ("train mini --data DATA --model.size mni", "unknown size 'mni': did you mean mini"),
        ("train mini --data DATA --model.heads 3", "3 heads do not divide the width 8: choose a divisor of 8"),
        ("train mini --data DATA --model.kv-heads 3", "3 key/value heads do not divide 2 heads: choose a divisor of 2"),
        (
            "train mini --data DATA --model.topology siamese --model.attention-norm qk",
            "topology siamese needs attention",
        ),
        ("train mini --data DATA --model.attention-norm qkk", "unknown --model.attention-norm 'qkk': did you mean qk"),
        ("train mini --data DATA --batch-tokens 40", "batch_tokens 40 is not a multiple of the context 16: choose 32"),
        ("train mini --data DATA --model.vocabulary 9", "need a vocabulary of 17, the model has 9"),
        ("train mini --data DATA --model.context 4096 --batch-tokens 4096", "prepare more text or choose a shorter"),
        ("train mini --data DATA --execution.device qpu", "device 'qpu' is not at hand here: choose cpu"),
        ("train mini --data NOWHERE", "no prepared data (no such directory): make it with `siamesenorm prepare`"),
        ("explain siamse", "unknown topology 'siamse': did you mean siamese"),
        ("explain --json --markdown", "--json and --markdown exclude each other: choose one"),
        ("sizes --topologies siamse", "unknown topology 'siamse': did you mean siamese"),
        ("verdict", "missing PATH: The file, or the directory of a run"),
        ("verdict NOWHERE", "cannot read"),
        ("verdict NOWHERE --steps-total x", "--steps-total is 'x': write a whole number"),
        ("report NOWHERE", "name the directory that `siamesenorm sweep` wrote"),
        ("calibrate", "there are no runs to calibrate on"),
        ("calibrate NOWHERE", "cannot read"),
        ("prepare", "missing --source STR, --out PATH"),
    ],
)
def test_bad_arguments_get_one_line_and_leave_nothing(
    arguments: str, message: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments.replace("DATA", str(data)).replace("NOWHERE", str(tmp_path / "nowhere")).split()
    if words[:2] == ["train", "mini"] and "--data" in words:
        given = dict(zip(words[2::2], words[3::2], strict=False))
        tiny = {name: str(value) for name, value in TINY.items() if name not in given}
        tiny["--out"] = str(tmp_path / "run")
        words[2:2] = [word for option in tiny.items() for word in option]
    line = refusal(capsys, *words)
    assert message in line
    assert len(line) < 400
    assert list(tmp_path.iterdir()) == []


def test_a_long_path_is_told_unbroken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ("long-" * 40)
    path.write_text("x")
    assert f"{path}: is a file: give a directory" in refusal(capsys, "prepare", "--source", "a", "--out", str(path))


# --- data ------------------------------------------------------------------------------------------------------------


def test_text_is_prepared_trained_on_and_generates_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paragraphs = [f"Paragraph {number} counts {', '.join(map(str, range(number % 9, 30)))}." for number in range(80)]
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs))
    options = ["--documents", "paragraphs", "--validation-fraction", "0.2"]
    prepared = ["prepare", "--source", str(tmp_path / "text.txt"), "--out", str(tmp_path / "data"), *options]
    said = output(capsys, *prepared)
    assert "tokenizer: bytes, vocabulary 257" in said
    documents = [split.documents for split in PreparedData.open(tmp_path / "data").manifest.splits.values()]
    assert sum(documents) == 80
    assert output(capsys, *prepared) == said
    said = output(capsys, *train(tmp_path / "data", tmp_path / "run"), "--json")
    assert decode_json(said)["steps"] == 8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty"),
        ("binary.txt", bytes(range(256)) * 40, "binary"),
        ("cut.jsonl", b'{"text": "whole"}\n{"text": "cut', "line 2"),
        ("no-field.jsonl", b'{"content": "x"}\n', "text"),
        ("cut.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x01\x02", "gz"),
        ("absent.txt", None, "absent.txt"),
    ],
)
def test_bad_text_is_told_and_leaves_nothing(
    name: str, content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    line = refusal(capsys, "prepare", "--source", str(tmp_path / name), "--out", str(tmp_path / "data"))
    assert name in line
    assert message in line
    assert not (tmp_path / "data").exists()


def truncate(data: Path) -> None:
    os.truncate(data / "shards/train-00000.bin", 1001)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "train-00000.bin: truncated, 1,001 bytes where the manifest says 8,000: prepare the data again"),
        (lambda data: edit_json(data / "manifest.json", dtype="uint32"), "its fields contradict each other"),
        (lambda data: (data / "manifest.json").write_text("{"), "not a manifest of prepared data"),
        (lambda data: (data / "manifest.json").unlink(), "no prepared data (no manifest.json in it): make it with"),
    ],
)
def test_damaged_data_are_told_and_leave_nothing(
    damage: Any, message: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(data, tmp_path / "data")
    damage(tmp_path / "data")
    assert message in refusal(capsys, *train(tmp_path / "data", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# --- training --------------------------------------------------------------------------------------------------------


def test_a_run_tells_its_verdict_and_is_not_trained_again(
    trained: list[Path], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained[0]
    before = (run / "metrics.jsonl").read_bytes()
    said = output(capsys, *train(data, run))
    assert said.startswith(f"{run}: ")
    assert decode_json((run / "verdict.json").read_text())["word"] in said
    assert decode_json(output(capsys, *train(data, run), "--json")) == decode_json((run / "verdict.json").read_text())
    assert (run / "metrics.jsonl").read_bytes() == before


def test_progress_goes_to_standard_error_in_plain_lines(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train(data, tmp_path / "run")) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1
    first, *_, last = said.err.splitlines()
    assert first == "siamese @ 0.001, seed 0: 8 steps of 32 tokens, starts"
    assert "held-out" in last
    assert "step 8/8: loss " in said.err
    assert "\x1b" not in said.err


def test_a_run_directory_of_another_configuration(
    trained: list[Path], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, *train(data, trained[0], **{"--seed": 5}))
    assert "belongs to another configuration" in line
    assert line.endswith("choose another directory")


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_damaged_checkpoints(
    trained: list[Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    (run / "verdict.json").unlink()
    older, newest = sorted((run / "checkpoints").iterdir())
    flip_a_byte(newest / "model.safetensors")
    assert main(train(data, run)) == 0
    assert f"{newest} is no whole checkpoint" in (said := capsys.readouterr().err)
    assert f"going back to {older.name}" in said
    assert records(run) == records(trained[0])

    (run / "verdict.json").unlink()
    for checkpoint in (run / "checkpoints").iterdir():
        flip_a_byte(checkpoint / "optimizer.safetensors")
    capsys.readouterr()
    assert main(train(data, run)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"siamesenorm: no checkpoint in .* is whole .*: remove .*checkpoints to train this run", line)
    assert not (run / "verdict.json").exists()
    shutil.rmtree(run / "checkpoints")
    assert main(train(data, run)) == 0
    assert records(run) == records(trained[0])


def test_a_full_disk_stops_a_run_that_goes_on_later(
    trained: list[Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = train(data, run)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        assert main(arguments) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "no room left to write" in line
    assert "free some space and repeat the command" in line
    left = [path for path in run.rglob("*") if path.name.endswith((".partial", ".tmp"))]
    assert left == []
    assert main(arguments) == 0
    assert records(run) == records(trained[0])


# --- the other commands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", available_topologies())
def test_every_topology_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain, "SIZES", {"nano": SIZES["nano"]})
    said = output(capsys, "explain", name)
    facts = json.loads(output(capsys, "explain", name, "--json"))
    assert facts["name"] == name
    assert said.startswith(f"{name}: {facts['title']}\n{facts['paper']}")
    assert re.search(r"arXiv|\d{4}\.\d{5}|https?://", facts["paper"])
    for part in ("formula", "diagram"):
        assert facts[part].strip()
        assert all(line.strip() in said for line in facts[part].splitlines())
    assert facts["boundary"]["bytes_a_token"] > 0
    parameters = [count_parameters(build_language_model("nano", topology=t, device="meta"))[0] for t in (name, "pre")]
    assert facts["extra_parameters"]["nano"]["parameters"] == parameters[0] - parameters[1]
    assert max(map(len, said.splitlines())) <= 120


def test_explain_lists_all_and_takes_options(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [line.split()[0] for line in output(capsys, "explain").splitlines()]
    assert listed == list(available_topologies())
    assert json.loads(output(capsys, "explain", "--json")).keys() == set(listed)
    facts = json.loads(output(capsys, "explain", "dhc-2:streams=4", "--json"))
    assert (facts["name"], facts["options"]["streams"]) == ("dhc-2:streams=4", 4)
    assert set(facts["extra_parameters"]) == set(SIZES)


def test_siamesenorm_adds_less_than_a_thousandth_of_the_parameters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(output(capsys, "sizes", "--json", "--topologies", "pre", "siamese", "siamese-post-pre"))
    assert {row["size"] for row in rows} == set(SIZES)
    large = [row for row in rows if row["dim"] >= 1024 and row["topology"] != "pre"]
    assert len(large) == 2 * 4
    assert all(0 < row["extra_percent"] < 0.1 for row in large)
    by_name = {(row["size"], row["topology"]): row for row in rows}
    # The paper's model: 16 blocks of 4 d^2 + 3 d 4d, embedding and head, two gains a block, one at the end, QK-norm.
    weights = 16 * (4 * 2048**2 + 3 * 2048 * 8192) + 2 * 50304 * 2048
    assert by_name["olmo-1.3b", "pre"]["parameters"] == weights + 16 * 2 * 2048 + 2048 + 16 * 2 * 2048
    monkeypatch.setattr(sizes, "SIZES", {"olmo-1.3b": SIZES["olmo-1.3b"]})
    said = output(capsys, "sizes", "--topologies", "pre", "siamese")
    assert f"{by_name['olmo-1.3b', 'siamese']['parameters']:,}" in said


def test_the_verdict_on_any_curve(trained: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{step},{2 + 3 / step:.4f}" for step in range(1, 101)]
    curve = tmp_path / "losses.csv"
    curve.write_text("\n".join(["step,train_loss", *rows]))
    assert output(capsys, "verdict", str(curve), "--column", "train_loss").startswith("stable: best loss 2.0")
    curve.write_text("\n".join(["step,loss", *rows[:60], *(f"{step},7.5" for step in range(61, 101))]))
    assert "diverged, rose and stayed: from step " in output(capsys, "verdict", str(curve))
    facts = decode_json(output(capsys, "verdict", str(curve), "--json", "--thresholds.rise", "9"))
    assert facts["word"] != "diverged"
    assert facts["thresholds"]["rise"] == 9.0
    assert "unknown column 'los': did you mean loss" in refusal(capsys, "verdict", str(curve), "--column", "los")
    for options, message in [
        ("--unigram-entropy nan", "unigram_entropy is nan"),
        ("--steps-total 99", "steps_total is 99: the curve goes to step 100"),
        ("--warmup-steps -1", "warmup_steps is -1"),
    ]:
        assert message in refusal(capsys, "verdict", str(curve), *options.split())
    stored = decode_json((trained[0] / "verdict.json").read_text())
    assert decode_json(output(capsys, "verdict", str(trained[0]), "--json")) == stored


def test_calibration_on_two_runs(trained: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = output(capsys, "calibrate", *map(str, trained), "--out", str(tmp_path / "calibration.json"))
    report = json.loads((tmp_path / "calibration.json").read_text())
    assert f"{len(report['flagged'])} of 2 safe runs were not called stable" in said
    assert report["runs"] == [run.name for run in trained]
    within_a_file = str(tmp_path / "calibration.json" / "again.json")
    assert "choose another path" in refusal(capsys, "calibrate", str(trained[0]), "--out", within_a_file)
