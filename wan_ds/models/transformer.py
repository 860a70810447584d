"""Wan's transformer: diffusers' module and weights behind a door that takes clips."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import WanTransformer3DModel


class WanTransformer(WanTransformer3DModel):
    """diffusers' `WanTransformer3DModel` that also takes a list of clips.

    There is one ``forward`` because ZeRO-3's hooks hang on ``__call__``. Given a tensor it is diffusers' own
    (what its pipelines call). Given a sequence of clips it is ours:

    Args:
        hidden_states: clips' noised latents, each [C, F, H, W], all of one size.
        timestep: float32 [clips], 1000 sigma.
        encoder_hidden_states: prompt embeddings [clips, 512, text width].

    Returns:
        The clips' velocities, each [C, F, H, W].
    """

    def forward(
        self,
        hidden_states: torch.Tensor | Sequence[torch.Tensor],
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if isinstance(hidden_states, torch.Tensor):
            return super().forward(hidden_states, timestep, encoder_hidden_states, *args, **kwargs)
        if len({clip.shape for clip in hidden_states}) != 1:
            sizes = sorted({tuple(clip.shape) for clip in hidden_states})
            raise ValueError(f"the clips of one micro-batch must have one size, not {sizes}")
        (velocities,) = super().forward(
            torch.stack(tuple(hidden_states)), timestep, encoder_hidden_states, return_dict=False
        )
        return velocities.unbind()
