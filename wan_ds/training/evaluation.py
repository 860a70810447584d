"""Routed validation: each clip and noise level is judged by the expert that owns the level.

The levels are the midpoints of equal shares of the timestep distribution, the same for every clip, and the
noise belongs to (seed, clip, level): the result is the same at any world size and in any batch mix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from wan_ds import streams
from wan_ds.data.latents import Encoded
from wan_ds.flow.timesteps import Timesteps
from wan_ds.models.conditioning import Conditioning
from wan_ds.training.meters import LossBySigma, loss_by_sigma
from wan_ds.training.step import WHOLE, Network, Tokens, squared_errors


@dataclass(frozen=True)
class Probe:
    """One clip at one noise level."""

    clip: int
    level: int
    expert: str


def levels(timesteps: Timesteps, count: int) -> torch.Tensor:
    """float32 [count]: the medians of ``count`` equal shares of the distribution."""
    return timesteps.quantile((torch.arange(count, dtype=torch.float64) + 0.5) / count).to(torch.float32)


def probes(clips: int, sigmas: torch.Tensor, owner_of: Callable[[float], str]) -> dict[str, list[Probe]]:
    """Every clip at every level, by the expert that owns the level."""
    owners = [owner_of(sigma) for sigma in sigmas.tolist()]
    routed: dict[str, list[Probe]] = {expert: [] for expert in owners}
    for clip in range(clips):
        for level, expert in enumerate(owners):
            routed[expert].append(Probe(clip, level, expert))
    return routed


@torch.no_grad()
def probe_losses(  # noqa: PLR0913
    probes: Sequence[Probe],
    sigmas: torch.Tensor,
    encoded: Encoded,
    model: Network,
    conditioning: Conditioning,
    *,
    seed: int,
    batch_size: int,
    tokens: Tokens = WHOLE,
) -> torch.Tensor:
    """float64 [probes]: this rank's share of the mean squared error of each, in order; any batch size gives
    the same."""
    losses = []
    for first in range(0, len(probes), batch_size):
        batch = probes[first : first + batch_size]
        clips = [encoded.clip(p.clip) for p in batch]
        latents = [clip.latents for clip in clips]
        sigma = sigmas[[p.level for p in batch]].to(latents[0].device)
        noise = [
            streams.normal(clip.shape, seed, "evaluation", p.clip, p.level).to(clip.device)
            for clip, p in zip(latents, batch, strict=True)
        ]
        given = [streams.uniform(seed, "evaluation image", p.clip) < conditioning.given_share for p in batch]
        sums, counts = squared_errors(
            model,
            tokens,
            conditioning,
            latents,
            noise,
            sigma,
            [clip.condition for clip in clips],
            given,
            torch.stack([encoded.prompt(p.clip) for p in batch]),
        )
        losses.append(sums.double() / torch.tensor(counts, device=sums.device))
    return torch.cat(losses)


def share_of_rank(routed: Sequence[Probe], dp_rank: int, dp_size: int) -> list[Probe]:
    """This rank's probes of one expert, as many on every rank: the surplus repeats the last and counts
    nothing."""
    padded = list(routed) + [routed[-1]] * (-len(routed) % dp_size)
    return padded[dp_rank::dp_size]


def gathered(losses: torch.Tensor, count: int, sp_size: int = 1) -> torch.Tensor:
    """The losses of one expert's probes in their order, from all ranks' shares; a collective."""
    if not dist.is_initialized():
        return losses[:count]
    parts = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, losses)
    of_clips = torch.stack(parts).unflatten(0, (-1, sp_size)).sum(dim=1)  # [dp, probes of a rank]
    return of_clips.T.flatten()[:count]


def summary(losses: dict[str, torch.Tensor], routed: dict[str, list[Probe]], sigmas: torch.Tensor) -> dict:
    """``eval/...`` metrics over all clips and levels, every probe weighing the same."""
    everything = torch.cat(list(losses.values()))
    clips = torch.tensor([p.clip for expert in losses for p in routed[expert]], device=everything.device)
    where = torch.cat([sigmas[[p.level for p in routed[expert]]] for expert in losses]).to(everything.device)
    sums, counts = loss_by_sigma(where.double(), everything)
    count = torch.bincount(clips)
    means = torch.zeros(len(count), dtype=everything.dtype, device=clips.device)
    means = means.index_add(0, clips, everything) / count
    error = means.std() / len(means) ** 0.5 if len(means) > 1 else everything.new_zeros(())
    return {
        "eval/loss": everything.mean(),
        "eval/loss_stderr": error,  # over clips: the levels are the same for all
        **{f"eval/{expert}/loss": values.mean() for expert, values in losses.items()},
        "eval/loss_by_sigma": LossBySigma(sums, counts),
    }
