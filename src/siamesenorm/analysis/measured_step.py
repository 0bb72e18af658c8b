"""One step of training under measurement: probes on the model, a copy of its weights, the compiler standing back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from siamesenorm.analysis.measurements import Measurements
from siamesenorm.analysis.probes import Probe
from siamesenorm.analysis.weights import WeightProbe


class MeasuredStep:
    """The probes are on the model from here to `finish` or `abandon`; without `weights` only streams are measured."""

    def __init__(self, probes: tuple[Probe, ...], weights: WeightProbe | None, *, remember: bool) -> None:
        self.values = Measurements()
        self._weights, self._gradients_seen = weights, False
        self._probes = ExitStack()
        # Compiled code would not see the probes, or be compiled again for them.
        self._probes.enter_context(compiler_standing_back())
        for probe in probes:
            self._probes.enter_context(probe.attached(self.values))
        if weights and remember:
            weights.remember_weights()

    def before_update(self, *, gradients_are_there: bool) -> None:
        """Look at gradients and weights before the first optimizer changes them."""
        if not self._weights or self._weights.remembers:
            return
        if gradients_are_there:
            self._weights.measure_gradients(self.values)
            self._gradients_seen = True
        self._weights.remember_weights()

    def finish(self) -> Measurements:
        """Take the probes off, after the step, and return what was measured."""
        with self._probes:
            if self._weights and not self._gradients_seen:
                self._weights.measure_gradients(self.values)
            if self._weights:
                self._weights.measure_updates(self.values)
        return self.values

    def abandon(self) -> None:
        """Take the probes off."""
        self._probes.close()
        if self._weights:
            self._weights.forget_weights()


_stances: list[AbstractContextManager[None]] = []
"""What restores the compiler: one entry while anybody needs it to stand back."""
_needing = 0


@contextmanager
def compiler_standing_back() -> Iterator[None]:
    """Run compiled code eagerly; the last of several to leave, in whatever order, restores what was before."""
    global _needing
    if _needing == 0:
        _stances.append(torch.compiler.set_stance("force_eager"))
    _needing += 1
    try:
        yield
    finally:
        _needing -= 1
        if _needing == 0:
            _stances.pop().__exit__(None, None, None)
