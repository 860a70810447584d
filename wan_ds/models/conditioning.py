"""What a model is given of a clip beside noise and caption: nothing, its first frame, or its first and last.

Letters: C channels, F H W frames, height, width of the latents; `frames`, `height`, `width` are those of the
pixels. The reference is what diffusers' Wan pipelines feed their transformer (`pipeline_wan.py`,
`pipeline_wan_i2v.py`). One clip at a time, so that clips of any sizes may stand beside each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from wan_ds.errors import DataError

# Frames that share a latent frame in both Wan autoencoders; the clip's first frame has one of its own.
TEMPORAL_STRIDE = 4

EncodeVideo = Callable[[Tensor], Tensor]  # [1, 3, frames, height, width] in [-1, 1] to [1, C, F, H, W]
EncodeImage = Callable[[Tensor], Tensor]  # [3, height, width] in [-1, 1] to [tokens, width of CLIP]


@dataclass(frozen=True)
class Condition:
    """What is computed once of a clip's pixels; None where the model has no such input."""

    condition_latents: Tensor | None = None  # [C, F, H, W], normalised
    frame_mask: Tensor | None = (
        None  # [4, F, H, W], 1 where a frame is given; row i is the i-th frame of four
    )
    image_embeds: Tensor | None = None  # [tokens, width of CLIP]


class ModelInputs(NamedTuple):
    """What the transformer is called with, beside the captions' embeddings."""

    hidden_states: list[Tensor]  # [in_channels, F, H, W] of each clip
    timestep: Tensor  # [segments], as many as `segment_frames` has numbers
    image_embeds: Tensor | None  # [clips, tokens, width of CLIP]
    segment_frames: list[tuple[int, ...]]  # for each clip the latent frames that share a timestep


class Conditioning(Protocol):
    """The four classes below, and any other that stands beside them."""

    images: int  # how many a sampler needs
    images_optional: bool  # whether it may also go without
    expand_timesteps: bool  # the setting of diffusers' pipelines: every token has a timestep of its own
    given_share: float  # of the clips train with their images given
    least_frames: int  # of a clip's pixels

    @staticmethod
    def in_channels(out_channels: int) -> int:
        """What the transformer takes beside latents of `out_channels`."""

    def condition(
        self, pixels: Tensor, encode_video: EncodeVideo, encode_image: EncodeImage | None
    ) -> Condition:
        """Of a clip's `pixels` `[3, frames, height, width]` in [-1, 1]; no CLIP: `encode_image` None."""

    def inputs(
        self,
        noised: Sequence[Tensor],
        timestep: Tensor,
        *,
        latents: Sequence[Tensor],
        conditions: Sequence[Condition],
        given: Sequence[bool],
    ) -> ModelInputs:
        """Of `noised` and `latents` `[C, F, H, W]` each, `timestep` float32 `[clips]`."""

    def first_learnt_frame(self, given: bool, frames: int) -> int:
        """Of a clip of so many latent frames: those before this one are not in the loss."""


class TextToVideo:
    """The caption alone. No clip's images are given, whatever `given` says."""

    images = 0
    images_optional = False
    expand_timesteps = False
    given_share = 0.0
    least_frames = 1

    @staticmethod
    def in_channels(out_channels: int) -> int:
        return out_channels

    def condition(
        self,
        pixels: Tensor,  # noqa: ARG002
        encode_video: EncodeVideo,  # noqa: ARG002
        encode_image: EncodeImage | None,  # noqa: ARG002
    ) -> Condition:
        return Condition()

    def inputs(
        self,
        noised: Sequence[Tensor],
        timestep: Tensor,
        *,
        latents: Sequence[Tensor],  # noqa: ARG002
        conditions: Sequence[Condition],  # noqa: ARG002
        given: Sequence[bool],  # noqa: ARG002
    ) -> ModelInputs:
        return ModelInputs(list(noised), timestep, None, _whole(noised))

    def first_learnt_frame(self, given: bool, frames: int) -> int:  # noqa: ARG002
        return 0


class _ImagesBesideNoise:
    """Mask and condition latents beside the noise: `[noised | mask 4 | condition latents]` by channel.

    The images of every clip are given, whatever `given` says, and every latent frame is in the loss.
    """

    images_optional = False
    expand_timesteps = False
    given_share = 1.0
    least_frames = 1

    @staticmethod
    def in_channels(out_channels: int) -> int:
        return out_channels + TEMPORAL_STRIDE + out_channels

    def inputs(
        self,
        noised: Sequence[Tensor],
        timestep: Tensor,
        *,
        latents: Sequence[Tensor],  # noqa: ARG002
        conditions: Sequence[Condition],
        given: Sequence[bool],  # noqa: ARG002
    ) -> ModelInputs:
        hidden_states = [
            torch.cat([clip, condition.frame_mask.to(clip), condition.condition_latents.to(clip)])
            for clip, condition in zip(noised, conditions, strict=True)
        ]
        embeds = [condition.image_embeds for condition in conditions]
        has_clip = any(embed is not None for embed in embeds)
        return ModelInputs(hidden_states, timestep, torch.stack(embeds) if has_clip else None, _whole(noised))

    def first_learnt_frame(self, given: bool, frames: int) -> int:  # noqa: ARG002
        return 0


class ImageToVideo(_ImagesBesideNoise):
    """The first frame: Wan 2.1 I2V, which also sees it through CLIP, and Wan 2.2 I2V-A14B, which does not."""

    images = 1

    def condition(
        self, pixels: Tensor, encode_video: EncodeVideo, encode_image: EncodeImage | None
    ) -> Condition:
        return _condition(pixels, [0], encode_video, encode_image)


class FirstLastFrame(_ImagesBesideNoise):
    """The first and the last frame: Wan 2.1 FLF2V. `DataError` for a clip of one frame."""

    images = 2
    least_frames = TEMPORAL_STRIDE + 1  # the last frame beside the first

    def condition(
        self, pixels: Tensor, encode_video: EncodeVideo, encode_image: EncodeImage | None
    ) -> Condition:
        frames = pixels.shape[1]
        if frames == 1:
            raise DataError(
                "a clip of 1 frame has no last frame beside its first; this model trains on"
                f" {self.least_frames} frames or more"
            )
        return _condition(pixels, [0, frames - 1], encode_video, encode_image)


class TextImageToVideo:
    """Wan 2.2 TI2V-5B: of a share of the clips the first frame is given, the rest are text to video.

    The first latent frame, which is of the first frame alone, is then put in clean after noising, at timestep
    0, and is not in the loss. A clip of one latent frame would have nothing left to learn: there it is never
    given, whatever `given` says. `ValueError` for an `image_share` outside 0 to 1.
    """

    images = 1
    images_optional = True
    expand_timesteps = True
    least_frames = 1

    @staticmethod
    def in_channels(out_channels: int) -> int:
        return out_channels

    def __init__(self, image_share: float) -> None:
        if not 0 <= image_share <= 1:  # so that NaN is refused too
            raise ValueError(
                f"model.conditioning.image_share={image_share}: must be from 0, where every clip is text to"
                " video, to 1, where every clip's first frame is given"
            )
        self.given_share = float(image_share)

    def condition(
        self,
        pixels: Tensor,  # noqa: ARG002
        encode_video: EncodeVideo,  # noqa: ARG002
        encode_image: EncodeImage | None,  # noqa: ARG002
    ) -> Condition:
        return Condition()  # the clip's own latents have it all

    def inputs(
        self,
        noised: Sequence[Tensor],
        timestep: Tensor,
        *,
        latents: Sequence[Tensor],
        conditions: Sequence[Condition],  # noqa: ARG002
        given: Sequence[bool],
    ) -> ModelInputs:
        hidden_states, times, segment_frames = [], [], []
        for clip, clean, time, image in zip(noised, latents, timestep.split(1), given, strict=True):
            frames = clip.shape[1]
            if first := self.first_learnt_frame(image, frames):
                clip = torch.cat([clean[:, :first].to(clip), clip[:, first:]], dim=1)
                times += [torch.zeros_like(time), time]
                segment_frames.append((first, frames - first))
            else:
                times.append(time)
                segment_frames.append((frames,))
            hidden_states.append(clip)
        return ModelInputs(hidden_states, torch.cat(times), None, segment_frames)

    def first_learnt_frame(self, given: bool, frames: int) -> int:
        return int(given and frames != 1)


def frame_mask(frames: int, given: Sequence[int], height: int, width: int) -> Tensor:
    """float32 `[4, F, height, width]` of latent size: 1 where one of the `given` of a clip's frames stands.

    The first latent frame is of one frame only, which fills all four of its rows; the last frame of a clip
    is the fourth of its latent frame. `ValueError` unless there are 4 n + 1 frames.
    """
    if frames % TEMPORAL_STRIDE != 1:
        raise ValueError(f"{frames} frames do not fill latent frames: there must be {TEMPORAL_STRIDE} n + 1")
    known = torch.zeros(frames)
    known[list(given)] = 1
    rows = torch.cat([known[:1].expand(TEMPORAL_STRIDE - 1), known]).view(-1, TEMPORAL_STRIDE).T
    return rows[:, :, None, None].repeat(1, 1, height, width)


def without_others(pixels: Tensor, given: Sequence[int]) -> Tensor:
    """`pixels` `[3, frames, height, width]` of the `given` frames, all others mid grey, 0."""
    seen = torch.zeros_like(pixels)
    seen[:, list(given)] = pixels[:, list(given)]
    return seen


def _condition(
    pixels: Tensor, given: Sequence[int], encode_video: EncodeVideo, encode_image: EncodeImage | None
) -> Condition:
    # The grey frames are encoded as well: an image reaches latent frames far behind its own, so that
    # the latents of the image alone, followed by zeros, are something that Wan has never seen.
    latents = encode_video(without_others(pixels, given)[None])[0]
    mask = frame_mask(pixels.shape[1], given, *latents.shape[2:])
    embeds = None if encode_image is None else torch.cat([encode_image(pixels[:, frame]) for frame in given])
    return Condition(latents, mask.to(latents), embeds)


def _whole(clips: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [(clip.shape[1],) for clip in clips]
