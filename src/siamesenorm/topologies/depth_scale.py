"""The factor on a sublayer's output that shrinks with depth, in every reading of the paper (arXiv 2602.08064)."""

from __future__ import annotations

import math
from typing import Literal

from siamesenorm.topologies.topology import Place

DepthScale = Literal["code", "paper_block", "paper_sublayer", "none"]


def depth_scale_at(place: Place, reading: DepthScale) -> float:
    """Return s at a place.

    "code" = 1/sqrt(2(l+1)) with l the 0-based block, as in all released code; "paper_block" = 1/sqrt(l+1);
    "paper_sublayer" = 1/sqrt(k+1) with k the 0-based sublayer; "none" = 1.
    """
    divisor = {"code": 2 * (place.block + 1), "paper_block": place.block + 1, "paper_sublayer": place.index + 1}
    return 1 / math.sqrt(divisor.get(reading, 1))
