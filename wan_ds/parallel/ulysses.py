"""DeepSpeed-Ulysses: a stream of tokens spread over the ranks of one clip, whole for attention.

Everything but self-attention is a matter of single tokens, so each rank keeps a range of them. For attention
the ranks exchange: of A heads each then holds A / sp for all tokens, and the other way round afterwards.

Letters: T tokens of a rank's range, A heads, D width of a head, P ranks (sp).
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention, _dim_zero_all_to_all, register_all_to_all_group
from torch import Tensor

from wan_ds.parallel.mesh import Mesh


class SplitSequence:
    """The stream over the ranks that share a clip; see `wan_ds.models.attention.TokenSequence`.

    Every rank holds ceil(tokens / P) tokens; the padding lies at the stream's end, is cut off before
    attention and comes back from it as zeros.

    Args:
        mesh: where this rank is.
        attention: what computes attention over whole clips on one rank, one of
            `wan_ds.models.attention.BACKENDS`.
        exchange: ``fused`` is DeepSpeed's functional operator, query, key and value in one call; it can be
            kept by selective recomputation. ``deepspeed`` is DeepSpeed's `DistributedAttention`, four calls.

    Raises:
        ValueError: another exchange; heads that sp does not divide, at the first use.
    """

    def __init__(self, mesh: Mesh, attention: Callable[..., Tensor], exchange: str = "fused") -> None:
        exchanges = {"fused": self._attend_fused, "deepspeed": self._attend_deepspeed}
        if exchange not in exchanges:
            raise ValueError(f"exchange={exchange}: choose {' or '.join(exchanges)}")
        self.attention = attention
        self._size, self._rank, self._group = mesh.sp_size, mesh.sp_rank, mesh.sp_group
        self._attend = exchanges[exchange]
        register_all_to_all_group(self._group)

    def bounds(self, tokens: int) -> tuple[int, int]:
        share = -(-tokens // self._size)
        return self._rank * share, (self._rank + 1) * share

    def split(self, stream: Tensor) -> Tensor:
        start, stop = self.bounds(len(stream))
        return _padded(stream[start:stop], stop - start)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, clip_tokens: Sequence[int]) -> Tensor:
        if query.shape[1] % self._size:
            raise ValueError(f"{query.shape[1]} heads over {self._size} ranks: sp_size must divide them")
        return self._attend(query, key, value, clip_tokens)

    def gather(self, stream: Tensor, tokens: int) -> Tensor:
        """Without gradient: a loss belongs on each rank's own tokens.

        ValueError where a gradient would get lost.
        """
        if stream.requires_grad:
            raise ValueError("a gathered stream has no gradient; call the model with local=True for a loss")
        parts = [torch.empty_like(stream) for _ in range(self._size)]
        dist.all_gather(parts, stream.contiguous(), group=self._group)
        return torch.cat(parts)[:tokens]

    def _attend_fused(self, query: Tensor, key: Tensor, value: Tensor, clip_tokens: Sequence[int]) -> Tensor:
        size = self._size
        # [P, T, 3, A/P, D]: by the rank that a part goes to, and received by the rank that it came from, so
        # that nothing has to be moved again before attention.
        sent = torch.stack([x.unflatten(1, (size, -1)).transpose(0, 1) for x in (query, key, value)], dim=2)
        whole = _dim_zero_all_to_all(self._group, sent).flatten(0, 1)  # [P T, 3, A/P, D]
        attended = self._within_clips(*whole.unbind(1), clip_tokens)
        by_tokens = _dim_zero_all_to_all(self._group, attended.unflatten(0, (size, -1)))  # [P, T, A/P, D]
        return by_tokens.transpose(0, 1).flatten(1, 2)

    def _attend_deepspeed(
        self, query: Tensor, key: Tensor, value: Tensor, clip_tokens: Sequence[int]
    ) -> Tensor:
        def whole_clips(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._within_clips(query[0], key[0], value[0], clip_tokens)[None]

        # Batch first, a batch of one stream: heads are scattered, tokens gathered.
        exchange = DistributedAttention(whole_clips, self._group, scatter_idx=2, gather_idx=1)
        return exchange(query[None], key[None], value[None], 0)[0]

    def _within_clips(self, query: Tensor, key: Tensor, value: Tensor, clip_tokens: Sequence[int]) -> Tensor:
        """Attention over whole clips `[P T, A/P, D]`, the padding left out."""
        tokens = sum(clip_tokens)
        attended = self.attention(query[:tokens], key[:tokens], value[:tokens], clip_tokens, clip_tokens)
        return _padded(attended, len(query))


def _padded(stream: Tensor, tokens: int) -> Tensor:
    """The stream with zeros up to so many tokens."""
    missing = tokens - len(stream)
    return torch.cat([stream, stream.new_zeros(missing, *stream.shape[1:])]) if missing else stream
