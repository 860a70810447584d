"""A run that training wrote, for the commands that use it: its settings, parts and experts' weights."""

import json
from dataclasses import replace
from enum import Enum
from pathlib import Path

import torch

from wan_ds.config import Config, Weights, read
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.interop.lora import Lora
from wan_ds.models.adapter import plain_name
from wan_ds.models.transformer import WanTransformer
from wan_ds.models.weights import Source, build_transformer, on_meta, refuse_misfit
from wan_ds.training import adapters, networks, parts, run_folder
from wan_ds.training import checkpoint as checkpoints
from wan_ds.training.adapters import Merged
from wan_ds.training.comparison import experts_table
from wan_ds.training.precision import compute_in_own_dtypes
from wan_ds.training.sources import Fingerprint, locate
from wan_ds.training.trackers import JsonLines


def run_config(run_dir: Path) -> Config:
    """The settings that a run was started with."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"run={run_dir}: there is no {path}; run is a folder that training wrote")
    return read(run_folder.read(run_dir))


def opened(run_dir: Path, which: str) -> tuple[Config, Path]:
    """A run's settings, `model.path` a folder of this machine, and its checkpoint `latest` or `step_...`.

    Of a model of the hub the commit that the run trained on is asked for, and no base weights of experts
    whose own are all in the checkpoint.
    """
    config = run_config(run_dir)
    checkpoint = checkpoints.find(run_dir, which)
    trained = set() if is_lora(config) else set(checkpoints.read_state(checkpoint).experts)
    model, train = config.model, config.train
    experts = {name: Weights() if name in trained else base for name, base in model.experts.items()}
    model = replace(model, experts=experts, revision=_commit(run_dir) or model.revision)
    train = replace(train, experts=None, frozen_experts=[])
    local, _ = parts.with_local_weights(replace(config, model=model, train=train))
    return local, checkpoint


def is_lora(config: Config) -> bool:
    """Whether the run trains adapters."""
    return config.adapter.rank is not None


def _commit(run_dir: Path) -> str | None:
    path = run_dir / "environment.json"
    return json.loads(path.read_text()).get("model_commit") if path.is_file() else None


class Kind(Enum):
    """Which of a run's weights: those that train, their averages, or what an adapter stands on."""

    live = "live"
    ema = "ema"
    base = "base"


KINDS = "live, ema (the averages, the default where the run keeps any), or base (without the adapter)"


def kind_of(config: Config, typed: Kind | None) -> Kind:
    """What was typed, else the averages if the run keeps any: they are what it was told to keep them for."""
    if typed is Kind.ema and config.ema.decay is None:
        raise ConfigError("weights=ema: this run keeps no averaged weights (ema.decay); leave it out")
    if typed is Kind.base and not is_lora(config):
        raise ConfigError("weights=base: this run trains all weights, no adapter; leave it out")
    if typed is not None:
        return typed
    return Kind.live if config.ema.decay is None else Kind.ema


def expert_source(config: Config, checkpoint: Path, name: str, kind: Kind = Kind.live) -> Source:
    """An expert's weights as trained, or as training would load them if it does not train.

    An adapter is folded into its base, tensor by tensor. Raises CheckpointError where the weights are not of
    the run's model, or the base is not the one that the adapter was trained on.
    """
    counts = checkpoints.read_state(checkpoint).experts.get(name)
    if counts is None:
        return networks.source_of(config, name)
    if is_lora(config):
        return Merged(_base(config, checkpoint, name), expert_lora(checkpoint, name, kind))
    source = (
        _averages(checkpoint, name) if kind is Kind.ema else checkpoints.checkpoint_source(checkpoint, name)
    )
    refuse_misfit(on_meta(config.model.transformer), source)
    return source


def _base(config: Config, checkpoint: Path, name: str) -> Fingerprint:
    """What an expert's adapter was trained on; reading something else raises CheckpointError at the end."""
    counts = checkpoints.read_state(checkpoint).experts[name]
    return Fingerprint(networks.source_of(config, name), counts.base)


def _averages(checkpoint: Path, name: str) -> Source:
    from wan_ds.training.ema import EmaFiles  # it imports DeepSpeed

    return EmaFiles(checkpoint / name)


def expert_lora(checkpoint: Path, name: str, kind: Kind = Kind.live) -> Lora:
    """The adapter of an expert that trained; raises CheckpointError."""
    lora = adapters.read(checkpoint / name)
    lora = replace(lora, metadata=dict(lora.metadata) | {"weights": kind.name})
    if kind is Kind.live:
        return lora
    source = _averages(checkpoint, name)
    tensors = {plain_name(key): tensor for key, tensor in source.read(source.tensors).items()}
    if tensors.keys() != lora.tensors.keys():
        raise CheckpointError(f"{source.where}: its averages are of other tensors than {lora.where}")
    return replace(lora, tensors=tensors)


def load_experts(
    config: Config, checkpoint: Path, device: torch.device, kind: Kind = Kind.live
) -> dict[str, WanTransformer]:
    """Every expert that the model declares, without gradients, stored as in training.

    An adapter stands beside its base, which may have any dtype. Inside `Precision.autocast` all compute as in
    training.
    """
    precision = networks.precision_of(config)
    trained = checkpoints.read_state(checkpoint).experts
    experts = {}
    for name in config.model.experts:
        source = (
            _base(config, checkpoint, name)
            if name in trained and is_lora(config)
            else expert_source(config, checkpoint, name, kind)
        )
        has_adapter = name in trained and is_lora(config) and kind is not Kind.base
        trains = name in trained and (has_adapter or not is_lora(config))
        expert = build_transformer(
            config.model.transformer,
            source,
            dtype_of=precision.dtype_of,
            is_trainable=lambda _, trains=trains: trains,
            adapter=networks.adapter_settings(config) if has_adapter else None,
            init_from=expert_lora(checkpoint, name, kind) if has_adapter else None,
            frozen_storage=precision.frozen_storage,
        )
        expert.sequence = networks.tokens_of(config).sequence
        if not precision.is_autocast:
            compute_in_own_dtypes(expert)
        experts[name] = expert.to(device).eval().requires_grad_(False)
    return experts


def component_folders(config: Config) -> dict[str, Path]:
    """Where the networks beside the experts are: vae, text_encoder, tokenizer, and CLIP's if it has one."""
    model = config.model
    named = ("vae", "text_encoder", "tokenizer", "image_encoder", "image_processor")
    weights = {name: getattr(model, name).weights for name in named}
    return {name: locate(model.path, part, name) for name, part in weights.items() if part is not None}


def component_places(config: Config, checkpoint: Path, kind: Kind = Kind.live) -> dict[str, str]:
    """Where every part of the model comes from, as a person is told it."""
    trained = checkpoints.read_state(checkpoint).experts
    experts = {}
    for name in config.model.experts:
        is_whole = name in trained and not is_lora(config)
        experts[name] = str(checkpoint / name) if is_whole else networks.source_of(config, name).where
        if name in trained and is_lora(config) and kind is not Kind.base:
            experts[name] += f" with the adapter {checkpoint / name}"
    return experts | {name: str(folder) for name, folder in component_folders(config).items()}


def experts_told(run_dir: Path, checkpoint: Path) -> str:
    """How often each expert had trained, and its last loss, as a table."""
    state = checkpoints.read_state(checkpoint)
    losses: dict[str, float] = {}
    for record in JsonLines(run_dir / "metrics.jsonl").read():
        if record["step"] <= state.step:
            found = {name: record.get(f"train/{name}/loss") for name in state.experts}
            losses |= {name: loss for name, loss in found.items() if loss is not None}
    return experts_table(state, losses)
