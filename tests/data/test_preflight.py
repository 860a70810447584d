import time
from fractions import Fraction

import pytest

from tests.data.test_clips import BROKEN
from tests.data.videos import write_video
from wan_ds.data.clips import Clip, decode
from wan_ds.data.preflight import check, report
from wan_ds.errors import DataError


def clip(path, caption="a cat", start_seconds=0.0):
    return Clip(path.name, path, caption, start_seconds)


def test_clips_that_reach_are_accepted(tmp_path):
    path = write_video(tmp_path / "a.mp4", times=range(60))
    check([clip(path), clip(path, start_seconds=0.5)], num_frames=21, fps=16)


@pytest.mark.parametrize("damage", BROKEN)
def test_a_clip_that_cannot_be_decoded_is_found_before_training(tmp_path, damage):
    BROKEN[damage](tmp_path / "broken.mp4")
    good = write_video(tmp_path / "good.mp4", times=range(60))
    # 25 of the 30 frames: so far from the limit that a header that claims 30 would do
    with pytest.raises(DataError, match=r"^1 of 3 clips cannot be used:\n.*broken\.mp4[^\n]*$"):
        check([clip(good), clip(tmp_path / "broken.mp4"), clip(good)], num_frames=25, fps=30)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts"])
@pytest.mark.parametrize("rate", [Fraction(24), Fraction(30000, 1001), Fraction(10)])
def test_the_verdict_on_length_is_that_of_decoding(tmp_path, suffix, rate):
    path = write_video(tmp_path / f"a.{suffix}", times=range(50), time_base=1 / rate, rate=rate)
    longest = next(n for n in range(int(50 / rate * 16) + 2, 0, -1) if decodes(path, n))
    check([clip(path)], num_frames=longest, fps=16)
    with pytest.raises(DataError, match="too short"):
        check([clip(path)], num_frames=longest + 1, fps=16)


def test_a_long_last_frame_counts_for_as_long_as_it_is_shown(tmp_path):
    ticks = list(range(60)) + [60 + 30 * k for k in range(3)]  # two seconds at 30 fps, then three frames at 1
    path = write_video(tmp_path / "a.mp4", times=ticks)
    longest = next(n for n in range(100, 0, -1) if decodes(path, n))
    check([clip(path)], num_frames=longest, fps=16)
    with pytest.raises(DataError, match="too short"):
        check([clip(path)], num_frames=longest + 1, fps=16)


def decodes(path, num_frames):
    try:
        decode(path, start_seconds=0, num_frames=num_frames, fps=16, height=16, width=16)
    except DataError:
        return False
    return True


def test_all_faults_are_counted_and_ten_are_shown(tmp_path):
    good = write_video(tmp_path / "good.mp4", times=range(30))
    faulty = [clip(tmp_path / f"{n:02}.mp4") for n in range(12)] + [clip(good, caption=" ")]
    with pytest.raises(DataError) as error:
        check([clip(good), *faulty], num_frames=5, fps=16)
    lines = str(error.value).splitlines()
    assert lines[0] == "13 of 14 clips cannot be used:"
    assert len(lines) == 12
    assert all(f"{n:02}.mp4: there is no such file" in lines[n + 1] for n in range(10))
    assert lines[-1].strip() == "and 3 more"


def test_an_empty_caption_is_a_fault(tmp_path):
    path = write_video(tmp_path / "a.mp4", times=range(30))
    with pytest.raises(DataError, match=r"a\.mp4: its caption is empty"):
        check([clip(path, caption=" \n")], num_frames=5, fps=16)


def test_an_empty_dataset_is_refused_with_its_path(tmp_path):
    with pytest.raises(DataError, match=str(tmp_path)):
        check([], num_frames=5, fps=16, path=tmp_path)


def test_the_report_says_what_each_clip_is_and_becomes(tmp_path):
    path = write_video(tmp_path / "a.mp4", times=range(60), size=(32, 128), aspect=Fraction(1, 2))
    clips = [clip(path, caption="a cat " * 30)] + [clip(path)] * 6
    lines = report(clips, num_frames=5, fps=16, height=64, width=64).splitlines()
    assert lines[0] == "7 clips; each becomes 5 frames of 64x64 at 16 fps"
    # 128 stored columns of half width are 64 shown; doubled to cover 64 rows; half of 128 columns is kept
    assert lines[1].strip() == "a.mp4: 64x32, 30 fps, 2.00 s -> scaled up to 128x64, 50% kept"
    assert "a cat a cat" in lines[2]
    assert len(lines[2]) < 80
    assert lines[-1].strip() == "and 2 more"
    assert len(lines) == 1 + 2 * 5 + 1


def test_hundreds_of_clips_are_checked_in_seconds(tmp_path):
    path = write_video(tmp_path / "a.mp4", times=range(300))
    began = time.monotonic()
    check([clip(path)] * 300, num_frames=81, fps=16)
    assert time.monotonic() - began < 10  # decoding them takes minutes
