"""How a report writes its numbers: learning rates, perplexities, counts, seconds and bytes, for people to read."""

from __future__ import annotations

from siamesenorm.comparison.statistics import Estimate

NOTHING = "—"
MINUS = "\N{MINUS SIGN}"


def rate(value: float) -> str:
    """Write a learning rate as it is typed: 0.002 as `2e-3`."""
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def perplexity(value: float) -> str:
    """Write a perplexity with four significant digits: the paper's two decimals between 10 and 100."""
    return f"{value:.{_decimals(value)}f}" if value < 1e6 else f"{value:.2e}"


def perplexity_estimate(estimate: Estimate) -> str:
    """Write a mean perplexity and the half width of its interval, if it has one, to the same decimal."""
    if estimate.half_width is None:
        return perplexity(estimate.mean)
    return f"{perplexity(estimate.mean)} ± {estimate.half_width:.{_decimals(estimate.mean)}f}"


def loss_estimate(estimate: Estimate) -> str:
    """Write a mean loss in nats and the half width of its interval, if it has one."""
    if estimate.half_width is None:
        return f"{estimate.mean:.4f}"
    return f"{estimate.mean:.4f} ± {estimate.half_width:.4f}"


def signed(value: float, decimals: int = 4) -> str:
    """Write a difference with its sign, a typographic minus included."""
    text = f"{value:+.{decimals}f}"
    return text.replace("-", MINUS)


def interval(estimate: Estimate) -> str:
    """Write the interval of a difference, if it has one."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"[{signed(estimate.low)}, {signed(estimate.high)}]"


def count(value: float) -> str:
    """Write a large count with three significant digits and its unit: 1,284,096 as `1.28 M`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:  # below that, three digits round up to 1000 of the smaller unit
            return f"{_three_digits(value / size)} {unit}"
    return _three_digits(value)


def percent(ratio: float) -> str:
    """Write a relative change in percent, with as many decimals as a small one needs."""
    change = 100.0 * ratio
    decimals = 3 if 0.0 < abs(change) < 0.1 else 2 if abs(change) < 10 else 0
    return "+0 %" if change == 0.0 else f"{signed(change, decimals)} %"


def seconds(value: float) -> str:
    """Write a duration of one step."""
    return f"{_three_digits(value)} s" if value >= 0.9995 else f"{_three_digits(1e3 * value)} ms"


def memory(value: float) -> str:
    """Write a number of bytes in MiB or GiB."""
    gibibytes = value / 2**30
    return f"{gibibytes:.2f} GiB" if gibibytes >= 1.0 else f"{value / 2**20:.0f} MiB"


def plural(number: int, noun: str) -> str:
    """Write a number with its noun: `1 seed`, `4 seeds`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: list[str]) -> str:
    """Write names as a sentence does: `a`, `a and b`, `a, b and c`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _decimals(value: float, digits: int = 4) -> int:
    """Return how many decimals give so many significant digits after rounding."""
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return max(0, digits - 1 - exponent)


def _three_digits(value: float) -> str:
    return f"{value:.{_decimals(value, 3)}f}"
