"""Names with options as text: "dhc-2:streams=4", "seednorm:heads=16,activation=sigmoid"."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from siamesenorm.errors import UserError, unknown

Scalar = bool | int | float | str


def parse_specification(
    what: str, text: str, options_of: Callable[[str], Mapping[str, Scalar]]
) -> tuple[str, dict[str, Scalar]]:
    """Split "name:option=value,..." and read each value in the type of its default.

    `options_of(name)` returns the options with their defaults and raises for an unknown name.
    Raises UserError for an unknown option, a value of the wrong type, or an option without a value.
    """
    name, _, rest = text.partition(":")
    defaults = options_of(name)
    options: dict[str, Scalar] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"option {item!r} of {what} {name} has no value: write {key}=VALUE")
        if key not in defaults:
            if not defaults:
                raise UserError(f"unknown option {key!r} of {what} {name}: it has no options")
            raise unknown(f"option of {what} {name}", key, defaults)
        options[key] = read_scalar(f"option {key} of {what} {name}", value, defaults[key])
    return name, options


def read_scalar(what: str, text: str, default: Scalar) -> Scalar:
    """Read `text` in the type of `default`; raises UserError when it is not of that type.

    The default "auto" stands for a value that a recipe decides: a truth value or a number is read as such.
    """
    if default == "auto":
        return _read_any(text)
    if isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UserError(f"{what} is {text!r}: write true or false")
    if isinstance(default, (int, float)):
        kind = "an integer" if isinstance(default, int) else "a number"
        try:
            return type(default)(text)
        except ValueError:
            raise UserError(f"{what} is {text!r}: write {kind}, such as {default}") from None
    return text


def _read_any(text: str) -> Scalar:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    kinds: tuple[type[int], type[float]] = (int, float)
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return text
