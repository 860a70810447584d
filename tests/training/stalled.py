"""Ranks of tiny runs that stand still, each in its way; a script, started by test_watchdog.py.

    python tests/training/stalled.py folder stall_seconds pause_seconds healthy_steps

What costs is importing torch and DeepSpeed, so this process imports and then forks the two ranks of every
run, all runs at once. Writes the ranks' exit codes to folder/codes.json, and what each run says to
folder/<run>/rank_<n>.err."""

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch

from tests.training import tiny
from wan_ds.training import logs, places
from wan_ds.training.same_clips import SameClips
from wan_ds.training.watchdog import Watchdog

RANKS = 2
AT_STEP = 4  # all its phases are known by then


def sleep_in_encoding(loop, rank: int) -> None:
    encode = loop.encoded.clip

    def slow(*args):
        if rank == 1 and loop.step + 1 == AT_STEP:
            time.sleep(600)
        return encode(*args)

    loop.encoded.clip = slow


def stop_rank_0(loop, rank: int) -> None:
    """In a backward, where rank 1 waits inside a collective."""
    for expert in loop.experts.values():
        backward = expert.engine.backward

        def stopping(share, backward=backward):
            if rank == 0 and loop.step + 1 == AT_STEP:
                time.sleep(1)  # a few heartbeats
                os.kill(os.getpid(), signal.SIGSTOP)
            backward(share)

        expert.engine.backward = stopping


def lose_the_disk(loop, rank: int) -> None:
    """Heartbeats can no longer be written, and the run waits for its clips."""
    write = places.Heartbeat.write

    def hanging(self, folder):
        if loop.step + 1 == AT_STEP:
            time.sleep(600)
        write(self, folder)

    def waiting(batches):
        for items in batches:
            if loop.step + 1 == AT_STEP:
                time.sleep(600)
            yield items

    places.Heartbeat.write = hanging
    loop.batches = waiting(loop.batches)


def pause(loop, rank: int) -> None:
    """A healthy run, one of whose steps takes long."""
    encode = loop.encoded.clip

    def slow(*args):
        if rank == 1 and loop.step + 1 == AT_STEP:
            loop.encoded.clip = encode
            time.sleep(float(sys.argv[3]))
        return encode(*args)

    loop.encoded.clip = slow


def leftover(run: Path) -> None:
    """What a killed start of the same run left: rank 1 far behind, and a rank that no longer is."""
    (run / "places").mkdir(parents=True)
    old = places.Heartbeat("earlier", 1, places.Process.own(), 1000, 1e6, places.Place(patience=1.0))
    old.write(run / "places")
    replace(old, rank=7).write(run / "places")


RUNS = {
    "sleeps in encoding": sleep_in_encoding,
    "rank 0 is stopped": stop_rank_0,
    "no disk": lose_the_disk,
    "healthy": pause,
}


def rank_main(run: Path, arrange, rank: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False, timeout=timedelta(seconds=300))
    logs.to_terminal(rank)
    logs.to_file(rank, run / "log.txt")
    loop = tiny.loop(stage=0, experts=["low_noise"], global_batch_size=2, steps=int(sys.argv[4]))
    loop.same_clips = SameClips(loop.mesh, loop.objective, loop.experts, loop.caption_dropout, 10)
    arrange(loop, rank)
    with Watchdog(run, float(sys.argv[2])).watching(loop):
        loop.run()
    left = [thread.name for thread in threading.enumerate()]
    (run / f"finished_{rank}").write_text(json.dumps({"step": loop.step, "threads": left}))


def start(run: Path, arrange) -> list[int]:
    """The processes of its two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    leftover(run)
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with (run / f"rank_{rank}.err").open("w") as file:
                    os.dup2(file.fileno(), 2)
                rank_main(run, arrange, rank, port)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    return children


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed collects garbage in every step: what the imports left need not be looked at
    folder = Path(sys.argv[1])
    started = {name: start(folder / name, arrange) for name, arrange in RUNS.items()}
    codes = {
        name: [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for name, pids in started.items()
    }
    (folder / "codes.json").write_text(json.dumps(codes))
