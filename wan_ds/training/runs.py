"""A run that training wrote, for the commands that use it: its settings, parts and experts' weights."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from wan_ds.config import Config, Weights, read
from wan_ds.errors import CheckpointError
from wan_ds.models.transformer import WanTransformer
from wan_ds.models.weights import Source, build_transformer, on_meta, refuse_misfit
from wan_ds.training import checkpoint as checkpoints
from wan_ds.training import parts, run_folder
from wan_ds.training.comparison import experts_table
from wan_ds.training.sources import locate
from wan_ds.training.trackers import JsonLines


def run_config(run_dir: Path) -> Config:
    """The settings that a run was started with."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"run={run_dir}: there is no {path}; run is a folder that training wrote")
    return read(run_folder.read(run_dir))


def opened(run_dir: Path, which: str) -> tuple[Config, Path]:
    """A run's settings, `model.path` a folder of this machine, and its checkpoint `latest` or `step_...`.

    Of a model of the hub the commit that the run trained on is asked for, and no base weights of experts that
    trained.
    """
    config = run_config(run_dir)
    checkpoint = checkpoints.find(run_dir, which)
    trained = checkpoints.read_state(checkpoint).experts
    model, train = config.model, config.train
    experts = {name: Weights() if name in trained else base for name, base in model.experts.items()}
    model = replace(model, experts=experts, revision=_commit(run_dir) or model.revision)
    local, _ = parts.with_local_weights(replace(config, model=model, train=replace(train, experts=None)))
    return local, checkpoint


def _commit(run_dir: Path) -> str | None:
    path = run_dir / "environment.json"
    return json.loads(path.read_text()).get("model_commit") if path.is_file() else None


def expert_source(config: Config, checkpoint: Path, name: str) -> Source:
    """An expert's weights as trained, or as training would load them if it does not train.

    Raises CheckpointError where they are not of the run's model.
    """
    if name not in checkpoints.read_state(checkpoint).experts:
        return parts.source_of(config, name)
    source = checkpoints.checkpoint_source(checkpoint, name)
    refuse_misfit(on_meta(config.model.transformer), source)
    return source


def load_experts(config: Config, checkpoint: Path, device: torch.device) -> dict[str, WanTransformer]:
    """Every expert that the model declares, in float32 and without gradients."""
    experts = {}
    for name in config.model.experts:
        source = expert_source(config, checkpoint, name)
        expert = build_transformer(config.model.transformer, source)
        experts[name] = expert.to(device).eval().requires_grad_(False)
    return experts


def component_folders(config: Config) -> dict[str, Path]:
    """Where the networks beside the experts are: vae, text_encoder, tokenizer, and CLIP's if it has one."""
    model = config.model
    named = ("vae", "text_encoder", "tokenizer", "image_encoder", "image_processor")
    weights = {name: getattr(model, name).weights for name in named}
    return {name: locate(model.path, part, name) for name, part in weights.items() if part is not None}


def component_places(config: Config, checkpoint: Path) -> dict[str, str]:
    """Where every part of the model comes from, as a person is told it."""
    trained = checkpoints.read_state(checkpoint).experts
    experts = {
        name: str(checkpoint / name) if name in trained else parts.source_of(config, name).where
        for name in config.model.experts
    }
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
