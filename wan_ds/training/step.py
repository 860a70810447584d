"""One micro-batch of flow matching, as the papers write it.

Letters: C channels, F H W of the latents. Every draw belongs to a clip by (seed, step, slot), so that it
does not depend on how the step's clips are laid out over ranks and micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from wan_ds import streams
from wan_ds.flow.path import mix, timestep, velocity
from wan_ds.flow.timesteps import Interval, Timesteps, stratified, truncated
from wan_ds.models.conditioning import Condition, Conditioning

Network = Callable[..., Sequence[torch.Tensor]]  # `WanTransformer`'s door for clips


@dataclass(frozen=True)
class MicroBatch:
    """The clips of one forward and backward on one rank."""

    slots: list[int]  # their positions in the step's global batch
    latents: list[torch.Tensor]  # [C, F, H, W] each, normalised VAE output
    conditions: list[Condition]
    prompt_embeds: torch.Tensor  # [clips, 512, width]
    weight: float = 1.0  # 0 where a rank runs along with others that hold more clips


@dataclass(frozen=True)
class Loss:
    """What a micro-batch contributes to its window; tensors on the device."""

    weighted_sum: (
        torch.Tensor
    )  # sum over clips and elements of w(sigma) * squared error; carries the gradient
    count: int  # elements summed over
    size: int  # elements of the clips, those of given frames too
    sigma: torch.Tensor  # [clips]
    clip_losses: torch.Tensor  # [clips], mean squared error of each, unweighted


class FlowMatching:
    """Trains a network to predict velocity; called as ``step(model, batch, interval, step_index)``."""

    def __init__(  # noqa: PLR0913 - the parts of the objective
        self,
        timesteps: Timesteps,
        weighting: Callable[[torch.Tensor], torch.Tensor],
        conditioning: Conditioning,
        *,
        seed: int,
        global_batch_size: int,
    ) -> None:
        self.timesteps = timesteps
        self.weighting = weighting
        self.conditioning = conditioning
        self.seed = seed
        self.global_batch_size = global_batch_size

    def __call__(self, model: Network, batch: MicroBatch, interval: Interval, step: int) -> Loss:
        sigma = self.draw_sigma(batch.slots, interval, step).to(batch.prompt_embeds.device)
        noise = [
            streams.normal(clip.shape, self.seed, "noise", step, slot).to(clip.device)
            for clip, slot in zip(batch.latents, batch.slots, strict=True)
        ]
        given = self.given(batch.slots, step)
        errors = squared_errors(
            model,
            self.conditioning,
            batch.latents,
            noise,
            sigma,
            batch.conditions,
            given,
            batch.prompt_embeds,
        )
        counts = [error.numel() for error in errors]
        sums = torch.stack([error.sum() for error in errors])
        return Loss(
            weighted_sum=batch.weight * (self.weighting(sigma) * sums).sum(),
            count=round(batch.weight * sum(counts)),
            size=round(batch.weight * sum(clip.numel() for clip in batch.latents)),
            sigma=sigma,
            clip_losses=sums.detach() / torch.tensor(counts, device=sums.device),
        )

    def count(self, batch: MicroBatch, step: int) -> float:
        """How many elements the batch adds to its window's loss."""
        if not batch.weight:
            return 0.0
        learnt = map(
            self.conditioning.first_learnt_frame, self.given(batch.slots, step), _frames(batch.latents)
        )
        return float(sum(clip[:, first:].numel() for clip, first in zip(batch.latents, learnt, strict=True)))

    def given(self, slots: Sequence[int], step: int) -> list[bool]:
        """Which of the clips train with their images given, where that is a share of them."""
        share = self.conditioning.given_share
        return [streams.uniform(self.seed, "image", step, slot) < share for slot in slots]

    def draw_sigma(self, slots: Sequence[int], interval: Interval, step: int) -> torch.Tensor:
        """float32 [clips] on the CPU, stratified over the step's clips, each exactly distributed in the
        interval."""
        strata = torch.randperm(
            self.global_batch_size, generator=streams.generator(self.seed, "strata", step)
        )
        u = torch.tensor(
            [streams.uniform(self.seed, "sigma", step, slot) for slot in slots], dtype=torch.float64
        )
        return truncated(self.timesteps, interval, stratified(u, strata[list(slots)], self.global_batch_size))

    def drops_caption(self, slot: int, step: int, share: float) -> bool:
        """Whether the clip trains with the empty caption."""
        return streams.uniform(self.seed, "caption", step, slot) < share


def squared_errors(  # noqa: PLR0913 - all that a prediction depends on
    model: Network,
    conditioning: Conditioning,
    latents: Sequence[torch.Tensor],
    noise: Sequence[torch.Tensor],
    sigma: torch.Tensor,
    conditions: Sequence[Condition],
    given: Sequence[bool],
    prompt_embeds: torch.Tensor,
) -> list[torch.Tensor]:
    """float32 [C, F, H, W] of each clip: (predicted - velocity)^2 in the frames that are to be learnt."""
    noised = [mix(*clip) for clip in zip(latents, noise, sigma, strict=True)]
    inputs = conditioning.inputs(
        noised, timestep(sigma), latents=list(latents), conditions=list(conditions), given=list(given)
    )
    predicted = model(
        inputs.hidden_states,
        inputs.timestep,
        prompt_embeds,
        inputs.image_embeds,
        segment_frames=inputs.segment_frames,
    )
    target = [velocity(*clip) for clip in zip(latents, noise, strict=True)]
    firsts = map(conditioning.first_learnt_frame, given, _frames(latents))
    return [
        (p[:, first:].float() - v[:, first:]).square()
        for p, v, first in zip(predicted, target, firsts, strict=True)
    ]


def _frames(latents: Sequence[torch.Tensor]) -> list[int]:
    return [clip.shape[1] for clip in latents]
