"""The verdict against its definition: by hand on constructed curves, and by a slow reference on every prefix."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, encode_json
from siamesenorm.training.curves import LossCurve
from siamesenorm.training.stability import StabilityMonitor, judge, judge_curve, learning_rate_sensitivity
from siamesenorm.training.verdict import DEFAULT_THRESHOLDS, Thresholds, Verdict

ENTROPY = 3.0


def healthy(steps=400, *, noise=0.045, seed=0, warmup=40):
    """A loss that falls from ln 256 to 2.3 with the noise of small batches."""
    step = np.arange(1, steps + 1)
    curve = 2.3 + 3.2 * np.exp(-np.maximum(step - warmup / 2, 0) / (steps / 8))
    return (curve + noise * np.random.default_rng(seed).standard_normal(steps)).tolist()


def raised(losses, first, last, height):
    """The same losses with `height` more on the steps first..last, counted from 1."""
    return [loss + height if first <= step <= last else loss for step, loss in enumerate(losses, start=1)]


@dataclasses.dataclass
class Reference:
    """The definition, computed from scratch with whole-array medians; `at(seen)` is the verdict on a prefix."""

    losses: list[float]
    norms: list[float]
    total: int
    warmup: int
    entropy: float

    def __post_init__(self):
        window = min(max(11, round(0.05 * self.total)), 501, max(1, self.total // 4))
        window -= 1 - window % 2
        finite = [t for t, loss in enumerate(self.losses) if math.isfinite(loss)]
        self.smooth = {t: float(np.median([self.losses[u] for u in finite if u <= t][-window:])) for t in finite}
        whole = finite[window - 1 :]
        self.best = {t: min((self.smooth[u] for u in whole if u <= t), default=math.inf) for t in finite}
        self.up = [t not in finite or self.smooth[t] > self.best[t] + 0.5 for t in range(len(self.losses))]
        self.out = reference_out(self.losses, self.warmup, lambda median: math.log((median + 0.1) / median))
        self.gradient_out = reference_out(self.norms, self.warmup, lambda median: math.log(1.1))

    def at(self, seen):
        """Return (word, reason, divergence step), (spikes, number of gradient spikes), best, final."""
        spikes = reference_starts(self.out[:seen], 2)
        evidence = (spikes, len(reference_starts(self.gradient_out[:seen], 1)))
        best = min((self.best[t] for t in self.best if t < seen and self.best[t] < math.inf), default=None)
        final = self.smooth.get(seen - 1, self.losses[seen - 1])
        return self.word(seen, spikes, final), evidence, best, final

    def word(self, seen, spikes, final):
        up = self.up[:seen]
        persistence = math.ceil(0.05 * self.total)
        stays = [t for t in range(seen - persistence + 1) if all(up[t : t + persistence])]
        broken = [t for t in range(seen) if t not in self.smooth]
        if broken:
            return "diverged", "not finite", broken[0] + 1
        if stays:
            return "diverged", "rose and stayed", stays[0] + 1
        if seen >= self.total and up[-1]:
            return "diverged", "rose at the end", max(t for t in range(seen) if not up[t]) + 2
        if seen >= self.total and final >= self.entropy - 0.2:
            return "diverged", "not learned", None
        return ("spiked" if spikes else "stable"), None, None


def reference_out(values, warmup, floor):
    logs, residuals, out = [], [], []
    for step, value in enumerate(values, start=1):
        if not math.isfinite(value):
            out.append(step > warmup)
            continue
        is_out = False
        if logs:
            median = np.median(logs[-51:])
            residual = math.log(value) - median
            past = np.array(residuals[-51:])
            if len(past) >= 16:
                sigma = 1.4826 * np.median(np.abs(past - np.median(past)))
                is_out = residual > 6 * sigma and residual > floor(math.exp(median))
            residuals.append(residual)
        logs.append(math.log(value))
        out.append(bool(is_out) and step > warmup)
    return out


def reference_starts(out, shortest):
    starts = [t for t in range(len(out)) if out[t] and not (t and out[t - 1])]
    return tuple(t + 1 for t in starts if t + shortest <= len(out) and all(out[t : t + shortest]))


def histories():
    base = healthy(160, warmup=16)
    noisy = healthy(160, noise=0.4, seed=3, warmup=16)
    flat = [max(loss, 2.98) for loss in base]
    with_nan = [math.nan if 100 <= step < 130 or step == 60 else loss for step, loss in enumerate(base, start=1)]
    return {
        "healthy": base,
        "noisy": noisy,
        "spikes": raised(raised(raised(base, 50, 50, 3.0), 70, 71, 1.0), 120, 124, 0.8),
        "rises and stays": raised(base, 90, 160, 0.8),
        "rises and comes back": raised(base, 60, 110, 0.9),
        "rises at the end": raised(base, 150, 160, 0.9),
        "not learned": flat,
        "not a number": with_nan,
        "infinite at once": [math.inf] * 160,
        "one value": [2.5] * 160,
    }


@pytest.mark.parametrize("name", histories())
def test_the_watch_agrees_with_the_definition_after_every_step(name):
    losses = histories()[name]
    norms = (0.5 * np.exp(0.3 * np.random.default_rng(7).standard_normal(len(losses)))).tolist()
    norms[79] = 30.0
    norms[99] = math.inf
    definition = Reference(losses, norms, 160, 16, ENTROPY)
    watch = StabilityMonitor(steps_total=160, warmup_steps=16, unigram_entropy=ENTROPY)
    for seen, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        watch.observe(loss, norm)
        word, evidence, best, final = definition.at(seen)
        verdict = watch.verdict()
        assert (verdict.word, verdict.reason, verdict.divergence_step) == word, seen
        assert (verdict.spikes, verdict.gradient_spikes) == evidence, seen
        assert (verdict.best is None) == (best is None)
        assert best is None or verdict.best == pytest.approx(best, abs=1e-12)
        assert verdict.final == pytest.approx(final, abs=1e-12, nan_ok=True)
    batch = judge(losses, steps_total=160, warmup_steps=16, gradient_norms=norms, unigram_entropy=ENTROPY)
    assert encode_json(batch.to_json()) == encode_json(watch.verdict().to_json())


def test_the_histories_cover_every_word_and_reason():
    verdicts = [judge(losses, warmup_steps=16, unigram_entropy=ENTROPY) for losses in histories().values()]
    assert {verdict.word for verdict in verdicts} == {"stable", "spiked", "diverged"}
    assert {verdict.reason for verdict in verdicts} == {
        None,
        "not finite",
        "rose and stayed",
        "rose at the end",
        "not learned",
    }


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.3])
def test_healthy_curves_are_stable_whatever_their_noise(seed, noise):
    assert judge(healthy(noise=noise, seed=seed), warmup_steps=40, unigram_entropy=ENTROPY).word == "stable"


@pytest.mark.parametrize("steps", [40, 100, 2000, 8000])
def test_healthy_curves_of_every_length_are_stable(steps):
    warmup = steps // 10
    assert judge(healthy(steps, warmup=warmup), warmup_steps=warmup, unigram_entropy=ENTROPY).word == "stable"


def test_the_steep_fall_without_warmup_is_no_spike():
    losses = [2.0 + 8.0 * math.exp(-step / 15) + 0.02 * (-1) ** step for step in range(300)]
    assert judge(losses, unigram_entropy=ENTROPY).word == "stable"


@pytest.mark.parametrize("height", [0.0, 3.0, 20.0])
@pytest.mark.parametrize(
    ("steps", "places"), [(60, range(1, 61)), (100, range(1, 101)), (400, [1, 2, 3, 10, 19, 20, 200, 399, 400])]
)
def test_one_loss_of_any_height_never_decides(steps, places, height):
    for place in places:
        losses = healthy(steps, warmup=steps // 10)
        losses[place - 1] = height
        assert judge(losses, warmup_steps=steps // 10, unigram_entropy=ENTROPY).word == "stable", place


def test_the_best_is_that_of_whole_windows():
    losses = [6.0 - 0.1 * step for step in range(40)]
    early = judge(losses[:18], steps_total=400)
    assert (early.best, early.best_step) == (None, None)
    assert early.sentence() == f"stable: final loss {np.median(losses[:18]):.3f} (after 18 of 400 steps)"
    assert judge(losses[:19], steps_total=400).best == np.median(losses[:19])


def test_two_bad_batches_in_a_row_are_a_spike_after_the_warmup_only():
    verdict = judge(raised(healthy(), 200, 201, 1.0), warmup_steps=40)
    assert (verdict.word, verdict.spikes, verdict.reason) == ("spiked", (200,), None)
    assert judge(raised(healthy(), 38, 39, 3.0), warmup_steps=40).word == "stable"


def test_a_rise_of_many_deviations_but_few_nats_is_no_spike():
    quiet = [2.0 + 0.001 * (-1) ** step for step in range(200)]
    assert judge(raised(quiet, 100, 110, 0.09)).word == "stable"
    assert judge(raised(quiet, 100, 110, 0.11)).spikes == (100,)


def test_a_rise_of_many_nats_but_few_deviations_is_no_spike():
    loud = healthy(noise=0.3)
    assert judge(raised(loud, 200, 210, 0.4), warmup_steps=40).word == "stable"


@pytest.mark.parametrize(("length", "word"), [(19, "spiked"), (24, "diverged")])
def test_five_percent_of_the_run_is_the_limit_of_a_rise(length, word):
    level = [2.0 + 0.01 * (-1) ** step for step in range(400)]
    verdict = judge(raised(level, 200, 199 + length, 1.0))
    assert verdict.word == word
    if word == "diverged":
        # A median of 19 follows when 10 of its values have risen.
        assert (verdict.reason, verdict.divergence_step) == ("rose and stayed", 209)


def test_less_than_half_a_nat_is_no_divergence():
    assert judge(raised(healthy(), 200, 400, 0.4), warmup_steps=40).word != "diverged"
    assert judge(raised(healthy(), 200, 400, 0.7), warmup_steps=40).word == "diverged"


def test_a_run_that_ends_soon_after_its_rise_diverged():
    rising = raised(healthy(), 387, 400, 2.0)
    verdict = judge(rising, warmup_steps=40)
    assert (verdict.word, verdict.reason, verdict.divergence_step) == ("diverged", "rose at the end", 396)
    assert judge(rising, warmup_steps=40, steps_total=500).word == "spiked", "it has not ended"
    assert judge([4.0] * 5 + [3.0] * 10 + [6.0] * 5).word == "diverged"


def test_the_best_is_that_of_the_smoothed_loss():
    lucky = healthy()
    lucky[200] = 0.5
    verdict = judge(lucky, warmup_steps=40)
    assert verdict.word == "stable"
    assert verdict.best == pytest.approx(2.3, abs=0.05)


def test_a_run_that_hovers_at_the_unigram_entropy_has_not_learned():
    hovering = [max(ENTROPY, 5.5 - 0.05 * step) + 0.03 * math.sin(7 * step) for step in range(400)]
    verdict = judge(hovering, unigram_entropy=ENTROPY)
    assert (verdict.word, verdict.reason, verdict.divergence_step) == ("diverged", "not learned", None)
    assert "not learned" in verdict.sentence()
    assert judge(hovering).word == "stable", "unknown entropy switches the rule off"
    assert judge(hovering, unigram_entropy=ENTROPY, steps_total=401).word == "stable", "the run has not ended"
    assert judge(hovering, unigram_entropy=ENTROPY + 0.15).word == "diverged", (
        "it may have learned the kind of text only"
    )
    assert judge(hovering, unigram_entropy=ENTROPY + 0.3).word == "stable"


def test_gradient_norms_are_counted_and_do_not_decide():
    norms = [0.5 + 0.01 * (-1) ** step for step in range(400)]
    norms[100:103] = [50.0, 80.0, 20.0]
    norms[300] = math.inf
    verdict = judge(healthy(), warmup_steps=40, gradient_norms=norms)
    assert (verdict.word, verdict.gradient_spikes) == ("stable", 2)
    assert judge(healthy(), warmup_steps=40, gradient_norms=[None] * 400).gradient_spikes == 0
    clipped = [1.0 if step % 3 else 0.9999999 for step in range(400)]
    assert judge(healthy(), gradient_norms=clipped).gradient_spikes == 0


def test_a_loss_that_is_not_finite_diverged_wherever_it_stands():
    for value in (math.nan, math.inf, -math.inf):
        for step in (1, 20, 400):
            losses = healthy()
            losses[step - 1] = value
            verdict = judge(losses, warmup_steps=40)
            assert (verdict.word, verdict.reason, verdict.divergence_step) == ("diverged", "not finite", step)


def stop_step(losses, total=400):
    watch = StabilityMonitor(steps_total=total, warmup_steps=40, unigram_entropy=ENTROPY)
    for step, loss in enumerate(losses, start=1):
        watch.observe(loss)
        if watch.should_stop:
            assert watch.verdict().word == "diverged"
            return step
    return None


def test_a_run_is_ended_early_only_after_its_patience():
    level = [2.0 + 0.01 * (-1) ** step for step in range(400)]
    # The median has risen at step 209, and 10 % of the run later it is enough.
    assert stop_step(raised(level, 200, 400, 1.0)) == 209 + 40 - 1
    assert stop_step(raised(level, 200, 235, 1.0)) is None
    assert stop_step([*level[:100], *[math.nan] * 300]) == 120
    assert stop_step([math.nan if step % 10 == 0 else loss for step, loss in enumerate(level)]) is None
    assert stop_step(healthy()) is None


def test_an_early_end_never_changes_the_word():
    for losses in histories().values():
        total = len(losses)
        end = stop_step(losses, total)
        if end is not None:
            best_case = losses[:end] + [0.5] * (total - end)
            assert judge(best_case, warmup_steps=40, unigram_entropy=ENTROPY).word == "diverged"


def test_a_curve_logged_every_ten_steps_is_told_in_steps():
    losses = raised(healthy(), 200, 203, 1.5)
    every_step = judge(losses, warmup_steps=40, steps_total=400)
    sparse = LossCurve(
        steps=tuple(range(10, 4001, 10)),
        losses=tuple(losses),
        steps_total=4000,
        warmup_steps=400,
        unigram_entropy=ENTROPY,
    )
    verdict = judge_curve(sparse)
    assert verdict.spikes == tuple(10 * step for step in every_step.spikes) == (2000,)
    assert (verdict.best, verdict.best_step) == (every_step.best, 10 * every_step.best_step)
    assert (verdict.steps, verdict.steps_total, verdict.warmup_steps, verdict.ended) == (4000, 4000, 400, True)
    assert not judge_curve(dataclasses.replace(sparse, steps_total=4010)).ended
    assert judge_curve(dataclasses.replace(sparse, steps_total=4009)).ended


@pytest.mark.parametrize("interval", [1, 10])
def test_a_curve_whose_first_step_is_zero_is_as_long_as_one_whose_first_is_one(interval):
    losses = tuple(raised(healthy(), 38, 39, 3.0))
    steps = tuple(interval * point for point in range(400))
    facts = {"steps_total": 400 * interval, "warmup_steps": 40 * interval, "unigram_entropy": ENTROPY}
    curve = LossCurve(steps=steps, losses=losses, **facts)
    verdict = judge_curve(curve)
    assert (verdict.ended, verdict.word, verdict.steps_total) == (True, "stable", 400 * interval)
    assert (curve.warmup_points, curve.missing_points) == (40, 0)
    assert not judge_curve(LossCurve(steps=steps[:399], losses=losses[:399], **facts)).ended
    at_both_ends = LossCurve(steps=(*steps, 400 * interval), losses=(*losses, 2.3), **facts)
    assert judge_curve(at_both_ends).ended


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"steps_total": 2}, "steps_total is 2: the curve goes to step 3"),
        ({"warmup_steps": -1}, "warmup_steps is -1: give 0 or more"),
        ({"unigram_entropy": math.nan}, "unigram_entropy is nan"),
        ({"unigram_entropy": math.inf}, "unigram_entropy is inf"),
        ({"unigram_entropy": -1.0}, "unigram_entropy is -1.0"),
    ],
)
def test_facts_that_cannot_be_those_of_the_curve_are_refused(facts, message):
    with pytest.raises(UserError, match=message):
        judge([3.0, 2.0, 1.0], **facts)


def test_a_verdict_survives_json_with_its_thresholds():
    strict = Thresholds(rise=0.2, patience_fraction=0.3)
    for losses in histories().values():
        verdict = judge(losses, unigram_entropy=ENTROPY, thresholds=strict, gradient_norms=losses)
        text = encode_json(verdict.to_json())
        json.loads(text, parse_constant=pytest.fail)
        again = Verdict.from_json(decode_json(text))
        assert encode_json(again.to_json()) == text
        assert again.thresholds == strict
        assert again.sentence() == verdict.sentence()
        assert again.sentence().startswith(again.word)
    with pytest.raises(UserError, match="not a verdict"):
        Verdict.from_json({"word": "stable"})


def test_thresholds_change_the_verdict():
    losses = raised(healthy(), 200, 400, 0.4)
    assert judge(losses, thresholds=Thresholds(rise=0.2)).word == "diverged"
    spiked = raised(healthy(), 200, 204, 1.0)
    assert judge(spiked, warmup_steps=40, thresholds=Thresholds(spike_steps=6)).word == "stable"
    assert judge(spiked, warmup_steps=40, thresholds=Thresholds(spike_rise=1.2)).word == "stable"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rise": 0.0}, "rise is 0.0"),
        ({"spike_sigmas": math.nan}, "spike_sigmas is nan"),
        ({"spike_steps": -1}, "spike_steps is -1"),
        ({"patience_fraction": 0.01}, "patience_fraction is 0.01"),
    ],
)
def test_thresholds_without_meaning_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        Thresholds(**values)


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(UserError, match="no losses"):
        judge([])
    with pytest.raises(UserError, match="step 3 is negative"):
        judge([1.0, 1.0, -0.5])
    with pytest.raises(UserError, match="steps_total is 0"):
        StabilityMonitor(steps_total=0)
    assert judge([2.0]).word == "stable"
    assert judge([0.0] * 100).word == "stable", "a loss of nothing is finite"


def test_the_default_thresholds_are_those_of_the_specification():
    assert (DEFAULT_THRESHOLDS.rise, DEFAULT_THRESHOLDS.rise_fraction, DEFAULT_THRESHOLDS.entropy_margin) == (
        0.5,
        0.05,
        0.2,
    )
    assert (DEFAULT_THRESHOLDS.spike_sigmas, DEFAULT_THRESHOLDS.spike_rise, DEFAULT_THRESHOLDS.spike_steps) == (
        6.0,
        0.1,
        2,
    )


def test_learning_rate_sensitivity_is_the_mean_excess_over_the_best_rate():
    assert learning_rate_sensitivity({1e-3: 2.5, 1e-2: 2.0, 1e-1: 2.75}, cap=5.5) == pytest.approx((0.5 + 0 + 0.75) / 3)
    assert learning_rate_sensitivity({1e-3: 2.0, 1e-2: math.nan, 1e-1: 9.0}, cap=5.0) == pytest.approx((0 + 3 + 3) / 3)
    assert learning_rate_sensitivity({1e-3: 2.0}, cap=5.0) == 0.0
    assert math.isnan(learning_rate_sensitivity({1e-3: 6.0, 1e-2: math.inf}, cap=5.0))
    with pytest.raises(ValueError, match="empty"):
        learning_rate_sensitivity({}, cap=5.0)
