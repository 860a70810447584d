"""Which clip stands where: a pure function of the seed and the position in the run.

Position p of a run is slot ``p % global_batch_size`` of step ``p // global_batch_size``, whatever the ranks,
workers and micro-batches. Each epoch is a fresh permutation of all clips, and a step may straddle two epochs,
so every clip comes exactly once per epoch and none is dropped or padded.
"""

from functools import lru_cache

import numpy as np
import torch

from wan_ds.streams import generator


def clip_at(position: int, num_clips: int, seed: int) -> int:
    """Index of the clip at ``position`` (from 0) of the run's global order."""
    epoch, place = divmod(position, num_clips)
    return int(_permutation(epoch, num_clips, seed)[place])


def clips_of_step(step: int, global_batch_size: int, num_clips: int, seed: int) -> list[int]:
    """Clip indices of the slots of ``step`` (from 0), in order."""
    first = step * global_batch_size
    return [clip_at(position, num_clips, seed) for position in range(first, first + global_batch_size)]


@lru_cache(maxsize=4)  # a step may straddle two epochs; two more for a second dataset in the process
def _permutation(epoch: int, num_clips: int, seed: int) -> np.ndarray:
    return torch.randperm(num_clips, generator=generator(seed, "order", epoch)).numpy()
