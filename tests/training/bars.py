"""A clip to write and to recognise: a bar that moves; and how a written video is read back."""

import av
import numpy as np
import torch


def moving_bar(frames: int = 9, height: int = 32, width: int = 48) -> torch.Tensor:
    pixels = torch.full((3, frames, height, width), -0.8)
    for frame in range(frames):
        pixels[0, frame, :, 4 * frame : 4 * frame + 8] = 0.9
    return pixels


def read_video(path) -> tuple[np.ndarray, av.video.stream.VideoStream]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        return frames, stream
