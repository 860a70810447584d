"""What a configuration must fulfil before a weight is read.

Every refusal is a `ConfigError` with the key, the value, the rule and what would work.
"""

import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from wan_ds.config import targets
from wan_ds.config.foreign_keys import (
    OFFLOAD_KEYS,
    REFUSED_ZERO_KEYS,
    TRANSFORMER_COUNTS,
    TRANSFORMER_KEYS,
    ZERO_KEYS,
    ZERO_SWITCHES,
)
from wan_ds.config.nearest import suggest
from wan_ds.config.schema import Config, Dtype
from wan_ds.errors import ConfigError

EXPERTS = ("high_noise", "low_noise")
TEMPORAL_STRIDE = 4  # both Wan VAEs: 4n + 1 frames become n + 1 latent frames
SPATIAL_STRIDE = 8  # pixels per latent of the Wan 2.1 VAE, which Wan 2.2's A14B models use as well
SPATIAL_STRIDE_48 = 16  # of the Wan 2.2 VAE, whose latents have 48 channels


def check(config: Config, world_size: int) -> None:
    """Refuse what cannot work on `world_size` ranks with a ConfigError; reads no weights and no data."""
    _check_model(config)
    _check_ranges(config)
    _check_data(config)
    _check_places(config)
    _check_ranks(config, world_size)
    _check_zero(config.parallelism.zero_optimization, world_size)
    _check_open_groups(config)


def _check_model(config: Config) -> None:
    model, names = config.model, list(config.model.experts)
    if set(names) not in ({"all"}, set(EXPERTS)):
        raise ConfigError(f"model.experts={_list(names)}: must be all alone, or high_noise and low_noise")
    if names == ["all"] and model.boundary is not None:
        raise ConfigError(
            f"model.boundary={model.boundary}: {model.name} has one expert, all; type model.boundary=null"
        )
    if names != ["all"] and (model.boundary is None or not 0 < model.boundary < 1):
        raise ConfigError(
            f"model.boundary={_text(model.boundary)}: must lie between 0 and 1, where two experts meet; "
            "Wan 2.2 has 0.875 (text to video) and 0.9 (image to video)"
        )
    _check_experts_of("model.guidance", model.guidance, names, complete=True)
    for key, guidance in (
        ("model.guidance", model.guidance),
        ("sampling.guidance", config.sampling.guidance),
    ):
        _check_guidance(key, guidance, names)
    _check_experts_of("train.lr_scale", config.train.lr_scale, names)
    for name, factor in config.train.lr_scale.items():
        rule = "greater than 0; an expert that is left out of train.experts stays as it is"
        _require(factor > 0, f"train.lr_scale.{name}", factor, rule)
    trained = config.train.experts
    if trained is not None:
        _check_experts_of("train.experts", trained, names)
        rule = f"each expert that trains, once, of {_list(names)}; null for all"
        _require(0 < len(trained) == len(set(trained)), "train.experts", _list(trained), rule)
    _check_alone(config, names)
    for component in ("vae", "text_encoder", "tokenizer"):
        rule = "a folder, or a subfolder of model.path: only experts may start from random numbers"
        _require(getattr(model, component).weights is not None, f"model.{component}.weights", "null", rule)
    _check_transformer(model.transformer)


def _check_alone(config: Config, names: list[str]) -> None:
    """What a run that does not train every expert cannot do while it trains."""
    absent = sorted(set(names) - set(config.train.experts or names))
    sampling = config.sampling
    if absent and (sampling.every_steps is not None or sampling.at_start):
        raise ConfigError(
            f"sampling.every_steps={_text(sampling.every_steps)}: a video needs every expert, and "
            f"{_list(absent)} is not in train.experts; type sampling.every_steps=null sampling.at_start=false"
        )


def _check_transformer(transformer: dict[str, Any]) -> None:
    for key in transformer:
        if key not in TRANSFORMER_KEYS:
            hint = suggest(
                f"model.transformer.{key}", [f"model.transformer.{other}" for other in TRANSFORMER_KEYS]
            )
            raise ConfigError(f"model.transformer.{key}: WanTransformer3DModel takes no such argument{hint}")
    for key in ("num_layers", "num_attention_heads", "attention_head_dim", "in_channels", "patch_size"):
        if key not in transformer:
            raise ConfigError(f"model.transformer.{key}: not set; type model.transformer.{key}=...")
    patch = transformer["patch_size"]
    whole = isinstance(patch, list) and all(_is_count(size) for size in patch)
    rule = "three whole numbers (frames, height, width), such as [1,2,2]"
    _require(whole and len(patch) == 3, "model.transformer.patch_size", patch, rule)
    for key, value in transformer.items():
        if key in TRANSFORMER_COUNTS:
            _require(_is_count(value), f"model.transformer.{key}", value, "a whole number from 1")


def _check_guidance(key: str, guidance: Any, names: list[str]) -> None:
    if isinstance(guidance, dict):
        _check_experts_of(key, guidance, names, complete=True)
    numbers = guidance.values() if isinstance(guidance, dict) else [guidance]
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        raise ConfigError(f"{key}={guidance}: must be a number, or one by expert such as {{{names[0]}: 4.0}}")
    if not all(number >= 1 for number in numbers):
        raise ConfigError(f"{key}={guidance}: must be at least 1, which is no guidance")


def _check_experts_of(key: str, given: Iterable[str], names: list[str], complete: bool = False) -> None:
    given = list(given)
    for name in given:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{key}: {name} is no expert of the model; {hint}there are {', '.join(names)}")
    for name in names if complete else ():
        if name not in given:
            raise ConfigError(f"{key}.{name}: not set; every expert of the model needs a number there")


def _check_ranges(config: Config) -> None:
    train = config.train
    positive = {
        "train.steps": train.steps,
        "train.global_batch_size": train.global_batch_size,
        "train.micro_batch_size": train.micro_batch_size,
        "parallelism.sp_size": config.parallelism.sp_size,
        "model.fps": config.model.fps,
        "model.shift": config.model.shift,
        "data.fps": config.data.fps,
        "sampling.steps": config.sampling.steps,
        "sampling.shift": config.sampling.shift,
        "evaluation.clips": config.evaluation.clips,
        "evaluation.sigmas_per_clip": config.evaluation.sigmas_per_clip,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "tracker.log_every_steps": config.tracker.log_every_steps,
    }
    for key, value in positive.items():
        _require(value > 0, key, value, "greater than 0")
    periods = {
        "data.limit": config.data.limit,
        "sampling.every_steps": config.sampling.every_steps,
        "evaluation.every_steps": config.evaluation.every_steps,
        "checkpoint.save_every_steps": config.checkpoint.save_every_steps,
    }
    for key, value in periods.items():
        _require(value is None or value > 0, key, value, "greater than 0, or null for none")
    dropout, norm, skipped = train.caption_dropout, train.max_grad_norm, train.max_skipped_in_a_row
    _require(0 <= dropout < 1, "train.caption_dropout", dropout, "at least 0 and less than 1")
    _require(0 <= norm < math.inf, "train.max_grad_norm", norm, "at least 0; 0 turns clipping off")
    _require(skipped >= 0, "train.max_skipped_in_a_row", skipped, "at least 0")
    _require(config.data.workers >= 0, "data.workers", config.data.workers, "at least 0")
    dtype = config.precision.trainable_dtype
    _require(
        dtype is Dtype.fp32,
        "precision.trainable_dtype",
        dtype.name,
        "fp32; bf16 parameters are not built yet",
    )


def _check_data(config: Config) -> None:
    data, transformer = config.data, config.model.transformer
    if not data.path and data.reader is None:
        raise ConfigError(
            "data.path: no clips named; type data.path=/folder/of/videos (recipe=quickstart needs none)"
        )
    if data.num_frames < 1 or (data.num_frames - 1) % TEMPORAL_STRIDE:
        rule = f"{TEMPORAL_STRIDE}n + 1, as the VAE joins {TEMPORAL_STRIDE} frames after the first"
        _refuse_size("data.num_frames", data.num_frames, TEMPORAL_STRIDE, 1, rule)
    patch = transformer["patch_size"]
    stride = SPATIAL_STRIDE_48 if transformer["in_channels"] == 48 else SPATIAL_STRIDE
    for name, size, patch_size in (("height", data.height, patch[1]), ("width", data.width, patch[2])):
        multiple = stride * patch_size
        if size < 1 or size % multiple:
            rule = f"a multiple of {multiple}, the VAE's {stride} pixels times the patch size {patch_size}"
            _refuse_size(f"data.{name}", size, multiple, 0, rule)


def _refuse_size(key: str, value: int, step: int, offset: int, rule: str) -> None:
    below = (value - offset) // step * step + offset
    near = [size for size in (below, below + step) if size > 0]
    raise ConfigError(f"{key}={value}: must be {rule}; choose {_or(near)}")


def _check_places(config: Config) -> None:
    is_step = re.fullmatch(r"step_\d{8}", config.resume)
    if config.resume not in ("auto", "never") and not is_step and not Path(config.resume).is_dir():
        raise ConfigError(
            f"resume={config.resume}: no such checkpoint folder; choose auto, never, or one that exists"
        )
    name = config.run_name
    if name is not None and (not name or name.startswith("/") or "\0" in name or ".." in name.split("/")):
        raise ConfigError(f"run_name={name}: must be a name inside runs/; type run_dir=... for another place")
    if not config.run_dir:
        raise ConfigError("run_dir: empty; type run_dir=/a/folder or leave it out")


def _check_ranks(config: Config, world_size: int) -> None:
    train, sp_size = config.train, config.parallelism.sp_size
    if sp_size > 1:
        raise ConfigError(f"parallelism.sp_size={sp_size}: sequence parallelism is not built yet; choose 1")
    dp_size = world_size
    if train.global_batch_size % dp_size:
        unit = dp_size * train.micro_batch_size  # what is named must pass the next check as well
        below = train.global_batch_size // unit * unit
        near = [size for size in (below, below + unit) if size > 0]
        micro = f" times train.micro_batch_size={train.micro_batch_size}"
        ways = f"choose {_or(near)}"
        if train.global_batch_size % train.micro_batch_size == 0:
            ranks = _divisors(train.global_batch_size // train.micro_batch_size)
            ways += f", or start {_or(ranks)} ranks"
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size}: must be a multiple of the "
            f"{_count(dp_size, 'rank')} that share it{micro if unit > dp_size else ''}; {ways}"
        )
    clips = train.global_batch_size // dp_size
    if clips % train.micro_batch_size:
        raise ConfigError(
            f"train.micro_batch_size={train.micro_batch_size}: must divide the {_count(clips, 'clip')} of "
            f"one rank ({train.global_batch_size} over {_count(dp_size, 'rank')}); "
            f"choose {_or(_divisors(clips))}"
        )


def _check_zero(zero: dict[str, Any], world_size: int) -> None:
    block = "parallelism.zero_optimization"
    _refuse_in_zero(block, zero)
    stage = zero.get("stage")
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"{block}.stage={_text(stage)}: must be 0, 1, 2 or 3")
    for key, value in zero.items():
        _refuse_unknown_zero_key(block, key, ZERO_KEYS)
        if key.endswith(("_bucket_size", "_threshold", "_parameters", "_distance")):
            _require(_is_count(value, 0), f"{block}.{key}", value, "a whole number of elements")
        if key in ZERO_SWITCHES:
            _require(isinstance(value, bool), f"{block}.{key}", value, "true or false")
    for key, known in OFFLOAD_KEYS.items():
        for name in zero.get(key) or {}:
            _refuse_unknown_zero_key(f"{block}.{key}", name, known)
    if zero.get("offload_param") and stage != 3:
        raise ConfigError(f"{block}.offload_param: only stage 3 can offload parameters; the stage is {stage}")
    if zero.get("offload_optimizer") and stage == 0:
        raise ConfigError(f"{block}.offload_optimizer: needs stage 1, 2 or 3; the stage is 0")
    shards = zero.get("zero_hpz_partition_size", 1)
    if not _is_count(shards) or world_size % shards:
        raise ConfigError(
            f"{block}.zero_hpz_partition_size={shards}: must divide the {_count(world_size, 'rank')}; "
            f"choose {_or(_divisors(world_size))}, commonly the GPUs of one node"
        )


def _refuse_in_zero(key: str, value: Any) -> None:
    """Refuse at any depth `auto`, which Hugging Face's trainer fills in, and keys of a second mesh."""
    if value == "auto":
        raise ConfigError(
            f"{key}=auto: nothing fills it in; type a number, or leave it out for DeepSpeed's default"
        )
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        if reason := REFUSED_ZERO_KEYS.get(name):
            raise ConfigError(f"{key}.{name}: {reason}")
        _refuse_in_zero(f"{key}.{name}", item)


def _refuse_unknown_zero_key(block: str, key: str, known: frozenset[str]) -> None:
    if key not in known:
        hint = suggest(f"{block}.{key}", [f"{block}.{other}" for other in known])
        raise ConfigError(f"{block}.{key}: DeepSpeed has no such setting there{hint}")


def _check_open_groups(config: Config) -> None:
    groups = {name: getattr(config, name) for name in ("timesteps", "weighting", "optimizer", "lr_schedule")}
    if config.data.reader is not None:
        groups["data.reader"] = config.data.reader
    for key, settings in groups.items():
        targets.refuse_misfits(key, settings)
    if "lr" not in config.optimizer:
        raise ConfigError("optimizer.lr: not set, and the schedules are shares of it; type optimizer.lr=...")
    positive = {"timesteps": ("shift", "std"), "optimizer": ("lr", "eps")}
    for group, names in positive.items():
        for name in names:
            if isinstance(value := groups[group].get(name), int | float):
                _require(value > 0, f"{group}.{name}", value, "greater than 0")
    for group, name in (
        ("optimizer", "weight_decay"),
        ("lr_schedule", "warmup_steps"),
        ("lr_schedule", "floor"),
    ):
        if isinstance(value := groups[group].get(name), int | float):
            _require(value >= 0, f"{group}.{name}", value, "at least 0")


def _require(holds: bool, key: str, value: Any, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{key}={_text(value)}: must be {rule}")


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _or(numbers: list[int]) -> str:
    shown = [str(number) for number in numbers]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _list(names: list[str]) -> str:
    return f"[{', '.join(names)}]"


def _text(value: Any) -> str:
    return "null" if value is None else str(value)
