"""What a configuration must fulfil before a weight is read.

Every refusal is a `ConfigError` with the key, the value, the rule and what would work.
"""

import math
import re
from pathlib import Path
from typing import Any

from wan_ds.config import targets
from wan_ds.config.foreign_keys import (
    OFFLOAD_KEYS,
    REFUSED_ZERO_KEYS,
    ZERO_KEYS,
    ZERO_SWITCHES,
)
from wan_ds.config.model_checks import check_model
from wan_ds.config.nearest import suggest
from wan_ds.config.precision_checks import check_precision
from wan_ds.config.rules import counted, divisors, is_count, one_of, require, shown
from wan_ds.config.schema import Config
from wan_ds.errors import ConfigError

TEMPORAL_STRIDE = 4  # both Wan VAEs: 4n + 1 frames become n + 1 latent frames
SPATIAL_STRIDE = 8  # pixels per latent of the Wan 2.1 VAE, which Wan 2.2's A14B models use as well
SPATIAL_STRIDE_48 = 16  # of the Wan 2.2 VAE, whose latents have 48 channels


def check(config: Config, world_size: int) -> None:
    """Refuse what cannot work on `world_size` ranks with a ConfigError; reads no weights and no data."""
    check_model(config)
    _check_ranges(config)
    _check_data(config)
    _check_places(config)
    _check_ranks(config, world_size)
    _check_zero(config.parallelism.zero_optimization, world_size)
    _check_open_groups(config)
    check_precision(config)


def _check_ranges(config: Config) -> None:
    train = config.train
    positive = {
        "train.steps": train.steps,
        "train.global_batch_size": train.global_batch_size,
        "train.micro_batch_size": train.micro_batch_size,
        "train.check_every_steps": train.check_every_steps,
        "train.stall_seconds": train.stall_seconds,
        "parallelism.sp_size": config.parallelism.sp_size,
        "model.fps": config.model.fps,
        "model.shift": config.model.shift,
        "model.sampling_steps": config.model.sampling_steps,
        "data.fps": config.data.fps,
        "sampling.steps": config.sampling.steps,
        "sampling.shift": config.sampling.shift,
        "evaluation.clips": config.evaluation.clips,
        "evaluation.sigmas_per_clip": config.evaluation.sigmas_per_clip,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "tracker.log_every_steps": config.tracker.log_every_steps,
    }
    for key, value in positive.items():
        require(value > 0, key, value, "greater than 0")
    periods = {
        "data.limit": config.data.limit,
        "sampling.every_steps": config.sampling.every_steps,
        "evaluation.every_steps": config.evaluation.every_steps,
        "checkpoint.save_every_steps": config.checkpoint.save_every_steps,
    }
    for key, value in periods.items():
        require(value is None or value > 0, key, value, "greater than 0, or null for none")
    dropout, norm, skipped = train.caption_dropout, train.max_grad_norm, train.max_skipped_in_a_row
    require(0 <= dropout < 1, "train.caption_dropout", dropout, "at least 0 and less than 1")
    require(0 <= norm < math.inf, "train.max_grad_norm", norm, "at least 0; 0 turns clipping off")
    require(skipped >= 0, "train.max_skipped_in_a_row", skipped, "at least 0")
    require(config.data.workers >= 0, "data.workers", config.data.workers, "at least 0")


def _check_data(config: Config) -> None:
    data, transformer = config.data, config.model.transformer
    if not data.path and data.reader is None:
        raise ConfigError(
            "data.path: no clips named; type data.path=/folder/of/videos (recipe=quickstart needs none)"
        )
    if data.num_frames < 1 or (data.num_frames - 1) % TEMPORAL_STRIDE:
        rule = f"{TEMPORAL_STRIDE}n + 1, as the VAE joins {TEMPORAL_STRIDE} frames after the first"
        _refuse_size("data.num_frames", data.num_frames, TEMPORAL_STRIDE, 1, rule)
    kind = targets.find("model.conditioning", config.model.conditioning["_target_"])
    rule = f"at least {kind.least_frames} for {kind.__name__}"
    require(data.num_frames >= kind.least_frames, "data.num_frames", data.num_frames, rule)
    patch = transformer["patch_size"]
    stride = SPATIAL_STRIDE_48 if transformer["out_channels"] == 48 else SPATIAL_STRIDE
    for name, size, patch_size in (("height", data.height, patch[1]), ("width", data.width, patch[2])):
        multiple = stride * patch_size
        if size < 1 or size % multiple:
            rule = f"a multiple of {multiple}, the VAE's {stride} pixels times the patch size {patch_size}"
            _refuse_size(f"data.{name}", size, multiple, 0, rule)


def _refuse_size(key: str, value: int, step: int, offset: int, rule: str) -> None:
    below = (value - offset) // step * step + offset
    near = [size for size in (below, below + step) if size > 0]
    raise ConfigError(f"{key}={value}: must be {rule}; choose {one_of(near)}")


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
        ways = f"choose {one_of(near)}"
        if train.global_batch_size % train.micro_batch_size == 0:
            ranks = divisors(train.global_batch_size // train.micro_batch_size)
            ways += f", or start {one_of(ranks)} ranks"
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size}: must be a multiple of the "
            f"{counted(dp_size, 'rank')} that share it{micro if unit > dp_size else ''}; {ways}"
        )
    clips = train.global_batch_size // dp_size
    if clips % train.micro_batch_size:
        raise ConfigError(
            f"train.micro_batch_size={train.micro_batch_size}: must divide the {counted(clips, 'clip')} of "
            f"one rank ({train.global_batch_size} over {counted(dp_size, 'rank')}); "
            f"choose {one_of(divisors(clips))}"
        )


def _check_zero(zero: dict[str, Any], world_size: int) -> None:
    block = "parallelism.zero_optimization"
    _refuse_in_zero(block, zero)
    stage = zero.get("stage")
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"{block}.stage={shown(stage)}: must be 0, 1, 2 or 3")
    for key, value in zero.items():
        _refuse_unknown_zero_key(block, key, ZERO_KEYS)
        if key.endswith(("_bucket_size", "_threshold", "_parameters", "_distance")):
            require(is_count(value, 0), f"{block}.{key}", value, "a whole number of elements")
        if key in ZERO_SWITCHES:
            require(isinstance(value, bool), f"{block}.{key}", value, "true or false")
    for key, known in OFFLOAD_KEYS.items():
        for name in zero.get(key) or {}:
            _refuse_unknown_zero_key(f"{block}.{key}", name, known)
    if zero.get("offload_param") and stage != 3:
        raise ConfigError(f"{block}.offload_param: only stage 3 can offload parameters; the stage is {stage}")
    if zero.get("offload_optimizer") and stage == 0:
        raise ConfigError(f"{block}.offload_optimizer: needs stage 1, 2 or 3; the stage is 0")
    shards = zero.get("zero_hpz_partition_size", 1)
    if not is_count(shards) or world_size % shards:
        raise ConfigError(
            f"{block}.zero_hpz_partition_size={shards}: must divide the {counted(world_size, 'rank')}; "
            f"choose {one_of(divisors(world_size))}, commonly the GPUs of one node"
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
    positive = {"timesteps": ("shift", "std"), "weighting": ("gamma",), "optimizer": ("lr", "eps")}
    for group, names in positive.items():
        for name in names:
            if isinstance(value := groups[group].get(name), int | float):
                require(value > 0, f"{group}.{name}", value, "greater than 0")
    for group, name in (
        ("optimizer", "weight_decay"),
        ("lr_schedule", "warmup_steps"),
        ("lr_schedule", "floor"),
    ):
        if isinstance(value := groups[group].get(name), int | float):
            require(value >= 0, f"{group}.{name}", value, "at least 0")
    targets.refuse_values("timesteps", config.timesteps)
