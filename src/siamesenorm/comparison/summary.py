"""The words of a report, derived from the findings: what was compared, what came out, and what limits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from siamesenorm.comparison import quantities
from siamesenorm.comparison.findings import (
    CONFIRMED_HIGHER,
    CONFIRMED_LOWER,
    NOT_CONFIRMED,
    ONE_SEED,
    SOME_DIVERGED,
    Choice,
    Comparison,
    Findings,
    baseline_of,
    lacks_control,
    paired,
)
from siamesenorm.comparison.results import DIVERGED, SPIKED, STABLE, Method, RunResult, SweepResults


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One thing a report says, under its topic."""

    topic: str
    text: str


def subject(findings: Findings) -> list[str]:
    """Say in three sentences what was compared, on what data, with what budget."""
    sweep = findings.sweep
    rates = quantities.listed([quantities.rate(rate) for rate in sweep.learning_rates])
    names = quantities.listed([method.name for method in sweep.methods])
    return [
        f"{quantities.plural(len(sweep.methods), 'way')} to normalise the residual path ({names}) are compared at "
        f"{quantities.plural(len(sweep.learning_rates), 'learning rate')} ({rates}) "
        f"with {'up to ' if len(sweep.seeds) > 1 else ''}{quantities.plural(len(sweep.seeds), 'seed')}.",
        _data_sentence(sweep),
        _budget_sentence(sweep),
    ]


def conclusions(findings: Findings) -> list[Statement]:
    """Say who is lowest, who diverged where, what is confirmed and what is not."""
    return [
        *_who_is_lowest(findings),
        *_who_was_unstable(findings),
        _what_is_confirmed(findings),
        *_what_is_not_confirmed(findings),
        *_what_is_missing(findings),
    ]


def footnotes(findings: Findings) -> list[Statement]:
    """Say what a reader of the tables must know: definitions, and every caution that applies to these runs."""
    return [
        _train_perplexity_note(findings.sweep),
        Statement(topic="Held-out PPL", text="exp of the loss at the last validation."),
        Statement(
            topic="Intervals",
            text="± and [ , ] are 95 % Student-t intervals over seeds; a value without one is from a single seed.",
        ),
        Statement(
            topic="Seeds",
            text="Results by learning rate, and the figures of them, are over the seeds that every method has finished "
            "at that rate; the table of chosen rates has all. Bold is the lowest on equal seeds.",
        ),
        Statement(
            topic="Choice of the rate",
            text="The learning rate of a method is the one with the lowest held-out loss on seed "
            f"{findings.sweep.selection_seed} among runs that did not diverge. Its result is reported on the other "
            "seeds, where there are any.",
        ),
        Statement(
            topic="Confirmed",
            text="Differences are paired by seed, each method at its own rate. Confirmed means that the interval after "
            "Holm's correction over all tests of the table excludes zero.",
        ),
        Statement(
            topic="Rate sensitivity",
            text="The mean over all rates of the held-out loss (nats) above its best, on seed "
            f"{findings.sweep.selection_seed}. A diverged run counts with its final training loss, at most the unigram "
            "entropy (Wortsman et al., arXiv 2309.14322, whose cap is the loss at initialisation).",
        ),
        Statement(
            topic="Marks",
            text="diverge: every seed diverged. * a seed had loss spikes. † some seeds diverged, and the value is the "
            "mean of the others.",
        ),
        Statement(
            topic="Step time",
            text="The median over the faster half of the steps, so that compilation and other work on the machine "
            "disturb it less; runs that shared a machine still slowed each other.",
        ),
        *_cautions(findings),
    ]


def unfinished(sweep: SweepResults) -> list[Statement]:
    """Name the runs that have no result, and how far they are."""
    started = [
        Statement(
            topic=run.path.name,
            text=f"{run.method.name} at {quantities.rate(run.learning_rate)}, seed {run.seed}: "
            f"{run.steps_done:,} of {run.steps:,} steps.",
        )
        for run in sweep.unfinished
    ]
    return started + [Statement(topic=run.path.name, text=f"{run.reason}.") for run in sweep.missing]


def environment(sweep: SweepResults) -> list[Statement]:
    """Return every distinct value of what the runs recorded of their environments, earlier ones included."""
    entries: dict[str, dict[str, None]] = {}
    for run in sweep.runs:
        for environment in (*run.environment.get("earlier", []), run.environment):
            for key, value in environment.items():
                if key != "earlier" and value not in (None, [], {}):
                    entries.setdefault(key, {})[_plain(value)] = None
    return [Statement(topic=key, text="; ".join(values)) for key, values in entries.items()]


def _data_sentence(sweep: SweepResults) -> str:
    source = sweep.data.get("source") or "the prepared data"
    tokenizer = sweep.data.get("tokenizer") or {}
    vocabulary = f" (vocabulary {tokenizer['vocabulary']:,})" if tokenizer.get("vocabulary") else ""
    read = f", tokenizer {tokenizer['name']}{vocabulary}" if tokenizer.get("name") else ""
    available = _distinct(run.train_tokens_available for run in sweep.runs)
    size = f", {quantities.count(available[0])} training tokens" if len(available) == 1 else ""
    return f"The text is {source}{read}{size}; runs with the same seed read it in the same order."


def _budget_sentence(sweep: SweepResults) -> str:
    run = sweep.runs[0]
    model = run.config["task"]["model"]
    shape = [f"{model[key]} {words}" for key, words in (("depth", "blocks"), ("heads", "heads")) if key in model]
    width = f"width {model['dim']}" if "dim" in model else ""
    size = f"{quantities.count(run.parameters)} parameters" if run.parameters else ""
    described = ", ".join(part for part in (*shape[:1], width, *shape[1:], size) if part)
    batch = ""
    if run.batch_tokens:
        batch = f" of {run.batch_tokens:,} tokens ({quantities.count(run.batch_tokens * run.steps)} in all)"
    return f"Each run trains a {run.config['task'].get('tag', '')} model of {described} for {run.steps:,} steps{batch}."


def _who_is_lowest(findings: Findings) -> list[Statement]:
    ranked = findings.ranked()
    if not ranked:
        return [Statement(topic="Lowest held-out loss", text="No method has a result yet.")]
    best = ranked[0]
    loss, perplexity = best.outcome.held_out_loss, best.outcome.held_out_perplexity
    if loss is None or perplexity is None:
        return []
    basis = "one seed, which also chose the rate" if best.on_selection_seed else quantities.plural(loss.count, "seed")
    text = (
        f"{best.method.name} at {quantities.rate(best.learning_rate)}, {loss.mean:.4f} nats "
        f"(PPL {quantities.perplexity(perplexity.mean)}, {basis})."
    )
    if len(ranked) > 1:
        text += f" Next is {ranked[1].method.name}, {_gap(best, ranked[1])}; {_how_certain(findings, best, ranked[1])}."
    return [Statement(topic="Lowest held-out loss", text=text)]


def _gap(best: Choice, second: Choice) -> str:
    """Say how far the second is above the best on the seeds they share, and on which where others are shown."""
    difference = paired(second, best)
    seeds = difference.by_seed.keys()
    where = ""
    if not seeds == best.losses.keys() == second.losses.keys():
        where = f" on {'seed' if len(seeds) == 1 else 'seeds'} {quantities.listed([str(seed) for seed in seeds])}"
    return f"{difference.estimate.mean:.4f} nats above{where}"


def _how_certain(findings: Findings, best: Choice, second: Choice) -> str:
    pairs = ((best.method, second.method), (second.method, best.method))
    tested = [comparison for pair in pairs if (comparison := findings.comparison(*pair)) and comparison.decision]
    if not tested:
        return "the order of the two is not tested here"
    return "the difference is not confirmed" if tested[0].conclusion == NOT_CONFIRMED else "the difference is confirmed"


def _who_was_unstable(findings: Findings) -> list[Statement]:
    statements = []
    for verdict in (DIVERGED, SPIKED):
        rates = {method: _rates_with(findings, method, verdict) for method in findings.sweep.methods}
        places = [f"{method.name} at {where}" for method, where in rates.items() if where]
        text = f"{'; '.join(places)}." if places else f"No finished run {verdict}."
        statements.append(Statement(topic=verdict.capitalize(), text=text))
    stable = [method.name for method in findings.sweep.methods if _stable_everywhere(findings, method)]
    if stable:
        statements.append(Statement(topic="Stable at every rate", text=f"{quantities.listed(stable)}."))
    return statements


def _what_is_confirmed(findings: Findings) -> Statement:
    confirmed = [c for c in findings.comparisons if c.conclusion in (CONFIRMED_LOWER, CONFIRMED_HIGHER)]
    tests = sum(comparison.testable for comparison in findings.comparisons)
    if not tests:
        return Statement(topic="Confirmed", text="Nothing: no two methods share two seeds at their chosen rates.")
    told = "; ".join(_told(comparison) for comparison in confirmed) or "no difference"
    return Statement(topic="Confirmed", text=f"{told} (95 %, Holm over {quantities.plural(tests, 'test')}).")


def _what_is_not_confirmed(findings: Findings) -> list[Statement]:
    reasons = {
        NOT_CONFIRMED: ("Not confirmed", "the intervals include zero"),
        ONE_SEED: ("Not tested", "a single seed"),
        SOME_DIVERGED: ("Not tested", "a seed diverged at the chosen rate"),
    }
    statements = []
    for conclusion, (topic, why) in reasons.items():
        told = [_told(comparison) for comparison in findings.comparisons if comparison.conclusion == conclusion]
        if told:
            statements.append(Statement(topic=topic, text=f"{'; '.join(told)} ({why})."))
    return statements


def _what_is_missing(findings: Findings) -> list[Statement]:
    sweep = findings.sweep
    absent, total = len(sweep.unfinished) + len(sweep.missing), len(sweep.runs) + len(sweep.missing)
    if not absent:
        return []
    return [
        Statement(
            topic="Unfinished", text=f"{absent} of {quantities.plural(total, 'run')}; they count for nothing here."
        )
    ]


def _told(comparison: Comparison) -> str:
    pair = f"{comparison.method.name} against {comparison.baseline.name}"
    if not comparison.difference.by_seed:
        return pair
    return f"{pair} {quantities.signed(comparison.difference.estimate.mean)} nats"


def _rates_with(findings: Findings, method: Method, verdict: str) -> str:
    parts = []
    for rate in findings.sweep.learning_rates:
        runs = [run for run in _complete(findings, method) if run.learning_rate == rate]
        count = sum(run.word == verdict for run in runs)
        if count:
            parts.append(quantities.rate(rate) + ("" if count == len(runs) else f" ({count} of {len(runs)} seeds)"))
    return quantities.listed(parts)


def _stable_everywhere(findings: Findings, method: Method) -> bool:
    runs = _complete(findings, method)
    planned = {run.learning_rate for run in findings.sweep.runs if run.method == method}
    return {run.learning_rate for run in runs} == planned and {run.word for run in runs} == {STABLE}


def _complete(findings: Findings, method: Method) -> list[RunResult]:
    return [run for run in findings.sweep.runs if run.method == method and run.complete]


def _train_perplexity_note(sweep: SweepResults) -> Statement:
    complete = [run for run in sweep.runs if run.complete] or list(sweep.runs)
    answers = {run.saw_data_at_most_once for run in complete}
    if answers == {True}:
        comparable = "This is the paper's number: no run saw any data twice."
    elif None in answers:
        comparable = "Whether this is the paper's number is not known: the record lacks the size of the data."
    else:
        passes = max(run.passes_over_data or 0.0 for run in complete)
        comparable = f"This is not the paper's number: runs saw the data up to {passes:.1f} times."
    definition = "exp of the mean training loss over the last 10 % of steps."
    return Statement(topic="Train PPL", text=f"{definition} {comparable}")


def _cautions(findings: Findings) -> list[Statement]:
    sweep = findings.sweep
    told = []
    flagged = [choice for choice in findings.choices.values() if choice.edge]
    if flagged:
        rates = [f"{choice.method.name} ({choice.edge}, {quantities.rate(choice.learning_rate)})" for choice in flagged]
        text = f"The best rate is at an edge of the rates tried, so a better one may lie outside: {', '.join(rates)}."
        told.append(Statement(topic="Edge of the grid", text=text))
    without = [method.name for method in lacks_control(sweep.methods)]
    if without:
        text = (
            f"No pre with QKV-norm and the same norm was run beside {quantities.listed(without)}, whose attention has "
            "it: a difference to pre may come from the attention alone."
        )
        told.append(Statement(topic="Control row missing", text=text))
    alone = [method.name for method in sweep.methods if baseline_of(method, sweep.methods) is None]
    if alone and any(method.topology == "pre" for method in sweep.methods):
        text = f"No pre with the same norm was run beside {quantities.listed(alone)}."
        told.append(Statement(topic="Reference row missing", text=text))
    budgets = _distinct((run.steps, run.batch_tokens) for run in sweep.runs)
    digests = _distinct((run.config.get("data") or {}).get("digest") for run in sweep.runs)
    for what, values in (("steps or batch", budgets), ("data", digests)):
        if len(values) > 1:
            text = f"The runs differ in {what}: their losses are not comparable."
            told.append(Statement(topic="Unequal budgets", text=text))
    return told


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _distinct(values: Iterable[Any]) -> Sequence[Any]:
    return list(dict.fromkeys(value for value in values if value is not None))
