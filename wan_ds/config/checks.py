"""What a configuration must fulfil before a weight is read.

Every refusal is a `ConfigError` with the key, the value, the rule and what would work.
"""

import math
import re
from pathlib import Path

from wan_ds.config import targets
from wan_ds.config.model_checks import check_model
from wan_ds.config.parallelism_checks import check_parallelism
from wan_ds.config.precision_checks import check_precision
from wan_ds.config.rules import one_of, require
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
    check_parallelism(config, world_size)
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
