"""The state of torch's random generators as tensors, for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from siamesenorm.errors import UserError


def capture_random_state() -> dict[str, Tensor]:
    """Return the state of the CPU's generator ("cpu") and of every visible GPU's ("cuda-0", ...), uint8 `[bytes]`."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state()} | {f"cuda-{index}": state for index, state in enumerate(gpus)}


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Give the generators the states that were captured; raises `UserError` when one of its GPUs is not there."""
    gpus = sorted(name for name in states if name != "cpu")
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(gpus) > present:
        raise UserError(
            f"the checkpoint has the random state of {len(gpus)} GPUs, {present} are visible: resume on as many"
        )
    torch.set_rng_state(states["cpu"])
    for name in gpus:
        torch.cuda.set_rng_state(states[name], int(name.removeprefix("cuda-")))
