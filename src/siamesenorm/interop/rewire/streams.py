"""Look at the streams of a rewired model, which its own outputs show closed into one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewire.block import RewiredBlock

StreamsOfBlock = dict[str, Tensor]


@contextmanager
def record_streams(model: nn.Module) -> Iterator[list[StreamsOfBlock]]:
    """Collect, for every block that runs inside the context, its streams by name, [batch, tokens, dim] each.

    Hyper-Connections have one entry, "streams", [batch, tokens, streams, dim]. Raises UserError for a model that
    was not rewired.
    """
    blocks = [module for module in model.modules() if isinstance(module, RewiredBlock)]
    if not blocks:
        raise UserError(f"{type(model).__name__} has no rewired blocks: call siamesenorm.rewire first")
    found: list[StreamsOfBlock] = []

    def keep(block: nn.Module, _: object, packed: Tensor) -> None:
        assert isinstance(block, RewiredBlock)
        topology = block.topology
        found.append(dict(zip(topology.stream_names, topology.unpack(packed), strict=True)))

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
