"""Run the Triton kernels on the CPU, by Triton's interpreter, in a pytest of its own.

The interpreter is chosen before Triton is imported, for a whole process. It checks values and masks; it shows nothing
of races and coalescing, and it truncates where a GPU rounds to bf16.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FILES = sorted(map(str, Path(__file__).parent.glob("interpreted_*.py")))


def test_interpreted(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *FILES]
    command += ["--laws"] if pytestconfig.getoption("--laws") else []
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert "100%" in result.stdout
