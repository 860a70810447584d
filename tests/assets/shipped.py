"""How the files that the package ships are measured."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

import wan_ds.assets

ASSETS = Path(wan_ds.assets.__file__).parent


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _statistics(vae: AutoencoderKLWan) -> tuple[Tensor, Tensor]:
    shape = (1, -1, 1, 1, 1)
    return torch.tensor(vae.config.latents_mean).view(shape), torch.tensor(vae.config.latents_std).view(shape)


@torch.no_grad()
def normalised_latents(vae: AutoencoderKLWan, clips: Tensor) -> Tensor:
    """The latents of `clips` as a transformer sees them."""
    mean, std = _statistics(vae)
    return (torch.cat([vae.encode(clip[None]).latent_dist.mode() for clip in clips]) - mean) / std


@torch.no_grad()
def decoded_psnr(vae: AutoencoderKLWan, normalised: Tensor, clips: Tensor) -> float:
    """Mean over the clips, in dB, of pixels in 0..255."""
    mean, std = _statistics(vae)
    decoded = vae.decode(normalised * std + mean).sample
    error = (decoded.double() - clips.double()) * 127.5
    per_clip = 20 * torch.log10(255 / error.square().flatten(1).mean(dim=1).sqrt())
    return per_clip.mean().item()
