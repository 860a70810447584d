import random

import pytest
import torch

from wan_ds.data.order import clip_at, clips_of_step
from wan_ds.streams import generator


@pytest.mark.parametrize("global_batch_size", [1, 2, 3, 7, 20])
def test_each_clip_comes_once_per_epoch_over_epoch_borders(global_batch_size):
    steps = -(-21 // global_batch_size)
    order = [index for step in range(steps) for index in clips_of_step(step, global_batch_size, 7, seed=5)]
    epochs = [order[:7], order[7:14], order[14:21]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_seven_clips_two_ranks_three_epochs_are_covered_exactly_and_disjointly():
    ranks = [[], []]
    for step in range(21 // 2 + 1):
        order = clips_of_step(step, 2, 7, seed=0)
        for rank in (0, 1):
            ranks[rank].append(order[rank])
    interleaved = [index for pair in zip(*ranks, strict=True) for index in pair][:21]
    assert [sorted(interleaved[e : e + 7]) for e in (0, 7, 14)] == [list(range(7))] * 3


def test_the_order_depends_on_position_alone_not_on_how_it_is_asked_for():
    straight = [clip_at(position, 7, seed=3) for position in range(70)]
    positions = list(range(70))
    random.Random(0).shuffle(positions)
    asked = {position: clip_at(position, 7, seed=3) for position in positions}
    assert [asked[position] for position in range(70)] == straight
    assert clips_of_step(4, 6, 7, seed=3) == straight[24:30]
    assert clips_of_step(8, 3, 7, seed=3) == straight[24:27]


def test_an_epoch_is_the_permutation_of_its_own_key():
    assert [clip_at(p, 9, seed=2) for p in range(18, 27)] == torch.randperm(
        9, generator=generator(2, "order", 2)
    ).tolist()


def test_another_seed_is_another_order():
    orders = {tuple(clip_at(p, 20, seed) for p in range(20)) for seed in range(10)}
    assert len(orders) == 10


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    clips_of_step(12345, 8, 11, seed=99)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_may_hold_more_than_the_dataset():
    order = clips_of_step(0, 5, 2, seed=0)
    assert sorted(order[:2]) == sorted(order[2:4]) == [0, 1]
