"""A world of gloo ranks that stays alive between tests: importing DeepSpeed costs more than most tests.

    def losses(world_size):                      # a module-level function: every rank imports it by its name
        return torch.distributed.get_rank()

    def test_something(world2):
        assert world2.run(losses, 2) == [0, 1]

An exception on a rank is raised again in the test, from that rank's traceback. After an exception or a
time-out all ranks are killed, and the next run starts new ones: a deadlock is a failed test, not a stuck
suite.
"""

import gc
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

START_SECONDS = 180.0
COLLECTIVE_SECONDS = 120.0


class RankTraceback(Exception):
    """The traceback that a rank sent, as text: the cause of what the test sees."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


class RankDied(RuntimeError):
    """A rank's process ended without an answer."""


class World:
    """``size`` processes with one gloo group and DeepSpeed's backend on it, started at the first run."""

    def __init__(self, size: int, timeout: float = 120.0):
        self.size = size
        self.timeout = timeout
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank and return the results by rank.

        The ranks have the test's working directory and torch's seed 0; nothing else is reset between runs.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((sys.path, os.getcwd()))  # first, so that the rank can import what the call names
        call = pickle.dumps((function, args, kwargs))
        try:
            for connection in self._connections:
                connection.send_bytes(job)
                connection.send_bytes(call)
            return self._answers(timeout or self.timeout)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End all ranks at once; the next run starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        port = _free_port()
        for rank in range(self.size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, self.size, port, theirs), daemon=True)
            process.start()
            theirs.close()  # else a rank that died would not be seen
            self._processes.append(process)
            self._connections.append(ours)
        try:
            self._answers(START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def _answers(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        results: list[Any] = [None] * self.size
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(
                    f"ranks {sorted(waiting.values())} of {self.size} gave no answer in {timeout:g} s"
                )
            failures: list[BaseException] = []
            for connection in sorted(ready, key=waiting.__getitem__):
                rank = waiting.pop(connection)
                try:
                    results[rank] = self._answer(rank, connection)
                except BaseException as failure:
                    failures.append(failure)
            if failures:  # a dead rank makes the others' collectives fail: it is the cause
                raise max(failures, key=lambda failure: isinstance(failure, RankDied))
        return results

    def _answer(self, rank: int, connection: Connection) -> Any:
        try:
            result, exception, text = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            raise RankDied(f"rank {rank} died with exit code {self._processes[rank].exitcode}") from None
        if text is not None:
            raise exception from RankTraceback(f"on rank {rank} of {self.size}:\n{text}")
        return result


def _serve(rank: int, size: int, port: int, connection: Connection) -> None:
    """What a rank does: join the group, then answer calls until the test process is gone."""
    connection.send_bytes(_result(_join, (rank, size, port), {}))
    while True:
        try:
            sys.path[:], folder = pickle.loads(connection.recv_bytes())
            call = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_result(_call, (folder, call), {}))


def _result(function: Callable, args: tuple, kwargs: dict) -> bytes:
    """The pickled triple (result, exception, traceback); shared memory would die with the rank."""
    try:
        return pickle.dumps((function(*args, **kwargs), None, None))
    except BaseException as exception:  # the test decides what it means, even of SystemExit
        text = traceback.format_exc()
        try:
            answer = pickle.dumps((None, exception, text))
            pickle.loads(answer)  # some exceptions can be written and not read
        except Exception:
            answer = pickle.dumps((None, RuntimeError(repr(exception)), text))
        return answer


def _join(rank: int, size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
    )
    os.environ.pop("LOCAL_SIZE", None)
    # Only now, because torch reads the number of threads, and DeepSpeed the accelerator, on import.
    from datetime import timedelta

    import deepspeed
    import torch

    torch.set_num_threads(1)
    # Else the first start on a machine compiles a kernel that only inference uses: 35 s, or a crash where
    # there is no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="gloo", verbose=False, timeout=timedelta(seconds=COLLECTIVE_SECONDS)
    )
    torch.distributed.barrier()


def _call(folder: str, call: bytes) -> Any:
    import torch

    os.chdir(folder)
    torch.manual_seed(0)
    torch.nn.functional.linear = torch._C._nn.linear  # DeepSpeed's memory_efficient_linear puts its own there
    function, args, kwargs = pickle.loads(call)
    # DeepSpeed collects garbage in every step: what imports and earlier calls left need not be looked at.
    gc.collect()
    gc.freeze()
    return function(*args, **kwargs)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
