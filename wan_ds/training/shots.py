"""What a video is made from: a prompt and, for some models, the images that it begins and ends with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from wan_ds.data.clips import Clip
from wan_ds.data.images import read_image


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
