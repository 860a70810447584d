"""Values by step: nothing is read from the device before the flush, which gives exactly what was measured."""

import json
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wan_ds.training.meters import Meters, loss_by_sigma


class Recorder(TorchDispatchMode):
    """The names of the operators that run, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_step_has_one_object_with_step_first_in_the_order_of_steps():
    meters = Meters()
    meters.add(2, {"train/loss": 0.5})
    meters.add(1, {"train/loss": torch.tensor(0.25), "expert": "low_noise"})
    meters.add(2, {"speed/step_seconds": 1.5, "expert": "high_noise"})

    records = meters.flush()

    assert records == [
        {"step": 1, "train/loss": 0.25, "expert": "low_noise"},
        {"step": 2, "train/loss": 0.5, "speed/step_seconds": 1.5, "expert": "high_noise"},
    ]
    assert all(next(iter(record)) == "step" for record in records)
    assert meters.flush() == []


def test_adding_and_binning_read_nothing_from_the_device():
    meters = Meters()
    loss, clips, sigma = torch.rand(()), torch.tensor(3), torch.rand(5)

    with Recorder() as recorder:
        for step in range(1, 4):
            meters.add(step, {"train/loss": loss * step, "train/low_noise/clips": clips, "expert": "all"})
            meters.add(step, {"train/loss_by_sigma": loss_by_sigma(sigma, sigma**2)})

    assert recorder.names  # the recorder works
    assert "aten::_local_scalar_dense" not in recorder.names


def test_a_flush_reads_all_steps_at_once(monkeypatch):
    meters = Meters()
    for step in range(1, 6):
        meters.add(step, {"train/loss": torch.rand(()), "train/low_noise/step": torch.tensor(step)})
        meters.add(step, {"train/loss_by_sigma": loss_by_sigma(torch.rand(4), torch.rand(4))})
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.numel()) or tolist(tensor))

    with Recorder() as recorder:
        meters.flush()

    assert reads == [5 * (1 + 1 + 10 + 10)]
    assert "aten::_local_scalar_dense" not in recorder.names


def test_numbers_come_back_exactly_and_integers_stay_integers():
    third, large = torch.tensor(1 / 3, dtype=torch.float32), 2**40 + 1
    meters = Meters()
    meters.add(
        1,
        {
            "f32": third,
            "f64": torch.tensor(1 / 3, dtype=torch.float64),
            "bf16": torch.tensor(1 / 3, dtype=torch.bfloat16),
            "tokens": torch.tensor(large),
            "one": torch.ones(1, 1),
            "plain": 7,
        },
    )

    (record,) = meters.flush()

    assert record["f32"] == third.item()
    assert record["f64"] == 1 / 3
    assert record["bf16"] == 0.333984375
    assert (record["tokens"], type(record["tokens"])) == (large, int)
    assert record["one"] == 1.0
    assert type(record["plain"]) is int
    assert json.loads(json.dumps(record)) == record


def test_what_is_not_finite_is_left_out():
    meters = Meters()
    meters.add(1, {"train/loss": torch.tensor(math.nan), "a": math.inf, "b": torch.tensor(-math.inf), "c": 1})

    assert meters.flush() == [{"step": 1, "c": 1}]


def test_a_value_is_what_it_was_when_it_was_added():
    total = torch.tensor(1.0)
    meters = Meters()
    meters.add(1, {"train/loss": total})
    total.zero_()

    assert meters.flush()[0]["train/loss"] == 1.0


def test_a_written_step_cannot_grow():
    meters = Meters()
    meters.add(3, {"a": 1})
    meters.flush()

    with pytest.raises(ValueError, match="step 3 is already written"):
        meters.add(3, {"b": 1})
    with pytest.raises(ValueError, match="'step' is the object's own key"):
        meters.add(4, {"step": 4})


def test_bins_hold_the_losses_of_their_noise_levels():
    sigma = torch.tensor([0.0, 0.05, 0.1, 0.55, 0.999, 1.0])
    loss = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])

    sums, counts = loss_by_sigma(sigma, loss)

    assert sums.tolist() == [3, 4, 0, 0, 0, 8, 0, 0, 0, 48]
    assert counts.tolist() == [2, 1, 0, 0, 0, 1, 0, 0, 0, 2]


def test_only_bins_with_clips_are_written_with_their_mean_and_count():
    meters = Meters()
    bins = loss_by_sigma(torch.tensor([0.01, 0.09, 1.0]), torch.tensor([1.0, 2.0, 5.0]))
    meters.add(4, {"train/loss_by_sigma": bins})

    assert meters.flush() == [
        {
            "step": 4,
            "train/loss_by_sigma/0.0-0.1": 1.5,
            "train/loss_by_sigma/0.0-0.1/count": 2,
            "train/loss_by_sigma/0.9-1.0": 5.0,
            "train/loss_by_sigma/0.9-1.0/count": 1,
        }
    ]


def test_every_tenth_begins_its_own_bin_in_float32_and_float64():
    for dtype in (torch.float32, torch.float64):
        sigma = torch.tensor([k / 10 for k in range(10)], dtype=dtype)
        assert loss_by_sigma(sigma, torch.ones(10)).counts.tolist() == [1.0] * 10


def test_a_loss_that_is_not_finite_stays_in_its_bin():
    sums, counts = loss_by_sigma(torch.tensor([0.15, 0.85]), torch.tensor([math.nan, 2.0]))
    meters = Meters()
    meters.add(1, {"x": loss_by_sigma(torch.tensor([0.15, 0.85]), torch.tensor([math.nan, 2.0]))})

    assert (sums[8].item(), counts.sum().item(), sums[0].item()) == (2.0, 2.0, 0.0)
    assert meters.flush() == [{"step": 1, "x/0.1-0.2/count": 1, "x/0.8-0.9": 2.0, "x/0.8-0.9/count": 1}]


def test_no_clips_give_empty_bins():
    bins = loss_by_sigma(torch.zeros(0), torch.zeros(0))

    assert torch.stack(bins).tolist() == [[0.0] * 10, [0.0] * 10]
