"""The connection of every topology that has one stream: what differs is where its norms stand."""

from __future__ import annotations

from torch import Tensor, nn

from siamesenorm.norms import NormFunction
from siamesenorm.topologies.topology import Closing, Connection, Materials, Streams
from siamesenorm.topologies.upcycling import hand_down


class SingleStreamConnection(Connection):
    """One stream x with a norm after the previous addition, before the sublayer, or on its output.

    read: x <- settle(x), h = norm(x); write: x <- x + output(O). What is absent is the identity.
    """

    def __init__(
        self,
        materials: Materials,
        *,
        settle: nn.Module | None = None,
        norm: nn.Module | None = None,
        output: nn.Module | None = None,
    ) -> None:
        super().__init__(materials)
        self.settle = settle or nn.Identity()
        self.norm = norm or nn.Identity()
        self.output = output or nn.Identity()

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Settle the stream and return its norm."""
        x = self.settle(streams[0])
        return self.to_compute(self.norm(x)), (x,)

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Add the output to the stream."""
        (x,) = streams
        return (x + self.output(output.to(x.dtype)),)

    def become_pre_norm(self, norm: NormFunction | None) -> list[str]:
        """Give the input norm the gain of `norm`."""
        return hand_down(norm, self.norm)


class WeightedSkipConnection(SingleStreamConnection):
    """A single-stream connection whose write is x <- skip x + O."""

    skip: Tensor

    def __init__(
        self,
        materials: Materials,
        *,
        skip: float,
        settle: nn.Module | None = None,
        norm: nn.Module | None = None,
        output: nn.Module | None = None,
    ) -> None:
        super().__init__(materials, settle=settle, norm=norm, output=output)
        self.constant("skip", skip)

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Add the output to the weighted stream."""
        (x,) = streams
        return (x * self.skip + self.output(output.to(x.dtype)),)


class SingleStreamClosing(Closing):
    """Settle the last addition, then apply the final norm; what is absent is the identity."""

    def __init__(self, materials: Materials, *, settle: nn.Module | None = None, norm: nn.Module | None = None) -> None:
        super().__init__(materials)
        self.settle = settle or nn.Identity()
        self.norm = norm or nn.Identity()

    def forward(self, streams: Streams) -> Tensor:
        """Return norm(settle(x))."""
        return self.to_compute(self.norm(self.settle(streams[0])))

    def become_pre_norm(self, norm: NormFunction | None) -> list[str]:
        """Give the final norm the gain of `norm`."""
        return hand_down(norm, self.norm)
