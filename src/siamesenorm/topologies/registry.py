"""Names of topologies. A variant is a name; options override: "dhc-2:streams=4".

Installed packages add theirs through entry points of the group "siamesenorm.topologies": a topology or its class
under the name of the entry point, or a module or function that calls `register_topology`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from siamesenorm.errors import unknown
from siamesenorm.options import EntryPointGroup, Scalar, parse_specification, require_name
from siamesenorm.topologies.attention_residuals import AttentionResiduals
from siamesenorm.topologies.hyper_connections import HyperConnections
from siamesenorm.topologies.manifold_hyper_connections import ManifoldHyperConnections
from siamesenorm.topologies.post_norm_family import DeepNorm, HybridNorm, Keel, MixLN, PostNorm, ResiDual, SpanNorm
from siamesenorm.topologies.pre_norm_family import (
    Lambdas,
    LayerNormScaling,
    LayerScale,
    OutputNorm,
    PeriNorm,
    PreNorm,
    ReZero,
)
from siamesenorm.topologies.siamese import SiameseHybridPre, SiamesePostPre
from siamesenorm.topologies.topology import Topology

TOPOLOGIES: dict[str, Topology] = {
    "pre": PreNorm(),
    "pre-embednorm": PreNorm(embedding_norm=True),
    "post": PostNorm(),
    "deepnorm": DeepNorm(),
    "keel": Keel(),
    "peri": PeriNorm(),
    "olmo2": OutputNorm(),
    "ln-scaling": LayerNormScaling(),
    "layerscale": LayerScale(),
    "rezero": ReZero(),
    "lambdas": Lambdas(),
    "mixln": MixLN(),
    "hybridnorm": HybridNorm(),
    "hybridnorm-star": HybridNorm(first_block="pre"),
    "spannorm": SpanNorm(initial_norm=True),
    "residual": ResiDual(),
    "residual-hybridnorm": ResiDual(body="hybridnorm"),
    "shc-2": HyperConnections(dynamic=False),
    "dhc-2": HyperConnections(),
    "mhc-4": ManifoldHyperConnections(),
    "attnres": AttentionResiduals(),
    "attnres-full": AttentionResiduals(sources="outputs"),
    "siamese-post-pre": SiamesePostPre(),
    "siamese": SiameseHybridPre(),
}


def _register_found(name: str, found: Any) -> bool:
    topology = found() if isinstance(found, type) and issubclass(found, Topology) else found
    if isinstance(topology, Topology):
        register_topology(name, topology)
    return isinstance(topology, Topology)


ENTRY_POINTS = EntryPointGroup("siamesenorm.topologies", _register_found)


def register_topology(name: str, topology: Topology) -> None:
    """Add a topology under a new name.

    Raises ValueError if it is not an instance of `Topology`, if the name is taken by another one or is not of letters,
    digits, dashes, dots and underscores, or if another class has the name of its class, which is part of a run's
    identity.
    """
    require_name(name)
    if not isinstance(topology, Topology):
        raise ValueError(f"{topology!r} is not an instance of Topology: register an instance, such as MyTopology()")
    for other in {type(registered) for registered in TOPOLOGIES.values()} - {type(topology)}:
        if other.__name__ == type(topology).__name__:
            raise ValueError(f"class name {other.__name__} is taken by {other.__module__}: rename the class")
    if TOPOLOGIES.setdefault(name, topology) != topology:
        raise ValueError(f"topology name {name!r} is taken: choose another")


def available_topologies() -> tuple[str, ...]:
    """Return the registered names."""
    ENTRY_POINTS.load()
    return tuple(TOPOLOGIES)


def readable_options(name: str) -> dict[str, Scalar]:
    """Return the options of a registered topology with values of the type in which a text is read.

    That is the registered value, or "auto" where it is the family's default. Raises UserError for an unknown name.
    """
    ENTRY_POINTS.load()
    if name not in TOPOLOGIES:
        raise unknown("topology", name, TOPOLOGIES)
    ruled = {option.name: "auto" for option in dataclasses.fields(TOPOLOGIES[name]) if option.default == "auto"}
    return {**dataclasses.asdict(TOPOLOGIES[name]), **ruled}


def build_topology(name: str, **options: Scalar) -> Topology:
    """Return the topology `name` ("siamese", "dhc-2:streams=4", ...) with options overridden.

    Raises UserError for an unknown name, an unknown option, or a value that the option does not take.
    """
    name, given = parse_specification("topology", name, readable_options)
    known = dataclasses.asdict(TOPOLOGIES[name])
    for option in options:
        if option not in known:
            raise unknown(f"option of topology {name}", option, known)
    return dataclasses.replace(TOPOLOGIES[name], **{**given, **options})


def topology_name(topology: Topology) -> str:
    """Return the text that `build_topology` reads: the nearest registered name, and the options that differ."""

    def differences(name: str) -> dict[str, Any]:
        registered = dataclasses.asdict(TOPOLOGIES[name])
        return {k: v for k, v in dataclasses.asdict(topology).items() if v != registered[k]}

    ENTRY_POINTS.load()
    family = [name for name, registered in TOPOLOGIES.items() if type(registered) is type(topology)]
    if not family:
        raise ValueError(f"{type(topology).__name__} is not registered: call register_topology first")
    name = min(family, key=lambda candidate: len(differences(candidate)))
    options = ",".join(f"{key}={value}" for key, value in differences(name).items())
    return f"{name}:{options}" if options else name


def topology_to_json(topology: Topology) -> dict[str, Scalar]:
    """Return the nearest registered name, the family (the class, whatever names are registered) and every option."""
    name = topology_name(topology).partition(":")[0]
    return {"name": name, "family": type(topology).__name__, **dataclasses.asdict(topology)}


def topology_from_json(record: dict[str, Any]) -> Topology:
    """Read a record of `topology_to_json`; for a name that is not registered here, the family decides."""
    options = {key: value for key, value in record.items() if key not in ("name", "family")}
    name = record["name"]
    if name not in available_topologies():
        relatives = [known for known, topology in TOPOLOGIES.items() if type(topology).__name__ == record.get("family")]
        name = relatives[0] if relatives else name
    return build_topology(name, **options)
