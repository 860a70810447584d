"""Which frames are picked, what becomes of a picture, and what is said about files that cannot be used."""

from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from tests.data.videos import grey, numbers, write_video
from wan_ds.data.clips import Clip, decode
from wan_ds.errors import DataError

OPEN_GROUPS = "open-gop=1:keyint=50:min-keyint=50:scenecut=0"
LOSSLESS = {"codec": "ffv1", "pix_fmt": "bgr0", "stream_options": {}}


def read(path, num_frames, fps, *, start_seconds=0.0, size=(32, 32)):
    return decode(
        path, start_seconds=start_seconds, num_frames=num_frames, fps=fps, height=size[0], width=size[1]
    )


def nearest(times, wanted):
    """Number of the frame that is nearest to each wanted time, the earlier of two."""
    return [min(range(len(times)), key=lambda n: (abs(times[n] - w), n)) % 29 for w in wanted]


def test_pixels_are_float32_of_the_asked_shape_in_minus_one_to_one(tmp_path):
    pixels = read(write_video(tmp_path / "a.mp4", times=range(9)), 5, 30, size=(16, 24))
    assert pixels.dtype == torch.float32
    assert tuple(pixels.shape) == (3, 5, 16, 24)
    expected = torch.tensor([grey(n) / 127.5 - 1 for n in range(5)])
    torch.testing.assert_close(pixels.mean(dim=(0, 2, 3)), expected, rtol=0, atol=2 / 127.5)  # 8-bit YUV


@pytest.mark.parametrize("fps", [30, 24, 16, 15, 10, 7.5])
def test_a_30_fps_clip_gives_the_frames_nearest_in_time(tmp_path, fps):
    path = write_video(tmp_path / "a.mp4", times=range(60))
    count = int(2 * fps) - 1
    wanted = [k / Fraction(fps) for k in range(count)]
    assert numbers(read(path, count, fps)) == nearest([Fraction(n, 30) for n in range(60)], wanted)


def test_24_fps_sixty_frames_hold_exactly_forty_at_16_fps(tmp_path):
    path = write_video(tmp_path / "a.mp4", times=range(60), time_base=Fraction(1, 24), rate=24)
    assert len(numbers(read(path, 40, 16))) == 40
    with pytest.raises(DataError, match=r"too short.*data\.num_frames=37"):
        read(path, 41, 16)


def test_ntsc_rate_picks_every_other_frame_for_half_of_it(tmp_path):
    rate = Fraction(30000, 1001)
    path = write_video(tmp_path / "a.mp4", times=range(60), time_base=1 / rate, rate=rate)
    assert numbers(read(path, 29, float(rate / 2))) == [2 * k % 29 for k in range(29)]


def test_a_variable_rate_clip_is_read_by_time_not_by_number(tmp_path):
    ticks = list(range(30)) + [30 + 3 * k for k in range(10)]  # one second at 30 fps, then one at 10
    path = write_video(tmp_path / "a.mp4", times=ticks)
    wanted = [Fraction(k, 16) for k in range(31)]
    got = numbers(read(path, 31, 16))
    times = [Fraction(t, 30) for t in ticks]
    assert got == nearest(times, wanted)
    assert got[16:] != [k * 30 // 16 % 29 for k in range(16, 31)], "by number it would be another list"


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts"])
def test_the_clock_starts_at_the_first_frame_wherever_the_file_starts_it(tmp_path, suffix):
    path = write_video(tmp_path / f"a.{suffix}", times=range(300, 330))
    assert numbers(read(path, 10, 15)) == [2 * k for k in range(10)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts", "avi"])
@pytest.mark.parametrize("start", [0.5, 2.5, 4.0, 7.9])
def test_a_start_deep_in_the_file_is_exact(tmp_path, suffix, start):
    # Open groups hold pictures that are shown before a key frame and need the group before it.
    options = {"crf": "1", "bf": "0" if suffix == "avi" else "3", "x264-params": OPEN_GROUPS}
    path = write_video(tmp_path / f"a.{suffix}", times=range(270), stream_options=options)
    first = round(start * 30)
    assert numbers(read(path, 9, 10, start_seconds=start)) == [(first + 3 * k) % 29 for k in range(9)]


def test_decoding_stops_after_the_clip(tmp_path):
    path = write_video(tmp_path / "a.mkv", times=range(300), stream_options={"crf": "1", "g": "10"})
    whole = read(path, 5, 30)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert torch.equal(read(path, 5, 30), whole)


def test_two_reads_give_the_same_bits(tmp_path):
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(8)]
    path = write_video(tmp_path / "a.mp4", times=range(8), pictures=pictures, size=(48, 64))
    assert torch.equal(read(path, 5, 16, size=(30, 20)), read(path, 5, 16, size=(30, 20)))


def disc(height, width, radius_y, radius_x):
    y, x = np.mgrid[:height, :width]
    inside = ((y - height / 2 + 0.5) / radius_y) ** 2 + ((x - width / 2 + 0.5) / radius_x) ** 2 < 1
    return (inside[..., None] * np.array([255, 255, 255])).astype(np.uint8)


def extent(pixels):
    """Height and width of what is bright in the first frame."""
    bright = pixels[:, 0].mean(dim=0) > 0
    return int(bright.any(dim=1).sum()), int(bright.any(dim=0).sum())


def test_a_circle_stays_round_whatever_the_pixels_shape(tmp_path):
    picture = disc(32, 64, radius_y=12, radius_x=24)  # stored twice as wide as shown
    path = write_video(
        tmp_path / "a.mp4", times=range(3), pictures=[picture] * 3, size=(32, 64), aspect=Fraction(1, 2)
    )
    high, wide = extent(read(path, 1, 30, size=(32, 32)))
    assert abs(high - 24) <= 1
    assert abs(wide - 24) <= 1


def test_a_wide_picture_is_scaled_to_cover_and_cropped_about_its_centre(tmp_path):
    picture = disc(64, 128, radius_y=16, radius_x=16)
    path = write_video(tmp_path / "a.mp4", times=range(3), pictures=[picture] * 3, size=(64, 128))
    pixels = read(path, 1, 30, size=(32, 32))
    assert extent(pixels) == (16, 16)
    torch.testing.assert_close(pixels, pixels.flip(-1), rtol=0, atol=0.05)  # 8-bit YUV


@pytest.mark.parametrize("stored", [(67, 101), (16, 16), (100, 2), (540, 960)])
def test_any_stored_size_gives_the_asked_size(tmp_path, stored):
    path = write_video(tmp_path / "a.mkv", times=range(2), size=stored, **LOSSLESS)
    pixels = read(path, 1, 30, size=(48, 80))
    assert tuple(pixels.shape) == (3, 1, 48, 80)
    assert numbers(pixels) == [0]


def test_an_unscaled_lossless_picture_comes_through_exactly(tmp_path):
    rng = np.random.default_rng(1)
    pictures = [rng.integers(0, 256, (16, 24, 3), dtype=np.uint8) for _ in range(5)]
    path = write_video(tmp_path / "a.mkv", times=range(5), pictures=pictures, size=(16, 24), **LOSSLESS)
    expected = torch.from_numpy(np.stack(pictures)).permute(3, 0, 1, 2).double() / 127.5 - 1
    torch.testing.assert_close(read(path, 5, 30, size=(16, 24)).double(), expected, rtol=0, atol=1e-6)


# ISO/IEC 14496-12, track header: the stored point (p, q) is shown at (a p + c q, b p + d q).
@pytest.mark.parametrize(
    ("matrix", "turned"),
    [
        ((0, 1, -1, 0), lambda p: p.transpose(1, 0, 2)[:, ::-1]),  # right goes down: clockwise
        ((0, -1, 1, 0), lambda p: p.transpose(1, 0, 2)[::-1]),
        ((-1, 0, 0, -1), lambda p: p[::-1, ::-1]),
    ],
)
def test_a_phone_clip_is_turned_as_its_header_says(tmp_path, matrix, turned):
    picture = np.zeros((32, 64, 3), np.uint8)
    picture[:16, :32] = (255, 0, 0)
    picture[:16, 32:] = (0, 255, 0)
    picture[16:, :32] = (0, 0, 255)
    path = write_video(tmp_path / "a.mp4", times=range(3), pictures=[picture] * 3, size=(32, 64))
    content = bytearray(path.read_bytes())
    place = content.index(b"tkhd") + 4 + 40  # version 0: the matrix follows 40 bytes of the box's fields
    a, b, c, d = (value * 0x10000 for value in matrix)
    fields = (a, b, 0, c, d, 0, 0, 0, 0x40000000)
    content[place : place + 36] = b"".join(field.to_bytes(4, "big", signed=True) for field in fields)
    path.write_bytes(content)
    expected = turned(picture)
    pixels = read(path, 1, 30, size=expected.shape[:2])[:, 0]
    expected = torch.from_numpy(np.ascontiguousarray(expected)).permute(2, 0, 1) / 127.5 - 1
    assert (pixels - expected).abs().median() < 0.05  # a swapped corner would be off by 2 over a quarter
    assert ((pixels - expected).abs() > 0.5).double().mean() < 0.1  # chroma bleeds at the borders


@pytest.mark.parametrize(("tag", "red_weight"), [(1, 0.2126), (6, 0.299)])
def test_the_colour_matrix_that_the_file_names_is_used(tmp_path, tag, red_weight):
    path = tmp_path / "a.mkv"
    luma, red_difference = 120, 150  # limited range
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=30)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv444p"
        stream.codec_context.colorspace = tag
        stream.codec_context.color_range = 1
        planes = np.stack([np.full((16, 16), v, np.uint8) for v in (luma, 128, red_difference)])
        frame = av.VideoFrame.from_ndarray(planes, format="yuv444p")
        frame.pts, frame.time_base, frame.colorspace, frame.color_range = 0, Fraction(1, 30), tag, 1
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    red = 255 * ((luma - 16) / 219 + 2 * (1 - red_weight) * (red_difference - 128) / 224)
    got = (read(path, 1, 30, size=(16, 16))[0].mean() + 1) * 127.5
    assert abs(float(got) - red) < 2


ODD_NAMES = ["日本 é #1%[x]'\"=.mp4", "a:b %03d.mp4", "-x?*&;$(ls).mp4", "🎬 e\u0301.mp4", "x" * 240 + ".mp4"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_file_name_works(tmp_path, name):
    path = write_video(tmp_path / "plain.mp4", times=range(5)).rename(tmp_path / name)
    assert numbers(read(path, 5, 30)) == list(range(5))


def test_a_relative_name_with_a_colon_is_a_file_not_a_protocol(tmp_path, monkeypatch):
    write_video(tmp_path / "plain.mp4", times=range(5)).rename(tmp_path / "http:x.mp4")
    monkeypatch.chdir(tmp_path)
    assert numbers(read("http:x.mp4", 5, 30)) == list(range(5))


def test_a_short_clip_is_refused_with_what_it_has_needs_and_the_ways_on(tmp_path):
    path = write_video(tmp_path / "a.mp4", times=range(30))
    with pytest.raises(DataError) as error:
        read(path, 81, 16)
    message = str(error.value)
    assert str(path) in message
    assert "0.983 s" in message  # the middle of frame 29
    assert "5.000 s" in message  # 80 / 16
    assert "data.num_frames=13" in message  # 0.983 * 16 = 15.7, so 16 frames, 13 = 4 * 3 + 1
    assert "data.fps" in message
    assert len(numbers(read(path, 13, 16))) == 13


def test_a_start_behind_the_end_is_refused(tmp_path):
    path = write_video(tmp_path / "a.mp4", times=range(30))
    for start in (1.5, 20.0):
        with pytest.raises(DataError, match="start"):
            read(path, 5, 16, start_seconds=start)


def test_a_clip_of_one_frame_serves_as_an_image(tmp_path):
    path = write_video(tmp_path / "a.mp4", times=[0])
    assert numbers(read(path, 1, 16)) == [0]


def audio_only(path):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def moov_removed(path):
    write_video(path, times=range(30))
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"moov") - 4])


def cut_in_half(path):
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(30)]
    write_video(path, times=range(30), pictures=pictures, size=(64, 64))
    front = path.with_name("front.mp4")
    with av.open(str(path)) as source, av.open(str(front), "w", options={"movflags": "faststart"}) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    content = front.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")
    path.write_bytes(content[: len(content) // 2])


BROKEN = {
    "missing": lambda path: None,  # noqa: ARG005
    "zero bytes": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("a cat runs\n" * 100),
    "html": lambda path: path.write_text("<!DOCTYPE html><html><body>404 not found</body></html>"),
    "no index": moov_removed,
    "audio only": audio_only,
    "cut in half": cut_in_half,
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_file_that_is_no_whole_video_is_named(tmp_path, damage):
    path = tmp_path / "broken.mp4"
    BROKEN[damage](path)
    with pytest.raises(DataError, match=r"broken\.mp4"):
        read(path, 29, 30)


def test_a_clip_starts_at_its_files_first_frame_unless_told_otherwise(tmp_path):
    assert Clip(key="a.mp4", path=tmp_path / "a.mp4", caption="a cat").start_seconds == 0.0
