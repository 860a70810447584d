"""What the videos of a run are made from, while it trains and afterwards alike."""

from pathlib import Path

import torch

from wan_ds.config import Sampling
from wan_ds.data.clips import Clip
from wan_ds.models.conditioning import FirstLastFrame, TextImageToVideo, TextToVideo
from wan_ds.training import shots

CLIPS = [Clip(name, Path(name), f"caption {name}") for name in "ab"]
PIXELS = {name: torch.rand(3, 5, 4, 4, generator=torch.Generator().manual_seed(ord(name))) for name in "ab"}


def made_from(conditioning, **sampling):
    read = lambda clip: PIXELS[clip.key]  # noqa: E731
    return shots.of_settings(Sampling(**sampling), CLIPS, conditioning, read=read, height=4, width=4)


def test_clips_show_the_frames_that_the_model_trains_with():
    for conditioning, first, last in (
        (TextToVideo(), None, None),
        (TextImageToVideo(0.0), None, None),  # trained from text alone, so sampled from text
        (TextImageToVideo(0.5), "a, first frame", None),
        (FirstLastFrame(), "a, first frame", "a, last frame"),
    ):
        shot, _ = made_from(conditioning)
        assert shot.prompt == "caption a"
        assert shot.sources == {"image": first, "last_image": last}
    assert torch.equal(shot.image.pixels, PIXELS["a"][:, 0])
    assert torch.equal(shot.last_image.pixels, PIXELS["a"][:, -1])


def test_prompts_come_with_their_own_images_or_none():
    (shot,) = made_from(TextImageToVideo(0.5), prompts=["a cat"])
    assert shot.prompt == "a cat" and shot.sources == {"image": None, "last_image": None}
