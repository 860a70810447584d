"""Variants of one computation in one run: timed in turns, in this process or in ranks of their own.

A machine's speed drifts, with its heat and with whatever else runs on it, by more than variants differ. So
they take turns, and what is compared is each turn with its neighbour: a ratio for every pair of turns.
"""

import multiprocessing
import os
import statistics
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from wan_ds.errors import TrainingError

START_SECONDS = 300.0  # for ranks to import, join and build
TURN_SECONDS = 1800.0  # for one turn of ranks
SECONDS_FOR_OTHERS = 1.0  # after a rank failed, to hear which one failed first


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    lower: float
    median: float
    upper: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value, the quartiles interpolated between the values."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Of each turn of one variant and the turn of the other beside it."""
    return [one / other for one, other in zip(numerators, denominators, strict=True)]


def in_turns(
    variants: Mapping[str, Callable[[], Any]], repeats: int, *, device: torch.device, title: str = ""
) -> dict[str, list[float]]:
    """Seconds of each variant's turns: after one warm-up of each, first, second, first, second, and so on.

    On a GPU a turn lasts until the GPU is through with it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    with tqdm(total=(repeats + 1) * len(variants), desc=title, unit="turn", disable=None) as bar:
        for repeat in range(repeats + 1):
            for name, turn in variants.items():
                synchronize(device)
                started = time.perf_counter()
                turn()
                synchronize(device)
                if repeat:
                    seconds[name].append(time.perf_counter() - started)
                bar.update()
    return seconds


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(turn: Callable[[], Any], device: torch.device) -> int:
    """The most memory that the call held at a time, beyond what was there before.

    On a GPU its allocator knows. Elsewhere it is the tensors that the call and its backward made, whole
    storages while they live: the same number every time, and blind to what a kernel takes for itself.
    """
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        turn()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveStorages() as live:
        turn()
    return live.peak


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages from the operator that made each to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        for leaf in tree_leaves((args, kwargs)):  # what comes in and is not known was there before
            if isinstance(leaf, Tensor):
                self._see(leaf, made_here=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, made_here=True)
        return result

    def _see(self, tensor: Tensor, made_here: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if made_here else 0
        self._now += self._sizes[key]
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


class Ranks:
    """``size`` processes, one world of ranks, that build something once and then wait for their turns.

    They start at once and are waited for in the first turn. Between turns they sleep at a pipe and take no
    time from others. Used as a context, which ends them.

    Args:
        name: what messages call them.
        build: a function that new processes can import, so of a module other than `__main__`; each rank
            calls it once, and what it returns in every turn. It finds the world in its environment, as under
            torchrun, and joins it.
        arguments: of ``build``, the same on every rank.
        threads: of each rank, for its products.

    Raises:
        TrainingError: in a turn, where a rank failed, with its traceback; or it died, or gave no answer in
            time. The others are ended with it.
    """

    def __init__(
        self,
        name: str,
        size: int,
        build: Callable[..., Callable[..., Any]],
        arguments: Mapping[str, Any],
        *,
        threads: int = 1,
        turn_seconds: float = TURN_SECONDS,
    ) -> None:
        self.name = name
        self._turn_seconds = turn_seconds
        # The ranks meet at a store of this process, so that its port is free for certain.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        spawn = multiprocessing.get_context("spawn")
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            seat = _Seat(rank, size, self._store.port, threads)
            process = spawn.Process(target=_serve, args=(seat, theirs, build, dict(arguments)), daemon=True)
            process.start()
            theirs.close()  # else a rank that died would not be seen
            self._processes.append(process)
            self._connections.append(ours)
        self._has_started = False

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def turn(self, *args: Any) -> list[Any]:
        """One call with these arguments on every rank at once; what each gave, by rank; no tensors."""
        if not self._has_started:
            self._answers(START_SECONDS)
            self._has_started = True
        for rank, connection in enumerate(self._connections):
            try:
                connection.send(args)
            except OSError:  # it died between turns; its end of the pipe says so below
                self._processes[rank].join(SECONDS_FOR_OTHERS)
        return self._answers(self._turn_seconds)

    def end(self) -> None:
        """End all ranks, also those in the middle of something."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _answers(self, seconds: float) -> list[Any]:
        try:
            return self._wait_for_all(seconds)
        except BaseException:
            self.end()
            raise

    def _wait_for_all(self, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: list[Any] = [None] * len(waiting)
        failures: dict[int, str] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                answers[rank], failure = self._receive(rank, connection)
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + SECONDS_FOR_OTHERS)
        if failures:
            told = "\n".join(f"{self.name}, rank {rank}: {failure}" for rank, failure in failures.items())
            raise TrainingError(told)
        if waiting:
            raise TrainingError(
                f"{self.name}: ranks {sorted(waiting.values())} of {len(answers)} gave no answer in"
                f" {seconds:g} s"
            )
        return answers

    def _receive(self, rank: int, connection: Connection) -> tuple[Any, str | None]:
        try:
            return connection.recv()
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(SECONDS_FOR_OTHERS)
            return None, f"died with exit code {process.exitcode}"


@dataclass(frozen=True)
class _Seat:
    """Which rank a process is, and of what world."""

    rank: int
    size: int
    port: int
    threads: int


def _serve(
    seat: _Seat, connection: Connection, build: Callable[..., Callable[..., Any]], arguments: dict[str, Any]
) -> None:
    """What a rank does: build, and then a turn for every message, until one fails or nobody asks any more."""
    try:
        _take(seat)
        turn = build(**arguments)
        connection.send((None, None))
        while True:
            try:
                args = connection.recv()
            except EOFError:
                return
            connection.send((turn(*args), None))
    except BaseException:
        connection.send((None, "\n" + traceback.format_exc()))


def _take(seat: _Seat) -> None:
    """Say where the rank is as torchrun does."""
    os.environ.update(
        RANK=str(seat.rank),
        LOCAL_RANK=str(seat.rank),
        WORLD_SIZE=str(seat.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(seat.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is there already
    )
    torch.set_num_threads(seat.threads)
