"""The figures of a report, each drawn in a light and in a dark theme, with caption and alternative text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from matplotlib.figure import Figure as Drawing

from siamesenorm.comparison import quantities
from siamesenorm.comparison.findings import Findings, Outcome
from siamesenorm.comparison.rate_figures import draw_frontier, draw_sensitivity, noise_band
from siamesenorm.comparison.results import DIVERGED
from siamesenorm.comparison.theme import Theme, applied
from siamesenorm.comparison.training_curves import curves_at, draw_gradient_norms, draw_losses, references_at

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
"""The page's fonts. Drawings are laid out in DejaVu Sans, which is wider than these: no text outgrows its place."""

PNG_DOTS_PER_INCH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure to be drawn: its file name, title, caption and the text that replaces it."""

    name: str
    title: str
    caption: str
    alternative: str
    draw: Callable[[Theme], Drawing]


def rate_figures(findings: Findings) -> tuple[Figure, ...]:
    """Return the figures over methods and learning rates: frontier and sensitivity."""
    return (_frontier(findings), _sensitivity(findings))


def curve_figures(findings: Findings, rate: float) -> tuple[Figure, ...]:
    """Return the figures of training at a learning rate: loss and gradient norm; none where no run has a curve."""
    return (_losses(findings, rate), _gradient_norms(findings, rate)) if curves_at(findings, rate) else ()


def render(figure: Figure, theme: Theme, form: Literal["svg", "png"]) -> bytes:
    """Draw a figure as a file; the same findings give the same bytes."""
    buffer = io.BytesIO()
    with applied(theme):
        drawing = figure.draw(theme)
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        drawing.savefig(buffer, format=form, dpi=PNG_DOTS_PER_INCH, metadata=metadata)
    if form == "png":
        return buffer.getvalue()
    return _tidied(buffer.getvalue().decode()).encode()


def _tidied(svg: str) -> str:
    """Give the text of a drawing the page's fonts, and its paths two decimals instead of six."""
    svg = re.sub(r"(font: [^';\"]*px) [^;\"]*", rf"\1 {FONTS}", svg)
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path.group()), svg)


def _frontier(findings: Findings) -> Figure:
    return Figure(
        name="frontier",
        title="Stability frontier",
        caption=f"Held-out loss ({findings.results.unit}), the mean over the seeds that every method has finished at "
        "that rate, without the diverged: the stronger the colour, the lower the loss. ● stable, ▲ spiked, "
        "◇ not learned, ✕ and hatching: diverged, ○ unfinished.",
        alternative="; ".join(map(_description, findings.outcomes.values())),
        draw=lambda theme: draw_frontier(findings, theme),
    )


def _sensitivity(findings: Findings) -> Figure:
    noise = noise_band(findings)
    band = f" The band: one standard deviation over the seeds of {noise.method}, around its result." if noise else ""
    return Figure(
        name="sensitivity",
        title="Learning-rate sensitivity",
        caption=f"Held-out loss ({findings.results.unit}), the mean over the seeds that every method has finished at "
        f"that rate; the tables have the intervals. In the upper band: ✕ every seed diverged, ◇ not learned.{band}",
        alternative="Rate sensitivity, mean excess loss: "
        + "; ".join(f"{method} {value:.3f}" for method, value in findings.sensitivities.items()),
        draw=lambda theme: draw_sensitivity(findings, theme),
    )


def _losses(findings: Findings, rate: float) -> Figure:
    at = quantities.rate(rate)
    below = "Below: the difference to the baseline at the same step, on the same data. "
    return Figure(
        name=f"loss-{at}",
        title=f"Training loss at {at}",
        caption=f"{_seed(findings)}, smoothed over 5 % of the steps, every step behind it. "
        f"{below if references_at(findings, rate) else ''}Dotted: the loss of a model that has learned nothing. "
        "✕ marks where a run diverged, ▲ where it spiked.",
        alternative=_outcomes_at(findings, rate),
        draw=lambda theme: draw_losses(findings, rate, theme),
    )


def _gradient_norms(findings: Findings, rate: float) -> Figure:
    at = quantities.rate(rate)
    return Figure(
        name=f"gradient-norm-{at}",
        title=f"Gradient norm at {at}",
        caption=f"Norm of the whole gradient before clipping. {_seed(findings)}, smoothed over 5 % of the steps, every "
        "step behind it; logarithmic axis.",
        alternative=_outcomes_at(findings, rate),
        draw=lambda theme: draw_gradient_norms(findings, rate, theme),
    )


def _seed(findings: Findings) -> str:
    return f"Seed {min(findings.results.plan.selection_seeds, default=0)}"


def _outcomes_at(findings: Findings, rate: float) -> str:
    return "; ".join(_description(outcome) for (at, _), outcome in findings.outcomes.items() if at == rate)


def _description(outcome: Outcome) -> str:
    loss = outcome.held_out_loss
    reached = f", held-out loss {loss.mean:.3f}" if loss and outcome.verdict != DIVERGED else ""
    return f"{outcome.method} at {quantities.rate(outcome.learning_rate)}: {outcome.verdict or 'unfinished'}{reached}"
