"""Where a transformer's weights come from: a folder in diffusers' layout, or the seed."""

import json

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.training.tiny import ARCHITECTURE
from wan_ds.errors import CheckpointError
from wan_ds.models.weights import build_transformer, locate


def build(folder, **changes):
    return build_transformer(
        ARCHITECTURE | changes, path=str(folder.parent), weights=folder.name, seed=0, expert="all"
    )


@pytest.fixture
def folder(tmp_path):
    stock = WanTransformer3DModel(**ARCHITECTURE)
    stock.save_pretrained(tmp_path / "transformer")
    return tmp_path / "transformer"


def test_a_folder_of_stock_diffusers_is_loaded_to_the_byte(folder):
    stored = load_file(folder / "diffusion_pytorch_model.safetensors")
    loaded = build(folder).state_dict()
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[key], stored[key]) for key in stored)


def test_a_folder_that_does_not_fit_is_refused_with_what_differs(folder):
    with pytest.raises(CheckpointError, match="ffn_dim: 64 there, 128 here"):
        build(folder, ffn_dim=128)
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    missing = tensors.pop("blocks.1.norm2.weight")
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"missing_keys: blocks\.1\.norm2\.weight"):
        build(folder)
    save_file(tensors | {"blocks.1.norm2.weight": missing, "blocks.1.scale_weight": missing.clone()}, file)
    with pytest.raises(CheckpointError, match=r"unexpected_keys: blocks\.1\.scale_weight"):
        build(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="holds no transformer in diffusers' layout"):
        build(folder)


def test_a_missing_folder_names_the_setting(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.vae\.weights=vae: no such folder under model\.path="):
        locate(str(tmp_path), "vae", "vae")


def test_random_weights_depend_on_seed_expert_and_name_alone():
    def make(seed, expert, layers=2):
        architecture = ARCHITECTURE | {"num_layers": layers}
        return build_transformer(architecture, path=None, weights=None, seed=seed, expert=expert).state_dict()

    one, same, deeper = make(0, "high_noise"), make(0, "high_noise"), make(0, "high_noise", layers=3)
    assert all(torch.equal(one[key], same[key]) and torch.equal(one[key], deeper[key]) for key in one)
    key = "blocks.0.attn1.to_q.weight"
    for other in (make(1, "high_noise"), make(0, "low_noise")):
        assert not torch.equal(one[key], other[key])
    assert not torch.equal(one[key], one["blocks.1.attn1.to_q.weight"])
    assert not one["proj_out.weight"].any()  # Wan's own start: a head of zeros
    assert json.dumps(sorted(one)) == json.dumps(sorted(WanTransformer3DModel(**ARCHITECTURE).state_dict()))
