"""Adapters that go on from files: the next loss is that of the run that wrote them, whatever the dialect."""

import copy
from unittest import mock

import pytest

from tests.training import adapted, tiny
from wan_ds.config import Config
from wan_ds.config.command_line import parse
from wan_ds.config.composition import configure
from wan_ds.errors import CheckpointError
from wan_ds.export import Format, write_adapters
from wan_ds.interop import lora
from wan_ds.training import adapters, checkpoint, networks, parts
from wan_ds.training.callbacks import Save
from wan_ds.training.loop import Loop
from wan_ds.training.lr_schedule import Constant

SIZES = tiny.ARCHITECTURE | {"patch_size": "[1,2,2]", "num_layers": 1}
BASE = [
    "recipe=quickstart",
    "adapter=lora",
    "optimizer.lr=3e-2",
    "run_dir=x",
    *(f"model.transformer.{key}={value}" for key, value in SIZES.items()),
]
# By expert: what trains, and the same scales as a file without one has them, DiffSynth's, whose B holds them.
SETTINGS = {
    "high_noise": (
        ["rank=4", "targets=[to_q,to_out.0,ffn.net.2]", "rank_pattern={attn2.to_q:3}"],
        ["alpha=6", "alpha_pattern={ffn.net.2:1.5,attn1.to_q:11}"],
        ["alpha=4", "alpha_pattern={attn2.to_q:3}"],
    ),
    "low_noise": (
        ["rank=3", "rank_pattern={to_k:2}"],
        ["alpha=5", "alpha_pattern={to_v:0.7}", "rslora=true"],
        ["alpha=3", "alpha_pattern={to_k:2}"],
    ),
}
STEPS = 3


def _config(base: list[str], *typed: list[str]) -> Config:
    return configure(parse([*BASE, *base, *(f"adapter.{one}" for some in typed for one in some)]))


def _from(config: Config, **files: str) -> Config:
    config = copy.deepcopy(config)
    config.adapter.init_from = files
    return config


def _loop(config: Config, name: str, first_step: int = 0) -> Loop:
    """`tiny.loop` on the expert that a run of these settings trains."""

    def expert(name, interval, mesh, **_):
        return networks.build_expert(config, name, interval, Constant(100), mesh)

    given = {"architecture": dict(config.model.transformer), "global_batch_size": 2}
    with mock.patch.object(tiny, "expert", expert):
        return tiny.loop(stage=3, experts=[name], first_step=first_step, **given)


def _next_loss(loop: Loop) -> float:
    loop.meters.flush()
    loop.train_step()
    (record,) = loop.meters.flush()
    return record["train/loss"]


def _straight(config, expert, folder):
    loop = _loop(config, expert)
    for _ in range(STEPS):
        loop.train_step()
    Save(folder, None, 9, lambda loop: loop.meters.flush()).save(loop)
    return _next_loss(loop)


def _continued(configs, expert):
    return [_next_loss(_loop(config, expert, first_step=STEPS)) for config in configs]


def _refusals(configs, expert):
    messages = []
    for config in configs:
        with pytest.raises(CheckpointError) as error:
            _loop(config, expert)
        messages.append(str(error.value))
    return messages


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """What names bases whose heads are not zero, so that an adapter shows in the loss."""
    return adapted.write_base(tmp_path_factory.mktemp("base"), BASE)


@pytest.fixture(scope="module")
def trained(world2, base, tmp_path_factory):
    """By expert: the file of each dialect that its run exports, and the loss of that run's next step."""
    found = {}
    for expert, (places, scales, _) in SETTINGS.items():
        config, folder = _config(base, places, scales), tmp_path_factory.mktemp(expert)
        losses = world2.run(_straight, config, expert, folder, timeout=200)
        live = adapters.read(checkpoint.find(folder, "latest") / expert)
        files = {}
        for dialect in lora.DIALECTS:
            (folder / dialect).mkdir()
            write_adapters(folder / dialect, config, {expert: live}, Format[dialect], "mine")
            files[dialect] = str(folder / dialect / f"mine-{expert}.safetensors")
        found[expert] = files, losses
    return found


@pytest.mark.parametrize("expert", SETTINGS)
def test_from_a_file_of_each_dialect_the_next_loss_is_that_of_the_run_that_wrote_it(
    world2, base, trained, expert
):
    """Measured: equal, DiffSynth's to 1e-7, as its B was rounded once more; a fresh adapter's is 2% off."""
    places, scales, in_b = SETTINGS[expert]
    files, straight = trained[expert]
    fresh, for_diffsynth = _config(base, places, scales), _config(base, places, in_b)
    configs = {
        dialect: _from(for_diffsynth if dialect == "diffsynth" else fresh, **{expert: file})
        for dialect, file in files.items()
    } | {"fresh": fresh}
    for losses, expected in zip(
        world2.run(_continued, list(configs.values()), expert, timeout=200), straight, strict=True
    ):
        off = {dialect: abs(loss / expected - 1) for dialect, loss in zip(configs, losses, strict=True)}
        print(expert, ", ".join(f"{dialect} {one:.1e}" for dialect, one in off.items()))  # noqa: T201
        assert off.pop("fresh") > 0.01  # of which an adapter at another strength would show a part
        assert max(off.values()) < 1e-5


@pytest.mark.parametrize("expert", SETTINGS)
def test_a_file_of_the_other_expert_is_refused_by_all_in_each_dialect(world2, base, trained, expert):
    (other,) = SETTINGS.keys() - {expert}
    places, scales, _ = SETTINGS[other]  # those of the file: nothing but the expert is wrong
    config = _config(base, places, scales)
    configs = [_from(config, **{expert: file}) for file in trained[other][0].values()]
    for messages in world2.run(_refusals, configs, expert):
        for message, file in zip(messages, trained[other][0].values(), strict=True):
            said = f"{file} is for the expert {other}, by its metadata, and would be loaded into {expert}"
            assert said in message
    with pytest.raises(CheckpointError, match=f"would be loaded into {expert}; swap the two files"):
        parts.locate_weights(configs[0], is_new=True)  # before a weight is read


def test_diffsynths_file_is_refused_with_the_scales_that_it_needs(world2, base, trained):
    """It says no alpha and no rslora: with those that trained, it would go on at another strength."""
    for expert, told in {
        "high_noise": "rank=4 adapter.alpha=4",
        "low_noise": "rank=3 adapter.alpha=1.73205",
    }.items():
        places, scales, _ = SETTINGS[expert]
        config = _from(_config(base, places, scales), **{expert: trained[expert][0]["diffsynth"]})
        for (message,) in world2.run(_refusals, [config], expert):
            assert f"adapter.init_from.{expert} has another rank or alpha" in message
            assert f"type adapter.{told} and patterns for the modules that differ" in message
