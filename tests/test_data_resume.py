"""Preparations that were killed, or ran out of disk, and repeated: the same bytes as one never interrupted."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from siamesenorm.data import PrepareConfig, PreparedData, PrepareProgress, StoppedError, preparation, prepare, storage
from siamesenorm.errors import UserError

# Python 3.12 warns of a fork in a process with threads; the children here need none of them.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

CHUNK_CHARACTERS = 4000
SHARD_BYTES = 20_000

KILLED_WITH_WORKERS = f"""
import os, signal, sys
from pathlib import Path
from siamesenorm.data import PrepareConfig, preparation, prepare, storage

def killed_after_some_chunks(progress):
    if progress.stage == "tokens" and progress.documents > 60:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    preparation.CHUNK_CHARACTERS = {CHUNK_CHARACTERS}
    storage.SHARD_BYTES = {SHARD_BYTES // 4}
    out = Path(sys.argv[2])
    config = PrepareConfig(source=sys.argv[1], out=out, tokenizer="bpe:300", validation_fraction=0.1, workers=2)
    prepare(config, killed_after_some_chunks)
"""


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", CHUNK_CHARACTERS)
    monkeypatch.setattr(storage, "SHARD_BYTES", SHARD_BYTES)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"Document {i}: " + "some words " * 20}) for i in range(200)))
    return path


@pytest.fixture
def whole(source: Path) -> dict[str, bytes]:
    """What a preparation that nobody interrupts leaves."""
    return contents(prepare(config(source, source.parent / "whole")).path)


def config(source: Path, out: Path, **options: Any) -> PrepareConfig:
    return PrepareConfig(source=str(source), out=out, validation_fraction=0.1, **options)


def contents(path: Path) -> dict[str, bytes]:
    """Return the files of a directory; whichever name the directory of the shards has, as if it were the first."""
    files = {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return {
        name.replace("shards-2", "shards"): content.replace(b"shards-2", b"shards") for name, content in files.items()
    }


def verified(path: Path) -> PreparedData:
    data = PreparedData.open(path)
    data.verify()
    return data


def in_child(work: Callable[[], object]) -> int:
    """Do some work in a forked process and return how it ended: its exit code, or minus the signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at_step(number: int, work: Callable[[], object]) -> None:
    """Do some work in this process, and kill it on the way into its n-th durable step."""
    steps = count(1)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(steps) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    os.fsync, os.replace, shutil.rmtree = map(counted, (os.fsync, os.replace, shutil.rmtree))
    work()


def test_killed_at_every_durable_step(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slow, and of no matter to a kill: the system keeps what was written.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    unfinished = 0
    for number in count(1):
        job = config(source, tmp_path / f"out-{number}")
        status = in_child(lambda number=number, job=job: killed_at_step(number, lambda: prepare(job)))
        if status != -signal.SIGKILL:
            break
        if (job.out / "manifest.json").exists():
            verified(job.out)
        else:
            unfinished += 1
        assert contents(prepare(job).path) == whole, f"killed at step {number}"
    assert status == 0
    # Four chunks of five or six steps each, beside the settings, the manifest and the moves. After the manifest's
    # own move there are left: its sync, the removal of the partial directory, and the sync of that.
    assert number > 30
    assert unfinished == number - 1 - 3


@pytest.mark.laws
def test_a_restart_killed_at_every_durable_step_loses_nothing(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    earlier = prepare(config(source, tmp_path / "earlier", tokenizer="bpe:300"))
    digests = {earlier.digest, PreparedData.open(tmp_path / "whole").digest}
    for number in count(1):
        shutil.copytree(earlier.path, tmp_path / f"out-{number}")
        job = config(source, tmp_path / f"out-{number}", restart=True)
        status = in_child(lambda number=number, job=job: killed_at_step(number, lambda: prepare(job)))
        if status != -signal.SIGKILL:
            break
        # At every moment there are whole data, the earlier ones or the new ones.
        assert verified(job.out).digest in digests
        if verified(job.out).digest != earlier.digest:
            prepare(config(source, job.out))
            assert len(list(job.out.iterdir())) == 2, f"killed at step {number}"
        assert contents(prepare(job).path) == whole, f"killed at step {number}"
    assert status == 0
    assert number > 30


def test_killed_with_its_workers(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(KILLED_WITH_WORKERS)
    command = [sys.executable, str(script), str(source), str(out)]
    # Returns only when all its processes are gone, for each holds the output open: no worker outlives its parent.
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    with pytest.raises(UserError, match=str(out)):
        PreparedData.open(out)
    with pytest.raises(UserError, match="tokenizer.*--restart"):
        prepare(config(source, out))

    monkeypatch.setattr(storage, "SHARD_BYTES", SHARD_BYTES // 4)
    whole = prepare(config(source, tmp_path / "whole", tokenizer="bpe:300"))
    monkeypatch.setattr(preparation, "train_bpe", None)  # it was trained before the kill
    reports: list[PrepareProgress] = []
    resumed = prepare(config(source, out, tokenizer="bpe:300"), reports.append)
    assert reports[0].stage == "resumed"
    assert 60 < reports[0].documents < 200
    assert contents(resumed.path) == contents(whole.path)


def test_a_lost_worker(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(progress: PrepareProgress) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    whole = prepare(config(source, tmp_path / "whole", tokenizer="bpe:300"))
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", CHUNK_CHARACTERS // 4)
    out = tmp_path / "out"
    with pytest.raises(StoppedError, match="--workers"):
        prepare(config(source, out, tokenizer="bpe:300", workers=2), lose)
    assert contents(prepare(config(source, out, tokenizer="bpe:300")).path) == contents(whole.path)


def test_a_limit_on_the_size_of_files(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """The system cuts a write in the middle, as a disk does that fills up."""
    out, message = tmp_path / "out", tmp_path / "message"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_001, 20_001))
        try:
            prepare(config(source, out))
        except StoppedError as error:
            message.write_text(str(error))

    assert in_child(limited) == 0
    assert message.read_text().startswith(f"{out}: ")
    assert "\n" not in message.read_text()
    assert sorted(contents(out)) == [".partial/lock", ".partial/settings.json"]
    assert not (out / "manifest.json").exists()
    assert contents(prepare(config(source, out)).path) == whole


def test_a_shortened_partial_file_starts_again(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    def stop(progress: PrepareProgress) -> None:
        if progress.documents > 100:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(config(source, out), stop)
    (out / ".partial/shards/train-00000.bin").write_bytes(b"short")
    with pytest.raises(UserError, match="train-00000.bin"):
        prepare(config(source, out))
    assert list(out.iterdir()) == []
    assert contents(prepare(config(source, out)).path) == whole


def test_a_broken_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrived is kept, also over a second attempt that gets nothing; a first attempt leaves nothing."""
    rows = [{"text": f"Document {i}: " + "some words " * 20} for i in range(200)]
    arriving = 0

    def load_dataset(path: str, **options: Any) -> Any:
        if arriving == 0:
            raise ConnectionError("no route")
        yield from rows[:arriving]
        if arriving < len(rows):
            raise ConnectionError("reset by peer")

    datasets = types.ModuleType("datasets")
    datasets.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", CHUNK_CHARACTERS)
    job = PrepareConfig(source="hf:owner/name", out=tmp_path / "out", validation_fraction=0.1)
    with pytest.raises(StoppedError, match="no route"):
        prepare(job)
    assert not job.out.exists()
    kept = []
    for arriving in (100, 0, 200):
        if arriving < 200:
            with pytest.raises(StoppedError):
                prepare(job)
            kept.append(contents(job.out))
        else:
            reports: list[PrepareProgress] = []
            prepare(job, reports.append)
    assert kept[0] == kept[1]
    assert ".partial/00000.json" in kept[0]
    assert reports[0].stage == "resumed"
    whole = PrepareConfig(source="hf:owner/name", out=tmp_path / "whole", validation_fraction=0.1)
    assert contents(job.out) == contents(prepare(whole).path)
