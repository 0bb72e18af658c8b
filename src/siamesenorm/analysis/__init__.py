"""Measurements of a model while it trains: streams, gradients, updates."""

from siamesenorm.analysis.stream_monitor import StreamMonitor

__all__ = ["StreamMonitor"]
