"""What a stall looks like from one rank: whether it is one, who is the odd one, and what to say of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from wan_ds.training.places import Heartbeat
from wan_ds.training.same_clips import named

MACHINE = (
    "Look at that rank's machine: was the process stopped or killed (dmesg), is its GPU lost (nvidia-smi), "
    "does the machine answer"
)
ADVICE = {
    "waiting for clips": "Look at the disk of data.path there, and at data.workers",
    "encoding": "Look at these clips, at the disk of data.path there, and at its GPU (nvidia-smi, dmesg)",
    "saving": "Look at the disk of run_dir",
    "writing samples": "Look at the disk of run_dir",
}
CUT_OFF = "The disk of run_dir does not answer this rank, so that it knows nothing new of the others"
STATES = {"": "has ended", "T": "is stopped", "t": "is held by a debugger", "D": "waits for a disk"}


@dataclass(frozen=True)
class Seen:
    """What one rank knows of a rank, itself too; by its own clock."""

    rank: int
    heartbeat: Heartbeat | None  # the last that it read; None: there never was one
    silent_seconds: float  # since that one
    is_silent: bool  # for so long that it counts as stopped or gone

    @property
    def still(self) -> float:
        """Seconds without a move."""
        return self.silent_seconds + (self.heartbeat.still if self.heartbeat else 0.0)

    def __str__(self) -> str:
        if self.heartbeat is None:
            return f"rank {self.rank}: no sign of life since this run began"
        who = f"rank {self.rank} on {self.heartbeat.process.host}"
        if not self.is_silent:
            return f"{who}: {self.heartbeat.place}; there for {self.still:.0f} s"
        state = self.heartbeat.process.state
        known = f"; its process {STATES.get(state, 'is alive')}" if state != "?" else ""
        # It may have moved on within the seconds between two heartbeats.
        return f"{who}: last seen at {self.heartbeat.place}, {self.silent_seconds:.0f} s ago{known}"


def is_stall(seen: Sequence[Seen], stall_seconds: float) -> bool:
    """Whether no rank moves: each is silent, or has been where it is for as long as it may be there."""
    return all(
        one.is_silent or (one.heartbeat and one.still >= stall_seconds * one.heartbeat.place.patience)
        for one in seen
    )


def odd_ranks(seen: Sequence[Seen]) -> list[int]:
    """Those that keep the others waiting; none where all are at one place.

    Silent ranks if there are any; else those that are not where most are; without a majority those that are
    furthest behind.
    """
    silent = [one.rank for one in seen if one.is_silent]
    if silent:
        return silent
    places = {one.rank: one.heartbeat.place for one in seen}
    keys = {rank: (place.step, place.order, place.expert, place.phase) for rank, place in places.items()}
    counts = Counter(keys.values())
    if len(counts) == 1:
        return []
    usual, count = counts.most_common(1)[0]
    if 2 * count > len(seen):
        return [rank for rank, key in keys.items() if key != usual]
    furthest = min(key[:2] for key in keys.values())
    return [rank for rank, key in keys.items() if key[:2] == furthest]


def report(seen: Sequence[Seen], stall_seconds: float, code: int, *, is_cut_off: bool = False) -> str:
    """For the log: what stands still, the odd rank, a line for each rank, and what to do.

    ``is_cut_off``: the disk did not answer, so that the silence of the others says nothing.
    """
    odd = [] if is_cut_off else odd_ranks(seen)
    verdict = CUT_OFF if is_cut_off else _verdict(seen, odd)
    advice = ADVICE["saving"] if is_cut_off else _advice(seen, odd)
    still = min(one.still for one in seen if not one.is_silent)
    lines = [
        f"training stands still: nothing has moved on any rank for {still:.0f} s "
        f"(train.stall_seconds={stall_seconds:g}). {verdict}",
        *(f"  {one}" for one in seen),
        f"{advice}; if it only takes so long, raise train.stall_seconds. This process ends with exit "
        f"code {code}; the same command goes on from the newest checkpoint, if there is one",
    ]
    return "\n".join(lines)


def _verdict(seen: Sequence[Seen], odd: list[int]) -> str:
    if len(seen) == 1:
        return "There is one rank"
    if not odd:
        return "All ranks are at the same place, so that none is the odd one"
    found = [one for one in seen if one.rank in odd]
    places = "; ".join(str(one.heartbeat.place) if one.heartbeat else "never seen" for one in found[:4])
    why = "no sign of life since" if found[0].is_silent else "not where the others are"
    return f"{'The odd rank is' if len(odd) == 1 else 'The odd ones are'} {named(odd)} ({places}): {why}"


def _advice(seen: Sequence[Seen], odd: list[int]) -> str:
    found = [one for one in seen if one.rank in odd or len(seen) == 1]
    if not found:
        return "Look at the network between the machines (NCCL_DEBUG=INFO makes it talk)"
    if found[0].is_silent or found[0].heartbeat is None:
        return MACHINE
    return ADVICE.get(found[0].heartbeat.place.phase, MACHINE)
