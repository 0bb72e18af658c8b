"""The connection of every topology that has one stream: what differs is where its norms stand."""

from __future__ import annotations

from torch import Tensor, nn

from siamesenorm.norms import Inexact, NormFunction
from siamesenorm.topologies.topology import Closing, Connection, ResidualSpec, Streams
from siamesenorm.topologies.upcycling import copy_gain


class SingleStreamConnection(Connection):
    """One stream x with a norm after the previous addition, before the sublayer, or on its output.

    read: x <- post_norm(x), h = norm(x); write: x <- x + output(O). What is absent is the identity.
    """

    def __init__(
        self,
        spec: ResidualSpec,
        *,
        post_norm: nn.Module | None = None,
        norm: nn.Module | None = None,
        output: nn.Module | None = None,
    ) -> None:
        super().__init__(spec)
        self.post_norm = post_norm or nn.Identity()
        self.norm = norm or nn.Identity()
        self.output = output or nn.Identity()

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Settle the stream and return its norm."""
        x = self.post_norm(streams[0])
        return self.to_compute(self.norm(x)), (x,)

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Add the output to the stream."""
        (x,) = streams
        return (x + self.output(output.to(x.dtype)),)

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Give the input norm the gain of `norm`."""
        return copy_gain(norm, self.norm)


class WeightedSkipConnection(SingleStreamConnection):
    """A single-stream connection whose write is x <- skip x + O."""

    skip: Tensor

    def __init__(
        self,
        spec: ResidualSpec,
        *,
        skip: float,
        post_norm: nn.Module | None = None,
        norm: nn.Module | None = None,
        output: nn.Module | None = None,
    ) -> None:
        super().__init__(spec, post_norm=post_norm, norm=norm, output=output)
        self.constant("skip", skip)

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Add the output to the weighted stream."""
        (x,) = streams
        return (x * self.skip + self.output(output.to(x.dtype)),)


class SingleStreamClosing(Closing):
    """Settle the last addition, then apply the final norm; what is absent is the identity."""

    def __init__(
        self, spec: ResidualSpec, *, post_norm: nn.Module | None = None, norm: nn.Module | None = None
    ) -> None:
        super().__init__(spec)
        self.post_norm = post_norm or nn.Identity()
        self.norm = norm or nn.Identity()

    def forward(self, streams: Streams) -> Tensor:
        """Return norm(post_norm(x))."""
        return self.to_compute(self.norm(self.post_norm(streams[0])))

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Give the final norm the gain of `norm`."""
        return copy_gain(norm, self.norm)
