"""What a caller of a model in transformers may see of its streams."""

from __future__ import annotations

from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.models.language import LanguageModel
from siamesenorm.topologies import Streams

StreamsOfBlock = dict[str, Tensor]


class Recorder:
    """Collects, after every block, the closed state that transformers calls hidden state, and the streams by name."""

    def __init__(self, native: LanguageModel, *, hidden_states: bool, streams: bool) -> None:
        self.native = native
        self.hidden_states: tuple[Tensor, ...] | None = () if hidden_states else None
        self.streams: tuple[StreamsOfBlock, ...] | None = () if streams else None

    def embedded(self, embedding: Tensor) -> None:
        """Take the embedding, which stands first among hidden states."""
        if self.hidden_states is not None:
            self.hidden_states += (embedding,)

    def after_block(self, streams: Streams) -> None:
        """Take the streams that a block hands on; raises UserError where they are not settled."""
        if self.hidden_states is None and self.streams is None:
            return
        names = self.native.config.topology.stream_names
        if len(names) != len(streams):
            raise UserError("fused kernels leave writes pending between blocks: record with kernels='plain'")
        if self.hidden_states is not None:
            self.hidden_states += (self.native.closing(streams),)
        if self.streams is not None:
            self.streams += (dict(zip(names, streams, strict=True)),)
