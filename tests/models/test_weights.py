"""A transformer's weights: from whatever holds tensors by name, or from the seed."""

import json

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.variants import ARCHITECTURES, randomised
from tests.training.tiny import ARCHITECTURE
from wan_ds import streams
from wan_ds.errors import CheckpointError
from wan_ds.interop.tensor_files import Renamed, open_tensor_files
from wan_ds.models.weights import build_transformer, count_parameters, on_meta


def build(folder, **changes):
    return build_transformer(ARCHITECTURE | changes, open_tensor_files(folder))


@pytest.fixture
def folder(tmp_path):
    stock = WanTransformer3DModel(**ARCHITECTURE)
    stock.save_pretrained(tmp_path / "transformer")
    return tmp_path / "transformer"


class Held:
    """Tensors in memory as a source."""

    where = "held"

    def __init__(self, tensors, **attributes):
        self.tensors = tensors
        self.reads = []
        vars(self).update(attributes)

    def read(self, names):
        self.reads.append(list(names))
        return {name: self.tensors[name] for name in names}


def held(variant, dtype=torch.float32, **attributes):
    model = randomised(WanTransformer3DModel(**ARCHITECTURES[variant]))
    return Held({name: tensor.to(dtype) for name, tensor in model.state_dict().items()}, **attributes)


def test_a_folder_of_stock_diffusers_is_loaded_to_the_byte(folder):
    stored = load_file(folder / "diffusion_pytorch_model.safetensors")
    loaded = build(folder).state_dict()
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[key], stored[key]) for key in stored)


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_every_variant_is_read_and_computes_as_diffusers_loads_it(variant, tmp_path):
    stock = randomised(WanTransformer3DModel(**ARCHITECTURES[variant]))
    stock.save_pretrained(tmp_path)
    loaded = build_transformer(ARCHITECTURES[variant], open_tensor_files(tmp_path))
    assert loaded.state_dict().keys() == stock.state_dict().keys()
    assert all(torch.equal(tensor, stock.state_dict()[key]) for key, tensor in loaded.state_dict().items())
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
    assert (loaded.rope.freqs_cos - stock.rope.freqs_cos).abs().max() < 1e-7  # one rounding of a cosine


def test_blocks_are_read_and_handed_on_one_by_one_and_the_models_own_come_last():
    source, handed = held("i2v"), []
    model = build_transformer(
        ARCHITECTURES["i2v"], source, partition=lambda module: handed.append((module, len(source.reads)))
    )
    units = [model.patch_embedding, model.condition_embedder, *model.blocks, model.proj_out, model]
    assert [module for module, _ in handed] == units
    assert [reads for _, reads in handed] == [1, 2, 3, 4, 5, 6]  # nothing is read ahead
    assert sorted(sum(source.reads, [])) == sorted(source.tensors) and source.reads[-1] == [
        "scale_shift_table"
    ]
    assert all(name.startswith("blocks.1.") for name in source.reads[3])


def test_trainable_tensors_are_cast_and_frozen_ones_stay_as_they_are_stored():
    source = held("t2v", torch.bfloat16)
    source.tensors["proj_out.weight"] = source.tensors["proj_out.weight"].double()
    for trainable_dtype in (torch.float32, torch.bfloat16):
        model = build_transformer(
            ARCHITECTURES["t2v"],
            source,
            dtype_of=lambda name, stored, trains, cast=trainable_dtype: cast if trains else stored,
            is_trainable=lambda name: "attn1" in name,
        )
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == ("attn1" in name)
            expected = trainable_dtype if parameter.requires_grad else source.tensors[name].dtype
            assert parameter.dtype == expected and torch.equal(parameter, source.tensors[name].to(expected))
    assert all(p.requires_grad for p in build_transformer(ARCHITECTURES["t2v"], source).parameters())


def test_a_tensor_that_another_rank_reads_becomes_room_for_it():
    source = held("t2v", torch.bfloat16)
    source.tensors = {name: tensor.to("meta") for name, tensor in source.tensors.items()}
    model = build_transformer(ARCHITECTURES["t2v"], source, is_trainable=lambda name: name == "proj_out.bias")
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu" and parameter.shape == source.tensors[name].shape
        assert parameter.dtype == (torch.float32 if name == "proj_out.bias" else torch.bfloat16)


def test_a_turned_tensor_of_a_pickle_becomes_contiguous(tmp_path):
    tensors = held("t2v").tensors
    tensors["blocks.0.attn1.to_q.weight"] = tensors["blocks.0.attn1.to_q.weight"].t()
    torch.save(tensors, tmp_path / "model.pth")
    weight = build_transformer(ARCHITECTURES["t2v"], open_tensor_files(tmp_path)).blocks[0].attn1.to_q.weight
    assert weight.is_contiguous() and torch.equal(weight, tensors["blocks.0.attn1.to_q.weight"])


def test_a_folder_that_does_not_fit_is_refused_with_what_differs(folder):
    with pytest.raises(CheckpointError, match="ffn_dim: 64 there, 128 here; choose the model that"):
        build(folder, ffn_dim=128)
    with pytest.raises(CheckpointError, match="num_layers: 2 there, 3 here; choose"):
        build(folder, num_layers=3)
    with pytest.raises(
        CheckpointError, match="in_channels: 16 there, 48 here; out_channels: 16 there, 48 here"
    ):
        build(folder, in_channels=48, out_channels=48)
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    missing = [tensors.pop(f"blocks.1.{name}") for name in ("norm2.weight", "norm2.bias")]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"missing: blocks\.1\.norm2\.weight, blocks\.1\.norm2\.bias$"):
        build(folder)
    tensors |= {"blocks.1.norm2.weight": missing[0], "blocks.1.norm2.bias": torch.ones(5)}
    more = {f"blocks.1.extra.{number}": torch.ones(1) for number in range(5)}
    save_file(tensors | more, file)
    words = (
        r"transformer does not fit model\.transformer; unexpected: blocks\.1\.extra\.0, blocks\.1\.extra\.1, "
        r"blocks\.1\.extra\.2 and 2 more; of another shape: blocks\.1\.norm2\.bias \[5\] there, \[48\] here$"
    )
    with pytest.raises(CheckpointError, match=words):
        build(folder)
    save_file(tensors | {"blocks.1.norm2.bias": missing[1].to(torch.int8)}, file)
    with pytest.raises(CheckpointError, match=r"bias holds whole numbers \(torch\.int8\): a quantised model"):
        build(folder)


@pytest.mark.parametrize(
    ("file", "model", "words"),
    [
        (
            "i2v",
            "t2v",
            "it has the image keys of Wan 2.1's image to video; in_channels: 36 there, 16 here; image",
        ),
        ("t2v", "i2v", "it lacks the image keys of Wan 2.1's image to video; in_channels: 16 there, 36 here"),
        (
            "i2v",
            "i2v-a14b",
            "it has the image keys of Wan 2.1's image to video; image_dim: 24 there, none here",
        ),
        ("i2v-a14b", "t2v", "model.transformer; in_channels: 36 there, 16 here; choose the model"),
        ("i2v", "flf2v", "model.transformer; pos_embed_seq_len: none there, 514 here; choose the model"),
        ("flf2v", "i2v", "model.transformer; pos_embed_seq_len: 514 there, none here; choose the model"),
        ("ti2v", "t2v", "model.transformer; in_channels: 48 there, 16 here; out_channels: 48 there, 16 here"),
    ],
)
def test_the_file_of_another_variant_is_told_by_what_it_is(file, model, words):
    source = held(file)
    with pytest.raises(CheckpointError) as error:
        build_transformer(ARCHITECTURES[model], source)
    assert words in str(error.value) and source.reads == []


def test_what_tensors_do_not_show_is_compared_with_what_the_source_says():
    stated = {"num_attention_heads": 8, "attention_head_dim": 6, "eps": 1e-6, "in_channels": 99, "unknown": 1}
    with pytest.raises(CheckpointError) as error:
        build_transformer(ARCHITECTURES["t2v"], held("t2v", architecture=stated))
    assert "num_attention_heads: 8 there, 4 here; attention_head_dim: 6 there, 12 here; choose" in str(
        error.value
    )
    stated = {"num_attention_heads": 4, "patch_size": (1, 2, 2), "image_dim": None, "qk_norm": "other"}
    with pytest.raises(
        CheckpointError, match="transformer; qk_norm: other there, rms_norm_across_heads here"
    ):
        build_transformer(ARCHITECTURES["t2v"], held("t2v", architecture=stated))


def test_a_key_that_diffusers_ignores_is_ignored():
    source = held("i2v")
    source.tensors["blocks.0.attn2.norm_added_q.weight"] = torch.ones(48)
    build_transformer(ARCHITECTURES["i2v"], source)
    build_transformer(ARCHITECTURES["i2v"], Renamed(source, {name: name for name in source.tensors}))


def test_random_weights_depend_on_seed_expert_and_name_alone():
    def make(seed, expert, layers=2):
        architecture = ARCHITECTURE | {"num_layers": layers}
        return build_transformer(architecture, None, seed=seed, expert=expert).state_dict()

    one, same, deeper = make(0, "high_noise"), make(0, "high_noise"), make(0, "high_noise", layers=3)
    assert all(torch.equal(one[key], same[key]) and torch.equal(one[key], deeper[key]) for key in one)
    key = "blocks.0.attn1.to_q.weight"
    for other in (make(1, "high_noise"), make(0, "low_noise")):
        assert not torch.equal(one[key], other[key])
    assert not torch.equal(one[key], one["blocks.1.attn1.to_q.weight"])
    assert json.dumps(sorted(one)) == json.dumps(sorted(WanTransformer3DModel(**ARCHITECTURE).state_dict()))


def test_random_weights_are_those_of_wans_authors():
    """WanModel.init_weights, by torch's initialisers from the same streams."""
    model = build_transformer(ARCHITECTURES["flf2v"], None, seed=5, expert="all")
    for name, parameter in model.named_parameters():
        rng, expected = streams.generator(5, "initialise", "all", name), torch.zeros(parameter.shape)
        if name.endswith("scale_shift_table"):
            expected = torch.randn(parameter.shape, generator=rng) / parameter.shape[-1] ** 0.5
        elif "norm" in name:
            expected.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("weight") and not name.startswith("proj_out"):
            if "time_embedder" in name or "text_embedder" in name:
                nn.init.normal_(expected, std=0.02, generator=rng)
            else:
                nn.init.xavier_uniform_(expected.flatten(1), generator=rng)
        assert torch.allclose(parameter, expected, rtol=1e-6, atol=0), name  # one rounding of the bound


def test_a_model_on_the_meta_device_is_counted_and_takes_no_memory():
    wide = on_meta(ARCHITECTURES["t2v"] | {"ffn_dim": 10**12})
    stock = WanTransformer3DModel(**ARCHITECTURES["t2v"])
    of_ffn = 48 + 1 + 48  # for each of its hidden units: a row and a bias in, a column out
    assert count_parameters(wide) == count_parameters(stock) + 2 * of_ffn * (10**12 - 64)
    assert all(parameter.is_meta for parameter in wide.parameters())
