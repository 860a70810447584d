"""Wan's attention over a stream of clips, and the object through which a stream may be spread over ranks.

Beside them stand RoPE and the layers that compute in at least float32.

Letters: T tokens of the stream here, A heads, D width of a head, d = A D the model's width, K clips.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers import transformer_wan
from torch import Tensor, nn

from wan_ds.errors import ConfigError
from wan_ds.models.tokens import Grid

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# query, key, value [T, A, D], and of each clip how many of the queries and how many of the keys are its own
AttendClips = Callable[[Tensor, Tensor, Tensor, Sequence[int], Sequence[int]], Tensor]


def widened(tensor: Tensor) -> Tensor:
    """The tensor in at least float32: itself if it is float32 or float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class TokenSequence(Protocol):
    """How the stream lies over ranks; parallelism puts another one on the model, which never asks.

    Each rank holds one range of equal length. The stream is padded once, at its end, where that does not
    divide it.
    """

    attention: AttendClips  # what computes attention on one rank, cross-attention too

    def bounds(self, tokens: int) -> tuple[int, int]:
        """This rank's range [start, stop) of a stream of ``tokens``; stop may lie beyond its end."""

    def split(self, stream: Tensor) -> Tensor:
        """This rank's range of a whole stream `[tokens, ...]`, padded with zeros."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, clip_tokens: Sequence[int]) -> Tensor:
        """Self-attention `[T, A, D]` of this rank's tokens to all tokens of their own clip.

        ``clip_tokens`` are those of the whole stream.
        """

    def gather(self, stream: Tensor, tokens: int) -> Tensor:
        """The whole stream `[tokens, ...]`, without padding, of all ranks' ranges."""


class WholeSequence:
    """The stream on one rank."""

    def __init__(self, attention: AttendClips | None = None) -> None:
        self.attention = attention or attend_within_clips

    def bounds(self, tokens: int) -> tuple[int, int]:
        return 0, tokens

    def split(self, stream: Tensor) -> Tensor:
        return stream

    def attend(self, query: Tensor, key: Tensor, value: Tensor, clip_tokens: Sequence[int]) -> Tensor:
        return self.attention(query, key, value, clip_tokens, clip_tokens)

    def gather(self, stream: Tensor, tokens: int) -> Tensor:
        return stream[:tokens]


def attend_within_clips(
    query: Tensor, key: Tensor, value: Tensor, query_tokens: Sequence[int], key_tokens: Sequence[int]
) -> Tensor:
    """Softmax attention `[T, A, D]` where each clip's queries see that clip's keys alone: backend `sdpa`.

    ValueError unless both lists are of the same clips, none without tokens, and account for all tokens.

    Clips of equal lengths are one batched call, others go one by one; without a mask every fast kernel fits.
    """
    _refuse_other_tokens(query, key, query_tokens, key_tokens)
    if len(set(query_tokens)) == len(set(key_tokens)) == 1:
        return _attend_batch(query, key, value, len(query_tokens))
    parts = zip(query.split(query_tokens), key.split(key_tokens), value.split(key_tokens), strict=True)
    return torch.cat([_attend_batch(q, k, v, 1) for q, k, v in parts])


def _refuse_other_tokens(
    query: Tensor, key: Tensor, query_tokens: Sequence[int], key_tokens: Sequence[int]
) -> None:
    is_by_clip = len(query_tokens) == len(key_tokens) and min([*query_tokens, *key_tokens], default=0) > 0
    if not is_by_clip or sum(query_tokens) != len(query) or sum(key_tokens) != len(key):
        raise ValueError(
            f"queries of {list(query_tokens)} tokens in {len(query)}, keys of {list(key_tokens)} in"
            f" {len(key)}"
        )


def _attend_batch(query: Tensor, key: Tensor, value: Tensor, clips: int) -> Tensor:
    """Of clips that have equally many queries, and equally many keys."""
    q, k, v = (tensor.unflatten(0, (clips, -1)).transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


def attend_in_one_call(
    query: Tensor, key: Tensor, value: Tensor, query_tokens: Sequence[int], key_tokens: Sequence[int]
) -> Tensor:
    """As `attend_within_clips`, by one kernel for clips of any lengths: backend `varlen`.

    ValueError also unless the tensors are float16 or bfloat16 on a GPU that has such a kernel.
    """
    if why_not := _no_varlen(query):
        raise ValueError(f"attention by varlen: {why_not}; choose auto or sdpa")
    return attend_by(_varlen_kernel(), query, key, value, query_tokens, key_tokens)


def attend_by(  # noqa: PLR0913
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_tokens: Sequence[int],
    key_tokens: Sequence[int],
) -> Tensor:
    """`[T, A, D]` by a kernel that takes query, key, value, where each clip's queries and keys begin, int32
    `[K + 1]`, and how many its longest ones are."""
    _refuse_other_tokens(query, key, query_tokens, key_tokens)
    borders = (_borders(tuple(tokens), query.device) for tokens in (query_tokens, key_tokens))
    return kernel(query, key, value, *borders, max(query_tokens), max(key_tokens))


@lru_cache(maxsize=64)
def _borders(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """Where clips of so many tokens begin, and the stream's end; one transfer for all layers of a model."""
    with torch.inference_mode(False):  # backward of a later step keeps it
        return torch.tensor([0, *accumulate(tokens)], dtype=torch.int32, device=device)


@cache
def _varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's own from 2.10 on, else flash-attn's; None where there is neither."""
    places = {"torch.nn.attention.varlen": "varlen_attn", "flash_attn": "flash_attn_varlen_func"}
    for module, name in places.items():
        with suppress(ImportError):
            return getattr(import_module(module), name)
    return None


@cache
def _no_kernel_on(device: torch.device) -> str | None:
    """Why there is no varlen kernel for half precision on this device; None where there is one."""
    if device.type != "cuda":
        return f"the kernel is for GPUs, and this machine computes on its {device.type.upper()}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8 and torch.version.hip is None:
        return f"the kernel is for GPUs of compute capability 8.0 and later, not {major}.{minor}"
    if _varlen_kernel() is None:
        return "neither torch 2.10 or later nor flash-attn is installed"
    return None


def _no_varlen(query: Tensor) -> str | None:
    """Why these queries `[T, A, D]` cannot go through the varlen kernel; None where they can."""
    if why_not := _no_kernel_on(query.device):
        return why_not
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel takes float16 and bfloat16, not {query.dtype}"
    width = query.shape[-1]
    return f"the kernel takes heads of 8 to 256 by eights, not {width}" if width % 8 or width > 256 else None


def attend_by_the_fastest(
    query: Tensor, key: Tensor, value: Tensor, query_tokens: Sequence[int], key_tokens: Sequence[int]
) -> Tensor:
    """As `attend_within_clips`: by one kernel where that would call one for each clip: backend `auto`."""
    differ = len(set(query_tokens)) > 1 or len(set(key_tokens)) > 1
    backend = attend_in_one_call if differ and _no_varlen(query) is None else attend_within_clips
    return backend(query, key, value, query_tokens, key_tokens)


BACKENDS: dict[str, AttendClips] = {
    "auto": attend_by_the_fastest,
    "sdpa": attend_within_clips,
    "varlen": attend_in_one_call,
}


def refuse_missing_backend(name: str, device: torch.device) -> None:
    """ConfigError if this device has no kernel for `model.attention`; before any weight is read."""
    if name == "varlen" and (why_not := _no_kernel_on(device)):
        raise ConfigError(f"model.attention=varlen: {why_not}; type model.attention=auto, or sdpa")


def rotation(cos: Tensor, sin: Tensor, axes: Sequence[int], grids: Sequence[Grid]) -> Tensor:
    """RoPE's turns `[tokens, 1, D/2]`, complex, of clips whose positions each start at 0.

    ``cos`` and ``sin`` are diffusers' tables `[positions, D]`, every value twice; ``axes`` are the widths
    that frames, rows and columns have in D.
    """
    turns = torch.complex(widened(cos[:, 0::2]), widened(sin[:, 1::2]))
    frames, rows, columns = turns.split([axis // 2 for axis in axes], dim=1)
    of_grid = {}
    for f, h, w in set(grids):
        by_axis = frames[:f, None, None], rows[None, :h, None], columns[None, None, :w]
        of_grid[f, h, w] = torch.cat([axis.expand(f, h, w, -1) for axis in by_axis], dim=-1).flatten(0, 2)
    return torch.cat([of_grid[grid] for grid in grids])[:, None]


def rotate(heads: Tensor, turns: Tensor) -> Tensor:
    """RoPE on `[T, A, D]`: the pairs (2i, 2i + 1) turned by the angles of their token, complex
    `[T, 1, D/2]`, or real `[T, 1, D/2, 2]` for a compiler, which has no complex numbers.

    In complex numbers, one multiplication each way: ten times as fast on a CPU as by halves.
    """
    pairs = heads.unflatten(-1, (-1, 2))
    if turns.is_complex():
        return torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2)
    (first, second), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)


class RotaryTables(transformer_wan.WanRotaryPosEmbed):
    """RoPE's buffers; the module is never called, and its numbers never fall below float32."""

    def axes(self) -> tuple[int, int, int]:
        """The widths that frames, rows and columns have in a head."""
        return self.t_dim, self.h_dim, self.w_dim

    def fresh(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[positions, head width]`, float64 on the CPU.

        From integers, because `deepspeed.zero.Init` makes whatever floats are created inside it bfloat16.
        """
        positions = torch.arange(self.max_seq_len, device="cpu").double()
        angles = []
        for axis in self.axes():
            exponents = torch.arange(0, axis, 2, device="cpu").double() / axis
            angles.append(torch.outer(positions, 1.0 / 10000.0**exponents).repeat_interleave(2, dim=1))
        whole = torch.cat(angles, dim=1)
        return whole.cos(), whole.sin()

    def reset(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """Make the buffers anew, in ``dtype`` or float32 if that is less."""
        cos, sin = self.fresh()
        dtype = torch.promote_types(dtype, torch.float32)
        self.freqs_cos, self.freqs_sin = cos.to(device, dtype), sin.to(device, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryTables":
        before = self.freqs_cos.dtype
        super()._apply(fn, recurse)
        if self.freqs_cos.dtype != before and not self.freqs_cos.is_meta:
            self.reset(self.freqs_cos.device, self.freqs_cos.dtype)
        return self


class RMSNorm(nn.RMSNorm):
    """Over the full width, in and to at least float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(widened(x), self.normalized_shape, widened(self.weight), self.eps)


class LayerNorm(FP32LayerNorm):
    """In at least float32; diffusers' own rounds float64 to float32."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else widened(self.weight)
        bias = None if self.bias is None else widened(self.bias)
        return F.layer_norm(widened(x), self.normalized_shape, weight, bias, self.eps).type_as(x)


class WideLinear(nn.Linear):
    """Computes in at least float32, under autocast and with bfloat16 weights too.

    A class of its own also because DeepSpeed's autocast gathers `nn.Linear`'s weights in bfloat16, going by
    the exact class.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else widened(self.bias)
            return F.linear(widened(x), widened(self.weight), bias)


class SelfAttention(transformer_wan.WanAttention):
    """Every token to the tokens of its clip, with RoPE; on the stream `[T, d]`."""

    def forward(self, hidden_states: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        query, key, value = self.to_q(hidden_states), self.to_k(hidden_states), self.to_v(hidden_states)
        heads = (self.heads, -1)
        query = rotate(self.norm_q(query).unflatten(1, heads), rope).type_as(value)
        key = rotate(self.norm_k(key).unflatten(1, heads), rope).type_as(value)
        attended = attend(query, key, value.unflatten(1, heads)).flatten(1)
        return self.to_out[1](self.to_out[0](attended))


class CrossAttention(transformer_wan.WanAttention):
    """Every token of `[T, d]` to its clip's text `[K, slots, d]`, and apart from that to its image
    `[K, n, d]`."""

    def forward(
        self,
        hidden_states: Tensor,
        text: Tensor,
        image: Tensor | None,
        clip_tokens: Sequence[int],
        attention: AttendClips,
    ) -> Tensor:
        key, value = self.to_k(text), self.to_v(text)
        query = self.norm_q(self.to_q(hidden_states)).type_as(value)
        attended = self._attend(query, self.norm_k(key), value, clip_tokens, attention)
        if image is not None:
            key, value = self.add_k_proj(image), self.add_v_proj(image)
            attended = attended + self._attend(query, self.norm_added_k(key), value, clip_tokens, attention)
        return self.to_out[1](self.to_out[0](attended))

    def _attend(  # noqa: PLR0913
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        clip_tokens: Sequence[int],
        attention: AttendClips,
    ) -> Tensor:
        query, key, value = (
            tensor.type_as(value).unflatten(-1, (self.heads, -1)) for tensor in (query, key, value)
        )
        tokens_of_keys = [key.shape[1]] * len(key)
        return attention(
            query, key.flatten(0, 1), value.flatten(0, 1), clip_tokens, tokens_of_keys
        ).flatten(1)
