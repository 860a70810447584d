"""A batch as one stream of tokens: where each clip and each segment lies in it.

Letters: C channels, F H W latent frames, height and width; p_t p_h p_w the patch; f h w the grid of a clip in
tokens, F/p_t H/p_h W/p_w. Tokens are in row-major order of (f, h, w). A segment is a run of a clip's frames
that share a timestep.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

# Wan was trained with exactly this many text slots, zeros after the caption's end, and attends to all.
TEXT_LENGTH = 512

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Part:
    """What a range of the stream holds: the clips and segments that it touches, and its tokens of each."""

    first_clip: int
    clip_tokens: tuple[int, ...]
    first_segment: int
    segment_tokens: tuple[int, ...]

    @property
    def clips(self) -> slice:
        return slice(self.first_clip, self.first_clip + len(self.clip_tokens))

    @property
    def segments(self) -> slice:
        return slice(self.first_segment, self.first_segment + len(self.segment_tokens))


@dataclass(frozen=True)
class Layout:
    """The stream's clips, one after the other."""

    grids: tuple[Grid, ...]
    segment_tokens: tuple[tuple[int, ...], ...]  # of each clip's segments

    @property
    def clip_tokens(self) -> tuple[int, ...]:
        return tuple(f * h * w for f, h, w in self.grids)

    @property
    def tokens(self) -> int:
        return sum(self.clip_tokens)

    @property
    def segments(self) -> int:
        return sum(map(len, self.segment_tokens))

    def part(self, start: int, stop: int) -> Part:
        """The range [start, stop), which may be padded beyond the stream's end.

        Padding belongs to the last clip and its last segment, so that a range of padding alone still passes
        through every part of the network.
        """
        segments = [tokens for clip in self.segment_tokens for tokens in clip]
        return Part(*_shares(self.clip_tokens, start, stop), *_shares(segments, start, stop))


def _shares(lengths: Sequence[int], start: int, stop: int) -> tuple[int, tuple[int, ...]]:
    """Of consecutive pieces of these lengths, the last without end, the first that [start, stop) touches and
    how much it takes of each."""
    ends = [*accumulate(lengths[:-1]), stop]
    shares = [min(end, stop) - max(begin, start) for begin, end in pairwise([0, *ends])]
    touched = [index for index, share in enumerate(shares) if share > 0]
    return touched[0], tuple(shares[index] for index in touched)


def lay_out(
    sizes: Sequence[Sequence[int]], patch: Sequence[int], segment_frames: Sequence[Sequence[int]] | None
) -> Layout:
    """The layout of clips of these sizes (F, H, W), each cut into segments of so many latent frames.

    Without ``segment_frames`` every clip is one segment. Raises ValueError for a size that is no multiple of
    the patch (diffusers cuts the rest off) and for segments that do not add up to their clip.
    """
    if not sizes:
        raise ValueError("a stream needs at least one clip")
    grids = tuple(_grid(size, patch) for size in sizes)
    if segment_frames is None:
        segment_frames = [(size[0],) for size in sizes]
    if len(segment_frames) != len(sizes):
        raise ValueError(f"segment_frames of {len(segment_frames)} clips, the stream holds {len(sizes)}")
    segments = []
    for frames, size, (_, h, w) in zip(segment_frames, sizes, grids, strict=True):
        if sum(frames) != size[0] or min(frames) < 1 or any(count % patch[0] for count in frames):
            raise ValueError(
                f"segments of {tuple(frames)} latent frames: they must add up to the clip's {size[0]},"
                f" each a positive multiple of {patch[0]}"
            )
        segments.append(tuple(count // patch[0] * h * w for count in frames))
    return Layout(grids, tuple(segments))


def _grid(size: Sequence[int], patch: Sequence[int]) -> Grid:
    if any(length < 1 or length % step for length, step in zip(size, patch, strict=True)):
        raise ValueError(
            f"latents of {size[0]} frames, {size[1]}x{size[2]}: each must be a positive multiple of the patch"
            f" {tuple(patch)}, else the output would be smaller than the input"
        )
    f, h, w = (length // step for length, step in zip(size, patch, strict=True))
    return f, h, w


def patches(clip: Tensor, patch: Sequence[int]) -> Tensor:
    """`[tokens, C, p_t, p_h, p_w]` of a clip `[C, F, H, W]`: what patch_embedding takes."""
    return _blocks(clip, patch).permute(1, 3, 5, 0, 2, 4, 6).flatten(0, 2)


def patchify(clip: Tensor, patch: Sequence[int]) -> Tensor:
    """`[tokens, p_t p_h p_w C]` of a clip `[C, F, H, W]`, in the order of proj_out's columns: C runs
    fastest."""
    return _blocks(clip, patch).permute(1, 3, 5, 2, 4, 6, 0).flatten(3).flatten(0, 2)


def unpatchify(tokens: Tensor, grid: Grid, patch: Sequence[int]) -> Tensor:
    """The clip `[C, F, H, W]` whose `patchify` is ``tokens``."""
    blocks = tokens.unflatten(1, (*patch, -1)).unflatten(0, grid)
    return blocks.permute(6, 0, 3, 1, 4, 2, 5).flatten(5, 6).flatten(3, 4).flatten(1, 2)


def _blocks(clip: Tensor, patch: Sequence[int]) -> Tensor:
    """`[C, f, p_t, h, p_h, w, p_w]`, a view."""
    p_t, p_h, p_w = patch
    return clip.unflatten(3, (-1, p_w)).unflatten(2, (-1, p_h)).unflatten(1, (-1, p_t))
