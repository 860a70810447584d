"""One encode and decode pair and one way to embed captions and images, equal to diffusers' pipelines."""

import json

import numpy as np
import pytest
import torch
from diffusers import (
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessorPil

from tests.models.frozen import save_frozen
from wan_ds.errors import CheckpointError, DataError
from wan_ds.models.encoders import (
    TEXT_LENGTH,
    clean,
    decode_latents,
    encode_video,
    load_image_encoder,
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("components")
    save_frozen(root)
    return root


@pytest.fixture(scope="module")
def vae(folders):
    return load_vae(folders / "vae", "cpu")


@pytest.fixture(scope="module", params=["vae", "vae_22"])
def either_vae(request, folders):
    return load_vae(folders / request.param, "cpu")


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


@pytest.fixture(scope="module")
def image_encoders(folders):
    """By their rule."""
    return {
        rule: load_image_encoder(
            folders / "image_processor", folders / "image_encoder", "cpu", torch.float32, rule
        )
        for rule in ("crop", "squash")
    }


def clip(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


# pixels and latents


def test_latents_are_the_mean_minus_the_channels_mean_over_its_deviation(either_vae):
    pixels = clip(2, 3, 9, 32, 64)

    latents = encode_video(either_vae, pixels)

    config = either_vae.config
    with torch.no_grad():
        moments = either_vae.encode(pixels).latent_dist.mean.double()
    expected = moments.clone()
    for channel, (mean, std) in enumerate(zip(config.latents_mean, config.latents_std, strict=True)):
        expected[:, channel] = (moments[:, channel] - mean) / std
    space = config.scale_factor_spatial
    assert latents.shape == (2, config.z_dim, 3, 32 // space, 64 // space)
    assert latents.dtype == torch.float32
    # float32 against float64 of the same moments, and batched convolutions that sum in another order
    torch.testing.assert_close(latents.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_first_latent_frame_is_of_the_first_frame_alone(either_vae):
    pixels = clip(1, 3, 9, 32, 64)
    latents = encode_video(either_vae, pixels)

    # the last convolution takes all latent frames at once and sums in another order for one
    torch.testing.assert_close(
        encode_video(either_vae, pixels[:, :, :1]), latents[:, :, :1], rtol=1e-5, atol=1e-5
    )
    changed = torch.cat([pixels[:, :, :1], -pixels[:, :, 1:]], dim=2)
    assert torch.equal(encode_video(either_vae, changed)[:, :, :1], latents[:, :, :1])


def test_tiling_is_only_on_when_asked_for_and_gives_other_latents(folders, vae):
    tiled = load_vae(folders / "vae", "cpu", tiling=True)
    larger, smaller = clip(1, 3, 1, 288, 32), clip(1, 3, 1, 64, 32)  # than a tile of 256

    assert not torch.allclose(encode_video(tiled, larger), encode_video(vae, larger), atol=1e-2)
    assert torch.equal(encode_video(tiled, smaller), encode_video(vae, smaller))
    assert (tiled.use_tiling, vae.use_tiling) == (True, False)


def test_an_autoencoder_computes_in_the_dtype_that_it_is_loaded_in(folders, vae):
    half, pixels = load_vae(folders / "vae", "cpu", torch.bfloat16), clip(1, 3, 1, 32, 32)

    latents = encode_video(half, pixels)

    assert half.dtype == torch.bfloat16
    assert vae.dtype == torch.float32
    assert latents.dtype == torch.float32
    assert not torch.equal(latents, encode_video(vae, pixels))


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


def test_what_comes_out_of_the_door_may_go_back_in(either_vae):
    moments = {}

    class Spied(torch.nn.Module):
        config, device, dtype = either_vae.config, either_vae.device, either_vae.dtype

        def decode(self, given, return_dict):
            moments["decoded"] = given
            return either_vae.decode(given, return_dict=return_dict)

    pixels = clip(1, 3, 5, 32, 32)
    decode_latents(Spied(), encode_video(either_vae, pixels))

    with torch.no_grad():
        expected = either_vae.encode(pixels).latent_dist.mode()
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
        (
            torch.zeros(1, 3, 6, 16, 16),
            r"6 frames of 16x16: there must be 4 n \+ 1 .*; choose frames 5 or 9$",
        ),
        (torch.zeros(1, 3, 5, 16, 20), "multiples of 16, .*; choose width 16 or 32$"),
        (torch.zeros(1, 3, 5, 24, 16), "choose height 16 or 32$"),  # the transformer would cut it, no VAE
        (torch.zeros(1, 3, 4, 8, 500), "choose frames 1 or 5, height 16, width 496 or 512$"),
        (torch.zeros(3, 5, 16, 16), r"not \[3, 5, 16, 16\]"),
    ],
)
def test_pixels_that_would_be_encoded_wrongly_are_refused(vae, pixels, rule):
    with pytest.raises(DataError, match=rule):
        encode_video(vae, pixels)


def test_the_autoencoder_of_wan_2_2_takes_multiples_of_32(folders):
    with pytest.raises(DataError, match="multiples of 32, .*; choose height 704 or 736$"):
        encode_video(load_vae(folders / "vae_22", "cpu"), torch.zeros(1, 3, 1, 720, 32))


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


# images


def picture(height: int = 32, width: int = 64) -> Image.Image:
    colours = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(colours)


def pixels_of(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


@pytest.mark.parametrize("rule", ["crop", "squash"])
@pytest.mark.parametrize("size", [(32, 64), (300, 240)])
def test_image_embeddings_are_those_of_the_pipeline_with_the_same_processor(
    vae, text_encoder, pipeline, image_encoders, rule, size
):
    ours = image_encoders[rule]
    pipeline = WanImageToVideoPipeline(
        text_encoder.tokenizer,
        text_encoder.encoder,
        vae,
        pipeline.scheduler,
        image_processor=ours.processor,
        image_encoder=ours.encoder,
    )

    embeds = ours(pixels_of(picture(*size)))

    assert embeds.shape == (257, ours.width) == (257, 24)
    assert embeds.dtype == torch.float32
    assert torch.equal(embeds[None], pipeline.encode_image(picture(*size)))


def test_crop_is_the_rule_of_clips_own_processor(folders, image_encoders):
    own = CLIPImageProcessorPil()(picture(), return_tensors="pt").pixel_values
    without_folder = load_image_encoder(None, folders / "image_encoder", "cpu", torch.float32)

    for encoder in (image_encoders["crop"], without_folder):
        assert torch.equal(encoder.processor(picture(), return_tensors="pt").pixel_values, own)


def test_squash_sees_the_edges_that_crop_cuts_off(image_encoders):
    pixels = pixels_of(picture())
    other_edges = pixels.clone()
    other_edges[:, :, :8] *= -1
    other_edges[:, :, -8:] *= -1

    crop, squash = image_encoders["crop"], image_encoders["squash"]

    assert torch.equal(crop(pixels), crop(other_edges))
    assert not torch.allclose(squash(pixels), squash(other_edges), atol=1e-2)
    square = pixels[:, :, 16:48]
    assert torch.equal(squash(square), crop(square))


@pytest.mark.parametrize(("rule", "other"), [("crop", "squash"), ("squash", "crop")])
def test_a_saved_processor_carries_its_rule_and_what_was_asked_for_wins(
    folders, image_encoders, tmp_path, rule, other
):
    processor = image_encoders[rule].processor
    processor.save_pretrained(tmp_path)

    again = CLIPImageProcessorPil.from_pretrained(tmp_path)
    assert torch.equal(
        again(picture(), return_tensors="pt").pixel_values,
        processor(picture(), return_tensors="pt").pixel_values,
    )
    asked = load_image_encoder(tmp_path, folders / "image_encoder", "cpu", torch.float32, other)
    assert asked.processor.to_dict() == image_encoders[other].processor.to_dict()


def test_colours_of_the_processors_folder_are_kept(folders, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "CLIPImageProcessor", "image_mean": [0.1, 0.2, 0.3], "size": 99})
    )

    encoder = load_image_encoder(tmp_path, folders / "image_encoder", "cpu", torch.float32)

    assert list(encoder.processor.image_mean) == [0.1, 0.2, 0.3]
    assert encoder.processor(picture(), return_tensors="pt").pixel_values.shape == (1, 3, 224, 224)


def test_frames_that_are_one_in_8_bits_have_one_embedding(image_encoders):
    pixels = pixels_of(picture())
    nearly = (pixels + 0.4 / 127.5).clamp(max=1)

    assert torch.equal(image_encoders["crop"](nearly), image_encoders["crop"](pixels))


def test_an_image_encoder_computes_in_the_dtype_that_it_is_loaded_in(folders, image_encoders):
    half = load_image_encoder(None, folders / "image_encoder", "cpu", torch.bfloat16)

    embeds = half(pixels_of(picture()))

    assert half.encoder.dtype == torch.bfloat16
    assert embeds.dtype == torch.float32
    assert not torch.equal(embeds, image_encoders["crop"](pixels_of(picture())))


def test_weights_with_the_prefix_of_older_files_are_the_same_image_encoder(folders, image_encoders, tmp_path):
    source = folders / "image_encoder"
    weights = load_file(source / "model.safetensors")
    older = {f"vision_model.{name}": tensor for name, tensor in weights.items()}
    save_file(older, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())

    encoder = load_image_encoder(None, tmp_path, "cpu", torch.float32)

    assert torch.equal(encoder(pixels_of(picture())), image_encoders["crop"](pixels_of(picture())))


def test_images_of_another_range_and_unknown_rules_are_refused(folders, image_encoders):
    with pytest.raises(DataError, match=r"the image encoder takes float pixels in \[-1, 1\], these go from"):
        image_encoders["crop"](pixels_of(picture()) * 127.5)
    with pytest.raises(DataError, match="these are torch.uint8"):
        image_encoders["crop"](torch.zeros(3, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="model.image_encoder.resize=stretch: must be crop or squash"):
        load_image_encoder(None, folders / "image_encoder", "cpu", torch.float32, "stretch")


# all of them


def test_autocast_around_the_encoders_changes_nothing(vae, text_encoder, image_encoders):
    pixels, image_encoder = clip(1, 3, 5, 32, 32), image_encoders["crop"]
    latents, embeds = encode_video(vae, pixels), text_encoder(["a ball"])
    decoded, image = decode_latents(vae, latents), image_encoder(pixels[0, :, 0])

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(encode_video(vae, pixels), latents)
        assert torch.equal(text_encoder(["a ball"]), embeds)
        assert torch.equal(decode_latents(vae, latents), decoded)
        assert torch.equal(image_encoder(pixels[0, :, 0]), image)


def test_nothing_of_the_encoders_trains(vae, text_encoder, image_encoders):
    for module in (vae, text_encoder.encoder, image_encoders["crop"].encoder):
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
    with pytest.raises(CheckpointError, match=f"image_encoder: there is no folder {nowhere}"):
        load_image_encoder(None, nowhere, "cpu", torch.float32)
    with pytest.raises(CheckpointError, match=f"image_processor: there is no folder {nowhere}"):
        load_image_encoder(nowhere, folders / "image_encoder", "cpu", torch.float32)


def test_a_folder_without_the_files_is_named_with_its_component(folders, tmp_path):
    with pytest.raises(CheckpointError, match=f"vae: {tmp_path} cannot be loaded"):
        load_vae(tmp_path, "cpu")
    with pytest.raises(CheckpointError, match=f"tokenizer: {tmp_path} cannot be loaded"):
        load_text_encoder(tmp_path, folders / "text_encoder", "cpu", torch.float32)
    with pytest.raises(CheckpointError, match=f"text_encoder: {tmp_path} cannot be loaded"):
        load_text_encoder(folders / "tokenizer", tmp_path, "cpu", torch.float32)
    with pytest.raises(CheckpointError, match=f"image_encoder: {tmp_path} cannot be loaded"):
        load_image_encoder(None, tmp_path, "cpu", torch.float32)
    with pytest.raises(CheckpointError, match=f"image_processor: {tmp_path} cannot be loaded"):
        load_image_encoder(tmp_path, folders / "image_encoder", "cpu", torch.float32)


LOADERS = {
    "vae": lambda folder, folders: load_vae(folder, "cpu"),
    "text_encoder": lambda folder, folders: load_text_encoder(
        folders / "tokenizer", folder, "cpu", torch.float32
    ),
    "image_encoder": lambda folder, folders: load_image_encoder(None, folder, "cpu", torch.float32),
}


@pytest.mark.parametrize("component", LOADERS)
def test_weights_that_are_not_in_the_file_are_not_made_up(folders, tmp_path, component):
    (file,) = (folders / component).glob("*.safetensors")
    weights = load_file(file)
    lost = next(name for name in sorted(weights) if "norm" in name)
    del weights[lost]
    (tmp_path / "config.json").write_bytes((folders / component / "config.json").read_bytes())
    save_file(weights, tmp_path / file.name, metadata={"format": "pt"})

    with pytest.raises(
        CheckpointError, match=f"{component}: .*lacks 1 weights of this model, such as {lost}"
    ):
        LOADERS[component](tmp_path, folders)


def test_truncated_weights_are_one_sentence(tmp_path):
    save_frozen(tmp_path)
    for name, load in (
        (
            "text_encoder",
            lambda: load_text_encoder(
                tmp_path / "tokenizer", tmp_path / "text_encoder", "cpu", torch.float32
            ),
        ),
        ("image_encoder", lambda: load_image_encoder(None, tmp_path / "image_encoder", "cpu", torch.float32)),
        ("vae", lambda: load_vae(tmp_path / "vae", "cpu")),
    ):
        (file,) = (tmp_path / name).glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-40])
        with pytest.raises(CheckpointError, match=f"{name}: .*{name} cannot be loaded"):
            load()


def test_nothing_to_encode_is_refused(vae):
    with pytest.raises(DataError, match="there are none in"):
        encode_video(vae, torch.zeros(1, 3, 0, 32, 32))
