"""The main job as a person starts it, by every launcher: the same numbers, one run folder, no litter."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wan_ds.training import checkpoint

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
SMALL = [
    "recipe=quickstart",
    "model.transformer.num_layers=1",
    "data.height=32",
    "data.width=48",
    "train.steps=3",
    "train.routing.policy=balanced",
    "timesteps=uniform",
    "model.shift=12",
    "optimizer.lr=4e-3",
    "tracker.log_every_steps=2",
]
SAMPLED = ["sampling.every_steps=3", "sampling.steps=2", "sampling.shift=1", "sampling.at_start=true"]
LAUNCHERS = {
    "python": [sys.executable, ROOT / "scripts/train.py"],
    "torchrun": [BIN / "torchrun", "--nproc-per-node", "2", ROOT / "scripts/train.py"],
    "deepspeed": [BIN / "deepspeed", "--num_gpus", "2", "--module", "wan_ds.train"],
}  # launch/local.sh, which starts scripts/train.py by `deepspeed`, is run by test_readme.py


def launch(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "WAN_DS_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    folder.mkdir()
    return subprocess.run(
        [*map(str, LAUNCHERS[name]), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(run: Path) -> list[dict]:
    """The records without what may differ between two equal runs."""
    return [{k: v for k, v in r.items() if not k.startswith(("speed/", "memory/"))} for r in records(run)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """One short run by each launcher; the first with wandb."""
    top = tmp_path_factory.mktemp("launchers")
    for name in LAUNCHERS:
        mode = "offline" if name == "deepspeed" else "disabled"
        more = SAMPLED if name == "torchrun" else []
        done = launch(name, top / name, *SMALL, *more, "run_name=mine", f"tracker.mode={mode}")
        assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return top


def test_every_launcher_gives_the_same_numbers(launched):
    found = {name: numbers(launched / name / "runs/mine") for name in LAUNCHERS}
    two_ranks = found["deepspeed"]
    assert len(two_ranks) == 3 and {r["expert"] for r in two_ranks} == {"high_noise", "low_noise"}
    assert found["torchrun"] == two_ranks
    for one, two in zip(found["python"], two_ranks, strict=True):
        assert one.keys() == two.keys()
        assert {k: v for k, v in one.items() if isinstance(v, str | int)} == {
            k: v for k, v in two.items() if isinstance(v, str | int)
        }
        for key, value in one.items():
            if isinstance(value, float):
                assert value == pytest.approx(two[key], rel=1e-5), key


def test_a_run_leaves_its_folder_and_nothing_else(launched):
    for name in LAUNCHERS:
        assert [path.name for path in (launched / name).iterdir()] == ["runs"], name
        run = launched / name / "runs/mine"
        expected = {".lock", "config.yaml", "environment.json", "metrics.jsonl", "checkpoints", "log.txt"}
        expected |= {"deepspeed": {"wandb"}, "torchrun": {"samples"}}.get(name, set())
        assert {path.name for path in run.iterdir()} == expected, name
        folder = checkpoint.find(run, "latest")
        assert (run / "checkpoints/latest").read_text().strip() == folder.name == "step_00000003"
        listed = json.loads((folder / "COMPLETE").read_text())
        assert {"zero_to_fp32.py", "zero_to_torch.py", "trainer_state.json"} <= listed.keys()
        assert json.loads((folder / "trainer_state.json").read_text())["finished"] is True


def test_videos_are_made_while_training_from_the_weights_of_the_moment(launched):
    samples = launched / "torchrun/runs/mine/samples"
    assert sorted(path.name for path in samples.iterdir()) == ["step_00000000", "step_00000003"]
    before, after = (json.loads((samples / f"step_0000000{n}/samples.json").read_text()) for n in (0, 3))
    assert [s["prompt"] for s in before] == [s["prompt"] for s in after] and len(after) == 3
    for sample in after:
        assert sample["expert_calls"]["high_noise"] and sample["expert_calls"]["low_noise"]
        files = [(samples / f"step_0000000{n}" / sample["file"]).read_bytes() for n in (0, 3)]
        assert files[0] != files[1]


def test_each_experts_steps_run_on_and_sum_to_the_step(launched):
    taken = {"high_noise": 0, "low_noise": 0}
    for record in records(launched / "deepspeed/runs/mine"):
        taken[record["expert"]] += 1
        assert record[f"train/{record['expert']}/step"] == taken[record["expert"]]
        assert sum(taken.values()) == record["step"]


def test_the_wandb_file_holds_every_object_equal(launched):
    run = launched / "deepspeed/runs/mine"
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    inspect = [str(BIN / "wandb"), "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(
        inspect, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    history = [json.loads(line) for line in lines if json.loads(line)["type"] == "history"]
    items = [{k: v for k, v in h["history"]["item"].items() if not k.startswith("_")} for h in history]
    assert items == records(run)


def test_a_finished_run_says_so_and_other_numbers_are_refused(launched):
    run = launched / "python/runs/mine"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again = [*LAUNCHERS["python"], *SMALL, "run_name=mine", "tracker.mode=disabled"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    calls = [again, [*again, "optimizer.lr=1e-4"], [*again, "train.steps=2"], [*again, "resume=never"]]
    calls.append([*again, "train.steps=5"])  # may go on, but for the job that holds the folder
    holder = (run / ".lock").open("a")
    fcntl.flock(holder, fcntl.LOCK_EX)
    processes = [
        subprocess.Popen(
            list(map(str, call)), cwd=launched / "python", env=environment, stderr=subprocess.PIPE, text=True
        )
        for call in calls
    ]
    ended = [(p.communicate(timeout=180)[1], p.returncode) for p in processes]
    assert ended[0][1] == 0 and "is finished: 3 steps" in ended[0][0]
    holder.close()
    assert [code for _, code in ended[1:]] == [2, 2, 2, 2]
    assert "is training there; wait for it" in ended[4][0]
    assert "optimizer.lr: 0.004 -> 0.0001" in ended[1][0] and "train.steps" in ended[2][0]
    assert "resume=never" in ended[3][0] and "has checkpoints" in ended[3][0]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
