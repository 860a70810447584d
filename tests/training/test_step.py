"""One micro-batch of every task against stock diffusers and the formulas of the papers."""

from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.models.variants import ARCHITECTURES, IMAGE_TOKENS, randomised
from wan_ds import streams
from wan_ds.flow.timesteps import Interval, Uniform
from wan_ds.flow.weighting import min_snr
from wan_ds.models.conditioning import (
    Condition,
    FirstLastFrame,
    ImageToVideo,
    TextImageToVideo,
    TextToVideo,
)
from wan_ds.models.transformer import WanTransformer
from wan_ds.training.step import FlowMatching, MicroBatch

SEED, STEP, SLOTS, BATCH = 3, 5, [0, 2, 3], 4
WHOLE = Interval(0.0, 1.0)
SIZE = (3, 4, 6)  # F, H, W
TASKS = {
    "t2v": ("t2v", TextToVideo()),
    "i2v": ("i2v", ImageToVideo()),
    "flf2v": ("flf2v", FirstLastFrame()),
    "i2v-a14b": ("i2v-a14b", ImageToVideo()),
    "ti2v of text": ("ti2v", TextImageToVideo(0.0)),
    "ti2v of images": ("ti2v", TextImageToVideo(1.0)),
    "ti2v of both": ("ti2v", TextImageToVideo(0.5)),
}


def drawn(*key, shape):
    return streams.normal(shape, SEED, *key)


def batch_of(variant):
    channels = ARCHITECTURES[variant]["out_channels"]
    conditions = [Condition() for _ in SLOTS]
    if ARCHITECTURES[variant]["in_channels"] == 36:
        mask = torch.zeros(4, *SIZE)
        mask[:, 0] = 1
        tokens = IMAGE_TOKENS.get(variant)
        conditions = [
            Condition(
                drawn("condition", slot, shape=(16, *SIZE)),
                mask,
                tokens and drawn("image", slot, shape=(tokens, 24)),
            )
            for slot in SLOTS
        ]
    return MicroBatch(
        slots=SLOTS,
        latents=[drawn("clip", slot, shape=(channels, *SIZE)) for slot in SLOTS],
        conditions=conditions,
        prompt_embeds=torch.stack([drawn("text", slot, shape=(512, 32)) for slot in SLOTS]),
    )


def columns(clips):
    """The clips as the columns of proj_out: [tokens, 1 2 2 C], channels fastest."""
    rows = []
    for clip in clips:
        blocks = clip.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(1, 2, 4, 3, 5, 0)
        rows.append(blocks.flatten(3).flatten(0, 2))
    return torch.cat(rows)


def reference(stock, batch, image_share):
    """Loss per element and sigma of each clip, by diffusers' forward, one clip at a time."""
    strata = torch.randperm(BATCH, generator=streams.generator(SEED, "strata", STEP))
    total, count, sigmas, clip_losses = 0.0, 0, [], []
    for n, slot in enumerate(SLOTS):
        u = (strata[slot].item() + streams.uniform(SEED, "sigma", STEP, slot)) / BATCH
        sigma = torch.tensor(5 * u / (1 + 4 * u), dtype=torch.float32)
        clip, condition = batch.latents[n], batch.conditions[n]
        noise = streams.normal(clip.shape, SEED, "noise", STEP, slot)
        hidden, timestep, first = (1 - sigma) * clip + sigma * noise, (1000 * sigma)[None], 0
        if image_share and streams.uniform(SEED, "image", STEP, slot) < image_share:
            first = 1
            hidden[:, 0] = clip[:, 0]
            per_frame = torch.tensor([0.0, *[1000 * sigma.item()] * (SIZE[0] - 1)])
            timestep = per_frame.repeat_interleave(SIZE[1] // 2 * SIZE[2] // 2)[None]
        if condition.frame_mask is not None:
            hidden = torch.cat([hidden, condition.frame_mask, condition.condition_latents])
        images = condition.image_embeds
        if images is not None:
            images = images.view(
                -1, 257, 24
            )  # diffusers takes first and last frame as neighbours in the batch
        predicted = stock(hidden[None], timestep, batch.prompt_embeds[n][None], images, return_dict=False)[0][
            0
        ]
        error = (predicted - (noise - clip)).square()[:, first:]
        weight = min((1 - sigma) ** 2, 5 * sigma**2)
        total = total + weight * error.sum()
        count += error.numel()
        sigmas.append(sigma.item())
        clip_losses.append(error.mean().item())
    return total, count, sigmas, clip_losses


@pytest.mark.parametrize("task", TASKS)
def test_loss_and_gradients_are_those_of_stock_code(task):
    variant, conditioning = TASKS[task]
    ours = randomised(WanTransformer(**ARCHITECTURES[variant]), std=0.25)
    stock = WanTransformer3DModel(**ARCHITECTURES[variant]).eval()
    stock.load_state_dict(ours.state_dict())
    batch = batch_of(variant)
    objective = FlowMatching(Uniform(5.0), min_snr, conditioning, seed=SEED, global_batch_size=BATCH)
    loss = objective(ours, batch, WHOLE, STEP)
    share = conditioning.given_share if variant == "ti2v" else 0
    total, count, sigmas, clip_losses = reference(stock, batch, share)
    if task == "ti2v of both":
        assert len(set(objective.given(SLOTS, STEP))) == 2, "the draws hold both kinds"
    assert (loss.count, loss.sigma.tolist()) == (count, pytest.approx(sigmas))
    assert objective.count(batch, STEP) == count
    assert loss.size == sum(clip.numel() for clip in batch.latents)
    assert loss.clip_losses.tolist() == pytest.approx(clip_losses, rel=1e-5)
    assert loss.weighted_sum.item() == pytest.approx(total.item(), rel=1e-5)
    (loss.weighted_sum / loss.count).backward()
    (total / count).backward()
    theirs = dict(stock.named_parameters())
    for name, parameter in ours.named_parameters():
        scale = theirs[name].grad.abs().max()
        assert scale > 0, name
        assert (parameter.grad - theirs[name].grad).abs().max() <= 1e-5 * scale, name


def test_what_the_network_says_of_a_given_frame_changes_no_loss():
    batch = batch_of("ti2v")
    objective = FlowMatching(Uniform(), min_snr, TextImageToVideo(1.0), seed=SEED, global_batch_size=BATCH)

    def network(first, other):
        def predict(clips, timestep, prompts, images, *, segment_frames, local):  # noqa: ARG001
            assert segment_frames == [(1, SIZE[0] - 1)] * len(clips)
            return columns([torch.cat([c[:, :1] + first, c[:, 1:] + other], dim=1) for c in clips])

        return predict

    losses = [
        objective(network(first, other), batch, WHOLE, STEP).weighted_sum.item()
        for first, other in ((0.0, 0.0), (7.0, 0.0), (0.0, 7.0))
    ]
    assert losses[0] == losses[1] != losses[2]


def test_a_clip_of_one_frame_is_learnt_whole_whatever_its_draw():
    batch = MicroBatch([0], [drawn("clip", 0, shape=(48, 1, 4, 4))], [Condition()], torch.zeros(1, 512, 32))
    objective = FlowMatching(Uniform(), min_snr, TextImageToVideo(1.0), seed=SEED, global_batch_size=1)
    assert objective.count(batch, STEP) == 48 * 16
    loss = objective(lambda clips, *_, segment_frames, local: columns(clips), batch, WHOLE, STEP)
    assert loss.count == 48 * 16


def test_a_batch_of_weight_zero_adds_nothing_and_a_half_half():
    objective = FlowMatching(Uniform(), min_snr, TextToVideo(), seed=SEED, global_batch_size=BATCH)
    whole = batch_of("t2v")

    def network(clips, *_, segment_frames, local):  # noqa: ARG001
        return columns(clips).bfloat16()

    losses = {
        weight: objective(network, replace(whole, weight=weight), WHOLE, STEP) for weight in (0.0, 0.5, 1.0)
    }
    assert [loss.count for loss in losses.values()] == [0, 108 * 16, 216 * 16]
    assert [loss.size for loss in losses.values()] == [0, 108 * 16, 216 * 16]
    assert losses[0.0].weighted_sum == 0
    assert losses[0.5].weighted_sum.item() == pytest.approx(losses[1.0].weighted_sum.item() / 2)
    assert objective.count(replace(whole, weight=0.0), STEP) == 0
    assert losses[1.0].weighted_sum.dtype == torch.float32  # whatever the network computes in


def test_without_a_share_no_image_is_given_and_with_all_of_it_every_one():
    for share, expected in ((0.0, False), (1.0, True)):
        objective = FlowMatching(Uniform(), min_snr, TextImageToVideo(share), seed=SEED, global_batch_size=9)
        assert {given for step in range(40) for given in objective.given(range(9), step)} == {expected}
