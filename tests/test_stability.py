"""The verdict against its definition: by hand on constructed curves, and by a slow reference on every prefix."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, encode_json
from siamesenorm.training.loss_curve import LossCurve
from siamesenorm.training.robust_statistics import centred_medians, still_falls
from siamesenorm.training.verdict import (
    DEFAULT_THRESHOLDS,
    Reason,
    StabilityMonitor,
    Thresholds,
    Unchecked,
    Verdict,
    judge,
)

FLOOR = 3.0


def verdict_on(losses, thresholds=DEFAULT_THRESHOLDS, **facts):
    return judge(LossCurve.of(losses, **facts), thresholds)


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
    floor: float
    held_out: float | None = None

    def __post_init__(self):
        self.window = min(max(11, round(0.05 * self.total)), 501, max(1, self.total // 4))
        self.window -= 1 - self.window % 2
        finite = [t for t, loss in enumerate(self.losses) if math.isfinite(loss)]
        self.smooth = {t: float(np.median([self.losses[u] for u in finite if u <= t][-self.window :])) for t in finite}
        whole = finite[self.window - 1 :]
        self.best = {t: min((self.smooth[u] for u in whole if u <= t), default=math.inf) for t in finite}
        self.up = [t not in finite or self.smooth[t] > self.best[t] + 0.5 for t in range(len(self.losses))]

    def at(self, seen):
        """Return (reasons, divergence step, spikes, number of gradient spikes, best, final)."""
        losses = self.losses[:seen]
        divergence, step = self.divergence(seen)
        final = self.smooth.get(seen - 1, losses[-1])
        spikes = reference_starts(reference_out(losses, self.warmup, 0.1), 2)
        logs = [math.log(norm) for norm in self.norms[:seen]]
        gradient_spikes = len(reference_starts(reference_out(logs, self.warmup, math.log(1.1)), 1))
        high = reference_high(losses, self.warmup)
        found = {
            divergence: divergence is not None,
            Reason.NOT_LEARNED: divergence is None and seen >= self.total and self.not_learned(final),
            Reason.SPIKES: bool(spikes),
            Reason.OFTEN_HIGH: bool(high) and np.mean(high) > 0.05,
        }
        best = min((self.best[t] for t in self.best if t < seen and self.best[t] < math.inf), default=None)
        return tuple(r for r, holds in found.items() if holds), step, spikes, gradient_spikes, best, final

    def divergence(self, seen):
        up = self.up[:seen]
        persistence = math.ceil(0.05 * self.total)
        stays = [t for t in range(seen - persistence + 1) if all(up[t : t + persistence])]
        broken = [t for t in range(seen) if t not in self.smooth]
        if broken:
            return Reason.NOT_FINITE, broken[0] + 1
        if stays:
            return Reason.ROSE_AND_STAYED, stays[0] + 1
        if seen >= self.total and up[-1]:
            return Reason.ROSE_AT_THE_END, max(t for t in range(seen) if not up[t]) + 2
        return None, None

    def not_learned(self, final):
        quarter = len(self.losses) // 4
        half = np.array(self.losses[-2 * quarter :])
        fall = np.median(half[:quarter]) - np.median(half[quarter:])
        ranks = np.array([(half < value).sum() + (half[t + 1 :] == value).sum() for t, value in enumerate(half)])
        chance = np.corrcoef(ranks, np.arange(len(half)))[0, 1] * math.sqrt(len(half) - 1)
        line = self.floor - 0.2
        learned = final < line or (self.held_out is not None and self.held_out < line)
        return not learned and not (fall > 0.02 and chance < -2)


def reference_out(values, warmup, rise):
    """Two-sided residuals of the finite values, six robust standard deviations of the residuals around them."""
    finite = [t for t, value in enumerate(values) if math.isfinite(value)]
    x = np.array([values[t] for t in finite])
    half = [min(25, i) for i in range(len(x))]
    around = [np.sort(x[i - h : i + h + 1]) for i, h in enumerate(half)]
    residuals = x - np.array([window[len(window) // 2] for window in around]) if len(x) else x
    out = [step >= warmup and not math.isfinite(value) for step, value in enumerate(values)]
    for i, t in enumerate(finite):
        nearby = residuals[max(0, i - 51) : i + 52]
        sigma = 1.4826 * np.median(np.abs(nearby - np.median(nearby)))
        out[t] = bool(i >= 16 and t >= warmup and residuals[i] > max(rise, 6 * sigma))
    return out


def reference_high(values, warmup):
    """For every step that counts, whether it is far above the lower quartile of the 51 finite steps before it."""
    high = []
    for t in range(warmup, len(values)):
        before = np.sort([value for value in values[:t] if math.isfinite(value)][-51:])
        if len([value for value in values[:t] if math.isfinite(value)]) >= 16 and math.isfinite(values[t]):
            quartile, eighth = before[len(before) // 4], before[len(before) // 8]
            high.append(values[t] - quartile > max(0.5, 8 * (quartile - eighth)))
    return high


def reference_starts(out, shortest):
    starts = [t for t in range(len(out)) if out[t] and not (t and out[t - 1])]
    return tuple(t + 1 for t in starts if t + shortest <= len(out) and all(out[t : t + shortest]))


def histories():
    base = healthy(160, warmup=16)
    noisy = healthy(160, noise=0.4, seed=3, warmup=16)
    flat = [max(loss, 2.98) for loss in base]
    with_nan = [math.nan if 100 <= step < 130 or step == 60 else loss for step, loss in enumerate(base, start=1)]
    half_high = [loss + 1.5 * (step % 2) for step, loss in enumerate(base)]
    return {
        "healthy": base,
        "noisy": noisy,
        "spikes": raised(raised(raised(base, 50, 50, 3.0), 70, 71, 1.0), 120, 124, 0.8),
        "often high": half_high,
        "rises and stays": raised(base, 90, 160, 0.8),
        "rises and comes back": raised(base, 60, 110, 0.9),
        "rises at the end": raised(base, 150, 160, 0.9),
        "not learned": flat,
        "not learned, with a spike": raised(flat, 100, 103, 0.6),
        "not a number": with_nan,
        "infinite at once": [math.inf] * 160,
        "one value": [2.5] * 160,
    }


@pytest.mark.every_nth(2)
@pytest.mark.parametrize("name", histories())
def test_the_monitor_agrees_with_the_definition_after_every_step(name):
    losses = histories()[name]
    norms = (0.5 * np.exp(0.3 * np.random.default_rng(7).standard_normal(len(losses)))).tolist()
    norms[79] = 30.0
    norms[99] = math.inf
    definition = Reference(losses, norms, 160, 16, FLOOR)
    monitor = StabilityMonitor(steps_total=160, warmup_steps=16, floor=FLOOR)
    for seen, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        monitor.observe(loss, norm)
        if seen % 4 and seen < 155:
            continue
        reasons, step, spikes, gradient_spikes, best, final = definition.at(seen)
        verdict = monitor.verdict()
        assert (verdict.reasons, verdict.divergence_step) == (reasons, step), seen
        assert (verdict.spikes, verdict.gradient_spikes) == (spikes, gradient_spikes), seen
        assert verdict.label == (reasons[0].label if reasons else "stable")
        assert (verdict.best is None) == (best is None)
        assert best is None or verdict.best == pytest.approx(best, abs=1e-12)
        assert verdict.final == pytest.approx(final, abs=1e-12, nan_ok=True)
    batch = verdict_on(losses, steps_total=160, warmup_steps=16, gradient_norms=tuple(norms), floor=FLOOR)
    assert encode_json(batch.to_json()) == encode_json(monitor.verdict().to_json())


def test_the_histories_cover_every_label_and_reason():
    verdicts = [verdict_on(losses, warmup_steps=16, floor=FLOOR) for losses in histories().values()]
    assert {verdict.label for verdict in verdicts} == {"stable", "spiked", "diverged", "not learned"}
    assert {reason for verdict in verdicts for reason in verdict.reasons} == set(Reason)


def test_the_first_of_several_reasons_gives_the_label():
    flat = histories()["not learned, with a spike"]
    verdict = verdict_on(flat, warmup_steps=16, floor=FLOOR)
    assert (verdict.label, verdict.reasons, verdict.spikes) == (
        "not learned",
        (Reason.NOT_LEARNED, Reason.SPIKES),
        (100,),
    )
    risen = verdict_on(raised(flat, 120, 160, 2.0), warmup_steps=16, floor=FLOOR)
    assert (risen.label, risen.reasons[0]) == ("diverged", Reason.ROSE_AND_STAYED)
    assert Reason.NOT_LEARNED not in risen.reasons


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.3])
def test_healthy_curves_are_stable_whatever_their_noise(seed, noise):
    assert verdict_on(healthy(noise=noise, seed=seed), warmup_steps=40, floor=FLOOR).label == "stable"


@pytest.mark.parametrize("steps", [40, 100, 2000, 8000])
def test_healthy_curves_of_every_length_are_stable(steps):
    warmup = steps // 10
    assert verdict_on(healthy(steps, warmup=warmup), warmup_steps=warmup, floor=FLOOR).label == "stable"


def test_a_steep_fall_is_no_spike():
    losses = [2.0 + 8.0 * math.exp(-step / 15) + 0.02 * (-1) ** step for step in range(300)]
    assert verdict_on(losses, floor=FLOOR).reasons == ()
    stairs = [4.0 - step // 100 + 0.01 * (-1) ** step for step in range(300)]
    assert verdict_on(stairs).reasons == ()


def test_a_centred_median_follows_a_fall_and_never_leads_it():
    falling = [9.0, 7.0, 4.0, 2.0, 1.0]
    assert centred_medians(falling, 1) == [9.0, 7.0, 4.0, 2.0, 2.0], "at the end the upper middle"
    assert centred_medians([3.0, 3.0, 1.0, 1.0], 25) == [3.0, 3.0, 3.0, 3.0]
    assert centred_medians([], 25) == []


@pytest.mark.parametrize("height", [0.0, 3.0, 20.0])
@pytest.mark.parametrize(
    ("steps", "places"), [(60, range(1, 61)), (100, range(1, 101)), (400, [1, 2, 3, 10, 19, 20, 200, 399, 400])]
)
def test_one_loss_of_any_height_never_decides(steps, places, height):
    for place in places:
        losses = healthy(steps, warmup=steps // 10)
        losses[place - 1] = height
        assert verdict_on(losses, warmup_steps=steps // 10, floor=FLOOR).label == "stable", place


@pytest.mark.parametrize("at", [41, 42, 45, 60, 80, 200, 398, 399])
def test_a_spike_is_seen_wherever_it_is_after_the_warmup(at):
    verdict = verdict_on(raised(healthy(), at, at + 1, 1.0), warmup_steps=40, floor=FLOOR)
    assert (verdict.label, verdict.reasons, verdict.spikes) == ("spiked", (Reason.SPIKES,), (at,))


@pytest.mark.parametrize("part", [0.1, 0.25, 0.5])
def test_a_loss_that_is_high_in_part_of_its_steps_is_spiked(part):
    high = np.random.default_rng(3).random(400) < part
    losses = [loss + 1.5 * bool(up) for loss, up in zip(healthy(), high, strict=True)]
    verdict = verdict_on(losses, warmup_steps=40, floor=FLOOR)
    assert verdict.label != "stable" and Reason.OFTEN_HIGH in verdict.reasons
    assert 0.7 * high[40:].mean() < verdict.high_part <= high[40:].mean()
    few = [loss + 1.5 * (step % 25 == 0) for step, loss in enumerate(healthy())]
    assert verdict_on(few, warmup_steps=40, floor=FLOOR).label == "stable", "4 % of single steps"


def test_what_is_high_in_the_warmup_does_not_count():
    level = [2.0 + 0.01 * (-1) ** step + 1.5 * (step < 40 and step % 3 == 0) for step in range(400)]
    assert verdict_on(level, warmup_steps=40, floor=FLOOR).high_part == 0.0
    assert verdict_on(level, floor=FLOOR).high_part > 0


def test_the_best_is_that_of_whole_windows():
    losses = [6.0 - 0.1 * step for step in range(40)]
    early = verdict_on(losses[:18], steps_total=400)
    assert (early.best, early.best_step) == (None, None)
    assert early.sentence().endswith("(after 18 of 400 steps)")
    assert not early.ended and early.final == np.median(losses[:18])
    assert verdict_on(losses[:19], steps_total=400).best == np.median(losses[:19])


def test_two_bad_batches_in_a_row_are_a_spike_after_the_warmup_only():
    verdict = verdict_on(raised(healthy(), 200, 201, 1.0), warmup_steps=40)
    assert (verdict.label, verdict.spikes, verdict.divergence_step) == ("spiked", (200,), None)
    assert verdict_on(raised(healthy(), 38, 39, 3.0), warmup_steps=40).label == "stable"


def test_a_rise_of_many_deviations_but_few_nats_is_no_spike():
    quiet = [2.0 + 0.001 * (-1) ** step for step in range(200)]
    assert verdict_on(raised(quiet, 100, 110, 0.09)).label == "stable"
    assert verdict_on(raised(quiet, 100, 110, 0.11)).spikes == (100,)


def test_a_rise_of_many_nats_but_few_deviations_is_no_spike():
    loud = healthy(noise=0.3)
    assert verdict_on(raised(loud, 200, 210, 0.4), warmup_steps=40).label == "stable"


@pytest.mark.parametrize(("length", "word"), [(19, "spiked"), (24, "diverged")])
def test_five_percent_of_the_run_is_the_limit_of_a_rise(length, word):
    level = [2.0 + 0.01 * (-1) ** step for step in range(400)]
    verdict = verdict_on(raised(level, 200, 199 + length, 1.0))
    assert verdict.label == word
    if word == "diverged":
        # A median of 19 follows when 10 of its values have risen.
        assert (verdict.reasons[0], verdict.divergence_step) == (Reason.ROSE_AND_STAYED, 209)


def test_less_than_half_a_nat_is_no_divergence():
    assert verdict_on(raised(healthy(), 200, 400, 0.4), warmup_steps=40).label != "diverged"
    assert verdict_on(raised(healthy(), 200, 400, 0.7), warmup_steps=40).label == "diverged"


def test_a_run_that_ends_soon_after_its_rise_diverged():
    rising = raised(healthy(), 387, 400, 2.0)
    verdict = verdict_on(rising, warmup_steps=40)
    assert (verdict.label, verdict.reasons[0], verdict.divergence_step) == ("diverged", Reason.ROSE_AT_THE_END, 396)
    assert verdict_on(rising, warmup_steps=40, steps_total=500).label == "spiked", "it has not ended"
    assert verdict_on([4.0] * 5 + [3.0] * 12 + [6.0] * 5).label == "diverged"


@pytest.mark.parametrize("steps", range(1, 22))
def test_rises_are_not_judged_in_fewer_steps_than_two_windows(steps: int) -> None:
    """One noisy step of a trial run of a few steps neither ends it nor makes it a diverged one."""
    losses = [*([3.0] * (steps - 1)), 6.0]
    monitor = StabilityMonitor(steps_total=steps)
    for loss in losses:
        assert not monitor.should_stop
        monitor.observe(loss)
    assert not monitor.should_stop
    verdict = monitor.verdict()
    assert verdict.label != "diverged" and Unchecked.TOO_SHORT_FOR_TRENDS in verdict.unchecked
    assert verdict_on([*losses[:-1], math.nan]).label == "diverged"


def test_the_best_is_that_of_the_smoothed_loss():
    lucky = healthy()
    lucky[200] = 0.5
    verdict = verdict_on(lucky, warmup_steps=40)
    assert verdict.label == "stable"
    assert verdict.best == pytest.approx(2.3, abs=0.05)


HOVERING = [max(FLOOR, 5.5 - 0.05 * step) + 0.03 * math.sin(7 * step) for step in range(400)]


def test_a_run_that_stays_at_the_floor_has_not_learned():
    verdict = verdict_on(HOVERING, floor=FLOOR)
    assert (verdict.label, verdict.reasons, verdict.divergence_step) == ("not learned", (Reason.NOT_LEARNED,), None)
    assert verdict_on(HOVERING, floor=FLOOR, held_out=3.0).held_out == 3.0
    assert verdict_on(HOVERING, floor=FLOOR + 0.15).label == "not learned", "it may have learned the kind of text only"
    assert verdict_on(HOVERING, floor=FLOOR + 0.3).label == "stable"


def test_nothing_is_not_learned_while_it_falls_or_its_held_out_loss_is_below_the_line():
    assert verdict_on(HOVERING, floor=FLOOR, held_out=2.7).label == "stable"
    assert verdict_on(HOVERING, floor=FLOOR, held_out=2.9).label == "not learned"
    assert verdict_on(HOVERING, floor=FLOOR, held_out=math.nan).label == "not learned"
    noise = 0.05 * np.random.default_rng(1).standard_normal(400)
    falling = 5.0 - np.linspace(0, 1.0, 400) + noise
    assert verdict_on(falling.tolist(), floor=4.1).label == "stable", "it ends at 4.0, but still falls"
    assert verdict_on((5.0 - np.linspace(0, 0.6, 60) + noise[:60]).tolist(), floor=4.1).label == "stable"
    assert verdict_on((4.0 + noise).tolist(), floor=4.1).label == "not learned"


def test_a_series_falls_by_a_least_amount_and_beyond_chance():
    noise = np.random.default_rng(0).standard_normal(400)
    assert still_falls((2 - 0.002 * np.arange(400)).tolist(), fall=0.02)
    assert not still_falls((2 - 0.0001 * np.arange(400)).tolist(), fall=0.02), "0.01 from quarter to quarter"
    assert not still_falls([2.0] * 400, fall=0.02)
    assert not still_falls((2 - 0.0005 * np.arange(400) + noise).tolist(), fall=0.02), "mere noise"
    assert (
        sum(still_falls(np.random.default_rng(seed).standard_normal(400).tolist(), fall=0.02) for seed in range(200))
        < 10
    )
    assert not still_falls([], fall=0.02) and not still_falls([3.0, 2.0, 1.0], fall=0.02)


def test_what_could_not_be_checked_is_said():
    assert verdict_on([2.0]).unchecked == (
        Unchecked.NO_FLOOR,
        Unchecked.TOO_SHORT_FOR_TRENDS,
        Unchecked.TOO_SHORT_FOR_SPIKES,
    )
    assert verdict_on([2.0] * 400).unchecked == (Unchecked.NO_FLOOR,), "a flat curve may have learned nothing"
    assert verdict_on([2.0] * 400).sentence() != verdict_on([2.0] * 400, floor=FLOOR).sentence()
    assert verdict_on(healthy(), floor=FLOOR).unchecked == ()
    assert verdict_on(healthy(), floor=FLOOR, steps_total=401).unchecked == (Unchecked.NOT_ENDED,)
    assert verdict_on(HOVERING, floor=FLOOR, steps_total=401).label == "stable", "the run has not ended"
    few = verdict_on([3.0] * 21, floor=FLOOR)
    assert (few.label, few.unchecked) == ("stable", (Unchecked.TOO_SHORT_FOR_TRENDS,))
    assert verdict_on([3.0] * 22, floor=FLOOR).label == "not learned"
    assert verdict_on(healthy(60), warmup_steps=59, floor=FLOOR).unchecked == (Unchecked.TOO_SHORT_FOR_SPIKES,)


@pytest.mark.parametrize("scale", [0.01, 50.0])
def test_thresholds_are_in_units_of_the_scale(scale):
    for losses in histories().values():
        plain = verdict_on(losses, warmup_steps=16, floor=FLOOR)
        scaled = verdict_on([scale * loss for loss in losses], warmup_steps=16, floor=scale * FLOOR, scale=scale)
        assert (scaled.reasons, scaled.spikes, scaled.divergence_step) == (
            plain.reasons,
            plain.spikes,
            plain.divergence_step,
        )


def test_a_fall_counts_in_units_of_the_scale():
    slow = (4.0 - np.linspace(0, 0.2, 400)).tolist()
    assert verdict_on(slow, floor=3.9).label == "stable", "0.05 from quarter to quarter"
    assert verdict_on(slow, floor=3.9, scale=50.0).label == "not learned"


def test_losses_may_be_negative():
    verdict = verdict_on([loss - 10 for loss in raised(healthy(), 200, 202, 1.0)], warmup_steps=40, floor=-7.0)
    assert (verdict.label, verdict.spikes) == ("spiked", (200,))


def test_gradient_norms_are_counted_and_do_not_decide():
    norms = [0.5 + 0.01 * (-1) ** step for step in range(400)]
    norms[100:103] = [50.0, 80.0, 20.0]
    norms[300] = math.inf
    verdict = verdict_on(healthy(), warmup_steps=40, gradient_norms=tuple(norms))
    assert (verdict.label, verdict.gradient_spikes) == ("stable", 2)
    assert verdict_on(healthy(), warmup_steps=40, gradient_norms=(None,) * 400).gradient_spikes == 0
    clipped = [1.0 if step % 3 else 0.9999999 for step in range(400)]
    assert verdict_on(healthy(), gradient_norms=tuple(clipped)).gradient_spikes == 0


def test_a_loss_that_is_not_finite_diverged_wherever_it_stands():
    for value in (math.nan, math.inf, -math.inf):
        for step in (1, 20, 400):
            losses = healthy()
            losses[step - 1] = value
            verdict = verdict_on(losses, warmup_steps=40)
            assert (verdict.label, verdict.reasons[0], verdict.divergence_step) == ("diverged", "not finite", step)


def stop_step(losses, total=400):
    monitor = StabilityMonitor(steps_total=total, warmup_steps=40, floor=FLOOR)
    for step, loss in enumerate(losses, start=1):
        monitor.observe(loss)
        if monitor.should_stop:
            assert monitor.verdict().label == "diverged"
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
            assert verdict_on(best_case, warmup_steps=40, floor=FLOOR).label == "diverged"


def test_the_verdict_on_a_curve_logged_every_ten_steps_is_in_steps():
    losses = raised(healthy(), 200, 203, 1.5)
    every_step = verdict_on(losses, warmup_steps=40, steps_total=400)
    sparse = LossCurve(
        steps=tuple(range(10, 4001, 10)),
        losses=tuple(losses),
        steps_total=4000,
        warmup_steps=400,
        floor=FLOOR,
    )
    verdict = judge(sparse)
    assert verdict.spikes == tuple(10 * step for step in every_step.spikes) == (2000,)
    assert (verdict.best, verdict.best_step) == (every_step.best, 10 * every_step.best_step)
    assert (verdict.steps, verdict.steps_total, verdict.warmup_steps, verdict.ended) == (4000, 4000, 400, True)
    assert not judge(dataclasses.replace(sparse, steps_total=4010)).ended
    assert judge(dataclasses.replace(sparse, steps_total=4009)).ended


@pytest.mark.parametrize("interval", [1, 10])
def test_a_curve_whose_first_step_is_zero_is_as_long_as_one_whose_first_is_one(interval):
    losses = tuple(raised(healthy(), 38, 39, 3.0))
    steps = tuple(interval * point for point in range(400))
    facts = {"steps_total": 400 * interval, "warmup_steps": 40 * interval, "floor": FLOOR}
    curve = LossCurve(steps=steps, losses=losses, **facts)
    verdict = judge(curve)
    assert (verdict.ended, verdict.label, verdict.steps_total) == (True, "stable", 400 * interval)
    assert (curve.warmup_points, curve.missing_points) == (40, 0)
    assert not judge(LossCurve(steps=steps[:399], losses=losses[:399], **facts)).ended
    at_both_ends = LossCurve(steps=(*steps, 400 * interval), losses=(*losses, 2.3), **facts)
    assert judge(at_both_ends).ended


@pytest.mark.parametrize(
    "facts",
    [
        {"steps_total": 2},
        {"warmup_steps": -1},
        {"floor": math.nan},
        {"floor": math.inf},
        {"scale": 0.0},
        {"scale": math.inf},
    ],
)
def test_facts_that_cannot_be_those_of_the_curve_are_refused(facts):
    with pytest.raises(UserError):
        verdict_on([3.0, 2.0, 1.0], **facts)


def test_a_verdict_survives_json_with_its_thresholds():
    strict = Thresholds(rise=0.2, patience_fraction=0.3)
    for losses in histories().values():
        verdict = verdict_on(losses, floor=FLOOR, thresholds=strict, gradient_norms=tuple(map(abs, losses)))
        text = encode_json(verdict.to_json())
        json.loads(text, parse_constant=pytest.fail)
        again = Verdict.from_json(decode_json(text))
        assert encode_json(again.to_json()) == text
        assert again.thresholds == strict
        assert again.sentence() == verdict.sentence()
        assert again.sentence().startswith(again.label)
    with pytest.raises(UserError):
        Verdict.from_json({"label": "stable"})


def test_thresholds_change_the_verdict():
    losses = raised(healthy(), 200, 400, 0.4)
    assert verdict_on(losses, thresholds=Thresholds(rise=0.2)).label == "diverged"
    spiked = raised(healthy(), 200, 204, 1.0)
    assert verdict_on(spiked, warmup_steps=40, thresholds=Thresholds(spike_steps=6)).label == "stable"
    assert verdict_on(spiked, warmup_steps=40, thresholds=Thresholds(spike_rise=1.2)).label == "stable"


@pytest.mark.parametrize(
    "values",
    [
        {"rise": 0.0},
        {"spike_sigmas": math.nan},
        {"spike_steps": -1},
        {"patience_fraction": 0.01},
    ],
)
def test_thresholds_without_meaning_are_refused(values):
    with pytest.raises(UserError):
        Thresholds(**values)


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(UserError):
        verdict_on([])
    with pytest.raises(UserError):
        StabilityMonitor(steps_total=0)
    with pytest.raises(UserError):
        StabilityMonitor(steps_total=1).verdict()
    assert verdict_on([0.0] * 100).label == "stable", "a loss of nothing is finite"


def test_the_default_thresholds_are_those_of_the_specification():
    defaults = dataclasses.asdict(DEFAULT_THRESHOLDS)
    assert {name: defaults[name] for name in ("rise", "rise_fraction", "floor_margin", "patience_fraction")} == {
        "rise": 0.5,
        "rise_fraction": 0.05,
        "floor_margin": 0.2,
        "patience_fraction": 0.1,
    }
    assert {name: defaults[name] for name in ("spike_sigmas", "spike_rise", "spike_steps")} == {
        "spike_sigmas": 6.0,
        "spike_rise": 0.1,
        "spike_steps": 2,
    }
    assert {name: defaults[name] for name in ("high_rise", "high_fraction")} == {
        "high_rise": 0.5,
        "high_fraction": 0.05,
    }


@pytest.mark.parametrize(
    ("steps", "window"), [(1, 1), (4, 1), (40, 9), (44, 11), (200, 11), (400, 19), (420, 21), (100_000, 501)]
)
def test_the_smoothing_window_is_odd_and_between_its_limits(steps, window):
    assert DEFAULT_THRESHOLDS.smoothing_window(steps) == window


ALONE = """
import sys

for name in ("numpy", "tyro", "rich", "scipy", "matplotlib", "safetensors", "tokenizers"):
    sys.modules[name] = None  # as if it were not installed

import torch
from siamesenorm import StreamMonitor
from siamesenorm.training.verdict import judge

blocks = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
model = torch.nn.ModuleDict({"blocks": blocks})
with StreamMonitor(model, every=1) as monitor:
    blocks(torch.ones(2, 4)).sum().backward()
    monitor.step(1.0)
assert monitor.verdict().label == judge(monitor.records).label == "stable"
assert len(monitor.summary().splitlines()) == 4
"""


def test_the_verdict_and_the_stream_monitor_need_torch_alone():
    options = ["-W", "ignore", "-c", ALONE]
    subprocess.run([sys.executable, *options], check=True, capture_output=True, timeout=120)
