"""What is sampled, a run or an export, as one kind of thing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from wan_ds.config import Config
from wan_ds.models.transformer import WanTransformer
from wan_ds.training import exported, networks, parts
from wan_ds.training.runs import Kind, component_places, kind_of, load_experts

SETTINGS = ("seed", "steps", "guidance", "shift", "num_frames", "height", "width", "fps")


@dataclass(frozen=True)
class Subject:
    """What is sampled, a run or an export."""

    name: str  # of the model
    weights: Path  # the checkpoint's folder, or the export's
    kind: str  # which weights these are, where that was typed and is not what is taken anyway
    samples: Path  # where their folder is made
    defaults: Mapping[str, object]  # of `SETTINGS`, those that somebody said
    experts: Sequence[str]
    boundary: float | None
    images: int  # that each clip needs
    images_optional: bool
    expand_timesteps: bool
    is_autocast: bool  # whether the experts' float32 weights compute in bf16
    components: dict[str, str]  # where each part comes from
    load_encoders: Callable[[torch.device], parts.Encoders]
    load_experts: Callable[[torch.device], dict[str, WanTransformer]]


def of_run(run_dir: Path, config: Config, checkpoint: Path, typed: Kind | None) -> Subject:
    """A run at one of its checkpoints, with the weights of this kind."""
    kind = kind_of(config, typed)
    model, sampling, data = config.model, config.sampling, config.data
    conditioning = parts.conditioning_of(config)
    return Subject(
        name=model.name,
        weights=checkpoint,
        kind="" if kind is kind_of(config, None) else kind.name,
        samples=run_dir / "samples",
        defaults={name: getattr(sampling, name) for name in ("seed", "steps", "guidance", "shift")}
        | {name: getattr(data, name) for name in ("num_frames", "height", "width", "fps")},
        experts=list(model.experts),
        boundary=model.boundary,
        images=conditioning.images,
        images_optional=conditioning.images_optional,
        expand_timesteps=conditioning.expand_timesteps,
        is_autocast=networks.precision_of(config).is_autocast,
        components=component_places(config, checkpoint, kind),
        load_encoders=partial(parts.load_encoders, config),
        load_experts=partial(load_experts, config, checkpoint, kind=kind),
    )


def of_export(folder: Path) -> Subject:
    """A folder in diffusers' layout, with our note of how to sample it or without."""
    model = exported.describe(folder)
    said = {name: getattr(model.note, name, None) for name in SETTINGS} | {"shift": model.shift, "seed": 0}
    return Subject(
        name=model.note.name or folder.resolve().name,
        weights=folder.resolve(),
        kind="",
        samples=folder.resolve().parent / "samples",
        defaults={name: value for name, value in said.items() if value is not None},
        experts=list(model.experts),
        boundary=model.boundary,
        images=model.images,
        images_optional=model.images_optional,
        expand_timesteps=model.expand_timesteps,
        is_autocast=torch.cuda.is_available(),
        components={place: str(folder / place) for place in model.places},
        load_encoders=model.load_encoders,
        load_experts=model.load_experts,
    )
