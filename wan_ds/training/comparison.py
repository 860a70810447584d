"""How near generated clips come to the training clips, in numbers and as tables for a person.

Letters: B clips, C latent channels, F H W frames, height and width of the pixels, f h w those of the latents.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wan_ds.data.clips import Clip
from wan_ds.models.encoders import clean
from wan_ds.training.checkpoint import TrainerState
from wan_ds.training.sampling import Sample

CAPTION_SHOWN = 60  # characters of a caption in the table


class Nearest(NamedTuple):
    """How far generated latents are from the training clips."""

    index: Tensor  # [B], the nearest training clip
    mse_over_variance: Tensor  # [B, clips] float32; 1 is as far as the clip's own mean


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


@dataclass
class Comparison:
    """What is known of each generated clip beside itself."""

    real: list[Tensor | None]  # [3, F, H, W], the training clip it was made after
    numbers: list[dict[str, Any]] = field(default_factory=list)  # of `Sample`


def compare(
    prompts: Sequence[str],
    latents: Tensor,
    videos: Sequence[Tensor],
    clips: Sequence[Clip],
    *,
    read: Callable[[Clip], Tensor],
    encode_video: Callable[[Tensor], Tensor],
) -> Comparison:
    """Generated `latents` `[B, C, f, h, w]` and `videos` `[3, F, H, W]` against the training clips.

    A video's own clip is the one whose caption is its prompt. `read` gives a clip's pixels `[3, F, H, W]`,
    `encode_video` latents `[1, C, f, h, w]` of `[1, 3, F, H, W]`. Without clips there is nothing to tell.
    """
    if not clips:
        return Comparison([None] * len(prompts), [{}] * len(prompts))
    captions, wanted = [clean(clip.caption) for clip in clips], [clean(prompt) for prompt in prompts]
    owners = [captions.index(prompt) if prompt in captions else None for prompt in wanted]
    bank, kept = [], {}
    for number, clip in enumerate(clips):
        pixels = read(clip)
        bank.append(encode_video(pixels[None]))
        if number in owners:
            kept[number] = pixels
    index, distances = nearest(latents, torch.cat(bank))
    found = Comparison([kept.get(owner) for owner in owners])
    for row, (owner, video) in enumerate(zip(owners, videos, strict=True)):
        closest = int(index[row])
        numbers = {"nearest": clips[closest].key, "mse_over_variance": distances[row, closest].item()}
        if owner is not None:
            own = {"psnr": psnr(video, kept[owner]), "own_mse_over_variance": distances[row, owner].item()}
            numbers |= own | {"clip": clips[owner].key}
        found.numbers.append(numbers)
    return found


def experts_table(state: TrainerState, losses: dict[str, float]) -> str:
    """How often each expert trained, and its last loss."""
    total = sum(expert.steps for expert in state.experts.values())
    rows = [("expert", "steps", "share expected", "share seen", "last loss")]
    for name, expert in state.experts.items():
        seen = expert.steps / total if total else 0.0
        loss = f"{losses[name]:.4f}" if name in losses else "-"
        rows.append((name, str(expert.steps), f"{expert.share:.3f}", f"{seen:.3f}", loss))
    return table(rows)


def samples_table(samples: Sequence[Sample]) -> str:
    """How near each video came to the training clips."""
    rows = [("caption", "PSNR", "nearest clip", "mse/variance")]
    for sample in samples:
        near = "-" if sample.mse_over_variance is None else f"{sample.mse_over_variance:.4f}"
        own = "-" if sample.psnr is None else f"{sample.psnr:.2f} dB"
        caption = (
            sample.prompt if len(sample.prompt) <= CAPTION_SHOWN else sample.prompt[: CAPTION_SHOWN - 1] + "…"
        )
        rows.append((caption, own, sample.nearest or "-", near))
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines, the columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
