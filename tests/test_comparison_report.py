"""The report on disk: whole, self-contained, readable by everybody, and never half-written."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from comparison_sweeps import METHODS, runs_of, write_run, write_sweep
from siamesenorm.cli.report import ReportArguments, build_report, run
from siamesenorm.comparison import report_writer
from siamesenorm.comparison.figure_style import DARK, LIGHT, render
from siamesenorm.comparison.report_writer import write_report
from siamesenorm.errors import UserError

VOID = {"meta", "img", "source", "br"}


class Outline(HTMLParser):
    """Collects the elements of a page, and fails where tags do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    picked = [METHODS[0], METHODS[1], METHODS[2], METHODS[-1]]
    runs = runs_of(picked, rates=(2e-3, 8e-3), seeds=(0, 1, 2), steps=60)
    runs[-1] = dataclasses.replace(runs[-1], until=20)
    command = 'siamesenorm sweep --methods pre "pre + qkv" post siamese <here>'
    sweep = write_sweep(directory / "sweep", runs, missing=["never"], command=command)
    return write_report(build_report(sweep), directory / "out")


@pytest.fixture(scope="module")
def outline(report: Path) -> Outline:
    parsed = Outline()
    parsed.feed(report.read_text())
    assert parsed.open == []
    return parsed


def test_all_parts_are_written_and_nothing_else(report: Path) -> None:
    out, figures = report.parent, [*(report.parent / "figures").iterdir()]
    texts = [report, *(out / name for name in ("report.md", "results.csv", "comparisons.csv"))]
    assert sorted(path for path in out.rglob("*") if path.is_file()) == sorted([*texts, *figures])
    assert all(path.stat().st_size for path in (*texts, *figures))
    assert Counter(path.suffix for path in figures) == {".svg": 12, ".png": 6}


def test_the_page_needs_nothing_outside_itself(outline: Outline) -> None:
    assert not outline.all("script") and not outline.all("link")
    sources = [each["src"] for each in outline.all("img")] + [each["srcset"] for each in outline.all("source")]
    assert len(sources) == 12
    assert all(str(source).startswith("data:image/svg+xml;base64,") for source in sources)
    for source in sources:
        svg = base64.b64decode(str(source).partition(",")[2]).decode()
        assert "<script" not in svg and not re.search(r'href="(?!#)', svg)


def test_every_figure_is_there_for_both_colour_schemes(outline: Outline) -> None:
    assert {each["media"] for each in outline.all("source")} == {"(prefers-color-scheme: dark)"}
    for image, source in zip(outline.all("img"), outline.all("source"), strict=True):
        light, dark = (base64.b64decode(str(data).partition(",")[2]) for data in (image["src"], source["srcset"]))
        assert LIGHT.surface.encode() in light and DARK.surface.encode() in dark


def test_the_page_says_in_text_what_its_figures_show(outline: Outline) -> None:
    for image in outline.all("img"):
        assert len(str(image["alt"])) > 40
    assert len(outline.all("figcaption")) == 6 and len(outline.all("caption")) == 3
    assert [name for name, _ in outline.elements if name in ("h1", "h2")][0] == "h1"
    assert len(outline.all("h1")) == 1 and len(outline.all("main")) == 1
    assert all(each.get("scope") for each in outline.all("th"))


def test_tables_scroll_inside_a_region_that_the_keyboard_reaches(outline: Outline) -> None:
    regions = [each for each in outline.all("div") if "scroll" in str(each.get("class"))]
    assert len(regions) == 3
    assert all(each["tabindex"] == "0" and each["role"] == "region" and each["aria-label"] for each in regions)


def test_the_page_tells_how_to_repeat_it_what_is_missing_and_where_it_ran(report: Path) -> None:
    text = report.read_text()
    assert "siamesenorm sweep --methods pre &quot;pre + qkv&quot; post siamese &lt;here&gt;" in text
    assert "siamese @ 0.008, seed 2: 20 of 60 steps." in text and "<dt>never</dt><dd>not started.</dd>" in text
    assert "<dt>torch</dt><dd>2.13.0+cpu</dd>" in text
    assert "2 of 25 runs" in text
    assert "<title>pre, pre + qkv, post and siamese on the built-in corpus</title>" in text
    assert "https://arxiv.org/abs/" in text


def test_the_markdown_shows_figures_that_exist(report: Path) -> None:
    text = report.with_name("report.md").read_text()
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(shown) == 12
    assert all((report.with_name("report.md").parent / path).is_file() for path in shown)
    assert text.startswith("# pre, pre + qkv, post and siamese on") and "## How to repeat it" in text


def variables(stylesheet: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", stylesheet))


def test_figures_lie_on_cards_of_their_own_colour_and_pills_can_be_read() -> None:
    stylesheet = Path(report_writer.__file__).with_name("page.css").read_text()
    light, dark = stylesheet.split("@media (prefers-color-scheme: dark)")
    for colors, theme in ((variables(light), LIGHT), (variables(dark.split("@media")[0]), DARK)):
        assert (colors["surface"], colors["ink"], colors["muted"]) == (theme.surface, theme.ink, theme.muted)
        for tone in ("good", "warn", "dull", "bad"):
            assert contrast(colors[tone], colors[f"{tone}-fill"]) > 4.5
        assert contrast(colors["muted"], colors["fill"]) > 4.5 and contrast(colors["accent"], colors["surface"]) > 4.5


def contrast(first: str, second: str) -> float:
    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def test_a_failure_leaves_the_old_report_whole(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in report.parent.rglob("*") if path.is_file()}

    def fail(*_: object) -> str:
        raise RuntimeError("no page")

    monkeypatch.setattr("siamesenorm.comparison.report_writer.render", lambda *parts: b"")
    monkeypatch.setattr("siamesenorm.comparison.report_writer.report_in_html", fail)
    with pytest.raises(RuntimeError):
        write_report(build_report(report.parent.parent / "sweep"), report.parent)
    assert {path: path.read_bytes() for path in report.parent.rglob("*") if path.is_file()} == before


def test_what_cannot_be_read_or_written_is_refused(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("siamesenorm.comparison.report_writer.render", lambda *parts: b"")
    with pytest.raises(UserError):
        run(ReportArguments(directory=tmp_path, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError):
        run(ReportArguments(directory=report.parent.parent / "sweep", out=tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_single_run_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", runs_of([METHODS[2]], steps=60)[1])
    run(ReportArguments(directory=tmp_path / "run", title="One <run>"))
    text = (tmp_path / "run/report/report.html").read_text()
    assert "<h1>One &lt;run&gt;</h1>" in text and "<dt>Verdict</dt><dd>diverged" in text
    assert {path.name for path in (tmp_path / "run/report/figures").glob("*.png")} == {
        "loss-8e-3.png",
        "gradient-norm-8e-3.png",
    }


def test_the_page_of_a_run_shows_the_streams_that_it_recorded(tmp_path: Path) -> None:
    write_run(tmp_path / "run", runs_of([METHODS[-1]], steps=60)[1])
    with open(tmp_path / "run/metrics.jsonl", "a") as file:
        for step in (1, 30, 60):
            sublayers = {
                f"blocks.{depth}.mlp": {
                    "streams": {"bounded": {"rms": 1.0}, "identity": {"rms": 1.5 + depth * step / 60}}
                }
                for depth in range(3)
            }
            file.write(json.dumps({"kind": "streams", "step": step, "sublayers": sublayers}) + "\n")
    report = build_report(tmp_path / "run")
    (figure,) = [each for each in report.figures if each.name == "streams"]
    assert (
        figure.alternative == "At step 60: bounded from 1 to 1 over the depth; identity from 1.5 to 3.5 over the depth"
    )
    assert "identity" in render(figure, LIGHT, "svg").decode()
