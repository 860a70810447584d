"""A run that is killed, with SIGKILL and at the worst moments, and started again with the same command."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from wan_ds.training import checkpoint

ROOT = Path(__file__).parents[2]
STEPS, SAVE_EVERY = 12, 3
SMALL = [
    "recipe=quickstart",
    "timesteps=uniform",
    "model.shift=5",
    "train.routing.policy=balanced",
    "model.transformer.num_layers=1",
    "model.transformer.ffn_dim=64",
    "data.height=32",
    "data.width=48",
    f"train.steps={STEPS}",
    "train.caption_dropout=0.3",
    f"checkpoint.save_every_steps={SAVE_EVERY}",
    "tracker.log_every_steps=2",
    "tracker.mode=disabled",
    "evaluation.every_steps=4",
    "evaluation.at_start=true",
    "evaluation.sigmas_per_clip=2",
]
draw = random.Random(20)
MOMENTS = [
    ["inside a step", draw.randint(1, 2)],  # before the first checkpoint: begin again
    ["after rank 0's shards", 3],
    ["before COMPLETE", 3],
    ["inside a step", draw.randint(4, 5)],
    ["before latest", 6],
    ["before the save", 9],
    ["signal", draw.randint(7, 8)],
]
KILLED = [-signal.SIGKILL, -signal.SIGKILL]


def runs(folder: Path, plan: list) -> list:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    script = Path(__file__).with_name("interrupted.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        subprocess.run(
            [sys.executable, script, path],
            env=environment,
            cwd=folder,
            check=True,
            timeout=600,
            stderr=log,
            stdout=log,
        )
    return json.loads((folder / "codes.json").read_text())


def records(run: Path) -> list[dict]:
    """What stands in metrics.jsonl, but for speed and memory."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(("speed/", "memory/"))}
        for line in lines
    ]


def optimizer_states(checkpoint_dir: Path, expert: str) -> list:
    """All tensors and numbers that both ranks' optimizers wrote, masters and moments among them, flat."""
    from wan_ds.training.engine import only_tensors

    paths = sorted((checkpoint_dir / expert).glob("*optim_states.pt"))
    assert len(paths) == 2
    with only_tensors():
        leaves = tree_leaves([torch.load(path, map_location="cpu") for path in paths])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | int | float)]


def same_to_the_byte(one: list, other: list) -> bool:
    pairs = list(zip(one, other, strict=True))
    assert sum(isinstance(a, torch.Tensor) for a, _ in pairs) > 4
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_a_run_killed_at_six_moments_ends_as_one_that_never_was(tmp_path):
    straight = {"arguments": [*SMALL, "run_dir=straight"], "moment": None}
    plan = [
        straight,
        *({"arguments": [*SMALL, "run_dir=killed"], "moment": moment} for moment in [*MOMENTS, None]),
    ]
    codes = runs(tmp_path, plan)
    assert codes == [[0, 0], *[KILLED] * 6, [143, 143], [0, 0]], (tmp_path / "log").read_text()[-3000:]

    expected, found = records(tmp_path / "straight"), records(tmp_path / "killed")
    assert [r["step"] for r in expected] == list(range(STEPS + 1))  # 0 is the evaluation before training
    assert found == expected

    ends = [checkpoint.find(tmp_path / name, "latest") for name in ("straight", "killed")]
    assert [end.name for end in ends] == [f"step_{STEPS:08d}"] * 2
    assert checkpoint.read_state(ends[0]) == checkpoint.read_state(ends[1])
    for expert in ("high_noise", "low_noise"):
        sources = [checkpoint.checkpoint_source(end, expert) for end in ends]
        one, other = (source.read(source.tensors) for source in sources)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert same_to_the_byte(*(optimizer_states(end, expert) for end in ends))

    log = (tmp_path / "log").read_text()
    assert log.count("======== new run in killed") == 4  # nothing was complete yet
    assert log.count("======== resuming killed after step_00000003") == 1
    assert log.count("======== resuming killed after step_00000006") == 2
    assert "SIGTERM: stopping after step" in log
    left = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())
    assert left == ["latest", "step_00000009", "step_00000012"]
