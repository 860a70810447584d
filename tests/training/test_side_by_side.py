"""Turns, what is told of them, and ranks that wait for theirs and say why they failed."""

import os
import time

import numpy as np
import pytest
import torch

from wan_ds.errors import TrainingError
from wan_ds.training.side_by_side import Ranks, in_turns, peak_bytes, ratios, spread

CPU = torch.device("cpu")


def test_turns_alternate_after_one_warm_up_of_each():
    taken = []
    variants = {name: lambda name=name: taken.append(name) for name in "ab"}
    seconds = in_turns(variants, 3, device=CPU)
    assert "".join(taken) == "ab" * 4
    assert [len(turns) for turns in seconds.values()] == [3, 3]


def test_a_turn_is_timed_from_its_begin_to_its_end():
    seconds = in_turns({"short": lambda: None, "long": lambda: time.sleep(0.05)}, 2, device=CPU)
    assert max(seconds["short"]) < 0.05 <= min(seconds["long"])


def test_ratios_are_of_turns_side_by_side():
    assert ratios([1.0, 6.0], [2.0, 3.0]) == [0.5, 2.0]


@pytest.mark.parametrize("count", [2, 3, 7, 8])
def test_a_spread_is_median_and_quartiles(count):
    values = torch.rand(count, generator=torch.Generator().manual_seed(count)).tolist()
    told = spread(values)
    assert [told.lower, told.median, told.upper] == pytest.approx(np.percentile(values, [25, 50, 75]))


def test_one_value_spreads_nowhere():
    told = spread([3.0])
    assert told.lower == told.median == told.upper == 3.0


def test_peak_memory_is_of_what_lives_at_a_time():
    block = 1000 * 4
    before = torch.ones(1000)

    def two_at_a_time():
        for _ in range(3):
            first = before + 1
            first.view(10, 100).add_(1)  # no memory of its own
            first * 2  # and let go

    assert peak_bytes(two_at_a_time, CPU) == 2 * block


def test_peak_memory_sees_what_backward_keeps_and_makes():
    block = 1000 * 4
    weight = torch.ones(1000, requires_grad=True)
    weight.grad = torch.zeros(1000)

    def forward_backward():
        # exp keeps its result, its product with 3 nothing; then come the gradients of sum, product and exp
        (weight.exp() * 3).sum().backward()

    assert 2 * block <= peak_bytes(forward_backward, CPU) <= 4 * block
    assert peak_bytes(forward_backward, CPU) == peak_bytes(forward_backward, CPU)


def built_for(what: str):
    """For a rank: what answers, fails, dies or sleeps."""
    if what == "a broken start":
        raise ValueError("nothing to build")

    def turn(word: str):
        if word == "fail" and os.environ["RANK"] == "1":
            raise ValueError("rank 1 had enough")
        if word in ("fail", "sleep"):
            time.sleep(60)
        if word == "die":
            os._exit(7)
        return word, os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads()

    return turn


def test_ranks_take_turns_and_bring_their_tracebacks():
    """All worlds start together: each process takes seconds to import torch."""
    failing = Ranks("two", 2, built_for, {"what": ""}, threads=1)
    broken = Ranks("broken", 1, built_for, {"what": "a broken start"})
    dying = Ranks("dying", 1, built_for, {"what": ""})
    slow = Ranks("slow", 1, built_for, {"what": ""}, turn_seconds=0.5)
    with failing, broken, dying, slow:
        assert failing.turn("hello") == [("hello", str(rank), "2", 1) for rank in range(2)]
        started = time.monotonic()
        with pytest.raises(TrainingError, match=r"(?s)two, rank 1: .*line \d+, in turn.*rank 1 had enough"):
            failing.turn("fail")  # while rank 0 waits for ever
        with pytest.raises(TrainingError, match=r"(?s)broken, rank 0: .*in built_for.*nothing to build"):
            broken.turn("hello")
        with pytest.raises(TrainingError, match="dying, rank 0: died with exit code 7"):
            dying.turn("die")
        slow.turn("hello")
        with pytest.raises(TrainingError, match=r"slow: ranks \[0\] of 1 gave no answer in 0.5 s"):
            slow.turn("sleep")
        assert time.monotonic() - started < 45
        assert not any(world._processes for world in (failing, broken, dying, slow))
