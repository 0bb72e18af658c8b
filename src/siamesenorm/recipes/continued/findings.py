"""What the experiment shows: each arm against its base continued unchanged, paired by seed, corrected together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from siamesenorm.comparison.findings import Comparison, Outcome
from siamesenorm.comparison.statistics import Estimate, holm, paired_difference, t_interval
from siamesenorm.recipes.continued.experiment import Arm
from siamesenorm.recipes.continued.results import Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """An arm at a rate: its outcome, how far its first loss is from its base's last, and the paired comparison.

    `comparison` is None for the unchanged arm, and where a partner is missing. `jump` is the difference largest in size
    over the seeds, in nats.
    """

    arm: Arm
    learning_rate: float
    outcome: Outcome
    jump: float
    comparison: Comparison | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything a report says of the experiment, derived once."""

    results: Results
    gaps: tuple[Gap, ...]

    @property
    def compared(self) -> tuple[Gap, ...]:
        """The gaps of the arms that were held against an unchanged one."""
        return tuple(gap for gap in self.gaps if gap.comparison)

    def base_losses(self, base: str) -> Estimate | None:
        """Return the held-out loss of a base over the seeds that did not diverge."""
        losses = [each.run.score for each in self.results.bases if each.base == base and each.run.converged]
        return t_interval(losses) if losses else None


def find(results: Results) -> Findings:
    """Derive the findings; all comparisons are corrected together (Holm)."""
    gaps = [
        _gap(results, arm, rate) for rate in results.learning_rates for arm in results.arms if results.of(arm, rate)
    ]
    tested = [c for gap in gaps if (c := gap.comparison) and c.testable]
    decisions = dict(zip(map(id, tested), holm([c.difference.p_value or 0.0 for c in tested]), strict=True))
    corrected = [
        replace(gap, comparison=replace(gap.comparison, decision=decisions.get(id(gap.comparison))))
        if gap.comparison
        else gap
        for gap in gaps
    ]
    return Findings(results=results, gaps=tuple(corrected))


def _gap(results: Results, arm: Arm, rate: float) -> Gap:
    runs = results.of(arm, rate)
    last = {seed: base.run.held_out_loss for seed, base in results.base_of(arm).items()}
    jumps = [each.first_loss - loss for seed, each in runs.items() if (loss := last.get(seed)) is not None]
    method = next(iter(runs.values())).run.method
    return Gap(
        arm=arm,
        learning_rate=rate,
        outcome=Outcome(method=method, learning_rate=rate, runs=tuple(each.run for each in runs.values())),
        jump=max(jumps, key=abs, default=0.0),
        comparison=_comparison(results, arm, rate),
    )


def _comparison(results: Results, arm: Arm, rate: float) -> Comparison | None:
    """Return the comparison with the same base continued unchanged at the same rate, over the seeds that both have."""
    partner = next((other for other in results.arms if other.base == arm.base and other.unchanged), None)
    if partner is None or arm.unchanged:
        return None
    own, other = results.of(arm, rate), results.of(partner, rate)
    seeds = sorted(own.keys() & other.keys())
    if not seeds:
        return None
    both = [(own[seed].run, other[seed].run) for seed in seeds]
    return Comparison(
        method=both[0][0].method,
        baseline=both[0][1].method,
        difference=paired_difference(
            {run.seed: run.score for run, _ in both if run.converged},
            {run.seed: run.score for _, run in both if run.converged},
        ),
        diverged=any(run.diverged for pair in both for run in pair),
    )
