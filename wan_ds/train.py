"""Train the experts of a Wan model.

deepspeed --num_gpus 2 scripts/train.py recipe=quickstart
"""

import os
from pathlib import Path

from wan_ds.config import Config, to_dict
from wan_ds.config.command_line import command
from wan_ds.training import logs, run_folder


def main(config: Config) -> int:
    """One run: begun, or continued from its newest checkpoint; 0, or 128 + the signal that stopped it."""
    rank = int(os.environ.get("RANK", "0"))
    logs.to_terminal(rank)
    run_folder.refuse_changes(Path(config.run_dir), to_dict(config))  # before the imports that take seconds

    from wan_ds.parallel.mesh import Mesh
    from wan_ds.training import parts, progress, run
    from wan_ds.training.checkpoint import refuse_misfit
    from wan_ds.training.engine import init_distributed

    folder = run.resume_point(config)
    if run.is_done(config, folder):
        run.log.info("%s is finished: %d steps; nothing to do", config.run_dir, config.train.steps)
        run.tell_launcher(config, rank)
        return 0
    parts.check_images(config)
    clips = parts.checked_clips(config)
    if config.evaluation.path is not None:
        parts.checked_clips(config, config.evaluation.path)
    routing = parts.routing_of(config)
    schedules = parts.schedules_of(config, routing)
    progress.evaluation_levels(config, routing)
    watchdog = run.watchdog_of(config)
    if folder is not None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        refuse_misfit(folder, world_size=world_size, experts=schedules, clips=clips)
    local, commit = parts.with_local_weights(config)
    parts.locate_weights(local, is_new=folder is None)
    if config.train.deterministic:
        run.make_deterministic()

    init_distributed()
    run.agree(folder, clips, commit)
    mesh = Mesh(config.parallelism.sp_size)
    with run.held(config, mesh):
        logs.to_file(mesh.rank, Path(config.run_dir) / "log.txt")
        run.say_what_was_found(config, folder)
        trackers = run.open_folder(config, mesh, commit)
        code = 1
        try:
            loop = run.build_loop(local, mesh, clips, routing, schedules, trackers, folder, config.model.path)
            with run.told(config, mesh.rank), watchdog.watching(loop):
                loop.run()
            code = 128 + loop.stopped_by if loop.stopped_by and not loop.is_finished else 0
        finally:
            trackers.close(code)
    if code == 0:
        run.tell_launcher(config, rank)
    return code


if __name__ == "__main__":
    command(main)
