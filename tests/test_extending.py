"""docs/extending.md: its topology and its norm, as an outside package with entry points and registered in Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/extending.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ENTRY_POINTS = "\n".join(
    line.strip().replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    for line in PAGE.splitlines()
    if line.startswith("    [project.") or re.match(r"    \w+ = \"", line)
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a directory with the page's code as an installed package."""
    (tmp_path / "my_package.py").write_text("\n".join(BLOCKS))
    information = tmp_path / "my_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def run(package: Path, *arguments: str) -> str:
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-W", "error", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


MODEL = """
import torch, siamesenorm
model = siamesenorm.build_language_model("nano", topology="scaled:scale=0.25", norm="absnorm:eps=1e-6", depth=2)
model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
norms = [part for part in model.modules() if type(part).__name__ == "AbsoluteNorm"]
assert len(norms) == 5 and all(norm.eps == 1e-6 and norm.gain.grad is not None for norm in norms)
(scale,) = {part.scale for part in model.modules() if type(part).__name__ == "ScaledConnection"}
assert scale == 0.25
"""

EXPLAIN = """
from siamesenorm.cli import main
assert main(["explain", "scaled"]) == main(["explain", "absnorm"]) == 0
print("all of them")
assert main(["explain"]) == 0
"""


def test_an_outside_package_is_found_by_its_entry_points(package: Path) -> None:
    explained = run(package, "-c", MODEL + EXPLAIN)
    for word in ("ScaledResidual", "AbsoluteNorm"):
        assert word in explained
    listed = explained.partition("all of them")[2]
    assert "scaled" in listed and "absnorm" in listed


def test_names_are_registered_in_python(package: Path) -> None:
    registration = "\n".join(re.findall(r"^    (siamesenorm\.register_.*)$", PAGE, re.MULTILINE))
    (package / "my_package-1.0.dist-info" / "entry_points.txt").write_text("")
    run(package, "-c", f"import siamesenorm\nfrom my_package import *\n{registration}\n{MODEL}")


def test_the_templates_are_short() -> None:
    assert all(sum(bool(line.strip()) for line in block.splitlines()) < 25 for block in BLOCKS)
