"""Look into models while they train: streams, gradients, updates."""

from siamesenorm.analysis.stream_monitor import StreamMonitor

__all__ = ["StreamMonitor"]
