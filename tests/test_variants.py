"""Every released Wan's tiny twin as a user trains it: two ranks under ZeRO-3, on the quickstart's clips.

All of it without a network: whoever opens a connection fails the test.
"""

import json

import pytest

from tests.network import no_network
from wan_ds import sample
from wan_ds.config import check
from wan_ds.config.command_line import parse
from wan_ds.config.composition import configure

STEPS = 20
SPLIT = ["parallelism.sp_size=2"]
KEEPING = ["parallelism.recompute_keeps_exchange=true", "parallelism.recompute_keeps_ffn=true"]
# How each task's clips lie over the ranks. Text to video with two experts is the quickstart itself; what is
# left out differs from these in numbers alone.
TASKS = {
    "wan2.1-t2v-1.3b": [],
    "wan2.1-i2v-14b-480p": [*SPLIT, "parallelism.recompute=full"],
    "wan2.1-flf2v-14b": [*SPLIT, "parallelism.recompute=selective"],
    "wan2.2-i2v-a14b": [*SPLIT, "parallelism.ulysses=deepspeed"],
    "wan2.2-ti2v-5b": [*SPLIT, "parallelism.recompute=selective", *KEEPING],
}


def train(*typed: str) -> int:
    """What `scripts/train.py` does with these arguments, on a rank that is already in its world."""
    from wan_ds.train import main

    config = configure(parse(["recipe=quickstart", "tracker.mode=disabled", *typed]))
    check(config, 2)
    with no_network():
        return main(config)


@pytest.mark.parametrize("name", TASKS)
def test_a_tiny_twin_trains_resumes_and_is_sampled(world2, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed = [*TASKS[name], f"model=tiny-{name}", "run_name=mine", "lr_schedule=constant", "sampling.steps=2"]
    evaluated = [f"evaluation.every_steps={STEPS}", "evaluation.clips=2", "evaluation.sigmas_per_clip=2"]
    for steps in (STEPS // 2, STEPS):
        assert world2.run(train, *typed, *evaluated, f"train.steps={steps}") == [0, 0]
    run = tmp_path / "runs" / "mine"
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in told] == list(range(1, STEPS + 1))
    experts = {"high_noise", "low_noise"} if "a14b" in name else {"all"}
    assert {record["expert"] for record in told} == experts
    losses = [record["train/loss"] for record in told]
    assert sum(losses[-5:]) < sum(losses[:5]) and told[-1]["eval/loss"] > 0
    with no_network():
        assert sample.main(sample.SampleOptions(run=str(run))) == 0
    (folder,) = (run / "samples").iterdir()
    made = json.loads((folder / "samples.json").read_text())
    assert len(made) == len(list(folder.glob("*.mp4"))) == 3 and (folder / "contact.png").is_file()
    given = {key: made[0][key] is not None for key in ("image", "last_image")}
    images = 2 if "flf2v" in name else 0 if "t2v" in name and "ti2v" not in name else 1
    assert given == {"image": images > 0, "last_image": images > 1}
