"""The shipped encoders of the tiny twins: Wan 2.2's kind of VAE, and a CLIP of Wan 2.1's image to video."""

import filecmp

import pytest
import safetensors.torch
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionModel

from tests.assets.shipped import ASSETS, decoded_psnr, folder_bytes, normalised_latents
from wan_ds.assets import make_tiny

TINY = ASSETS / "tiny"
CHANNELS = 48


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    return AutoencoderKLWan.from_pretrained(TINY / "vae_48", torch_dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def normalised(vae, clips) -> torch.Tensor:
    return normalised_latents(vae, clips)


def test_the_vae_has_the_layout_of_wan_2_2(vae, normalised):
    assert vae.config.is_residual
    assert (vae.config.in_channels, vae.config.out_channels, vae.config.patch_size) == (12, 12, 2)
    assert (vae.config.scale_factor_temporal, vae.config.scale_factor_spatial) == (4, 16)
    assert vae.config.temperal_downsample == [False, True, True]
    assert normalised.shape == (3, CHANNELS, 3, 4, 6)


def test_what_is_shipped_is_small_on_disk_and_in_bf16():
    assert folder_bytes(TINY / "vae_48") <= 3_000_000
    assert folder_bytes(TINY / "image_encoder") + folder_bytes(TINY / "image_processor") <= 120_000
    for file in TINY.rglob("*.safetensors"):
        assert {tensor.dtype for tensor in safetensors.torch.load_file(file).values()} == {torch.bfloat16}


def test_no_config_names_the_folder_it_was_made_in():
    configs = list(TINY.rglob("*.json"))
    assert len(configs) == 3
    assert not [config for config in configs if "_name_or_path" in config.read_text()]


def test_the_clips_survive_the_vae(vae, normalised, clips):
    assert decoded_psnr(vae, normalised, clips) >= 28


def test_slightly_wrong_latents_still_decode_to_the_clips(vae, normalised, clips):
    noise = torch.randn(normalised.shape, generator=torch.Generator().manual_seed(0))
    assert decoded_psnr(vae, normalised + 0.15**0.5 * noise, clips) >= 27


def test_normalised_latents_have_mean_zero_and_deviation_one(normalised):
    # The statistics are stored with four decimals.
    per_channel = normalised.transpose(0, 1).flatten(1)
    torch.testing.assert_close(per_channel.mean(dim=1), torch.zeros(CHANNELS), atol=1e-2, rtol=0)
    torch.testing.assert_close(per_channel.std(dim=1), torch.ones(CHANNELS), atol=1e-2, rtol=0)


def test_the_mean_and_deviation_of_a_latent_are_worth_normalising(vae):
    assert all(0.1 < std < 10 for std in vae.config.latents_std)
    assert max(map(abs, vae.config.latents_mean)) > 0.05  # else nobody would notice that it was left out


def test_the_image_encoder_gives_257_tokens_before_its_last_layer(clips):
    processor = CLIPImageProcessor.from_pretrained(TINY / "image_processor")
    encoder = CLIPVisionModel.from_pretrained(TINY / "image_encoder", dtype=torch.float32)
    assert not encoder.training
    frames = [
        Image.fromarray(((clip[:, 0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()) for clip in clips
    ]
    pixels = processor(frames, return_tensors="pt").pixel_values
    assert pixels.shape == (3, 3, 224, 224)
    with torch.no_grad():
        states = encoder(pixels, output_hidden_states=True).hidden_states
    assert len(states) == 4  # the embeddings and three layers
    features = states[-2]
    assert features.shape == (3, 257, 32)
    assert (features - states[-1]).square().mean().sqrt() > 0.1
    # Each image has features of its own, and so has each place in it.
    assert (features[0] - features[1]).square().mean().sqrt() > 0.1
    assert features.std(dim=1).min() > 0.01


def test_the_script_makes_the_shipped_image_encoder_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_tiny", "--image-only", str(tmp_path)])
    make_tiny.main()
    for file in ["image_encoder/model.safetensors", "image_processor/preprocessor_config.json"]:
        assert filecmp.cmp(tmp_path / file, TINY / file, shallow=False), file
