"""Checkpoints: complete or absent, and a load that is the mirror of a save."""

import json
import os
import resource

import pytest
import torch

from tests.training import tiny
from wan_ds.errors import CheckpointError
from wan_ds.training import checkpoint
from wan_ds.training.callbacks import Save
from wan_ds.training.checkpoint import ExpertState, TrainerState
from wan_ds.training.run import restore


class Files:
    """Stands in an engine's place where only files matter."""

    def save(self, folder, tag):
        (folder / tag).mkdir()
        (folder / tag / "shard.pt").write_bytes(b"x" * 100)


STATE = TrainerState(20, 40, 1, "3 clips, 0", {"all": ExpertState(20, 0, 0, 40, 1.0)})


def complete(tmp_path, step):
    """A complete checkpoint of one rank, by the code's own steps."""
    unfinished = tmp_path / f"step_{step:08d}.unfinished"
    unfinished.mkdir(parents=True)
    Files().save(unfinished, "all")
    checkpoint.seal(unfinished, TrainerState(step, 40, 1, STATE.dataset, STATE.experts))
    checkpoint.publish(unfinished, tmp_path / f"step_{step:08d}")
    checkpoint.point_latest(tmp_path, f"step_{step:08d}")
    return tmp_path / f"step_{step:08d}"


def test_a_complete_folder_lists_its_files_with_sizes(tmp_path):
    folder = complete(tmp_path, 20)
    sizes = json.loads((folder / "COMPLETE").read_text())
    assert sizes.keys() == {"all/shard.pt", "trainer_state.json"} and sizes["all/shard.pt"] == 100
    assert checkpoint.fault(folder) is None
    assert checkpoint.read_state(folder) == STATE
    assert (tmp_path / "latest").read_text() == "step_00000020\n"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "all/shard.pt").write_bytes(b"x" * 99), "has 99 bytes, not the 100"),
        (lambda f: (f / "all/shard.pt").unlink(), "all/shard.pt is missing"),
        (lambda f: (f / "COMPLETE").unlink(), "no readable COMPLETE marker"),
        (lambda f: (f / "COMPLETE").write_text('{"all/sh'), "no readable COMPLETE marker"),
        (lambda f: (f / "trainer_state.json").unlink(), "trainer_state.json is missing"),
    ],
)
def test_a_damaged_folder_is_refused_by_name_and_passed_over_by_auto(tmp_path, damage, words, caplog):
    run = tmp_path
    older = complete(run / "checkpoints", 10)
    newer = complete(run / "checkpoints", 20)
    damage(newer)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.find(run, "step_00000020")
    assert checkpoint.newest(run / "checkpoints") == older
    assert checkpoint.find(run, "latest") == older
    assert "step_00000020" in caplog.text and words in caplog.text
    damage(older)
    with pytest.raises(CheckpointError, match="no checkpoint of this run is complete"):
        checkpoint.newest(run / "checkpoints")


def test_a_complete_folder_counts_even_if_latest_was_not_written_yet(tmp_path):
    complete(tmp_path, 10)
    newer = complete(tmp_path, 20)
    checkpoint.point_latest(tmp_path, "step_00000010")
    assert checkpoint.newest(tmp_path) == newer


def test_a_step_that_is_saved_again_replaces_its_folder(tmp_path):
    complete(tmp_path, 10)
    again = complete(tmp_path, 10)
    assert checkpoint.fault(again) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000010"]


def test_a_missing_checkpoint_is_named_with_those_that_exist(tmp_path):
    complete(tmp_path / "checkpoints", 10)
    with pytest.raises(
        CheckpointError, match=r"step_00000030 cannot be used: there is no such folder .*step_00000010"
    ):
        checkpoint.find(tmp_path, "step_00000030")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        checkpoint.find(tmp_path / "elsewhere", "latest")
    assert checkpoint.newest(tmp_path / "elsewhere") is None


def test_old_folders_and_leftovers_go_and_the_newest_stay(tmp_path):
    for step in (10, 20, 30):
        complete(tmp_path, step)
    (tmp_path / "step_00000025.unfinished").mkdir()
    checkpoint.remove_old(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000020", "step_00000030"]


def test_the_folder_just_written_stays_and_incomplete_ones_do_not_count(tmp_path, caplog, monkeypatch):
    for step in (10, 20, 30):
        complete(tmp_path, step)
    for step in (20, 30):  # as after a disk fault: a save at step 15, where the run went on from 10
        (tmp_path / f"step_000000{step}/COMPLETE").unlink()
    complete(tmp_path, 15)
    checkpoint.remove_old(tmp_path, 1)
    assert checkpoint.newest(tmp_path).name == "step_00000015" and not (tmp_path / "step_00000010").exists()
    complete(tmp_path, 16)

    def refuse(path):
        raise OSError("Directory not empty")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", refuse)
    checkpoint.remove_old(tmp_path, 1)
    assert "step_00000015 could not be deleted: Directory not empty" in caplog.text


def test_another_owner_is_mentioned(tmp_path, caplog, monkeypatch):
    checkpoint.warn_of_owner(tmp_path)
    assert not caplog.records
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    checkpoint.warn_of_owner(tmp_path)
    assert "belongs to another user" in caplog.text


def _resume(stage, folder):
    """Two experts: 8 steps straight, against 4, a save, fresh engines, a load and 4 more."""
    straight = tiny.loop(stage=stage)
    for _ in range(4):
        straight.train_step()
    save = Save(folder, None, 2, lambda loop: loop.meters.flush())
    save.save(straight)
    saved = {name: tiny.state_of(expert) for name, expert in straight.experts.items()}
    for _ in range(4):
        straight.train_step()
    resumed = tiny.loop(stage=stage, first_step=4)
    where = checkpoint.find(folder, "latest")
    assert restore(resumed.experts, where) == 4
    loaded = {name: tiny.state_of(expert) for name, expert in resumed.experts.items()}
    for _ in range(4):
        resumed.train_step()
    weights = {name: tiny.full_weights(expert) for name, expert in resumed.experts.items()}
    sources = {name: checkpoint.checkpoint_source(where, name) for name in resumed.experts}
    read = {name: source.read(source.tensors) for name, source in sources.items()}
    return {
        "loaded as saved": {name: tiny.equal(saved[name], loaded[name]) for name in saved},
        "continued as if never stopped": {
            name: tiny.equal(tiny.state_of(straight.experts[name]), tiny.state_of(resumed.experts[name]))
            for name in saved
        },
        "records": (_without_speed(straight.meters.flush()), _without_speed(resumed.meters.flush())),
        "keys": {name: set(weights[name]) == set(read[name]) for name in saved},
        "read": read,
        "saved": {name: {k: v for k, v in saved[name].items() if k.startswith("weight")} for name in saved},
        "moved": {
            name: any(not torch.equal(weights[name][k], read[name][k]) for k in read[name]) for name in saved
        },
    }


def _without_speed(records):
    return [{k: v for k, v in r.items() if not k.startswith(("speed/", "memory/"))} for r in records]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_resume_continues_as_if_never_stopped(world2, tmp_path, stage):
    results = world2.run(_resume, stage, tmp_path, timeout=120)
    for result in results:
        assert result["loaded as saved"] == {"high_noise": True, "low_noise": True}
        assert result["continued as if never stopped"] == {"high_noise": True, "low_noise": True}
        assert result["records"][0] == result["records"][1] and len(result["records"][0]) == 4
        assert result["keys"] == result["moved"] == {"high_noise": True, "low_noise": True}
    for name, weights in results[0]["read"].items():  # what one process reads is what the ranks held
        for key, value in weights.items():
            shards = torch.cat([r["saved"][name][f"weight {key}"].flatten() for r in results])
            whole = (
                shards[: value.numel()]
                if stage == 3
                else results[0]["saved"][name][f"weight {key}"].flatten()
            )
            assert torch.equal(value.flatten(), whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 2}, r"written by a world of 1 \(ranks\) and this is one of 2; resume with 1"),
        ({"experts": ["high_noise"]}, "holds all and this run trains high_noise"),
        (
            {"clips": tiny.encoded().clips[:2]},
            r"on other clips \(3 clips, .* there now \(2 clips, ",
        ),
    ],
)
def test_a_checkpoint_of_another_world_or_experts_or_clips_is_refused(tmp_path, changes, words):
    clips = tiny.encoded().clips[:3]
    unfinished = tmp_path / "step_00000010.unfinished"
    unfinished.mkdir()
    checkpoint.seal(unfinished, TrainerState(10, 40, 1, checkpoint.dataset_of(clips), STATE.experts))
    fits = {"world_size": 1, "experts": ["all"], "clips": clips}
    checkpoint.refuse_misfit(unfinished, **fits)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.refuse_misfit(unfinished, **fits | changes)


def _cannot_write(folder, full_rank):
    """A disk that takes no file above 4,000 bytes, on one rank: the real write fails."""
    loop = tiny.loop(stage=3, experts=["high_noise"])
    if loop.mesh.rank == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, resource.RLIM_INFINITY))
    try:
        Save(folder, None, 2, lambda loop: loop.meters.flush()).save(loop)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_rank_that_cannot_write_fails_the_save_on_all_and_leaves_the_old_one(world2, tmp_path, full_rank):
    old = complete(tmp_path / "checkpoints", 0)
    marker = (old / "COMPLETE").read_text()
    messages = world2.run(_cannot_write, tmp_path, full_rank, timeout=30)
    assert "another rank could not write" in messages[1 - full_rank]
    assert "was not written: RuntimeError" in messages[full_rank]
    assert all("MB are free there" in message for message in messages)
    assert checkpoint.newest(tmp_path / "checkpoints") == old and (old / "COMPLETE").read_text() == marker
    assert not list((tmp_path / "checkpoints").glob("*.unfinished"))
