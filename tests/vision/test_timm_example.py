"""The example of timm and its block of docs/ecosystem.md, which the session of the other examples cannot run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

REPOSITORY = Path(__file__).parents[2]
EXAMPLE, PAGE = REPOSITORY / "examples/rewire_timm.py", REPOSITORY / "docs/ecosystem.md"


def test_the_example_keeps_its_promise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.strip()


def test_the_block_of_the_page_saves_what_timm_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```python\n(import timm\n.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, PAGE, "exec"), names)
    images = torch.randn(1, 3, 64, 64)
    loaded = timm.create_model("local-dir:vit", pretrained=True).eval()
    assert torch.equal(loaded(images), names["vit"].eval()(images))
    assert names["scratch"](images).shape == (1, 1000)
