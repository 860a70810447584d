"""Make what the tiny twins of Wan need beside the quickstart's encoders: Wan 2.2's kind of VAE, and a CLIP.

    python -m wan_ds.assets.make_tiny [target folder]

The VAE is trained here as the quickstart's is, on one CPU core; the CLIP keeps its random weights.
"""

import argparse
import logging
from pathlib import Path

import torch
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from wan_ds.assets.make_quickstart import SEED, Stage, make_vae

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "tiny"

# The layout of the 5B's VAE (4 x 16 x 16, patches of 2 x 2 first) with few channels; z_dim is Wan's own, so
# that the transformer's channels are too.
VAE_CONFIG = {
    "base_dim": 12,
    "decoder_base_dim": 10,
    "z_dim": 48,
    "num_res_blocks": 1,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
# Whole pictures of the quickstart's size: a crop of 32 x 48 would be 2 x 3 latents, all of them at an edge.
STAGES = (
    Stage(1500, 8, 1, 64, 96, 2e-3, 2e-3, 0.7, 0.3),
    Stage(420, 2, 9, 64, 96, 1.5e-3, 3e-5, 0.85, 0.2),
)

# As ViT-H/14 sees: 16 x 16 patches and the class token, 257 tokens; the last layer's output is not used.
CLIP_CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 224,
    "hidden_act": "gelu",
    "projection_dim": 32,
}


def make_image_encoder() -> CLIPVisionModel:
    """Make a CLIP vision model whose weights are random for good."""
    torch.manual_seed(SEED)
    return CLIPVisionModel(CLIPVisionConfig(**CLIP_CONFIG)).eval()


def main() -> None:
    """Make the three folders in the target."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--image-only", action="store_true", help="leave the VAE that is there")
    parser.add_argument("--stages-done", type=int, default=0, help="go on from the VAE that is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the order of sums, and so the result, depends on it

    CLIPImageProcessor().save_pretrained(arguments.target / "image_processor")
    make_image_encoder().to(torch.bfloat16).save_pretrained(arguments.target / "image_encoder")
    if not arguments.image_only:
        make_vae(arguments.target / "vae_48", VAE_CONFIG, STAGES, arguments.stages_done)


if __name__ == "__main__":
    main()
