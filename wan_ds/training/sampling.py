"""Videos from the experts through diffusers' own pipelines, with the numbers that belong to them.

Letters: B clips, C latent channels, F H W frames, height and width of the pixels, f h w those of the latents.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
from PIL import Image
from torch import Tensor, nn

from wan_ds import streams
from wan_ds.errors import ConfigError
from wan_ds.models.encoders import ImageEncoder
from wan_ds.training.videos import contact_sheet, slug, to_uint8, write_video

# diffusers' names for our experts; the first of them also is the place of a model's only expert.
PLACES = {"high_noise": "transformer", "all": "transformer", "low_noise": "transformer_2"}

Pipeline = WanPipeline | WanImageToVideoPipeline
Picture = Tensor | Image.Image  # [3, H, W] in [-1, 1], or PIL's


class Generated(NamedTuple):
    """What one call of the pipeline gave."""

    latents: Tensor  # [B, C, f, h, w] float32, normalised
    expert_calls: dict[str, int]  # forward passes; two a step with guidance


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
    image: str | None = None  # the file, or the training clip, that the first frame is of
    last_image: str | None = None
    file: str = ""
    clip: str | None = None  # the training clip with this caption
    psnr: float | None = None  # dB, against that clip
    own_mse_over_variance: float | None = None  # of the latents, against that clip
    nearest: str | None = None  # the training clip whose latents are nearest
    mse_over_variance: float | None = None  # of the latents, against the nearest


def build_pipeline(  # noqa: PLR0913
    transformers: Mapping[str, nn.Module],
    *,
    boundary: float | None,
    shift: float,
    vae: AutoencoderKLWan,
    images: int = 0,
    expand_timesteps: bool = False,
    image_encoder: ImageEncoder | None = None,
) -> Pipeline:
    """diffusers' pipeline over the experts' own modules; prompts come as embeddings.

    `boundary` is the sigma from where the high-noise expert works, None for a model of one expert; diffusers
    compares it with timesteps cut to integers. `images` is how many pictures begin and end each clip: 0, 1
    (the first frame) or 2; `expand_timesteps` is that of Wan 2.2 TI2V, whose tokens each have a timestep.
    Raises `ConfigError` unless every expert is there, and CLIP where the experts attend to it.
    """
    needed = ("all",) if boundary is None else ("high_noise", "low_noise")
    if sorted(transformers) != sorted(needed):
        raise ConfigError(
            f"model.boundary={boundary}: sampling needs the experts {', '.join(needed)}, not"
            f" {', '.join(transformers) or 'none'}; load them, or do not sample: sampling.every_steps=null"
        )
    parts = {"vae": vae, "tokenizer": None, "text_encoder": None, "scheduler": build_scheduler(shift)}
    parts |= {PLACES[name]: module for name, module in transformers.items()}
    settings = {"boundary_ratio": boundary, "expand_timesteps": expand_timesteps}
    if not images:
        return WanPipeline(**parts, **settings)
    if parts["transformer"].config.image_dim is not None:
        if image_encoder is None:
            raise ConfigError(
                "model.image_encoder.weights=null: this transformer attends to CLIP's features of the image;"
                " name its folder, such as model.image_encoder.weights=image_encoder"
            )
        parts |= {"image_encoder": image_encoder.encoder, "image_processor": image_encoder.processor}
    return WanImageToVideoPipeline(**parts, **settings)


def build_scheduler(shift: float) -> UniPCMultistepScheduler:
    """Wan's own sampler."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
    )


def generate(  # noqa: PLR0913
    pipeline: Pipeline,
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
    images: Sequence[Picture] = (),
    last_images: Sequence[Picture] = (),
) -> Generated:
    """Clips from pure noise, one per row of `prompt_embeds` `[B, 512, D]`.

    Clip i starts from the noise of (seeds[i], first + i), so that it is the same however prompts are grouped
    into calls. `guidance`, away from `negative_prompt_embeds` `[1, 512, D]`, is by expert; 1 is none. A
    pipeline with images is given each clip's first frame in `images` and, if need be, its last one in
    `last_images`, of H x W. Experts that were in train mode come back in train mode. Autocast, where it is
    on, holds for the experts; all else computes as it does when training.
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

    def latents(rows: slice, **pictures: Image.Image) -> Tensor:
        embeds = prompt_embeds[rows]
        return pipeline(
            prompt_embeds=embeds,
            negative_prompt_embeds=negative_prompt_embeds.expand(len(embeds), -1, -1),
            latents=noise[rows],
            num_frames=num_frames,
            height=height,
            width=width,
            num_inference_steps=steps,
            guidance_scale=scales[next(iter(experts))],
            guidance_scale_2=scales.get("low_noise"),
            output_type="latent",
            **pictures,
        ).frames

    pictures = _pictures(pipeline, len(seeds), images, last_images, (height, width))
    with _sampled(experts, pipeline.device.type) as calls:
        if pictures is None:
            made = latents(slice(None))
        else:  # one at a time: diffusers gives every prompt of a call the same picture
            made = torch.cat([latents(slice(i, i + 1), **own) for i, own in enumerate(pictures)])
    return Generated(made.float(), calls)


def refuse_size(vae: str | Path, *, num_frames: int, height: int, width: int) -> None:
    """`ConfigError` for a video that the VAE in this folder and the transformer's patches would cut."""
    says = AutoencoderKLWan.load_config(vae, local_files_only=True)
    time = says.get("scale_factor_temporal", 4)
    side = 2 * says.get("scale_factor_spatial", 8)  # every Wan joins 2 x 2 latents into a token
    for name, value, step, offset, rule in (
        ("num_frames", num_frames, time, 1, f"{time}n + 1"),
        ("height", height, side, 0, f"a multiple of {side}"),
        ("width", width, side, 0, f"a multiple of {side}"),
    ):
        below = (value - offset) // step * step + offset
        if value != below or value < 1:
            near = " or ".join(str(size) for size in (below, below + step) if size > 0)
            raise ConfigError(f"{name}={value}: must be {rule}; choose {near}")


def _experts(pipeline: Pipeline) -> dict[str, nn.Module]:
    if pipeline.config.boundary_ratio is None:
        return {"all": pipeline.transformer}
    return {"high_noise": pipeline.transformer, "low_noise": pipeline.transformer_2}


def _pictures(
    pipeline: Pipeline,
    clips: int,
    images: Sequence[Picture],
    last_images: Sequence[Picture],
    size: tuple[int, int],
) -> list[dict[str, Image.Image]] | None:
    """For each clip what the image pipeline calls its pictures; None if the pipeline takes none."""
    takes = isinstance(pipeline, WanImageToVideoPipeline)
    if len(images) != takes * clips or len(last_images) not in (0, takes * clips):
        raise ValueError(
            f"{clips} clips of {type(pipeline).__name__} need {takes * clips} images and as many or no last"
            f" ones, not {len(images)} and {len(last_images)}"
        )
    if not takes:
        return None
    rows = [{"image": to_picture(picture, size)} for picture in images]
    for row, picture in zip(rows, last_images, strict=False):
        row["last_image"] = to_picture(picture, size)
    return rows


def to_picture(picture: Picture, size: tuple[int, int]) -> Image.Image:
    """The picture in the 8 bits that training's frames have, for VAE and CLIP alike.

    `ValueError` unless its height and width are `size`.
    """
    if isinstance(picture, Tensor):
        picture = Image.fromarray(to_uint8(picture[:, None])[0])
    if (picture.height, picture.width) != tuple(size):
        raise ValueError(f"an image of {picture.height}x{picture.width} for a video of {size[0]}x{size[1]}")
    return picture.convert("RGB")


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
def _sampled(experts: Mapping[str, nn.Module], device_type: str) -> Iterator[dict[str, int]]:
    """The experts in eval mode, and how often each was called; autocast, if it is on, holds in them alone.

    The sampler's own sums would be cut to bf16 by it, and so would the encoders of images.
    """
    calls = dict.fromkeys(experts, 0)
    dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)

    def wrapped(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            with torch.autocast(device_type, dtype, enabled=enabled):
                return forward(*args, **kwargs)

        return call

    training = {module: module.training for expert in experts.values() for module in expert.modules()}
    former = {expert: vars(expert).get("forward") for expert in experts.values()}
    for name, expert in experts.items():
        expert.eval().forward = wrapped(name, expert.forward)
    try:
        with torch.autocast(device_type, enabled=False):
            yield calls
    finally:
        for expert, forward in former.items():
            if forward is None:
                del expert.forward  # the class's again
            else:
                expert.forward = forward
        for module, mode in training.items():
            module.training = mode


def _is_watched() -> bool:
    return os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()


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
