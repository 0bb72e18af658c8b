"""Random draws as functions of what they are for: no global state, so that resume and processes change nothing."""

from __future__ import annotations

import hashlib

import torch


def generator_at(seed: int, purpose: str, *position: int) -> torch.Generator:
    """Return a generator on the CPU that depends on the arguments alone, such as (seed, "noise", position).

    Different arguments give independent streams: the generator is seeded by 63 bits of their SHA-256.
    """
    key = ":".join(map(str, (seed, purpose, *position)))
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
