"""Videos as files: one in H.264, and many as a sheet to look at.

Letters: F H W frames, height and width of the pixels.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor


def slug(caption: str) -> str:
    """The caption as a part of a file name, at most 40 characters; letters of every script stay."""
    return re.sub(r"[\W_]+", "-", caption.lower()).strip("-")[:40].rstrip("-") or "empty"


def to_uint8(pixels: Tensor) -> np.ndarray:
    """Frames `[F, H, W, 3]` in 0..255 of pixels `[3, F, H, W]` in [-1, 1]."""
    levels = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round()
    return levels.to(torch.uint8).permute(1, 2, 3, 0).cpu().numpy()


def write_video(path: str | Path, pixels: Tensor, fps: float) -> None:
    """An H.264 file that every player opens, of pixels `[3, F, H, W]` in [-1, 1]; H and W are even."""
    frames = to_uint8(pixels)
    with av.open(f"file:{path}", "w", format="mp4") as container:
        # Nearly lossless: what looks wrong in a sample should be the model's.
        stream = container.add_stream(
            "libx264", rate=Fraction(fps).limit_denominator(1001), options={"crf": "12", "preset": "medium"}
        )
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


SHEET_FRAMES = 6  # of each clip, evenly spaced, the first and the last among them
SHEET_SIDE = 192  # pixels, about, of a frame's longer side
SHEET_GAP = 4
SHEET_LABEL = 84  # width of the column that says what a row is
SHEET_TEXT = 16  # height of a line of the caption
SHEET_LINES = 2  # of the caption


def contact_sheet(path: str | Path, rows: Sequence[tuple[str, Tensor | None, Tensor]]) -> None:
    """A PNG with each caption, below it frames of its training clip, if any, then the generated ones.

    A row is (caption, real or None, generated), pixels `[3, F, H, W]` in [-1, 1], all of one size.
    """
    _, count, height, width = rows[0][2].shape
    cell = _cell(height, width)
    picked = np.linspace(0, count - 1, min(SHEET_FRAMES, count)).round().astype(int)
    strips = [
        [("training clip", real)] * (real is not None) + [("generated", generated)]
        for _, real, generated in rows
    ]
    size = (
        SHEET_LABEL + len(picked) * (cell[0] + SHEET_GAP) + SHEET_GAP,
        sum(SHEET_LINES * SHEET_TEXT + 2 * SHEET_GAP + len(pair) * (cell[1] + SHEET_GAP) for pair in strips),
    )
    sheet = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(SHEET_TEXT - 3)
    top = SHEET_GAP
    for (caption, _, _), pair in zip(rows, strips, strict=True):
        draw.text((SHEET_GAP, top), _wrapped(caption, font, size[0] - 2 * SHEET_GAP), "black", font)
        top += SHEET_LINES * SHEET_TEXT + SHEET_GAP
        for label, pixels in pair:
            draw.text((SHEET_GAP, top), label, "dimgray", ImageFont.load_default(11))
            for column, frame in enumerate(to_uint8(pixels[:, torch.from_numpy(picked)])):
                picture = Image.fromarray(frame).resize(cell, _filter(cell, width))
                sheet.paste(picture, (SHEET_LABEL + column * (cell[0] + SHEET_GAP), top))
            top += cell[1] + SHEET_GAP
        top += SHEET_GAP
    sheet.save(path)


def _cell(height: int, width: int) -> tuple[int, int]:
    """Width and height of a frame on the sheet; small frames grow by a whole factor."""
    scale = SHEET_SIDE / max(height, width)
    if scale > 1:
        scale = int(scale)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _filter(cell: tuple[int, int], width: int) -> Image.Resampling:
    return Image.Resampling.NEAREST if cell[0] >= width else Image.Resampling.LANCZOS


def _wrapped(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The text in lines that fit; what does not fit into the last one becomes an ellipsis."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    shown = lines[:SHEET_LINES]
    last = shown[-1]
    if len(lines) > SHEET_LINES or font.getlength(last) > width:
        fitting = bisect_right(range(len(last) + 1), width, key=lambda n: font.getlength(last[:n] + "…"))
        shown[-1] = last[: fitting - 1] + "…"
    return "\n".join(shown)
