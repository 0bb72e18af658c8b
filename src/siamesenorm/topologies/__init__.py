"""Residual topologies: where norms stand, how many streams there are, how they are read and written."""

from siamesenorm.topologies.registry import (
    TOPOLOGIES,
    available_topologies,
    build_topology,
    register_topology,
    topology_from_json,
    topology_name,
    topology_to_json,
)
from siamesenorm.topologies.topology import (
    AttentionNorm,
    BoundaryCost,
    Closing,
    Connection,
    Kernels,
    Opening,
    Place,
    ResidualSpec,
    Streams,
    Topology,
    transformer_places,
)

__all__ = [
    "TOPOLOGIES", "available_topologies", "build_topology", "register_topology", "topology_from_json", "topology_name",
    "topology_to_json",
    "AttentionNorm", "BoundaryCost", "Closing", "Connection", "Kernels", "Opening", "Place", "ResidualSpec", "Streams",
    "Topology", "transformer_places",
]  # fmt: skip
