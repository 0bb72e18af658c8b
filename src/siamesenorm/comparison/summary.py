"""The words of a report, derived from the findings: what was compared, what came out, and what limits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from siamesenorm.comparison import quantities
from siamesenorm.comparison.findings import (
    CONFIRMED_HIGHER,
    CONFIRMED_LOWER,
    NOT_CONFIRMED,
    ONE_SEED,
    SOME_DIVERGED,
    Comparison,
    Findings,
    lacks_control,
)
from siamesenorm.comparison.results import DIVERGED, SPIKED, STABLE, Method, Sweep


def subject(findings: Findings) -> list[str]:
    """Say in three sentences what was compared, on what data, with what budget."""
    sweep = findings.sweep
    rates = quantities.listed([quantities.rate(rate) for rate in sweep.learning_rates])
    names = quantities.listed([method.name for method in sweep.methods])
    return [
        f"{quantities.plural(len(sweep.methods), 'way')} to normalise the residual path ({names}) are compared at "
        f"{quantities.plural(len(sweep.learning_rates), 'learning rate')} ({rates}) "
        f"with {quantities.plural(len(sweep.seeds), 'seed')}.",
        _data_sentence(sweep),
        _budget_sentence(sweep),
    ]


def conclusions(findings: Findings) -> list[str]:
    """Say who is lowest, who diverged where, what is confirmed and what is not, one sentence each."""
    return [
        *_who_is_lowest(findings),
        *_who_was_unstable(findings),
        *_what_is_confirmed(findings),
        *_what_is_not_confirmed(findings),
        *_what_is_missing(findings),
    ]


def footnotes(findings: Findings) -> list[str]:
    """Say what a reader of the tables must know: definitions, and every caution that applies to these runs."""
    return [
        _train_perplexity_note(findings.sweep),
        "Held-out PPL is exp of the loss at the last validation. ± and [ , ] are 95 % Student-t intervals over seeds; "
        "a value without one is from a single seed.",
        f"The learning rate of a method is the one with the lowest held-out loss on seed {findings.sweep.selection_seed} "
        "among runs that did not diverge; its result is reported on the other seeds where there are any. Differences are "
        "paired by seed; confirmed means that the interval after Holm's correction over all tests of the table excludes zero.",
        "diverge: every seed diverged. * : a seed had loss spikes. † : some seeds diverged, and the value is the mean "
        "of the others.",
        "Step time is the median over the faster half of the steps, so that compilation and other work on the machine "
        "disturb it less; runs that shared a machine still slow each other.",
        *_edge_notes(findings),
        *_control_note(findings),
        *_budget_notes(findings.sweep),
    ]


def _data_sentence(sweep: Sweep) -> str:
    source = sweep.data.get("source") or "the prepared data"
    tokenizer = sweep.data.get("tokenizer") or {}
    vocabulary = f", vocabulary {tokenizer['vocabulary']:,}" if tokenizer.get("vocabulary") else ""
    read = f" read with the {tokenizer['name']} tokenizer{vocabulary}" if tokenizer.get("name") else ""
    available = _distinct(run.train_tokens_available for run in sweep.runs)
    size = f"; {quantities.count(available[0])} training tokens" if len(available) == 1 else ""
    return f"The text is {source}{read}{size}; every run reads it in the same order for the same seed."


def _budget_sentence(sweep: Sweep) -> str:
    run = sweep.runs[0]
    model = run.config["model"]
    shape = [f"{model[key]} {words}" for key, words in (("depth", "blocks"), ("heads", "heads")) if key in model]
    width = f"width {model['dim']}" if "dim" in model else ""
    size = quantities.count(run.parameters) + " parameters" if run.parameters else ""
    described = ", ".join(part for part in (*shape[:1], width, *shape[1:], size) if part)
    tokens = f" of {run.batch_tokens:,} tokens" if run.batch_tokens else ""
    total = f" ({quantities.count(run.batch_tokens * run.steps)} tokens)" if run.batch_tokens else ""
    family = str(model.get("family", "")).strip()
    return f"Each run trains a {family or 'single'} model of {described} for {run.steps:,} steps{tokens}{total}."


def _who_is_lowest(findings: Findings) -> list[str]:
    ranked = findings.ranked()
    if not ranked:
        return ["No method has a result yet."]
    best = ranked[0]
    loss, perplexity = best.outcome.held_out_loss, best.outcome.held_out_perplexity
    if loss is None or perplexity is None:
        return []
    basis = "one seed, which also chose the rate" if best.on_selection_seed else quantities.plural(loss.count, "seed")
    sentence = (
        f"Lowest held-out loss: {best.method.name} at {quantities.rate(best.learning_rate)}, {loss.mean:.4f} nats "
        f"(PPL {quantities.perplexity(perplexity.mean)}; {basis})."
    )
    if len(ranked) > 1 and (second := ranked[1].outcome.held_out_loss):
        gap = second.mean - loss.mean
        sentence += f" Next is {ranked[1].method.name}, {gap:.4f} nats above; the order of the two is not tested here."
    return [sentence]


def _who_was_unstable(findings: Findings) -> list[str]:
    sentences = []
    for verdict in (DIVERGED, SPIKED):
        places = [
            f"{m.name} at {rates}" for m in findings.sweep.methods if (rates := _rates_with(findings, m, verdict))
        ]
        nobody = f"No finished run {verdict}."
        sentences.append(f"{verdict.capitalize()}: {'; '.join(places)}." if places else nobody)
    stable = [method.name for method in findings.sweep.methods if _stable_everywhere(findings, method)]
    return [*sentences, *([f"Stable at every rate tried: {quantities.listed(stable)}."] if stable else [])]


def _what_is_confirmed(findings: Findings) -> list[str]:
    confirmed = [c for c in findings.comparisons if c.conclusion in (CONFIRMED_LOWER, CONFIRMED_HIGHER)]
    tests = sum(comparison.testable for comparison in findings.comparisons)
    if not tests:
        return ["Nothing can be confirmed: no two methods share two seeds at their chosen rates."]
    over = f"(95 %, Holm over {quantities.plural(tests, 'test')})"
    if not confirmed:
        return [f"No difference is confirmed {over}."]
    return [f"Confirmed {over}: {'; '.join(_told(c) for c in confirmed)}."]


def _what_is_not_confirmed(findings: Findings) -> list[str]:
    reasons = {
        NOT_CONFIRMED: "Not confirmed, the interval includes zero",
        ONE_SEED: "Not tested, a single seed",
        SOME_DIVERGED: "Not tested, a seed at the chosen rate diverged",
    }
    told = {why: [_told(c) for c in findings.comparisons if c.conclusion == why] for why in reasons}
    return [f"{reasons[why]}: {'; '.join(parts)}." for why, parts in told.items() if parts]


def _what_is_missing(findings: Findings) -> list[str]:
    sweep = findings.sweep
    absent = len(sweep.unfinished) + len(sweep.missing)
    total = len(sweep.runs) + len(sweep.missing)
    return [f"{absent} of {quantities.plural(total, 'run')} unfinished; they count for nothing here."] if absent else []


def _told(comparison: Comparison) -> str:
    text = f"{comparison.method.name} against {comparison.baseline.name}"
    return (
        f"{text} {quantities.signed(comparison.difference.estimate.mean)} nats"
        if comparison.difference.by_seed
        else text
    )


def _rates_with(findings: Findings, method: Method, verdict: str) -> str:
    parts = []
    for (rate, of), outcome in findings.outcomes.items():
        runs = [run for run in outcome.complete if run.word == verdict]
        if of == method and runs:
            share = "" if len(runs) == len(outcome.complete) else f" ({len(runs)} of {len(outcome.complete)} seeds)"
            parts.append(quantities.rate(rate) + share)
    return quantities.listed(parts)


def _stable_everywhere(findings: Findings, method: Method) -> bool:
    outcomes = [outcome for (_, of), outcome in findings.outcomes.items() if of == method]
    return all(outcome.complete and outcome.verdict == STABLE for outcome in outcomes)


def _train_perplexity_note(sweep: Sweep) -> str:
    definition = "Train PPL is exp of the mean training loss over the last 10 % of steps"
    complete = [run for run in sweep.runs if run.complete] or list(sweep.runs)
    answers = {run.saw_data_at_most_once for run in complete}
    if answers == {True}:
        return f"{definition}: the paper's number, for no run saw any data twice."
    if None in answers:
        return (
            f"{definition}; whether that is the paper's number is not known, for the record lacks the size of the data."
        )
    passes = max(run.passes_over_data or 0.0 for run in complete)
    return f"{definition}; it is not the paper's number, for runs saw the data up to {passes:.1f} times."


def _edge_notes(findings: Findings) -> list[str]:
    flagged = [choice for choice in findings.choices.values() if choice.edge]
    if not flagged:
        return []
    told = [f"{choice.method.name} ({choice.edge}, {quantities.rate(choice.learning_rate)})" for choice in flagged]
    return [f"The best rate lies at an edge of the rates tried, so a better one may lie outside: {', '.join(told)}."]


def _control_note(findings: Findings) -> list[str]:
    without = [method.name for method in lacks_control(findings.sweep.methods)]
    if not without:
        return []
    return [
        f"The control row is missing: {quantities.listed(without)} normalise values in attention (QKV-norm) and no `pre` "
        "with QKV-norm was run beside them, so a difference to pre may come from attention alone."
    ]


def _budget_notes(sweep: Sweep) -> list[str]:
    budgets = _distinct((run.steps, run.batch_tokens) for run in sweep.runs)
    digests = _distinct((run.config.get("data") or {}).get("digest") for run in sweep.runs)
    told = []
    if len(budgets) > 1:
        told.append("The runs differ in steps or batch, so their losses are not comparable.")
    if len(digests) > 1:
        told.append("The runs differ in their data (digest), so their losses are not comparable.")
    return told


def _distinct(values: Iterable[Any]) -> Sequence[Any]:
    return list(dict.fromkeys(value for value in values if value is not None))
