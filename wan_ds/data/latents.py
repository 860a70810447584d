"""From a rank's items to what a step trains on; each clip and caption is encoded once where they are kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wan_ds.data.clips import Clip


@dataclass(frozen=True)
class EncodedClip:
    """What stays of a clip's pixels."""

    latents: torch.Tensor  # [C, f, h, w], normalised
    condition: Any = None  # what the model is given beside the text; whoever encodes and trains knows it


class Encoded:
    """Latents and prompt embeddings of a rank's items.

    Args:
        read: a clip's pixels [3, F, H, W], for clips that no item brings.
        encode_clip: pixels [3, F, H, W] -> `EncodedClip`; one clip at a time, so that a clip's latents do not
            depend on its neighbours.
        encode_text: captions -> prompt embeddings [captions, 512, width].
        keep: whether they stay in memory; the loader then reads each clip once.
    """

    def __init__(
        self,
        clips: Sequence[Clip],
        *,
        read: Callable[[Clip], torch.Tensor],
        encode_clip: Callable[[torch.Tensor], EncodedClip],
        encode_text: Callable[[list[str]], torch.Tensor],
        keep: bool,
    ) -> None:
        self.clips = clips
        self.read = read
        self._encode_clip = encode_clip
        self._encode_text = encode_text
        self._keep = keep
        self._encoded: dict[int, EncodedClip] = {}
        self._prompts: dict[str, torch.Tensor] = {}

    def clip(self, index: int, pixels: torch.Tensor | None = None) -> EncodedClip:
        """A clip encoded; from its pixels where they are at hand."""
        if index in self._encoded:
            return self._encoded[index]
        encoded = self._encode_clip(self.read(self.clips[index]) if pixels is None else pixels)
        if self._keep:
            self._encoded[index] = encoded
        return encoded

    def prompt(self, index: int | None) -> torch.Tensor:
        """[512, width] of a clip's caption; of the empty caption, which is always kept, for None."""
        caption = "" if index is None else self.clips[index].caption
        if caption in self._prompts:
            return self._prompts[caption]
        embeds = self._encode_text([caption])[0]
        if self._keep or index is None:
            self._prompts[caption] = embeds
        return embeds
