"""What the README says can be typed, can be."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from wan_ds.config import check, to_dict
from wan_ds.config.command_line import options, parse
from wan_ds.config.composition import configure
from wan_ds.training import run_folder

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RANKS = {"deepspeed": r"--num_gpus (\d+)", "torchrun": r"--nproc-per-node (\d+)", "bash": r"local\.sh (\d+)"}


def commands() -> list[str]:
    """Each line of each block that is marked as bash."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines() if line.strip()]


TRAINING = [line for line in commands() if "recipe=" in line]
OTHER_ENTRY_POINTS = [line for line in commands() if re.search(r"scripts/(?!train|test)\w+\.py", line)]


def arguments(line: str) -> list[str]:
    """What follows the script."""
    words = shlex.split(line)
    first = next(i for i, word in enumerate(words) if word.startswith(("scripts/", "launch/")))
    rest = words[first + 1 :]
    return rest[1:] if rest and rest[0].isdigit() else rest


def test_the_readme_has_commands_of_each_kind():
    assert len(TRAINING) >= 7
    assert len(OTHER_ENTRY_POINTS) >= 6


@pytest.mark.parametrize("line", TRAINING)
def test_training_commands_compose_and_fit_their_ranks(line):
    ranks = re.search(RANKS.get(line.split()[0], "$^"), line)
    config = configure(parse(arguments(line)))
    check(config, int(ranks[1]) if ranks else 1)


@pytest.mark.parametrize("line", OTHER_ENTRY_POINTS)
def test_other_entry_points_take_what_the_readme_gives_them(line):
    name = re.search(r"scripts/(\w+)\.py", line)[1]
    module = importlib.import_module(f"wan_ds.{name}")
    (taken,) = [kind for title, kind in vars(module).items() if title == f"{name.capitalize()}Options"]
    assert options(taken, arguments(line))


def test_the_configuration_of_a_run_is_composed_again(tmp_path, monkeypatch):
    (line,) = [line for line in commands() if "--config-dir" in line]
    monkeypatch.chdir(tmp_path)
    config = configure(parse(["recipe=quickstart", "run_name=mine", "optimizer.lr=2e-3"]))
    run_folder.write(tmp_path / "runs" / "mine", to_dict(config))
    again = configure(parse(arguments(line)))
    assert to_dict(again) == to_dict(config)


def test_values_are_quoted_for_the_shell_alone():
    texts = [shlex.split(found)[0] for found in re.findall(r"`('[\w.]+=[^`]*')`", README)]
    assert len(texts) == 2
    config = configure(parse(["recipe=quickstart", *texts]))
    assert config.sampling.prompts == ["a cat, running"]
    assert config.data.path == "/my set (1)"


def test_every_file_that_is_named_is_there():
    here = {"wan_ds", "conf", "launch", "scripts", "tests"}
    named = {name for name in re.findall(r"[\w./-]+/[\w./-]*", README) if name.split("/")[0] in here}
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]


def run(words: list[str]) -> str:
    environment = {**os.environ, "WAN_DS_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_run_in_two_steps(tmp_path):
    """The quickstart's command, two steps of it; then the loss of its end, on 2 ranks and in one process."""
    (line,) = [line for line in commands() if "quickstart.sh" in line]
    folder = tmp_path / "a run"
    short = [
        "train.steps=2",
        "data.limit=1",
        "sampling.steps=2",
        "evaluation.every_steps=2",
        f"run_dir={folder}",
    ]
    told = run([*shlex.split(line), *short, "tracker.mode=disabled"])
    assert f"the run is in {folder}" in told
    assert list((folder / "samples").glob("step_00000002/*.mp4"))

    weights = sorted((folder / "checkpoints").rglob("*.pt"))
    before = [path.read_bytes() for path in weights]
    (line,) = [line for line in TRAINING if line.endswith("recipe=quickstart-lora")]
    typed = [*arguments(line), f"model.path={folder}", f"run_dir={tmp_path / 'lora'}", "train.steps=2"]
    run(["bash", "launch/local.sh", "2", *typed, "tracker.mode=disabled"])
    adapters = sorted(path.parent.name for path in (tmp_path / "lora").rglob("adapter.safetensors"))
    assert adapters == ["high_noise", "low_noise"]
    assert [path.read_bytes() for path in weights] == before

    (line,) = [line for line in commands() if "evaluate.py" in line]
    words = [sys.executable, *shlex.split(line)[1:-1], f"run={folder}", "batch_size=3"]
    assert "high_noise" in run(words)
    alone = json.loads((folder / "evaluation/step_00000002.json").read_text())
    trained = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    for key in ("eval/loss", "eval/loss_stderr", "eval/high_noise/loss", "eval/low_noise/loss"):
        assert alone[key] == pytest.approx(trained[key], rel=1e-5), key
