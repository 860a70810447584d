"""The stream's layout, counted token by token, and patches in the order of proj_out's columns."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from wan_ds.models.tokens import Layout, lay_out, patches, patchify, unpatchify

PATCH = (1, 2, 2)
SIZES = [(3, 4, 6), (1, 2, 2), (2, 8, 4)]  # 18, 1 and 16 tokens
FRAMES = [(1, 2), (1,), (2,)]


def random_clip(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("patch", [PATCH, (2, 2, 4)])
def test_patchify_lists_each_token_by_patch_position_and_then_channel(patch):
    clip = random_clip(3, 4, 4, 8)
    p_t, p_h, p_w = patch
    grid = (4 // p_t, 4 // p_h, 8 // p_w)
    expected = [
        [
            clip[c, f * p_t + t, h * p_h + y, w * p_w + x]
            for t, y, x, c in itertools.product(range(p_t), range(p_h), range(p_w), range(3))
        ]
        for f, h, w in itertools.product(*map(range, grid))
    ]
    columns = patchify(clip, patch)
    assert torch.equal(columns, torch.tensor(expected))
    assert torch.equal(unpatchify(columns, grid, patch), clip)


@pytest.mark.parametrize("patch", [PATCH, (2, 2, 4)])
def test_patches_are_what_a_convolution_with_stride_sees(patch):
    clip, weight = random_clip(3, 4, 4, 8), torch.randn(5, 3, *patch)
    expected = F.conv3d(clip[None], weight, stride=patch)[0].flatten(1).T
    columns = F.conv3d(patches(clip, patch), weight)[:, :, 0, 0, 0]
    torch.testing.assert_close(columns, expected)  # float32 sums in another order


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_the_parts_of_a_padded_stream_hold_every_token_once_and_padding_as_the_last_clip(ranks):
    layout = lay_out(SIZES, PATCH, FRAMES)
    clip_of_token = np.repeat([0, 1, 2], [18, 1, 16])
    segment_of_token = np.repeat([0, 1, 2, 3], [6, 12, 1, 16])
    assert (layout.tokens, layout.segments) == (35, 4)
    length = -(-35 // ranks)
    padding = length * ranks - 35
    clip_of_token = np.pad(clip_of_token, (0, padding), mode="edge")
    segment_of_token = np.pad(segment_of_token, (0, padding), mode="edge")
    for rank in range(ranks):
        start, stop = rank * length, (rank + 1) * length
        part = layout.part(start, stop)
        clips = np.repeat(np.arange(3)[part.clips], part.clip_tokens)
        segments = np.repeat(np.arange(4)[part.segments], part.segment_tokens)
        assert clips.tolist() == clip_of_token[start:stop].tolist()
        assert segments.tolist() == segment_of_token[start:stop].tolist()
        assert min(part.clip_tokens + part.segment_tokens) > 0


def test_without_segments_a_clip_has_one():
    assert lay_out(SIZES, PATCH, None) == lay_out(SIZES, PATCH, [(3,), (1,), (2,)])
    assert lay_out(SIZES[:1], PATCH, [(1, 2)]) == Layout(((3, 2, 3),), ((6, 12),))


@pytest.mark.parametrize(
    ("sizes", "frames", "text"),
    [
        ([], None, "at least one clip"),
        ([(3, 5, 6)], None, r"latents of 3 frames, 5x6: .* multiple of the patch \(1, 2, 2\)"),
        ([(3, 4, 7)], None, r"latents of 3 frames, 4x7"),
        ([(0, 4, 6)], None, r"latents of 0 frames, 4x6"),
        (SIZES, FRAMES[:2], "segment_frames of 2 clips, the stream holds 3"),
        (
            SIZES,
            [(1, 1), (1,), (2,)],
            r"segments of \(1, 1\) latent frames: they must add up to the clip's 3",
        ),
        (SIZES, [(3, 0), (1,), (2,)], r"segments of \(3, 0\) latent frames"),
        (SIZES, [(), (1,), (2,)], r"segments of \(\) latent frames"),
    ],
)
def test_sizes_and_segments_that_do_not_fit_are_refused(sizes, frames, text):
    with pytest.raises(ValueError, match=text):
        lay_out(sizes, PATCH, frames)


def test_segments_are_counted_in_patches_of_frames():
    layout = lay_out([(4, 4, 4)], (2, 2, 2), [(2, 2)])
    assert (layout.grids, layout.segment_tokens) == (((2, 2, 2),), ((4, 4),))
    with pytest.raises(ValueError, match="each a positive multiple of 2"):
        lay_out([(4, 4, 4)], (2, 2, 2), [(1, 3)])
