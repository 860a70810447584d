"""Videos for tests, with a known grey level in each frame, so that a picked frame tells its number."""

from fractions import Fraction

import av
import numpy as np
import torch


def grey(number: int) -> int:
    return 16 + 8 * (number % 29)


def write_video(path, *, times, time_base=Fraction(1, 30), pictures=None, size=(32, 32), **options):
    """A video whose frame k is shown at ``times[k]`` ticks: ``pictures[k]`` [H, W, 3], else its grey."""
    with av.open(f"file:{path}", "w", format=options.get("format")) as container:
        stream = container.add_stream(options.get("codec", "libx264"), rate=options.get("rate", 30))
        stream.height, stream.width = size
        stream.pix_fmt = options.get("pix_fmt", "yuv420p")
        stream.options = options.get("stream_options", {"crf": "1"})
        stream.time_base = stream.codec_context.time_base = time_base
        if "aspect" in options:
            stream.codec_context.sample_aspect_ratio = options["aspect"]
        for number, time in enumerate(times):
            picture = pictures[number] if pictures else np.full((*size, 3), grey(number), np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = time, time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def numbers(pixels: torch.Tensor) -> list[int]:
    """The frame numbers (modulo 29) that the grey levels of ``[3, F, H, W]`` tell."""
    levels = (pixels.double().mean(dim=(0, 2, 3)) + 1) * 127.5
    codes = (levels - 16) / 8
    assert (codes - codes.round()).abs().max() < 0.4, f"levels {levels} are no frame's"
    return [int(code) for code in codes.round()]
