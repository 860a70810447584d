"""The straight path from a clip to noise, and the one time convention of this code base.

sigma in [0, 1] is the noise level: 0 is the clip's latents, 1 is pure noise. The network learns the velocity
noise - latents and is told timestep = 1000 sigma in float32.
Rectified flow: Liu et al. 2022; Lipman et al. 2022.
"""

import torch

TIMESTEPS = 1000  # num_train_timesteps of every Wan scheduler


def mix(latents: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor | float) -> torch.Tensor:
    """``noised`` = (1 - sigma) latents + sigma noise; ``sigma`` broadcasts against the latents."""
    return (1 - sigma) * latents + sigma * noise


def velocity(latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """d noised / d sigma, what the network learns to predict."""
    return noise - latents


def latents_from(noised: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor | float) -> torch.Tensor:
    """The clip's end of the path through ``noised`` with this velocity."""
    return noised - sigma * velocity


def noise_from(noised: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor | float) -> torch.Tensor:
    """The noise end of the path through ``noised`` with this velocity."""
    return noised + (1 - sigma) * velocity


def timestep(sigma: torch.Tensor) -> torch.Tensor:
    """What the network is told: 1000 sigma, float32, continuous. Never bf16, whose spacing here is 4."""
    return sigma.to(torch.float32) * TIMESTEPS


def shifted(sigma: torch.Tensor, shift: float) -> torch.Tensor:
    """Warp towards noise: shift sigma / (1 + (shift - 1) sigma) (Esser et al. 2024, eq. 23)."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def unshifted(sigma: torch.Tensor, shift: float) -> torch.Tensor:
    """The inverse of `shifted`."""
    return sigma / (shift - (shift - 1) * sigma)
