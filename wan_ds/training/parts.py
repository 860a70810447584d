"""From settings to the parts of a run: clips, encoders, experts. The only place that knows both."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKLWan

from wan_ds.config import Config, Dtype, targets
from wan_ds.data import preflight
from wan_ds.data.clips import Clip, decode
from wan_ds.data.images import read_image
from wan_ds.data.latents import Encoded, EncodedClip
from wan_ds.data.loader import Loader
from wan_ds.data.readers import detect
from wan_ds.errors import CheckpointError, ConfigError, DataError
from wan_ds.flow.timesteps import Interval
from wan_ds.interop import hub
from wan_ds.models.conditioning import Conditioning
from wan_ds.models.encoders import (
    ImageEncoder,
    TextEncoder,
    encode_video,
    load_image_encoder,
    load_text_encoder,
    load_vae,
)
from wan_ds.models.weights import (
    Drawn,
    Source,
    build_transformer,
    count_parameters,
    on_meta,
    refuse_misfit,
)
from wan_ds.parallel.mesh import Mesh
from wan_ds.training.engine import Engine, partition_of
from wan_ds.training.experts import Routing, plan_routing
from wan_ds.training.guard import FirstSteps
from wan_ds.training.loop import Expert
from wan_ds.training.lr_schedule import Schedule
from wan_ds.training.optimizer import build_optimizer
from wan_ds.training.sources import ByOneRank, agreed, locate, transformer_source
from wan_ds.training.step import FlowMatching

log = logging.getLogger(__name__)

_TORCH = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16}


def target_of(key: str, settings: dict[str, Any]) -> Callable[..., Any]:
    """The target of an open group with its settings bound, to be called with what training supplies."""
    arguments = {name: value for name, value in settings.items() if name not in targets.DIRECTIVES}
    return partial(targets.find(key, settings["_target_"]), **arguments)


def make(key: str, settings: dict[str, Any], **supplied: Any) -> Any:
    """What the target of an open group makes of its settings."""
    return target_of(key, settings)(**supplied)


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
    reader = detect(path) if config.data.reader is None else make("data.reader", config.data.reader)
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
        make("timesteps", config.timesteps),
        boundary=config.model.boundary,
        experts=config.train.experts,
        policy=config.train.routing.policy.name,
        seed=config.seed,
        high_noise_share=config.train.routing.high_noise_share,
        run_length=config.train.routing.run_length,
    )


def conditioning_of(config: Config) -> Conditioning:
    """What the network is given beside the noised latents and the text."""
    return make("model.conditioning", config.model.conditioning)


def objective_of(config: Config, routing: Routing) -> FlowMatching:
    """What the experts learn."""
    return FlowMatching(
        routing.timesteps,
        target_of("weighting", config.weighting),
        conditioning_of(config),
        seed=config.seed,
        global_batch_size=config.train.global_batch_size,
    )


def with_local_weights(config: Config) -> tuple[Config, str | None]:
    """The settings with ``model.path`` a folder of this machine, and the commit if the hub has the model.

    What the components name below a hub id is downloaded, once per node; for everything else nothing but the
    disk is asked. Raises CheckpointError.
    """
    model = config.model
    components = (model.vae, model.text_encoder, model.tokenizer, model.image_encoder, model.image_processor)
    experts = [model.experts[name] for name in config.train.experts or model.experts]
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


def locate_weights(config: Config) -> None:
    """Raise CheckpointError for the first component that is missing or does not fit; reads headers alone."""
    model = config.model
    for name in config.train.experts or model.experts:
        log.info("%s: starts from %s", name, source_of(config, name).where)
    for component in ("vae", "text_encoder", "tokenizer", "image_encoder", "image_processor"):
        weights = getattr(model, component).weights
        if weights is not None:
            locate(model.path, weights, component)


def source_of(config: Config, expert: str) -> Source:
    """What an expert starts from, its names and shapes those of the model; raises CheckpointError."""
    model = on_meta(config.model.transformer)
    source = transformer_source(config.model.path, config.model.experts[expert].weights, expert)
    if source is None:
        return Drawn(model, config.seed, expert)
    refuse_misfit(model, source)
    return source


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
        _TORCH[model.vae.dtype],
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
    return {name: make("lr_schedule", config.lr_schedule, steps=counts[name]) for name in routing.shares}


def build_expert(config: Config, name: str, interval: Interval, schedule: Schedule, mesh: Mesh) -> Expert:
    """One expert, its weights read or drawn, sharded over the mesh."""
    zero_optimization = dict(config.parallelism.zero_optimization)
    model = build_transformer(
        config.model.transformer,
        ByOneRank(agreed(lambda: source_of(config, name))),
        trainable_dtype=_TORCH[config.precision.trainable_dtype],
        partition=partition_of(zero_optimization),
    )
    if config.parallelism.recompute.name == "full":
        model.enable_gradient_checkpointing()
    parameters = count_parameters(model)
    engine = Engine(
        model.train(),
        build_optimizer(model, target_of("optimizer", config.optimizer)),
        mesh,
        zero_optimization=zero_optimization,
        micro_batch_size=config.train.micro_batch_size,
        max_grad_norm=config.train.max_grad_norm,
        compute_dtype=config.precision.compute_dtype.name,
    )
    log.info("%s: %.2f M parameters, %d steps planned", name, parameters / 1e6, schedule.steps)
    return Expert(
        name=name,
        interval=interval,
        engine=engine,
        schedule=schedule,
        base_lr=config.optimizer["lr"] * config.train.lr_scale.get(name, 1.0),
        guard=FirstSteps(name, engine),
    )
