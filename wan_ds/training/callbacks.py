"""What happens beside training: stopping, validating, sampling, logging, saving. In that order after each
step."""

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from wan_ds.errors import TrainingError
from wan_ds.parallel.reduce import any_rank, host_group
from wan_ds.training import checkpoint
from wan_ds.training.checkpoint import ExpertState, TrainerState
from wan_ds.training.loop import Callback, Loop
from wan_ds.training.trackers import Trackers

log = logging.getLogger(__name__)

CLIPS_SAMPLED = 4  # captions of the first clips, when sampling while training without prompts of its own


def is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


class StopOnSignal(Callback):
    """The first SIGINT or SIGTERM on any rank ends training after the step in progress, on all ranks
    together.

    Later ones are ignored while the run saves: launchers send them more than once.
    """

    doing = "asking for signals"
    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._received = 0
        self._before: dict[int, Any] = {}

    def before_training(self, loop: Loop) -> None:  # noqa: ARG002
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if not self._received:
            self._received = number

    def after_step(self, loop: Loop) -> None:
        received = torch.tensor([self._received])  # on the host: nothing waits for a device
        dist.all_reduce(received, op=dist.ReduceOp.MAX, group=host_group())
        (number,) = received.tolist()
        if number:
            log.warning("%s: stopping after step %d", signal.Signals(number).name, loop.step)
            loop.stopped_by = number

    def after_training(self, loop: Loop) -> None:  # noqa: ARG002
        """Signals stay noted and ignored until the process ends: it is ending."""


class Log(Callback):
    """Writes the steps' numbers in batches, and shows how far training is."""

    doing = "logging"

    def __init__(self, trackers: Trackers, every_steps: int, is_main: bool) -> None:
        self._trackers = trackers
        self._every_steps = every_steps
        self._is_main = is_main
        self._bar: tqdm | None = None

    def before_training(self, loop: Loop) -> None:
        self._trackers.cut_back(loop.step if loop.step else -1)
        if self._is_main and sys.stderr.isatty():
            self._bar = tqdm(total=loop.steps, initial=loop.step, unit="step", dynamic_ncols=True)

    def after_step(self, loop: Loop) -> None:
        if self._bar is not None:
            self._bar.update()
        if is_due(loop.step, self._every_steps):
            self.flush(loop)

    def after_training(self, loop: Loop) -> None:
        failure = self._write(loop)  # alone: an error may have brought this rank here and no other
        if failure is not None:
            log.error(failure)
        if self._bar is not None:
            self._bar.close()

    def flush(self, loop: Loop) -> None:
        """Read the pending numbers from the device and hand them to the trackers; a collective.

        Raises TrainingError on every rank if rank 0 cannot write them.
        """
        failure = self._write(loop)
        if any_rank(failure is not None):
            raise TrainingError(failure or "rank 0 could not write metrics.jsonl")

    def _write(self, loop: Loop) -> str | None:
        """Write what is pending; why it could not be."""
        records = loop.meters.flush()
        try:
            self._trackers.write(records)
        except OSError as error:
            return str(error)
        if self._is_main and records and "expert" in records[-1]:
            self._show(records[-1], loop.steps)
        return None

    def _show(self, record: dict, steps: int) -> None:
        expert = record["expert"]
        loss = record.get("train/loss")
        text = f"{expert} loss {'not finite' if loss is None else f'{loss:.4f}'}"
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            seconds = record["speed/step_seconds"]
            log.info("step %d of %d: %s, %.2f s", record["step"], steps, text, seconds)


class Save(Callback):
    """Checkpoints every N steps, at the end, and when a signal ends the run."""

    doing = "saving"

    def __init__(
        self, run: Path, every_steps: int | None, keep_last: int, flush: Callable[[Loop], None]
    ) -> None:
        self._checkpoints = run / "checkpoints"
        self._every_steps = every_steps
        self._keep_last = keep_last
        self._flush = flush

    def after_step(self, loop: Loop) -> None:
        if is_due(loop.step, self._every_steps) or loop.is_finished or loop.stopped_by is not None:
            self.save(loop)

    def save(self, loop: Loop) -> None:
        """The numbers up to this step are on disk before the checkpoint that counts on them."""
        self._flush(loop)
        experts = {
            name: ExpertState(
                steps=expert.steps,
                skipped=expert.skipped,
                skipped_in_a_row=expert.skipped_in_a_row,
                clips=expert.clips,
                share=loop.routing.shares[name],
                base=expert.base,
            )
            for name, expert in loop.experts.items()
        }
        dataset = checkpoint.dataset_of(loop.encoded.clips)
        state = TrainerState(loop.step, loop.steps, loop.mesh.world_size, dataset, experts)
        folder = checkpoint.save(self._checkpoints, state, loop.experts, self._keep_last)
        log.info("saved %s", folder)


class Memory(Callback):
    """Peak memory of this rank: the GPU's, or the process's where there is none."""

    def after_step(self, loop: Loop) -> None:
        loop.meters.add(loop.step, {"memory/peak_gb": _peak_bytes() / 1e9})


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Periodic(Callback):
    """Calls ``action(loop)`` before training if asked, and every N steps; ``doing`` says what that is."""

    def __init__(
        self, doing: str, action: Callable[[Loop], None], every_steps: int | None, at_start: bool
    ) -> None:
        self.doing = doing
        self._action = action
        self._every_steps = every_steps
        self._at_start = at_start

    def before_training(self, loop: Loop) -> None:
        if self._at_start and loop.step == 0:
            self._action(loop)

    def after_step(self, loop: Loop) -> None:
        if is_due(loop.step, self._every_steps):
            self._action(loop)
