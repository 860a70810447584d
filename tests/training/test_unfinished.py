"""An error in the middle of a window, as running out of memory would be, changes no later number."""

from unittest import mock

import pytest

from tests.training import tiny
from tests.training.adapted import loop as adapted_loop
from wan_ds.models import attention
from wan_ds.models.recompute import recompute


class OutOfMemory(RuntimeError):
    """What the test throws."""


def _failing_at(call: int):
    """Attention that fails in one of its calls."""
    attend, calls = attention.attend_within_clips, [0]

    def fail(*arguments):
        calls[0] += 1
        if calls[0] == call:
            raise OutOfMemory
        return attend(*arguments)

    return fail


def _states(stage, kind: str, failing_calls: list[int], lora: bool, sp_size: int) -> dict:
    """Two steps, the second begun anew after each failure; everything that they left."""
    stage, _, precision = str(stage).partition(" ")
    options = {}
    if precision:
        options = {"precision": tiny.PRECISIONS[precision], "network": tiny.model("low_noise").bfloat16()}
    made = (adapted_loop if lora else tiny.loop)(
        stage=int(stage) if stage.isdigit() else stage,
        experts=["low_noise"],
        global_batch_size=4,
        sp_size=sp_size,
        **options,
    )
    (expert,) = made.experts.values()
    recompute(expert.engine.module, kind)
    made.train_step()
    before = made.step
    for call in failing_calls:
        sequence = expert.engine.module.sequence
        with mock.patch.object(sequence, "attention", _failing_at(call)), pytest.raises(OutOfMemory):
            made.train_step()
        assert made.step == before
    made.train_step()
    made.train_step()
    records = [{k: v for k, v in r.items() if not k.startswith("speed/")} for r in made.meters.flush()]
    return {"records": records} | tiny.state_of(expert)


def _undisturbed(stage, kind: str, lora: bool, sp_size: int) -> None:
    plain = _states(stage, kind, [], lora, sp_size)
    # A block attends twice. The 7th time is in the second micro-batch or, with recomputation, in backward.
    for calls in ([3], [1, 7]):
        disturbed = _states(stage, kind, calls, lora, sp_size)
        assert disturbed.pop("records") == plain["records"], calls
        rest = {key: value for key, value in plain.items() if key != "records"}
        assert tiny.equal(disturbed, rest), calls


@pytest.mark.parametrize(
    ("kind", "lora", "sp_size", "stage"),
    [
        *(("none", False, 1, stage) for stage in (0, 1, 2, 3, "offload", "1 bf16_params")),
        *(("full", True, 2, stage) for stage in (0, 1, 2, 3)),
    ],
)
def test_the_next_steps_numbers_are_as_if_it_had_not_been(world2, kind, lora, sp_size, stage):
    world2.run(_undisturbed, stage, kind, lora, sp_size)


def _of_two_experts(fails: bool) -> list[dict]:
    made = tiny.loop(stage=3, policy="balanced", global_batch_size=2)
    made.train_step()
    failing = made.experts[made.routing.expert_of(made.step)]
    sequence = failing.engine.module.sequence
    if fails:
        with mock.patch.object(sequence, "attention", _failing_at(3)), pytest.raises(OutOfMemory):
            made.train_step()
        made._items = []  # whoever caught it goes on with the next clips
    else:
        next(made.batches)
    for _ in range(3):
        made.train_step()
    return [tiny.state_of(expert) for expert in made.experts.values()]


def _both_undisturbed() -> None:
    plain, disturbed = (_of_two_experts(fails) for fails in (False, True))
    assert all(map(tiny.equal, plain, disturbed))


def test_neither_expert_keeps_anything_of_a_window_that_was_given_up(world2):
    world2.run(_both_undisturbed)
