"""Checkpoints survive whatever happens to the process or the disk: by killing it, filling it and damaging files."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_stages import STAGES, save_checkpoint, watch_stages
from siamesenorm.errors import UserError
from siamesenorm.training import checkpoint as checkpoint_module
from siamesenorm.training.checkpoint import keep_last_weights, load_checkpoint, read_checkpoint
from siamesenorm.training.distributed_checkpoint import CheckpointSaver


def groups(seed):
    """Two groups with every kind of tensor a training state has, NaN payloads and negative zeros included."""
    generator = torch.Generator().manual_seed(seed)
    odd = torch.randn(3, 5, generator=generator)
    model = {
        "float32": torch.randn(4, 7, generator=generator),
        "bfloat16": odd.bfloat16(),
        "float16": odd.half(),
        "float64": odd.double() / 3,
        "int64": torch.tensor([-(2**62), 2**53 + 1]),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(math.pi),
        "empty": torch.zeros(0, 3),
        "strided": odd.t(),
        "special": torch.tensor([math.nan, -0.0, math.inf, 1e-45, -math.inf]),
        "payload": torch.tensor([0x7FC00001, 0x7F800002 - 2**32 + 2**31]).int().view(torch.float32),
    }
    model["tied"] = model["float32"]
    return {"model": model, "optimizer": {"weight/step": torch.tensor(3.0 + seed), "weight/exp_avg": odd}}


def assert_same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for group in ours:
        assert ours[group].keys() == theirs[group].keys()
        for name, tensor in ours[group].items():
            other = theirs[group][name]
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
            bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, other)]
            assert torch.equal(*bits), name


def save(root, step, *, keep=3):
    return save_checkpoint(root, step, groups(step), {"step": step, "metrics": 17.5}, keep=keep)


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_every_bit_comes_back(tmp_path):
    state = {"step": 100, "loss": 0.1 + 0.2, "best": math.inf, "nested": {"list": [1, None, "x"], "flag": True}}
    root = tmp_path / "run" / "checkpoints"
    path = save_checkpoint(root, 100, groups(1), state, keep=1)
    checkpoint = load_checkpoint(root)
    assert (checkpoint.step, checkpoint.path, checkpoint.skipped) == (100, path, ())
    assert checkpoint.state == state
    assert_same_bits(checkpoint.tensors, groups(1))


def test_the_files_are_safetensors_and_json_as_the_manifest_says(tmp_path):
    path = save(tmp_path, 100)
    assert names(path) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert_same_bits({"model": load_file(path / "model.safetensors")}, {"model": groups(100)["model"]})
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["schema"], manifest["step"]) == (1, 100)
    for name, entry in manifest["files"].items():
        shasum = subprocess.run(["sha256sum", path / name], capture_output=True, check=True, text=True)
        assert entry == {"bytes": (path / name).stat().st_size, "sha256": shasum.stdout.split()[0]}
    assert sorted(manifest["files"]) == ["model.safetensors", "optimizer.safetensors", "state.json"]


def test_changing_a_loaded_tensor_does_not_change_the_file(tmp_path):
    save(tmp_path, 100)
    for tensor in load_checkpoint(tmp_path).tensors["model"].values():
        tensor.zero_()
    assert_same_bits(load_checkpoint(tmp_path).tensors, groups(100))


def test_the_stages_come_in_order(tmp_path, monkeypatch):
    seen = []
    watch_stages(seen.append, monkeypatch.setattr)
    save(tmp_path, 100)
    assert tuple(seen) == STAGES


def test_the_newest_is_loaded_and_only_so_many_are_kept(tmp_path):
    for step in (100, 200, 300, 400):
        save(tmp_path, step, keep=2)
        assert load_checkpoint(tmp_path).step == step
    assert names(tmp_path) == ["step-00000300", "step-00000400"]
    assert_same_bits(load_checkpoint(tmp_path).tensors, groups(400))


def test_steps_are_ordered_as_numbers(tmp_path):
    save(tmp_path, 99_999_999)
    save(tmp_path, 100_000_000)
    assert load_checkpoint(tmp_path).step == 100_000_000


def test_older_ones_are_there_until_the_new_one_is_whole(tmp_path, monkeypatch):
    save(tmp_path, 100, keep=1)

    def check(stage):
        steps = [name for name in names(tmp_path) if not name.endswith(".partial")]
        if stage == "pruned":
            assert steps == ["step-00000200"]
        else:
            assert "step-00000100" in steps
            assert (stage == "renamed") == ("step-00000200" in steps)

    watch_stages(check, monkeypatch.setattr)
    save(tmp_path, 200, keep=1)


def test_nothing_there_is_none(tmp_path):
    assert load_checkpoint(tmp_path / "absent") is None
    assert load_checkpoint(tmp_path) is None
    (tmp_path / "step-00000100.partial").mkdir()
    assert load_checkpoint(tmp_path) is None, "a first checkpoint that was never finished"


def flip_a_byte(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def cut_short(path):
    os.truncate(path / "optimizer.safetensors", 40)


DAMAGES = {
    "the checksum of model.safetensors does not match": flip_a_byte,
    "optimizer.safetensors has 40 bytes instead of": cut_short,
    "state.json is missing": lambda path: (path / "state.json").unlink(),
    "manifest.json is missing": lambda path: (path / "manifest.json").unlink(),
    "manifest.json is damaged": lambda path: (path / "manifest.json").write_text('{"schema": 1'),
    "manifest.json is damaged ": lambda path: (path / "manifest.json").write_text("[]"),
    "manifest.json is of schema 1, step 100": lambda path: shutil.copy(
        path.with_name("step-00000100") / "manifest.json", path
    ),
}


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_damaged_one_is_passed_over_and_named(tmp_path, fault):
    save(tmp_path, 100)
    DAMAGES[fault](save(tmp_path, 200))
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.step == 100
    assert_same_bits(checkpoint.tensors, groups(100))
    (line,) = checkpoint.skipped
    assert "step-00000200" in line
    assert fault.strip() in line


def test_unfinished_ones_are_reported_when_they_are_newer(tmp_path):
    save(tmp_path, 200)
    (tmp_path / "step-00000100.partial").mkdir()
    (tmp_path / "step-00000300.partial").mkdir()
    (line,) = load_checkpoint(tmp_path).skipped
    assert "step-00000300.partial" in line
    assert "never finished" in line


def test_none_whole_is_an_error(tmp_path):
    flip_a_byte(save(tmp_path, 100))
    cut_short(save(tmp_path, 200))
    with pytest.raises(UserError, match="step-00000200.*step-00000100") as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_saving_again_after_going_back_replaces_the_damaged_one(tmp_path):
    save(tmp_path, 100, keep=1)
    flip_a_byte(save(tmp_path, 200, keep=2))
    assert load_checkpoint(tmp_path).step == 100
    save(tmp_path, 150, keep=1)
    assert names(tmp_path) == ["step-00000150"], "what is broken and later must not count as newer"
    save(tmp_path, 200, keep=1)
    assert_same_bits(load_checkpoint(tmp_path).tensors, groups(200))


def test_a_whole_one_of_the_same_step_stays_and_a_later_one_forbids(tmp_path):
    path = save(tmp_path, 200)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert save(tmp_path, 200) == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    with pytest.raises(UserError, match="step-00000200"):
        save(tmp_path, 100)
    assert names(tmp_path) == ["step-00000200"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("moment", range(6))
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, code, moment):
    save(tmp_path, 100)
    calls = iter(range(100))
    sync = os.fsync

    def fsync(descriptor):
        if next(calls) == moment:
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if moment == 5:  # the rename is done: only its durability failed
        with pytest.raises(UserError):
            save(tmp_path, 200)
        assert load_checkpoint(tmp_path).step == 200
        return
    with pytest.raises(UserError, match="step-00000200") as caught:
        save(tmp_path, 200)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step-00000100"]
    assert_same_bits(load_checkpoint(tmp_path).tensors, groups(100))


def test_an_interruption_leaves_nothing_half_written(tmp_path, monkeypatch):
    save(tmp_path, 100)

    def interrupt(stage):
        if stage == "optimizer-half-written":
            raise KeyboardInterrupt

    watch_stages(interrupt, monkeypatch.setattr)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 200)
    assert names(tmp_path) == ["step-00000100"]


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(ValueError, match="complex64"):
        save_checkpoint(tmp_path, 100, {"model": {"z": torch.zeros(1, dtype=torch.complex64)}}, {}, keep=1)
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 100, {}, {"a": torch.zeros(1)}, keep=1)
    assert names(tmp_path) == []


# One process imports torch and forks a child for every death; it prints what it found, the test judges.
DEATHS = textwrap.dedent(
    """
    import json, os, resource, signal, sys
    from pathlib import Path
    import torch
    from checkpoint_stages import STAGES, save_checkpoint, watch_stages
    from siamesenorm.training.checkpoint import load_checkpoint
    from siamesenorm.training.run_record import MetricsLog, read_metrics

    def groups(step):
        generator = torch.Generator().manual_seed(step)
        tensors = {str(n): torch.randn(300, generator=generator).bfloat16() for n in range(4)}
        return {"model": tensors, "optimizer": {f"{n}/exp_avg": t.float() * 3 for n, t in tensors.items()}}

    def save(root, step, at_stage=None):
        if at_stage is not None:
            watch_stages(at_stage)
        save_checkpoint(root, step, groups(step), {"step": step}, keep=1)

    def child(work):
        pid = os.fork()
        if pid == 0:
            try:
                work()
            except BaseException as error:
                (Path(sys.argv[1]) / "error").write_text(f"{type(error).__name__}: {error}")
                os._exit(3)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def found(root):
        checkpoint = load_checkpoint(root)
        if checkpoint is None:
            return None
        ours, theirs = checkpoint.tensors, groups(checkpoint.step)
        same = ours.keys() == theirs.keys()
        same = same and all(torch.equal(ours[g][n], theirs[g][n]) for g in theirs for n in theirs[g])
        return checkpoint.step if same and checkpoint.state == {"step": checkpoint.step} else "other bits"

    root, report = Path(sys.argv[1]), {}
    for stage in STAGES:
        def die(reached):
            if reached == stage:
                os.kill(os.getpid(), signal.SIGKILL)
        first, later = root / f"first-{stage}", root / f"later-{stage}"
        save(later, 100)
        entry = report[stage] = {}
        entry["first"] = [child(lambda: save(first, 100, die)), found(first)]
        entry["later"] = [child(lambda: save(later, 200, die)), found(later)]
        save(later, 200)
        entry["again"] = [found(later), sorted(path.name for path in later.iterdir())]

    def limited(work):
        def run():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            work()
        return run

    full = root / "full"
    save(full, 100)
    report["full"] = [child(limited(lambda: save(full, 200))), found(full), sorted(p.name for p in full.iterdir())]
    report["full error"] = (root / "error").read_text()

    def fill():
        log = MetricsLog(root / "metrics.jsonl")
        for step in range(100):
            log.append({"step": step, "text": "x" * 60})
    report["metrics"] = [child(limited(fill)), [record["step"] for record in read_metrics(root / "metrics.jsonl")]]
    report["metrics error"] = (root / "error").read_text()
    report["metrics end"] = (root / "metrics.jsonl").read_bytes()[-1:].decode()
    print(json.dumps(report))
    """
)


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    root = tmp_path_factory.mktemp("deaths")
    here = Path(__file__).parent
    run = subprocess.run([sys.executable, "-c", DEATHS, root], capture_output=True, text=True, timeout=120, cwd=here)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_any_stage_the_last_whole_one_is_found(deaths, stage):
    killed, whole = -9, stage in ("renamed", "pruned")
    assert deaths[stage]["first"] == [killed, 100 if whole else None]
    assert deaths[stage]["later"] == [killed, 200 if whole else 100]
    assert deaths[stage]["again"] == [200, ["step-00000200"]]


def test_a_write_that_the_kernel_refuses_half_way_leaves_what_was_there(deaths):
    assert deaths["full"] == [3, 100, ["step-00000100"]]
    assert "step-00000200" in deaths["full error"]
    assert "room" in deaths["full error"]


def test_a_record_that_the_kernel_refuses_half_way_is_taken_back(deaths):
    status, steps = deaths["metrics"]
    assert status == 3
    assert steps == list(range(len(steps)))
    assert 5 < len(steps) < 20
    assert deaths["metrics end"] == "\n"
    assert "metrics.jsonl" in deaths["metrics error"]


def test_an_old_checkpoint_is_renamed_before_it_is_removed(tmp_path, monkeypatch):
    """A crash in the middle of a removal must not leave something with a final name."""
    save(tmp_path, 100)
    removed = []
    monkeypatch.setattr(checkpoint_module.shutil, "rmtree", lambda path, **_: removed.append(path.name))
    save(tmp_path, 200, keep=1)
    assert removed == ["step-00000100.partial"]
    assert (tmp_path / "step-00000100.partial").is_dir() and not (tmp_path / "step-00000100").exists()


def test_one_of_a_later_version_is_neither_read_nor_removed(tmp_path):
    path = save(tmp_path, 200)
    (path / "manifest.json").write_text('{"schema": 99, "layout": "unknown"}')
    for use in (load_checkpoint, lambda root: save(root, 200), lambda root: save(root, 100)):
        with pytest.raises(UserError, match="schema 99.*update"):
            use(tmp_path)
    assert names(tmp_path) == ["step-00000200"] and (path / "model.safetensors").exists()


def test_multiples_of_a_step_stay_and_after_the_end_their_weights(tmp_path):
    with CheckpointSaver(tmp_path, keep=1, every=20) as saver:
        for step in (10, 20, 30, 40, 45):
            saver.save(step, groups(step), {})
    assert names(tmp_path) == ["step-00000020", "step-00000040", "step-00000045"]
    keep_last_weights(tmp_path, 20)
    assert names(tmp_path) == ["step-00000020", "step-00000040", "step-00000045"]
    for step in (20, 40, 45):
        path = tmp_path / f"step-{step:08d}"
        assert names(path) == ["manifest.json", "model.safetensors", "state.json"]
        assert_same_bits(read_checkpoint(path).tensors, {"model": groups(step)["model"]})


def test_a_save_copies_what_training_changes_meanwhile(tmp_path):
    tensors = groups(1)
    with CheckpointSaver(tmp_path, keep=1) as saver:
        saver.save(1, tensors, {})
        for tensor in tensors["model"].values():
            tensor.zero_()
    assert_same_bits(load_checkpoint(tmp_path).tensors, groups(1))


def test_a_reader_beside_the_run_always_finds_a_whole_one(tmp_path):
    save(tmp_path, 0)
    found, done = [], threading.Event()

    def read():
        while not done.is_set():
            checkpoint = load_checkpoint(tmp_path)
            assert_same_bits(checkpoint.tensors, groups(checkpoint.step))
            found.append(checkpoint.step)

    with ThreadPoolExecutor() as pool, CheckpointSaver(tmp_path, keep=1) as saver:
        reading = pool.submit(read)
        for step in range(1, 30):
            saver.save(step, groups(step), {})
        done.set()
        reading.result()
    assert found == sorted(found) and len(set(found)) > 3
