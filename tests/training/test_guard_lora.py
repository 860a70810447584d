"""The guard of the first steps on an adapter, whose lora_A has no gradient while its lora_B is zero."""

import pytest
import torch

from tests.training import tiny
from wan_ds.errors import TrainingError
from wan_ds.models.adapter import AdapterSettings
from wan_ds.models.weights import build_transformer
from wan_ds.training import guard

SETTINGS = AdapterSettings(2, 4.0, ["attn1.to_q", "attn1.to_v"])
WATCHED = "blocks.1.attn1.to_v"


def _network(init_from=None):
    network = build_transformer(tiny.ARCHITECTURE, None, seed=1, adapter=SETTINGS, init_from=init_from)
    network.proj_out.weight.data.normal_(std=0.1)  # a new Wan's head is zero, and lets no gradient through
    return network.train()


def _message(loop, steps):
    try:
        for _ in range(steps):
            loop.train_step()
    except TrainingError as error:
        return str(error)
    return None


def _loop(stage, network):
    return tiny.loop(stage=stage, experts=["high_noise"], guarded=True, network=network, global_batch_size=2)


def _cut(module):
    """Nothing flows back into the module, though what it gives is used."""
    module.register_forward_hook(lambda module, arguments, output: output.detach())


def _guarded(stage, sabotage):
    network = _network()
    layer = network.get_submodule(WATCHED)
    if sabotage == "lora_A":
        _cut(layer.lora_A["default"])
    if sabotage == "lora_B":
        _cut(layer.lora_B["default"])
    loop = _loop(stage, network)
    message = _message(loop, 4)
    return message, loop.experts["high_noise"].guard.is_watching


@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_that_trains_passes_though_its_first_step_has_half_the_gradients(world2, stage):
    assert world2.run(_guarded, stage, None) == [(None, False)] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_a_lora_a_that_never_gets_a_gradient_is_named(world2, stage):
    """Weight decay moves it: nothing but its gradient shows it."""
    for message, _ in world2.run(_guarded, stage, "lora_A"):
        assert "1 trainable parameters had no finite, non-zero gradient in the first 3 steps" in message
        assert f"({WATCHED}.lora_A.default.weight)" in message


def test_a_lora_b_that_never_gets_a_gradient_is_named_and_its_lora_a_is_not(world2):
    for message, _ in world2.run(_guarded, 2, "lora_B"):
        assert "1 trainable parameters had no finite, non-zero gradient in the first 3 steps" in message
        assert f"({WATCHED}.lora_B.default.weight)" in message


def _held(steps, release, cut=False):
    """A lora_B that is kept at zero until a step."""
    network = _network()
    layer = network.get_submodule(WATCHED)
    if cut:
        _cut(layer.lora_A["default"])
    loop = _loop(0, network)
    engine = loop.experts["high_noise"].engine
    update, weight = engine.step, layer.lora_B["default"].weight
    done = 0

    def step(learning_rate):
        nonlocal done
        applied = update(learning_rate)
        done += 1
        if done < release:
            weight.data.zero_()
        return applied

    engine.step = step
    guard.LAST_LOOK = 12
    try:
        return _message(loop, steps), loop.experts["high_noise"].guard.is_watching
    finally:
        guard.LAST_LOOK = guard.GUARDED_STEPS * 2**7


@pytest.mark.parametrize("release", [3, 5])
def test_a_lora_a_is_waited_for_while_its_lora_b_is_zero(world2, release):
    """Released by the third step, it has its first gradient in the fourth: the look at three says nothing."""
    assert world2.run(_held, 5, release) == [(None, True)] * 2
    assert world2.run(_held, 6, release) == [(None, False)] * 2


def test_a_lora_a_that_could_have_had_a_gradient_late_is_named_then(world2):
    for message, _ in world2.run(_held, 12, 4, cut=True):
        assert "had no finite, non-zero gradient in the first 6 steps" in message
        assert f"({WATCHED}.lora_A.default.weight)" in message


def test_a_lora_b_that_stays_at_zero_is_named_at_the_last_look(world2):
    for message, _ in world2.run(_held, 12, 99):
        assert "did not move in the first 12 steps" in message and f"{WATCHED}.lora_B.default" in message


class Trained:
    """An adapter whose lora_B is not zero, so that all have gradients in the first step."""

    def __init__(self):
        rng = torch.Generator().manual_seed(0)
        modules = [f"blocks.{block}.attn1.{name}" for block in (0, 1) for name in ("to_q", "to_v")]
        shapes = {"A": (2, 48), "B": (48, 2)}
        self.tensors = {
            f"{module}.lora_{letter}.weight": torch.randn(shape, generator=rng) * 0.1
            for module in modules
            for letter, shape in shapes.items()
        }

    def scale(self, module):
        return 2.0


def _continued():
    network = _network(Trained())
    _cut(network.get_submodule(WATCHED).lora_A["default"])
    return _message(_loop(0, network), 4), _message(_loop(0, _network(Trained())), 4)


def test_a_continued_adapter_is_watched_from_its_first_step(world2):
    for message, silent in world2.run(_continued):
        assert f"({WATCHED}.lora_A.default.weight)" in message and silent is None
