"""One micro-batch of flow matching, as the papers write it.

Letters: C channels, F H W of the latents. Every draw belongs to a clip by (seed, step, slot), so that it
does not depend on how the step's clips are laid out over ranks and micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from wan_ds import streams
from wan_ds.flow.path import mix, timestep, velocity
from wan_ds.flow.timesteps import Interval, Timesteps, stratified, truncated
from wan_ds.models.attention import TokenSequence, WholeSequence
from wan_ds.models.conditioning import Condition, Conditioning
from wan_ds.models.tokens import lay_out, patchify

Network = Callable[..., torch.Tensor]  # `WanTransformer`'s door for clips, called with local=True


@dataclass(frozen=True)
class Tokens:
    """How clips become the tokens of this rank: the patch, and how the stream lies over ranks."""

    patch: tuple[int, int, int]
    sequence: TokenSequence


WHOLE = Tokens((1, 2, 2), WholeSequence())  # every token on this rank, Wan's patch


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
    """What a micro-batch contributes to its window; tensors on the device.

    Sums are over this rank's tokens: those of the ranks that share the clips add up to the clips'.
    """

    weighted_sum: torch.Tensor  # of w(sigma) * squared error; carries the gradient
    count: int  # elements of the whole clips that are learnt
    size: int  # elements of the whole clips, those of given frames too
    sigma: torch.Tensor  # [clips]
    clip_losses: torch.Tensor  # [clips], this rank's share of each clip's mean squared error, unweighted


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
        tokens: Tokens = WHOLE,
    ) -> None:
        self.tokens = tokens
        self.timesteps = timesteps
        self.weighting = weighting
        self.conditioning = conditioning
        self.seed = seed
        self.global_batch_size = global_batch_size

    def __call__(self, model: Network, batch: MicroBatch, interval: Interval, step: int) -> Loss:
        sigma = self.draw_sigma(batch.slots, interval, step).to(batch.prompt_embeds.device)
        noise = self.draw_noise(batch, step)
        sums, counts = squared_errors(
            model,
            self.tokens,
            self.conditioning,
            batch.latents,
            noise,
            sigma,
            batch.conditions,
            self.given(batch.slots, step),
            batch.prompt_embeds,
        )
        return Loss(
            weighted_sum=batch.weight * (self.weighting(sigma) * sums).sum(),
            count=round(batch.weight * sum(counts)),
            size=round(batch.weight * sum(clip.numel() for clip in batch.latents)),
            sigma=sigma,
            clip_losses=sums.detach() / torch.tensor(counts, device=sums.device),
        )

    def count(self, batch: MicroBatch, step: int) -> float:
        """How many elements its whole clips add to the window's loss."""
        if not batch.weight:
            return 0.0
        firsts = first_learnt_frames(self.conditioning, self.given(batch.slots, step), batch.latents)
        return float(sum(learnt_elements(batch.latents, firsts)))

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

    def draw_noise(self, batch: MicroBatch, step: int) -> list[torch.Tensor]:
        """float32 [C, F, H, W] of each clip, on its device."""
        return [
            streams.normal(clip.shape, self.seed, "noise", step, slot).to(clip.device)
            for clip, slot in zip(batch.latents, batch.slots, strict=True)
        ]

    def drops_caption(self, slot: int, step: int, share: float) -> bool:
        """Whether the clip trains with the empty caption."""
        return streams.uniform(self.seed, "caption", step, slot) < share


def squared_errors(  # noqa: PLR0913 - all that a prediction depends on
    model: Network,
    tokens: Tokens,
    conditioning: Conditioning,
    latents: Sequence[torch.Tensor],
    noise: Sequence[torch.Tensor],
    sigma: torch.Tensor,
    conditions: Sequence[Condition],
    given: Sequence[bool],
    prompt_embeds: torch.Tensor,
) -> tuple[torch.Tensor, list[int]]:
    """Of each clip the sum of (predicted - velocity)^2 over this rank's tokens of the frames that are to be
    learnt, float32 [clips], and how many such elements the whole clip has.
    """
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
        local=True,
    )
    layout = lay_out([clip.shape[1:] for clip in latents], tokens.patch, None)
    targets = [patchify(velocity(*clip), tokens.patch) for clip in zip(latents, noise, strict=True)]
    firsts = first_learnt_frames(conditioning, given, latents)
    is_learnt = torch.ones(layout.tokens, dtype=torch.bool, device=sigma.device)
    for clip, first, (_, h, w) in zip(is_learnt.split(layout.clip_tokens), firsts, layout.grids, strict=True):
        clip[: first // tokens.patch[0] * h * w] = False
    own = tokens.sequence.split
    errors = (predicted.float() - own(torch.cat(targets))).square().sum(dim=1)
    errors = torch.where(own(is_learnt), errors, 0.0)  # padding is not learnt either
    part = layout.part(*tokens.sequence.bounds(layout.tokens))
    sums = torch.stack([clip.sum() for clip in errors.split(part.clip_tokens)])
    before, after = part.clips.start, len(latents) - part.clips.stop
    return torch.nn.functional.pad(sums, (before, after)), learnt_elements(latents, firsts)


def first_learnt_frames(
    conditioning: Conditioning, given: Sequence[bool], latents: Sequence[torch.Tensor]
) -> list[int]:
    """The first latent frame of each clip that is no image it was given."""
    return [conditioning.first_learnt_frame(*clip) for clip in zip(given, _frames(latents), strict=True)]


def learnt_elements(latents: Sequence[torch.Tensor], firsts: Sequence[int]) -> list[int]:
    """How many elements of each clip are learnt."""
    return [clip[:, first:].numel() for clip, first in zip(latents, firsts, strict=True)]


def _frames(latents: Sequence[torch.Tensor]) -> list[int]:
    return [clip.shape[1] for clip in latents]
