"""Benchmarks: what they count is counted right, and their files say what was and was not measured."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import goals
import peers
from siamesenorm.benchmark import boundary, gpu, measurement, norms, step
from siamesenorm.benchmark.boundary import Boundary
from siamesenorm.benchmark.measurement import (
    at_common_pace,
    kept_for_backward,
    measure,
    milliseconds,
    ratio,
    traffic_of,
)
from siamesenorm.benchmark.results import Results, Session, markdown, measuring
from siamesenorm.cli import main
from siamesenorm.errors import UserError
from siamesenorm.kernels import boundary_plain
from siamesenorm.kernels import operators as boundary_operator
from siamesenorm.norms import NormSpec, RMSNorm
from siamesenorm.topologies import ResidualSpec, available_topologies, build_topology

CPU = torch.device("cpu")
# PyTorch's compiler itself, where there is CUDA.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "COPIED_BYTES", 1 << 16)


def test_every_candidate_runs_once_a_round_in_turning_order() -> None:
    calls: list[str] = []
    actions = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = measure(actions, device=CPU, rounds=3, warmup=0)
    assert "".join(calls) == "abc" + "bca" + "cab"
    assert {name: len(seconds) for name, seconds in timings.items()} == {"a": 3, "b": 3, "c": 3}


def test_what_prepares_a_measurement_is_not_timed() -> None:
    order: list[str] = []
    measure({"a": lambda: order.append("a")}, device=CPU, rounds=2, warmup=1, prepare=lambda: order.append("flush"))
    assert order == ["a", "flush", "a", "flush", "a"]


def test_a_ratio_is_that_of_the_times_that_are_shown() -> None:
    timings = {"ours": [1.0, 4.0, 9.0], "theirs": [2.0, 4.0, 3.0], "more": [1.0, 1.0, 1.0]}
    assert ratio(timings, "ours", "theirs") == {"median": 1.33333, "low": 0.75, "high": 2.0}
    ours, theirs = (milliseconds(timings, name)["median"] for name in ("ours", "theirs"))
    assert ours / theirs == pytest.approx(4 / 3)
    assert ratio(timings, ("theirs", "more"), "ours")["median"] == 1.0


def test_a_slow_round_changes_no_time() -> None:
    even = {"a": [2.0, 2.0, 2.0], "b": [3.0, 3.0, 3.0], "c": [4.0, 4.0, 4.0]}
    slowed = {name: [seconds[0], 5 * seconds[1], 5 * seconds[2]] for name, seconds in even.items()}
    found = at_common_pace(slowed)
    assert {name: [one / seconds[0] for one in seconds] for name, seconds in found.items()} == {
        name: pytest.approx([1.0, 1.0, 1.0]) for name in even
    }
    assert ratio(found, "b", "a")["median"] == pytest.approx(1.5)


def test_kept_memory_is_counted_once_and_without_parameters() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
    kept = kept_for_backward(lambda: (x @ weight).tanh().sum(), besides=[weight])
    assert sorted(kept) == [3 * 4 * 4, 3 * 4 * 4], "x for the product, tanh's result"
    twice = kept_for_backward(lambda: (x * x).sum())
    assert twice == [3 * 4 * 4], "one tensor, saved under two names"


@pytest.mark.parametrize("name", available_topologies())
def test_every_topology_has_a_boundary_to_measure(name: str) -> None:
    spec = ResidualSpec(dim=16, norm=NormSpec())
    built = Boundary.build(build_topology(name), spec, 8, CPU)
    results = built.forward()
    assert results[0].shape == built.close(results).shape == (8, 16)
    values = built.values()
    assert values["gradient of stream 0"].any() and values["gradient of output"].any()


def test_a_fused_boundary_is_the_plain_one() -> None:
    topology = build_topology("siamese")
    plain, fused = (
        Boundary.build(topology, ResidualSpec(dim=16, kernels=kernels), 8, CPU) for kernels in ("plain", "fused")
    )
    for one, other in zip(plain.forward(), fused.forward(), strict=True):
        torch.testing.assert_close(one, other)


def test_boundaries_are_measured_and_what_is_missing_is_named() -> None:
    settings = boundary.BoundarySettings(
        topologies=("rezero", "siamese"), dims=(16,), tokens=32, stream_dtypes=("float32",), output_dtype="float32",
        candidates=("plain", "fused"), rounds=2,
    )  # fmt: skip
    results = boundary.measure_boundaries(Session("boundary", settings, CPU))
    assert [(row["topology"], row["candidate"]) for row in results.rows] == [
        ("rezero", "plain"), ("siamese", "plain"), ("siamese", "fused"),
    ]  # fmt: skip
    assert results.not_measured == ["rezero: has no fused boundary"]
    fused = results.rows[-1]
    assert fused["forward_ms"]["median"] > 0
    assert fused["kept_tensors"] == 2


def test_the_least_traffic_is_that_of_the_boundary_that_is_measured() -> None:
    """Hybrid-Pre's MLP has a post-norm: 7 passes forward, where the mean of a block's two boundaries is 6.5."""
    spec = ResidualSpec(dim=64, kernels="fused")
    built = Boundary.build(build_topology("siamese"), spec, 8, CPU)
    rows, parameters = [*built.streams, built.output], [*built.before.parameters(), *built.after.parameters()]
    forward, backward = traffic_of(built.forward, rows, besides=parameters).values()
    statistics, scale = 3 * 8 * 4, 4
    assert (forward - statistics - scale, backward - statistics - scale) == (7 * 8 * 64 * 4, 8 * 8 * 64 * 4)


@pytest.mark.laws
def test_boundaries_are_measured_in_a_fresh_process() -> None:
    """What the compiler brings has not been imported there."""
    code = (
        "import torch\n"
        "from siamesenorm.benchmark import boundary\n"
        "from siamesenorm.benchmark.results import Session\n"
        "settings = boundary.BoundarySettings(topologies=('rezero',), dims=(8,), tokens=4, rounds=1,\n"
        "                                     stream_dtypes=('float32',), candidates=('plain',))\n"
        "session = Session('boundary', settings, torch.device('cpu'))\n"
        "assert len(boundary.measure_boundaries(session).rows) == 1\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_what_fails_is_noted_and_the_rest_is_measured() -> None:
    """bf16 streams have no lean boundary, and no time left is no error."""
    settings = boundary.BoundarySettings(
        topologies=("siamese",), dims=(16,), tokens=32, stream_dtypes=("bfloat16",), candidates=("lean", "plain"),
        rounds=1,
    )  # fmt: skip
    results = boundary.measure_boundaries(Session("boundary", settings, CPU))
    assert [row["candidate"] for row in results.rows] == ["plain"]
    (noted,) = results.not_measured
    assert noted.startswith("siamese, 16 bfloat16, lean: kernels='lean' ")
    late = boundary.measure_boundaries(Session("boundary", settings, CPU, time.monotonic() - 1))
    assert (late.rows, late.not_measured) == ([], ["siamese, 16 bfloat16: no time was left"])


def settings_of_two(**others: object) -> boundary.BoundarySettings:
    return boundary.BoundarySettings(
        topologies=("siamese",), dims=(16,), tokens=32, stream_dtypes=("float32",), output_dtype="float32",
        candidates=("plain", "fused"), rounds=1, **others,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("part", "change", "what"),
    [
        ("forward", {"h": lambda h: 2 * h}, "its input differs from the formula by 1 of its length"),
        ("forward", {"bounded_next": lambda x: torch.cat((x[:-1], x[:1]))}, "its closed state differs"),
        ("backward", {"identity": lambda x: -x}, "its gradient of stream 1 differs from the formula by 2 of its"),
        (
            "backward",
            {"gains": lambda g: 1.01 * g},
            "its gradient of read post_norm.gain differs from the formula by 0.01",
        ),
        ("backward", None, "RuntimeError: out of resource: shared memory"),
    ],
)
def test_a_kernel_that_is_wrong_or_fails_is_not_timed(
    part: str, change: dict[str, Callable[[Tensor], Tensor]] | None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(*arguments: object) -> object:
        if change is None:
            raise RuntimeError("out of resource: shared memory")
        result = getattr(boundary_plain, part)(*arguments)
        return result._replace(**{name: alter(getattr(result, name)) for name, alter in change.items()})

    kernels = types.SimpleNamespace(forward=boundary_plain.forward, backward=boundary_plain.backward)
    setattr(kernels, part, spoiled)
    monkeypatch.setattr(boundary_operator, "implementation", lambda x: kernels)
    results = boundary.measure_boundaries(Session("boundary", settings_of_two(), CPU))
    assert [row["candidate"] for row in results.rows] == ["plain"]
    (noted,) = results.not_measured
    assert noted.startswith(f"siamese, 16 float32, fused: {what}")


def test_a_norm_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMSNorm, "fused", lambda self, x: self.formula(x) + 0.01)
    settings = norms.NormSettings(
        norms=("rmsnorm",), candidates=("plain", "fused"), dims=(16,), tokens=8, rounds=1, dtype="float32"
    )
    results = norms.measure_norms(Session("norms", settings, CPU))
    assert [row["candidate"] for row in results.rows] == ["plain"]
    assert results.not_measured[0].startswith("rmsnorm, 16, fused: its output differs from the formula by 0.")


def test_rounds_end_at_the_deadline_but_not_before_the_third() -> None:
    timings = measure({"a": lambda: None}, device=CPU, rounds=9, deadline=time.monotonic() - 1)
    assert len(timings["a"]) == 3


def test_results_so_far_are_seen() -> None:
    seen: list[int] = []
    settings = dataclasses.replace(settings_of_two(), topologies=("siamese", "rezero"))
    results = boundary.measure_boundaries(
        Session("boundary", settings, CPU, progress=lambda found: seen.append(len(found.rows)))
    )
    assert seen == [2, 3] and len(results.rows) == 3


def test_an_error_is_noted_in_one_line() -> None:
    missing: list[str] = []
    with measuring("pre", missing):
        raise RuntimeError("out of memory\nfor a long reason")
    with measuring("post", missing):
        raise UserError("no time was left")
    assert missing == ["pre: RuntimeError: out of memory", "post: no time was left"]


def measure_here(part: str, path: Path, last: float, end: float, changes: dict[str, object]) -> None:
    """Measure a part in this process, with CUDA simulated."""
    gpu.measure_part(part, path, last, changes)


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the parts of `bench gpu` run on the CPU, at small sizes."""
    small = {
        "boundary": boundary.BoundarySettings(topologies=("siamese", "pre"), dims=(2048,), tokens=4, rounds=1,
                                              stream_dtypes=("bfloat16",), candidates=("plain", "fused", "lean")),
        "norms": norms.NormSettings(dims=(2048,), tokens=4, rounds=1, candidates=("plain", "fused")),
        "step": step.StepSettings(topologies=("siamese", "dhc-2"), candidates=("fused", "compiled"), dim=16, depth=1,
                                  heads=2, hidden=16, vocabulary=32, batch=1, context=8, rounds=1),
    }  # fmt: skip
    for part, settings in small.items():
        measure_it = gpu.BENCHMARKS[part][1]
        monkeypatch.setitem(gpu.BENCHMARKS, part, (lambda _, settings=settings: settings, measure_it))
    monkeypatch.setattr(gpu, "resolve_device", lambda _: CPU)
    monkeypatch.setattr(step, "compile_blocks", lambda model: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "measure_apart", measure_here)


def test_the_gpu_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend_cuda(monkeypatch)
    gpu.measure_on_gpu(tmp_path)
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert files.keys() == {"boundary", "norms", "step"}
    assert [(row["topology"], row["candidate"]) for row in files["step"]["rows"]] == [
        ("pre", "fused"), ("siamese", "fused"), ("pre", "compiled"), ("siamese", "compiled"), ("dhc-2", "compiled"),
    ]  # fmt: skip
    assert "fused, dhc-2: has no fused boundary" in files["step"]["not_measured"]
    assert any("lean" in line and "siamese" in line for line in files["boundary"]["not_measured"])
    assert len(capsys.readouterr().out.strip().splitlines()) > 3
    reached = [line.split(" | ")[-1].rstrip(" |") for line in goals.table(tmp_path).splitlines()[2:]]
    assert reached[2] == "-", "there is no compiled boundary to compare with here"
    assert all(word in ("yes", "no") for word in reached[:2] + reached[3:])


def test_the_gpu_command_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)
    gpu.measure_on_gpu(tmp_path, minutes=1e-9)
    for path in tmp_path.iterdir():
        record = json.loads(path.read_text())
        assert record["rows"] == [] and all(
            "no time was left" in line or "has no" in line for line in record["not_measured"]
        )


def test_the_gpu_command_survives_a_part_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    pretend_cuda(monkeypatch)
    monkeypatch.setitem(gpu.BENCHMARKS, "boundary", (boundary.settings_for, fail))
    gpu.measure_on_gpu(tmp_path)
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert files["boundary"]["not_measured"] == [
        "boundary: RuntimeError: CUDA error: an illegal memory access was encountered"
    ]
    assert files["norms"]["rows"] and files["step"]["rows"]


def test_a_part_that_is_killed_leaves_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(name: str, *arguments: object, **options: object) -> list[dict[str, object]]:
        if name == "pre":
            raise KeyboardInterrupt
        return measure_boundary(name, *arguments, **options)

    measure_boundary = boundary.measure_boundary
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(boundary, "measure_boundary", killed)
    path = tmp_path / "boundary.json"
    with pytest.raises(KeyboardInterrupt):
        gpu.measure_part("boundary", path, 60, {})
    record = json.loads(path.read_text())
    assert {row["topology"] for row in record["rows"]} == {"siamese"}
    assert record["not_measured"][-1] == gpu.UNFINISHED


def end(*_: object) -> None:
    os.abort()


def hang(*_: object) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("part", "minutes", "reason"),
    [(end, 1.0, "its process ended with status -6"), (hang, 1e-4, "no time was left")],
)
def test_a_process_that_dies_or_hangs_is_noted(
    part: Callable[..., None], minutes: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "measure_part", part)
    monkeypatch.setattr(gpu, "PARTS", {"norms": (0.9, 1.0)})
    gpu.measure_on_gpu(tmp_path, minutes=minutes)
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text())["not_measured"] == [gpu.UNFINISHED, f"{path.stem}: {reason}"]


def test_a_part_is_measured_by_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    assert gpu.measure_apart("step", path, 9.0, 60.0, {"rounds": 2, "topologies": ("siamese",)}) is None
    (noted,) = json.loads(path.read_text())["not_measured"]
    assert noted.startswith("step: device 'cuda'")


def test_without_cuda_the_gpu_command_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "gpu", "--out", "results"]) == 2
    assert main(["bench", "gpu"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_gpu_command_needs_torch_and_triton_alone() -> None:
    code = (
        "import sys\n"
        "for name in ('numpy', 'tyro', 'rich', 'matplotlib', 'tokenizers', 'safetensors', 'pyarrow', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from siamesenorm.benchmark.gpu import measure_on_gpu\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_results_that_could_not_be_written_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured before the path was checked")

    monkeypatch.setitem(gpu.BENCHMARKS, "norms", (norms.settings_for, measured))
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "results.json"):
        assert main(["bench", "norms", "--out", str(out)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_steps_are_compared_with_pre_norm() -> None:
    settings = step.StepSettings(
        topologies=("siamese",), candidates=("plain",), dim=16, depth=1, heads=2, hidden=16, vocabulary=32, batch=1,
        context=8, rounds=2,
    )  # fmt: skip
    results = step.measure_steps(Session("step", settings, CPU))
    reference, siamese = results.rows
    assert (reference["topology"], siamese["topology"]) == ("pre", "siamese")
    assert reference["step_to_pre"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert siamese["kept_to_pre"] > 1
    assert siamese["parameters_to_pre"] > 1
    products = 8 * (4 * 16 * 16 + 3 * 16 * 16 + 16 * 32) + 2 * 8 * 8 * 16
    assert reference["flops"] == siamese["flops"] == 3 * 2 * products
    assert 0 < reference["utilisation"] < 1 and "TFLOP/s: product of" in reference["peak"]
    assert reference["peak_bytes"] > reference["kept_bytes"]
    assert "step_to_best_pre" not in siamese


def test_steps_are_compared_with_the_fastest_pre_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "compile_blocks", lambda model: None)
    seconds = {"pre": 3.0, "pre, compiled": 2.0, "pre, fused": 3.0, "siamese": 4.0}
    monkeypatch.setattr(step, "measure", lambda runs, **_: {name: [seconds[name]] for name in runs})
    settings = step.StepSettings(
        topologies=("siamese",), candidates=("fused", "compiled"), dim=16, depth=1, heads=2, hidden=16, vocabulary=32,
        batch=1, context=8,
    )  # fmt: skip
    pre, siamese, *_ = step.measure_steps(Session("step", settings, CPU)).rows
    assert (pre["topology"], siamese["topology"]) == ("pre", "siamese")
    assert siamese["step_to_best_pre"]["median"] == 2.0
    assert siamese["step_to_pre"]["median"] == pytest.approx(4 / 3, rel=1e-5)


def test_peers_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = peers.Peer(package="no-such-package", build=lambda settings: torch.nn.Identity(), ours="pre")
    monkeypatch.setattr(peers, "PEERS", {"absent": absent})
    monkeypatch.setattr(peers, "compile_stack", lambda stack: None)
    results = peers.measure_peers(
        peers.PeerSettings(dim=16, depth=1, heads=2, hidden=16, batch=1, context=8, rounds=1), "cpu"
    )
    assert results.not_measured == ["absent: No package metadata was found for no-such-package"]
    assert {row["stack"] for row in results.rows} == {"ours, pre", "ours, siamese", "ours, siamese-post-pre"}


def test_a_results_file_holds_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    Results(benchmark="step", device="cpu", settings={"dim": 8}, rows=[], not_measured=["a: why"]).write(path)
    record = json.loads(path.read_text())
    assert record["environment"]["torch"] == torch.__version__
    assert record["not_measured"] == ["a: why"]
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_a_table_shows_spreads_and_gaps() -> None:
    rows = [{"name": "one", "ms": {"median": 1.25, "low": 1.0, "high": 1.5}}, {"name": "two", "bytes": 12345}]
    assert markdown(rows, ["name", "ms", "bytes"]).splitlines()[2:] == [
        "| one | 1.25 [1, 1.5] | - |",
        "| two | - | 12,345 |",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        "boundry", "step --device tpu", "step --device cuda", "step --rounds 0", "boundary --topologies siamse",
        "norms --topologies siamese", "gpu --topologies siamse", "gpu --minutes 0", "boundary --out /proc/none/b.json",
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", *arguments.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1
