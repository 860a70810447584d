"""From settings to the parts of a run beside its networks: clips, encoders, routing, schedules."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers import AutoencoderKLWan

from wan_ds.config import Config, targets
from wan_ds.data import preflight
from wan_ds.data.clips import Clip, decode
from wan_ds.data.images import read_image
from wan_ds.data.latents import Encoded, EncodedClip
from wan_ds.data.loader import Loader
from wan_ds.data.readers import detect
from wan_ds.errors import CheckpointError, ConfigError, DataError
from wan_ds.interop import hub
from wan_ds.models.adapter import inject
from wan_ds.models.attention import refuse_missing_backend
from wan_ds.models.compilation import refuse_missing_compiler
from wan_ds.models.conditioning import Conditioning
from wan_ds.models.encoders import (
    ImageEncoder,
    TextEncoder,
    encode_video,
    load_image_encoder,
    load_text_encoder,
    load_vae,
)
from wan_ds.models.weights import on_meta
from wan_ds.parallel.mesh import Mesh
from wan_ds.training import networks
from wan_ds.training.experts import Routing, plan_routing
from wan_ds.training.lr_schedule import Schedule
from wan_ds.training.precision import DTYPES
from wan_ds.training.sources import locate
from wan_ds.training.step import FlowMatching, Tokens

log = logging.getLogger(__name__)


def check_images(config: Config) -> None:
    """Raise DataError for the first image file of ``sampling`` that cannot be read, with its setting."""
    for name in ("images", "last_images"):
        for path in getattr(config.sampling, name) or ():
            try:
                read_image(path, height=config.data.height, width=config.data.width)
            except DataError as error:
                raise DataError(f"sampling.{name}: {error}") from error


def read_clips(config: Config, path: str | None = None) -> list[Clip]:
    """The clips of ``data.path``, or of another folder of the same format; raises DataError."""
    path = config.data.path if path is None else path
    reader = detect(path) if config.data.reader is None else targets.make("data.reader", config.data.reader)
    clips = reader(path)
    is_training = path == config.data.path
    return clips[: config.data.limit] if is_training else clips


def checked_clips(config: Config, path: str | None = None) -> list[Clip]:
    """The same after the preflight, which names every clip that cannot be used before a weight is read."""
    data = config.data
    clips = read_clips(config, path)
    preflight.check(clips, num_frames=data.num_frames, fps=data.fps, path=path or data.path)
    log.info(
        preflight.report(
            clips, num_frames=data.num_frames, fps=data.fps, height=data.height, width=data.width
        )
    )
    return clips


def routing_of(config: Config) -> Routing:
    """Which expert works when."""
    return plan_routing(
        targets.make("timesteps", config.timesteps),
        boundary=config.model.boundary,
        experts=config.train.experts,
        policy=config.train.routing.policy.name,
        seed=config.seed,
        high_noise_share=config.train.routing.high_noise_share,
        run_length=config.train.routing.run_length,
    )


def conditioning_of(config: Config) -> Conditioning:
    """What the network is given beside the noised latents and the text."""
    return targets.make("model.conditioning", config.model.conditioning)


def objective_of(config: Config, routing: Routing, tokens: Tokens) -> FlowMatching:
    """What the experts learn."""
    return FlowMatching(
        routing.timesteps,
        targets.bind("weighting", config.weighting),
        conditioning_of(config),
        seed=config.seed,
        global_batch_size=config.train.global_batch_size,
        tokens=tokens,
    )


def with_local_weights(config: Config) -> tuple[Config, str | None]:
    """The settings with ``model.path`` a folder of this machine, and the commit if the hub has the model.

    What the components name below a hub id is downloaded, once per node; for everything else nothing but the
    disk is asked. Raises CheckpointError.
    """
    model = config.model
    components = (model.vae, model.text_encoder, model.tokenizer, model.image_encoder, model.image_processor)
    experts = [model.experts[name] for name in networks.loaded_experts(config)]
    named = [part.weights for part in (*components, *experts) if part.weights is not None]
    # A bare name is the model's own part, whatever the current folder happens to hold.
    below = [weights for weights in named if "/" not in weights or not Path(weights).exists()]
    folder, commit = hub.resolve(model.path, revision=model.revision, needed=below)
    if commit is None and model.revision is not None:
        raise ConfigError(
            f"model.revision={model.revision}: {model.path} is a folder here, and only the hub has "
            "revisions; type model.revision=null"
        )
    if commit is not None:
        log.info("%s: commit %s in %s", model.path, commit, folder)
    path = None if folder is None else str(folder)
    return replace(config, model=replace(model, path=path)), commit


def locate_weights(config: Config, *, is_new: bool) -> None:
    """Raise CheckpointError for the first component that is missing or does not fit; reads headers alone.

    ``is_new``: no checkpoint to go on from, so that `adapter.init_from` is looked at as well. Raises
    ConfigError where an adapter does not fit the model, or this machine lacks the kernel of `model.attention`
    or the compiler of `train.compile`.
    """
    model = config.model
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    refuse_missing_backend(model.attention.name, here)
    if config.train.compile.name == "blocks":
        refuse_missing_compiler(here)
    for name in networks.loaded_experts(config):
        log.info("%s: starts from %s", name, networks.source_of(config, name).where)
    for component in ("vae", "text_encoder", "tokenizer", "image_encoder", "image_processor"):
        weights = getattr(model, component).weights
        if weights is not None:
            locate(model.path, weights, component)
    settings = networks.adapter_settings(config)
    if settings is not None:
        inject(on_meta(model.transformer), settings)
        for name in config.adapter.init_from if is_new else ():
            networks.adapter_start(config, name)


class Encoders(NamedTuple):
    """The frozen parts: pixels to latents, captions to embeddings, frames to CLIP's tokens."""

    vae: AutoencoderKLWan
    text: TextEncoder
    image: ImageEncoder | None


def load_encoders(config: Config, where: torch.device) -> Encoders:
    """All encoders on a device; raises CheckpointError where one belongs to another model."""
    model, transformer = config.model, config.model.transformer
    half = torch.float32 if where.type == "cpu" else torch.bfloat16
    vae = load_vae(
        locate(model.path, model.vae.weights, "vae"),
        where,
        DTYPES[model.vae.dtype.name],
        tiling=model.vae.tiling,
    )
    text = load_text_encoder(
        locate(model.path, model.tokenizer.weights, "tokenizer"),
        locate(model.path, model.text_encoder.weights, "text_encoder"),
        where,
        half,
    )
    image = None
    if model.image_encoder.weights is not None:
        processor = model.image_processor.weights
        image = load_image_encoder(
            None if processor is None else locate(model.path, processor, "image_processor"),
            locate(model.path, model.image_encoder.weights, "image_encoder"),
            where,
            half,
            resize=model.image_encoder.resize.name,
        )
        _refuse_width("image_encoder", image.width, "image_dim", transformer["image_dim"])
    _refuse_width("vae", vae.config.z_dim, "out_channels", transformer["out_channels"])
    _refuse_width("text_encoder", text.width, "text_dim", transformer["text_dim"])
    return Encoders(vae, text, image)


def _refuse_width(component: str, width: int, key: str, wanted: int) -> None:
    if width != wanted:
        raise CheckpointError(
            f"model.{component}.weights: what it gives is {width} wide, and model.transformer.{key} is "
            f"{wanted}; name the {component} that belongs to this model"
        )


def encoded_of(config: Config, clips: list[Clip], encoders: Encoders, *, keep: bool) -> Encoded:
    """The clips as latents, conditions and prompt embeddings on the encoders' device."""
    data, conditioning = config.data, conditioning_of(config)
    shape = {"num_frames": data.num_frames, "fps": data.fps, "height": data.height, "width": data.width}
    to_latents = partial(encode_video, encoders.vae)

    def encode_clip(pixels: torch.Tensor) -> EncodedClip:
        condition = conditioning.condition(pixels, to_latents, encoders.image)
        return EncodedClip(to_latents(pixels[None])[0], condition)

    return Encoded(
        clips,
        read=lambda clip: decode(clip.path, start_seconds=clip.start_seconds, **shape),
        encode_clip=encode_clip,
        encode_text=encoders.text,
        keep=keep,
    )


def loader_of(config: Config, clips: list[Clip], mesh: Mesh) -> Loader:
    data = config.data
    return Loader(
        clips,
        num_frames=data.num_frames,
        fps=data.fps,
        height=data.height,
        width=data.width,
        seed=config.seed,
        global_batch_size=config.train.global_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        workers=data.workers,
        keep_latents=data.keep_latents,
    )


def schedules_of(config: Config, routing: Routing) -> dict[str, Schedule]:
    """A schedule for exactly the steps that each expert will take."""
    counts = routing.counts(config.train.steps)
    return {
        name: targets.make("lr_schedule", config.lr_schedule, steps=counts[name]) for name in routing.shares
    }
