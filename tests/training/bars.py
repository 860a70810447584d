"""What tests of sampling share: a tiny model's sizes, a bar that moves, and a written video read back."""

import av
import numpy as np
import torch

TINY = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 1,
}
SIZE = {"num_frames": 5, "height": 32, "width": 48}
GUIDANCE = {"high_noise": 4.0, "low_noise": 3.0}


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
