"""The settings of a run: one dataclass per closed group, and `read` to build them in plain Python types.

`wan_ds.config.checks.check` refuses what cannot work.
"""

import os
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wan_ds.config import targets
from wan_ds.errors import ConfigError


class Policy(Enum):
    """How the expert of a step is chosen; see `wan_ds.training.experts`."""

    natural = "natural"
    balanced = "balanced"
    fixed = "fixed"
    alternate = "alternate"


class Resize(Enum):
    """What CLIP sees of a frame: its centre square, as diffusers' pipelines, or all of it, squashed."""

    crop = "crop"
    squash = "squash"


class Recompute(Enum):
    """What backward computes again: nothing, each block, or each block but for its self-attention."""

    none = "none"
    full = "full"
    selective = "selective"


class Ulysses(Enum):
    """The exchange of sequence parallelism; see `wan_ds.parallel.ulysses`."""

    deepspeed = "deepspeed"
    fused = "fused"


class Attention(Enum):
    """What computes attention; see `wan_ds.models.attention`."""

    auto = "auto"
    sdpa = "sdpa"
    varlen = "varlen"


class Compile(Enum):
    none = "none"
    blocks = "blocks"


class TrackerMode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


class Dtype(Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class Storage(Enum):
    """How frozen weights are kept where that is not a dtype to compute in."""

    float8_e4m3fn = "float8_e4m3fn"


@dataclass
class Weights:
    """A component's weights: a subfolder of `model.path`, or a folder; null = random from the seed."""

    weights: str | None = None


@dataclass
class Vae(Weights):
    weights: str | None = "vae"
    dtype: Dtype = Dtype.fp32
    tiling: bool = False  # in tiles of 256 pixels: less memory, and other latents than without


@dataclass
class ImageEncoder(Weights):
    resize: Resize = Resize.crop


@dataclass
class Model:
    name: str = MISSING
    path: str | None = None  # hub id, diffusers, original or run folder; wan_ds/... may lie in the package
    revision: str | None = None  # of the hub: a commit, branch or tag; null: the newest
    boundary: float | None = None  # shifted sigma from which on the high-noise expert works; null: one expert
    shift: float = MISSING
    attention: Attention = Attention.auto
    guidance: dict[str, float] = MISSING  # classifier-free guidance of each expert when sampling
    sampling_steps: int = MISSING
    fps: float = MISSING
    num_frames: int = MISSING  # this and the size are defaults of data.*
    height: int = MISSING
    width: int = MISSING
    conditioning: dict[str, Any] = MISSING  # a class of wan_ds.models.conditioning
    transformer: dict[str, Any] = MISSING  # diffusers' WanTransformer3DModel config
    experts: dict[str, Weights] = MISSING  # high_noise and low_noise, or all
    vae: Vae = field(default_factory=Vae)
    text_encoder: Weights = field(default_factory=lambda: Weights("text_encoder"))
    tokenizer: Weights = field(default_factory=lambda: Weights("tokenizer"))
    image_encoder: ImageEncoder = field(default_factory=ImageEncoder)  # CLIP, for models with an image_dim
    image_processor: Weights = field(default_factory=Weights)  # its means; null: CLIP's own


@dataclass
class Routing:
    policy: Policy = Policy.natural
    high_noise_share: float | None = None  # of the steps; for fixed
    run_length: int | None = None  # steps of one expert before it is the other's turn; for alternate


@dataclass
class Train:
    steps: int = MISSING  # optimizer steps of all experts together
    global_batch_size: int = MISSING  # clips per optimizer step, over all ranks
    micro_batch_size: int = 1  # clips per forward and backward on one rank
    experts: list[str] | None = None  # the experts that train; null: all that the model declares
    frozen_experts: list[str] = field(default_factory=list)  # loaded and sharded beside them, not trained
    routing: Routing = field(default_factory=Routing)
    max_grad_norm: float = 1.0  # 0 turns clipping off
    caption_dropout: float = 0.1  # share of clips that train with the empty caption
    max_skipped_in_a_row: int = 10  # non-finite steps of one expert before the run stops
    lr_scale: dict[str, float] = field(default_factory=dict)  # factor on optimizer.lr by expert
    deterministic: bool = False
    compile: Compile = Compile.none
    check_every_steps: int = 100  # between two comparisons of what the ranks must agree on
    stall_seconds: float = 600.0  # without progress until the job ends and says which rank is the odd one


@dataclass
class Parallelism:
    sp_size: int = 1  # ranks that share one clip
    ulysses: Ulysses = Ulysses.fused
    recompute: Recompute = Recompute.none
    recompute_keeps_exchange: bool = False  # of selective: what sp ranks exchanged stays, not sent again
    recompute_keeps_ffn: bool = False  # of selective: what the feed-forward gave stays as well
    zero_optimization: dict[str, Any] = field(default_factory=dict)  # DeepSpeed's own block


@dataclass
class Precision:
    trainable_dtype: Dtype = Dtype.fp32
    frozen_dtype: Dtype | None = None  # null: every frozen tensor as loaded; bf16 with frozen_storage
    compute_dtype: Dtype | None = Dtype.fp32  # null: each product in the dtype of its weights
    frozen_storage: Storage | None = None  # of the frozen linear weights in the blocks; null: as frozen_dtype


@dataclass
class Adapter:
    rank: int | None = None  # null: no adapter, all weights train
    alpha: float | None = None  # its effect is alpha / rank times its product; null: rank
    rslora: bool = False  # alpha / sqrt(rank) instead
    dropout: float = 0.0
    targets: list[str] = field(default_factory=list)  # ends of module names, such as attn1.to_q
    rank_pattern: dict[str, int] = field(default_factory=dict)  # other ranks, by ends of module names
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    init_from: dict[str, str] = field(default_factory=dict)  # an adapter's file by expert, to go on from


@dataclass
class Ema:
    decay: float | None = None  # of the averaged weights, on each of an expert's own steps; null: none


@dataclass
class Data:
    path: str | None = None
    reader: dict[str, Any] | None = None  # a class: path -> clips; null: detect
    num_frames: int = MISSING
    height: int = MISSING
    width: int = MISSING
    fps: float = MISSING
    workers: int = 2
    limit: int | None = None  # the first clips only
    keep_latents: bool = False  # keep every clip's latents in memory after encoding it once


@dataclass
class Sampling:
    prompts: list[str] | None = None  # null: the captions of the first clips
    images: list[str] | None = None  # a first frame for each prompt; null: of the first clips
    last_images: list[str] | None = None
    every_steps: int | None = None
    at_start: bool = False
    steps: int = MISSING
    guidance: Any = MISSING  # one number, or a number by expert
    shift: float = MISSING
    seed: int = 0


@dataclass
class Evaluation:
    path: str | None = None  # null: the training clips
    clips: int = 8
    sigmas_per_clip: int = 4
    every_steps: int | None = None
    at_start: bool = False


@dataclass
class Checkpoint:
    save_every_steps: int | None = None  # null: at the end only
    keep_last: int = 2


@dataclass
class Tracker:
    mode: TrackerMode = TrackerMode.auto  # auto: online with a key, else offline
    project: str = "wan_ds"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    log_every_steps: int = 10


@dataclass
class Config:
    model: Model = MISSING
    data: Data = MISSING
    timesteps: dict[str, Any] = MISSING
    weighting: dict[str, Any] = MISSING
    optimizer: dict[str, Any] = MISSING
    lr_schedule: dict[str, Any] = MISSING
    parallelism: Parallelism = MISSING
    precision: Precision = MISSING
    adapter: Adapter = MISSING
    ema: Ema = MISSING
    train: Train = MISSING
    sampling: Sampling = MISSING
    evaluation: Evaluation = MISSING
    checkpoint: Checkpoint = MISSING
    tracker: Tracker = MISSING
    run_name: str | None = None
    run_dir: str = "runs/${run_name}"
    seed: int = 0
    resume: str = "auto"  # auto, never, or a checkpoint folder


def read(cfg: DictConfig | dict[str, Any]) -> Config:
    """The settings as plain Python objects: interpolations resolved, `~` expanded, typed numbers numbers.

    ConfigError names what is missing, of the wrong type, or refers to nothing.
    """
    try:
        cfg = OmegaConf.create(cfg) if isinstance(cfg, dict) else cfg
        if OmegaConf.get_type(cfg) is not Config:
            cfg = OmegaConf.merge(OmegaConf.structured(Config), cfg)
        missing = _missing(OmegaConf.to_container(cfg, resolve=False))
        if missing:
            raise ConfigError("; ".join(f"{key}: not set; type {key}=..." for key in missing))
        config: Config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(sentence(error)) from error
    _expand_home(config)
    for group in ("timesteps", "weighting", "optimizer", "lr_schedule"):
        setattr(config, group, targets.with_numbers(group, getattr(config, group)))
    config.model.conditioning = targets.with_numbers("model.conditioning", config.model.conditioning)
    if config.data.reader is not None:
        config.data.reader = targets.with_numbers("data.reader", config.data.reader)
    # 5e7 is a float in YAML and on the command line; DeepSpeed's bucket sizes are counts
    zero = config.parallelism.zero_optimization
    config.parallelism.zero_optimization = {key: _whole(value) for key, value in zero.items()}
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The settings as dicts, lists, numbers and text, as JSON and YAML hold them."""
    return _plain(asdict(config))


def sentence(error: Exception) -> str:
    """One line from an OmegaConf error: the key first, then what is wrong with it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    said = [line for line in lines if not line.startswith(("full_key:", "reference_type=", "object_type="))]
    return f"{key}: {' '.join(said)}" if key else " ".join(said)


def _missing(settings: Any, key: str = "") -> list[str]:
    if settings == "???":
        return [key]
    if not isinstance(settings, dict):
        return []
    found: list[str] = []
    for name, value in settings.items():
        found += _missing(value, f"{key}.{name}" if key else str(name))
    return found


def _expand_home(config: Config) -> None:
    model = config.model
    components = (model.vae, model.text_encoder, model.tokenizer, model.image_encoder, model.image_processor)
    for component in (*components, *model.experts.values()):
        component.weights = _home(component.weights)
    sampling = config.sampling
    for name in ("images", "last_images"):
        if paths := getattr(sampling, name):
            setattr(sampling, name, [_home(path) for path in paths])
    config.adapter.init_from = {name: _home(path) for name, path in config.adapter.init_from.items()}
    for holder in (model, config.data, config.evaluation):
        holder.path = _home(holder.path)
    config.run_dir, config.resume = _home(config.run_dir), _home(config.resume)


def _home(path: str | None) -> str | None:
    return path if path is None else os.path.expanduser(path)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value
