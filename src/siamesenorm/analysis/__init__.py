"""Measurements of a model while it trains: streams, gradients, updates."""

from siamesenorm.analysis.probes import observe_streams
from siamesenorm.analysis.stream_monitor import StreamMonitor

__all__ = ["StreamMonitor", "observe_streams"]
