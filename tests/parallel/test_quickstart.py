"""The quickstart with each clip over two ranks: the numbers of whole clips, killed and resumed, sampled."""

import json

import pytest

from tests.training.test_resume import KILLED, records, runs

STEPS = 20
TYPED = [
    "recipe=quickstart",
    f"train.steps={STEPS}",
    "train.routing.policy=balanced",
    "checkpoint.save_every_steps=6",
    "evaluation.every_steps=10",
    "evaluation.sigmas_per_clip=2",
    "evaluation.clips=3",
    "tracker.mode=disabled",
]
SPLIT = [*TYPED, "parallelism.sp_size=2", "sampling.every_steps=20", "sampling.steps=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("quickstart")
    plan = [
        {"arguments": [*TYPED, "run_dir=whole"], "moment": None},
        {"arguments": [*SPLIT, "run_dir=split"], "moment": None},
        {"arguments": [*SPLIT, "run_dir=killed"], "moment": ["inside a step", 9]},
        {"arguments": [*SPLIT, "run_dir=killed"], "moment": None},
    ]
    assert runs(top, plan) == [[0, 0], [0, 0], KILLED, [0, 0]], (top / "log").read_text()[-3000:]
    return top


def test_losses_and_gradient_norms_are_those_of_whole_clips(folder):
    whole, split = records(folder / "whole"), records(folder / "split")
    assert len(whole) == len(split) == STEPS
    compared = 0
    for one, other in zip(whole, split, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if isinstance(value, float):
                assert other[key] == pytest.approx(value, rel=1e-4), (one["step"], key)
                compared += key.endswith(("/loss", "/grad_norm"))
            else:
                assert other[key] == value, (one["step"], key)
    assert compared >= 2 * STEPS


def test_a_killed_run_ends_as_one_that_never_was(folder):
    assert records(folder / "killed") == records(folder / "split")


def test_both_ranks_make_one_video_together(folder):
    (made,) = (folder / "split/samples").iterdir()
    assert made.name == f"step_{STEPS:08d}"
    samples = json.loads((made / "samples.json").read_text())
    assert len(samples) == 3 and all((made / sample["file"]).stat().st_size for sample in samples)
