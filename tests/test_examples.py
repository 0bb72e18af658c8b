"""The examples run as a reader would run them, the blocks to paste are ours, and a page runs from top to bottom."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from siamesenorm import ResidualSpec, build_topology, transformer_places
from siamesenorm.cli import main
from siamesenorm.norms import NormSpec
from siamesenorm.sublayers.attention import Attention, AttentionShape
from siamesenorm.sublayers.mlp import build_mlp
from siamesenorm.topologies import Closing, Connection

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
ON_THE_PAGE = ("export_and_generate.py", "lm_eval_local.py")
"""The page of the ecosystem has the same steps."""
Runner = Callable[..., str]
NEEDS = {"rewire_timm.py": "timm"}
"""The library without which an example cannot run."""
DIM, DEPTH, EPS = 16, 3, 1e-3
"""An eps that an equality notices."""


@pytest.fixture
def run_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    """Run an example as a script, in an empty directory, and return what it prints.

    Not in a process of its own: the imports of other libraries are most of the time.
    """

    def run(example: Path, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(sys, "argv", [str(example), *arguments])
        try:
            runpy.run_path(str(example), run_name="__main__")
        except SystemExit as end:
            assert not end.code
        return capsys.readouterr().out

    return run


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=[pytest.mark.laws] if each.name in ON_THE_PAGE else []) for each in EXAMPLES],
    ids=lambda example: example.name,
)
def test_the_example_keeps_its_promise(example: Path, run_example: Runner) -> None:
    needed = NEEDS.get(example.name)
    if needed and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    assert run_example(example).strip()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_example_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 60


def test_two_lines_serve_a_topology_of_another_arity(run_example: Runner) -> None:
    assert "Hyper-Connections" in run_example(REPOSITORY / "examples/own_block.py", "dhc-2:streams=3")


# --- the blocks to paste ---------------------------------------------------------------------------------------------


class Pasted(nn.Module):
    """The stack as someone would write it around a pasted block."""

    def __init__(self, form: str, sublayers: list[nn.Module]) -> None:
        super().__init__()
        names = runpy.run_path(str(REPOSITORY / f"examples/plain_torch_{form}.py"))
        prefix = "HybridPre" if form == "hybrid_pre" else "PostPre"
        pairs = zip(sublayers[::2], sublayers[1::2], strict=True)
        self.blocks = nn.ModuleList(
            names[f"{prefix}Block"](index, DIM, attention, mlp, EPS) for index, (attention, mlp) in enumerate(pairs)
        )
        self.closing = names[f"{prefix}Closing"](DIM, EPS)

    def forward(self, embedding: Tensor) -> Tensor:
        x = y = embedding
        for block in self.blocks:
            x, y = block(x, y)
        closed: Tensor = self.closing(x, y)
        return closed


class Ours(nn.Module):
    """The same stack around connections."""

    def __init__(self, topology: str, sublayers: list[nn.Module]) -> None:
        super().__init__()
        resolved, spec = build_topology(topology), ResidualSpec(dim=DIM, norm=NormSpec.parse("rmsnorm", eps=EPS))
        places = [place for block in transformer_places(DEPTH) for place in block]
        self.opening, self.sublayers = resolved.opening(spec), nn.ModuleList(sublayers)
        self.connections = nn.ModuleList(resolved.connection(place, spec) for place in places)
        self.closing = resolved.closing(places[-1], spec)

    def forward(self, embedding: Tensor) -> Tensor:
        streams = self.opening(embedding)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            h, streams = connection.read(streams)
            streams = connection.write(streams, sublayer(h))
        closed: Tensor = self.closing(streams)
        return closed


def sublayers() -> list[nn.Module]:
    """Return attentions with QKV-norm and MLPs, the same ones at every call."""
    torch.manual_seed(0)
    shape = AttentionShape(dim=DIM, heads=2, kv_heads=2, attention_norm="qkv-head")
    built = [part for _ in range(DEPTH) for part in (Attention(shape), build_mlp("swiglu", DIM, 24))]
    for parameter in nn.ModuleList(built).parameters():
        nn.init.normal_(parameter, std=0.5)
    return built


def partners(form: str, pasted: Pasted, ours: Ours) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield the parameters of the residual path in pairs."""
    yield from hybrid_pre_partners(pasted, ours) if form == "hybrid_pre" else post_pre_partners(pasted, ours)


def hybrid_pre_partners(pasted: Pasted, ours: Ours) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    for block, attention, mlp in zip(pasted.blocks, ours.connections[::2], ours.connections[1::2], strict=True):
        yield block.gate, attention.gate.gain
        yield block.attention_norm.weight, attention.identity_norm.gain
        yield block.bounded_norm.weight, mlp.post_norm.gain
        yield block.mlp_norm.weight, mlp.identity_norm.gain
        yield block.input_norm.weight, mlp.input_norm.gain
    yield pasted.closing.bounded_norm.weight, ours.closing.post_norm.gain
    yield pasted.closing.identity_norm.weight, ours.closing.identity_norm.gain
    yield pasted.closing.output_norm.weight, ours.closing.output_norm.gain


def post_pre_partners(pasted: Pasted, ours: Ours) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """The pasted block normalises after its additions, ours leaves that to the next reader."""
    readers: list[Connection | Closing] = [*ours.connections, ours.closing]
    for index, reader in enumerate(readers[:-1]):
        block, slot = pasted.blocks[index // 2], index % 2
        yield block.identity_norms[slot].weight, reader.identity_norm.gain
        yield block.input_norms[slot].weight, reader.input_norm.gain
        yield block.bounded_norms[slot].weight, readers[index + 1].post_norm.gain
    yield pasted.closing.identity_norm.weight, ours.closing.identity_norm.gain


@pytest.mark.parametrize(("form", "topology"), [("hybrid_pre", "siamese"), ("post_pre", "siamese-post-pre")])
def test_the_pasted_block_is_ours(form: str, topology: str) -> None:
    pasted, ours = Pasted(form, sublayers()).double(), Ours(topology, sublayers()).double()
    pairs = list(partners(form, pasted, ours))
    with torch.no_grad():
        for theirs, mine in pairs:
            mine.copy_(theirs.normal_())
    results = []
    for model in (pasted, ours):
        torch.manual_seed(1)
        embedding = torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True)
        hidden = model(embedding)
        hidden.backward(torch.randn_like(hidden))
        results.append((hidden, embedding.grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)
    trained = list(zip(*(nn.ModuleList(sublayers_of(model)).parameters() for model in (pasted, ours)), strict=True))
    assert 2 * len(pairs) + 2 * len(trained) == sum(len(list(model.parameters())) for model in (pasted, ours))
    for theirs, mine in (*pairs, *trained):
        assert theirs.grad is not None and theirs.grad.abs().max() > 1e-6
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=0, atol=1e-10)


def sublayers_of(model: nn.Module) -> list[nn.Module]:
    """Return the attentions and MLPs of either stack, in order."""
    if isinstance(model, Ours):
        return list(model.sublayers)
    return [
        part for block in model.blocks for part in getattr(block, "sublayers", None) or (block.attention, block.mlp)
    ]


# --- the page of the ecosystem ---------------------------------------------------------------------------------------

PAGE = REPOSITORY / "docs/ecosystem.md"
STEP = re.compile(r"^```python\n(?P<code>.*?)^```$|^    siamesenorm (?P<command>[^\n]*)$", re.DOTALL | re.MULTILINE)
ELSEWHERE = ("timm", "lightning")
"""Libraries that the environment of the tests may lack; a block that needs one begins with its import."""


@pytest.mark.filterwarnings("ignore")  # of six libraries
def test_the_page_of_the_ecosystem_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("transformers", "diffusers", "peft", "accelerate", "lm_eval"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    page, names, skipped = PAGE.read_text(), dict[str, Any](__name__="__main__"), []
    for step in STEP.finditer(page):
        if step["command"]:
            assert main(shlex.split(step["command"])) == 0, step["command"]
            continue
        needed = re.match(rf"import ({'|'.join(ELSEWHERE)})\b", step["code"])
        if needed and find_spec(needed[1]) is None:
            skipped.append(needed[1])
            continue
        above = "\n" * (page[: step.start()].count("\n") + 1)  # a traceback then names the page's line
        exec(compile(above + step["code"], PAGE, "exec"), names)
    assert skipped == [library for library in ELSEWHERE if find_spec(library) is None]
    assert names["adapted"].peft_config and (tmp_path / "runs/on/verdict.json").is_file()
