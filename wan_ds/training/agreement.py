"""What one rank could not do, all ranks refuse together."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from wan_ds.errors import CheckpointError, ConfigError, DataError
from wan_ds.parallel.reduce import any_rank, host_group

_T = TypeVar("_T")


def agreed(part: Callable[[], _T]) -> _T:
    """What the part returns on this rank; a collective.

    Raises CheckpointError on every rank, with the first rank's words, if it failed on any, so that none waits
    in vain.
    """
    failure, result = None, None
    try:
        result = part()
    except Exception as error:  # whatever it is, the other ranks would wait for this one
        failure = error
    if any_rank(failure is not None):
        words: list[str | None] = [None] * dist.get_world_size()
        is_told = isinstance(failure, (OSError, RuntimeError, ConfigError, DataError))
        own = None if failure is None else str(failure) if is_told else repr(failure)
        dist.all_gather_object(words, own, group=host_group())
        raise CheckpointError(next(text for text in words if text is not None)) from failure
    return result


def of_rank_0(part: Callable[[], _T]) -> _T:
    """What the part returns on rank 0, on every rank; a collective. The others' parts are not called."""
    found: list = [part() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, group=host_group())
    return found[0]
