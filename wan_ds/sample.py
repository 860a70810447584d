"""Videos from a run, by diffusers' pipeline in one process: of each training caption, or of a prompt.

python scripts/sample.py run=runs/mine [prompt="a cat, running"] [checkpoint=step_00000100] [seed=1]
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from omegaconf import MISSING, OmegaConf
from torch import Tensor

from wan_ds.config import Config, Dtype, read
from wan_ds.config.command_line import simple_command
from wan_ds.data.clips import Clip, decode
from wan_ds.errors import CheckpointError, ConfigError, DataError
from wan_ds.models.encoders import clean, decode_latents, encode_video
from wan_ds.models.transformer import WanTransformer
from wan_ds.models.weights import build_transformer
from wan_ds.training import checkpoint as checkpoints
from wan_ds.training import run_folder
from wan_ds.training.parts import load_encoders, read_clips
from wan_ds.training.sampling import (
    Generated,
    Sample,
    build_pipeline,
    generate,
    guidance_of,
    nearest,
    psnr,
    slug,
    write_samples,
)
from wan_ds.training.trackers import JsonLines

logger = logging.getLogger(__name__)

DEFAULT_PROMPTS = 8  # captions of the first clips, where neither the command nor the run names prompts
CLIPS_COMPARED = 64  # the first training clips, among which the nearest one is looked for
CAPTION_SHOWN = 60  # characters of a caption in the table


@dataclass
class SampleOptions:
    """What `scripts/sample.py` can be told; what is not told is the run's."""

    run: str = field(default=MISSING, metadata={"help": "the run's folder", "path": True})
    prompt: str | None = field(default=None, metadata={"help": "default: the captions of the training clips"})
    checkpoint: str = field(default="latest", metadata={"help": "latest, or a folder's name: step_00000100"})
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = field(default=None, metadata={"help": "of every expert; 1 is none"})
    shift: float | None = None


@dataclass(frozen=True)
class Settings:
    """How the videos are made: the run's settings with what was typed over them."""

    prompts: list[str]
    seed: int
    steps: int
    guidance: dict[str, float]  # by expert
    shift: float


def main(options: SampleOptions) -> int:
    """Writes `samples/<checkpoint>/` in the run and tells how near the videos come to the training clips."""
    run_dir = Path(options.run)
    config = run_config(run_dir)
    checkpoint = checkpoints.find(run_dir, options.checkpoint)
    clips = _training_clips(config, options)
    settings = resolve(options, config, clips)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    vae, text_encoder = load_encoders(config, device)
    embeds = text_encoder(["", *settings.prompts])
    del text_encoder  # the largest part of all; its place is needed
    experts = load_experts(config, checkpoint, device)
    made = _generate(config, settings, embeds, experts, vae)
    videos = [decode_latents(vae, one.latents)[0].cpu() for one in made]

    real, found = _compare(config, settings.prompts, clips, made, videos, vae)
    samples = [
        Sample(
            prompt=prompt,
            seed=settings.seed,
            steps=settings.steps,
            guidance=settings.guidance,
            shift=settings.shift,
            expert_calls=one.expert_calls,
            checkpoint=checkpoint.name,
            **numbers,
        )
        for prompt, one, numbers in zip(settings.prompts, made, found, strict=True)
    ]
    target = run_dir / "samples" / folder_name(checkpoint.name, options, config)
    write_samples(target, samples, videos, real, config.data.fps)
    tables = (experts_table(run_dir, checkpoint), samples_table(samples), str(target))
    sys.stdout.write("\n\n".join(tables) + "\n")
    return 0


def run_config(run_dir: Path) -> Config:
    """The settings that a run was started with."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"run={run_dir}: there is no {path}; run is a folder that training wrote")
    return read(OmegaConf.create(run_folder.read(run_dir)))


def _training_clips(config: Config, options: SampleOptions) -> list[Clip]:
    """The clips to compare with; none if they are gone and prompts were given, which need none."""
    try:
        return read_clips(config)[:CLIPS_COMPARED]
    except DataError as error:
        if options.prompt is None and config.sampling.prompts is None:
            raise
        logger.warning("nothing to compare with: %s", error)
        return []


def resolve(options: SampleOptions, config: Config, clips: Sequence[Clip]) -> Settings:
    """What was typed, else what the run says, else the captions of the first training clips."""
    if options.prompt is not None:
        prompts = [options.prompt]
    else:
        prompts = config.sampling.prompts or [clip.caption for clip in clips[:DEFAULT_PROMPTS]]
    steps = config.sampling.steps if options.steps is None else options.steps
    if steps < 1:
        raise ConfigError(f"steps={steps}: must be at least 1")
    guidance = config.sampling.guidance if options.guidance is None else options.guidance
    return Settings(
        prompts=prompts,
        seed=config.sampling.seed if options.seed is None else options.seed,
        steps=steps,
        guidance=guidance_of(guidance, list(config.model.experts)),
        shift=config.sampling.shift if options.shift is None else options.shift,
    )


def load_experts(config: Config, checkpoint: Path, device: torch.device) -> dict[str, WanTransformer]:
    """Every expert that the model declares: as trained, or as training would load it if it does not train."""
    trained = checkpoints.read_state(checkpoint).experts
    experts = {}
    for name, base in config.model.experts.items():
        if name in trained:
            expert = WanTransformer(**config.model.transformer)
            _fill(expert, checkpoints.read_weights(checkpoint, name), checkpoint / name)
        else:
            expert = build_transformer(
                config.model.transformer,
                path=config.model.path,
                weights=base.weights,
                seed=config.seed,
                expert=name,
            )
        experts[name] = expert.to(device).eval().requires_grad_(False)
    return experts


def _fill(expert: WanTransformer, weights: dict[str, Tensor], folder: Path) -> None:
    try:
        expert.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder} does not hold the model of the run's config.yaml: {error}"
        ) from error


def _generate(
    config: Config,
    settings: Settings,
    embeds: Tensor,
    experts: dict[str, WanTransformer],
    vae: AutoencoderKLWan,
) -> list[Generated]:
    """One clip per prompt, each in a call of its own: the same whatever the others are.

    `embeds` `[1 + prompts, 512, width]` begins with the empty prompt.
    """
    pipeline = build_pipeline(experts, boundary=config.model.boundary, shift=settings.shift, vae=vae)
    # The weights stay float32; what is computed in bf16 is what training computed in bf16.
    is_bf16 = config.precision.compute_dtype is Dtype.bf16
    with torch.autocast(vae.device.type, torch.bfloat16, enabled=is_bf16):
        return [
            generate(
                pipeline,
                embeds[number : number + 1],
                embeds[:1],
                num_frames=config.data.num_frames,
                height=config.data.height,
                width=config.data.width,
                steps=settings.steps,
                guidance=settings.guidance,
                seeds=[settings.seed],
                first=number - 1,
            )
            for number in range(1, len(embeds))
        ]


def _compare(
    config: Config,
    prompts: Sequence[str],
    clips: Sequence[Clip],
    made: Sequence[Generated],
    videos: Sequence[Tensor],
    vae: AutoencoderKLWan,
) -> tuple[list[Tensor | None], list[dict[str, Any]]]:
    """For each prompt: its training clip's pixels, if it has one, and what `Sample` tells of the two."""
    if not clips:
        return [None] * len(prompts), [{}] * len(prompts)
    captions = [clean(clip.caption) for clip in clips]
    owners = [captions.index(clean(prompt)) if clean(prompt) in captions else None for prompt in prompts]
    bank, kept = [], {}
    for number, clip in enumerate(clips):
        pixels = _decode(config, clip)
        bank.append(encode_video(vae, pixels[None]))
        if number in owners:
            kept[number] = pixels
    index, distances = nearest(torch.cat([one.latents for one in made]), torch.cat(bank))
    found = []
    for row, (owner, video) in enumerate(zip(owners, videos, strict=True)):
        closest = int(index[row])
        found.append({"nearest": clips[closest].key, "mse_over_variance": distances[row, closest].item()})
        if owner is not None:
            own = {"psnr": psnr(video, kept[owner]), "own_mse_over_variance": distances[row, owner].item()}
            found[-1].update(own, clip=clips[owner].key)
    return [kept.get(owner) for owner in owners], found


def _decode(config: Config, clip: Clip) -> Tensor:
    data = config.data
    return decode(
        clip.path,
        start_seconds=clip.start_seconds,
        num_frames=data.num_frames,
        fps=data.fps,
        height=data.height,
        width=data.width,
    )


def folder_name(checkpoint: str, options: SampleOptions, config: Config) -> str:
    """The checkpoint's name and what was typed that differs from the run, so that no samples are lost."""
    name = checkpoint
    for key in ("seed", "steps", "guidance", "shift"):
        typed = getattr(options, key)
        if typed is not None and typed != getattr(config.sampling, key):
            name += f"-{key}{typed:g}" if isinstance(typed, float) else f"-{key}{typed}"
    return name if options.prompt is None else f"{name}-{slug(options.prompt)}"


def experts_table(run_dir: Path, checkpoint: Path) -> str:
    """How often each expert trained, and its last loss."""
    state = checkpoints.read_state(checkpoint)
    losses: dict[str, float] = {}
    for record in JsonLines(run_dir / "metrics.jsonl").read():
        if record["step"] <= state.step:
            found = {name: record.get(f"train/{name}/loss") for name in state.experts}
            losses |= {name: loss for name, loss in found.items() if loss is not None}
    total = sum(expert.steps for expert in state.experts.values())
    rows = [("expert", "steps", "share expected", "share seen", "last loss")]
    for name, expert in state.experts.items():
        seen = expert.steps / total if total else 0.0
        loss = f"{losses[name]:.4f}" if name in losses else "-"
        rows.append((name, str(expert.steps), f"{expert.share:.3f}", f"{seen:.3f}", loss))
    return _table(rows)


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
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    simple_command(SampleOptions, main)
