"""Sees that a run stands still, says where each rank is and which is the odd one, and ends the job.

Each rank writes its place to `<run_dir>/places/` every few seconds. When nothing has moved on any rank for
`train.stall_seconds`, every rank tells its own place, the first that lives tells all of them, and the
processes end with the exit code STALLED. All of it happens in threads beside the main one, which inside a
collective hears no signal.

A process that is stopped cannot end itself, and DeepSpeed's launcher takes 30 s to kill each. So the ranks
that live kill those of their own machine that give no sign of life. A launcher that passes on the code of the
rank that it saw end first may then give that of SIGKILL instead of STALLED.
"""

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from wan_ds.training import logs
from wan_ds.training.agreement import of_rank_0
from wan_ds.training.places import Heartbeat, Places, Process, file_name, read_heartbeat
from wan_ds.training.stall import Seen, is_stall, report

if TYPE_CHECKING:
    from wan_ds.training.loop import Loop

log = logging.getLogger(__name__)

STALLED = 75  # "temporary failure" in sysexits.h: the same command goes on from the newest checkpoint
SECONDS_TO_TELL = 3.0  # that the rank which tells has before the others end, and a launcher ends it
SECONDS_TO_END = 20.0  # after which a process ends even if what it tells cannot be written
LOOK_SILENCES = 4  # how many silences before the time-out a rank begins to read the others' places
FRAMES = 8  # of the main thread's stack in the log


class Watchdog:
    """Watches a loop for standing still.

    Args:
        run: the run's folder, which all ranks see.
        stall_seconds: without a move on any rank until the job ends; `places.PATIENCE` times as long where
            work may take long.
    """

    def __init__(self, run: Path, stall_seconds: float) -> None:
        self._run = run
        self._folder = run / "places"
        self._stall_seconds = stall_seconds
        self._silence = min(20.0, stall_seconds / 4)  # without a heartbeat until a rank counts as silent
        self._every = min(2.0, self._silence / 5)

    @contextmanager
    def watching(self, loop: "Loop") -> Iterator[None]:
        """Inside, the loop is watched. A collective at the start."""
        self._start = of_rank_0(self._forget_earlier)
        self._rank, self._ranks = loop.mesh.rank, loop.mesh.world_size
        self._places: Places = loop.places
        self._process = Process.own()
        self._clock = RunningClock(5 * self._every)
        self._place, self._moved = self._places.now, 0.0
        self._beats = 0
        self._has_warned = False
        self._heard: dict[int, tuple[Heartbeat, float]] = {}  # the last of each other rank, and when
        self._looks_since: float | None = None
        self._disk_answered = 0.0
        self._over = threading.Event()
        works = {"places": self._beat, "watchdog": self._watch}
        threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()]
        modules = [getattr(network, "engine", network).module for network in loop.networks.values()]
        with self._places.moved_by(modules):
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                self._over.set()
                for thread in threads:
                    thread.join(SECONDS_TO_TELL)
                self._leave()

    def _forget_earlier(self) -> str:
        """Remove what a killed start of the run left; the name of this one."""
        shutil.rmtree(self._folder, ignore_errors=True)
        return uuid.uuid4().hex

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            (self._folder / file_name(self._rank)).unlink(missing_ok=True)
            self._folder.rmdir()  # the last rank can

    # The thread that touches the disk, which may hang.

    def _beat(self) -> None:
        while True:
            try:
                self._beats += 1
                self._folder.mkdir(parents=True, exist_ok=True)
                self._heartbeat().write(self._folder)
            except OSError as error:  # no reason to end training
                if not self._has_warned:
                    log.warning("this rank's place could not be written: %s", error)
                self._has_warned = True
            if self._still >= self._limit - LOOK_SILENCES * self._silence:
                self._look()
            self._disk_answered = self._clock.seconds
            if self._over.wait(self._every):
                return

    def _look(self) -> None:
        if self._looks_since is None:
            self._looks_since = self._clock.seconds
        for rank in range(self._ranks):
            found = read_heartbeat(self._folder, rank, self._start) if rank != self._rank else None
            known = self._heard.get(rank)
            if found is not None and (known is None or found.beat != known[0].beat):
                self._heard[rank] = (found, self._clock.seconds)

    # The thread that watches, which touches nothing that may hang until it is sure.

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            now = self._clock.read()
            place = self._places.now
            if place is not self._place or _is_in_debugger():
                self._place, self._moved = place, now
            if self._still < self._limit:
                continue
            seen = [self._seen(rank) for rank in range(self._ranks)]
            if is_stall(seen, self._stall_seconds) and self._places.now is place:
                self._end_job(seen)

    @property
    def _still(self) -> float:
        return self._clock.seconds - self._moved

    @property
    def _limit(self) -> float:
        return self._stall_seconds * self._place.patience

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self._start, self._rank, self._process, self._beats, self._still, self._place)

    def _seen(self, rank: int) -> Seen:
        if rank == self._rank:
            return Seen(rank, self._heartbeat(), 0.0, is_silent=False)
        now = self._clock.seconds
        found, when = self._heard.get(rank, (None, self._looks_since or 0.0))
        patience = found.place.patience if found else 1.0
        return Seen(rank, found, now - when, now - when >= self._silence * patience)

    def _end_job(self, seen: list[Seen]) -> None:
        """Tell and end this process; does not return."""
        threading.Thread(target=_end_anyway, daemon=True).start()
        try:
            is_cut_off = self._clock.seconds - self._disk_answered >= self._silence
            log.error("%s; its main thread:\n%s", seen[self._rank], _stack())
            if self._rank == next(one.rank for one in seen if not one.is_silent):
                self._tell(report(seen, self._stall_seconds, STALLED, is_cut_off=is_cut_off))
            else:
                time.sleep(SECONDS_TO_TELL)
            for one in seen:
                if one.is_silent and not is_cut_off and one.heartbeat is not None:
                    _kill(one.heartbeat.process)
        finally:
            _end()

    def _tell(self, text: str) -> None:
        log.error(text)
        if self._rank != 0:  # which alone writes log.txt, and is silent
            logs.note(self._rank, self._run / "log.txt", text)


class RunningClock:
    """Seconds in which this process ran: while it was stopped, or its machine slept, no time passed.

    So a job that its scheduler suspends as a whole is not taken for one that stands still. Read often: more
    than ``most`` seconds between two readings count as ``most``.
    """

    def __init__(self, most: float) -> None:
        self.seconds = 0.0
        self._most = most
        self._last = time.monotonic()

    def read(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self._last, self._most)
        self._last = now
        return self.seconds


def _stack() -> str:
    """Where the main thread is, innermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    return "".join(traceback.format_list(traceback.extract_stack(frame)[-FRAMES:])) if frame else "gone"


def _is_in_debugger() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        if frame.f_globals.get("__name__") == "bdb":
            return True
        frame = frame.f_back
    return False


def _kill(process: Process) -> None:
    """End a process of this machine, if it still is the one that wrote the heartbeat."""
    if process.pid != os.getpid() and process.state not in ("", "?"):
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)


def _end_anyway() -> None:
    time.sleep(SECONDS_TO_END)
    _end()


def _end() -> None:
    """End this process and its workers, whatever its main thread does."""
    with contextlib.suppress(Exception):
        for worker in multiprocessing.active_children():  # deaf to all other requests
            worker.kill()
    os._exit(STALLED)
