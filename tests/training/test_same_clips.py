"""Ranks that share a clip agree on all that it trains on, others have other clips; the odd one is named."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.models.variants import ARCHITECTURES
from tests.training import tiny
from wan_ds.errors import TrainingError
from wan_ds.models.conditioning import ImageToVideo
from wan_ds.training.same_clips import SHARED, WORLD, SameClips, digest, disagreement, named

EXPERTS = ["high_noise", "low_noise"]
COLUMN = {name: column for column, name in enumerate((*WORLD, *SHARED))}
SLOTS = len(COLUMN)


def gathered(ranks: int, sp_size: int, slots: int = 2) -> torch.Tensor:
    """What ranks that agree send: int64 [ranks, numbers]."""
    rows = torch.ones(ranks, SLOTS + slots, dtype=torch.int64)
    rows[:, COLUMN["step"]] = 13
    for rank in range(ranks):
        first = rank // sp_size * slots
        rows[rank, len(WORLD) : SLOTS] = 1000 + first  # the clips of another group are others
        rows[rank, SLOTS:] = torch.arange(first, first + slots)
    return rows


@pytest.mark.parametrize("sp_size", [1, 2, 4])
def test_ranks_that_agree_are_let_through(sp_size):
    assert disagreement(gathered(4, sp_size), sp_size, EXPERTS) is None


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("odd", range(4))
def test_the_odd_one_of_four_is_named_by_majority(name, odd):
    rows = gathered(4, 4)
    rows[odd, COLUMN[name]] += 1
    told = disagreement(rows, 4, EXPERTS)
    others = named([rank for rank in range(4) if rank != odd])
    assert f"at step 13 (low_noise): rank {odd} differs from {others} in {name} (" in told


@pytest.mark.parametrize("name", WORLD)
def test_the_world_agrees_on_the_step_whoever_shares_clips(name):
    rows = gathered(4, 2)
    rows[3, COLUMN[name]] = 0
    told = disagreement(rows, 2, EXPERTS)
    assert told.count("differs from") == 1 and f"rank 3 differs from ranks 0, 1 and 2 in {name} (" in told
    if name == "expert":
        assert "(high_noise against low_noise)" in told


def test_without_a_majority_each_rank_is_told_with_its_hash():
    rows = gathered(4, 2)
    rows[2, COLUMN["text"]] = 0x1234567890ABCDEF
    rows[3, COLUMN["text"]] = -1
    told = disagreement(rows, 2, EXPERTS)
    assert "ranks 2 and 3 differ in text (rank 2 12345678, rank 3 ffffffff)" in told
    assert "rank 0" not in told


def test_every_item_that_differs_is_told():
    rows = gathered(2, 2)
    rows[1, COLUMN["sigma"]] = rows[1, COLUMN["noise"]] = 7
    told = disagreement(rows, 2, EXPERTS)
    assert "in sigma (" in told and "in noise (" in told and "latents" not in told


def test_ranks_that_do_not_share_clips_have_other_slots():
    rows = gathered(4, 2)
    rows[2:, SLOTS:] = torch.tensor([1, -1])  # the second group has one clip, and it is the first group's
    told = disagreement(rows, 2, EXPERTS)
    assert "ranks 0 and 1 and ranks 2 and 3 train on the same clip at step 13 (low_noise), slot 1" in told
    rows[2:, SLOTS:] = torch.tensor([2, -1])
    assert disagreement(rows, 2, EXPERTS) is None


def test_many_ranks_are_told_in_few_words():
    assert named(range(64)) == "ranks 0, 1, 2, 3 and 60 more"


def test_one_bit_a_shape_and_a_dtype_change_the_hash():
    tensor = torch.randn(3, 4)
    flipped = tensor.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = [flipped, tensor.T, tensor.reshape(4, 3), tensor.bfloat16(), tensor.double(), None, [tensor]]
    found = [digest(value) for value in [tensor, *others]]
    assert len(set(found)) == len(found) and digest(tensor.clone()) == found[0]
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest([[tensor], []]) != digest([[], [tensor]])
    assert all(-(2**63) <= value < 2**63 for value in found)


def _flip_a_bit(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(torch.int32).flatten()[-1] ^= 1
    return changed


def _loop(sp_size: int, every_steps: int = 1):
    """A loop over an image model, which has every kind of condition."""
    architecture = ARCHITECTURES["i2v"]
    loop = tiny.loop(
        stage=0, sp_size=sp_size, global_batch_size=4, architecture=architecture, conditioning=ImageToVideo()
    )
    loop.same_clips = SameClips(loop.mesh, loop.objective, loop.experts, loop.caption_dropout, every_steps)
    return loop


def _corrupted(sp_size: int) -> dict[str, str]:
    """What the check says when rank 1 alone has each of these wrong."""
    loop = _loop(sp_size)
    name = loop.routing.expert_of(0)
    expert, batches = loop.experts[name], loop.split(next(loop.batches))
    first = batches[0]
    condition = first.conditions[0]

    def with_condition(**changed):
        return [replace(first, conditions=[replace(condition, **changed)]), *batches[1:]]

    text = _flip_a_bit(first.prompt_embeds)
    other = next(other for other in loop.experts.values() if other is not expert)
    cases = {
        "nothing": (0, expert, batches),
        "latents": (0, expert, [replace(first, latents=[_flip_a_bit(first.latents[0])]), *batches[1:]]),
        "condition latents": (
            0,
            expert,
            with_condition(condition_latents=_flip_a_bit(condition.condition_latents)),
        ),
        "frame mask": (0, expert, with_condition(frame_mask=1 - condition.frame_mask)),
        "image embeddings": (0, expert, with_condition(image_embeds=_flip_a_bit(condition.image_embeds))),
        "text": (0, expert, [replace(first, prompt_embeds=text), *batches[1:]]),
        "slots": (0, expert, [replace(first, slots=[3 - first.slots[0]]), *batches[1:]]),
        "expert": (0, other, batches),
        "step": (1, expert, batches),
        "number of micro-batches": (0, expert, batches[1:]),
    }
    rank = dist.get_rank()
    told = {case: _told(loop, *(own if rank == 1 else cases["nothing"])) for case, own in cases.items()}
    draws = {"given images": ("given", [True] * 9), "caption dropout": ("drops_caption", 7)}
    for case, (draw, wrong) in draws.items():
        right = getattr(loop.objective, draw)
        own = (lambda *_, wrong=wrong: wrong) if rank == 1 else right
        with mock.patch.object(loop.objective, draw, own):
            told[case] = _told(loop, *cases["nothing"])
    loop.objective.seed += rank
    return told | {"seed": _told(loop, *cases["nothing"])}


def _told(loop, *call) -> str:
    try:
        loop.same_clips(*call)
    except TrainingError as error:
        return str(error)
    return ""


def test_of_two_ranks_that_share_clips_what_one_bit_changes_is_named_on_both(world2):
    told, other = world2.run(_corrupted, 2)
    assert told == other and told["nothing"] == ""
    for name, message in told.items():
        if name not in ("nothing", "slots", "seed", "step"):
            assert f"ranks 0 and 1 differ in {name} (rank 0 " in message, (name, message)
            assert message.count(" differ in ") == 1, (name, message)
    assert "differ in slots" in told["slots"] and "differ in noise" in told["slots"]
    assert "differ in step (rank 0 1, rank 1 2)" in told["step"]
    assert "differ in sigma" in told["seed"] and "differ in noise" in told["seed"]
    assert "latents" not in told["seed"] and "version of torch" in told["seed"]


def test_ranks_with_clips_of_their_own_differ_in_them_and_agree_on_the_step(world2):
    told, other = world2.run(_corrupted_world, 1)
    assert told == other
    assert told["own clips"] == "" and "differ in step" in told["step"]
    assert "rank 0 and rank 1 train on the same clip at step 1" in told["the same slots"]


def _corrupted_world(sp_size: int) -> dict[str, str]:
    loop = _loop(sp_size)
    expert, batches = loop.experts[loop.routing.expert_of(0)], loop.split(next(loop.batches))
    rank = dist.get_rank()
    shifted = [replace(batch, slots=[slot - 2 * rank for slot in batch.slots]) for batch in batches]
    calls = {"own clips": (0, batches), "step": (rank, batches), "the same slots": (0, shifted)}
    return {case: _told(loop, step, expert, own) for case, (step, own) in calls.items()}


def _trained(sp_size: int, every_steps: int) -> tuple[list, list, str]:
    """Steps that were compared, losses, and what a step says of a clip that is corrupted on rank 1."""
    loop = _loop(sp_size, every_steps)
    compared, plain = [], tiny.loop(
        stage=0,
        sp_size=sp_size,
        global_batch_size=4,
        architecture=ARCHITECTURES["i2v"],
        conditioning=ImageToVideo(),
    )
    hashes = loop.same_clips.hashes
    loop.same_clips.hashes = lambda step, *rest: compared.append(step) or hashes(step, *rest)
    for each in (loop, plain):
        for _ in range(5):
            each.train_step()
    losses = [[record["train/loss"] for record in each.meters.flush()] for each in (loop, plain)]
    assert losses[0] == losses[1]
    if dist.get_rank() == 1:
        clips = loop.encoded._encoded
        clips |= {n: replace(clip, latents=_flip_a_bit(clip.latents)) for n, clip in clips.items()}
    with pytest.raises(TrainingError) as caught:
        for _ in range(3):
            loop.train_step()
    return compared, loop.step, str(caught.value)


def test_training_compares_every_so_many_steps_changes_no_number_and_stops_before_the_forward(world2):
    for compared, step, told in world2.run(_trained, 2, every_steps=3):
        assert compared == [0, 3, 6] and step == 6
        assert "at step 7 (" in told and "ranks 0 and 1 differ in latents (" in told
        assert "faulty memory" in told
