"""One run from its settings to its end."""

import fcntl
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from wan_ds.config import Config, to_dict
from wan_ds.data.clips import Clip
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.parallel.mesh import COLLECTIVE_TIMEOUT, Mesh
from wan_ds.parallel.reduce import any_rank, host_group
from wan_ds.training import callbacks, checkpoint, logs, networks, parts, progress, run_folder
from wan_ds.training.engine import device
from wan_ds.training.experts import Routing
from wan_ds.training.loop import Expert, Loop
from wan_ds.training.lr_schedule import Schedule
from wan_ds.training.precision import audit, audit_table
from wan_ds.training.same_clips import SameClips
from wan_ds.training.sources import refuse_other_base
from wan_ds.training.trackers import Trackers, WandbSettings
from wan_ds.training.watchdog import Watchdog

log = logging.getLogger(__name__)


def resume_point(config: Config) -> Path | None:
    """The checkpoint to go on from, None to begin; reads only.

    Raises CheckpointError if the one that was named is missing, incomplete or not this run's newest, or none
    of those found is whole; ConfigError if it was named in another run with other settings.
    """
    if config.resume == "never":
        return None
    run = Path(config.run_dir)
    folder = checkpoint.newest(run / "checkpoints")
    if config.resume != "auto":
        folder = named_checkpoint(config, run, newest=folder)
    return folder


def say_what_was_found(config: Config, folder: Path | None) -> None:
    """One loud line: a beginning, or a continuation."""
    if folder is None:
        log.info("======== new run in %s ========", config.run_dir)
    else:
        log.info("======== resuming %s after %s ========", config.run_dir, folder.name)


@contextmanager
def held(config: Config, mesh: Mesh) -> Iterator[None]:
    """Inside, no other job trains in the run's folder; raises ConfigError on every rank if one does."""
    path = Path(config.run_dir) / ".lock"
    with ExitStack() as stack:
        other, failure = "", ""
        if mesh.is_main:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("a+"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
            except BlockingIOError:
                file.seek(0)
                other = file.read() or "another process"
            except OSError as error:
                failure = str(error)
        if any_rank(bool(failure)):
            raise ConfigError(
                f"run_dir={config.run_dir}: {failure or 'rank 0 cannot write there'}; type another run_dir"
            )
        if any_rank(bool(other)):
            raise ConfigError(
                f"run_dir={config.run_dir}: {other or 'another job'} is training there; wait for it, "
                "stop it, or choose another run_name"
            )
        yield


@contextmanager
def told(config: Config, rank: int) -> Iterator[None]:
    """Inside, an error that ends training on this rank stands in log.txt as well."""
    try:
        yield
    except Exception as error:
        words = str(error).partition("\n")[0]
        lost = isinstance(error, RuntimeError) and re.search(r"[Cc]onnection|Broken pipe|Timed out", words)
        hint = "; another rank is gone or does not answer: see how it ended" if lost else ""
        text = f"training ends by {type(error).__name__}: {words}{hint}"
        logs.note(rank, Path(config.run_dir) / "log.txt", text)
        raise


def named_checkpoint(config: Config, run: Path, newest: Path | None) -> Path:
    """The checkpoint that ``resume`` names: of this run, or of another one with the same settings."""
    folder = checkpoint.find(run, config.resume)
    if newest is not None and checkpoint.read_state(newest).step > checkpoint.read_state(folder).step:
        raise CheckpointError(
            f"resume={config.resume}: {run} has later checkpoints, up to {newest.name}; leave resume out to "
            "go on from there, or move the later ones away to go back"
        )
    origin = folder.resolve().parents[1]
    run_folder.refuse_changes(origin, to_dict(config))
    if origin != run.resolve() and is_done(config, folder):
        raise CheckpointError(
            f"resume={config.resume}: that checkpoint has all of the {config.train.steps} steps already; "
            "raise train.steps to go on from it"
        )
    return folder


def agree(folder: Path | None, clips: list[Clip], model_commit: str | None) -> None:
    """Raise CheckpointError on every rank unless all found the same checkpoint, clips and model."""
    own = (folder.name if folder else "no checkpoint", checkpoint.dataset_of(clips), model_commit)
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, own, group=host_group())
    if len(set(found)) > 1:
        commits = sorted({str(view[2]) for view in found})
        if len(commits) > 1:
            raise CheckpointError(
                f"the ranks have different commits of the model ({', '.join(commits)}): its branch moved "
                "while they downloaded it; start again, or name one in model.revision"
            )
        views = "; ".join(f"rank {rank}: {view[0]}, {view[1]}" for rank, view in enumerate(found))
        raise CheckpointError(
            f"the ranks do not see the same run and clips ({views}); they need one file system"
        )


def is_done(config: Config, folder: Path | None) -> bool:
    """Whether the checkpoint is already where these settings end."""
    return folder is not None and checkpoint.read_state(folder).step >= config.train.steps


def watchdog_of(config: Config) -> Watchdog:
    """What ends a job that stands still; raises ConfigError if the collectives would give up before it."""
    seconds, limit = config.train.stall_seconds, COLLECTIVE_TIMEOUT.total_seconds()
    if seconds >= limit:
        raise ConfigError(
            f"train.stall_seconds={seconds:g}: must be less than the {limit:g} s after which the collectives "
            "give up and name no rank; choose less, or set the environment's DEEPSPEED_TIMEOUT, in minutes, "
            f"to more than {seconds / 60:g}"
        )
    return Watchdog(Path(config.run_dir), seconds)


def open_folder(config: Config, mesh: Mesh, model_commit: str | None) -> Trackers:
    """Write what the run is made of, on rank 0, and open its trackers."""
    run, described = Path(config.run_dir), to_dict(config)
    if mesh.is_main:
        run_folder.write(run, described, model_commit=model_commit)
    tracker = config.tracker
    return Trackers.for_rank(
        mesh.rank,
        run,
        described,
        list(config.train.experts or config.model.experts),
        WandbSettings(
            mode=tracker.mode.name,
            project=tracker.project,
            entity=tracker.entity,
            group=tracker.group,
            tags=tracker.tags,
            name=config.run_name,
        ),
    )


def build_loop(  # noqa: PLR0913 - what train.py lists
    config: Config,
    mesh: Mesh,
    clips: list[Clip],
    routing: Routing,
    schedules: dict[str, Schedule],
    trackers: Trackers,
    folder: Path | None,
    base: str | None,
) -> Loop:
    """Read the weights, shard them, and put the checkpoint's state in; ``base``: what was typed as
    model.path."""
    encoders = parts.load_encoders(config, device())
    encoded = parts.encoded_of(config, clips, encoders, keep=config.data.keep_latents)
    experts = {
        name: networks.build_expert(
            config, name, routing.intervals[name], schedule, mesh, is_new=folder is None, base=base
        )
        for name, schedule in schedules.items()
    }
    frozen = {name: networks.build_frozen(config, name, mesh) for name in config.train.frozen_experts}
    first_step = 0 if folder is None else restore(experts, folder)
    for name, network in (experts | frozen).items():
        told = audit_table(audit(network.engine if isinstance(network, Expert) else network))
        log.info("%s: its dtypes\n%s", name, told)
    log.info(
        "%d of %d ranks share each clip, recompute=%s, attention=%s",
        mesh.sp_size,
        mesh.world_size,
        config.parallelism.recompute.name,
        config.model.attention.name,
    )
    logger = callbacks.Log(trackers, config.tracker.log_every_steps, mesh.is_main)
    saving, train = config.checkpoint, config.train
    objective = parts.objective_of(config, routing, networks.tokens_of(config, mesh))
    return Loop(
        experts=experts,
        routing=routing,
        objective=objective,
        batches=parts.loader_of(config, clips, mesh).batches(first_step, train.steps),
        encoded=encoded,
        mesh=mesh,
        steps=train.steps,
        micro_batch_size=train.micro_batch_size,
        elements_per_token=elements_per_token(config),
        caption_dropout=train.caption_dropout,
        max_skipped_in_a_row=train.max_skipped_in_a_row,
        same_clips=SameClips(mesh, objective, experts, train.caption_dropout, train.check_every_steps),
        step=first_step,
        frozen=frozen,
        callbacks=[
            callbacks.StopOnSignal(),
            callbacks.Memory(),
            *progress.validation(config, encoders, encoded, routing),
            *progress.sampling(config, encoders, encoded, trackers),
            logger,
            callbacks.Save(Path(config.run_dir), saving.save_every_steps, saving.keep_last, logger.flush),
        ],
    )


def restore(experts: dict[str, Expert], folder: Path) -> int:
    """Put the checkpoint's state into the experts; the number of finished steps.

    Raises CheckpointError on every rank if it does not hold what they train, or they stand on another base.
    """
    checkpoint.warn_of_owner(folder)
    for name, counts in checkpoint.read_state(folder).experts.items():
        expert = experts[name]
        refuse_other_base(f"{expert.base_source}, the base of {name},", expert.base, counts.base)
    state = checkpoint.load(folder, experts)
    for name, counts in state.experts.items():
        expert = experts[name]
        expert.steps, expert.skipped, expert.clips = counts.steps, counts.skipped, counts.clips
        expert.skipped_in_a_row = counts.skipped_in_a_row
    return state.step


def elements_per_token(config: Config) -> int:
    transformer = config.model.transformer
    return transformer["out_channels"] * torch.Size(transformer.get("patch_size", (1, 2, 2))).numel()


def tell_launcher(config: Config, rank: int) -> None:
    """Write where the finished run is to the file that ``launch/local.sh`` names: its exit code cannot be
    trusted.

    DeepSpeed's launcher exits 0 when its own child was killed by a signal.
    """
    told = os.environ.get("WAN_DS_FINISHED")
    if told and rank == 0:
        Path(told).write_text(config.run_dir, encoding="utf-8")


def make_deterministic() -> None:
    """Bit-equal runs on a GPU as well, at some cost in speed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
