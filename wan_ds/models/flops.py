"""Floating-point operations of Wan's transformer, from its config and the sizes of what it is given.

A multiplication and the addition of its result are two operations. Matrix products and attention's two are
counted, as `torch.utils.flop_counter` counts them; norms, activations, RoPE and modulation, which are no
matrix products, are not.

Letters: T tokens of a clip, n its image tokens, d the model's width. ``config`` is a transformer's config in
diffusers' words; ``grids`` are (frames, rows, columns) of each clip in tokens; ``image_tokens`` are those of
each clip, 0 for a model that sees no image.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from wan_ds.models.tokens import TEXT_LENGTH, Grid


def forward_flops(
    config: Mapping[str, Any], grids: Sequence[Grid], image_tokens: int = 0, *, segments: int | None = None
) -> int:
    """Of one forward of all these clips.

    ``segments`` is how many timesteps the stream has, one for each clip by default. Raises ValueError for
    image tokens with a model that attends to none, or none with one that does.
    """
    width = _width(config)
    patch = config["in_channels"] * math.prod(config["patch_size"])
    velocity = config["out_channels"] * math.prod(config["patch_size"])
    tokens = sum(map(math.prod, grids))
    ends = tokens * width * (patch + velocity)
    time = (len(grids) if segments is None else segments) * width * (config["freq_dim"] + 7 * width)
    text = len(grids) * TEXT_LENGTH * width * (config["text_dim"] + width)
    image = 0
    if _sees_images(config, image_tokens):
        image = len(grids) * image_tokens * config["image_dim"] * (config["image_dim"] + width)
    return 2 * (ends + time + text + image) + blocks_flops(config, grids, image_tokens)


def blocks_flops(config: Mapping[str, Any], grids: Sequence[Grid], image_tokens: int = 0) -> int:
    """Of the blocks in a forward, without the embeddings before them and the head behind."""
    width = _width(config)
    projections = 6 * width * width  # q, k, v, out of self-attention; q, out of cross-attention
    sides = 2 * TEXT_LENGTH * width * width  # k and v of the text
    if _sees_images(config, image_tokens):
        sides += 2 * image_tokens * config["added_kv_proj_dim"] * width
    of_tokens = 0
    for tokens in map(math.prod, grids):
        cross = 2 * (TEXT_LENGTH + image_tokens) * width
        of_tokens += tokens * (projections + cross + 2 * width * config["ffn_dim"])
    blocks = 2 * config["num_layers"] * (of_tokens + len(grids) * sides)
    return blocks + attention_flops(config, grids)


def attention_flops(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    """Of self-attention's two products in a forward: queries by keys, weights by values."""
    pairs = sum(math.prod(grid) ** 2 for grid in grids)
    return 4 * config["num_layers"] * _width(config) * pairs


def training_flops(
    config: Mapping[str, Any],
    grids: Sequence[Grid],
    image_tokens: int = 0,
    *,
    segments: int | None = None,
    recompute: str = "none",
) -> int:
    """Of forward and backward, which takes each product twice; an optimizer's step is not counted.

    With ``recompute`` "full" the blocks' forward comes once more, with "selective" all of it but
    self-attention; "none" is what a rate of useful work counts, whatever was recomputed. Kernels that save
    memory inside attention's backward, by its first product once more, are not charged for it.
    """
    again = {"none": 0, "full": 1, "selective": 1}[recompute] * blocks_flops(config, grids, image_tokens)
    if recompute == "selective":
        again -= attention_flops(config, grids)
    return 3 * forward_flops(config, grids, image_tokens, segments=segments) + again


def _width(config: Mapping[str, Any]) -> int:
    return config["num_attention_heads"] * config["attention_head_dim"]


def _sees_images(config: Mapping[str, Any], image_tokens: int) -> bool:
    width = config.get("image_dim")
    if (width is None) != (image_tokens == 0):
        raise ValueError(f"{image_tokens} image tokens of each clip for a model with image_dim={width}")
    return width is not None
