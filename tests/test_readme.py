"""What the pages promise: examples run, links lead somewhere, and the page of topologies is the registry's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from siamesenorm.cli.explain import markdown

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.DOTALL | re.MULTILINE)
LINK = re.compile(r"""\]\(([^)\s]+)[^)]*\)|(?:src|srcset|href)="([^"]+)\"""")


def targets(page: Path) -> list[str]:
    """Return what a page's links and images point to, but for other sites and code in blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = [markdown or html for markdown, html in LINK.findall(re.sub(r"`[^`\n]*`", "", text))]
    return [target for target in found if not re.match(r"https?:|mailto:", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_has_an_example() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[number], f"README.md, example {number + 1}", "exec"), {"__name__": "__main__"})


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
