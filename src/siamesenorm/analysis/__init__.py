"""Measurements of a model while it trains, and analyses of a trained one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from siamesenorm.analysis.probes import observe_streams
from siamesenorm.analysis.stream_monitor import StreamMonitor

if TYPE_CHECKING:
    from siamesenorm.analysis.analyses import available_analyses, build_analysis
    from siamesenorm.analysis.held_out import HeldOut

__all__ = ["HeldOut", "StreamMonitor", "available_analyses", "build_analysis", "observe_streams"]


def __getattr__(name: str) -> Any:
    """Import the analyses when they are used: the monitor needs torch alone."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from siamesenorm.analysis import analyses, held_out

    return getattr(held_out if name == "HeldOut" else analyses, name)
