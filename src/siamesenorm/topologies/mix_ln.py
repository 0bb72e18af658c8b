"""Mix-LN: Post-Norm in the first blocks, Pre-Norm in the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from siamesenorm.errors import UserError
from siamesenorm.topologies.fused import single_stream_closing, single_stream_connection
from siamesenorm.topologies.topology import BoundaryCost, Closing, Connection, Place, ResidualSpec, Topology


@dataclass(frozen=True, kw_only=True)
class MixLN(Topology):
    """Mix-LN (arXiv 2412.13795): blocks l < m are Post-Norm, blocks l >= m Pre-Norm, always with a final norm.

    m = floor(`post_fraction` * L), or `post_blocks` where that is given. Its granularity is the block.
    """

    title: ClassVar[str] = "Mix-LN"
    paper: ClassVar[str] = "Li et al. 2024, arXiv 2412.13795"
    formula: ClassVar[str] = """\
        open    x = e
        blocks l < m:   read h = x,       write x <- N_k(x + O)
        blocks l >= m:  read h = N_k(x),  write x <- x + O
        close   N_f(x);  m = floor(post_fraction L), or post_blocks"""
    diagram: ClassVar[str] = """\
        l < m:  x ──┬─────────── + ─▶ N ──▶ x      l ≥ m:  x ──┬──────────────── + ──▶ x
                    └─▶ F ─▶ O ──┘                             └─▶ N ─▶ F ─▶ O ──┘"""
    special_cases: ClassVar[tuple[str, ...]] = (
        "m = 0 is Pre-Norm",
        "m = L is Post-Norm with a final norm",
    )
    has_fused_kernels: ClassVar[bool] = True

    post_fraction: float = 0.25
    post_blocks: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Refuse a fraction outside [0, 1]."""
        super().__post_init__()
        if not 0 <= self.post_fraction <= 1:
            raise UserError(f"post_fraction of {self.title} is {self.post_fraction}: choose a number from 0 to 1")
        if self.post_blocks != "auto" and self.post_blocks < 0:
            raise UserError(f"post_blocks of {self.title} is {self.post_blocks}: choose 0 or more, or auto (fraction)")

    @property
    def cost(self) -> BoundaryCost:
        """Pre-Norm's, and Post-Norm's for its part of the blocks."""
        return BoundaryCost(forward=4 + self.post_fraction, backward=4, saved=1)

    def is_post(self, place: Place) -> bool:
        """Return whether the place is in a Post-Norm block."""
        if self.post_blocks != "auto":
            return place.block < self.post_blocks
        # 0.29 * 100 is 28.999999999999996: the floor is meant of the decimal fraction.
        return place.block < math.floor(self.post_fraction * place.depth + 1e-9)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return a reader whose post_norm is its predecessor's Post-Norm and whose input norm is its own Pre-Norm."""
        settles = place.previous is not None and self.is_post(place.previous)
        return single_stream_connection(
            place,
            spec,
            post_norm=spec.build_post_norm(place) if settles else None,
            norm=None if self.is_post(place) else spec.build_input_norm(place),
        )

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the final norm, after the last Post-Norm if every block is one."""
        post_norm = spec.build_norm("final") if self.is_post(last) else None
        return single_stream_closing(spec, post_norm=post_norm, norm=spec.build_final_norm())
