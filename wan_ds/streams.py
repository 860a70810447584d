"""Random draws that are functions of what they belong to (seed, step, slot), never of a rank, worker or
micro-batch.

Every number that training draws comes from a generator made here from a key, so that any layout of ranks and
micro-batches sees the same numbers and a resumed run needs no saved generator state.
"""

import hashlib

import torch


def _digest(seed: int, key: tuple[int | str, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest(), "little")


def generator(seed: int, *key: int | str) -> torch.Generator:
    """A CPU generator that depends on ``seed`` and ``key`` alone.

    Unequal keys share a stream by chance alone, one pair in 2**32: torch keeps 32 bits of a CPU seed.
    """
    return torch.Generator().manual_seed(_digest(seed, key))


def uniform(seed: int, *key: int | str) -> float:
    """One draw from [0, 1) with 53 random bits; cheap enough to walk through every step of a run."""
    return (_digest(seed, key) >> 11) * 2.0**-53


def normal(shape: tuple[int, ...], seed: int, *key: int | str) -> torch.Tensor:
    """A standard normal float32 CPU tensor of ``shape``."""
    return torch.randn(shape, generator=generator(seed, *key), dtype=torch.float32)
