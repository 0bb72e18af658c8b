"""The figures of a report, each to be drawn in a light and in a dark theme, with the words that go with it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from matplotlib.figure import Figure as Drawing

from siamesenorm.comparison import quantities
from siamesenorm.comparison.findings import Findings, Outcome
from siamesenorm.comparison.frontier import draw_frontier
from siamesenorm.comparison.results import DIVERGED
from siamesenorm.comparison.sensitivity import draw_sensitivity
from siamesenorm.comparison.theme import Theme, applied
from siamesenorm.comparison.training_curves import curves_at, draw_gradient_norms, draw_losses, references_at

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
"""The page's fonts. Drawings are laid out in DejaVu Sans, which is wider than these: no text outgrows its place."""

PNG_DOTS_PER_INCH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure to be drawn: the section it belongs to, its file name, title, caption and the text that replaces it."""

    section: str
    name: str
    title: str
    caption: str
    alternative: str
    draw: Callable[[Theme], Drawing]


def figures(findings: Findings) -> list[Figure]:
    """Return the figures of a report: frontier and sensitivity, then loss and gradient norm at every learning rate."""
    drawn = [_frontier(findings), _sensitivity(findings)]
    for rate in findings.sweep.learning_rates:
        if curves_at(findings, rate):
            drawn += [_losses(findings, rate), _gradient_norms(findings, rate)]
    return drawn


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
        section="Where each method is stable",
        name="frontier",
        title="Stability frontier",
        caption="Held-out loss (nats) by method and learning rate, the mean over the seeds that every method has "
        "finished there, the diverged left out: the stronger the colour, the lower the loss. ● stable, ▲ spiked, "
        "✕ and hatching: diverged, ○ unfinished.",
        alternative="; ".join(_told(outcome) for outcome in findings.outcomes.values()),
        draw=lambda theme: draw_frontier(findings, theme),
    )


def _sensitivity(findings: Findings) -> Figure:
    return Figure(
        section="Where each method is stable",
        name="sensitivity",
        title="Learning-rate sensitivity",
        caption="Held-out loss (nats) against learning rate, the mean over the seeds that every method has finished "
        "there, the diverged left out; the tables have the intervals. A cross in the upper band: every seed diverged "
        "there.",
        alternative="Rate sensitivity, mean excess loss in nats: "
        + "; ".join(f"{method.name} {value:.3f}" for method, value in findings.sensitivities.items()),
        draw=lambda theme: draw_sensitivity(findings, theme),
    )


def _losses(findings: Findings, rate: float) -> Figure:
    at = quantities.rate(rate)
    below = "Below: the difference to pre at the same step, on the same data. " if references_at(findings, rate) else ""
    return Figure(
        section=f"Training at learning rate {at}",
        name=f"loss-{at}",
        title=f"Training loss at {at}",
        caption=f"Seed {findings.sweep.selection_seed}, smoothed over 5 % of the steps, every step behind it. "
        f"{below}✕ marks where a run diverged, ▲ where it spiked.",
        alternative=_outcomes_at(findings, rate),
        draw=lambda theme: draw_losses(findings, rate, theme),
    )


def _gradient_norms(findings: Findings, rate: float) -> Figure:
    at = quantities.rate(rate)
    return Figure(
        section=f"Training at learning rate {at}",
        name=f"gradient-norm-{at}",
        title=f"Gradient norm at {at}",
        caption=f"Norm of the whole gradient before clipping, seed {findings.sweep.selection_seed}, smoothed over "
        "5 % of the steps, every step behind it; logarithmic axis.",
        alternative=_outcomes_at(findings, rate),
        draw=lambda theme: draw_gradient_norms(findings, rate, theme),
    )


def _outcomes_at(findings: Findings, rate: float) -> str:
    return "; ".join(_told(outcome) for (at, _), outcome in findings.outcomes.items() if at == rate)


def _told(outcome: Outcome) -> str:
    loss = outcome.held_out_loss
    reached = f", held-out loss {loss.mean:.3f}" if loss and outcome.verdict != DIVERGED else ""
    return (
        f"{outcome.method.name} at {quantities.rate(outcome.learning_rate)}: {outcome.verdict or 'unfinished'}{reached}"
    )
