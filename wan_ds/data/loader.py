"""What each rank reads: the clips of its slots, step after step, decoded by worker processes.

The contents are a function of the dataset, the seed and the rank's place on the dp axis; workers only decide
who decodes and how far ahead.
"""

import atexit
import math
import signal
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess

import torch
from torch.utils.data import DataLoader, Dataset

from wan_ds.data.clips import Clip, decode_levels, to_pixels
from wan_ds.data.order import clips_of_step
from wan_ds.errors import DataError

STEPS_AHEAD = 2  # how many steps' clips the workers hold ready between them

# A launcher sends these to the whole process group; the training process still finishes its step, so workers
# live on.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Item:
    """One clip of a step as this rank reads it."""

    slot: int  # position in the step's global batch
    index: int  # of the clip in the dataset
    # float32 [3, F, H, W] in [-1, 1]; None if the clip was already read in this run and its latents are kept
    pixels: torch.Tensor | None


def slots_of_rank(global_batch_size: int, dp_rank: int, dp_size: int) -> range:
    """The rank's contiguous share of a step's slots; the first ranks hold one more where it does not divide.
    """
    share, longer = divmod(global_batch_size, dp_size)
    first = dp_rank * share + min(dp_rank, longer)
    return range(first, first + share + (dp_rank < longer))


class Loader:
    """Reads a rank's slots of each step; the same for any number of ``workers`` (0 decodes in this process).

    With ``keep_latents`` a clip is decoded the first time that this rank meets it in one pass of ``batches``;
    later its pixels are None, because the caller still holds its latents.
    """

    def __init__(  # noqa: PLR0913
        self,
        clips: Sequence[Clip],
        *,
        num_frames: int,
        fps: float,
        height: int,
        width: int,
        seed: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        workers: int,
        keep_latents: bool,
    ) -> None:
        if not clips:
            raise DataError("the dataset holds no clip; data.path names the folder with the videos")
        shape = {"num_frames": num_frames, "fps": fps, "height": height, "width": width}
        self._decoded = _Decoded([(clip.path, clip.start_seconds) for clip in clips], shape)
        self._seed = seed
        self._global_batch_size = global_batch_size
        self._slots = slots_of_rank(global_batch_size, dp_rank, dp_size)
        self._workers = workers
        self._keep_latents = keep_latents

    def batches(self, first_step: int, last_step: int) -> Generator[list[Item]]:
        """This rank's items of each step from ``first_step`` to ``last_step - 1``, slots in order.

        Raises ``DataError`` where the first clip that cannot be read is due. Closing the iterator ends its
        workers.
        """
        levels = self._read(first_step, last_step)
        try:
            for step in self._plan(first_step, last_step):
                yield [
                    Item(slot, index, to_pixels(_or_raise(next(levels))) if is_read else None)
                    for slot, index, is_read in step
                ]
        finally:
            levels.close()

    def _plan(self, first_step: int, last_step: int) -> Iterator[list[tuple[int, int, bool]]]:
        """For each step (slot, index of the clip, whether it is read), from the order alone."""
        seen: set[int] = set()
        for step in range(first_step, last_step):
            order = clips_of_step(step, self._global_batch_size, len(self._decoded), self._seed)
            planned = []
            for slot in self._slots:
                planned.append((slot, order[slot], order[slot] not in seen))
                if self._keep_latents:
                    seen.add(order[slot])
            yield planned

    def _read(self, first_step: int, last_step: int) -> Iterator[torch.Tensor | DataError]:
        """Levels of the planned clips that are read, in order."""
        wanted = _Indices(self, first_step, last_step)
        if self._workers == 0 or not self._slots:
            for index in wanted:
                yield self._decoded[index]
            return
        loader = DataLoader(
            self._decoded,
            sampler=wanted,
            batch_size=None,
            num_workers=self._workers,
            # Clean processes: a fork would copy the locks of NCCL's, gloo's and CUDA's threads as they stand.
            multiprocessing_context="spawn",
            prefetch_factor=max(2, math.ceil(STEPS_AHEAD * len(self._slots) / self._workers)),
            generator=torch.Generator(),  # else the global generator would be advanced
        )
        others = set(active_children())
        with _stop_signals_held():
            reading = iter(loader)
        # A process that dies of an error may still hold the pass, and its workers are deaf to a request to
        # end.
        at_exit = atexit.register(partial(_kill, set(active_children()) - others))
        try:
            yield from reading
        finally:
            atexit.unregister(at_exit)


class _Indices:
    """The indices that a pass reads, as an iterable that can be walked again."""

    def __init__(self, loader: Loader, first_step: int, last_step: int) -> None:
        self._walk = lambda: loader._plan(first_step, last_step)

    def __iter__(self) -> Iterator[int]:
        return (index for step in self._walk() for _, index, is_read in step if is_read)


class _Decoded(Dataset):
    """Levels of clip ``index``, or what is wrong with it: an error crosses processes whole only as a value.
    """

    def __init__(self, spans: list, shape: dict) -> None:
        self._spans = spans
        self._shape = shape

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> torch.Tensor | DataError:
        path, start_seconds = self._spans[index]
        try:
            return decode_levels(path, start_seconds=start_seconds, **self._shape)
        except DataError as error:
            return error


def _or_raise(levels: torch.Tensor | DataError) -> torch.Tensor:
    if isinstance(levels, DataError):
        raise levels
    return levels


def _kill(workers: set[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


@contextmanager
def _stop_signals_held() -> Iterator[None]:
    """Stop signals wait while workers start; the workers inherit the block for life, deaf from birth."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
