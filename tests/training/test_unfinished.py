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
    made = (adapted_loop if lora else tiny.loop)(
        stage=stage, experts=["low_noise"], global_batch_size=4, sp_size=sp_size
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
        *(("none", False, 1, stage) for stage in (0, 1, 2, 3, "offload")),
        *(("full", True, 2, stage) for stage in (0, 1, 2, 3)),
    ],
)
def test_the_next_steps_numbers_are_as_if_it_had_not_been(world2, kind, lora, sp_size, stage):
    world2.run(_undisturbed, stage, kind, lora, sp_size)
