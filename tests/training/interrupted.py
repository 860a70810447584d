"""Runs training as real processes that end at a chosen moment; a script, started by test_resume.py.

    python tests/training/interrupted.py plan.json

The plan is a list of {"arguments": [...], "moment": [name, step]}. What costs in a start is importing torch
and DeepSpeed, so this process imports and then forks the two ranks of each start. Writes the ranks' exit
codes to plan.json's folder as codes.json."""

import gc
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch

import wan_ds.training.run  # noqa: F401 - so that the ranks need not
from wan_ds.config.command_line import command
from wan_ds.train import main
from wan_ds.training import checkpoint, loop

torch.set_num_threads(1)
gc.freeze()  # DeepSpeed collects garbage in every step: what the imports left need not be looked at
RANKS = 2


def kill_all(pids: Path) -> None:
    """kill -9 of every rank, this one last."""
    others = [int(path.name) for path in pids.iterdir() if int(path.name) != os.getpid()]
    for pid in [*others, os.getpid()]:
        os.kill(pid, signal.SIGKILL)


def arrange(moment: str | None, step: int, rank: int, pids: Path) -> None:
    """Make this rank's code call `kill_all`, or send itself a signal, at the moment."""
    if moment == "inside a step":
        after(
            loop.Loop, "window", lambda running, *_: rank == 0 and running.step + 1 == step and kill_all(pids)
        )
    elif moment == "signal":
        after(
            loop.Loop,
            "window",
            lambda running, *_: (
                rank == 1 and running.step + 1 == step and os.kill(os.getpid(), signal.SIGTERM)
            ),
        )
    elif moment == "before the save":
        before(checkpoint, "save", lambda _, state, *__: rank == 0 and state.step == step and kill_all(pids))
    elif moment == "after rank 0's shards":
        shards_of_rank_0(step, rank, pids)
    elif moment == "before COMPLETE":
        before(checkpoint, "seal", lambda _, state: state.step == step and kill_all(pids))
    elif moment == "before latest":
        before(checkpoint, "point_latest", lambda _, name: name.endswith(f"{step:08d}") and kill_all(pids))


def before(owner: object, name: str, act) -> None:
    original = getattr(owner, name)

    def replaced(*args, **kwargs):
        act(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, replaced)


def after(owner: object, name: str, act) -> None:
    original = getattr(owner, name)

    def replaced(*args, **kwargs):
        result = original(*args, **kwargs)
        act(*args, **kwargs)
        return result

    setattr(owner, name, replaced)


def shards_of_rank_0(step: int, rank: int, pids: Path) -> None:
    """Rank 0 has written its files, rank 1 none of its own."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    original = TorchCheckpointEngine.save

    def save(self, state_dict, path):
        if f"step_{step:08d}" in str(path):
            if rank == 1:
                time.sleep(60)
            original(self, state_dict, path)
            if "optim_states" in str(path):
                kill_all(pids)
        else:
            original(self, state_dict, path)

    TorchCheckpointEngine.save = save


def start(arguments: list[str], moment: list | None, folder: Path) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = folder / "pids"
    pids.mkdir()
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            (pids / str(os.getpid())).touch()
            while len(list(pids.iterdir())) < RANKS:
                time.sleep(0.01)
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            arrange(*(moment or (None, 0)), rank, pids)
            sys.argv = ["train.py", *arguments]
            command(main)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    for path in pids.iterdir():
        path.unlink()
    pids.rmdir()
    return codes


if __name__ == "__main__":
    plan_path = Path(sys.argv[1])
    found = [start(s["arguments"], s["moment"], plan_path.parent) for s in json.loads(plan_path.read_text())]
    (plan_path.parent / "codes.json").write_text(json.dumps(found))
