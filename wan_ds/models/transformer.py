"""Wan's transformer: diffusers' weights, run as one stream of tokens.

Letters: B clips, C channels, F H W latent frames, height and width, T tokens of the stream here, S segments
here, d the model's width, n image tokens of a clip.

Every module with parameters is called exactly once in a forward, whatever the stream holds: ZeRO-3's hooks
hang on the calls, and ranks that make different ones wait for each other for ever.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers import transformer_wan
from diffusers.utils import apply_lora_scale
from torch import Tensor, nn

from wan_ds.models.attention import (
    Attend,
    AttendClips,
    CrossAttention,
    LayerNorm,
    RMSNorm,
    RotaryTables,
    SelfAttention,
    TokenSequence,
    WholeSequence,
    WideLinear,
    rotation,
    widened,
)
from wan_ds.models.tokens import TEXT_LENGTH, Layout, Part, lay_out, patches, unpatchify


class PatchEmbedding(nn.Conv3d):
    """The convolution as what it is, a linear layer: a batch of tokens `[T, C, p_t, p_h, p_w]` to
    `[T, d, 1, 1, 1]`."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        columns = F.linear(x.flatten(1).to(dtype), self.weight.flatten(1), bias)
        return columns[:, :, None, None, None]


def reset_rope(model: "WanTransformer", device: torch.device | str) -> None:
    """Make the RoPE buffers anew on ``device``: for a model built on the meta device or inside zero.Init."""
    model.rope.reset(device, model.rope.freqs_cos.dtype)


def check_rope(model: "WanTransformer") -> None:
    """Raise ValueError unless the RoPE buffers are those of a table made in float64 just now."""
    for name, table in zip(("freqs_cos", "freqs_sin"), model.rope.fresh(), strict=True):
        buffer = getattr(model.rope, name)
        if buffer.is_meta:
            raise ValueError(f"rope.{name} is on the meta device; reset_rope makes it")
        expected = table.to(buffer.device, torch.promote_types(buffer.dtype, torch.float32))
        if buffer.dtype != expected.dtype or not torch.equal(buffer, expected):
            error = (buffer.double() - expected.double()).abs().max().item()
            raise ValueError(
                f"rope.{name} ({buffer.dtype}) is wrong by up to {error:.2g}: zero.Init and casts to bfloat16"
                " ruin it; reset_rope makes it anew"
            )


class ImageEmbedder(transformer_wan.WanImageEmbedding):
    """CLIP's tokens `[B, n, image width]` to `[B, n, d]`; of first and last frame one after the other."""

    def forward(self, image: Tensor) -> Tensor:
        dtype = self.ff.net[2].weight.dtype
        image = image.to(torch.promote_types(image.dtype, dtype))
        if self.pos_embed is not None:
            image = image + self.pos_embed
        return self.norm2(self.ff(self.norm1(image).to(dtype)))


class ConditionEmbedder(transformer_wan.WanTimeTextImageEmbedding):
    """Timesteps, texts and images, all clips at once."""

    def forward(
        self, timestep: Tensor, text: Tensor, image: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """`[S, d]` and `[S, 6, d]` of timesteps `[S]`, both at least float32; texts `[B, 512, d]`; images
        `[B, n, d]`."""
        dtype = torch.promote_types(self.time_embedder.linear_1.weight.dtype, torch.float32)
        time = self.time_embedder(sinusoid(timestep, self.timesteps_proj.num_channels, dtype))
        modulation = self.time_proj(self.act_fn(time)).unflatten(1, (6, -1))
        text = self.text_embedder(text.to(self.text_embedder.linear_1.weight.dtype))
        return time, modulation, text, None if image is None else self.image_embedder(image)


def sinusoid(timestep: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """`[S, channels]`: cosines, then sines, of ``timestep`` `[S]` times 10000^(-i / (channels / 2))."""
    half = channels // 2
    exponent = -math.log(10000) * torch.arange(half, device=timestep.device, dtype=dtype) / half
    angles = timestep[:, None].to(dtype) * exponent.exp()
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def by_segment(
    function: Callable[..., Tensor],
    streams: Sequence[Tensor],
    vectors: Sequence[Tensor],
    segment_tokens: Sequence[int],
) -> Tensor:
    """``function`` of streams `[T, d]` and, broadcast over each segment's tokens, of vectors `[S, d]`.

    No tensor of vectors by token ever exists.
    """
    if min(segment_tokens) == max(segment_tokens):
        views = [stream.unflatten(0, (len(segment_tokens), -1)) for stream in streams]
        return function(*views, *(vector[:, None] for vector in vectors)).flatten(0, 1)
    pieces = [stream.split(segment_tokens) for stream in streams] + [vector.unbind() for vector in vectors]
    return torch.cat([function(*piece) for piece in zip(*pieces, strict=True)])


def _modulate(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return normed * (1 + scale) + shift


def _add_gated(stream: Tensor, added: Tensor, gate: Tensor) -> Tensor:
    return stream + added * gate


Feed = Callable[[nn.Module, Tensor], Tensor]  # calls a block's feed-forward on its input


def _feed(ffn: nn.Module, x: Tensor) -> Tensor:
    return ffn(x)


class WanTransformerBlock(transformer_wan.WanTransformerBlock):
    """Self-attention, cross-attention and feed-forward on the stream; keeps diffusers' name, by which blocks
    are found."""

    def forward(  # noqa: PLR0913
        self,
        hidden_states: Tensor,
        text: Tensor,
        image: Tensor | None,
        modulation: Tensor,
        rope: Tensor,
        part: Part,
        attend: Attend,
        attention: AttendClips,
        feed: Feed,
    ) -> Tensor:
        """`[T, d]` of `[T, d]`, texts `[B, 512, d]`, images `[B, n, d]`, modulation `[S, 6, d]`."""
        segments = part.segment_tokens
        vectors = (self.scale_shift_table + modulation).unbind(1)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = vectors

        x = by_segment(_modulate, [self.norm1(widened(hidden_states))], [shift, scale], segments)
        x = self.attn1(x.type_as(hidden_states), rope, attend)
        x = by_segment(_add_gated, [widened(hidden_states), x], [gate], segments)
        hidden_states = x.type_as(hidden_states)

        x = self.norm2(hidden_states)
        hidden_states = hidden_states + self.attn2(x, text, image, part.clip_tokens, attention)

        x = by_segment(_modulate, [self.norm3(widened(hidden_states))], [ffn_shift, ffn_scale], segments)
        x = feed(self.ffn, x.type_as(hidden_states))
        x = by_segment(_add_gated, [widened(hidden_states), x], [ffn_gate], segments)
        return x.type_as(hidden_states)


_OURS = {
    nn.Conv3d: PatchEmbedding,
    nn.RMSNorm: RMSNorm,
    FP32LayerNorm: LayerNorm,
    transformer_wan.WanRotaryPosEmbed: RotaryTables,
    transformer_wan.WanImageEmbedding: ImageEmbedder,
    transformer_wan.WanTimeTextImageEmbedding: ConditionEmbedder,
    transformer_wan.WanTransformerBlock: WanTransformerBlock,
}


class WanTransformer(WanTransformer3DModel):
    """diffusers' `WanTransformer3DModel`, its weights, names and config, with a forward of ours."""

    _cp_plan = None  # diffusers' own sequence parallelism splits tensors that do not exist here

    @wraps(WanTransformer3DModel.__init__)  # from_pretrained reads the config's keys off the signature
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if (self.config.image_dim is None) != (self.config.added_kv_proj_dim is None):
            raise ValueError(
                f"image_dim={self.config.image_dim}, added_kv_proj_dim={self.config.added_kv_proj_dim}:"
                " a model that attends to images needs both, another one neither"
            )
        for module in self.modules():
            # The class alone is replaced: the parameters, their order and the build's cost stay diffusers'.
            module.__class__ = _OURS.get(type(module), type(module))
        for block in self.blocks:
            block.attn1.__class__, block.attn2.__class__ = SelfAttention, CrossAttention
        embedder = self.condition_embedder
        for layer in (embedder.time_embedder.linear_1, embedder.time_embedder.linear_2, embedder.time_proj):
            layer.__class__ = WideLinear
        self.sequence: TokenSequence = WholeSequence()

    def to_json_string(self) -> str:
        """The config under the name of diffusers' class, so that it opens where this package is missing."""
        config = json.loads(super().to_json_string())
        config["_class_name"] = WanTransformer3DModel.__name__
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

    def __call__(
        self, hidden_states: Tensor | Sequence[Tensor], *args: Any, local: bool = False, **kwargs: Any
    ) -> Any:
        """`forward`, whose tokens become a list of clips again where clips were given, unless ``local``.

        Not in forward, because ZeRO-3 counts a use of the model for each tensor that leaves it: ranks with
        other numbers of clips would not agree on the order of modules.
        """
        result = super().__call__(hidden_states, *args, local=local, **kwargs)
        return result if local or isinstance(hidden_states, Tensor) else self._to_clips(result, hidden_states)

    @apply_lora_scale("attention_kwargs")
    def forward(  # noqa: PLR0913
        self,
        hidden_states: Tensor | Sequence[Tensor],
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,  # noqa: ARG002  the decorator reads it
        *,
        segment_frames: Sequence[Sequence[int]] | None = None,
        local: bool = False,
    ) -> Any:
        """Velocities; of one tensor as diffusers has it, of a sequence of clips as training has it.

        Args:
            hidden_states: `[B, in channels, F, H, W]`, or clips `[in channels, F, H, W]` of any sizes.
            timestep: 1000 sigma: `[B]` or `[B, tokens]` with a tensor, `[segments]` with clips; not rounded.
            encoder_hidden_states: `[B, 512, text width]`.
            encoder_hidden_states_image: `[B, n, image width]`, or `[2B, n/2, image width]` where first and
                last frame's tokens are neighbours; exactly where the model attends to images.
            segment_frames: with clips, how many latent frames each segment of each clip has, such as
                [(21,), (1, 20)]; None is one segment per clip.
            local: with clips, only this rank's range of the stream, padding included.

        Returns:
            diffusers' output of `[B, out channels, F, H, W]`; of clips the stream `[tokens, p_t p_h p_w out
            channels]`, which a call of the model makes a list of clips `[out channels, F, H, W]`, or this
            rank's range of the stream.

        Raises:
            ValueError: inputs that do not fit the model or each other.
        """
        clips = list(hidden_states)
        self._check_clips(clips)
        layout = lay_out([clip.shape[1:] for clip in clips], self.config.patch_size, segment_frames)
        given_tensor = isinstance(hidden_states, Tensor)
        if given_tensor and (segment_frames is not None or local):
            raise ValueError(
                "segment_frames and local are for clips; with a tensor timestep may be [B, tokens]"
            )
        if given_tensor and timestep.ndim == 2:
            layout, timestep = _segments_of_tokens(layout, timestep)
        self._check_stream(layout, timestep, encoder_hidden_states)
        image = self._image_of_clips(encoder_hidden_states_image, len(clips))
        columns = self._run(clips, layout, timestep, encoder_hidden_states, image)
        if local:
            return columns
        columns = self.sequence.gather(columns, layout.tokens)
        if not given_tensor:
            return columns
        sample = torch.stack(self._to_clips(columns, clips))
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _run(
        self, clips: list[Tensor], layout: Layout, timestep: Tensor, text: Tensor, image: Tensor | None
    ) -> Tensor:
        """The body behind both doors: proj_out's columns of this rank's range of the stream."""
        part = layout.part(*self.sequence.bounds(layout.tokens))
        stream = torch.cat([patches(clip, self.config.patch_size) for clip in clips])
        hidden_states = self.patch_embedding(self.sequence.split(stream)).flatten(1)
        turns = rotation(self.rope.freqs_cos, self.rope.freqs_sin, self.rope.axes(), layout.grids)
        rope = self.sequence.split(turns)
        time, modulation, text, image = self.condition_embedder(
            timestep[part.segments], text[part.clips], None if image is None else image[part.clips]
        )

        attend = partial(self.sequence.attend, clip_tokens=layout.clip_tokens)
        arguments = (text, image, modulation, rope, part, attend, self.sequence.attention, _feed)
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(block, hidden_states, *arguments)
            else:
                hidden_states = block(hidden_states, *arguments)

        shift, scale = (self.scale_shift_table + time[:, None]).unbind(1)
        normed = self.norm_out(widened(hidden_states))
        head = by_segment(_modulate, [normed], [shift, scale], part.segment_tokens)
        return self.proj_out(head.type_as(hidden_states))

    def _to_clips(self, columns: Tensor, clips: Sequence[Tensor]) -> list[Tensor]:
        """Velocities `[out channels, F, H, W]` of the sizes of these clips."""
        patch = self.config.patch_size
        layout = lay_out([clip.shape[1:] for clip in clips], patch, None)
        tokens_of_clips = columns.split(layout.clip_tokens)
        return [unpatchify(*clip, patch) for clip in zip(tokens_of_clips, layout.grids, strict=True)]

    def _check_clips(self, clips: list[Tensor]) -> None:
        for clip in clips:
            if clip.ndim != 4 or clip.shape[0] != self.config.in_channels:
                raise ValueError(
                    f"a clip of shape {list(clip.shape)}: this model takes"
                    f" [{self.config.in_channels}, frames, height, width]"
                )

    def _check_stream(self, layout: Layout, timestep: Tensor, text: Tensor) -> None:
        longest = max(map(max, layout.grids))
        if longest > self.config.rope_max_seq_len:
            raise ValueError(
                f"a clip has {longest} tokens along an axis, rope_max_seq_len={self.config.rope_max_seq_len}"
            )
        if timestep.shape != (layout.segments,):
            raise ValueError(
                f"timestep {list(timestep.shape)}: each of the {layout.segments} segments needs one"
            )
        if timestep.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(f"timestep is {timestep.dtype}, which rounds 875 to 876 and more; use float32")
        expected = (len(layout.grids), TEXT_LENGTH, self.config.text_dim)
        if text.shape != expected:
            raise ValueError(
                f"text {list(text.shape)}, not {list(expected)}: Wan attends to all its {TEXT_LENGTH} slots,"
                " zeros after the caption's end among them, so another length is another output"
            )

    def _image_of_clips(self, image: Tensor | None, clips: int) -> Tensor | None:
        """`[B, n, image width]` of what either door takes."""
        width, tokens = self.config.image_dim, self.config.pos_embed_seq_len
        if image is None and width is None:
            return None
        if image is None:
            raise ValueError(f"this model attends to images (image_dim={width}) and was given none")
        if width is None:
            raise ValueError("image embeddings for a model that does not attend to images (image_dim=null)")
        if tokens is not None and image.shape[:2] == (2 * clips, tokens // 2):
            image = image.reshape(clips, tokens, -1)
        expected = (clips, tokens or (image.shape[1] if image.ndim == 3 else "n"), width)
        if image.shape != expected or not image.numel():
            raise ValueError(f"image embeddings {list(image.shape)}, not {list(expected)}")
        return image


def _segments_of_tokens(layout: Layout, timestep: Tensor) -> tuple[Layout, Tensor]:
    """Layout and timesteps of the runs of equal values in a timestep `[B, tokens]`."""
    expected = (len(layout.grids), layout.clip_tokens[0])
    if timestep.shape != expected:
        raise ValueError(f"timestep {list(timestep.shape)}, not {list(expected)}: one for each token")
    runs = [row.unique_consecutive(return_counts=True) for row in timestep]
    counts = tuple(tuple(count.tolist()) for _, count in runs)
    return Layout(layout.grids, counts), torch.cat([values for values, _ in runs])
