"""From settings to the parts of a run: clips, encoders, experts. The only place that knows both."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from wan_ds.flow.timesteps import Interval
from wan_ds.interop import hub, lora
from wan_ds.interop.lora import Lora
from wan_ds.models.adapter import AdapterSettings, inject
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
from wan_ds.training.adapters import Adapter
from wan_ds.training.agreement import agreed, of_rank_0
from wan_ds.training.ema import Ema
from wan_ds.training.engine import Engine, FrozenEngine, partition_of
from wan_ds.training.experts import Routing, plan_routing
from wan_ds.training.guard import FirstSteps
from wan_ds.training.loop import Expert
from wan_ds.training.lr_schedule import Schedule
from wan_ds.training.optimizer import build_optimizer
from wan_ds.training.precision import DTYPES, Precision, named
from wan_ds.training.shards import shape_of, trainable
from wan_ds.training.sources import ByOneRank, Fingerprint, locate, transformer_source
from wan_ds.training.step import FlowMatching

log = logging.getLogger(__name__)


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
    experts = [model.experts[name] for name in loaded_experts(config)]
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


def loaded_experts(config: Config) -> list[str]:
    """The experts that are built: those that train, and the frozen ones beside them."""
    return [*(config.train.experts or config.model.experts), *config.train.frozen_experts]


def locate_weights(config: Config, *, is_new: bool) -> None:
    """Raise CheckpointError for the first component that is missing or does not fit; reads headers alone.

    ``is_new``: no checkpoint to go on from, so that `adapter.init_from` is looked at as well. Raises
    ConfigError where an adapter does not fit the model.
    """
    model = config.model
    for name in loaded_experts(config):
        log.info("%s: starts from %s", name, source_of(config, name).where)
    for component in ("vae", "text_encoder", "tokenizer", "image_encoder", "image_processor"):
        weights = getattr(model, component).weights
        if weights is not None:
            locate(model.path, weights, component)
    settings = adapter_settings(config)
    if settings is not None:
        inject(on_meta(model.transformer), settings)
        for name in config.adapter.init_from if is_new else ():
            adapter_start(config, name)


def source_of(config: Config, expert: str) -> Source:
    """What an expert starts from, its names and shapes those of the model; raises CheckpointError."""
    model = on_meta(config.model.transformer)
    source = transformer_source(config.model.path, config.model.experts[expert].weights, expert)
    if source is None:
        return Drawn(model, config.seed, expert)
    refuse_misfit(model, source)
    return source


def adapter_settings(config: Config) -> AdapterSettings | None:
    """Shape and places of the adapters that train; None where all weights do."""
    adapter = config.adapter
    if adapter.rank is None:
        return None
    return AdapterSettings(
        rank=adapter.rank,
        alpha=float(adapter.rank if adapter.alpha is None else adapter.alpha),
        targets=list(adapter.targets),
        rslora=adapter.rslora,
        dropout=adapter.dropout,
        rank_pattern=dict(adapter.rank_pattern),
        alpha_pattern=dict(adapter.alpha_pattern),
    )


def adapter_of(config: Config, name: str, base: str | None) -> Adapter | None:
    """An expert's adapter as its file describes it; ``base``: what a person calls the model."""
    settings, model = adapter_settings(config), config.model
    if settings is None:
        return None
    said = {
        "expert": name,
        "boundary": model.boundary,
        "shift": model.shift,
        "base": base,
        "rank": settings.rank,
        "alpha": settings.alpha,
        "model": model.name,
    }
    return Adapter(settings, {key: str(value) for key, value in said.items() if value is not None})


def adapter_start(config: Config, name: str) -> Lora | None:
    """The adapter that an expert goes on from; None where it starts from the seed.

    Raises CheckpointError if the file is another expert's or another architecture's.
    """
    path = config.adapter.init_from.get(name)
    if path is None:
        return None
    given = lora.read(path)
    lora.refuse_swapped(given, name)
    lora.refuse_unfit(given, linear_shapes(config))
    return given


def linear_shapes(config: Config) -> lora.Shapes:
    """The sizes of the model's linear layers."""
    return lora.linear_shapes(dict(on_meta(config.model.transformer).named_parameters()))


def precision_of(config: Config) -> Precision:
    """What every parameter is stored in, and what is computed in."""
    chosen = config.precision
    names = (chosen.trainable_dtype, chosen.frozen_dtype, chosen.compute_dtype, chosen.frozen_storage)
    return named(*(None if one is None else one.name for one in names))


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
    return {name: make("lr_schedule", config.lr_schedule, steps=counts[name]) for name in routing.shares}


def build_expert(  # noqa: PLR0913
    config: Config,
    name: str,
    interval: Interval,
    schedule: Schedule,
    mesh: Mesh,
    *,
    is_new: bool = True,
    base: str | None = None,
) -> Expert:
    """One expert that trains, its weights read or drawn, sharded over the mesh.

    ``is_new``: no checkpoint follows, so an adapter starts from `adapter.init_from`; ``base``: what a person
    calls the model, for the adapter's file.
    """
    precision, settings = precision_of(config), adapter_settings(config)
    zero_optimization = dict(config.parallelism.zero_optimization)
    source = agreed(lambda: source_of(config, name))
    witness = Fingerprint(source)
    model = build_transformer(
        config.model.transformer,
        ByOneRank(source if settings is None else witness),
        seed=config.seed,
        expert=name,
        dtype_of=precision.dtype_of,
        adapter=settings,
        init_from=agreed(lambda: adapter_start(config, name)) if is_new else None,
        frozen_storage=precision.frozen_storage,
        partition=partition_of(zero_optimization),
    )
    if config.parallelism.recompute.name == "full":
        model.enable_gradient_checkpointing()
    if settings is not None:
        model.patch_embedding.register_forward_hook(_with_gradient)
    parameters = count_parameters(model)
    engine = Engine(
        model.train(),
        build_optimizer(model, target_of("optimizer", config.optimizer)),
        mesh,
        zero_optimization=zero_optimization,
        micro_batch_size=config.train.micro_batch_size,
        max_grad_norm=config.train.max_grad_norm,
        precision=precision,
    )
    trained = sum(torch.Size(shape_of(p)).numel() for _, p in trainable(engine))
    log.info(
        "%s: %.2f M parameters, %.2f M of them train, %d steps planned",
        name,
        parameters / 1e6,
        trained / 1e6,
        schedule.steps,
    )
    return Expert(
        name=name,
        interval=interval,
        engine=engine,
        schedule=schedule,
        base_lr=config.optimizer["lr"] * config.train.lr_scale.get(name, 1.0),
        guard=FirstSteps(name, engine),
        adapter=adapter_of(config, name, base),
        base=None if settings is None else of_rank_0(witness.value),
        ema=None if config.ema.decay is None else Ema(engine, config.ema.decay),
    )


def _with_gradient(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:  # noqa: ARG001
    """Let gradients reach the first block's input.

    Where no input has one, ZeRO-3 takes a block's backward for done when it begins, and lets its weights go.
    """
    if torch.is_grad_enabled():
        output.requires_grad_()


def build_frozen(config: Config, name: str, mesh: Mesh) -> FrozenEngine:
    """One expert that does not train, sharded over the mesh, for evaluation and sampling."""
    precision = precision_of(config)
    zero_optimization = dict(config.parallelism.zero_optimization)
    model = build_transformer(
        config.model.transformer,
        ByOneRank(agreed(lambda: source_of(config, name))),
        dtype_of=precision.dtype_of,
        is_trainable=lambda _: False,
        frozen_storage=precision.frozen_storage,
        partition=partition_of(zero_optimization),
    )
    log.info("%s: %.2f M parameters, frozen", name, count_parameters(model) / 1e6)
    return FrozenEngine(model, mesh, zero_optimization=zero_optimization, precision=precision)
