"""Meeting models of others: what imports their libraries does so only when they are there already."""

from siamesenorm.interop.swap_norms import Replacement, SwapReport, swap_norms

__all__ = ["Replacement", "SwapReport", "swap_norms"]
