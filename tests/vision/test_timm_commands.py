"""timm on the command line, and its example."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from vision_models import DEPTH, IMAGES, SMALL, moved

import siamesenorm
from siamesenorm.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples/rewire_timm.py"


@torch.no_grad()
def test_a_directory_of_timm_is_rewired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = moved(timm.create_model("vit_tiny_patch16_224", **SMALL))
    save_for_hf(model, tmp_path / "vit", model_args=SMALL, safe_serialization=True)
    command = ["rewire", str(tmp_path / "vit"), "--out", str(tmp_path / "out")]
    assert main([*command, "--topology", "siamese", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["blocks"] == "blocks" and sum(norm["outcome"] == "moved" for norm in report["norms"]) == 2 * DEPTH + 1
    loaded = siamesenorm.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(loaded(IMAGES), model(IMAGES), rtol=1e-3, atol=2e-4)

    again = ["rewire", str(tmp_path / "out"), "--topology", "siamese", "--out", str(tmp_path / "again")]
    assert main(again) == 2
    assert "rewired already" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_the_example_keeps_its_promise(capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, where torchvision can be imported."""
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert not exit.value.code, said
    assert "bit-equal" in said
