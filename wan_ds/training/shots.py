"""What a video is made from: a prompt and, for some models, the images that it begins and ends with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor

from wan_ds.data.clips import Clip
from wan_ds.data.images import read_image
from wan_ds.models.conditioning import Conditioning


@dataclass(frozen=True, eq=False)
class Frame:
    """An image of the video's size, and where it is from."""

    pixels: Tensor  # [3, H, W] in [-1, 1]
    source: str


@dataclass(frozen=True, eq=False)
class Shot:
    """A prompt with the first and the last frame, where they are given."""

    prompt: str
    image: Frame | None = None
    last_image: Frame | None = None

    @property
    def sources(self) -> dict[str, str | None]:
        """Where its frames are from, by the names that `Sample` has for them."""
        frames = {"image": self.image, "last_image": self.last_image}
        return {name: frame and frame.source for name, frame in frames.items()}


def of_settings(  # noqa: PLR0913 - the settings, and what they are read with
    sampling: Any,
    clips: Sequence[Clip],
    conditioning: Conditioning,
    *,
    read: Callable[[Clip], Tensor],
    height: int,
    width: int,
) -> list[Shot]:
    """What a run's videos are made from: its prompts and image files, else the clips, as they train.

    `sampling` has `prompts`, `images` and `last_images`. Clips show their frames to a model that trains with
    them: one whose share of clips with images is 0 is sampled from text.
    """
    if sampling.prompts:
        return of_files(
            sampling.prompts, sampling.images or [], sampling.last_images or [], height=height, width=width
        )
    return of_clips(clips, images=conditioning.images if conditioning.given_share > 0 else 0, read=read)


def of_clips(clips: Sequence[Clip], *, images: int, read: Callable[[Clip], Tensor]) -> list[Shot]:
    """The captions of training clips, and their own first and last frames, as many as `images`.

    `read` gives a clip's pixels `[3, F, H, W]`; it is not called for no images.
    """
    shots = []
    for clip in clips:
        pixels = read(clip) if images else None
        frames = [Frame(pixels[:, place], f"{clip.key}, {word} frame") for place, word in _PLACES[:images]]
        shots.append(Shot(clip.caption, *frames))
    return shots


_PLACES = ((0, "first"), (-1, "last"))


def of_files(
    prompts: Sequence[str], images: Sequence[str], last_images: Sequence[str], *, height: int, width: int
) -> list[Shot]:
    """Prompts with image files, one each or none, fitted to the video's size; raises `DataError`."""

    def frame(path: str | None) -> Frame | None:
        return None if path is None else Frame(read_image(path, height=height, width=width), path)

    rows = zip_longest(prompts, images, last_images)
    return [Shot(prompt, frame(image), frame(last)) for prompt, image, last in rows]


def images_of(shots: Sequence[Shot]) -> dict[str, list[Tensor]]:
    """The frames as `generate` takes them."""
    frames = {
        "images": [shot.image for shot in shots],
        "last_images": [shot.last_image for shot in shots],
    }
    return {name: [frame.pixels for frame in row] for name, row in frames.items() if None not in row}
