"""The window and the two engines, on real ranks, against plain torch."""

import math

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel

from tests.models.variants import ARCHITECTURES
from tests.training import tiny
from wan_ds import streams
from wan_ds.errors import TrainingError
from wan_ds.models.conditioning import FirstLastFrame, ImageToVideo, TextImageToVideo
from wan_ds.models.weights import build_transformer
from wan_ds.training import guard
from wan_ds.training.loop import non_finite_stays
from wan_ds.training.lr_schedule import Constant

STEPS = 5


def trained(stage, lr=1e-3, steps=STEPS, **options):
    """Rank's view of a short run: records, final weights of each expert, and the draws that each step saw."""
    loop = tiny.loop(stage=stage, lr=lr, **options)
    gradients = {}

    def note():
        active = loop.experts[loop.routing.expert_of(loop.step)]
        for name, parameter in active.engine.parameters():
            gradients[loop.step, name] = active.engine.full_gradient(parameter).clone()

    for expert in loop.experts.values():
        expert.guard = _Watch(note)
    for _ in range(steps):
        loop.train_step()
    return loop.meters.flush(), {name: tiny.full_weights(e) for name, e in loop.experts.items()}, gradients


class _Watch:
    """A guard that never judges, to read gradients where every stage has them."""

    is_watching = True

    def __init__(self, look):
        self.before_update = look

    def after_step(self, applied, learning_rate): ...


def plain(lr, steps, global_batch_size=4, caption_dropout=0.2, max_norm=1.0):
    """The same run in one process by stock diffusers and torch: the reference, sharing only the draws'
    streams."""
    models, optimizers = {}, {}
    for name in ("high_noise", "low_noise"):
        models[name] = WanTransformer3DModel(**tiny.ARCHITECTURE)
        models[name].load_state_dict(tiny.model(name).state_dict())
        decayed = [
            p for n, p in models[name].named_parameters() if p.ndim > 1 and "scale_shift_table" not in n
        ]
        rest = [p for n, p in models[name].named_parameters() if p.ndim == 1 or "scale_shift_table" in n]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizers[name] = torch.optim.AdamW(groups, lr=lr)
    losses, norms = [], []
    order = _order(steps * global_batch_size)
    for step in range(steps):
        high_share = 1 - 0.875 / (5 - 4 * 0.875)
        name = "high_noise" if streams.uniform(tiny.SEED, "expert", step) < high_share else "low_noise"
        low_u, high_u = ((1 - high_share), 1.0) if name == "high_noise" else (0.0, 1 - high_share)
        strata = torch.randperm(global_batch_size, generator=streams.generator(tiny.SEED, "strata", step))
        total = 0.0
        for slot in range(global_batch_size):
            index = order[step * global_batch_size + slot]
            u = (strata[slot].item() + streams.uniform(tiny.SEED, "sigma", step, slot)) / global_batch_size
            u = low_u + (high_u - low_u) * u
            sigma = torch.tensor(5 * u / (1 + 4 * u), dtype=torch.float32)
            clip = tiny.latents_of(index)
            noise = streams.normal(tiny.LATENTS, tiny.SEED, "noise", step, slot)
            dropped = streams.uniform(tiny.SEED, "caption", step, slot) < caption_dropout
            text = tiny.prompt_of("" if dropped else f"caption {index}")
            noised = (1 - sigma) * clip + sigma * noise
            predicted = models[name](noised[None], (1000 * sigma)[None], text[None], return_dict=False)[0][0]
            total = total + _bell(1000 * sigma.item()) * torch.nn.functional.mse_loss(predicted, noise - clip)
        loss = total / global_batch_size
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(models[name].parameters(), max_norm).item())
        losses.append(loss.item())
        optimizers[name].step()
        optimizers[name].zero_grad()
    return losses, norms, {name: dict(model.named_parameters()) for name, model in models.items()}


def _bell(t):
    grid = [math.exp(-2 * ((x - 500) / 1000) ** 2) for x in range(1, 1001)]
    return (
        max(0.0, math.exp(-2 * ((t - 500) / 1000) ** 2) - min(grid)) * 1000 / (sum(grid) - 1000 * min(grid))
    )


def _order(positions):
    order = []
    for epoch in range(-(-positions // tiny.CLIPS)):
        order += torch.randperm(tiny.CLIPS, generator=streams.generator(tiny.SEED, "order", epoch)).tolist()
    return order


@pytest.mark.parametrize(("stage", "lr"), [(3, 1e-3), (3, 1e-5), (2, 1e-3), (1, 1e-4), (0, 1e-3)])
def test_two_ranks_of_zero_equal_one_process_of_plain_adamw(world2, stage, lr):
    """5 steps in float32. Weights to 1% of the distance an Adam step covers: 5 steps of lr, less rounding
    of sums."""
    (records, weights, _), other = world2.run(trained, stage, lr)
    losses, norms, reference = plain(lr, STEPS)
    assert {r["expert"] for r in records} == {"high_noise", "low_noise"}
    assert [r["train/loss"] for r in records] == pytest.approx(losses, rel=1e-5)
    assert [r[f"train/{r['expert']}/grad_norm"] for r in records] == pytest.approx(norms, rel=1e-5)
    for name, expected in reference.items():
        for key, value in expected.items():
            assert (weights[name][key] - value).abs().max() < 0.01 * lr, (name, key)
            assert torch.equal(weights[name][key], other[1][name][key])


def _other_ways(stage, precision):
    loop = tiny.loop(stage=stage, precision=tiny.PRECISIONS[precision])
    for _ in range(3):
        loop.train_step()
    dtypes = {p.dtype for e in loop.experts.values() for _, p in e.engine.parameters()}
    torch.set_autocast_cache_enabled(True)
    return loop.meters.flush(), dtypes


@pytest.mark.parametrize(
    ("stage", "precision"), [("offload", "fp32"), ("hpz", "fp32"), (3, "bf16_autocast"), (2, "bf16_autocast")]
)
def test_offload_and_hpz_give_the_same_numbers_and_bf16_nearly_so(world2, stage, precision):
    """bf16 has 8 bits: products are off by up to 2**-8, and the loss, a mean of many, by less than 2%."""
    (records, dtypes), _ = world2.run(_other_ways, stage, precision)
    losses, norms, _ = plain(1e-3, 3)
    exact = precision == "fp32"
    assert [r["train/loss"] for r in records] == pytest.approx(losses, rel=1e-5 if exact else 2e-2)
    if not exact:
        assert [r["train/loss"] for r in records] != pytest.approx(losses, rel=1e-6)  # bf16 really computed
    assert [r[f"train/{r['expert']}/grad_norm"] for r in records] == pytest.approx(
        norms, rel=1e-5 if exact else 5e-2
    )
    assert dtypes == {torch.float32}


def test_the_layout_of_micro_batches_and_ranks_changes_no_number(world1, world2):
    """Global batch 4 as 4x1, 2x2 and 1x4 on 1 and 2 ranks: same draws, gradients and logged loss."""
    runs = {}
    for world in (world1, world2):
        for micro_batch_size in (1, 2, 4):
            if micro_batch_size * world.size <= 4:
                runs[world.size, micro_batch_size] = world.run(
                    trained, 3, 1e-3, 2, micro_batch_size=micro_batch_size
                )[0]
    assert len(runs) == 5
    records, _, gradients = runs.pop((1, 4))
    for layout, (other_records, _, other_gradients) in runs.items():
        for ours, theirs in zip(records, other_records, strict=True):
            assert theirs["train/loss"] == pytest.approx(ours["train/loss"], rel=1e-6), layout
            drawn = {k: v for k, v in ours.items() if k.endswith("/count")}
            assert drawn == {k: v for k, v in theirs.items() if k.endswith("/count")}, layout
        for key, gradient in gradients.items():
            scale = gradient.abs().max()
            assert (other_gradients[key] - gradient).abs().max() <= 1e-5 * scale, (layout, key)


def test_ranks_with_unequal_shares_run_as_many_micro_batches(world1, world2):
    """3 clips on 2 ranks: the rank that holds one runs a second of weight zero, and nothing else changes."""
    (alone, _, gradients), *_ = world1.run(trained, 3, 1e-3, 2, global_batch_size=3)
    (shared, _, others), *_ = world2.run(trained, 3, 1e-3, 2, global_batch_size=3)
    assert [r["train/loss"] for r in shared] == pytest.approx([r["train/loss"] for r in alone], rel=1e-6)
    for key, gradient in gradients.items():
        assert (others[key] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), key


TASKS = {
    "i2v": ImageToVideo(),
    "flf2v": FirstLastFrame(),
    "i2v-a14b": ImageToVideo(),
    "ti2v": TextImageToVideo(0.5),
}


@pytest.mark.parametrize("task", TASKS)
def test_two_ranks_of_every_task_give_the_numbers_of_one(world1, world2, task):
    """One step of ZeRO-3; for ti2v one in which a rank's clip has its image given and another's has not."""
    given = {"architecture": ARCHITECTURES[task], "conditioning": TASKS[task], "global_batch_size": 3}
    given["first_step"] = 4
    (one,), _, gradients = world1.run(trained, 3, 1e-3, 1, **given, micro_batch_size=3)[0]
    (two,), _, theirs = world2.run(trained, 3, 1e-3, 1, **given)[0]
    assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-6)
    norm = f"train/{one['expert']}/grad_norm"
    assert two[norm] == pytest.approx(one[norm], rel=1e-5)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for key, gradient in gradients.items():
        # what cancels to a thousandth of the largest gradient is rounding in the sums of either layout
        scale = max(gradient.abs().max().item(), 1e-3 * largest)
        assert (theirs[key] - gradient).abs().max() <= 1e-5 * scale, key


def _step_of_one(stage, poisoned):
    loop = tiny.loop(stage=stage)
    while any(expert.steps < 2 for expert in loop.experts.values()):  # moments exist in both
        loop.train_step()
    before = {name: tiny.state_of(expert) for name, expert in loop.experts.items()}
    active = loop.routing.expert_of(loop.step)
    if poisoned and dist.get_rank() == 1:
        loop.encoded._encoded = tiny.filled(math.nan)
    loop.train_step()
    unchanged = {
        name: tiny.equal(before[name], tiny.state_of(expert)) for name, expert in loop.experts.items()
    }
    return active, unchanged, {name: (e.skipped, e.skipped_in_a_row) for name, e in loop.experts.items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_one_expert_leaves_the_other_identical_to_the_byte(world2, stage):
    for active, unchanged, _ in world2.run(_step_of_one, stage, False):
        assert unchanged == {"high_noise": active != "high_noise", "low_noise": active != "low_noise"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(world2, stage):
    for active, unchanged, skipped in world2.run(_step_of_one, stage, True):
        assert unchanged == {"high_noise": True, "low_noise": True}
        assert skipped == {name: (1, 1) if name == active else (0, 0) for name in skipped}


def _train_after_a_skip(stage):
    loop = tiny.loop(stage=stage, experts=["high_noise"])
    clean = loop.encoded._encoded
    loop.train_step()
    if dist.get_rank() == 0:
        loop.encoded._encoded = tiny.filled(math.inf)
    loop.train_step()
    loop.encoded._encoded = clean
    for _ in range(2):
        loop.train_step()
    return loop.meters.flush(), tiny.full_weights(loop.experts["high_noise"])


@pytest.mark.parametrize("stage", [2, 3])
def test_training_goes_on_after_a_skip(world2, stage):
    records, weights = world2.run(_train_after_a_skip, stage)[0]
    assert [r["train/high_noise/step"] for r in records] == [1, 1, 2, 3]
    assert [r["train/high_noise/skipped"] for r in records] == [0, 1, 1, 1]
    assert ["train/loss" in r for r in records] == [True, False, True, True]
    assert all(w.isfinite().all() for w in weights.values())


def _diverge():
    loop = tiny.loop(stage=3, experts=["low_noise"])
    loop.encoded._encoded = tiny.filled(math.nan)
    try:
        for _ in range(10):
            loop.train_step()
    except TrainingError as error:
        return loop.step, str(error)


def test_training_stops_after_too_many_skips_in_a_row(world2):
    for step, message in world2.run(_diverge):
        assert step == 3
        assert (
            "low_noise" in message
            and "3 times in a row" in message
            and "train.max_skipped_in_a_row" in message
        )


def test_a_finite_loss_passes_unchanged_and_any_other_becomes_nan_with_its_gradient():
    for value in (0.0, 1.5, 1e30, math.inf, -math.inf, math.nan):
        x = torch.tensor(value, requires_grad=True)
        loss = non_finite_stays(x * 1)
        loss.backward()
        if math.isfinite(value):
            assert loss.item() == torch.tensor(value).item() and x.grad.item() == 1
        else:
            assert math.isnan(loss.item()) and math.isnan(x.grad.item())


def _guarded(stage, sabotage):
    network = tiny.model("high_noise")
    if sabotage == "unused":
        network.unused = torch.nn.Linear(3, 3)
    if sabotage == "frozen":
        network.blocks[0].attn1.to_q.weight.requires_grad_(False)
    loop = tiny.loop(stage=stage, experts=["high_noise"], guarded=True, network=network)
    try:
        for _ in range(4):
            loop.train_step()
    except TrainingError as error:
        return str(error)
    return None


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_guard_is_silent_when_everything_trains(world2, stage):
    assert world2.run(_guarded, stage, None) == [None, None]
    assert world2.run(_guarded, stage, "frozen") == [None, None]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_guard_names_a_parameter_without_gradient(world2, stage):
    for message in world2.run(_guarded, stage, "unused"):
        assert "2 trainable parameters had no finite, non-zero gradient in the first 3 steps" in message
        assert "(unused.weight, unused.bias)" in message


def _slow_start(stage):
    """A warm-up from rates below what float32 can add to a weight of 1, and the zero head of a new Wan."""
    network = build_transformer(tiny.ARCHITECTURE, None, seed=1, expert="high_noise")
    loop = tiny.loop(stage=stage, experts=["high_noise"], guarded=True, network=network, lr=1e-5)
    expert = loop.experts["high_noise"]
    expert.schedule = Constant(steps=1000, warmup_steps=999)
    watched = []
    for step in range(12):
        if step == 5:
            expert.schedule = Constant(steps=1000)
        loop.train_step()
        watched.append(expert.guard.is_watching)
    return watched


@pytest.mark.parametrize("stage", [0, 3])
def test_the_guard_waits_for_weights_that_a_slow_start_holds(world2, stage):
    assert world2.run(_slow_start, stage) == [[True] * 11 + [False]] * 2


def _still(last_look):
    network = tiny.model("high_noise")
    loop = tiny.loop(stage=0, experts=["high_noise"], guarded=True, network=network)
    held, before = network.proj_out.bias, network.proj_out.bias.detach().clone()
    engine = loop.experts["high_noise"].engine
    update = engine.step

    def step(learning_rate):
        applied = update(learning_rate)
        held.data.copy_(before)
        return applied

    engine.step = step
    guard.LAST_LOOK = last_look
    try:
        for _ in range(last_look):
            loop.train_step()
    except TrainingError as error:
        return str(error)
    finally:
        guard.LAST_LOOK = guard.GUARDED_STEPS * 2**7


def test_the_guard_names_a_trainable_parameter_that_never_moves(world2):
    for message in world2.run(_still, 6):
        assert "1 trainable parameters did not move in the first 6 steps (proj_out.bias)" in message


def _frozen_that_moves():
    network = tiny.model("high_noise")
    ones = network.blocks[1].attn1.norm_q.weight.requires_grad_(False)  # equal values must not cancel
    loop = tiny.loop(stage=2, experts=["high_noise"], guarded=True, network=network)
    loop.train_step()
    ones.data.mul_(1.5)
    try:
        for _ in range(3):
            loop.train_step()
    except TrainingError as error:
        return str(error)


def test_the_guard_names_a_frozen_parameter_that_moved(world2):
    for message in world2.run(_frozen_that_moves):
        assert "1 frozen parameters moved in the first 3 steps (blocks.1.attn1.norm_q.weight)" in message


def _syncs():
    """Operators that read a number from the device, by the file that asked for them, while six steps run."""
    import traceback

    from torch.utils._python_dispatch import TorchDispatchMode

    asked = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ARG002
            if "_local_scalar_dense" in str(function):
                frames = [f.filename for f in traceback.extract_stack() if "/torch/" not in f.filename]
                asked.append(frames[-2] if frames[-1].endswith("test_loop.py") else frames[-1])
            return function(*args, **(kwargs or {}))

    loop = tiny.loop(stage=3)
    for _ in range(4):
        loop.train_step()
    with Watch():
        for _ in range(6):
            loop.train_step()
        torch.ones(()).item()  # the watch sees what it should
    return asked


def test_steps_between_logging_read_nothing_from_the_device(world2):
    for asked in world2.run(_syncs):
        assert asked and asked[-1].endswith(("test_loop.py", "world.py"))
        assert not [name for name in asked if "/wan_ds/" in name]
