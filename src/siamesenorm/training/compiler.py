"""The C++ compiler that compiling for a CPU needs."""

from __future__ import annotations

import os
import shlex
import shutil

from siamesenorm.errors import UserError


def compiler_for_cpu() -> str | None:
    """Return the C++ compiler that compiling for a CPU would use, or None."""
    return next((name for name in _compilers() if shutil.which(shlex.split(name)[0])), None)


def require_compiler(device: str) -> None:
    """Raise `UserError` where blocks are to be compiled for a CPU and there is no C++ compiler."""
    if device.startswith("cpu") and compiler_for_cpu() is None:
        raise UserError(
            f"compiling for a CPU needs a C++ compiler, and {', '.join(_compilers())} cannot be found: name one in "
            "CXX, or use --compile off"
        )


def _compilers() -> list[str]:
    return [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
