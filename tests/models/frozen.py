"""The frozen networks beside Wan, tiny and random, in folders as diffusers and transformers save them."""

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.models.variants import randomised


def statistics(channels: int = 16) -> dict:
    """Means that are not 0 and deviations that are not 1: a forgotten or inverted normalisation shows."""
    return {
        "latents_mean": np.linspace(-0.8, 1.5, channels).tolist(),
        "latents_std": np.linspace(0.4, 3, channels).tolist(),
    }


def save_frozen(root: Path) -> None:
    """Into `root`: vae (Wan 2.1), vae_22, tokenizer, text_encoder, image_encoder and image_processor."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **statistics())
    randomised(vae, seed=5, std=0.3).save_pretrained(root / "vae")
    vae_22 = AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=48,
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        **statistics(48),
    )
    randomised(vae_22, seed=6, std=0.2).save_pretrained(root / "vae_22")
    letters = [
        (letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,'"
    ]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *letters]
    T5Tokenizer(vocab=vocabulary, extra_ids=0).save_pretrained(root / "tokenizer")
    text = UMT5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    randomised(UMT5EncoderModel(text), seed=5, std=0.2).save_pretrained(root / "text_encoder")
    image = CLIPVisionConfig(  # 16 x 16 patches and the class: 257 tokens, as Wan's
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        patch_size=14,
        image_size=224,
        hidden_act="gelu",
        projection_dim=16,
    )
    randomised(CLIPVisionModel(image), seed=7, std=0.2).save_pretrained(root / "image_encoder")
    CLIPImageProcessorPil().save_pretrained(root / "image_processor")
