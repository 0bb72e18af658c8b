"""What the pages promise: examples run, links lead somewhere, and the page of topologies is the registry's."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from siamesenorm.cli import PRESET_COMMANDS
from siamesenorm.cli.explain import markdown
from siamesenorm.cli.parsing import check_preset, parse

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
EXAMPLES = [
    (page.name, code)
    for page in PAGES
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
]
COMMAND = re.compile(r"(?:siamesenorm|(?:torchrun|python) .*-m siamesenorm) ([a-z].*)")
"""A line with a command, in a block or not."""
LINK = re.compile(r"""\]\(([^)\s]+)[^)]*\)|(?:src|srcset|href)="([^"]+)\"""")


def commands(page: Path) -> list[list[str]]:
    """Return the words of the commands in a page's blocks, after `siamesenorm`."""
    text = page.read_text().replace("\\\n", " ")
    lines = (line.strip().removeprefix("$ ") for line in text.splitlines())
    return [shlex.split(match[1], comments=True) for match in map(COMMAND.fullmatch, lines) if match]


def targets(page: Path) -> list[str]:
    """Return what a page's links and images point to, but for other sites and code in blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = [markdown or html for markdown, html in LINK.findall(re.sub(r"`[^`\n]*`", "", text))]
    return [target for target in found if not re.match(r"https?:|mailto:", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def run_example(page: str, code: str) -> dict[str, Any]:
    """Return the names that an example leaves behind."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, page, "exec"), names)
    return names


def test_the_drop_in_example_gives_what_the_head_sees() -> None:
    names = run_example(*next(example for example in EXAMPLES if example[0] == "README.md"))
    assert names["hidden"].shape == (2, 16, 64) and names["hidden"].requires_grad
    assert len(names["connections"]) == len(names["sublayers"]) == 8


def test_the_watch_of_the_verdict_page_says_its_word(capsys: pytest.CaptureFixture[str]) -> None:
    run_example(*next(example for example in EXAMPLES if example[0] == "verdict.md"))
    assert capsys.readouterr().out.startswith("stable: ")


def test_the_model_of_the_page_of_analyses_is_pruned() -> None:
    found = run_example(*next(example for example in EXAMPLES if example[0] == "analysis.md"))["found"]
    assert found["last_removed"][0] == found["loss"] and len(found["last_removed"]) == 5


def test_the_speedup_of_the_page_of_statistics_is_that_of_its_curve() -> None:
    speedup = run_example(*next(example for example in EXAMPLES if example[0] == "statistics.md"))["speedup"]
    assert (speedup.bound, round(speedup.ratio, 3), round(speedup.at_equal_step_cost, 3)) == ("=", 1.057, 1.226)


def test_the_models_and_the_norm_of_the_readme_are_built() -> None:
    names = run_example(*[example for example in EXAMPLES if example[0] == "README.md"][1])
    assert names["model"](torch.zeros(1, 4, dtype=torch.int64)).logits.shape == (1, 4, 1024)
    assert names["image_model"](torch.zeros(1, 3, 224, 224)).logits.shape == (1, 1000)
    assert names["norm"](torch.randn(2, 64)).shape == (2, 64)


def test_the_rewired_model_of_the_readme_keeps_its_function() -> None:
    pytest.importorskip("transformers")
    names = run_example(*[example for example in EXAMPLES if example[0] == "README.md"][2])
    assert names["report"].function_kept and names["norms"].function_kept and names["norms"].replaced


def test_the_optimizer_of_the_page_of_limits_spares_gains(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    names = run_example(*next(example for example in EXAMPLES if example[0] == "what-will-not-work.md"))
    assert any("gate" in name for name in names["spared"])
    assert any("post_norm" in name for name in names["spared"])


def test_every_example_of_the_pages_is_run_above() -> None:
    """Those of docs/ecosystem.md run in test_examples.py, those of docs/extending.md in test_extending.py."""
    others = [page for page, _ in EXAMPLES if page not in ("ecosystem.md", "extending.md")]
    assert others == [
        "README.md",
        "README.md",
        "README.md",
        "analysis.md",
        "statistics.md",
        "verdict.md",
        "what-will-not-work.md",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_images_lead_somewhere(page: Path) -> None:
    for target in targets(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} points to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} points to {target}, no such heading"


def test_the_page_of_topologies_is_the_registrys() -> None:
    written = (REPOSITORY / "docs" / "topologies.md").read_text()
    assert written == f"{markdown()}\n", "run `make docs`"


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_are_read(page: Path) -> None:
    """Every option is one of the command, and every value one that it takes."""
    for name, *words in commands(page):
        if name in PRESET_COMMANDS:
            check_preset(words)
        if "--start" in words:  # reads a run
            del words[(place := words.index("--start")) : place + 2]
        parse(importlib.import_module(f"siamesenorm.cli.{name}").Arguments, words, name)


def test_commands_are_found_on_pages() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 80
