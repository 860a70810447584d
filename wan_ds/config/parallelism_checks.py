"""What ranks, sequence parallelism, recomputation, kernels and DeepSpeed's block must fulfil together."""

from typing import Any

from wan_ds.config.foreign_keys import OFFLOAD_KEYS, REFUSED_ZERO_KEYS, ZERO_KEYS, ZERO_SWITCHES
from wan_ds.config.nearest import suggest
from wan_ds.config.rules import counted, divisors, is_count, one_of, require, shown
from wan_ds.config.schema import Attention, Compile, Config, Dtype, Recompute, Ulysses
from wan_ds.errors import ConfigError

BUCKET = 500_000_000  # elements of DeepSpeed's reduce_bucket_size where it is not set


def check_parallelism(config: Config, world_size: int) -> None:
    """Refuse what these ranks cannot share, and what DeepSpeed would get wrong without an error."""
    _check_sp_size(config, world_size)
    _check_ranks(config, world_size)
    _check_zero(config.parallelism.zero_optimization, world_size)
    _check_buckets(config)
    _check_kept_exchange(config)
    _check_kept_ffn(config)
    _check_attention(config)
    _check_compile(config)


def _check_sp_size(config: Config, world_size: int) -> None:
    sp_size, heads = config.parallelism.sp_size, config.model.transformer["num_attention_heads"]
    if heads % sp_size == 0 and world_size % sp_size == 0:
        return
    fitting = [size for size in divisors(world_size) if heads % size == 0]
    raise ConfigError(
        f"parallelism.sp_size={sp_size}: must divide the {counted(heads, 'head')} of {config.model.name} and "
        f"the {counted(world_size, 'rank')}; choose {one_of(fitting)}"
    )


def _check_ranks(config: Config, world_size: int) -> None:
    """Every group of ranks that shares its clips gets as many of them, in whole micro-batches."""
    train, sp_size = config.train, config.parallelism.sp_size
    dp_size = world_size // sp_size
    one = "rank" if sp_size == 1 else f"group of {sp_size} ranks"
    groups = counted(dp_size, "rank") if sp_size == 1 else f"{counted(dp_size, 'group')} of {sp_size} ranks"
    if train.global_batch_size % dp_size:
        unit = dp_size * train.micro_batch_size  # what is named must pass the next check as well
        below = train.global_batch_size // unit * unit
        near = [size for size in (below, below + unit) if size > 0]
        micro = f" times train.micro_batch_size={train.micro_batch_size}"
        ways = f"choose {one_of(near)}"
        if train.global_batch_size % train.micro_batch_size == 0:
            dp_sizes = divisors(train.global_batch_size // train.micro_batch_size)
            ways += f", or start {one_of([sp_size * size for size in dp_sizes])} ranks"
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size}: must be a multiple of the "
            f"{groups} that share it{micro if unit > dp_size else ''}; {ways}"
        )
    clips = train.global_batch_size // dp_size
    if clips % train.micro_batch_size:
        raise ConfigError(
            f"train.micro_batch_size={train.micro_batch_size}: must divide the {counted(clips, 'clip')} of "
            f"one {one} ({train.global_batch_size} over {groups}); "
            f"choose {one_of(divisors(clips))}"
        )


def _check_buckets(config: Config) -> None:
    """Without reduce_scatter ZeRO-3 (DeepSpeed 0.19.8) reduces what fits no bucket by another rule.

    Its gradient would be divided by all ranks and not by those that hold other clips.
    """
    sp_size, zero = config.parallelism.sp_size, config.parallelism.zero_optimization
    block = "parallelism.zero_optimization"
    if sp_size > 1 and zero.get("zero_quantized_gradients"):
        raise ConfigError(
            f"{block}.zero_quantized_gradients=true: at parallelism.sp_size={sp_size} it is not known what "
            "it divides gradients by; leave it out, or type parallelism.sp_size=1"
        )
    if zero["stage"] != 3 or zero.get("reduce_scatter", True) or sp_size == 1:
        return
    if not zero.get("contiguous_gradients", True):
        raise ConfigError(
            f"{block}.contiguous_gradients=false: with reduce_scatter=false ZeRO-3 would divide gradients by "
            f"{sp_size} too often at parallelism.sp_size={sp_size}; type {block}.contiguous_gradients=true"
        )
    bucket, largest = zero.get("reduce_bucket_size", BUCKET), largest_trainable(config)
    if bucket < largest:
        raise ConfigError(
            f"{block}.reduce_bucket_size={bucket}: with reduce_scatter=false ZeRO-3 would divide gradients "
            f"of larger tensors by {sp_size} too often at parallelism.sp_size={sp_size}, and the largest "
            f"that trains has {largest} elements; type {block}.reduce_scatter=true, or a bucket that large"
        )


def largest_trainable(config: Config) -> int:
    """Elements of the largest tensor that trains, or a little more."""
    transformer, adapter = config.model.transformer, config.adapter
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    ffn = transformer.get("ffn_dim", 13824)
    image = transformer.get("image_dim") or 0
    if adapter.rank is not None:  # on layers of attention and feed-forward, rank times inputs or outputs
        rank = max([adapter.rank, *adapter.rank_pattern.values()])
        return rank * max(width, ffn, transformer.get("added_kv_proj_dim") or 0)
    frames, height, rows = transformer["patch_size"]
    patch = frames * height * rows * max(transformer["in_channels"], transformer["out_channels"])
    inputs = (6 * width, ffn, transformer["text_dim"], transformer.get("freq_dim", 256), patch, image)
    return max(*(width * size for size in inputs), image * image)


def _check_kept_exchange(config: Config) -> None:
    parallelism = config.parallelism
    if not parallelism.recompute_keeps_exchange:
        return
    key = "parallelism.recompute_keeps_exchange=true"
    if parallelism.ulysses is not Ulysses.fused:
        raise ConfigError(
            f"{key}: what parallelism.ulysses={parallelism.ulysses.name} exchanges cannot be kept, its "
            "gradients would be garbage; type parallelism.ulysses=fused"
        )
    if parallelism.recompute is not Recompute.selective:
        raise ConfigError(
            f"{key}: parallelism.recompute={parallelism.recompute.name} keeps nothing of attention; type "
            "parallelism.recompute=selective"
        )
    if parallelism.sp_size == 1:
        raise ConfigError(
            f"{key}: nothing is exchanged at parallelism.sp_size=1; leave it out, or type a larger sp_size"
        )


def _check_kept_ffn(config: Config) -> None:
    if not config.parallelism.recompute_keeps_ffn:
        return
    key, recompute = "parallelism.recompute_keeps_ffn=true", config.parallelism.recompute
    if recompute is not Recompute.selective:
        raise ConfigError(
            f"{key}: parallelism.recompute={recompute.name} keeps nothing of the feed-forward; type "
            "parallelism.recompute=selective"
        )
    if config.train.compile is not Compile.none:
        raise ConfigError(
            f"{key}: a compiled block hides its feed-forward; type train.compile=none, or leave it out"
        )


def _check_attention(config: Config) -> None:
    precision = config.precision
    dtype = precision.compute_dtype or precision.frozen_dtype  # without one, that of the weights as loaded
    if config.model.attention is Attention.varlen and dtype is Dtype.fp32:
        key = "frozen_dtype" if precision.compute_dtype is None else "compute_dtype"
        raise ConfigError(
            f"model.attention=varlen: its kernels take bf16 alone, and precision.{key}=fp32; type "
            f"precision.{key}=bf16, or model.attention=auto"
        )
    head = config.model.transformer["attention_head_dim"]
    if config.model.attention is Attention.varlen and (head % 8 or head > 256):
        raise ConfigError(
            f"model.attention=varlen: its kernels take heads of 8 to 256 by eights, and {config.model.name} "
            f"has attention_head_dim={head}; type model.attention=auto"
        )


def _check_compile(config: Config) -> None:
    if config.train.compile is Compile.none:
        return
    key, zero = "train.compile=blocks", config.parallelism.zero_optimization
    classes = (zero.get("leaf_module") or {}).get("classes") or []
    if zero["stage"] == 3 and not any(str(name).endswith("WanTransformerBlock") for name in classes):
        raise ConfigError(
            f"{key}: ZeRO-3 fetches the weights of each layer by calls inside the blocks, and no graph spans "
            "those; type parallelism.zero_optimization.leaf_module={classes:[WanTransformerBlock]}, which "
            "fetches a block at once, or parallelism=zero2"
        )
    if config.precision.frozen_storage is not None:
        raise ConfigError(
            f"{key}: a base in {config.precision.frozen_storage.name} is decoded by what few GPUs can "
            "compile; type train.compile=none, or precision.frozen_storage=null"
        )
    if config.train.deterministic:
        raise ConfigError(
            f"{key}: a compiler chooses its kernels anew in each process, and train.deterministic=true "
            "promises the same bits after a resume; type train.compile=none, or train.deterministic=false"
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
