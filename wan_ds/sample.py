"""Videos from a run or an export, by diffusers' pipelines in one process.

python scripts/sample.py run=runs/mine [prompt="a cat, running"] [checkpoint=step_00000100] [seed=1]
python scripts/sample.py export=runs/mine/export/diffusers prompt="a cat, running" [image=cat.png]

Without a prompt each of a run's first training clips is made anew: from its caption, and from its first (and
last) frame if the model begins with images. Videos are written into the run, or beside the export.
"""

import hashlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from wan_ds.config import Config
from wan_ds.config.command_line import simple_command
from wan_ds.data.clips import Clip, decode
from wan_ds.errors import ConfigError, DataError
from wan_ds.models.encoders import decode_latents, encode_video
from wan_ds.training import exported, parts, shots
from wan_ds.training.comparison import Comparison, compare, samples_table, table
from wan_ds.training.runs import KINDS, Kind, experts_told, opened
from wan_ds.training.sampling import (
    Generated,
    Pipeline,
    Sample,
    build_pipeline,
    generate,
    guidance_of,
    refuse_size,
    write_samples,
)
from wan_ds.training.shots import Shot
from wan_ds.training.subjects import SETTINGS, Subject, of_export, of_run
from wan_ds.training.videos import slug

logger = logging.getLogger(__name__)

DEFAULT_PROMPTS = 8  # captions of the first clips, where neither the command nor the run names prompts
CLIPS_COMPARED = 64  # the first training clips, among which the nearest one is looked for


@dataclass
class SampleOptions:
    """What `scripts/sample.py` can be told; what is not told is the run's or the export's."""

    run: str | None = field(default=None, metadata={"help": "the run's folder", "path": True})
    export: str | None = field(
        default=None, metadata={"help": "instead of run: a folder in diffusers' layout", "path": True}
    )
    prompt: str | None = field(default=None, metadata={"help": "default: the captions of the training clips"})
    image: str | None = field(default=None, metadata={"help": "the first frame, a file", "path": True})
    last_image: str | None = field(default=None, metadata={"help": "the last frame, a file", "path": True})
    checkpoint: str = field(default="latest", metadata={"help": "latest, or a folder's name: step_00000100"})
    weights: Kind | None = field(default=None, metadata={"help": KINDS})
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = field(default=None, metadata={"help": "of every expert; 1 is none"})
    shift: float | None = None
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    fps: float | None = None


@dataclass(frozen=True)
class Settings:
    """How the videos are made: what was typed, else what the run or the export says."""

    seed: int
    steps: int
    guidance: dict[str, float]  # by expert
    shift: float
    num_frames: int
    height: int
    width: int
    fps: float


def main(options: SampleOptions) -> int:
    """Write the videos and tell where they are, of what, and how near they come to the training clips."""
    if (options.run is None) == (options.export is None):
        raise ConfigError(
            "run: type run=... (a folder that training wrote) or export=... (diffusers' layout)"
        )
    config, checkpoint = (
        (None, None) if options.run is None else opened(Path(options.run), options.checkpoint)
    )
    if config is None and options.checkpoint != "latest":
        raise ConfigError(f"checkpoint={options.checkpoint}: an export holds one; leave it out")
    if config is None and options.weights is not None:
        raise ConfigError(f"weights={options.weights.name}: an export holds one kind; leave it out")
    subject = (
        of_export(Path(options.export))
        if config is None
        else of_run(Path(options.run), config, checkpoint, options.weights)
    )
    settings = resolve(options, subject)
    size = {"num_frames": settings.num_frames, "height": settings.height, "width": settings.width}
    refuse_size(subject.components["vae"], **size)
    clips = [] if config is None else _training_clips(config, options)
    made_from = shots_of(options, subject, settings, config, clips)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    vae, text_encoder, image_encoder = subject.load_encoders(device)
    embeds = text_encoder(["", *(shot.prompt for shot in made_from)])
    del text_encoder  # the largest part of all; its place is needed
    pipeline = build_pipeline(
        subject.load_experts(device),
        boundary=subject.boundary,
        shift=settings.shift,
        vae=vae,
        images=len(shots.images_of(made_from)),
        expand_timesteps=subject.expand_timesteps,
        image_encoder=image_encoder,
    )
    # The weights stay as they are; what is computed in bf16 is what training computed in bf16.
    with torch.autocast(device.type, torch.bfloat16, enabled=subject.is_autocast):
        made = _generate(pipeline, settings, embeds, made_from)
    videos = [decode_latents(vae, one.latents)[0].cpu() for one in made]

    found = compare(
        [shot.prompt for shot in made_from],
        torch.cat([one.latents for one in made]),
        videos,
        clips,
        read=partial(_read, settings),
        encode_video=partial(encode_video, vae),
    )
    samples = _samples(subject, settings, made_from, made, found)
    target = subject.samples / folder_name(subject, options)
    write_samples(target, samples, videos, found.real, settings.fps)
    tables = [table([("part", "from"), *subject.components.items()])]
    if config is not None:
        tables.append(experts_told(Path(options.run), subject.weights))
    tables += [samples_table(samples), str(target)]
    sys.stdout.write("\n\n".join(tables) + "\n")
    return 0


# How, and from what


def resolve(options: SampleOptions, subject: Subject) -> Settings:
    """What was typed, else what is known of the subject; `ConfigError` names what nobody said."""
    values = dict(subject.defaults)
    values |= {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    missing = [name for name in SETTINGS if name not in values]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: not set, and {options.export} has no {exported.NOTE} that says so;"
            f" type {' '.join(f'{name}=...' for name in missing)}"
        )
    if values["steps"] < 1:
        raise ConfigError(f"steps={values['steps']}: must be at least 1")
    values["guidance"] = guidance_of(values["guidance"], subject.experts)
    return Settings(**values)


def shots_of(
    options: SampleOptions,
    subject: Subject,
    settings: Settings,
    config: Config | None,
    clips: Sequence[Clip],
) -> list[Shot]:
    """What the videos are made from: what was typed, else the run's prompts, else its first clips."""
    typed = {name: [getattr(options, name)] for name in ("image", "last_image") if getattr(options, name)}
    size = {"height": settings.height, "width": settings.width}
    if options.prompt is not None:
        refuse_images(subject, list(typed))
        images, last_images = typed.get("image", []), typed.get("last_image", [])
        return shots.of_files([options.prompt], images, last_images, **size)
    if typed:
        raise ConfigError(f"{', '.join(typed)}: needs a prompt as well; type prompt=...")
    if config is None:
        raise ConfigError("prompt: not set, and an export has no training clips; type prompt=...")
    conditioning, read = parts.conditioning_of(config), partial(_read, settings)
    return shots.of_settings(config.sampling, clips[:DEFAULT_PROMPTS], conditioning, read=read, **size)


def refuse_images(subject: Subject, typed: Sequence[str]) -> None:
    """`ConfigError` unless the images typed for a prompt are those that the model begins and ends with."""
    needed = ["image", "last_image"][: subject.images]
    for name in typed:
        if name not in needed:
            takes = " and ".join(needed) or "the prompt alone"
            raise ConfigError(f"{name}: {subject.name} is made from {takes}; leave {name}=... out")
    missing = [name for name in needed if name not in typed]
    if missing and not (subject.images_optional and not typed):
        typing = " ".join(f"{name}=<file>" for name in missing)
        raise ConfigError(f"{', '.join(missing)}: not set, and {subject.name} needs it; type {typing}")


def _training_clips(config: Config, options: SampleOptions) -> list[Clip]:
    """The clips to compare with; none if they are gone and prompts were given, which need none."""
    try:
        return parts.read_clips(config)[:CLIPS_COMPARED]
    except DataError as error:
        if options.prompt is None and config.sampling.prompts is None:
            raise
        logger.warning("nothing to compare with: %s", error)
        return []


def _read(settings: Settings, clip: Clip) -> Tensor:
    return decode(
        clip.path,
        start_seconds=clip.start_seconds,
        num_frames=settings.num_frames,
        fps=settings.fps,
        height=settings.height,
        width=settings.width,
    )


# The videos


def _generate(
    pipeline: Pipeline, settings: Settings, embeds: Tensor, made_from: Sequence[Shot]
) -> list[Generated]:
    """One clip per shot, each in a call of its own: the same whatever the others are.

    `embeds` `[1 + shots, 512, width]` begins with the empty prompt.
    """
    return [
        generate(
            pipeline,
            embeds[number : number + 1],
            embeds[:1],
            num_frames=settings.num_frames,
            height=settings.height,
            width=settings.width,
            steps=settings.steps,
            guidance=settings.guidance,
            seeds=[settings.seed],
            first=number - 1,
            **shots.images_of([shot]),
        )
        for number, shot in enumerate(made_from, start=1)
    ]


def _samples(
    subject: Subject,
    settings: Settings,
    made_from: Sequence[Shot],
    made: Sequence[Generated],
    found: Comparison,
) -> list[Sample]:
    return [
        Sample(
            prompt=shot.prompt,
            seed=settings.seed,
            steps=settings.steps,
            guidance=settings.guidance,
            shift=settings.shift,
            expert_calls=one.expert_calls,
            checkpoint=subject.weights.name,
            **shot.sources,
            **numbers,
        )
        for shot, one, numbers in zip(made_from, made, found.numbers, strict=True)
    ]


def folder_name(subject: Subject, options: SampleOptions) -> str:
    """The checkpoint's name and what was typed that differs from the run, so that no samples are lost."""
    name = f"{subject.weights.name}-{subject.kind}" if subject.kind else subject.weights.name
    for key in SETTINGS:
        typed = getattr(options, key)
        if typed is not None and typed != subject.defaults.get(key):
            name += f"-{key}{typed:g}" if isinstance(typed, float) else f"-{key}{typed}"
    words = [options.prompt, *(_image_slug(path) for path in (options.image, options.last_image))]
    return "-".join([name, *(slug(word) for word in words if word is not None)])


def _image_slug(path: str | None) -> str | None:
    """The file's name, and a hash of its place: many folders have a 0001.png."""
    if path is None:
        return None
    place = hashlib.blake2b(str(Path(path).resolve()).encode(), digest_size=3).hexdigest()
    return f"{slug(Path(path).stem)[:30]}-{place}"


if __name__ == "__main__":
    simple_command(SampleOptions, main)
