"""The example of timm, which the session of the other examples cannot run."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/rewire_timm.py"


def test_the_example_keeps_its_promise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.strip()
