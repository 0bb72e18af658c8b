"""Classes that are made at run time: a host's own class with another behaviour mixed in before it.

Pickle finds a class by its name; a derived class is pickled as the call that makes it again, so that whole models can
be sent to another process.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any


class DerivedClass(type):
    """The metaclass of derived classes; `mixin` comes before `host`, and `recipe` is the call that makes it again."""

    mixin: type
    host: type
    recipe: tuple[Callable[..., type], tuple[type, ...]]


def _recipe(kind: DerivedClass) -> tuple[Callable[..., Any], tuple[type, ...]]:
    return kind.recipe


copyreg.pickle(DerivedClass, _recipe)

_MADE: dict[tuple[type, type], DerivedClass] = {}


def derive(mixin: type, host: type) -> type[Any]:
    """Return the subclass of a host's class in which `mixin` comes first: one for each pair."""
    members = {"__doc__": mixin.__doc__, "__module__": mixin.__module__}
    # The name keeps the host's: libraries look for it (no-split modules, LoRA's targets, device maps).
    return derive_as(f"Rewired{original_class(host).__name__}", mixin, host, members, (derive, (mixin, host)))


def derive_as(
    name: str, mixin: type, host: type, members: dict[str, Any], recipe: tuple[Callable[..., type], tuple[type, ...]]
) -> type[Any]:
    """Return the derived class of a pair under a name and with members of its own, made at the first call."""
    if (mixin, host) not in _MADE:
        kind = DerivedClass(name, (mixin, host), members)
        kind.mixin, kind.host, kind.recipe = mixin, host, recipe
        _MADE[mixin, host] = kind
    return _MADE[mixin, host]


def original_class(kind: type) -> type:
    """Return the host's own class, from which a class was derived."""
    return original_class(kind.host) if isinstance(kind, DerivedClass) else kind


def without(mixin: type, kind: type) -> type:
    """Return a class with one mixin removed, the others in their order."""
    if not isinstance(kind, DerivedClass):
        return kind
    host = without(mixin, kind.host)
    return host if kind.mixin is mixin else derive(kind.mixin, host)
