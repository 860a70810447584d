"""Looks at every clip before anything is loaded: what is there, what becomes of it, and what cannot be used.

Headers are read, no frame is decoded; a file's packets are counted where its header is silent, or leaves its
length in doubt.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from wan_ds.data import clips as video
from wan_ds.data.clips import Clip
from wan_ds.errors import DataError

CLIPS_SHOWN = 5
FAULTS_SHOWN = 10
CAPTION_SHOWN = 60
PROBES_AT_ONCE = 8  # opening a file waits for the disk or the network, not for a core


@dataclass(frozen=True)
class Header:
    """What a video file says about itself."""

    fps: Fraction
    seconds: Fraction  # from the first frame to the end of the last
    reach: Fraction  # the last time after the first frame that it can serve: the middle of its last frame


def check(clips: Sequence[Clip], *, num_frames: int, fps: float, path: str | Path | None = None) -> None:
    """Raises one ``DataError`` listing the clips that cannot be used, each with its reason.

    ``path`` is where the dataset lies, for the message when it is empty.
    """
    if not clips:
        raise DataError(f"{path or 'data.path'}: it holds no clip; data.path names a folder with videos")
    with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:
        faults = [fault for fault in pool.map(lambda clip: _fault(clip, num_frames, fps), clips) if fault]
    if not faults:
        return
    lines = [f"{len(faults)} of {len(clips)} clips cannot be used:"]
    lines += [f"  {fault}" for fault in faults[:FAULTS_SHOWN]]
    if len(faults) > FAULTS_SHOWN:
        lines.append(f"  and {len(faults) - FAULTS_SHOWN} more")
    raise DataError("\n".join(lines))


def report(clips: Sequence[Clip], *, num_frames: int, fps: float, height: int, width: int) -> str:
    """How many clips there are, and for the first few what they are and what becomes of them."""
    lines = [f"{len(clips)} clips; each becomes {num_frames} frames of {width}x{height} at {fps:g} fps"]
    for clip in clips[:CLIPS_SHOWN]:
        lines += [f"  {clip.key}: {_fate(clip, (height, width))}", f"    {_shortened(clip.caption)!r}"]
    if len(clips) > CLIPS_SHOWN:
        lines.append(f"  and {len(clips) - CLIPS_SHOWN} more")
    return "\n".join(lines)


def read_header(path: str | Path, *, due: Fraction | None = None) -> Header:
    """What the file says about itself; counted from its packets if that decides whether it reaches ``due``.

    Raises ``DataError`` if it cannot be read, or if it is shorter than its own index.
    """
    with video.open_video(path) as (container, stream):
        index = stream.index_entries
        if len(index) and index[-1].pos + index[-1].size > os.path.getsize(path):
            raise DataError(f"{path}: cut short: its index names frames behind the file's end; copy it again")
        rate = video.frame_rate(stream)
        frame = 1 / rate
        if stream.duration:
            seconds = stream.duration * stream.time_base
            reach = seconds - frame / 2
            # Some writers put too short a length there, so a clip is never refused on its word.
            if due is None or reach - due > 2 * frame:
                return Header(rate, seconds, reach)
        packets = [packet for packet in container.demux(stream) if packet.pts is not None]
        if not packets:
            raise DataError(f"{path}: the file holds no frame; copy it again or remove it")
        last = max(packets, key=lambda packet: packet.pts)
        first = min(packet.pts for packet in packets)
        lasts = last.duration * stream.time_base if last.duration else frame
        begins = (last.pts - first) * stream.time_base
        return Header(rate, begins + lasts, begins + lasts / 2)


def _fault(clip: Clip, num_frames: int, fps: float) -> str | None:
    if not clip.caption.strip():
        return f"{clip.path}: its caption is empty; write one or remove the clip"
    due = video.wanted_times(clip.start_seconds, num_frames, fps)[-1]
    try:
        header = read_header(clip.path, due=due)
    except DataError as error:
        return str(error)
    if header.reach < due:
        return video.too_short(clip.path, header.reach, clip.start_seconds, num_frames, fps)
    return None


def _fate(clip: Clip, size: tuple[int, int]) -> str:
    header = read_header(clip.path)
    with video.open_video(clip.path) as (container, stream):
        _, frame = next(video.timed_frames(container, stream), (None, None))
        if frame is None:
            raise DataError(f"{clip.path}: none of its frames can be decoded; copy it again or remove it")
        height, width, _ = video.shown_shape(frame, stream)
    scaled = video.covering_size(height, width, size)
    kept = Fraction(size[0] * size[1], scaled[0] * scaled[1])
    return (
        f"{round(width)}x{height}, {float(header.fps):.5g} fps, {float(header.seconds):.2f} s"
        f" -> scaled{' up' if scaled[0] > height else ''} to {scaled[1]}x{scaled[0]}, {float(kept):.0%} kept"
    )


def _shortened(caption: str) -> str:
    return caption if len(caption) <= CAPTION_SHOWN else caption[: CAPTION_SHOWN - 3] + "..."
