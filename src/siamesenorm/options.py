"""Names with options as text, such as "dhc-2:streams=4", and names that installed packages add."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from types import ModuleType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from siamesenorm.errors import UserError, unknown

Scalar = bool | int | float | str

REMEDIES: dict[object, str] = {bool: "true or false", int: "an integer", float: "a finite number", str: "a text"}
"""What to write for an option of each annotation."""


def parse_specification(
    what: str, text: str, options_of: Callable[[str], Mapping[str, Scalar]]
) -> tuple[str, dict[str, Scalar]]:
    """Split "name:option=value,..." and read each value in the type of its default.

    `options_of(name)` returns the options with their defaults and raises for an unknown name.
    Raises UserError for an unknown option, a value of the wrong type, or an option without a value.
    """
    name, _, rest = (part.strip() for part in text.partition(":"))
    defaults = options_of(name)
    options: dict[str, Scalar] = {}
    for item in filter(None, map(str.strip, rest.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise UserError(f"option {item!r} of {what} {name} has no value: write {key}=VALUE")
        if key not in defaults:
            if not defaults:
                raise UserError(f"unknown option {key!r} of {what} {name}: it has no options")
            raise unknown(f"option of {what} {name}", key, defaults)
        options[key] = read_scalar(f"option {key} of {what} {name}", value, defaults[key])
    return name, options


def require_name(name: str) -> None:
    """Raise ValueError for a name that no text of a method can have: one of other characters."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ValueError(f"name {name!r}: choose letters, digits, dashes, dots and underscores")


def read_scalar(what: str, text: str, default: Scalar) -> Scalar:
    """Read `text` in the type of `default`; raises UserError when it is not of that type.

    The default "auto" stands for a value that a recipe decides: a truth value or a number is read as such.
    """
    if default == "auto" or isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        if default != "auto":
            raise UserError(f"{what} is {text!r}: write true or false")
        for number in (int, float):
            with suppress(ValueError):
                return number(text)
        return text
    if isinstance(default, (int, float)):
        kind = "an integer" if isinstance(default, int) else "a number"
        try:
            return type(default)(text)
        except ValueError:
            raise UserError(f"{what} is {text!r}: write {kind}, such as {default}") from None
    return text


def alternatives(hint: object) -> tuple[object, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def widen(value: Scalar, hint: object) -> Scalar:
    """Return an integer as a float where the annotation has float and no int: 1 and 1.0 become one spelling."""
    kinds = alternatives(hint)
    if isinstance(value, bool) or not isinstance(value, int) or float not in kinds or int in kinds:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_option(what: str, value: Scalar, hint: object) -> Scalar:
    """Return the value of an option as its annotation spells it.

    An annotation is bool, int, float, str or a Literal of texts, or a union of one of the first four with a Literal.
    Raises UserError for a value that it does not admit, a number that is not finite, or another annotation.
    """
    kinds = [kind for kind in alternatives(hint) if get_origin(kind) is not Literal]
    words = [word for kind in alternatives(hint) if get_origin(kind) is Literal for word in get_args(kind)]
    if len(kinds) > 1 or any(kind not in REMEDIES for kind in kinds) or not all(isinstance(w, str) for w in words):
        raise UserError(
            f"{what} is annotated {hint}: annotate an option as bool, int, float, str or Literal of texts, or as a "
            "union of one of the first four and a Literal"
        )
    if isinstance(value, str) and value in words:
        return value
    if not kinds:
        raise unknown(what, str(value), words)
    value = widen(value, hint)
    infinite = isinstance(value, float) and not math.isfinite(value)
    if infinite or type(value) is not kinds[0]:
        raise UserError(f"{what} is {value!r}: write {' or '.join([REMEDIES[kinds[0]], *words])}")
    return value


class EntryPointGroup:
    """The entry points of installed packages in one group, loaded when a name is first looked up or listed.

    An entry point names what is registered under its own name, a function that registers, or a module that does so
    when it is imported.
    """

    def __init__(self, group: str, register: Callable[[str, Any], bool]) -> None:
        """Take `register(name, found)`, which registers what is of its kind, and returns whether it is."""
        self.group, self.register = group, register
        self.loaded = False

    def load(self) -> None:
        """Load each entry point once; one that fails is left out with a warning."""
        if self.loaded:
            return
        self.loaded = True  # first: what is loaded may itself look up a name
        for entry in metadata.entry_points(group=self.group):
            try:
                found = entry.load()
                if self.register(entry.name, found) or isinstance(found, ModuleType):
                    continue
                if not callable(found):
                    raise UserError(
                        f"{found!r} cannot be registered: name a class, an instance, a function or a module"
                    )
                found()
            except Exception as error:
                line = f"{entry.value}, an entry point of {self.group}, is left out: {error}"
                warnings.warn(line, RuntimeWarning, stacklevel=3)
