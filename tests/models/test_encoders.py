"""One encode and decode pair and one way to embed captions, equal to what diffusers' pipeline does."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from wan_ds.errors import CheckpointError, DataError
from wan_ds.models.encoders import (
    TEXT_LENGTH,
    clean,
    decode_latents,
    encode_video,
    load_text_encoder,
    load_vae,
)

CAPTIONS = [
    "a red ball  bounces\n",
    "",
    "caf&amp;eacute; \u00e2\u20ac\u0153quoted\u00e2\u20ac\u009d",
    "x" * 2000,
    "\u65e5\u672c",
]


def statistics(channels: int = 16) -> dict:
    return {
        "latents_mean": np.linspace(-0.8, 1.5, channels).tolist(),
        "latents_std": np.linspace(0.4, 3, channels).tolist(),
    }


def randomised(module: torch.nn.Module, std: float) -> torch.nn.Module:
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std, generator=rng)
    return module.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("components")
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **statistics())
    randomised(vae, 0.3).save_pretrained(root / "vae")
    letters = [
        (letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,'"
    ]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *letters]
    T5Tokenizer(vocab=vocabulary, extra_ids=0).save_pretrained(root / "tokenizer")
    config = UMT5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    randomised(UMT5EncoderModel(config), 0.2).save_pretrained(root / "text_encoder")
    return root


@pytest.fixture(scope="module")
def vae(folders):
    return load_vae(folders / "vae", "cpu")


@pytest.fixture(scope="module")
def text_encoder(folders):
    return load_text_encoder(folders / "tokenizer", folders / "text_encoder", "cpu", torch.float32)


@pytest.fixture(scope="module")
def pipeline(vae, text_encoder):
    transformer = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=12, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=1
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )
    made = WanPipeline(text_encoder.tokenizer, text_encoder.encoder, vae, scheduler, transformer)
    made.set_progress_bar_config(disable=True)
    return made


def clip(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


# pixels and latents


def test_latents_are_the_mean_minus_the_channels_mean_over_its_deviation(vae):
    pixels = clip(2, 3, 9, 32, 48)

    latents = encode_video(vae, pixels)

    with torch.no_grad():
        moments = vae.encode(pixels).latent_dist.mean.double()
    expected = moments.clone()
    for channel, (mean, std) in enumerate(zip(vae.config.latents_mean, vae.config.latents_std, strict=True)):
        expected[:, channel] = (moments[:, channel] - mean) / std
    assert latents.shape == (2, 16, 3, 4, 6)
    assert latents.dtype == torch.float32
    # float32 against float64 of the same moments, and batched convolutions that sum in another order
    torch.testing.assert_close(latents.double(), expected, rtol=1e-5, atol=1e-5)


def test_decoding_gives_what_the_pipeline_gives_for_its_latents(vae, pipeline):
    text = torch.zeros(2, TEXT_LENGTH, 32)
    settings = {"prompt_embeds": text, "guidance_scale": 1.0, "num_frames": 5, "height": 32, "width": 32}
    settings |= {
        "num_inference_steps": 2,
        "latents": torch.randn(2, 16, 2, 4, 4, generator=torch.Generator().manual_seed(1)),
    }
    latents = pipeline(**settings, output_type="latent").frames
    frames = pipeline(**settings, output_type="pt").frames  # [B, F, 3, H, W] in [0, 1]

    pixels = decode_latents(vae, latents)

    assert pixels.shape == (2, 3, 5, 32, 32)
    # diffusers divides by 1 / std where we multiply by std: the last bits of float32
    torch.testing.assert_close(pixels.transpose(1, 2) / 2 + 0.5, frames, rtol=1e-4, atol=1e-5)


def test_what_comes_out_of_the_door_may_go_back_in(vae):
    moments = {}

    class Spied(torch.nn.Module):
        config, device, dtype = vae.config, vae.device, vae.dtype

        def decode(self, given, return_dict):
            moments["decoded"] = given
            return vae.decode(given, return_dict=return_dict)

    pixels = clip(1, 3, 5, 32, 32)
    decode_latents(Spied(), encode_video(vae, pixels))

    with torch.no_grad():
        expected = vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(moments["decoded"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("colour", "value"), [("black", -1.0), ("white", 1.0)])
def test_black_and_white_reach_the_autoencoder_as_minus_one_and_one(vae, monkeypatch, colour, value):
    seen, encode = [], vae.encode
    monkeypatch.setattr(vae, "encode", lambda pixels: seen.append(pixels) or encode(pixels))
    frames = np.full((1, 3, 5, 16, 16), 0 if colour == "black" else 255, dtype=np.uint8)

    encode_video(vae, torch.from_numpy(frames).float() / 127.5 - 1)

    assert seen[0].unique().tolist() == [value]


def test_a_clips_latents_do_not_depend_on_the_batch(vae):
    pixels = clip(3, 3, 5, 32, 32)
    latents = encode_video(vae, pixels)

    assert torch.equal(encode_video(vae, pixels[1:2])[0], latents[1])
    assert torch.equal(decode_latents(vae, latents[1:2])[0], decode_latents(vae, latents)[1])


@pytest.mark.parametrize(
    ("pixels", "rule"),
    [
        (torch.zeros(1, 3, 5, 16, 16, dtype=torch.uint8), r"\[-1, 1\], these are torch.uint8"),
        (torch.full((1, 3, 5, 16, 16), 1.01), r"\[-1, 1\], these go from 1.01 to 1.01"),
        (torch.full((1, 3, 5, 16, 16), -1.01), r"\[-1, 1\], these go from -1.01"),
        (torch.full((1, 3, 5, 16, 16), 255.0), "0..255 become x / 127.5 - 1"),
        (torch.full((1, 3, 5, 16, 16), float("nan")), "these go from nan to nan"),
        (torch.zeros(1, 3, 6, 16, 16), r"6 frames of 16x16: the autoencoder takes 4 n \+ 1 frames"),
        (torch.zeros(1, 3, 5, 16, 20), "multiples of 8"),
        (torch.zeros(3, 5, 16, 16), r"not \[3, 5, 16, 16\]"),
    ],
)
def test_pixels_that_would_be_encoded_wrongly_are_refused(vae, pixels, rule):
    with pytest.raises(DataError, match=rule):
        encode_video(vae, pixels)


def test_the_last_bits_outside_the_range_are_no_error(vae):
    assert encode_video(vae, torch.full((1, 3, 1, 16, 16), 1.00005)).isfinite().all()


# captions


def test_embeddings_are_those_of_the_pipeline(text_encoder, pipeline):
    ours = text_encoder(CAPTIONS)

    theirs = torch.cat(
        [
            pipeline.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=512)[0]
            for caption in CAPTIONS
        ]
    )
    together, null = pipeline.encode_prompt(CAPTIONS, max_sequence_length=512)
    assert ours.shape == (5, 512, 32)
    assert torch.equal(ours, theirs)
    assert torch.equal(text_encoder([""])[0], null[0])
    # all captions at once: matrix products that sum in another order
    torch.testing.assert_close(ours, together, rtol=1e-4, atol=1e-5)


def test_slots_after_the_end_of_a_caption_are_zero_and_the_null_caption_has_one_token(text_encoder):
    real = text_encoder(CAPTIONS).abs().sum(dim=-1) > 0

    lengths = real.sum(dim=1).tolist()
    assert lengths[1] == 1
    assert lengths[3] == 512
    for row, length in zip(real, lengths, strict=True):
        assert row[:length].all()
        assert not row[length:].any()


def test_an_embedding_does_not_depend_on_the_batch(text_encoder):
    together = text_encoder(CAPTIONS)

    for caption, embeds in zip(CAPTIONS, together, strict=True):
        assert torch.equal(text_encoder([caption])[0], embeds)


def test_captions_are_cleaned_as_diffusers_cleans_them():
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    assert [clean(caption) for caption in CAPTIONS] == [prompt_clean(caption) for caption in CAPTIONS]
    assert clean(CAPTIONS[2]) == 'caf\u00e9 "quoted"'
    assert clean(" a\t\n b ") == "a b"


def test_autocast_around_the_encoders_changes_nothing(vae, text_encoder):
    pixels = clip(1, 3, 5, 32, 32)
    latents, embeds = encode_video(vae, pixels), text_encoder(["a ball"])

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(encode_video(vae, pixels), latents)
        assert torch.equal(text_encoder(["a ball"]), embeds)
        assert torch.equal(decode_latents(vae, latents), decode_latents(vae, latents))


def test_nothing_of_the_encoders_trains(vae, text_encoder):
    for module in (vae, text_encoder.encoder):
        assert not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())


# folders


def test_a_missing_folder_is_named_with_its_component(folders, tmp_path):
    nowhere = tmp_path / "nowhere"
    with pytest.raises(CheckpointError, match=f"vae: there is no folder {nowhere}"):
        load_vae(nowhere, "cpu")
    with pytest.raises(CheckpointError, match=f"tokenizer: there is no folder {nowhere}"):
        load_text_encoder(nowhere, folders / "text_encoder", "cpu", torch.float32)
    with pytest.raises(CheckpointError, match=f"text_encoder: there is no folder {nowhere}"):
        load_text_encoder(folders / "tokenizer", nowhere, "cpu", torch.float32)


def test_a_folder_without_the_files_is_named_with_its_component(folders, tmp_path):
    with pytest.raises(CheckpointError, match=f"vae: {tmp_path} cannot be loaded"):
        load_vae(tmp_path, "cpu")
    with pytest.raises(CheckpointError, match=f"tokenizer: {tmp_path} cannot be loaded"):
        load_text_encoder(tmp_path, folders / "text_encoder", "cpu", torch.float32)
    with pytest.raises(CheckpointError, match=f"text_encoder: {tmp_path} cannot be loaded"):
        load_text_encoder(folders / "tokenizer", tmp_path, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("component", "file"),
    [("vae", "diffusion_pytorch_model.safetensors"), ("text_encoder", "model.safetensors")],
)
def test_weights_that_are_not_in_the_file_are_not_made_up(folders, tmp_path, component, file):
    weights = load_file(folders / component / file)
    lost = next(name for name in sorted(weights) if "norm" in name)
    del weights[lost]
    (tmp_path / "config.json").write_bytes((folders / component / "config.json").read_bytes())
    save_file(weights, tmp_path / file, metadata={"format": "pt"})

    with pytest.raises(
        CheckpointError, match=f"{component}: .*lacks 1 weights of this model, such as {lost}"
    ):
        if component == "vae":
            load_vae(tmp_path, "cpu")
        else:
            load_text_encoder(folders / "tokenizer", tmp_path, "cpu", torch.float32)
