"""The wording of refusals: the only test of it; others test exit codes and values.

`python tests/test_messages.py` writes the lines anew into messages.txt, to be read before they are committed.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path

import pytest

from refusals import REFUSED, complete
from siamesenorm.cli import main
from training_runs import write_data

SNAPSHOT = Path(__file__).parent / "messages.txt"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("messages")
    write_data(directory / "data")
    return directory


def line_of(arguments: str, directory: Path) -> str:
    """Return the line of a refused command, with its directory left out."""
    words = arguments.replace("DATA", "data").replace("NOWHERE", "nowhere").split()
    said = io.StringIO()
    with contextlib.chdir(directory), contextlib.redirect_stderr(said):
        code = main(complete(words, Path("run")))
    assert code == 2, arguments
    return said.getvalue().strip().replace(str(directory), "DIRECTORY")


def recorded() -> dict[str, str]:
    blocks = SNAPSHOT.read_text().strip().split("\n\n")
    return dict(block.removeprefix("$ siamesenorm ").split("\n", 1) for block in blocks)


@pytest.mark.parametrize("arguments", REFUSED)
def test_the_line_is_the_recorded_one(arguments: str, directory: Path) -> None:
    assert line_of(arguments, directory) == recorded()[arguments]


def test_nothing_else_is_recorded() -> None:
    assert list(recorded()) == list(REFUSED)


def record() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        write_data(directory / "data")
        os.environ["OMP_NUM_THREADS"] = "1"
        blocks = [f"$ siamesenorm {arguments}\n{line_of(arguments, directory)}\n" for arguments in REFUSED]
    SNAPSHOT.write_text("\n".join(blocks))


if __name__ == "__main__":
    record()
