"""Averages of weights: those of a dense reference, whatever shards them, whoever's turn it is, and stopped
or not."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.training import adapted, tiny
from wan_ds.errors import CheckpointError
from wan_ds.training import checkpoint
from wan_ds.training.callbacks import Save
from wan_ds.training.ema import Ema, EmaFiles
from wan_ds.training.run import restore
from wan_ds.training.shards import trainable, whole

DECAY = 0.9
PERSISTENT = tiny.ZERO[3] | {"stage3_param_persistence_threshold": 100_000}  # small ones stay gathered
SMALL = tiny.ARCHITECTURE | {"num_layers": 1}
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor")


def _loop(stage, **options):
    with mock.patch.dict(tiny.ZERO, persistent=PERSISTENT):
        loop = tiny.loop(stage=stage, architecture=SMALL, global_batch_size=2, **options)
    for expert in loop.experts.values():
        expert.ema = Ema(expert.engine, DECAY)
    return loop


def _dense(expert):
    return {name: whole(p).double() for name, p in trainable(expert.engine)}


def _train(loop, steps, references):
    """Steps; after each the reference of the expert that took it follows in float64."""
    for _ in range(steps):
        name = loop.routing.expert_of(loop.step)
        loop.train_step()
        for key, value in _dense(loop.experts[name]).items():
            references[name][key] = DECAY * references[name][key] + (1 - DECAY) * value


def _error(folder, references):
    worst = 0.0
    for name, reference in references.items():
        source = EmaFiles(folder / name)
        read = source.read(source.tensors)
        assert read.keys() == reference.keys()
        worst = max(worst, *((read[key] - value).abs().max().item() for key, value in reference.items()))
    return worst


def _save(loop, folder):
    Save(folder, None, 9, lambda loop: loop.meters.flush()).save(loop)
    return checkpoint.find(folder, "latest")


def _straight_and_resumed(stage, folder, steps):
    straight = _loop(stage)
    references = {name: _dense(expert) for name, expert in straight.experts.items()}
    _train(straight, steps // 2, references)
    middle = _save(straight, folder)
    _train(straight, steps - steps // 2, references)
    end = _save(straight, folder)
    resumed = _loop(stage, first_step=steps // 2)
    restore(resumed.experts, middle)
    for _ in range(steps - steps // 2):
        resumed.train_step()
    again = _save(resumed, folder / "again")
    files = sorted(path.relative_to(end) for path in end.rglob("ema_rank_*"))
    return {
        "steps": {name: expert.steps for name, expert in straight.experts.items()},
        "error": _error(end, references),
        "moved": all((references[name][key] - value).abs().max() > 1e-5
                     for name, expert in straight.experts.items() for key, value in _dense(expert).items()),
        "files": [str(file) for file in files],
        "equal": all((end / file).read_bytes() == (again / file).read_bytes() for file in files),
    }  # fmt: skip


@pytest.mark.parametrize(("stage", "steps"), [(2, 50), ("persistent", 6), (3, 4), (0, 6)])
def test_averages_are_those_of_a_dense_reference_also_after_a_resume(world2, tmp_path, stage, steps):
    for result in world2.run(_straight_and_resumed, stage, tmp_path, steps, timeout=300):
        assert min(result["steps"].values()) > 1 and sum(result["steps"].values()) == steps
        assert result["moved"]
        assert result["error"] < 1e-6  # float32 against float64, weights below 1
        assert result["equal"] and len(result["files"]) == (2 if stage == 0 else 4)


def _alone(stage):
    """An update under which every collective of torch's fails."""
    loop = _loop(stage, experts=["high_noise"])
    loop.train_step()
    refused = mock.Mock(side_effect=AssertionError("gathered"))
    with mock.patch.multiple(dist, **dict.fromkeys(COLLECTIVES, refused)):
        loop.experts["high_noise"].ema.update()


def test_following_the_weights_gathers_nothing(world2):
    world2.run(_alone, 3)


def _moved_by_one_step():
    """Whether the averages of each expert moved in a step of one, and whose step it was."""
    loop = _loop(2)
    before = {name: _copied(expert.ema) for name, expert in loop.experts.items()}
    worked = loop.routing.expert_of(0)
    loop.train_step()
    after = {name: _copied(expert.ema) for name, expert in loop.experts.items()}
    moved = {
        name: any(not torch.equal(before[name][key], after[name][key]) for key in after[name])
        for name in after
    }
    return worked, moved


def _copied(ema):
    return {name: average.clone() for name, average in ema._averages.items()}


def test_averages_move_on_their_experts_own_steps_alone(world2):
    for worked, moved in world2.run(_moved_by_one_step):
        assert {name for name, has in moved.items() if has} == {worked}


def _adapted(stage):
    with mock.patch.dict(tiny.ZERO, persistent=PERSISTENT):
        return adapted.loop(
            stage=stage, experts=["high_noise"], decay=0.5, architecture=SMALL, global_batch_size=2, lr=3e-3
        )


def _applied(stage):
    """How far the network with its averages is from a plain one that holds them, and from the live one.

    And whether it then trains as one that did not compute with them.
    """
    loop = _adapted(stage)
    (expert,) = loop.experts.values()
    reference = _dense(expert)
    for _ in range(2):
        loop.train_step()
        reference = {key: 0.5 * (reference[key] + value) for key, value in _dense(expert).items()}
    inputs = ([tiny.latents_of(0)], torch.tensor([900.0]), tiny.prompt_of("a")[None])
    with expert.engine.inference() as live:
        (plain,) = live(*inputs)
    with expert.inference() as network:
        assert not network.training
        (found,) = network(*inputs)
    dense = adapted.model("high_noise", SMALL).eval()
    dense.load_state_dict(reference, strict=False)
    with torch.no_grad():
        (expected,) = dense(*inputs)
    straight = _adapted(stage)
    loop.train_step()
    for _ in range(3):
        straight.train_step()
    (other,) = straight.experts.values()
    is_equal = tiny.equal(tiny.state_of(expert), tiny.state_of(other))
    return (found - expected).abs().max().item(), (found - plain).abs().max().item(), is_equal


@pytest.mark.parametrize("stage", [0, 2, 3, "persistent"])
def test_the_network_computes_with_its_averages_and_then_with_its_weights_again(world2, stage):
    for error, change, is_equal in world2.run(_applied, stage, timeout=200):
        assert error < 1e-5 < 1e-4 < change  # sums in another order
        assert is_equal


def test_files_that_are_not_whole_are_refused(world2, tmp_path):
    world2.run(_save_one, tmp_path)
    folder = checkpoint.find(tmp_path, "latest") / "high_noise"
    assert len(EmaFiles(folder).tensors) > 10
    (folder / "ema_rank_00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="are not whole; copy all its files"):
        EmaFiles(folder)
    (folder / "ema_rank_00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        EmaFiles(folder)


def _save_one(folder):
    _save(_loop(2, experts=["high_noise"]), folder)
