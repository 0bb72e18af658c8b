"""Rewire the residual path of models of others: one file a family, nothing imported but torch."""

from siamesenorm.interop.rewire.operation import rewire
from siamesenorm.interop.rewire.report import NormFate, RewireReport
from siamesenorm.interop.rewire.streams import record_streams

__all__ = ["NormFate", "RewireReport", "record_streams", "rewire"]
