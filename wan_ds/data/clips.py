"""A clip is one span of a video file and its caption; ``decode`` turns it into the frames a model trains on.

Letters: F frames, H height, W width, all of the training clip.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, takewhile
from pathlib import Path

import av
import numpy as np
import torch
import torch.nn.functional as F
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from wan_ds.errors import DataError

# A nearer start is reached by decoding from the first frame, which is cheap and never inexact.
SEEK_BEYOND_SECONDS = 2


@dataclass(frozen=True)
class Clip:
    """One span of a video file and its caption."""

    key: str  # unique in the dataset: the file's path relative to it, with "/", e.g. "holiday/cat.mp4"
    path: Path
    caption: str
    start_seconds: float = 0.0  # after the file's first frame


def decode(  # noqa: PLR0913
    path: str | Path, *, start_seconds: float, num_frames: int, fps: float, height: int, width: int
) -> torch.Tensor:
    """The clip as float32 ``[3, F, H, W]`` in [-1, 1], RGB.

    Frame k is the frame of the file that is nearest in presentation time to ``start_seconds + k / fps`` after
    the file's first frame (the earlier of two that are equally near): never off by more than half a source
    frame. The picture is turned and its pixels squared as the file's metadata say, then it is scaled, aspect
    kept, until it covers ``(height, width)``, and cropped about its centre. Raises ``DataError`` if the file
    cannot be read or its last frame comes too early.
    """
    levels = decode_levels(
        path, start_seconds=start_seconds, num_frames=num_frames, fps=fps, height=height, width=width
    )
    return to_pixels(levels)


def decode_levels(  # noqa: PLR0913
    path: str | Path, *, start_seconds: float, num_frames: int, fps: float, height: int, width: int
) -> torch.Tensor:
    """What ``decode`` gives, as the 8-bit levels it stands on: uint8 ``[3, F, H, W]``."""
    wanted = wanted_times(start_seconds, num_frames, fps)
    size = (height, width)
    decoded = _decode_at(path, wanted, size, seek=wanted[0] > SEEK_BEYOND_SECONDS)
    if decoded is None:
        decoded = _decode_at(path, wanted, size, seek=False)
    assert decoded is not None, "only a seek can land too late"
    pictures, reach = decoded
    if len(pictures) < num_frames:
        raise DataError(too_short(path, reach, start_seconds, num_frames, fps))
    return torch.stack(pictures, dim=1)


def to_pixels(levels: torch.Tensor) -> torch.Tensor:
    """Levels 0..255 as float32 in [-1, 1]."""
    return levels.float().div_(127.5).sub_(1.0)


def wanted_times(start_seconds: float, num_frames: int, fps: float) -> list[Fraction]:
    """When the clip's frames are due, in seconds after the file's first frame.

    Fractions, because a float's last bit would decide between two frames that are equally near.
    """
    start = Fraction(start_seconds).limit_denominator(1_000_000)
    return [start + k / _exact_rate(fps) for k in range(num_frames)]


def too_short(path: str | Path, reach: Fraction, start_seconds: float, num_frames: int, fps: float) -> str:
    """What to tell about a file that ends before the clip does; ``reach`` is the last time it can serve."""
    due = wanted_times(start_seconds, num_frames, fps)[-1]
    start = f" from second {start_seconds:g}" if start_seconds else ""
    message = (
        f"{path}: too short: its frames reach {float(reach):.3f} s, but the last frame of"
        f" data.num_frames={num_frames} at data.fps={fps:g}{start} is due at {float(due):.3f} s"
    )
    usable = num_frames - math.ceil((due - reach) * _exact_rate(fps))
    if usable < 1:
        return f"{message}; the clip's start lies behind its end: remove the clip or start it earlier"
    usable -= (usable - 1) % 4  # the video encoder takes 4n + 1 frames
    return f"{message}; use data.num_frames={usable} or less, or a higher data.fps, or remove the clip"


@contextmanager
def open_video(path: str | Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The opened file and its video stream; what FFmpeg has against it is a ``DataError`` with its path."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty (0 bytes); copy it again or remove it")
    try:
        # "file:" because FFmpeg takes what stands before a colon in a name for a protocol.
        with av.open(f"file:{path}", metadata_errors="replace") as container:
            # An audio file's cover picture is a video stream to FFmpeg.
            videos = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
            if not videos or videos[0].codec_context is None:
                raise DataError(f"{path}: the file holds no video that can be decoded; replace or remove it")
            # Workers decode clips side by side; and on one thread damage shows at the same frame each time.
            videos[0].codec_context.thread_count = 1
            yield container, videos[0]
    except av.error.FFmpegError as error:
        raise DataError(
            f"{path}: cannot be read as a video ({error.strerror or error}): it is damaged, cut short or"
            " another kind of file; copy it again, convert it or remove it"
        ) from error


def timed_frames(container: InputContainer, stream: VideoStream) -> Iterator[tuple[Fraction, VideoFrame]]:
    """Frames in order of presentation, each with its time in seconds by the file's own clock."""
    time = None
    for frame in container.decode(stream):
        if frame.pts is not None:
            shown = frame.pts * Fraction(frame.time_base)
        else:  # raw streams have no clock
            shown = Fraction(0) if time is None else time + 1 / frame_rate(stream)
        if time is not None and shown <= time:
            continue  # a clock that jumps back: a player never shows such a frame
        time = shown
        yield time, frame


def frame_rate(stream: VideoStream) -> Fraction:
    """Frames per second, on average, as the header says it; 25 where it does not."""
    return stream.average_rate or stream.guessed_rate or Fraction(25)


def shown_shape(frame: VideoFrame, stream: VideoStream) -> tuple[int, Fraction, int]:
    """Height and width of the picture as shown, and the quarter turns to the left that get there.

    The width is a fraction: the stored columns (rows if turned) times their pixels' aspect.
    """
    aspect = stream.sample_aspect_ratio or Fraction(1)
    turns = round(frame.rotation / 90) % 4
    if turns % 2:
        return frame.width, frame.height / aspect, turns
    return frame.height, frame.width * aspect, turns


def covering_size(height: int, width: Fraction, size: tuple[int, int]) -> tuple[int, int]:
    """The smallest (height, width) of a picture's own shape that covers ``size``, in whole pixels."""
    scale = max(Fraction(size[0], height), size[1] / width)
    return max(size[0], round(height * scale)), max(size[1], round(width * scale))


def _exact_rate(fps: float) -> Fraction:
    return Fraction(fps).limit_denominator(1001)  # 29.97002997 means 30000/1001


def _decode_at(
    path: str | Path, wanted: list[Fraction], size: tuple[int, int], *, seek: bool
) -> tuple[list[torch.Tensor], Fraction] | None:
    """Pictures uint8 ``[3, H, W]`` at the wanted times, as many as there are, and the last time served.

    None if a seek came out after the first wanted time.
    """
    pictures: list[torch.Tensor] = []
    reach = Fraction(0)
    with open_video(path) as (container, stream):
        frames = timed_frames(container, stream)
        first = next(frames, None)
        if first is None:
            raise DataError(f"{path}: none of its frames can be decoded; copy the file again or remove it")
        origin = first[0]
        frames = _from_key_frame(container, stream, origin + wanted[0]) if seek else chain([first], frames)
        if frames is None:
            return None
        for until, frame in _nearest_until(frames, stream):
            reach = until - origin
            due = len(list(takewhile(reach.__ge__, wanted[len(pictures) :])))
            if due and frame.is_corrupt:
                raise DataError(
                    f"{path}: the frame at {float(reach):.2f} s is damaged; copy the file again or remove it"
                )
            if due:
                pictures += [_fit(frame, stream, size)] * due
            if len(pictures) == len(wanted):
                break
    return pictures, reach


def _from_key_frame(
    container: InputContainer, stream: VideoStream, time: Fraction
) -> Iterator[tuple[Fraction, VideoFrame]] | None:
    """Frames from a key frame at or before ``time``; None if the container cannot be brought there.

    Frames before the key frame may lean on others that were not read, so they are passed over.
    """
    try:
        container.seek(math.floor(time / stream.time_base), stream=stream, backward=True)
        frames = timed_frames(container, stream)
        first = next((pair for pair in frames if pair[1].key_frame), None)
    except av.error.FFmpegError:
        return None  # decoding from the start tells whether the file is damaged or only cannot be sought in
    if first is None or first[0] > time or first[1].pts is None:
        return None
    return chain([first], frames)


def _nearest_until(
    frames: Iterator[tuple[Fraction, VideoFrame]], stream: VideoStream
) -> Iterator[tuple[Fraction, VideoFrame]]:
    """Each frame with the last time to which no later frame is nearer; reads one frame ahead."""
    time, frame = next(frames)
    lasts = 1 / frame_rate(stream)
    for next_time, next_frame in frames:
        yield (time + next_time) / 2, frame
        lasts = next_time - time
        time, frame = next_time, next_frame
    if frame.duration:
        lasts = frame.duration * Fraction(frame.time_base)
    yield time + lasts / 2, frame


def _fit(frame: VideoFrame, stream: VideoStream, size: tuple[int, int]) -> torch.Tensor:
    """The frame as shown, scaled to cover ``size`` and cropped about its centre: uint8 ``[3, H, W]``."""
    height, width, turns = shown_shape(frame, stream)
    rgb = np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns))
    return fitted(torch.from_numpy(rgb).permute(2, 0, 1), covering_size(height, width, size), size)


def fitted(picture: torch.Tensor, scaled: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """Levels uint8 ``[3, height, width]`` brought to the size ``scaled``, then its centre of ``size``."""
    if scaled != tuple(picture.shape[1:]):
        smooth = F.interpolate(
            picture[None].float(), size=scaled, mode="bicubic", align_corners=False, antialias=True
        )[0]
        picture = smooth.round_().clamp_(0, 255).to(torch.uint8)  # bicubic overshoots at edges
    top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    return picture[:, top : top + size[0], left : left + size[1]].contiguous()
