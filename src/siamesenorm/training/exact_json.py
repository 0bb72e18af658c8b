"""JSON that gives back exactly what it was given, NaN and infinities included.

JSON has no such numbers: here they are the strings "nan", "inf" and "-inf", and no text may be one of those strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON text, on one line unless `indent` is given; non-finite floats become strings.

    Raises `TypeError` for what JSON cannot hold exactly (keys that are no strings, tensors), and `ValueError` for a
    string that would be read back as a float.
    """
    return json.dumps(_plain(value), allow_nan=False, indent=indent)


def decode_json(text: str | bytes) -> Any:
    """Return what `encode_json` was given (tuples as lists); raises `ValueError` on text that is not JSON."""
    try:
        return _restored(json.loads(text))
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", "", 0) from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if value in NON_FINITE:
            raise ValueError(f"the text {value!r} would be read back as a number: write the float, or another word")
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a string: JSON would turn it into one")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
