"""Numbers as text: learning rates, metrics, counts, seconds and bytes, with as many digits as a reader needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from siamesenorm.comparison.statistics import Estimate

NOTHING = "—"
"""In place of a number that does not exist."""
MINUS = "\N{MINUS SIGN}"


def rate(value: float) -> str:
    """Write a learning rate as it is typed: 0.002 as `2e-3`."""
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def significant(value: float, digits: int = 4) -> str:
    """Write a number with so many significant digits: 12.606 as `12.61`."""
    return f"{value:.{_decimals(value, digits)}f}" if abs(value) < 1e6 else f"{value:.2e}"


def estimate(value: Estimate, form: str) -> str:
    """Write a mean and the half width of its interval, if it has one, in the format of its metric.

    `form` is a format of Python: `.4f`, `.1%`, or `.4g` for so many significant digits, zeros at the end included.
    """
    if value.half_width is None:
        return formatted(value.mean, form)
    if form.endswith("g"):
        return f"{formatted(value.mean, form)} ± {value.half_width:.{_decimals(value.mean, int(form[1:-1]))}f}"
    return f"{formatted(value.mean, form)} ± {formatted(value.half_width, form)}"


def formatted(value: float, form: str) -> str:
    """Write a value in the format of its metric, with a typographic minus."""
    text = significant(value, int(form[1:-1])) if form.endswith("g") else format(value, form)
    return text.replace("-", MINUS)


def signed(value: float, decimals: int = 4) -> str:
    """Write a difference with its sign, a typographic minus included."""
    return f"{value:+.{decimals}f}".replace("-", MINUS)


def interval(value: Estimate) -> str:
    """Write the interval of a difference, if it has one."""
    return NOTHING if value.ends is None else f"[{', '.join(map(signed, value.ends))}]"


def p_value(value: float) -> str:
    """Write a p-value with two significant digits, but none below 1e-4."""
    return "< 0.0001" if value < 1e-4 else significant(value, 2)


def count(value: float) -> str:
    """Write a large count with three significant digits and its unit: 1,284,096 as `1.28 M`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:  # below that, three digits round up to 1000 of the smaller unit
            return f"{significant(value / size, 3)} {unit}"
    return significant(value, 3)


def percent(ratio: float) -> str:
    """Write a relative change in percent, with as many decimals as a small one needs."""
    change = 100.0 * ratio
    decimals = 3 if 0.0 < abs(change) < 0.1 else 2 if abs(change) < 10 else 0
    return "+0 %" if change == 0.0 else f"{signed(change, decimals)} %"


def seconds(value: float) -> str:
    """Write the duration of one step."""
    return f"{significant(value, 3)} s" if value >= 0.9995 else f"{significant(1e3 * value, 3)} ms"


def memory(value: float) -> str:
    """Write a number of bytes in MiB or GiB."""
    gibibytes = value / 2**30
    return f"{gibibytes:.2f} GiB" if gibibytes >= 1.0 else f"{value / 2**20:.0f} MiB"


def steps(value: float) -> str:
    """Write a number of steps, `never` where it is infinite."""
    return "never" if math.isinf(value) else f"{value:,.0f}"


def plural(number: int, noun: str) -> str:
    """Write a number with its noun: `1 seed`, `4 seeds`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Write names as a sentence does: `a`, `a and b`, `a, b and c`."""
    return "".join(names) if len(names) < 2 else f"{', '.join(names[:-1])} and {names[-1]}"


def _decimals(value: float, digits: int) -> int:
    """Return how many decimals give so many significant digits after rounding."""
    return max(0, digits - 1 - int(f"{value:.{digits - 1}e}".partition("e")[2]))
