"""Checkpoints: folders that are either complete or absent.

    checkpoints/step_00000100/<expert>/...     what trains: the engine's files of every rank, and where there
                                               is one the ready adapter, and averaged weights of every rank
    checkpoints/step_00000100/trainer_state.json
    checkpoints/step_00000100/COMPLETE         every file above with its size; written last
    checkpoints/latest                         the newest folder's name

A folder is written beside its place, checked by all ranks, renamed, and only then named in ``latest``.
Whatever moment a run is killed at, the newest complete folder is whole. Loading walks the components that
saving walks, the experts that train; frozen tensors are in no checkpoint, and are read anew from where the
run started."""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from wan_ds.data.clips import Clip
from wan_ds.errors import CheckpointError
from wan_ds.models.weights import Source
from wan_ds.parallel.reduce import any_rank

if TYPE_CHECKING:  # importing it takes seconds, and whoever only reads folders need not wait
    from wan_ds.training.components import Component

log = logging.getLogger(__name__)

COMPLETE = "COMPLETE"
STATE = "trainer_state.json"
_STEP = re.compile(r"step_(\d{8})")
_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class ExpertState:
    """One expert's counts."""

    steps: int
    skipped: int
    skipped_in_a_row: int
    clips: int
    share: float  # expected share of the steps
    base: str | None = None  # what an adapter stands on, see `wan_ds.training.sources.Fingerprint`


@dataclass(frozen=True)
class TrainerState:
    """What a run has to know beside the engines' own state; draws and data order are functions of seed and
    step."""

    step: int
    planned_steps: int
    world_size: int
    dataset: str  # what the order of clips stands on, see `dataset_of`
    experts: dict[str, ExpertState]

    @property
    def is_finished(self) -> bool:
        return self.step >= self.planned_steps


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def save(
    checkpoints: Path, state: TrainerState, components: Mapping[str, "Component"], keep_last: int
) -> Path:
    """Write a checkpoint; a collective. Raises CheckpointError on every rank if any could not do its part."""
    from wan_ds.training.components import save_component

    target = checkpoints / folder_name(state.step)
    unfinished = target.with_name(target.name + _UNFINISHED)
    is_main = dist.get_rank() == 0

    def make_room() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def finish() -> None:
        seal(unfinished, state)
        publish(unfinished, target)
        point_latest(checkpoints, target.name)

    try:
        together(make_room if is_main else None, target)
        for name, component in components.items():
            save_component(
                unfinished / name, component, state.experts[name].steps, partial(together, target=target)
            )
        together(finish if is_main else None, target)
    except CheckpointError:
        if is_main:
            shutil.rmtree(unfinished, ignore_errors=True)  # it may be what fills the disk
        raise
    if is_main:
        remove_old(checkpoints, keep_last)
    return target


def together(part: Callable[[], None] | None, target: Path) -> None:
    """Do this rank's part; raises CheckpointError on every rank if any failed, so that none waits in vain."""
    failure = None
    try:
        if part is not None:
            part()
    except Exception as error:  # whatever it is, the other ranks would wait for this one
        failure = f"{type(error).__name__}: {error}"
    if any_rank(failure is not None):
        reason = failure or "another rank could not write its part"
        free = shutil.disk_usage(target.parent.parent).free // 2**20
        raise CheckpointError(
            f"{target} was not written: {reason}; {free} MB are free there; older checkpoints are "
            "as they were"
        )


def seal(folder: Path, state: TrainerState) -> None:
    """Write the trainer's state, then the marker that lists every file with its size, and wait for the
    disk."""
    (folder / STATE).write_text(json.dumps(asdict(state) | {"finished": state.is_finished}, indent=2))
    sizes = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    with (folder / COMPLETE).open("w") as file:
        json.dump(sizes, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def publish(unfinished: Path, target: Path) -> None:
    """Give the folder its name; one of that name, from a step that is run again, makes way only now."""
    former = target.with_name(f"{target.name}.former{_UNFINISHED}")
    if target.exists():
        os.replace(target, former)
    os.replace(unfinished, target)
    _sync_folder(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def point_latest(checkpoints: Path, name: str) -> None:
    """Replace ``latest`` in one move."""
    temporary = checkpoints / "latest.unfinished"
    with temporary.open("w") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, checkpoints / "latest")
    _sync_folder(checkpoints)


def remove_old(checkpoints: Path, keep_last: int) -> None:
    """Delete all but the newest ``keep_last`` complete folders, and what killed saves left.

    Incomplete ones do not count, so that the one just written always stays. What cannot be deleted is a
    warning: the new checkpoint is there.
    """
    complete = [folder for folder in _folders(checkpoints) if fault(folder) is None]
    for folder in [*complete[:-keep_last], *checkpoints.glob(f"step_*{_UNFINISHED}")]:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            log.warning("the old checkpoint %s could not be deleted: %s", folder, error)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(checkpoints: Path) -> list[Path]:
    """The step folders, oldest first."""
    if not checkpoints.is_dir():
        return []
    return sorted(path for path in checkpoints.iterdir() if path.is_dir() and _STEP.fullmatch(path.name))


def fault(folder: Path) -> str | None:
    """Why the folder is no checkpoint to rely on; None if every file is there in its full size."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        sizes = json.loads((folder / COMPLETE).read_text())
    except (OSError, ValueError):
        return f"it has no readable {COMPLETE} marker, so its save was never finished"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not the {size} that were written"
    return None


def newest(checkpoints: Path) -> Path | None:
    """The newest complete folder, whatever ``latest`` says; None if there is no step folder at all.

    Incomplete ones are named in the log. Raises CheckpointError if there are step folders but not one is
    complete: starting anew beside them must be somebody's decision."""
    faults = []
    for folder in reversed(_folders(checkpoints)):
        reason = fault(folder)
        if reason is None:
            return folder
        faults.append(f"{folder}: {reason}")
        log.warning("passing over the checkpoint %s: %s", folder, reason)
    if faults:
        raise CheckpointError(
            "no checkpoint of this run is complete; move them away to start anew, or choose another "
            "run_name. " + "; ".join(faults)
        )
    return None


def find(run: Path, which: str) -> Path:
    """The checkpoint ``latest`` or ``step_<8 digits>`` of a run, or the folder itself; raises
    CheckpointError."""
    checkpoints = run / "checkpoints"
    if which == "latest":
        folder = newest(checkpoints)
        if folder is None:
            raise CheckpointError(f"{run} has no checkpoint yet: {checkpoints} holds no step folder")
        return folder
    folder = checkpoints / which if _STEP.fullmatch(which) else Path(which)
    reason = fault(folder)
    if reason is not None:
        there = ", ".join(path.name for path in _folders(checkpoints)) or "none"
        raise CheckpointError(f"the checkpoint {folder} cannot be used: {reason} (the run holds: {there})")
    return folder


def read_state(folder: Path) -> TrainerState:
    """The trainer's state of a complete checkpoint."""
    content = json.loads((folder / STATE).read_text())
    experts = {name: ExpertState(**expert) for name, expert in content["experts"].items()}
    keys = ("step", "planned_steps", "world_size", "dataset")
    return TrainerState(*(content[key] for key in keys), experts)


def dataset_of(clips: Sequence[Clip]) -> str:
    """Count and hash of the clips: with another set the same step would train on other clips."""
    listing = repr([(clip.key, clip.start_seconds, clip.caption) for clip in clips])
    return f"{len(clips)} clips, {hashlib.blake2b(listing.encode(), digest_size=8).hexdigest()}"


def warn_of_owner(folder: Path) -> None:
    """Say so before reading a folder that another user owns: DeepSpeed's files are pickles."""
    owner = folder.stat().st_uid
    if owner != os.getuid():
        log.warning(
            "the checkpoint %s belongs to another user (id %d); its files are read as tensors and plain "
            "containers only, but make sure that you trust them",
            folder,
            owner,
        )


def refuse_misfit(folder: Path, *, world_size: int, experts: Collection[str], clips: Sequence[Clip]) -> None:
    """Raise CheckpointError if this run cannot go on from the checkpoint; reads the trainer's state alone."""
    state = read_state(folder)
    if state.world_size != world_size:
        raise CheckpointError(
            f"{folder} was written by a world of {state.world_size} (ranks) and this is one of {world_size}; "
            f"resume with {state.world_size}, or start a new run"
        )
    if set(state.experts) != set(experts):
        raise CheckpointError(
            f"{folder} holds {', '.join(state.experts)} and this run trains {', '.join(experts)}; "
            "set train.experts alike"
        )
    dataset = dataset_of(clips)
    if state.dataset != dataset:
        raise CheckpointError(
            f"{folder} was trained on other clips ({state.dataset}) than are there now ({dataset}): files or "
            "captions were added, removed or changed; restore them, or start a new run"
        )


def load(folder: Path, components: Mapping[str, "Component"]) -> TrainerState:
    """Put a checkpoint that fits into fresh engines; a collective.

    Raises CheckpointError on every rank unless the files hold what trains, all of it and nothing else.
    """
    from wan_ds.training.components import load_component

    for name, component in components.items():
        load_component(folder / name, component)
    return read_state(folder)


def checkpoint_source(folder: Path, expert: str) -> Source:
    """An expert's tensors by name, in one process, from a checkpoint of any world size and ZeRO stage.

    What trained is float32. Raises CheckpointError if the checkpoint has no such expert or is not whole.
    """
    from wan_ds.training.zero_files import ZeroFiles  # it imports DeepSpeed

    warn_of_owner(folder)
    if not (folder / expert).is_dir():
        there = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise CheckpointError(f"{folder} holds no expert {expert}; it holds {there}")
    return ZeroFiles(folder / expert)
