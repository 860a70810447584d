"""From settings to parts: what is local stays local, and parts of different models are refused together."""

import json

import pytest
import torch

from wan_ds.config import Config, to_dict
from wan_ds.config.command_line import parse
from wan_ds.config.composition import configure
from wan_ds.errors import CheckpointError, ConfigError, DataError
from wan_ds.training import parts, run_folder

CPU = torch.device("cpu")


def settings(*typed: str) -> Config:
    return configure(parse(["recipe=quickstart", *typed]))


def test_a_folder_is_used_where_it_is_and_has_no_revision():
    config = settings()
    local, commit = parts.with_local_weights(config)
    assert commit is None and local.model.path.endswith("wan_ds/assets/quickstart")
    assert local.model.vae == config.model.vae and config.model.path == "wan_ds/assets/quickstart"
    with pytest.raises(ConfigError, match=r"model\.revision=main: .* type model\.revision=null"):
        parts.with_local_weights(settings("model.revision=main"))


def test_only_what_the_model_names_is_asked_of_the_hub(monkeypatch, tmp_path):
    asked = {}

    def resolve(path, *, revision, needed):
        asked.update(path=path, revision=revision, needed=sorted(needed))
        return tmp_path, "0123abc"

    monkeypatch.setattr(parts.hub, "resolve", resolve)
    config = settings("model=wan2.2-i2v-a14b", "model.revision=v1", f"model.vae.weights={tmp_path}")
    local, commit = parts.with_local_weights(config)
    assert (local.model.path, commit) == (str(tmp_path), "0123abc")
    assert asked == {
        "path": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        "revision": "v1",
        "needed": ["text_encoder", "tokenizer", "transformer", "transformer_2"],
    }
    parts.with_local_weights(settings("model=wan2.1-flf2v-14b"))
    assert {"image_encoder", "image_processor", "transformer", "vae"} < set(asked["needed"])
    parts.with_local_weights(settings("model=wan2.2-t2v-a14b", "train.experts=[low_noise]"))
    assert "transformer_2" in asked["needed"] and "transformer" not in asked["needed"]


def test_the_commit_of_a_downloaded_model_is_in_the_run_folder(tmp_path):
    run_folder.write(tmp_path, to_dict(settings()), model_commit="0123abc")
    assert json.loads((tmp_path / "environment.json").read_text())["model_commit"] == "0123abc"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            ["model=tiny-wan2.2-t2v-a14b", "model.vae.weights=tiny/vae_48"],
            r"model\.vae\.weights: what it gives is 48 wide, and model\.transformer\.out_channels is 16",
        ),
        (["model.transformer.text_dim=96"], r"model\.text_encoder\.weights: .* 64 wide, .*text_dim is 96"),
        (
            ["model=tiny-wan2.1-i2v-14b-480p", "model.transformer.image_dim=48"],
            r"model\.image_encoder\.weights: .* 32 wide, .*image_dim is 48; name the image_encoder",
        ),
    ],
)
def test_encoders_of_another_model_are_refused(typed, message):
    with pytest.raises(CheckpointError, match=message):
        parts.load_encoders(settings(*typed), CPU)


def test_tiling_and_the_resize_rule_are_those_of_the_settings():
    made = parts.load_encoders(settings("model=tiny-wan2.1-flf2v-14b"), CPU)
    assert not made.vae.use_tiling and made.vae.dtype == torch.float32
    assert made.image.processor.do_center_crop
    typed = ["model.vae.tiling=true", "model.vae.dtype=bf16", "model.image_encoder.resize=squash"]
    made = parts.load_encoders(settings("model=tiny-wan2.1-flf2v-14b", *typed), CPU)
    assert made.vae.use_tiling and made.vae.dtype == torch.bfloat16
    assert not made.image.processor.do_center_crop


def test_images_are_opened_before_a_model_is_read(tmp_path):
    config = settings("model=tiny-wan2.1-flf2v-14b")
    config.sampling.images, config.sampling.last_images = [], [str(tmp_path / "no.png")]
    with pytest.raises(DataError, match=r"sampling\.last_images: .*no\.png: there is no such image file"):
        parts.check_images(config)


def test_a_folder_that_would_not_be_read_is_refused(tmp_path):
    """Random experts beside a model.path that has what they could start from: somebody forgot a setting."""
    for name in ("transformer_2", "vae"):
        (tmp_path / name).mkdir()
    typed = ["model=tiny-wan2.2-t2v-a14b", f"model.path={tmp_path}"]
    with pytest.raises(CheckpointError, match=r"experts\.low_noise\.weights=null: .* holds transformer_2"):
        parts.locate_weights(settings(*typed, "train.experts=[low_noise]"), is_new=True)
    with pytest.raises(CheckpointError, match=r"type model\.vae\.weights=vae"):
        parts.locate_weights(settings(*typed, "train.experts=[high_noise]"), is_new=True)


def test_encoders_in_wans_own_layout_are_told_how_they_are_read(tmp_path):
    (tmp_path / "Wan2.1_VAE.pth").touch()
    with pytest.raises(CheckpointError, match=r"scripts/convert\.py source=.* format=diffusers"):
        parts.locate(str(tmp_path), "vae", "vae")


def test_a_run_without_the_component_says_so(tmp_path):
    run_folder.write(tmp_path, to_dict(settings()))
    with pytest.raises(CheckpointError, match=r"that run has no image_encoder; choose the run's own model"):
        parts.locate(str(tmp_path), "image_encoder", "image_encoder")
