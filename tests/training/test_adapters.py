"""Adapters in checkpoints: what trains is saved, compared and taken up again; the base is not, and is known
again."""

import json
import re
import shutil
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.training import adapted, tiny
from wan_ds.errors import CheckpointError
from wan_ds.models.adapter import plain_name
from wan_ds.models.weights import Drawn, on_meta
from wan_ds.training import adapters, checkpoint, shards
from wan_ds.training.adapters import Merged
from wan_ds.training.callbacks import Save
from wan_ds.training.run import restore
from wan_ds.training.shards import trainable, whole
from wan_ds.training.sources import Fingerprint
from wan_ds.training.zero_files import ZeroFiles

SMALL = tiny.ARCHITECTURE | {"num_layers": 1}


def _loop(stage, **options):
    return adapted.loop(stage=stage, architecture=SMALL, global_batch_size=2, **options)


def _save(loop, folder):
    Save(folder, None, 9, lambda loop: loop.meters.flush()).save(loop)
    return checkpoint.find(folder, "latest")


def _hashes(loop):
    """Of what this rank holds of the frozen tensors."""
    return {
        f"{expert} {name}": loop.experts[expert].engine.shard(p).clone()
        for expert in loop.experts
        for name, p in loop.experts[expert].engine.parameters()
        if not p.requires_grad
    }


def _resume(stage, folder):
    """Four steps, a save, and two more, straight and by fresh engines."""
    straight = _loop(stage, guarded=True)
    frozen = _hashes(straight)
    for _ in range(4):
        straight.train_step()
    where = _save(straight, folder)
    saved = {name: tiny.state_of(expert) for name, expert in straight.experts.items()}
    live = {
        name: {plain_name(key): whole(p).clone() for key, p in trainable(expert.engine)}
        for name, expert in straight.experts.items()
    }
    resumed = _loop(stage, first_step=4)
    restore(resumed.experts, where)
    loaded = {name: tiny.state_of(expert) for name, expert in resumed.experts.items()}
    for loop in (straight, resumed):
        loop.meters.flush()
        for _ in range(2):
            loop.train_step()
    losses = [[record["train/loss"] for record in loop.meters.flush()] for loop in (straight, resumed)]
    files = {name: load_file(where / name / adapters.FILE) for name in live}
    read = {name: adapters.read(where / name).tensors for name in live}
    return {
        "loaded as saved": all(tiny.equal(saved[name], loaded[name]) for name in saved),
        "continued": all(
            tiny.equal(tiny.state_of(straight.experts[name]), tiny.state_of(resumed.experts[name]))
            for name in saved
        ),
        "losses": losses,
        "in the file": all(
            (read[name][key] - value).abs().max() == 0 for name in live for key, value in live[name].items()
        )
        and all(read[name].keys() == live[name].keys() for name in live),
        "keys": sorted(next(iter(files.values())))[:1],
        "moved": all(
            value.abs().max() > 0 for name in live for key, value in live[name].items() if "lora_B" in key
        ),
        "frozen": all(torch.equal(value, frozen[key]) for key, value in _hashes(straight).items()),
        "held": {name: sorted(ZeroFiles(where / name).tensors) for name in live},
        "trains": {
            name: sorted(key for key, _ in trainable(one.engine)) for name, one in straight.experts.items()
        },
    }  # fmt: skip


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_run_of_adapters_goes_on_as_if_never_stopped(world2, tmp_path, stage):
    for result in world2.run(_resume, stage, tmp_path, timeout=300):
        assert result["loaded as saved"] and result["continued"]
        assert result["losses"][0] == result["losses"][1] and len(result["losses"][0]) == 2
        assert result["in the file"] and result["moved"] and result["frozen"]
        assert result["held"] == result["trains"]  # nothing that is frozen
        assert result["keys"] == ["transformer.blocks.0.attn1.to_out.0.lora_A.weight"]
    path = next(tmp_path.rglob(adapters.FILE))
    with safe_open(path, "pt") as file:
        said = file.metadata()
    assert said["expert"] == path.parent.name and said["base"] == "somewhere" and int(said["step"]) > 0


def _no_gather(_, __):
    return mock.patch.object(shards, "whole", lambda p: p.detach())


def _zeros_gathered(_, __):
    return mock.patch.object(shards, "whole", lambda p: torch.zeros(shards.shape_of(p)))


def _key_deleted(where, is_main):
    if is_main:
        path = where / "high_noise" / adapters.FILE
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        for letter in "AB":
            del tensors[f"transformer.blocks.0.ffn.net.0.proj.lora_{letter}.weight"]
        save_file(tensors, path, metadata)
        _resize(where, path)
    return mock.MagicMock()


def _half_deleted(where, is_main):
    if is_main:
        path = where / "high_noise" / adapters.FILE
        tensors = load_file(path)
        del tensors["transformer.blocks.0.ffn.net.0.proj.lora_B.weight"]
        save_file(tensors, path)
        _resize(where, path)
    return mock.MagicMock()


def _another_value(where, is_main):
    if is_main:
        path = where / "high_noise" / adapters.FILE
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    return mock.MagicMock()


def _no_file(where, is_main):
    if is_main:
        (where / "high_noise" / adapters.FILE).unlink()
    return mock.MagicMock()


def _no_optimizer_files(where, is_main):
    if is_main:
        for path in (where / "high_noise").glob("*optim_states.pt"):
            path.unlink()
    return mock.MagicMock()


def _resize(where, path):
    sizes = json.loads((where / "COMPLETE").read_text())
    sizes[path.relative_to(where).as_posix()] = path.stat().st_size
    (where / "COMPLETE").write_text(json.dumps(sizes))


SAVES = {
    _no_gather: "empty, as ZeRO-3 leaves what was not gathered",
    _zeros_gathered: "differs from what is in training",
}
LOADS = {
    _key_deleted: r"lacks blocks\.0\.ffn\.net\.0\.proj\.lora_A\.weight",
    _half_deleted: r"blocks\.0\.ffn\.net\.0\.proj has no lora_B",
    _another_value: "differs from what is in training",
    _no_file: r"missing: adapter\.safetensors",
    _no_optimizer_files: "does not hold what this run trains",
}


def _message(attempt, *given):
    try:
        attempt(*given)
    except CheckpointError as error:
        return str(error)
    return None


def _refusals(folder):
    """What each change makes a save, and the load of an own copy of a checkpoint, say."""
    loop = _loop(3, experts=["high_noise"])
    loop.train_step()
    loop.train_step()
    where = _save(loop, folder)
    loop.train_step()
    messages = {}
    for change in SAVES:
        with change(where, loop.mesh.is_main):
            messages[change.__name__] = _message(_save, loop, folder)
    fresh = _loop(3, experts=["high_noise"])
    for change in LOADS:
        copy = folder / change.__name__ / where.name
        if loop.mesh.is_main:
            shutil.copytree(where, copy)
        with change(copy, loop.mesh.is_main):
            torch.distributed.barrier()
            messages[change.__name__] = _message(restore, fresh.experts, copy)
    return messages | {"none": _message(restore, fresh.experts, where)}


@pytest.fixture(scope="module")
def refusals(world2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    return world2.run(_refusals, folder, timeout=200), folder / "checkpoints"


@pytest.mark.parametrize("change", [*SAVES, *LOADS])
def test_an_adapter_that_is_not_the_one_in_training_is_refused_by_all(refusals, change):
    words, (by_rank, _) = (SAVES | LOADS)[change], refusals
    messages = [messages[change.__name__] for messages in by_rank]
    assert all(messages)
    assert any(re.search(words, message) for message in messages), messages


def test_after_refused_saves_what_was_there_before_is_there_and_can_be_loaded(refusals):
    by_rank, checkpoints = refusals
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_00000002"]
    assert checkpoint.fault(checkpoints / "step_00000002") is None
    assert [messages["none"] for messages in by_rank] == [None, None]


def test_a_base_is_known_again_by_its_numbers():
    model = on_meta(tiny.ARCHITECTURE)

    def fingerprint(seed, expected=None):
        source = Fingerprint(Drawn(model, seed, "all"), expected)
        for name in source.tensors:
            source.read([name])
        return source.value()

    assert fingerprint(1) == fingerprint(1, expected=fingerprint(1)) != fingerprint(2)
    with pytest.raises(CheckpointError, match="seed 2 holds other weights than the adapter was trained on"):
        fingerprint(2, expected=fingerprint(1))


def test_an_adapter_is_folded_in_tensor_by_tensor():
    base = Drawn(on_meta(tiny.ARCHITECTURE), 3, "all")
    shapes = {"blocks.0.attn1.to_q": 3, "blocks.1.ffn.net.0.proj": 4}
    tensors = {}
    for module, rank in shapes.items():
        out, into = base.tensors[f"{module}.weight"].shape
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, into)
        tensors[f"{module}.lora_B.weight"] = torch.randn(out, rank)
    lora = adapters.Adapter(adapted.SETTINGS, {}).lora(tensors, 1)
    merged = Merged(base, lora)
    assert merged.tensors.keys() == base.tensors.keys()
    for name in base.tensors:
        before, after = base.read([name])[name], merged.read([name])[name]
        module = name.removesuffix(".weight")
        if module not in shapes:
            assert torch.equal(before, after)
            continue
        a, b = (tensors[f"{module}.lora_{letter}.weight"].double() for letter in "AB")
        expected = before.double() + 8.0 / shapes[module] * (b @ a)
        torch.testing.assert_close(after.double(), expected, rtol=1e-6, atol=1e-5)


def _seed_of_dropout():
    loop = _loop(3, experts=["high_noise"])
    loop.train_step()
    return torch.initial_seed()


def test_each_rank_drops_others_of_its_clips_and_the_same_ones_in_the_same_step(world2):
    one, other = world2.run(_seed_of_dropout)
    assert one != other
    assert world2.run(_seed_of_dropout) == [one, other]
