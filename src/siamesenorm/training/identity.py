"""The identity of a run: a hash of what its configuration says beyond the schema's defaults.

* A field counts where its value differs from its default, under a name of its own: `FROZEN_NAMES` keeps the hash of a
  field that is renamed in Python. Removing or adding a field with a default changes no identity, because a new field's
  default means the old behaviour. `tests/identity_schema.json` pins every name and default.
* The tag of a choice (task, topology, norm) and fields without a default always count, and its revision when it is
  not 0.
* Paths, verdict thresholds and execution (device, threads, kernels, compilation) never count: their fields say so.
* Equal numbers have one spelling.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from siamesenorm.norms import NORMS, NormSpec
from siamesenorm.topologies import Topology

FROZEN_NAMES: dict[tuple[str, str], str] = {
    ("SiamesePostPre", "post_norm"): "settle",
    ("RunConfig", "warm_start"): "start",
}
"""Names in the hash that differ from those in Python, by class and field."""
FROZEN_TAGS: dict[str, str] = {}
"""Tags of topology families in the hash that differ from the names of their classes."""


def identity(config: Any) -> str:
    """Return the SHA-256 of a resolved run configuration: 64 hex digits."""
    return hashlib.sha256(json.dumps(described(config), sort_keys=True).encode()).hexdigest()


def described(value: Any) -> Any:
    """Return what counts of a value: of a dataclass, its tag and the fields that differ from their defaults."""
    if isinstance(value, NormSpec):
        return {**_tag(NORMS[value.name], value.name), **{name: _spelled(each) for name, each in value.options}}
    if not dataclasses.is_dataclass(value):
        return _spelled(value)
    kind = type(value)
    record: dict[str, Any] = {}
    if isinstance(value, Topology):
        record = _tag(kind, FROZEN_TAGS.get(kind.__name__, kind.__name__))
    elif tag := getattr(kind, "tag", ""):
        record = _tag(kind, tag)
    for field in dataclasses.fields(value):
        found, default = getattr(value, field.name), default_of(field)
        part = described(found)
        beyond = part != {} if isinstance(part, dict) else found != default
        if field.metadata.get("hashed", True) and (beyond or default is dataclasses.MISSING):
            record[FROZEN_NAMES.get((kind.__name__, field.name), field.name)] = part
    return record


def first_difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any]:
    """Return the name and both values of the first setting in which two descriptions differ."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return name, "its default" if old is None else old, "its default" if new is None else new
    differing = next(key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key))
    return first_difference(old.get(differing), new.get(differing), f"{name}.{differing}".lstrip("."))


def _tag(kind: type, tag: str) -> dict[str, Any]:
    revision = getattr(kind, "revision", 0)
    return {"tag": tag, **({"revision": revision} if revision else {})}


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; MISSING of a required one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _spelled(value: Any) -> Any:
    """Return a plain value with whole floats as integers."""
    if isinstance(value, (list, tuple)):
        return [_spelled(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
