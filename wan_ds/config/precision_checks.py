"""What precision, optimizer, adapter and averaged weights must fulfil together."""

import math

from wan_ds.config.rules import require
from wan_ds.config.schema import Config, Dtype
from wan_ds.errors import ConfigError


def check_precision(config: Config) -> None:
    """Refuse dtypes that no mode of the engine has, settings that do nothing, and bad ranges."""
    precision, decay = config.precision, config.ema.decay
    if precision.trainable_dtype is Dtype.bf16 and precision.compute_dtype is not Dtype.bf16:
        compute = "null" if precision.compute_dtype is None else precision.compute_dtype.name
        raise ConfigError(
            f"precision.compute_dtype={compute}: bf16 parameters compute in bf16; "
            "type precision.compute_dtype=bf16, or precision=fp32"
        )
    if precision.trainable_dtype is Dtype.bf16 and config.parallelism.zero_optimization.get("stage") == 0:
        raise ConfigError(
            "precision.trainable_dtype=bf16: without ZeRO (stage 0) bf16 parameters have no fp32 masters; "
            "type parallelism=zero2 or zero3, or precision=bf16_autocast"
        )
    _check_optimizer(config)
    require(decay is None or 0 < decay < 1, "ema.decay", decay, "between 0 and 1, or null for none")
    _check_adapter(config)
    if precision.frozen_storage is None:
        return
    key = f"precision.frozen_storage={precision.frozen_storage.name}"
    if config.adapter.rank is None:
        raise ConfigError(f"{key}: only a frozen base can be stored in 8 bits; type adapter=lora")
    if precision.frozen_dtype is Dtype.fp32:
        raise ConfigError(
            f"precision.frozen_dtype=fp32: the rest of a base in 8 bits ({key}) is bf16, and computes in it; "
            "leave precision.frozen_dtype out"
        )
    if config.parallelism.recompute.name == "none":
        raise ConfigError(
            f"{key}: without recomputation the decoded weights would live until backward; "
            "type parallelism.recompute=full, or selective"
        )


def _check_optimizer(config: Config) -> None:
    """DeepSpeed's own ones work where their states are, and nowhere else."""
    name = str(config.optimizer.get("_target_")).removeprefix("wan_ds.training.optimizer.")
    is_offloaded = bool(config.parallelism.zero_optimization.get("offload_optimizer"))
    if name == "cpu_adamw" and not is_offloaded:
        raise ConfigError(
            "optimizer=cpu_adamw: is for masters and moments in CPU memory; type parallelism=zero3_offload, "
            "or optimizer=adamw"
        )
    if name == "fused_adamw" and is_offloaded:
        raise ConfigError(
            "optimizer=fused_adamw: works on the GPU, and parallelism.zero_optimization.offload_optimizer "
            "puts masters and moments into CPU memory; type optimizer=cpu_adamw"
        )


def _check_adapter(config: Config) -> None:
    adapter = config.adapter
    if adapter.rank is None and adapter.targets:
        raise ConfigError(
            f"adapter.targets={adapter.targets}: does nothing without a rank (adapter.rank=null); type "
            "adapter=lora, or adapter.rank=32"
        )
    if adapter.rank is None:
        for name in ("alpha", "rslora", "dropout", "targets", "rank_pattern", "alpha_pattern", "init_from"):
            if value := getattr(adapter, name):
                raise ConfigError(
                    f"adapter.{name}={value}: does nothing without an adapter; type adapter=lora"
                )
        return
    if config.precision.trainable_dtype is not Dtype.fp32:
        raise ConfigError(
            "precision.trainable_dtype=bf16: an adapter trains in fp32, its updates are too small for bf16; "
            "type precision=lora"
        )
    require(adapter.rank > 0, "adapter.rank", adapter.rank, "a whole number from 1")
    alpha = adapter.alpha
    require(alpha is None or 0 < alpha < math.inf, "adapter.alpha", alpha, "a finite number above 0")
    require(0 <= adapter.dropout < 1, "adapter.dropout", adapter.dropout, "at least 0 and less than 1")
    require(bool(adapter.targets), "adapter.targets", "[]", "ends of module names, such as [to_q, to_v]")
    for name in ("rank_pattern", "alpha_pattern"):
        for target, value in getattr(adapter, name).items():
            require(0 < value < math.inf, f"adapter.{name}.{target}", value, "a finite number above 0")
    trained = config.train.experts or list(config.model.experts)
    for name in adapter.init_from:
        if name not in trained:
            raise ConfigError(
                f"adapter.init_from.{name}: no expert that trains; there are {', '.join(trained)}"
            )
