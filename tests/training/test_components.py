"""A checkpoint holds what a run trains, all of it and nothing else, or no rank goes on from it."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist

from tests.training import adapted, tiny
from wan_ds.errors import CheckpointError
from wan_ds.training import adapters, checkpoint
from wan_ds.training.callbacks import Save
from wan_ds.training.ema import Ema
from wan_ds.training.run import restore

SMALL = tiny.ARCHITECTURE | {"num_layers": 1}
NAME = "high_noise"


def _full(decay=0.5):
    loop = tiny.loop(stage=3, architecture=SMALL, experts=[NAME])
    if decay:
        loop.experts[NAME].ema = Ema(loop.experts[NAME].engine, decay)
    return loop


def _adapted(base="one"):
    loop = adapted.loop(stage=3, architecture=SMALL, experts=[NAME])
    loop.experts[NAME].base, loop.experts[NAME].base_source = base, "runs/base"
    return loop


def _renamed(folder):
    """One tensor under another name in the files of both ranks."""
    for path in folder.glob("*_model_states.pt"):
        content = torch.load(path, weights_only=False)
        old = "blocks.0.attn1.to_q.weight"
        content["module"]["another"] = content["module"].pop(old)
        for shapes in content["param_shapes"]:
            if old in shapes:
                shapes["another"] = shapes.pop(old)
        torch.save(content, path)


def _no_averages(folder):
    for path in folder.glob("ema_rank_*"):
        path.unlink()


def _averages_of_the_other_rank(folder):
    one, other = sorted(folder.glob("ema_rank_*"))
    one.rename(folder / "kept")
    other.rename(one)
    (folder / "kept").rename(other)


def _nothing(folder):
    pass


def _another_alpha(folder):
    path = folder / adapters.FILE
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    told = json.loads(header["__metadata__"]["lora_adapter_metadata"])
    told["transformer.lora_alpha"] = 16
    told["transformer.alpha_pattern"] = {}
    header["__metadata__"]["lora_adapter_metadata"] = json.dumps(told)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


FAULTS = {
    _renamed: (_full, {}, r"missing: blocks.0.attn1.to_q.weight; unexpected: another"),
    _no_averages: (_full, {}, "missing: averaged weights"),
    _averages_of_the_other_rank: (_full, {}, "averages of other tensors"),
    _nothing: (_full, {"decay": None}, "unexpected: averaged weights"),
    _another_alpha: (_adapted, {}, "has the scale 4, in training 2"),
}


def _saved(build, folder):
    loop = build()
    loop.train_step()
    Save(folder, None, 9, lambda loop: loop.meters.flush()).save(loop)
    return checkpoint.find(folder, "latest")


def _refused(build, options, where):
    try:
        restore(build(**options).experts, where)
    except CheckpointError as error:
        return str(error)
    return None


def _refusals(folder):
    """What a fresh run says to an own copy of a checkpoint for each fault, and to a base that changed."""
    saved = {build: _saved(build, folder / build.__name__) for build in (_full, _adapted)}
    told = {}
    for fault, (build, options, _) in FAULTS.items():
        copy = folder / fault.__name__ / saved[build].name
        if dist.get_rank() == 0:
            shutil.copytree(saved[build], copy)
            fault(copy / NAME)
        dist.barrier()
        told[fault.__name__] = _refused(build, options, copy)
    told["other base"] = _refused(_adapted, {"base": "two"}, saved[_adapted])
    told["none"] = [_refused(build, {}, where) for build, where in saved.items()]
    return told


@pytest.fixture(scope="module")
def refusals(world2, tmp_path_factory):
    return world2.run(_refusals, tmp_path_factory.mktemp("faults"), timeout=300)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_checkpoint_that_lacks_or_adds_something_is_refused_on_every_rank(refusals, fault):
    words = FAULTS[fault][2]
    messages = [told[fault.__name__] for told in refusals]
    assert all(messages) and any(words in message for message in messages), messages


def test_another_base_is_refused_by_its_name(refusals):
    for told in refusals:
        assert "runs/base, the base of high_noise, holds other weights than the adapter" in told["other base"]


def test_what_was_not_touched_is_taken_up(refusals):
    assert [told["none"] for told in refusals] == [[None, None]] * 2
