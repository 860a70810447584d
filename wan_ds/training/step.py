"""One micro-batch of flow matching, as the papers write it.

Letters: C channels, F H W of the latents. Every draw belongs to a clip by (seed, step, slot), so that it
does not depend on how the step's clips are laid out over ranks and micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from wan_ds import streams
from wan_ds.flow.path import mix, timestep, velocity
from wan_ds.flow.timesteps import Interval, Timesteps, stratified, truncated


@dataclass(frozen=True)
class MicroBatch:
    """The clips of one forward and backward on one rank."""

    slots: list[int]  # their positions in the step's global batch
    latents: list[torch.Tensor]  # [C, F, H, W] each, normalised VAE output
    prompt_embeds: torch.Tensor  # [clips, 512, width]
    weight: float = 1.0  # 0 where a rank runs along with others that hold more clips


@dataclass(frozen=True)
class Loss:
    """What a micro-batch contributes to its window; tensors on the device."""

    weighted_sum: (
        torch.Tensor
    )  # sum over clips and elements of w(sigma) * squared error; carries the gradient
    count: int  # elements summed over
    sigma: torch.Tensor  # [clips]
    clip_losses: torch.Tensor  # [clips], mean squared error of each, unweighted


class FlowMatching:
    """Trains a network to predict velocity; called as ``step(model, batch, interval, step_index)``."""

    def __init__(
        self,
        timesteps: Timesteps,
        weighting: Callable[[torch.Tensor], torch.Tensor],
        *,
        seed: int,
        global_batch_size: int,
    ) -> None:
        self.timesteps = timesteps
        self.weighting = weighting
        self.seed = seed
        self.global_batch_size = global_batch_size

    def __call__(
        self, model: Callable[..., Sequence[torch.Tensor]], batch: MicroBatch, interval: Interval, step: int
    ) -> Loss:
        sigma = self.draw_sigma(batch.slots, interval, step).to(batch.prompt_embeds.device)
        noise = [
            streams.normal(clip.shape, self.seed, "noise", step, slot).to(clip.device)
            for clip, slot in zip(batch.latents, batch.slots, strict=True)
        ]
        noised = [mix(*clip) for clip in zip(batch.latents, noise, sigma, strict=True)]
        predicted = model(noised, timestep(sigma), batch.prompt_embeds)
        target = [velocity(*clip) for clip in zip(batch.latents, noise, strict=True)]
        errors = torch.stack([(p.float() - v).square().sum() for p, v in zip(predicted, target, strict=True)])
        counts = [clip.numel() for clip in batch.latents]
        return Loss(
            weighted_sum=batch.weight * (self.weighting(sigma) * errors).sum(),
            count=round(batch.weight * sum(counts)),
            sigma=sigma,
            clip_losses=errors.detach() / torch.tensor(counts, device=errors.device),
        )

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
