"""What is written can be read back, and looked at."""

import av
import numpy as np
import torch
from PIL import Image

from tests.training.bars import moving_bar
from wan_ds.training.videos import SHEET_FRAMES, contact_sheet, slug, to_uint8, write_video


def test_a_video_reads_back_with_its_frames_rate_and_pixels(tmp_path):
    pixels = moving_bar()
    path = tmp_path / "a: clip.mp4"

    write_video(path, pixels, 16)

    with av.open(f"file:{path}") as container:
        stream = container.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        assert (stream.average_rate, stream.codec_context.name, stream.pix_fmt) == (16, "h264", "yuv420p")
    assert frames.shape == (9, 32, 48, 3)
    # chroma has half the resolution; luma is nearly lossless
    assert np.abs(frames.astype(int).mean(axis=-1) - to_uint8(pixels).astype(int).mean(axis=-1)).mean() < 8


def test_levels_of_black_and_white_are_0_and_255():
    pixels = torch.tensor([-1.0, 1.0, 0.0, -2.0, 3.0]).view(1, 5, 1, 1).expand(3, -1, -1, -1)

    assert to_uint8(pixels)[:, 0, 0, 0].tolist() == [0, 255, 128, 0, 255]


def test_a_sheet_has_a_row_for_each_clip_and_each_generated_one(tmp_path):
    clip = moving_bar()
    contact_sheet(tmp_path / "two.png", [("a bar moves", clip, -clip), ("no clip of this", None, clip)])
    contact_sheet(tmp_path / "one.png", [("a bar moves", clip, -clip)])

    two, one = Image.open(tmp_path / "two.png"), Image.open(tmp_path / "one.png")
    cell = (4 * 48, 4 * 32)
    assert one.width == two.width > SHEET_FRAMES * cell[0]
    assert one.height > 2 * cell[1]
    assert two.height - one.height > cell[1]
    assert two.height < 2 * one.height
    seen = {one.getpixel((x, y)) for x in range(0, one.width, 3) for y in range(0, one.height, 3)}
    bar, ground = tuple(to_uint8(clip)[0, 0, 0].tolist()), tuple(to_uint8(clip)[0, 0, 47].tolist())
    assert {bar, ground, (255, 255, 255)} <= seen
    assert tuple(255 - level for level in bar) in {tuple(pixel) for pixel in seen}


def test_a_sheet_of_large_clips_stays_small_and_any_caption_fits(tmp_path):
    clip = torch.zeros(3, 1, 480, 832)

    contact_sheet(
        tmp_path / "a.png", [("word " * 500, None, clip), ("x" * 5000, None, clip), ("", None, clip)]
    )

    width, height = Image.open(tmp_path / "a.png").size
    assert width < 300
    assert height < 3 * 200


def test_slugs_are_file_names_that_can_be_read():
    assert slug("A cat, running!  (fast)") == "a-cat-running-fast"
    assert slug("") == slug("...") == "empty"
    assert slug("日本の猫") == "日本の猫"
    assert slug("../../etc/passwd") == "etc-passwd"
    assert len(slug("word " * 100)) <= 40
    assert not slug("x" * 39 + " y").endswith("-")
