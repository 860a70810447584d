"""Weights of the squared error: each a function w(sigma) of the clip's own noise level."""

import torch

from wan_ds.flow.path import TIMESTEPS


def constant(sigma: torch.Tensor) -> torch.Tensor:
    """1 everywhere."""
    return torch.ones_like(sigma)


def _bump(timestep: torch.Tensor) -> torch.Tensor:
    return torch.exp(-2 * ((timestep - TIMESTEPS / 2) / TIMESTEPS) ** 2)


_GRID = _bump(torch.arange(1, TIMESTEPS + 1, dtype=torch.float64))
_FLOOR = _GRID.min().item()
_MEAN = (_GRID - _FLOOR).mean().item()


def bell(sigma: torch.Tensor) -> torch.Tensor:
    """A bump around sigma 0.5 that falls to 0 at both ends: exp(-2 (sigma - 0.5)^2) less its minimum.

    Its mean is 1 and its maximum 1.580 over the fixed grid of timesteps 1 ... 1000; the weighting of
    DiffSynth-Studio's Wan trainer on an unshifted grid. It never depends on the other clips of a batch.
    """
    return ((_bump(sigma.double() * TIMESTEPS) - _FLOOR) / _MEAN).clamp_min(0).to(sigma.dtype)


def min_snr(sigma: torch.Tensor, gamma: float = 5.0) -> torch.Tensor:
    """min(SNR, gamma) on the error of the predicted latents, as a weight on that of the velocity.

    SNR = ((1 - sigma) / sigma)^2, and the latents' error is sigma times the velocity's, so the weight is
    min((1 - sigma)^2, gamma sigma^2): 0 at both ends, highest at sigma = 1 / (1 + sqrt(gamma)).
    Hang et al. 2023, section 3.4.
    """
    return torch.minimum((1 - sigma).square(), gamma * sigma.square())
