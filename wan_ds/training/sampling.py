"""Videos from the experts through diffusers' own pipeline: files, a sheet to look at, and numbers.

Letters: B clips, C latent channels, F H W frames, height and width of the pixels, f h w those of the latents.
"""

import json
import math
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from wan_ds import streams
from wan_ds.errors import ConfigError

# diffusers' names for our experts; the first of them also is the place of a model's only expert.
PLACES = {"high_noise": "transformer", "all": "transformer", "low_noise": "transformer_2"}


class Generated(NamedTuple):
    """What one call of the pipeline gave."""

    latents: Tensor  # [B, C, f, h, w] float32, normalised
    expert_calls: dict[str, int]  # forward passes; two a step with guidance


class Nearest(NamedTuple):
    """How far generated latents are from the training clips."""

    index: Tensor  # [B], the nearest training clip
    mse_over_variance: Tensor  # [B, clips] float32; 1 is as far as the clip's own mean


@dataclass
class Sample:
    """A generated clip and the numbers that belong to it; what stands in `samples.json`."""

    prompt: str
    seed: int
    steps: int
    guidance: dict[str, float]
    shift: float
    expert_calls: dict[str, int]
    checkpoint: str
    file: str = ""
    clip: str | None = None  # the training clip with this caption
    psnr: float | None = None  # dB, against that clip
    own_mse_over_variance: float | None = None  # of the latents, against that clip
    nearest: str | None = None  # the training clip whose latents are nearest
    mse_over_variance: float | None = None  # of the latents, against the nearest


def build_pipeline(
    transformers: Mapping[str, nn.Module], *, boundary: float | None, shift: float, vae: AutoencoderKLWan
) -> WanPipeline:
    """diffusers' text-to-video pipeline over the experts' own modules; prompts come as embeddings.

    `boundary` is the sigma from where the high-noise expert works, None for a model of one expert; diffusers
    compares it with timesteps cut to integers. Raises `ConfigError` unless every expert is there.
    """
    needed = ("all",) if boundary is None else ("high_noise", "low_noise")
    if sorted(transformers) != sorted(needed):
        raise ConfigError(
            f"model.boundary={boundary}: sampling needs the experts {', '.join(needed)}, not"
            f" {', '.join(transformers) or 'none'}; load them, or do not sample: sampling.every_steps=null"
        )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
    )
    experts = {PLACES[name]: module for name, module in transformers.items()}
    return WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, boundary_ratio=boundary, **experts
    )


def generate(  # noqa: PLR0913
    pipeline: WanPipeline,
    prompt_embeds: Tensor,
    negative_prompt_embeds: Tensor,
    *,
    num_frames: int,
    height: int,
    width: int,
    steps: int,
    guidance: Mapping[str, float],
    seeds: Sequence[int],
    first: int = 0,
) -> Generated:
    """Clips from pure noise, one per row of `prompt_embeds` `[B, 512, D]`.

    Clip i starts from the noise of (seeds[i], first + i), so that it is the same however prompts are grouped
    into calls. `guidance`, away from `negative_prompt_embeds` `[1, 512, D]`, is by expert; 1 is none. Experts
    that were in train mode come back in train mode.
    """
    if len(seeds) != len(prompt_embeds):
        raise ValueError(f"{len(prompt_embeds)} prompts need as many seeds, not {len(seeds)}")
    experts = _experts(pipeline)
    scales = _scales({name: guidance[name] for name in experts})
    shape = (
        pipeline.vae.config.z_dim,
        (num_frames - 1) // pipeline.vae_scale_factor_temporal + 1,
        height // pipeline.vae_scale_factor_spatial,
        width // pipeline.vae_scale_factor_spatial,
    )
    noise = torch.stack([streams.normal(shape, seed, "sample", first + i) for i, seed in enumerate(seeds)])
    pipeline.set_progress_bar_config(disable=not _is_watched(), leave=False)
    with _counted(experts) as calls:
        latents = pipeline(
            prompt_embeds=prompt_embeds,
            negative_prompt_embeds=negative_prompt_embeds.expand(len(prompt_embeds), -1, -1),
            latents=noise,
            num_frames=num_frames,
            height=height,
            width=width,
            num_inference_steps=steps,
            guidance_scale=scales[next(iter(experts))],
            guidance_scale_2=scales.get("low_noise"),
            output_type="latent",
        ).frames
    return Generated(latents.float(), calls)


def _experts(pipeline: WanPipeline) -> dict[str, nn.Module]:
    if pipeline.config.boundary_ratio is None:
        return {"all": pipeline.transformer}
    return {"high_noise": pipeline.transformer, "low_noise": pipeline.transformer_2}


def _scales(guidance: dict[str, float]) -> dict[str, float]:
    """The guidance as diffusers must be told it, which does none at all unless its first number exceeds 1."""
    for name, scale in guidance.items():
        if not scale >= 1:
            raise ConfigError(
                f"sampling.guidance of {name} is {scale}: must be at least 1, which is no guidance"
            )
    if max(guidance.values()) == 1:
        return guidance
    return {name: max(scale, math.nextafter(1, 2)) for name, scale in guidance.items()}


@contextmanager
def _counted(experts: Mapping[str, nn.Module]) -> Iterator[dict[str, int]]:
    """The experts in eval mode, and how often each was called."""
    calls = dict.fromkeys(experts, 0)

    def count(name: str) -> None:
        calls[name] += 1

    hooks = [
        module.register_forward_hook(lambda *_, name=name: count(name)) for name, module in experts.items()
    ]
    training = {module: module.training for expert in experts.values() for module in expert.modules()}
    for expert in experts.values():
        expert.eval()
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in training.items():
            module.training = mode


def _is_watched() -> bool:
    return os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()


def psnr(generated: Tensor, real: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of pixels in [-1, 1]; infinite for equal ones."""
    mse = (generated.double() - real.to(generated.device).double()).square().mean().item()
    return math.inf if mse == 0 else 10 * math.log10(4 / mse)


def nearest(latents: Tensor, bank: Tensor) -> Nearest:
    """The training clip nearest to each of `latents` `[B, C, f, h, w]` among `bank` `[clips, C, f, h, w]`.

    The distance is the mean squared error over the variance of the training clip's latents.
    """
    columns = []
    for clip in bank.to(latents.device, torch.float32):  # one at a time: B times clips latents do not fit
        errors = (latents.float() - clip).square().mean(dim=(1, 2, 3, 4))
        columns.append(errors / clip.var(correction=0))
    distances = torch.stack(columns, dim=1)
    return Nearest(distances.argmin(dim=1), distances)


# Files


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


def write_samples(
    folder: str | Path,
    samples: Sequence[Sample],
    generated: Sequence[Tensor],
    real: Sequence[Tensor | None],
    fps: float,
) -> None:
    """`<nn>-<slug>.mp4` of each sample, `contact.png`, and last `samples.json`: where it is, all is there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for number, (sample, pixels) in enumerate(zip(samples, generated, strict=True)):
        sample.file = f"{number:02d}-{slug(sample.prompt)}.mp4"
        write_video(folder / sample.file, pixels, fps)
    rows = [
        (sample.prompt, clip, pixels) for sample, clip, pixels in zip(samples, real, generated, strict=True)
    ]
    contact_sheet(folder / "contact.png", rows)
    beside = folder / "samples.json.tmp"
    beside.write_text(
        json.dumps([_finite(asdict(sample)) for sample in samples], indent=1, ensure_ascii=False) + "\n"
    )
    os.replace(beside, folder / "samples.json")


def _finite(values: dict) -> dict:
    """Equal clips have an infinite PSNR, for which JSON has no word."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def guidance_of(guidance: float | Mapping[str, float], experts: Sequence[str]) -> dict[str, float]:
    """Guidance by expert: one number for all of them, or each its own; `ConfigError` if one is missing."""
    if not isinstance(guidance, Mapping):
        return dict.fromkeys(experts, float(guidance))
    missing = [name for name in experts if name not in guidance]
    if missing:
        raise ConfigError(f"sampling.guidance={guidance}: says nothing of {', '.join(missing)}")
    return {name: float(guidance[name]) for name in experts}
