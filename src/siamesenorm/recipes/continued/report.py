"""The report of the experiment: two tables, the sentences that its numbers allow, and every number as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from siamesenorm.comparison import quantities
from siamesenorm.comparison.findings import CONFIRMED_HIGHER, CONFIRMED_LOWER
from siamesenorm.comparison.quantities import NOTHING
from siamesenorm.comparison.renderings import for_markdown
from siamesenorm.comparison.tables import LOWER, Column, Entry, Group, Pill, Table, verdict_pill
from siamesenorm.files import disk_errors, write_atomically
from siamesenorm.recipes.continued.findings import Findings, Gap

TITLE = "A Pre-Norm model, converted and continued"
GAP_COLUMNS = (
    Column("Base", "the Pre-Norm model that goes on", numeric=False),
    Column("Goes on as", "topology, and operator where it changes", numeric=False),
    Column("Jump", "held-out loss before the first step minus that of the base; the largest over the seeds (nats)"),
    Column("Verdict", "the worst verdict of the seeds", numeric=False),
    Column("Seeds", "runs that have ended"),
    Column(f"Held-out loss{LOWER}", "nats per token, mean ± half width of the 95 % t interval over seeds"),
    Column("Against unchanged (nats)", "paired by seed, with the Holm-corrected 95 % interval", numeric=False),
)
BASE_COLUMNS = (
    Column("Base", "Pre-Norm, and attention norm where it is not the usual one", numeric=False),
    Column("Seeds", "runs that did not diverge"),
    Column(f"Held-out loss{LOWER}", "nats per token, mean ± half width of the 95 % t interval over seeds"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPaths:
    """Where the parts of a report are."""

    markdown: Path
    runs: Path


def write_report(findings: Findings, out: Path) -> ReportPaths:
    """Write the report into the directory `out`, each file whole or not at all."""
    paths = ReportPaths(markdown=out / "report.md", runs=out / "runs.csv")
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(paths.runs, runs_csv(findings).encode())
        write_atomically(paths.markdown, render_markdown(findings).encode())
    return paths


def render_markdown(findings: Findings) -> str:
    """Return the report as Markdown."""
    results = findings.results
    parts = [
        f"# {TITLE}\n",
        "".join(f"- {sentence}\n" for sentence in conclusions(findings)),
        f"## {bases(findings).title}\n",
        for_markdown(bases(findings)),
        f"## {gaps(findings).title}\n",
        for_markdown(gaps(findings)),
    ]
    if results.command:
        parts += ["## How to repeat it\n", f"```\n{results.command}\n```\n"]
    return "\n".join(parts)


def gaps(findings: Findings) -> Table:
    """Build the table of every arm at every rate."""
    groups = []
    for rate in findings.results.learning_rates:
        rows = tuple(_gap_row(gap) for gap in findings.gaps if gap.learning_rate == rate)
        groups.append(Group(title=f"Continued at learning rate {quantities.rate(rate)}", rows=rows))
    return Table(title="Continued, converted and unchanged", columns=GAP_COLUMNS, groups=tuple(groups))


def bases(findings: Findings) -> Table:
    """Build the table of the bases."""
    rows = []
    for base in dict.fromkeys(each.base for each in findings.results.bases):
        loss = findings.base_losses(base)
        cells = (base, str(loss.count), quantities.loss_estimate(loss)) if loss else (base, "0", NOTHING)
        rows.append(tuple(Entry(text=text) for text in cells))
    return Table(title="The models to continue", columns=BASE_COLUMNS, groups=(Group(title="", rows=tuple(rows)),))


def conclusions(findings: Findings) -> list[str]:
    """Return one sentence for every comparison, in the words that its interval allows."""
    sentences = [_sentence(gap) for gap in findings.compared]
    if findings.results.unfinished:
        sentences.append(f"{quantities.plural(findings.results.unfinished, 'run')} not finished.")
    return sentences


def runs_csv(findings: Findings) -> str:
    """Return every run as a line: base, what it goes on as, rate, seed, verdict, and the losses in nats."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["base", "goes_on_as", "learning_rate", "seed", "verdict", "first_loss", "held_out_loss"])
    for base in findings.results.bases:
        run = base.run
        lines.writerow([base.base, "", run.learning_rate, run.seed, run.word, "", run.held_out_loss])
    for each in findings.results.continued:
        run = each.run
        lines.writerow(
            [each.arm.base, each.arm.name, run.learning_rate, run.seed, run.word, each.first_loss, run.held_out_loss]
        )
    return text.getvalue()


def _gap_row(gap: Gap) -> tuple[Entry, ...]:
    loss = gap.outcome.held_out_loss
    return (
        Entry(text=gap.arm.base),
        Entry(text=gap.arm.name),
        Entry(text="0" if gap.jump == 0 else f"{gap.jump:+.0e}".replace("-", quantities.MINUS)),
        Entry(pill=verdict_pill(gap.outcome)),
        Entry(text=str(len(gap.outcome.complete))),
        Entry(text=NOTHING if loss is None else quantities.loss_estimate(loss)),
        _comparison_entry(gap),
    )


def _comparison_entry(gap: Gap) -> Entry:
    if gap.comparison is None:
        return Entry(text=NOTHING)
    interval, conclusion = gap.comparison.interval, gap.comparison.conclusion
    return Entry(
        text=quantities.signed(interval.mean) if interval else NOTHING,
        detail=quantities.interval(interval) if interval else "",
        pill=Pill(kind=conclusion, text=conclusion),
    )


def _sentence(gap: Gap) -> str:
    assert gap.comparison is not None
    comparison, interval = gap.comparison, gap.comparison.interval
    who = f"{gap.arm.base}, going on as {gap.arm.name} at {quantities.rate(gap.learning_rate)}"
    if comparison.decision is None or interval is None:
        return f"{who}: no conclusion, {comparison.conclusion}."
    numbers = f"{quantities.signed(interval.mean)} nats {quantities.interval(interval)}, {interval.count} seeds"
    words = {
        CONFIRMED_LOWER: "ends lower than unchanged, confirmed",
        CONFIRMED_HIGHER: "ends higher than unchanged, confirmed",
    }
    return f"{who}, {words.get(comparison.conclusion, 'no difference from unchanged is confirmed')}: {numbers}."
