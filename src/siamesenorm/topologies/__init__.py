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
    "TOPOLOGIES",
    "AttentionNorm",
    "BoundaryCost",
    "Closing",
    "Connection",
    "Kernels",
    "ResidualSpec",
    "Opening",
    "Place",
    "Streams",
    "Topology",
    "available_topologies",
    "build_topology",
    "register_topology",
    "topology_from_json",
    "topology_name",
    "topology_to_json",
    "transformer_places",
]
