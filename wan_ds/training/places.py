"""Where each rank is: said by its main thread, and written to a file that the other ranks read.

The main thread only assigns an object; it never waits for a lock, a clock or a disk.
"""

import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from torch import nn

# In these phases, and in whatever a rank does for the first time (compiling, starting workers), nothing may
# move for PATIENCE times as long: one call writes a checkpoint of any size, or decodes and writes videos.
LONG_PHASES = ("saving", "writing samples")
PATIENCE = 3.0


@dataclass(frozen=True)
class Place:
    """Where a rank is. Each move makes a new object, so that a move to an equal place is one as well."""

    step: int = 0  # in progress or just done, from 1 as the log counts
    expert: str = ""
    phase: str = "starting"
    order: int = 0  # phases before it in this step
    clips: tuple[str, ...] = ()  # the slots it works on, and what they hold
    patience: float = PATIENCE  # how many times longer than usual nothing may move here

    def __str__(self) -> str:
        where = f"step {self.step}" if self.step else "before the first step"
        clips = f"slots {', '.join(self.clips)}" if self.clips else ""
        return ", ".join(filter(None, (where, self.expert, self.phase, clips)))


class Places:
    """This rank's place now; written by the main thread alone."""

    def __init__(self) -> None:
        self.now = Place()
        self._known: set[tuple[str, str]] = set()  # what this process has done once, by expert
        self._clips: dict[int, str] = {}

    def begin_step(self, step: int, expert: str, phase: str) -> None:
        """The first phase of a step, which counts from 1."""
        self._clips = {}
        self._enter(step, expert, phase, 0)

    def hold(self, clips: dict[int, str]) -> None:
        """This rank's clips of the step: their names by slot."""
        self._clips = clips

    def move(self, phase: str, slots: Sequence[int] = ()) -> None:
        """The next phase of the same step, or the same with other clips."""
        last = self.now
        self._enter(last.step, last.expert, phase, last.order + (phase != last.phase), slots)

    def _enter(self, step: int, expert: str, phase: str, order: int, slots: Sequence[int] = ()) -> None:
        last = self.now
        if (expert, phase) != (last.expert, last.phase):
            self._known.add((last.expert, last.phase))
        is_long = phase in LONG_PHASES or (expert, phase) not in self._known
        clips = tuple(f"{slot} ({self._clips[slot]})" if slot in self._clips else str(slot) for slot in slots)
        self.now = Place(step, expert, phase, order, clips, PATIENCE if is_long else 1.0)

    @contextmanager
    def moved_by(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, each forward of a module is a move: evaluation and sampling are many in one phase."""
        hooks = [module.register_forward_pre_hook(self._stay) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _stay(self, *_: object) -> None:
        self.now = replace(self.now)


@dataclass(frozen=True)
class Process:
    """A process that is told from all others, of other machines and of earlier times too."""

    host: str
    kernel: str  # this boot of this machine, and the container's numbers of processes
    pid: int
    born: str  # in ticks since the machine's start

    @classmethod
    def own(cls) -> "Process":
        return cls(socket.gethostname(), _kernel(), os.getpid(), _status(os.getpid())[1])

    @property
    def state(self) -> str:
        """What its machine says: a letter as `ps` shows it, "" if it is gone; "?" on another machine."""
        if self.kernel != _kernel() or not self.kernel:
            return "?"
        state, born = _status(self.pid)
        return state if born == self.born else ""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank's file says."""

    run: str  # the same for all ranks of one start of a run, so that nothing older is taken for it
    rank: int
    process: Process
    beat: int  # goes up while the process lives
    still: float  # seconds since its place last moved
    place: Place

    def write(self, folder: Path) -> None:
        """Whole or not at all; raises OSError."""
        beside = folder / f".{file_name(self.rank)}"
        beside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(beside, folder / file_name(self.rank))


def read_heartbeat(folder: Path, rank: int, run: str) -> Heartbeat | None:
    """What the rank wrote in this start of the run; None if there is nothing to read."""
    try:
        said = json.loads((folder / file_name(rank)).read_text(encoding="utf-8"))
        place = Place(**said["place"] | {"clips": tuple(said["place"]["clips"])})
        heartbeat = Heartbeat(**said | {"place": place, "process": Process(**said["process"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return heartbeat if heartbeat.run == run else None


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def _status(pid: int) -> tuple[str, str]:
    """State and time of birth from /proc; two empty texts if there is no such process."""
    try:
        # the name, in parentheses, may hold anything; 3rd and 22nd field by `man proc_pid_stat`
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return ("", "") if fields[0] in "ZX" else (fields[0], fields[19])


@lru_cache(maxsize=1)
def _kernel() -> str:
    """Empty where there is no /proc to tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
