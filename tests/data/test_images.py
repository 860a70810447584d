"""An image file becomes what the same picture in a video file would be."""

import av
import numpy as np
import pytest
import torch
from PIL import Image

from wan_ds.data.clips import decode
from wan_ds.data.images import read_image
from wan_ds.errors import DataError


def picture(height: int, width: int) -> np.ndarray:
    """Smooth colours and an edge, so that scaling and cropping show."""
    y, x = np.mgrid[0:height, 0:width]
    levels = np.stack([255 * y / height, 255 * x / width, 128 + 100 * np.sin(x / 5)], axis=-1)
    levels[: height // 4, : width // 4] = (250, 0, 5)
    return levels.round().astype(np.uint8)


@pytest.mark.parametrize("size", [(60, 100), (48, 80), (33, 97), (120, 30)])
def test_an_image_is_fitted_as_the_frame_of_a_video_is(tmp_path, size):
    levels = picture(*size)
    Image.fromarray(levels).save(tmp_path / "image.png")
    with av.open(str(tmp_path / "video.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=16, width=size[1], height=size[0])
        stream.pix_fmt = "bgr0"  # so that the colours are kept to the bit
        container.mux(stream.encode(av.VideoFrame.from_ndarray(levels, format="rgb24")))
        container.mux(stream.encode())

    frames = decode(tmp_path / "video.mkv", start_seconds=0, num_frames=1, fps=16, height=48, width=80)
    image = read_image(tmp_path / "image.png", height=48, width=80)

    assert image.dtype == torch.float32
    assert torch.equal(image, frames[:, 0])


def test_the_exif_orientation_is_respected(tmp_path):
    levels = picture(64, 32)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn to the right
    Image.fromarray(np.ascontiguousarray(np.rot90(levels))).save(tmp_path / "turned.png", exif=exif)
    Image.fromarray(levels).save(tmp_path / "upright.png")

    turned, upright = (
        read_image(tmp_path / f"{name}.png", height=32, width=32) for name in ("turned", "upright")
    )

    assert torch.equal(turned, upright)


def test_grey_and_transparent_images_become_colours(tmp_path):
    Image.new("L", (16, 16), 255).save(tmp_path / "grey.png")
    Image.new("RGBA", (16, 16), (255, 0, 0, 0)).save(tmp_path / "clear.png")

    for name in ("grey", "clear"):
        assert torch.equal(read_image(tmp_path / f"{name}.png", height=16, width=16), torch.ones(3, 16, 16))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such image file"),
        (b"not an image", "not an image that can be read; convert it"),
        ("cut", "the image is damaged .*; save it again"),
    ],
)
def test_a_file_that_is_no_image_is_named(tmp_path, content, words):
    path = tmp_path / "a.jpg"
    if content == "cut":
        Image.fromarray(picture(64, 64)).save(path)
        path.write_bytes(path.read_bytes()[:-400])
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}: {words}"):
        read_image(path, height=16, width=16)
