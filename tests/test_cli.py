"""The command line: commands, help, exit codes and files; the wording of refusals is in test_messages.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import siamesenorm
from refusals import REFUSED, TINY, complete, refusal
from siamesenorm import Topology, available_norms, available_topologies, build_language_model, build_norm
from siamesenorm.cli import COMMANDS, explain, main, sizes
from siamesenorm.data import PreparedData
from siamesenorm.files import decode_json
from siamesenorm.models.cost import count_parameters
from siamesenorm.models.language import SIZES, language_model_config
from siamesenorm.topologies import topology_name
from siamesenorm.training.loop import TrainingLoop
from siamesenorm.training.presets import PRESETS
from siamesenorm.training.stop_signals import Interrupted
from training_runs import edit_json, records, write_data


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


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_and_version_do_without_torch() -> None:
    program = "import sys; from siamesenorm.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    expected = {
        "--help": COMMANDS,
        "--version": [siamesenorm.__version__],
        "train --help": PRESETS,
        "sweep -h": PRESETS,
    }
    for options, words in expected.items():
        arguments = [sys.executable, "-c", program, *options.split()]
        said = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
        assert said.splitlines()[-1] == "False"
        assert all(word in said for word in words)


def test_the_module_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "siamesenorm", "trian"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1


def option_texts(shown: str) -> dict[str, str]:
    """Return the sentences beside or below each option of a help in one column, without defaults."""
    texts: dict[str, str] = {}
    option = ""
    for content in re.findall("^[ │] (.*?)[ │]*$", shown, re.MULTILINE):
        if re.match(r"--?\w|[{[]", content):
            option, _, same_line = content.partition("  ")
            texts[option] = same_line
        elif content.startswith("    ") and option:
            texts[option] += f" {content}"
    return {option: re.sub(r"\((default|required).*", "", text).strip() for option, text in texts.items()}


PRESET_COMMANDS = [f"{command} {preset}" for command in ("train", "sweep") for preset in PRESETS]


@pytest.mark.parametrize("command", [*PRESET_COMMANDS, *COMMANDS])
def test_every_command_shows_a_sentence_for_each_option(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = output(capsys, *command.split(), "--help")
    assert shown.startswith(f"usage: siamesenorm {command}")
    texts = option_texts(shown)
    assert len(texts) > 1 or command in ("train", "sweep")
    assert {option for option, text in texts.items() if not re.search(r"\w+ \w+", text)} == set()


def test_an_option_without_a_sentence_is_found() -> None:
    shown = "│ --steps INT       │\n│       (default: 8)│\n│ --out PATH  Where it goes. (required) │"
    assert option_texts(shown) == {"--steps INT": "", "--out PATH": "Where it goes."}


@pytest.mark.parametrize("command", ["train mini", "sweep mini", "explain", "sizes"])
def test_where_a_topology_is_asked_for_the_help_lists_them_all(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = set(re.split(r"[^\w-]+", output(capsys, *command.split(), "--help")))
    assert set(available_topologies()) <= words


def test_the_help_lists_norms_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    words = set(re.split(r"[^\w.-]+", output(capsys, "train", "mini", "--help").replace(". ", " ")))
    assert {*available_norms(), *SIZES} <= words


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "siamesenorm.cli.explain", raising=False)
    assert "siamesenorm[lab]" in refusal(capsys, "explain")


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("arguments", [["explain"], ["--help"], ["sizes", "--help"]])
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
        raise interruptions.pop()

    interruptions = [Interrupted(signal.SIGTERM), KeyboardInterrupt()]
    monkeypatch.setattr(TrainingLoop, "_validate", interrupt)
    assert main(train(data, tmp_path / "run")) == 130
    assert main(train(data, tmp_path / "run")) == 143
    assert capsys.readouterr().err.splitlines()[-1].startswith("siamesenorm: ")
    monkeypatch.undo()
    assert main(train(data, tmp_path / "run")) == 0
    assert [record["step"] for record in records(tmp_path / "run", "train")] == list(range(1, 9))


# --- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_arguments_get_one_line_and_leave_nothing(
    arguments: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments.replace("DATA", str(data)).replace("NOWHERE", str(tmp_path / "nowhere")).split()
    assert len(refusal(capsys, *complete(words, tmp_path / "run"))) < 400
    assert list(tmp_path.iterdir()) == []


def test_another_version_of_the_parser_still_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its events are not a public interface: without them the line names no option."""
    from tyro import _errors

    monkeypatch.setattr(_errors, "on_parse_error", lambda hook: contextlib.nullcontext())
    refusal(capsys, "verdict")


def test_a_long_path_is_not_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ("long-" * 40)
    path.write_text("x")
    assert str(path) in refusal(capsys, "prepare", "--source", "a", "--out", str(path))


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
    ("name", "content"),
    [
        ("empty.txt", b""),
        ("binary.txt", bytes(range(256)) * 40),
        ("cut.jsonl", b'{"text": "whole"}\n{"text": "cut'),
        ("no-field.jsonl", b'{"content": "x"}\n'),
        ("cut.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x01\x02"),
        ("absent.txt", None),
    ],
)
def test_bad_text_is_refused_and_leaves_nothing(
    name: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    line = refusal(capsys, "prepare", "--source", str(tmp_path / name), "--out", str(tmp_path / "data"))
    assert name in line
    assert not (tmp_path / "data").exists()


def truncate(data: Path) -> None:
    os.truncate(data / "shards/train-00000.bin", 1001)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        lambda data: edit_json(data / "manifest.json", dtype="uint32"),
        lambda data: (data / "manifest.json").write_text("{"),
        lambda data: (data / "manifest.json").unlink(),
        lambda data: (data / "manifest.json").rename(data / "m") and (data / "manifest.json").mkdir(),
    ],
)
def test_damaged_data_are_refused_and_leave_nothing(
    damage: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(data, tmp_path / "data")
    damage(tmp_path / "data")
    refusal(capsys, *train(tmp_path / "data", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# --- training --------------------------------------------------------------------------------------------------------


def test_a_run_tells_its_verdict_and_is_not_trained_again(
    trained: list[Path], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained[0]
    before = (run / "metrics.jsonl").read_bytes()
    said = output(capsys, *train(data, run))
    assert said.startswith(f"{run}: ")
    assert decode_json((run / "verdict.json").read_text())["label"] in said
    assert decode_json(output(capsys, *train(data, run), "--json")) == decode_json((run / "verdict.json").read_text())
    assert (run / "metrics.jsonl").read_bytes() == before


def test_progress_goes_to_standard_error_in_plain_lines(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train(data, tmp_path / "run")) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{tmp_path / 'run'}: ")
    assert "8/8" in said.err
    assert "\x1b" not in said.err


def test_a_run_directory_of_another_configuration(
    trained: list[Path], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "seed" in refusal(capsys, *train(data, trained[0], **{"--seed": 5}))


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_damaged_checkpoints(
    trained: list[Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = [*train(data, run), "--execution.keep-states"]
    assert main(command) == 0
    (run / "verdict.json").unlink()
    capsys.readouterr()
    _, newest = sorted((run / "checkpoints").iterdir())
    flip_a_byte(newest / "model.safetensors")
    assert main(command) == 0
    assert newest.name in capsys.readouterr().err
    assert records(run) == records(trained[0])

    (run / "verdict.json").unlink()
    for checkpoint in (run / "checkpoints").iterdir():
        flip_a_byte(checkpoint / "optimizer.safetensors")
    assert main(command) == 2
    assert not (run / "verdict.json").exists()
    shutil.rmtree(run / "checkpoints")
    assert main(command) == 0
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
    left = [path for path in run.rglob("*") if path.name.endswith((".partial", ".tmp"))]
    assert left == []
    assert main(arguments) == 0
    assert records(run) == records(trained[0])


# --- the other commands ----------------------------------------------------------------------------------------------


@pytest.mark.every_nth(4)
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
    assert facts["boundary"]["bytes_per_token"] > 0
    parameters = [count_parameters(build_language_model("nano", topology=t, device="meta"))[0] for t in (name, "pre")]
    assert facts["extra_parameters"]["nano"]["parameters"] == parameters[0] - parameters[1]
    assert max(map(len, said.splitlines())) <= 120


def test_explain_lists_all_and_takes_options(capsys: pytest.CaptureFixture[str]) -> None:
    groups = json.loads(output(capsys, "explain", "--json"))
    assert [list(group) for group in groups.values()] == [list(available_topologies()), list(available_norms())]
    said = output(capsys, "explain")
    assert all(name in said and title in said for group in groups.values() for name, title in group.items())
    facts = json.loads(output(capsys, "explain", "dhc-2:streams=4", "--json"))
    assert (facts["name"], facts["options"]["streams"]) == ("dhc-2:streams=4", 4)
    assert set(facts["extra_parameters"]) == set(SIZES)


@pytest.mark.parametrize("name", available_norms())
def test_every_norm_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(output(capsys, "explain", name, "--json"))
    assert facts["name"] == name and "arXiv" in facts["description"]
    assert facts["parameters"] == {n: list(p.shape) for n, p in build_norm(name, 2048).named_parameters()}
    assert facts["description"] in output(capsys, "explain", name)


def test_norms_are_explained_with_options(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(output(capsys, "explain", "SeeDNorm:heads=4", "--json"))
    assert (facts["name"], facts["options"]["heads"]) == ("seednorm:heads=4", 4)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Pre-Norm", "pre"), ("pre norm", "pre"), ("SiameseNorm", "siamese"), ("Siamese", "siamese"),
        ("SiameseNorm Post-Pre", "siamese-post-pre"), ("post_norm", "post"), ("Peri-LN", "peri"), ("OLMo 2", "olmo2"),
        ("Hyper-Connections", "dhc-2"), ("mHC", "mhc-4"), ("HybridNorm", "hybridnorm"), ("DHC-2:streams=4",
        "dhc-2:streams=4"), ("LayerNorm", "layernorm"), ("Layer Norm", "layernorm"), ("DyT", "dyt"),
    ],
)  # fmt: skip
def test_titles_are_understood(spelling: str, name: str) -> None:
    found = explain.find(spelling)
    assert (topology_name(found) if isinstance(found, Topology) else str(found)) == name


def test_runs_are_listed(trained: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(output(capsys, "runs", str(trained[0].parent), str(trained[1]), "--json"))
    assert [row["directory"] for row in rows] == [str(run) for run in (trained[0], trained[1])]
    assert [row["seed"] for row in rows] == [0, 1]
    for row, run in zip(rows, trained, strict=True):
        assert (row["step"], row["steps"]) == (8, 8)
        assert row["verdict"] == decode_json((run / "verdict.json").read_text())["label"]
        assert row["method"].startswith("siamese")
    said = output(capsys, "runs", str(trained[0].parent))
    assert str(trained[0]) in said.replace("\n", "")


def test_an_unreadable_run_is_listed_as_such(
    trained: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained[0], tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("{")
    (row,) = json.loads(output(capsys, "runs", str(tmp_path), "--json"))
    assert (row["method"], row["verdict"].split(":")[0]) == (None, "unreadable")


# Those of timm's ViT, and of MAE's and DiT's code but for fixed positions: of MAE's class token, and of DiT's patches.
@pytest.mark.parametrize(
    ("family", "size", "parameters"),
    [
        ("vision", "vit-b", 86_567_656),
        ("autoencoder", "mae-b", 111_907_840 - 768 - 512),
        ("diffusion", "dit-xl-2", 675_129_632 - 256 * 1152),
    ],
)
def test_sizes_of_other_families_are_the_published_ones(
    family: Any, size: str, parameters: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known, config_of = sizes.FAMILIES[family]
    monkeypatch.setitem(sizes.FAMILIES, family, ({size: known[size]}, config_of))
    (row,) = json.loads(output(capsys, "sizes", "--json", "--family", family, "--topologies", "pre"))
    assert row["parameters"] == parameters


def test_siamesenorm_adds_less_than_a_thousandth_of_the_parameters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(output(capsys, "sizes", "--json", "--topologies", "pre", "siamese"))
    assert {row["size"] for row in rows} == set(SIZES)
    large = [row for row in rows if row["dim"] >= 1024 and row["topology"] != "pre"]
    assert len(large) == sum(fields["dim"] >= 1024 for fields in SIZES.values())
    assert all(0 < row["extra_percent"] < 0.1 for row in large)
    by_name = {(row["size"], row["topology"]): row for row in rows}
    # The paper's model: 16 blocks of 4 d^2 + 3 d 4d, embedding and head, two gains a block, one at the end, QK-norm.
    weights = 16 * (4 * 2048**2 + 3 * 2048 * 8192) + 2 * 50304 * 2048
    assert by_name["olmo-1.3b", "pre"]["parameters"] == weights + 16 * 2 * 2048 + 2048 + 16 * 2 * 2048
    monkeypatch.setitem(sizes.FAMILIES, "language", ({"olmo-1.3b": SIZES["olmo-1.3b"]}, language_model_config))
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
    assert facts["label"] != "diverged"
    assert facts["thresholds"]["rise"] == 9.0
    for options in ("--column los", "--floor nan", "--steps-total 99", "--warmup-steps -1"):
        refusal(capsys, "verdict", str(curve), *options.split())
    stored = decode_json((trained[0] / "verdict.json").read_text())
    assert decode_json(output(capsys, "verdict", str(trained[0]), "--json")) == stored


def test_calibration_on_two_runs(trained: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = output(capsys, "calibrate", *map(str, trained), "--out", str(tmp_path / "calibration.json"))
    report = json.loads((tmp_path / "calibration.json").read_text())
    assert f"called stable: {2 - len(report['flagged'])} of 2" in said
    assert report["runs"] == [run.name for run in trained]
    within_a_file = str(tmp_path / "calibration.json" / "again.json")
    refusal(capsys, "calibrate", str(trained[0]), "--out", within_a_file)
