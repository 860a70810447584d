"""How near a video comes to the training clips."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from wan_ds.data.clips import Clip
from wan_ds.training.comparison import compare, nearest, psnr


def test_psnr_is_the_textbooks_on_pixels_in_0_to_255():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (2, 3, 5, 16, 16))
    mse = np.mean((a.astype(float) - b) ** 2)
    expected = 20 * math.log10(255) - 10 * math.log10(mse)

    def pixels(levels):
        return torch.from_numpy(levels).float() / 127.5 - 1

    assert psnr(pixels(a), pixels(b)) == pytest.approx(expected, rel=1e-6)
    assert psnr(pixels(a), pixels(a)) == math.inf


def test_the_nearest_clip_has_the_least_error_over_its_variance():
    bank = torch.randn(3, 4, 2, 3, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 3.0, 0.5]
    ).view(3, 1, 1, 1, 1)
    latents = torch.stack([bank[1] * 1.1, bank[2] + 0.01])

    index, distances = nearest(latents, bank)

    expected = [
        [np.mean((x - y) ** 2) / np.var(y) for y in bank.double().numpy()] for x in latents.double().numpy()
    ]
    assert index.tolist() == [1, 2]
    np.testing.assert_allclose(distances.numpy(), expected, rtol=1e-5)
    mean = bank[:1].mean() * torch.ones_like(bank[:1])
    assert nearest(mean, bank[:1]).mse_over_variance.item() == pytest.approx(1.0, rel=1e-5)


def test_a_video_is_compared_with_the_clip_of_its_caption_and_with_all_of_them():
    clips = [Clip(f"{name}.mp4", Path(name), caption) for name, caption in (("a", "A  cat"), ("b", "a dog"))]
    rng = torch.Generator().manual_seed(0)
    pixels = {clip.key: torch.rand(3, 5, 8, 8, generator=rng) * 2 - 1 for clip in clips}
    video = pixels["a.mp4"] * 0.9

    found = compare(
        ["A cat", "a bird"],
        torch.stack([video, pixels["b.mp4"]]),
        [video, pixels["b.mp4"]],
        clips,
        read=lambda clip: pixels[clip.key],
        encode_video=lambda pixels: pixels,
    )

    assert torch.equal(found.real[0], pixels["a.mp4"]) and found.real[1] is None
    own, other = found.numbers
    assert (own["clip"], own["nearest"], other["nearest"]) == ("a.mp4", "a.mp4", "b.mp4")
    assert own["psnr"] == psnr(video, pixels["a.mp4"])
    assert own["own_mse_over_variance"] == own["mse_over_variance"] > 0 == other["mse_over_variance"]
    assert "psnr" not in other
    assert compare(["x"], video[None], [video], [], read=None, encode_video=None).numbers == [{}]
