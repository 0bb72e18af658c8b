"""The sentences of a comparison's report: what was compared, what came out, and what limits it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from siamesenorm.comparison import quantities
from siamesenorm.comparison.findings import Choice, Comparison, Conclusion, Findings, paired
from siamesenorm.comparison.plan import ComparisonKind
from siamesenorm.comparison.results import (
    DIVERGED,
    NOT_LEARNED,
    SPIKED,
    STABLE,
    ExperimentResults,
    RunResult,
)
from siamesenorm.comparison.sections import Statement
from siamesenorm.topologies import available_topologies, build_topology

ARXIV = "https://arxiv.org/abs/"

VERDICTS = (
    Statement(topic="● stable", text="None of the following."),
    Statement(
        topic="▲ spiked",
        text="After the warm-up the loss left its running median by more than six robust standard deviations, or was "
        "far above its lower quartile in more than 5 % of the steps. Numbers with * are of spiked runs.",
    ),
    Statement(
        topic="◇ not learned",
        text="At the end the loss is not below that of a model that has learned nothing, and no longer falls. Numbers "
        "with ‡ are of such runs.",
    ),
    Statement(
        topic="✕ diverged",
        text="A loss was not finite, or the smoothed loss stayed above its best so far by half a nat (half the task's "
        "scale) for 5 % of the run or to its end. diverge: every seed did. †: some did, the number is of the others.",
    ),
)


def title_of(findings: Findings) -> str:
    """Return the title of a comparison: its methods, and its data."""
    names = list(findings.results.methods)
    shown = [*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names
    data = findings.results.plan.data.get("name")
    return f"{quantities.listed(shown)}{f' on {data}' if data else ''}"


def subject(findings: Findings) -> tuple[str, ...]:
    """Return sentences on what was compared, on what data, and with what budget."""
    results = findings.results
    rates = quantities.listed([quantities.rate(rate) for rate in results.learning_rates])
    seeds = max(len({run.seed for run in results.plan.runs.values() if run.method == m}) for m in results.methods)
    compared = (
        f"{quantities.plural(len(results.methods), 'method')} ({quantities.listed(list(results.methods))}) at "
        f"{quantities.plural(len(results.learning_rates), 'learning rate')} ({rates}) "
        f"with {'up to ' if seeds > 1 else ''}{quantities.plural(seeds, 'seed')}."
    )
    return (compared, data_sentence(results), budget_sentence(results.runs[0]))


def conclusions(findings: Findings) -> tuple[Statement, ...]:
    """Return what is lowest, what was unstable, what is confirmed and what is not."""
    return (
        *_lowest(findings),
        *_unstable(findings),
        _confirmed(findings),
        *_not_confirmed(findings),
        *_unfinished_count(findings.results),
    )


def definitions(findings: Findings) -> tuple[Statement, ...]:
    """Return the definitions that a reader of the tables needs, and every caution that applies to these runs."""
    results = findings.results
    run = results.runs[0]
    seeds = quantities.listed([str(seed) for seed in results.plan.selection_seeds])
    floor = f": {run.floor:.3f} {run.unit} here" if run.floor is not None else ", which is not known here"
    return (
        *VERDICTS,
        Statement(
            topic="Loss",
            text=f"In {run.unit}. The loss of a model that has learned nothing (it predicts the frequencies of the "
            f"data and ignores the input) is the dotted line in the figures{floor}.",
        ),
        *_train_metric(results),
        Statement(
            topic="Held-out",
            text="At the last validation, on data that no run trains on. ± is the half width of the 95 % t interval "
            "over seeds; a value without one is from a single seed.",
        ),
        Statement(
            topic="Seeds",
            text="Results by learning rate, and the figures of them, are over the seeds that every method has finished "
            "at that rate; the table of chosen rates has all. Bold is the best on equal seeds.",
        ),
        Statement(
            topic="Choice of the rate",
            text=f"The learning rate of a method is the one with the lowest held-out loss on seed {seeds} among runs "
            "that did not diverge. Its result is reported on the other seeds, where there are any.",
        ),
        Statement(
            topic="Confirmed",
            text="Differences are paired by seed, each method at its own rate. The 95 % t interval is of one "
            "difference alone. The Holm interval is widened because the table has several tests; a difference is "
            "confirmed where it excludes zero.",
        ),
        Statement(
            topic="Rate sensitivity",
            text=f"The mean over all rates of the held-out loss above its best, on seed {seeds}. A diverged run counts "
            "as a model that has learned nothing; — where no rate survived or a single one was tried.",
            link=("Wortsman et al.", f"{ARXIV}2309.14322"),
        ),
        *_step_time(results),
        *_cautions(findings),
    )


def method_notes(findings: Findings) -> tuple[Statement, ...]:
    """Return for every method what its name means, with a link to the paper of its topology."""
    results, notes = findings.results, []
    controls = {each.baseline for each in results.plan.comparisons if each.kind is ComparisonKind.CONTROL}
    for method in results.methods:
        name, *others = (part.strip() for part in method.split("+"))
        if name.partition(":")[0] not in available_topologies():
            continue
        topology = build_topology(name)
        parts = [topology.heading, *(f"with {other}" for other in others if other != "qkv")]
        if any(run.normalises_values for run in results.runs_of(method)):
            parts.append("QKV-norm: queries, keys and values of the attention are normalised per head")
        if method in controls:
            parts.append("the control: what methods with QKV-norm gain over it is not due to their attention")
        number = _arxiv(topology.paper)
        link = (f"arXiv {number}", ARXIV + number) if number else None
        text = f"{'; '.join(parts)}. `siamesenorm explain {name}` prints its formula."
        notes.append(Statement(topic=method, text=text, link=link))
    return tuple(notes)


def unfinished(results: ExperimentResults) -> tuple[Statement, ...]:
    """Return the runs that have no result, and how many steps of each are done."""
    started = [
        Statement(
            topic=run.path.name,
            text=f"{run.planned.name}: {run.steps_done:,} of {run.steps:,} steps.",
        )
        for run in results.unfinished
    ]
    return (*started, *(Statement(topic=run.path.name, text=f"{run.reason}.") for run in results.missing))


def environment(runs: Sequence[RunResult]) -> tuple[Statement, ...]:
    """Return every distinct value of what the runs recorded of their environments, earlier ones included."""
    entries: dict[str, dict[str, None]] = {}
    for run in runs:
        for environment in reversed(run.environments):
            for key, value in environment.items():
                if value not in (None, [], {}):
                    entries.setdefault(key, {})[_plain(value)] = None
    return tuple(Statement(topic=key, text="; ".join(values)) for key, values in entries.items())


def data_sentence(results: ExperimentResults) -> str:
    """Return a sentence on the data."""
    data, run = results.plan.data, results.runs[0]
    available = run.facts.get("train_items")
    size = f"{quantities.count(available)} training {run.item}s" if available else ""
    described = ", ".join(filter(None, (data.get("name") or "the prepared data", data.get("details"), size)))
    return f"Data: {described}; runs with the same seed read them in the same order."


def budget_sentence(run: RunResult) -> str:
    """Return a sentence on the model and the steps of a run."""
    model = run.config["task"]["model"]
    words = (("depth", "{} blocks"), ("dim", "width {}"), ("heads", "{} heads"))
    shape = [text.format(model[key]) for key, text in words if key in model]
    size = f"{quantities.count(run.parameters)} parameters" if run.parameters else ""
    total = f" ({quantities.count(run.items)} {run.item}s in all)" if run.items and run.item != "sample" else ""
    described = ", ".join(filter(None, (*shape, size)))
    return f"Model: {described}, trained for {run.steps:,} steps of {run.config['batch']:,} samples{total}."


def _lowest(findings: Findings) -> list[Statement]:
    ranked, unit = findings.ranked(), findings.results.unit
    if not ranked:
        return [Statement(topic="Lowest held-out loss", text="No method has a result yet.")]
    best = ranked[0]
    loss = best.outcome.held_out_loss
    if loss is None:
        return []
    metrics = [
        f"{metric.label} {quantities.formatted(value.mean, metric.format)}"
        for metric in findings.results.metrics[1:]
        if (value := best.outcome.metric(metric.name))
    ]
    basis = "one seed, which also chose the rate" if best.on_selection_seed else quantities.plural(loss.count, "seed")
    where = f"{best.method} at {quantities.rate(best.learning_rate)}"
    text = f"{where}, {loss.mean:.4f} {unit} ({', '.join([*metrics, basis])})."
    if len(ranked) > 1:
        text += f" Next is {ranked[1].method}, {_gap(best, ranked[1], unit)}; {_certainty(findings, best, ranked[1])}."
    return [Statement(topic="Lowest held-out loss", text=text)]


def _gap(best: Choice, second: Choice, unit: str) -> str:
    """Return how far the second is above the best on the seeds they share, and on which where others are shown."""
    difference = paired(second, best)
    seeds = difference.by_seed.keys()
    where = ""
    if not seeds == best.losses.keys() == second.losses.keys():
        where = f" on {'seed' if len(seeds) == 1 else 'seeds'} {quantities.listed([str(seed) for seed in seeds])}"
    return f"{difference.estimate.mean:.4f} {unit} above{where}"


def _certainty(findings: Findings, best: Choice, second: Choice) -> str:
    pairs = ((best.method, second.method), (second.method, best.method))
    tested = [comparison for pair in pairs if (comparison := findings.comparison(*pair)) and comparison.decision]
    if not tested:
        return "the order of the two is not tested here"
    confirmed = tested[0].conclusion is not Conclusion.NOT_CONFIRMED
    return "the difference is confirmed" if confirmed else "the difference is not confirmed"


def _unstable(findings: Findings) -> list[Statement]:
    statements = []
    for verdict in (DIVERGED, NOT_LEARNED, SPIKED):
        rates = {method: _rates_with(findings, method, verdict) for method in findings.results.methods}
        places = [f"{method} at {where}" for method, where in rates.items() if where]
        text = f"{'; '.join(places)}." if places else "No finished run."
        statements.append(Statement(topic=verdict.capitalize(), text=text))
    stable = [method for method in findings.results.methods if _stable_everywhere(findings.results, method)]
    if stable:
        statements.append(Statement(topic="Stable at every rate", text=f"{quantities.listed(stable)}."))
    return statements


def _confirmed(findings: Findings) -> Statement:
    unit = findings.results.unit
    kinds = (Conclusion.CONFIRMED_LOWER, Conclusion.CONFIRMED_HIGHER)
    confirmed = [_pair(each, unit) for each in findings.comparisons if each.conclusion in kinds]
    tests = sum(comparison.testable for comparison in findings.comparisons)
    if not tests:
        return Statement(topic="Confirmed", text="Nothing: no two methods share two seeds at their chosen rates.")
    found = "; ".join(confirmed) or "no difference"
    return Statement(topic="Confirmed", text=f"{found} (95 %, Holm over {quantities.plural(tests, 'test')}).")


def _not_confirmed(findings: Findings) -> list[Statement]:
    reasons = {
        Conclusion.NOT_CONFIRMED: ("Not confirmed", "the Holm intervals include zero"),
        Conclusion.ONE_SEED: ("Not tested", "a single seed"),
        Conclusion.SOME_DIVERGED: ("Not tested", "a seed diverged at the chosen rate"),
    }
    statements = []
    for conclusion, (topic, why) in reasons.items():
        pairs = [_pair(each, findings.results.unit) for each in findings.comparisons if each.conclusion is conclusion]
        if pairs:
            statements.append(Statement(topic=topic, text=f"{'; '.join(pairs)} ({why})."))
    return statements


def _unfinished_count(results: ExperimentResults) -> list[Statement]:
    absent, total = len(results.unfinished) + len(results.missing), len(results.plan.runs)
    if not absent:
        return []
    return [Statement(topic="Unfinished", text=f"{absent} of {quantities.plural(total, 'run')}; not counted here.")]


def _pair(comparison: Comparison, unit: str) -> str:
    pair = f"{comparison.method} against {comparison.baseline}"
    if comparison.interval is None:
        return pair
    return f"{pair} {quantities.signed(comparison.interval.mean)} {unit}"


def _rates_with(findings: Findings, method: str, verdict: str) -> str:
    parts = []
    for rate in findings.results.learning_rates:
        runs = [run for run in findings.results.runs_of(method) if run.complete and run.learning_rate == rate]
        count = sum(run.word == verdict for run in runs)
        if count:
            parts.append(quantities.rate(rate) + ("" if count == len(runs) else f" ({count} of {len(runs)} seeds)"))
    return quantities.listed(parts)


def _stable_everywhere(results: ExperimentResults, method: str) -> bool:
    """Return whether every run that the plan has of a method ended stable, at all rates of the experiment."""
    planned = [run for run in results.plan.runs.values() if run.method == method]
    stable = [run for run in results.runs_of(method) if run.complete and run.word == STABLE]
    return len(stable) == len(planned) and {run.learning_rate for run in stable} == set(results.learning_rates)


def _train_metric(results: ExperimentResults) -> list[Statement]:
    metric = next(each for each in reversed(results.metrics) if each.of_loss)
    passes = [run.passes_over_data for run in results.runs]
    known = [value for value in passes if value is not None]
    if len(known) < len(passes):
        seen = "How often the runs saw the data is not recorded."
    elif max(known) <= 1.0:
        seen = "No run saw any data twice, as in the papers."
    else:
        seen = f"Runs saw the data up to {max(known):.1f} times, unlike the papers'."
    text = f"Of the mean training loss over the last 10 % of steps. {seen}"
    return [Statement(topic=f"Train {metric.label}", text=text)]


def _step_time(results: ExperimentResults) -> list[Statement]:
    if results.measured_alone:
        text = "The median over the faster half of the steps, which compilation and other processes disturb least."
    else:
        text = "Left out: runs shared a device and slowed each other. --jobs 1 measures each alone."
    return [Statement(topic="Step time", text=text)]


def _cautions(findings: Findings) -> list[Statement]:
    results = findings.results
    cautions = []
    flagged = [choice for choice in findings.choices.values() if choice.edge]
    if flagged:
        rates = [f"{choice.method} ({choice.edge}, {quantities.rate(choice.learning_rate)})" for choice in flagged]
        text = f"The best rate is at an edge of the rates tried, so a better one may be outside: {', '.join(rates)}."
        cautions.append(Statement(topic="Edge of the grid", text=text))
    methods = [run.method for run in results.runs if run.normalises_values]
    controlled = {each.method for each in results.plan.comparisons if each.kind is ComparisonKind.CONTROL}
    controls = {each.baseline for each in results.plan.comparisons if each.kind is ComparisonKind.CONTROL}
    compared = {each.method for each in results.plan.comparisons if each.kind is ComparisonKind.TOPOLOGY}
    without = [method for method in dict.fromkeys(methods) if method in compared - controlled - controls]
    if without:
        text = (
            f"No pre with QKV-norm and the same operator was run beside {quantities.listed(without)}, whose attention "
            "has it: a difference to pre may come from the attention alone."
        )
        cautions.append(Statement(topic="Control row missing", text=text))
    named = {name for each in results.plan.comparisons for name in (each.method, each.baseline)}
    alone = [method for method in results.methods if method not in named]
    if alone and len(results.methods) > 1:
        text = f"The plan compares {quantities.listed(alone)} with no other method."
        cautions.append(Statement(topic="Without baseline", text=text))
    return cautions


def _arxiv(paper: str) -> str | None:
    """Return the number of a paper on arXiv in a reference."""
    found = re.search(r"\b\d{4}\.\d{5}\b", paper)
    return found and found.group()


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
