"""The report of an experiment that chooses learning rates, and that of a single run: their sections and sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from siamesenorm.analysis.post_mortem import sentences
from siamesenorm.comparison import formatting
from siamesenorm.comparison.accuracy_tables import accuracy_tables, evaluations_table
from siamesenorm.comparison.comparison_tables import comparison_tables, comparisons_csv, runs_csv, training_metric
from siamesenorm.comparison.curve_figures import curve_figures, stream_figures
from siamesenorm.comparison.experiment_plan import ComparisonKind
from siamesenorm.comparison.findings import Choice, Comparison, Conclusion, Findings, find, paired
from siamesenorm.comparison.rate_figures import rate_figures
from siamesenorm.comparison.report_parts import Block, Code, Gallery, Report, Statement, Statements, statements
from siamesenorm.comparison.results import DIVERGED, NOT_LEARNED, SPIKED, STABLE, ExperimentResults, RunResult
from siamesenorm.topologies import available_topologies, build_topology
from siamesenorm.training.run_directory import RunDirectory

ARXIV = "https://arxiv.org/abs/"

VERDICTS = statements(
    {
        "● stable": "None of the following.",
        "▲ spiked": "After the warm-up the loss left its running median by more than six robust standard deviations, "
        "or was far above its lower quartile in more than 5 % of the steps. Numbers with * are of spiked runs.",
        "◇ not learned": "At the end the loss is not below that of a model that has learned nothing, and no longer "
        "falls. Numbers with ‡ are of such runs.",
        "✕ diverged": "A loss was not finite, or the smoothed loss stayed above its best so far by half a nat (half "
        "the task's scale) for 5 % of the run or to its end. diverge: every seed diverged. †: some seeds diverged; the "
        "number is the mean of the others.",
    }
)


def comparison_report(findings: Findings, *, title: str = "") -> Report:
    """Return the report of a comparison."""
    results = findings.results
    *tables, by_rate = comparison_tables(findings)
    training = {
        f"Training at learning rate {formatting.rate(rate)}": Gallery(curve_figures(findings, rate))
        for rate in results.learning_rates
    }
    return Report(
        title=title or _title(results),
        subject=subject(findings),
        sections={
            "What came out": Statements(conclusions(findings), tone="conclusions"),
            **{table.title: table for table in tables},
            "Where each method is stable": Gallery(rate_figures(findings)),
            by_rate.title: by_rate,
            **training,
            "How to read this": Statements(definitions(findings)),
            "The methods": Statements(method_notes(findings)),
            **closing_sections(results),
        },
        records={"results.csv": runs_csv(results), "comparisons.csv": comparisons_csv(findings.comparisons)},
    )


def run_report(results: ExperimentResults, *, title: str = "") -> Report:
    """Return the report of a single run: its verdict, its numbers, its curves."""
    (run,) = results.runs
    findings = find(results)
    curves = curve_figures(findings, run.learning_rate)
    tables = (*accuracy_tables(findings), evaluations_table(run))
    return Report(
        title=title or run.name,
        subject=(budget_sentence(run),),
        sections={
            "What came out": Statements(_run_statements(run), tone="conclusions"),
            "Training": Gallery((*curves[:1], *stream_figures(run), *curves[1:])),
            **{table.title: table for table in tables if table.groups},
            "The verdicts": Statements(VERDICTS),
            **closing_sections(results),
        },
        records={"results.csv": runs_csv(results)},
    )


def closing_sections(results: ExperimentResults) -> dict[str, Block]:
    """Return what ends every report: unfinished runs, the command and the environment, where there are any."""
    return {
        "Unfinished runs": Statements(_unfinished_runs(results)),
        "How to repeat it": Code(results.plan.command or ""),
        "Environment": Statements(_environment(results.runs)),
    }


def subject(findings: Findings) -> tuple[str, ...]:
    """Return sentences on what was compared, on what data, and with what budget."""
    results = findings.results
    rates = formatting.listed([formatting.rate(rate) for rate in results.learning_rates])
    seeds = max(len({run.seed for run in results.plan.runs.values() if run.method == m}) for m in results.methods)
    compared = (
        f"{formatting.plural(len(results.methods), 'method')} ({formatting.listed(results.methods)}) at "
        f"{formatting.plural(len(results.learning_rates), 'learning rate')} ({rates}) "
        f"with {'up to ' if seeds > 1 else ''}{formatting.plural(seeds, 'seed')}."
    )
    return (compared, data_sentence(results), budget_sentence(results.runs[0]))


def data_sentence(results: ExperimentResults) -> str:
    """Return a sentence on the data."""
    data, run = results.plan.data, results.runs[0]
    available = run.facts.get("train_items")
    size = f"{formatting.count(available)} training {run.item}s" if available else ""
    described = ", ".join(filter(None, (data.get("name") or "the prepared data", data.get("details"), size)))
    return f"Data: {described}; runs with the same seed read them in the same order."


def budget_sentence(run: RunResult) -> str:
    """Return a sentence on the model and the steps of a run."""
    model = run.config["task"]["model"]
    words = {"depth": "{} blocks", "dim": "width {}", "heads": "{} heads"}
    shape = [text.format(model[key]) for key, text in words.items() if key in model]
    size = f"{formatting.count(run.parameters)} parameters" if run.parameters else ""
    total = f" ({formatting.count(run.items)} {run.item}s in all)" if run.items and run.item != "sample" else ""
    described = ", ".join(filter(None, (*shape, size)))
    return f"Model: {described}, trained for {run.steps:,} steps of {run.config['batch']:,} samples{total}."


def conclusions(findings: Findings) -> tuple[Statement, ...]:
    """Return what is lowest, what was unstable, what is confirmed and what is not."""
    results = findings.results
    statements = [*_lowest(findings), *_unstable(findings), *_confirmed(findings)]
    if absent := len(results.unfinished) + len(results.missing):
        total = formatting.plural(len(results.plan.runs), "run")
        statements.append(Statement("Unfinished", f"{absent} of {total}; not counted here."))
    return tuple(statements)


def definitions(findings: Findings) -> tuple[Statement, ...]:
    """Return the definitions that a reader of the tables needs, and every caution that applies to these runs."""
    results = findings.results
    run = results.runs[0]
    seeds = formatting.listed([str(seed) for seed in results.plan.selection_seeds])
    floor = f": {run.floor:.3f} {run.unit} here" if run.floor is not None else ", which is not known here"
    sensitivity = (
        f"The mean over all rates of the held-out loss above its best, on seed {seeds}. A diverged run counts as a "
        "model that has learned nothing; — where every rate diverged or a single one was tried."
    )
    texts = {
        "Loss": f"In {run.unit}. The loss of a model that has learned nothing (it predicts the frequencies of the data "
        f"and ignores the input) is the dotted line in the figures{floor}.",
        f"Train {training_metric(results).label}": "Of the mean training loss over the last 10 % of steps. "
        + _passes_over_data(results),
        **noise_definition(findings),
        "Held-out": "At the last validation, on data that no run trains on. ± is the half width of the 95 % t interval "
        "over seeds; a value without one is from a single seed.",
        "Seeds": "Results by learning rate, and the figures of them, are over the seeds that every method has finished "
        "at that rate; the table of chosen rates has all. Bold is the best on equal seeds.",
        "Choice of the rate": "The learning rate of a method is the one with the lowest held-out loss on seed "
        f"{seeds} among runs that did not diverge. Its result is reported on the other seeds, where there are any.",
        "Confirmed": "Differences are paired by seed, each method at its own rate. The 95 % t interval is of one "
        "difference alone, as is p, the two-sided p-value of the paired t test. The Holm interval and the Holm p are "
        "corrected for the number of tests of the table; a difference is confirmed where the Holm interval excludes "
        "zero, which is where the Holm p is below 0.05.",
        "Steps to its loss": "The first step at which the mean training loss over the tenth of the steps before it was "
        "as low as that of the baseline over its last tenth, on the same seed and so the same data; the median over "
        "the seeds, in which a run that never got there counts as infinite.",
    }
    step_time = (
        "The median over the faster half of the steps, which compilation and other processes disturb least."
        if results.plan.jobs == 1
        else "Left out: runs shared a device and slowed each other. --jobs 1 measures each alone."
    )
    return (
        *VERDICTS,
        *statements(texts),
        Statement("Rate sensitivity", sensitivity, ("Wortsman et al.", f"{ARXIV}2309.14322")),
        Statement("Step time", step_time),
        *statements(_cautions(findings)),
    )


def noise_definition(findings: Findings) -> dict[str, str]:
    """Return what the noise band is, where there is one."""
    if (noise := findings.noise) is None:
        return {}
    count = len(findings.choices[noise.baseline].losses)
    return {
        "Noise band": f"{noise.low:.4f} to {noise.high:.4f}: where one more seed of {noise.baseline} at its chosen "
        f"rate falls with 95 % probability, the mean ± t s √(1 + 1/n) over its {count} seeds (a prediction interval of "
        "normal losses). It says how far two runs are apart that differ in nothing but the seed; paired differences "
        "are more exact, because the seeds of both see the same data."
    }


def method_notes(findings: Findings) -> tuple[Statement, ...]:
    """Return for every method what its name means, with a link to the paper of its topology."""
    results, notes = findings.results, []
    _, controls = _controlled(results)
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
        number = re.search(r"\b\d{4}\.\d{5}\b", topology.paper)
        link = (f"arXiv {number.group()}", ARXIV + number.group()) if number else None
        notes.append(Statement(method, f"{'; '.join(parts)}. `siamesenorm explain {name}` prints its formula.", link))
    return tuple(notes)


def _title(results: ExperimentResults) -> str:
    """Return the title of a comparison: its methods, and its data."""
    names = results.methods
    shown = [*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names
    data = results.plan.data.get("name")
    return f"{formatting.listed(shown)}{f' on {data}' if data else ''}"


def _lowest(findings: Findings) -> list[Statement]:
    topic, ranked, unit = "Lowest held-out loss", findings.ranked(), findings.results.unit
    if not ranked:
        return [Statement(topic, "No method has a result yet.")]
    best = ranked[0]
    loss = best.held_out_loss
    if loss is None:
        return []
    details = [
        f"{metric.label} {formatting.formatted(value.mean, metric.format)}"
        for metric in findings.results.metrics[1:]
        if (value := best.metric(metric.name))
    ]
    seeds = formatting.plural(loss.count, "seed")
    details.append("one seed, which also chose the rate" if best.on_selection_seed else seeds)
    text = f"{best.method} at {formatting.rate(best.learning_rate)}, {loss.mean:.4f} {unit} ({', '.join(details)})."
    if len(ranked) > 1:
        text += f" Next is {ranked[1].method}, {_gap(best, ranked[1], unit)}; {_certainty(findings, best, ranked[1])}."
    return [Statement(topic, text)]


def _gap(best: Choice, second: Choice, unit: str) -> str:
    """Return how far the second is above the best on the seeds they share, and on which where others are shown."""
    difference = paired(second, best)
    seeds = difference.by_seed.keys()
    shown = f" on seed{'' if len(seeds) == 1 else 's'} {formatting.listed(list(map(str, seeds)))}"
    where = "" if seeds == best.losses.keys() == second.losses.keys() else shown
    return f"{difference.interval().mean:.4f} {unit} above{where}"


def _certainty(findings: Findings, best: Choice, second: Choice) -> str:
    pair = {best.method, second.method}
    tested = [each for each in findings.comparisons if {each.method, each.baseline} == pair and each.decision]
    if not tested:
        return "the order of the two is not tested here"
    return f"the difference is {'' if tested[0].confirmed else 'not '}confirmed"


def _unstable(findings: Findings) -> list[Statement]:
    results, statements = findings.results, []
    for verdict in (DIVERGED, NOT_LEARNED, SPIKED):
        rates = {method: _rates_with(results, method, verdict) for method in results.methods}
        places = [f"{method} at {where}" for method, where in rates.items() if where]
        statements.append(Statement(verdict.capitalize(), f"{'; '.join(places)}." if places else "No finished run."))
    if stable := [method for method in results.methods if _stable_everywhere(results, method)]:
        statements.append(Statement("Stable at every rate", f"{formatting.listed(stable)}."))
    return statements


def _confirmed(findings: Findings) -> list[Statement]:
    """Return what is confirmed, and what is not and why."""
    pairs = [(each, _pair(each, findings.results.unit)) for each in findings.comparisons]
    tests = sum(each.decision is not None for each in findings.comparisons)
    confirmed = [pair for each, pair in pairs if each.confirmed]
    found = f"{'; '.join(confirmed) or 'no difference'} (95 %, Holm over {formatting.plural(tests, 'test')})."
    statements = [
        Statement("Confirmed", found if tests else "Nothing: no two methods share two seeds at their chosen rates.")
    ]
    for conclusion, topic, why in (
        (Conclusion.NOT_CONFIRMED, "Not confirmed", "the Holm intervals include zero"),
        (Conclusion.ONE_SEED, "Not tested", "a single seed"),
        (Conclusion.SOME_DIVERGED, "Not tested", "a seed diverged at the chosen rate"),
    ):
        if group := [pair for each, pair in pairs if each.conclusion is conclusion]:
            statements.append(Statement(topic, f"{'; '.join(group)} ({why})."))
    return statements


def _pair(comparison: Comparison, unit: str) -> str:
    pair = f"{comparison.method} against {comparison.baseline}"
    return pair if comparison.interval is None else f"{pair} {formatting.signed(comparison.interval.mean)} {unit}"


def _rates_with(results: ExperimentResults, method: str, verdict: str) -> str:
    parts = []
    for rate in results.learning_rates:
        words = [run.word for run in results.runs_of(method) if run.complete and run.learning_rate == rate]
        if count := words.count(verdict):
            parts.append(formatting.rate(rate) + ("" if count == len(words) else f" ({count} of {len(words)} seeds)"))
    return formatting.listed(parts)


def _stable_everywhere(results: ExperimentResults, method: str) -> bool:
    """Return whether every run that the plan has of a method ended stable, at all rates of the experiment."""
    planned = [run for run in results.plan.runs.values() if run.method == method]
    stable = [run.learning_rate for run in results.runs_of(method) if run.complete and run.word == STABLE]
    return len(stable) == len(planned) and set(stable) == set(results.learning_rates)


def _passes_over_data(results: ExperimentResults) -> str:
    known = [passes for run in results.runs if (passes := run.passes_over_data) is not None]
    if len(known) < len(results.runs):
        return "How often the runs saw the data is not recorded."
    if max(known) <= 1.0:
        return "No run saw any data twice, as in the papers."
    return f"Runs saw the data up to {max(known):.1f} times, unlike the papers'."


def _controlled(results: ExperimentResults) -> tuple[set[str], set[str]]:
    """Return the methods that the plan compares with Pre-Norm that has their QKV-norm, and those baselines."""
    comparisons = [each for each in results.plan.comparisons if each.kind is ComparisonKind.CONTROL]
    return {each.method for each in comparisons}, {each.baseline for each in comparisons}


def _cautions(findings: Findings) -> dict[str, str]:
    results, choices = findings.results, findings.choices.values()
    cautions = {}
    edges = [f"{each.method} ({each.edge}, {formatting.rate(each.learning_rate)})" for each in choices if each.edge]
    if edges:
        cautions["Edge of the grid"] = (
            f"The best rate is at an edge of the rates tried, so a better one may be outside: {', '.join(edges)}."
        )
    methods = dict.fromkeys(run.method for run in results.runs if run.normalises_values)
    compared = {each.method for each in results.plan.comparisons if each.kind is ComparisonKind.TOPOLOGY}
    if without := [method for method in methods if method in compared.difference(*_controlled(results))]:
        cautions["Control row missing"] = (
            f"No pre with QKV-norm and the same operator was run beside {formatting.listed(without)}, whose attention "
            "has it: a difference to pre may come from the attention alone."
        )
    named = {name for each in results.plan.comparisons for name in (each.method, each.baseline)}
    alone = [method for method in results.methods if method not in named]
    if alone and len(results.methods) > 1:
        cautions["Without baseline"] = f"The plan compares {formatting.listed(alone)} with no other method."
    return cautions


def _run_statements(run: RunResult) -> tuple[Statement, ...]:
    if run.verdict:
        texts = {"Verdict": f"{run.verdict.sentence()}."}
    else:
        texts = {"Unfinished": f"{run.steps_done:,} of {run.steps:,} steps."}
    at = f", at step {run.held_out_step:,}" if run.held_out_step is not None else ""
    for metric in run.metrics:
        if (value := run.held_out.get(metric.name)) is not None:
            texts[f"Held-out {metric.label}"] = f"{formatting.formatted(value, metric.format)}{at}."
    if finding := RunDirectory(run.path).read_post_mortem():
        texts |= {topic: f"{text} (post-mortem.json)." for topic, text in sentences(finding).items()}
    if run.step_seconds is not None:
        step_time = formatting.seconds(run.step_seconds)
        texts["Step time"] = f"{step_time}, the median over the faster half of the steps."
    return statements(texts)


def _unfinished_runs(results: ExperimentResults) -> tuple[Statement, ...]:
    """Return the runs that have no result, and how many steps of each are done."""
    started = {run.path.name: f"{run.name}: {run.steps_done:,} of {run.steps:,} steps" for run in results.unfinished}
    return statements({name: f"{state}." for name, state in {**started, **results.missing}.items()})


def _environment(runs: Sequence[RunResult]) -> tuple[Statement, ...]:
    """Return every distinct value of what the runs recorded of their environments, earlier ones included."""
    entries: dict[str, dict[str, None]] = {}
    for environment in (each for run in runs for each in reversed(run.environments)):
        for key, value in environment.items():
            if value not in (None, [], {}):
                entries.setdefault(key, {})[_plain(value)] = None
    return statements({key: "; ".join(values) for key, values in entries.items()})


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
