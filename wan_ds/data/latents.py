"""From a rank's items to what a step trains on; each clip and caption is encoded once where they are kept."""

from collections.abc import Callable, Sequence

import torch

from wan_ds.data.clips import Clip


class Encoded:
    """Latents and prompt embeddings of a rank's items.

    Args:
        read: a clip's pixels [3, F, H, W], for clips that no item brings.
        encode_video: pixels [1, 3, F, H, W] -> latents [1, C, f, h, w]; one clip at a time, so that a clip's
            latents do not depend on its neighbours.
        encode_text: captions -> prompt embeddings [captions, 512, width].
        keep: whether they stay in memory; the loader then reads each clip once.
    """

    def __init__(
        self,
        clips: Sequence[Clip],
        *,
        read: Callable[[Clip], torch.Tensor],
        encode_video: Callable[[torch.Tensor], torch.Tensor],
        encode_text: Callable[[list[str]], torch.Tensor],
        keep: bool,
    ) -> None:
        self.clips = clips
        self._read = read
        self._encode_video = encode_video
        self._encode_text = encode_text
        self._keep = keep
        self._latents: dict[int, torch.Tensor] = {}
        self._prompts: dict[str, torch.Tensor] = {}

    def latents(self, index: int, pixels: torch.Tensor | None = None) -> torch.Tensor:
        """[C, f, h, w] of a clip, normalised; from its pixels where they are at hand."""
        if index in self._latents:
            return self._latents[index]
        pixels = self._read(self.clips[index]) if pixels is None else pixels
        latents = self._encode_video(pixels[None])[0]
        if self._keep:
            self._latents[index] = latents
        return latents

    def prompt(self, index: int | None) -> torch.Tensor:
        """[512, width] of a clip's caption; of the empty caption, which is always kept, for None."""
        caption = "" if index is None else self.clips[index].caption
        if caption in self._prompts:
            return self._prompts[caption]
        embeds = self._encode_text([caption])[0]
        if self._keep or index is None:
            self._prompts[caption] = embeds
        return embeds
