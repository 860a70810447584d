"""Every variant of Wan at a size that a test can afford: its architecture, and how one is filled."""

import torch
from torch import nn

_TINY = {
    "patch_size": [1, 2, 2],
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 12,  # 4 + 4 + 4: every axis turns
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
}
_IMAGE = {"image_dim": 24, "added_kv_proj_dim": 48}

ARCHITECTURES = {
    "t2v": _TINY,  # Wan 2.1 T2V, and each expert of Wan 2.2 T2V-A14B
    "i2v": _TINY | _IMAGE | {"in_channels": 36},  # Wan 2.1 I2V
    "flf2v": _TINY | _IMAGE | {"in_channels": 36, "pos_embed_seq_len": 514},
    "i2v-a14b": _TINY | {"in_channels": 36},
    "ti2v": _TINY | {"in_channels": 48, "out_channels": 48},
}
IMAGE_TOKENS = {"i2v": 257, "flf2v": 514}  # of each clip


@torch.no_grad()
def randomised(module: nn.Module, seed: int = 0, std: float = 0.15) -> nn.Module:
    """The module with every parameter drawn anew: diffusers' own start hardly listens to text and images."""
    rng = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=rng) * std)
    return module.eval()
