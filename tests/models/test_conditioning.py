"""What a model is given beside noise, against what diffusers' pipelines feed their transformer.

A spy stands in the pipeline in the transformer's place. The comparison itself is tested as well: each
mistake that trainers of these models are known for is put into our code, and the comparison must notice.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from torch.testing import assert_close

from tests.models.frozen import save_frozen
from tests.models.variants import ARCHITECTURES
from wan_ds.errors import DataError
from wan_ds.flow import path
from wan_ds.models import conditioning as module
from wan_ds.models import encoders
from wan_ds.models.conditioning import (
    Condition,
    FirstLastFrame,
    ImageToVideo,
    ModelInputs,
    TextImageToVideo,
    TextToVideo,
    frame_mask,
)
from wan_ds.models.encoders import encode_video, load_image_encoder, load_text_encoder, load_vae

FRAMES, HEIGHT, WIDTH = 9, 32, 64
CAPTION = "a red ball&amp;  bounces\n"
GUIDED = 2  # calls of one step: with the caption, then with the empty one


class Task(NamedTuple):
    conditioning: Any
    variant: str
    vae: str = "vae"
    pipeline: type = WanImageToVideoPipeline
    given: bool = True
    clip: bool = False
    boundary: float | None = None


TASKS = {
    "t2v": Task(TextToVideo(), "t2v", pipeline=WanPipeline, given=False),
    "i2v": Task(ImageToVideo(), "i2v", clip=True),
    "flf2v": Task(FirstLastFrame(), "flf2v", clip=True),
    "i2v-a14b": Task(ImageToVideo(), "i2v-a14b", boundary=0.9),
    "ti2v-image": Task(TextImageToVideo(0.5), "ti2v", vae="vae_22"),
    "ti2v-text": Task(TextImageToVideo(0.5), "ti2v", vae="vae_22", pipeline=WanPipeline, given=False),
}


class Fed(NamedTuple):
    """One call of the transformer."""

    sigma: torch.Tensor
    hidden_states: torch.Tensor
    timestep: torch.Tensor
    text: torch.Tensor
    image: torch.Tensor | None


class Spy(WanTransformer3DModel):
    """Writes down what it is fed, and predicts that nothing moves."""

    def forward(
        self,
        hidden_states,
        timestep,
        encoder_hidden_states,
        encoder_hidden_states_image=None,
        return_dict=True,
        attention_kwargs=None,
    ):
        self.calls.append((hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image))
        return (torch.zeros_like(hidden_states[:, : self.config.out_channels]),)


class Parts(NamedTuple):
    """The frozen networks, a clip `[3, frames, height, width]` and its first and last frame as images."""

    vaes: dict[str, torch.nn.Module]
    text: encoders.TextEncoder
    image: encoders.ImageEncoder
    squashing: encoders.ImageEncoder
    pixels: torch.Tensor
    images: tuple[Image.Image, Image.Image]


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Parts:
    root = tmp_path_factory.mktemp("frozen")
    save_frozen(root)
    colours = torch.randint(
        0, 256, (3, FRAMES, HEIGHT, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    first, last = (Image.fromarray(colours[:, frame].permute(1, 2, 0).numpy()) for frame in (0, -1))
    load_image = partial(
        load_image_encoder, root / "image_processor", root / "image_encoder", "cpu", torch.float32
    )
    return Parts(
        {name: load_vae(root / name, "cpu") for name in ("vae", "vae_22")},
        load_text_encoder(root / "tokenizer", root / "text_encoder", "cpu", torch.float32),
        load_image("crop"),
        load_image("squash"),
        colours.float() / 127.5 - 1,
        (first, last),
    )


def noised_of(task: Task, parts: Parts) -> torch.Tensor:
    """Noised latents `[C, F, H, W]`, the same for the pipeline and for us."""
    config = parts.vaes[task.vae].config
    space = config.scale_factor_spatial
    shape = (config.z_dim, (FRAMES - 1) // 4 + 1, HEIGHT // space, WIDTH // space)
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def fed(parts) -> dict[str, list[Fed]]:
    """Of each task, what the stock pipeline feeds in three guided steps."""
    return {name: run_pipeline(task, parts) for name, task in TASKS.items()}


def run_pipeline(task: Task, parts: Parts) -> list[Fed]:
    calls: list[tuple] = []
    spies = {}
    for name in ("transformer", "transformer_2") if task.boundary else ("transformer",):
        spies[name] = Spy(**ARCHITECTURES[task.variant])
        spies[name].calls = calls
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    components = spies | {
        "tokenizer": parts.text.tokenizer,
        "text_encoder": parts.text.encoder,
        "vae": parts.vaes[task.vae],
        "scheduler": scheduler,
        "boundary_ratio": task.boundary,
        "expand_timesteps": task.conditioning.expand_timesteps,
    }
    settings = {
        "prompt": CAPTION,
        "height": HEIGHT,
        "width": WIDTH,
        "num_frames": FRAMES,
        "num_inference_steps": 3,
        "guidance_scale": 5.0,
        "latents": noised_of(task, parts)[None],
        "output_type": "latent",
    }
    if task.pipeline is WanImageToVideoPipeline:
        settings |= dict(zip(("image", "last_image")[: task.conditioning.images], parts.images, strict=False))
        if task.clip:
            components |= {"image_processor": parts.image.processor, "image_encoder": parts.image.encoder}
    pipeline = task.pipeline(**components)
    pipeline.set_progress_bar_config(disable=True)
    pipeline(**settings)
    return [Fed(scheduler.sigmas[index // GUIDED], *call) for index, call in enumerate(calls)]


def same(part: str, given: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> None:
    assert_close(given, expected, rtol=tolerance, atol=tolerance, msg=lambda why: f"{part}: {why}")


def compare(task: Task, parts: Parts, calls: list[Fed]) -> None:
    """Raise an AssertionError that names the part of our model's inputs that is not diffusers'."""
    encode = partial(encode_video, parts.vaes[task.vae])
    condition = task.conditioning.condition(parts.pixels, encode, parts.image if task.clip else None)
    latents = encode(parts.pixels[None])[0]
    text = parts.text([CAPTION, ""])
    for index, call in enumerate(calls):
        inputs = task.conditioning.inputs(
            [noised_of(task, parts)],
            path.timestep(call.sigma[None]),
            latents=[latents],
            conditions=[condition],
            given=[task.given],
        )
        compare_call(task, inputs, call)
        same("text", text[index % GUIDED][None], call.text)


def compare_call(task: Task, inputs: ModelInputs, call: Fed) -> None:
    (hidden,), (segments,) = inputs.hidden_states, inputs.segment_frames
    theirs = call.hidden_states[0]
    assert hidden.shape == theirs.shape, f"shape: {hidden.shape}, not {theirs.shape}"
    frames, height, width = hidden.shape[1:]
    channels = ARCHITECTURES[task.variant]["out_channels"]
    clean = int(task.conditioning.expand_timesteps and task.given)
    # 1e-5: diffusers multiplies by 1 / std, and scales colours in two steps; the last bits of float32.
    same("clean frame", hidden[:, :clean], theirs[:, :clean], 1e-5)
    same("noised", hidden[:channels, clean:], theirs[:channels, clean:])
    same("mask", hidden[channels : channels + 4], theirs[channels : channels + 4])
    same("condition latents", hidden[channels + 4 :], theirs[channels + 4 :], 1e-5)

    assert sum(segments) == frames, f"segments: {segments} of {frames} frames"
    assert inputs.timestep.dtype == torch.float32, f"timestep: {inputs.timestep.dtype}"
    timestep = inputs.timestep.repeat_interleave(torch.tensor(segments) * (height // 2) * (width // 2))
    same("timestep", timestep, call.timestep.reshape(-1).expand(len(timestep)))
    assert (inputs.image_embeds is None) == (call.image is None), "image embeds: one has none"
    if call.image is not None:
        # The transformer takes a clip's images beside each other. 1e-5: two at once sum in another order.
        same("image embeds", inputs.image_embeds, call.image.flatten(0, 1)[None], 1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_the_model_is_given_what_diffusers_pipeline_feeds_its_transformer(name, parts, fed):
    task = TASKS[name]
    assert len(fed[name]) == 3 * GUIDED
    assert (fed[name][0].image is not None) == task.clip
    architecture = ARCHITECTURES[task.variant]
    assert fed[name][0].hidden_states.shape[1] == architecture["in_channels"]
    assert task.conditioning.in_channels(architecture["out_channels"]) == architecture["in_channels"]
    assert fed[name][0].timestep.ndim == (2 if task.conditioning.expand_timesteps else 1)

    compare(task, parts, fed[name])


# mistakes that the comparison must notice


class Mistakes:
    """Each puts one mistake in; the name of the method is that of the mistake."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, parts: Parts, task: Task) -> None:
        self.monkeypatch, self.parts, self.task = monkeypatch, parts, task

    def _condition(self, change: Any) -> None:
        """`change(condition, pixels, encode_video)` of every condition."""
        kind = type(self.task.conditioning)
        right = kind.condition

        def wrong(itself, pixels, encode_video, encode_image):
            return change(right(itself, pixels, encode_video, encode_image), pixels, encode_video)

        self.monkeypatch.setattr(kind, "condition", wrong)

    def _inputs(self, change: Any) -> None:
        """`change(right, arguments)` in place of `right(**arguments)`."""
        kind = type(self.task.conditioning)
        right = kind.inputs

        def wrong(itself, noised, timestep, **others):
            return change(partial(right, itself), {"noised": noised, "timestep": timestep} | others)

        self.monkeypatch.setattr(kind, "inputs", wrong)

    def _mask(self, change: Any) -> None:
        self._condition(lambda condition, *_: replace(condition, frame_mask=change(condition.frame_mask)))

    def latents_not_normalised(self):
        self.monkeypatch.setattr(encoders, "_statistics", lambda vae: (0.0, 1.0))

    def latents_normalised_the_wrong_way_round(self):
        right = encoders._statistics

        def inverted(vae):  # (x - m) / s becomes x * s + m
            mean, std = right(vae)
            return -mean / std, 1 / std

        self.monkeypatch.setattr(encoders, "_statistics", inverted)

    def latents_of_the_image_padded_with_zeros(self):
        def padded(condition, pixels, encode_video):
            latents = torch.zeros_like(condition.condition_latents)
            latents[:, :1] = encode_video(pixels[None, :, :1])[0]
            return replace(condition, condition_latents=latents)

        self._condition(padded)

    def other_frames_black(self):
        def black(pixels, given):
            return torch.full_like(pixels, -1).index_copy(1, torch.tensor(given), pixels[:, given])

        self.monkeypatch.setattr(module, "without_others", black)

    def condition_of_the_whole_clip(self):
        self.monkeypatch.setattr(module, "without_others", lambda pixels, given: pixels)

    def last_image_before_the_first(self):
        def swapped(condition, *_):
            return replace(condition, image_embeds=condition.image_embeds.roll(257, dims=0))

        self._condition(swapped)

    def last_hidden_state_of_clip(self):
        self.monkeypatch.setattr(encoders, "CLIP_HIDDEN_STATE", -1)

    def image_squashed(self):
        self.monkeypatch.setattr(self.parts.image, "processor", self.parts.squashing.processor)

    def timestep_in_bf16(self):
        right = path.timestep
        self.monkeypatch.setattr(path, "timestep", lambda sigma: right(sigma).bfloat16().float())

    def text_of_226_tokens(self):
        self.monkeypatch.setattr(encoders, "TEXT_LENGTH", 226)

    def text_without_its_zeros(self):
        right = encoders.TextEncoder.__call__

        def trimmed(itself, captions):
            embeds = right(itself, captions)
            return embeds[:, : int((embeds != 0).any(dim=-1).sum(dim=1).max())]

        self.monkeypatch.setattr(encoders.TextEncoder, "__call__", trimmed)

    def text_padded_with_what_umt5_makes_of_padding(self):
        def unmasked(itself, caption):
            tokens = itself.tokenizer(
                [encoders.clean(caption)], padding="max_length", max_length=512, return_tensors="pt"
            )
            return itself.encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]

        self.monkeypatch.setattr(encoders.TextEncoder, "_encode", unmasked)

    def first_frame_noised(self):
        self._inputs(lambda right, given: right(**(given | {"latents": given["noised"]})))

    def first_frame_at_the_others_timestep(self):
        self._inputs(
            lambda right, given: right(**given)._replace(timestep=given["timestep"].repeat_interleave(2))
        )

    def no_frame_given(self):
        self._inputs(lambda right, given: right(**(given | {"given": [False]})))

    def image_given_where_there_is_none(self):
        self._inputs(lambda right, given: right(**(given | {"given": [True]})))

    def last_frame_in_all_its_masks(self):
        def all_ones(mask):
            mask = mask.clone()
            mask[:, -1] = 1
            return mask

        self._mask(all_ones)

    def mask_inverted(self):
        self._mask(lambda mask: 1 - mask)

    def mask_normalised(self):
        self._mask(lambda mask: 2 * mask - 1)

    def mask_before_the_noised_latents(self):
        def moved(right, given):
            inputs = right(**given)
            order = [*range(16, 20), *range(16), *range(20, 36)]
            return inputs._replace(hidden_states=[clip[order] for clip in inputs.hidden_states])

        self._inputs(moved)

    def mask_after_the_condition(self):
        def moved(right, given):
            inputs = right(**given)
            order = [*range(16), *range(20, 36), *range(16, 20)]
            return inputs._replace(hidden_states=[clip[order] for clip in inputs.hidden_states])

        self._inputs(moved)


# mistake: the tasks that it is put into, the part that is then wrong
MISTAKES = {
    Mistakes.latents_not_normalised: ("i2v flf2v i2v-a14b", "condition latents"),
    Mistakes.latents_normalised_the_wrong_way_round: ("i2v flf2v i2v-a14b", "condition latents"),
    Mistakes.latents_of_the_image_padded_with_zeros: ("i2v flf2v i2v-a14b", "condition latents"),
    Mistakes.other_frames_black: ("i2v flf2v i2v-a14b", "condition latents"),
    Mistakes.condition_of_the_whole_clip: ("i2v flf2v i2v-a14b", "condition latents"),
    Mistakes.last_image_before_the_first: ("flf2v", "image embeds"),
    Mistakes.last_hidden_state_of_clip: ("i2v flf2v", "image embeds"),
    Mistakes.image_squashed: ("i2v flf2v", "image embeds"),
    Mistakes.timestep_in_bf16: (" ".join(TASKS), "timestep"),
    Mistakes.text_of_226_tokens: (" ".join(TASKS), "text"),
    Mistakes.text_without_its_zeros: (" ".join(TASKS), "text"),
    Mistakes.text_padded_with_what_umt5_makes_of_padding: (" ".join(TASKS), "text"),
    Mistakes.first_frame_noised: ("ti2v-image", "clean frame"),
    Mistakes.first_frame_at_the_others_timestep: ("ti2v-image", "timestep"),
    Mistakes.no_frame_given: ("ti2v-image", "clean frame"),
    Mistakes.image_given_where_there_is_none: ("ti2v-text", "noised"),
    Mistakes.last_frame_in_all_its_masks: ("flf2v", "mask"),
    Mistakes.mask_inverted: ("i2v flf2v i2v-a14b", "mask"),
    Mistakes.mask_normalised: ("i2v flf2v i2v-a14b", "mask"),
    Mistakes.mask_before_the_noised_latents: ("i2v flf2v i2v-a14b", "noised"),
    Mistakes.mask_after_the_condition: ("i2v flf2v i2v-a14b", "mask"),
}


def mistakes() -> Iterator[Any]:
    for mistake, (names, part) in MISTAKES.items():
        for name in names.split():
            yield pytest.param(mistake, name, part, id=f"{name}-{mistake.__name__}")
    for mistake in (Mistakes.latents_not_normalised, Mistakes.latents_normalised_the_wrong_way_round):
        yield pytest.param(mistake, "ti2v-image", "clean frame", id=f"ti2v-image-{mistake.__name__}")


@pytest.mark.parametrize(("mistake", "name", "part"), mistakes())
def test_the_comparison_notices(mistake, name, part, parts, fed, monkeypatch):
    mistake(Mistakes(monkeypatch, parts, TASKS[name]))

    with pytest.raises(AssertionError, match=f"^{part}: "):
        compare(TASKS[name], parts, fed[name])


# the mask


@pytest.mark.parametrize(
    ("frames", "given", "expected"),
    [
        (1, [0], [[1, 1, 1, 1]]),
        (5, [0], [[1, 1, 1, 1], [0, 0, 0, 0]]),
        (9, [0, 8], [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]]),
        (9, [0, 5], [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]),
        (9, [], [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_a_latent_frames_four_masks_are_its_four_frames_and_the_first_fills_its_own(frames, given, expected):
    mask = frame_mask(frames, given, height=2, width=3)

    assert mask.shape == (4, len(expected), 2, 3)
    for row in range(2):
        for column in range(3):
            assert mask[:, :, row, column].T.tolist() == expected


def test_frames_that_fill_no_latent_frame_are_refused():
    with pytest.raises(ValueError, match=r"8 frames do not fill latent frames: there must be 4 n \+ 1"):
        frame_mask(8, [0], 2, 2)


# clips of several sizes, given and not


def clips(*frames: int, channels: int = 2) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(len(frames))
    return [
        torch.randn(channels, count, 2, 4 + 2 * index, generator=rng) for index, count in enumerate(frames)
    ]


def test_the_given_first_frame_is_a_segment_of_its_own_at_timestep_0_and_other_clips_are_whole():
    noised, latents = clips(3, 4, 1), clips(3, 4, 1)
    latents = [clip + 10 for clip in latents]
    timestep = torch.tensor([100.0, 200.0, 300.0])

    inputs = TextImageToVideo(0.5).inputs(
        noised, timestep, latents=latents, conditions=[Condition()] * 3, given=[False, True, True]
    )

    assert inputs.segment_frames == [(3,), (1, 3), (1,)]
    assert inputs.timestep.tolist() == [100.0, 0.0, 200.0, 300.0]
    assert inputs.image_embeds is None
    assert torch.equal(inputs.hidden_states[0], noised[0])
    assert torch.equal(inputs.hidden_states[1][:, :1], latents[1][:, :1])
    assert torch.equal(inputs.hidden_states[1][:, 1:], noised[1][:, 1:])
    # its only frame is the one to learn
    assert torch.equal(inputs.hidden_states[2], noised[2])


def test_making_the_inputs_changes_no_clip_and_keeps_the_noised_ones_dtype():
    noised, latents = clips(3), clips(3)
    latents = [clip.double() for clip in latents]
    before = noised[0].clone(), latents[0].clone()

    inputs = TextImageToVideo(1.0).inputs(
        noised, torch.tensor([500.0]), latents=latents, conditions=[Condition()], given=[True]
    )

    assert torch.equal(noised[0], before[0])
    assert torch.equal(latents[0], before[1])
    assert inputs.hidden_states[0].dtype == torch.float32


def test_clips_of_several_sizes_keep_their_own_conditions():
    noised = clips(2, 3)
    conditions = [
        Condition(
            torch.full_like(clip, 5 + index),
            torch.full((4, *clip.shape[1:]), index),
            torch.full((3, 7), index),
        )
        for index, clip in enumerate(noised)
    ]

    inputs = ImageToVideo().inputs(
        noised, torch.tensor([1.0, 2.0]), latents=noised, conditions=conditions, given=[True, True]
    )

    assert inputs.segment_frames == [(2,), (3,)]
    assert inputs.timestep.tolist() == [1.0, 2.0]
    assert inputs.image_embeds.shape == (2, 3, 7)
    for index, clip in enumerate(inputs.hidden_states):
        assert torch.equal(clip[:2], noised[index])
        assert clip[2:6].unique().tolist() == [index]
        assert clip[6:].unique().tolist() == [5 + index]
        assert inputs.image_embeds[index].unique().tolist() == [index]


# the loss


def test_what_the_network_says_of_a_given_first_frame_is_not_in_the_loss():
    conditioning = TextImageToVideo(0.5)
    (target,), (predicted,) = clips(4), clips(4)
    wrong = predicted.clone()
    wrong[:, 0] += 100

    def loss(prediction: torch.Tensor, given: bool) -> torch.Tensor:
        first = conditioning.first_learnt_frame(given, target.shape[1])
        return (prediction - target)[:, first:].square().mean()

    assert loss(wrong, given=True) == loss(predicted, given=True)
    assert loss(wrong, given=False) > loss(predicted, given=False) + 1
    expected = (predicted[:, 1:] - target[:, 1:]).square().sum() / (2 * 3 * 2 * 4)
    assert_close(loss(predicted, given=True), expected)


@pytest.mark.parametrize("conditioning", [TextToVideo(), ImageToVideo(), FirstLastFrame()])
@pytest.mark.parametrize("given", [True, False])
def test_every_frame_of_the_other_tasks_is_learnt(conditioning, given):
    assert conditioning.first_learnt_frame(given, 3) == 0


def test_a_clip_of_one_latent_frame_learns_it_even_where_it_is_given():
    assert TextImageToVideo(1.0).first_learnt_frame(True, 1) == 0
    assert TextImageToVideo(1.0).first_learnt_frame(True, 2) == 1


# shares and refusals


def test_shares_of_clips_whose_images_are_given():
    assert TextToVideo().given_share == 0
    assert ImageToVideo().given_share == FirstLastFrame().given_share == 1
    assert [TextImageToVideo(share).given_share for share in (0, 0.25, 1)] == [0.0, 0.25, 1.0]


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused_by_its_key(share):
    with pytest.raises(ValueError, match=f"model.conditioning.image_share={share}: must be from 0"):
        TextImageToVideo(share)


def test_a_clip_of_one_frame_has_no_last_frame():
    with pytest.raises(DataError, match="1 frame has no last frame beside its first; .* 5 frames or more"):
        FirstLastFrame().condition(torch.zeros(3, 1, 16, 16), lambda pixels: pixels, None)


def test_what_the_model_needs_no_encoder_for_is_not_encoded(parts):
    def never(pixels):
        raise AssertionError("encoded for nothing")

    for conditioning in (TextToVideo(), TextImageToVideo(1.0)):
        assert conditioning.condition(parts.pixels, never, None) == Condition()
