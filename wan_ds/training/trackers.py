"""Where the numbers of a run go: `metrics.jsonl`, which is the truth, and wandb, which may fail without harm.

A record is one step's object: `step` and whatever was measured. Only global rank 0 has trackers.
"""

import json
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

Record = Mapping[str, float | int | str]


class Tracker(Protocol):
    """What `Trackers` asks of each of its members."""

    def write(self, records: Sequence[Record]) -> None: ...

    def cut_back(self, step: int) -> None: ...

    def media(self, step: int, paths: Mapping[str, Path]) -> None: ...

    def close(self, exit_code: int = 0) -> None: ...


class JsonLines:
    """A file with one JSON object per line and step."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, records: Sequence[Record]) -> None:
        """Appends the records; when it returns they are on the disk, else it raises `OSError`."""
        lines = "".join(_line(record) for record in records)
        try:
            # Opened each time: nothing is left half written in a buffer when a write fails.
            with open(self.path, "ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            steps = f"{records[0]['step']} to {records[-1]['step']}"
            raise OSError(
                error.errno,
                f"{error.strerror}: the metrics of steps {steps} cannot be written; free space or make it"
                " writable, then start the same command again, which resumes",
                str(self.path),
            ) from error

    def cut_back(self, step: int) -> None:
        """Drops the records after `step` and what a kill left of a line; the rest stays byte for byte.

        The file is replaced as a whole, so that a kill leaves the old one or the new one. -1 drops all.
        """
        if not self.path.exists():
            return
        old = self.path.read_bytes()
        records = [(line, _record(line)) for line in old.splitlines()]
        new = b"".join(line + b"\n" for line, record in records if record and record["step"] <= step)
        if new == old:
            return
        beside = self.path.with_name(self.path.name + ".tmp")
        with open(beside, "wb") as file:
            file.write(new)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path)

    def read(self) -> list[dict[str, Any]]:
        """The records that are in the file; none if there is no file yet."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        return [record for line in lines if (record := _record(line))]

    def media(self, step: int, paths: Mapping[str, Path]) -> None:
        """Nothing: the files lie in the run folder."""

    def close(self, exit_code: int = 0) -> None:
        """Nothing: every record is on the disk already."""


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


def _record(line: bytes) -> dict[str, Any] | None:
    """The line's object; None for a line that a kill or a power cut left torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "step" in record else None


@dataclass(frozen=True)
class WandbSettings:
    """Where in wandb a run belongs."""

    mode: str = "auto"  # online, offline, disabled; auto: WANDB_MODE, else online with a key, else offline
    project: str = "wan_ds"
    entity: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    name: str | None = None  # what is shown
    id: str | None = None  # null: WANDB_RUN_ID, which a sweep agent sets, else the run folder's own


@dataclass
class _Media:
    step: int
    paths: Mapping[str, Path] = field(default_factory=dict)


class Wandb:
    """One wandb run per run folder, written by a thread of its own; whatever happens there, training goes on.

    Everything that wandb does (import, start, log, finish) happens in the thread, so that no slow server or
    hanging call holds the other ranks up. The first failure, and a start that takes longer than
    `start_seconds`, is one warning, and from then on there is no wandb.

    wandb's own step grows by one per record and is never set, because wandb throws away what is logged for a
    step that it has passed. `step` is an ordinary value and the x-axis of every chart, but for
    `train/<expert>/*`, which has `train/<expert>/step`. After a resume the steps since the checkpoint are in
    wandb twice; `metrics.jsonl` has them once.

    A resumed run continues under its id, kept in `wandb/run_id.txt`. Offline, each start writes its
    own folder; `wandb sync wandb/offline-run-*` in the run folder uploads them in their order as one run.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: Mapping[str, Any],
        experts: Sequence[str],
        settings: WandbSettings,
        *,
        start_seconds: float = 90.0,
        finish_seconds: float = 120.0,
    ) -> None:
        self._run_dir = Path(run_dir).absolute()
        self._config = dict(config)
        self._experts = tuple(experts)
        self._settings = settings
        self._finish_seconds = finish_seconds
        self._start_seconds = start_seconds
        self._deadline = time.monotonic() + start_seconds
        # Bounded, so that a logging call that never returns does not fill the memory in a long run.
        self._records: queue.Queue[Record | _Media | int] = queue.Queue(maxsize=100_000)
        self._started = threading.Event()
        self._lost = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._defined: set[str] = set()
        # A daemon: it must not keep a process alive that has nothing else to do.
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, records: Sequence[Record]) -> None:
        """Hands the records to wandb's thread and returns at once."""
        for record in records:
            self._put(dict(record))

    def media(self, step: int, paths: Mapping[str, Path]) -> None:
        """Logs images and videos by name, from files, as a record of its own."""
        self._put(_Media(step, dict(paths)))

    def cut_back(self, step: int) -> None:
        """Nothing: what wandb has, it has."""

    def close(self, exit_code: int = 0) -> None:
        """Waits until everything is logged, but not for long; another code than 0 is a failed run."""
        if self._closed:
            return
        self._put(exit_code)
        self._closed = True
        if not self._lost.is_set() and not self._started.wait(max(0.0, self._deadline - time.monotonic())):
            self._lose(f"it did not start within {self._start_seconds:g} s")
        if not self._lost.is_set():
            self._thread.join(self._finish_seconds)
            if self._thread.is_alive():
                self._lose(f"it did not finish within {self._finish_seconds:g} s; `wandb sync` has the rest")

    def _put(self, item: Record | _Media | int) -> None:
        if self._closed or self._lost.is_set():
            return
        if not self._started.is_set() and time.monotonic() > self._deadline:
            self._lose(f"it did not start within {self._start_seconds:g} s")
            return
        try:
            self._records.put_nowait(item)
        except queue.Full:
            self._lose("it does not keep up")

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost.is_set():
                return
            self._lost.set()
        logger.warning("no wandb from here on: %s; the run goes on, metrics.jsonl has every number", reason)

    def _work(self) -> None:
        try:
            run = self._start()
            self._started.set()
            if self._lost.is_set():  # it came too late
                run.finish(exit_code=1)
                return
            while not isinstance(item := self._records.get(), int):
                if self._lost.is_set():
                    return
                self._log(run, item)
            run.finish(exit_code=item)
        # Whatever it is, a job of many GPUs does not stop for it.
        except Exception as error:
            self._lose(f"{type(error).__name__}: {error}")
        finally:
            self._started.set()

    def _start(self) -> Any:
        import wandb  # here, because an installation that cannot be imported is a failure like any other

        # wandb's own limits hold where ours cannot reach: in the hook that it leaves for the process's end.
        settings = wandb.Settings(
            console="off", silent=True, init_timeout=self._start_seconds, finish_timeout=self._finish_seconds
        )
        wandb.setup(settings)
        run = wandb.init(
            dir=self._run_dir,
            mode=self._mode(wandb),
            id=self._id(),
            resume="allow",
            project=self._settings.project,
            entity=self._settings.entity,
            group=self._settings.group,
            tags=list(self._settings.tags),
            name=self._settings.name,
            config=self._config,
            allow_val_change=True,  # a resumed run may have more steps, or save more often
            settings=settings,
        )
        run.define_metric("step")
        for expert in self._experts:
            run.define_metric(f"train/{expert}/step")
            run.define_metric(f"train/{expert}/*", step_metric=f"train/{expert}/step")
        if run.url:
            logger.info("wandb: %s", run.url)
        return run

    def _mode(self, wandb: Any) -> str:
        mode = self._settings.mode
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        return mode

    def _id(self) -> str:
        kept = self._run_dir / "wandb" / "run_id.txt"
        run_id = self._settings.id or os.environ.get("WANDB_RUN_ID")
        if not run_id:
            run_id = kept.read_text().strip() if kept.exists() else uuid.uuid4().hex[:8]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(run_id + "\n")
        return run_id

    def _log(self, run: Any, item: Record | _Media) -> None:
        if isinstance(item, _Media):
            import wandb

            kinds = {".mp4": lambda path: wandb.Video(path, format="mp4"), ".png": wandb.Image}
            shown = {name: kinds[Path(path).suffix](str(path)) for name, path in item.paths.items()}
            run.log({"step": item.step, **shown})
            return
        own_axis = tuple(f"train/{expert}/" for expert in self._experts)
        # By name and not by "*": of two patterns that match a name wandb does not say which one counts.
        for name in item.keys() - self._defined - {"step"}:
            self._defined.add(name)
            if not name.startswith(own_axis):
                run.define_metric(name, step_metric="step")
        run.log(dict(item))


class Trackers:
    """Several trackers as one; without any it does nothing, which is what every rank but the first has."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self.trackers = list(trackers)

    @classmethod
    def for_rank(
        cls,
        rank: int,
        run_dir: str | Path,
        config: Mapping[str, Any],
        experts: Sequence[str],
        settings: WandbSettings,
    ) -> "Trackers":
        """The run's trackers on global rank 0, an empty one elsewhere."""
        if rank != 0:
            return cls()
        trackers: list[Tracker] = [JsonLines(Path(run_dir) / "metrics.jsonl")]
        if settings.mode != "disabled":
            trackers.append(Wandb(run_dir, config, experts, settings))
        return cls(trackers)

    def write(self, records: Sequence[Record]) -> None:
        """Writes the records in order; none is no call."""
        if records:
            for tracker in self.trackers:
                tracker.write(records)

    def cut_back(self, step: int) -> None:
        """Makes the file end with `step`, for a run that resumes there; -1 empties it."""
        for tracker in self.trackers:
            tracker.cut_back(step)

    def media(self, step: int, paths: Mapping[str, Path]) -> None:
        """Shows images (.png) and videos (.mp4) by name where the tracker can."""
        for tracker in self.trackers:
            tracker.media(step, paths)

    def close(self, exit_code: int = 0) -> None:
        """Ends the trackers; `exit_code` is what the process will end with."""
        for tracker in self.trackers:
            tracker.close(exit_code)
