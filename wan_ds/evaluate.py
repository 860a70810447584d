"""Routed validation loss of a run, in one process: each clip and noise level goes to the expert that owns it.

python scripts/evaluate.py run=runs/mine [checkpoint=step_00000100] [path=~/other/clips]
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from omegaconf import MISSING

from wan_ds.config.command_line import simple_command
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.training import checkpoint as checkpoints
from wan_ds.training import evaluation, networks, parts
from wan_ds.training.meters import Meters
from wan_ds.training.runs import KINDS, Kind, kind_of, load_experts, opened


@dataclass
class EvaluateOptions:
    run: str = field(default=MISSING, metadata={"help": "the run's folder", "path": True})
    checkpoint: str = field(default="latest", metadata={"help": "latest, or a folder's name: step_00000100"})
    path: str | None = field(
        default=None,
        metadata={"help": "clips; default: evaluation.path, else the training clips", "path": True},
    )
    clips: int | None = field(default=None, metadata={"help": "default: the run's, as the next"})
    sigmas_per_clip: int | None = None
    weights: Kind | None = field(default=None, metadata={"help": KINDS})
    batch_size: int = field(default=1, metadata={"help": "clips in one forward; changes no number"})


def main(options: EvaluateOptions) -> int:
    """Print the loss of each expert and of all, and write it to the run's `evaluation/<checkpoint>.json`."""
    for name in ("clips", "sigmas_per_clip", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    run = Path(options.run)
    config, folder = opened(run, options.checkpoint)
    kind = kind_of(config, options.weights)
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = options.path or config.evaluation.path
    clips = parts.checked_clips(config, path)
    encoded = parts.encoded_of(config, clips, parts.load_encoders(config, where), keep=True)
    experts = load_experts(config, folder, where, kind)
    routing, conditioning = parts.routing_of(config), parts.conditioning_of(config)
    sigmas = evaluation.levels(
        routing.timesteps, options.sigmas_per_clip or config.evaluation.sigmas_per_clip
    )
    count = min(options.clips or config.evaluation.clips, len(clips))
    probes = evaluation.probes(count, sigmas, routing.owner_of)
    absent = set(probes) - set(experts)
    if absent:
        raise CheckpointError(
            f"{folder} lacks {', '.join(sorted(absent))}, which owns some of the noise levels"
        )
    with networks.precision_of(config).autocast(where.type):
        losses = {
            name: evaluation.probe_losses(
                routed,
                sigmas,
                encoded,
                experts[name],
                conditioning,
                seed=config.seed,
                batch_size=options.batch_size,
                tokens=networks.tokens_of(config),
            )
            for name, routed in probes.items()
        }
    step = checkpoints.read_state(folder).step
    meters = Meters()
    meters.add(step, evaluation.summary(losses, probes, sigmas))
    (record,) = meters.flush()
    marked = "" if kind is kind_of(config, None) else f"-{kind.name}"
    target = run / "evaluation" / f"{folder.name}{marked}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(
        json.dumps(
            record | {"weights": kind.name, "clips": count, "path": path or config.data.path}, indent=2
        )
    )
    sys.stdout.write(table(record, {name: len(routed) for name, routed in probes.items()}) + f"\n{target}\n")
    return 0


def table(record: dict, counts: dict[str, int]) -> str:
    """The losses as a person reads them."""
    lines = [f"{'expert':<12}{'clips x levels':>16}{'loss':>10}"]
    lines += [f"{name:<12}{count:>16}{record[f'eval/{name}/loss']:>10.4f}" for name, count in counts.items()]
    error = record["eval/loss_stderr"]
    lines.append(f"{'all':<12}{sum(counts.values()):>16}{record['eval/loss']:>10.4f} +- {error:.4f}")
    return "\n".join(lines)


if __name__ == "__main__":
    simple_command(EvaluateOptions, main)
