"""The name maps against names written out by hand, diffusers' own converters, and the published counts."""

import json

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders.single_file_utils import (
    convert_wan_transformer_to_diffusers,
    convert_wan_vae_to_diffusers,
)
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from tests.models.variants import ARCHITECTURES
from wan_ds.errors import CheckpointError
from wan_ds.interop import names
from wan_ds.interop.configs import TEXT_TOKENS, original_transformer_config, transformer_config
from wan_ds.interop.tensor_files import Stored
from wan_ds.models.tokens import TEXT_LENGTH

# The original FLF2V's names without blocks.1 and on: the other variants have some of these.
GOLDEN_ROOT = """
patch_embedding.weight patch_embedding.bias
text_embedding.0.weight text_embedding.0.bias text_embedding.2.weight text_embedding.2.bias
time_embedding.0.weight time_embedding.0.bias time_embedding.2.weight time_embedding.2.bias
time_projection.1.weight time_projection.1.bias
head.modulation head.head.weight head.head.bias
"""
GOLDEN_IMAGE = """
img_emb.proj.0.weight img_emb.proj.0.bias img_emb.proj.1.weight img_emb.proj.1.bias
img_emb.proj.3.weight img_emb.proj.3.bias img_emb.proj.4.weight img_emb.proj.4.bias
blocks.0.cross_attn.k_img.weight blocks.0.cross_attn.k_img.bias
blocks.0.cross_attn.v_img.weight blocks.0.cross_attn.v_img.bias blocks.0.cross_attn.norm_k_img.weight
"""
GOLDEN_BLOCK = """
blocks.0.modulation blocks.0.norm3.weight blocks.0.norm3.bias
blocks.0.self_attn.q.weight blocks.0.self_attn.q.bias blocks.0.self_attn.k.weight blocks.0.self_attn.k.bias
blocks.0.self_attn.v.weight blocks.0.self_attn.v.bias blocks.0.self_attn.o.weight blocks.0.self_attn.o.bias
blocks.0.self_attn.norm_q.weight blocks.0.self_attn.norm_k.weight
blocks.0.cross_attn.q.weight blocks.0.cross_attn.q.bias blocks.0.cross_attn.k.weight
blocks.0.cross_attn.k.bias blocks.0.cross_attn.v.weight blocks.0.cross_attn.v.bias
blocks.0.cross_attn.o.weight blocks.0.cross_attn.o.bias
blocks.0.cross_attn.norm_q.weight blocks.0.cross_attn.norm_k.weight
blocks.0.ffn.0.weight blocks.0.ffn.0.bias blocks.0.ffn.2.weight blocks.0.ffn.2.bias
"""

FULL = {"text_dim": 4096, "freq_dim": 256, "attention_head_dim": 128}
B14 = FULL | {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824}
CLIP = {"in_channels": 36, "out_channels": 16, "image_dim": 1280, "added_kv_proj_dim": 5120}
PUBLISHED = {  # architecture, tensors, parameters of the released files, model_type of their config.json
    "1.3B": (
        FULL | {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960},
        825,
        1_418_996_800,
        "t2v",
    ),
    "5B": (
        FULL
        | {
            "num_layers": 30,
            "num_attention_heads": 24,
            "ffn_dim": 14336,
            "in_channels": 48,
            "out_channels": 48,
        },
        825,
        4_999_787_712,
        "ti2v",
    ),
    "14B": (B14, 1095, 14_288_491_584, "t2v"),
    "I2V-A14B": (B14 | {"in_channels": 36, "out_channels": 16}, 1095, 14_288_901_184, "i2v"),
    "I2V": (B14 | CLIP, 1303, 16_394_878_784, "i2v"),
    "FLF2V": (B14 | CLIP | {"pos_embed_seq_len": 514}, 1304, 16_395_536_704, "flf2v"),
}

TINY_VAES = {
    "2.1": {"base_dim": 3, "z_dim": 16},
    "2.1 with one block a level": {"base_dim": 3, "z_dim": 16, "num_res_blocks": 1},
    "2.1 with two levels": {"base_dim": 3, "dim_mult": [1, 2], "temperal_downsample": [True]},
    "2.2": {"base_dim": 4, "decoder_base_dim": 8, "z_dim": 48, "is_residual": True, "patch_size": 2}
    | {"in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    | {"latents_mean": [0.0] * 48, "latents_std": [1.0] * 48},
}


def meta(model_class, config):
    with torch.device("meta"):
        return model_class(**config).state_dict()


def clip_keys(layers=2):
    config = CLIPVisionConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2, patch_size=14
    )
    with torch.device("meta"):
        return list(CLIPVisionModel(config).state_dict())


def umt5_keys():
    config = UMT5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    with torch.device("meta"):
        return list(UMT5EncoderModel(config).state_dict())


def test_original_names_are_those_of_the_released_files():
    keys = meta(WanTransformer3DModel, ARCHITECTURES["flf2v"] | {"num_layers": 1})
    golden = {*GOLDEN_ROOT.split(), *GOLDEN_IMAGE.split(), *GOLDEN_BLOCK.split(), "img_emb.emb_pos"}
    assert set(names.original_transformer_names(keys).values()) == golden
    keys = meta(WanTransformer3DModel, ARCHITECTURES["ti2v"] | {"num_layers": 1})
    assert set(names.original_transformer_names(keys).values()) == {
        *GOLDEN_ROOT.split(),
        *GOLDEN_BLOCK.split(),
    }


@pytest.mark.parametrize("variant", PUBLISHED)
def test_every_released_size_has_its_tensors_and_parameters(variant):
    architecture, tensors, parameters, model_type = PUBLISHED[variant]
    expected = meta(WanTransformer3DModel, architecture)
    to_original = names.original_transformer_names(expected)
    assert len(set(to_original.values())) == tensors

    original = {to_original[name]: Stored(tuple(held.shape), held.dtype) for name, held in expected.items()}
    to_diffusers = names.transformer_names(original)
    derived = transformer_config({to_diffusers[name]: stored for name, stored in original.items()})
    assert original_transformer_config(derived)["model_type"] == model_type
    full = {"in_channels": 16, "out_channels": 16, "image_dim": None, "added_kv_proj_dim": None}
    full |= {"pos_embed_seq_len": None, "patch_size": [1, 2, 2], "cross_attn_norm": True} | architecture
    assert {key: derived[key] for key in full} == full
    assert sum(held.numel() for held in expected.values()) == parameters


def tiny_transformer(variant):
    state = meta(WanTransformer3DModel, ARCHITECTURES[variant])
    return {name: Stored(tuple(held.shape), held.dtype) for name, held in state.items()}


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_a_transformers_own_configuration_beside_is_believed_in_either_layout(variant):
    tensors = tiny_transformer(variant)
    own = json.loads(json.dumps(dict(WanTransformer3DModel(**ARCHITECTURES[variant]).config)))
    derived = transformer_config(tensors, own)
    assert (derived["num_attention_heads"], derived["attention_head_dim"]) == (4, 12)
    original = original_transformer_config(derived)
    assert transformer_config(tensors, original) == derived
    assert transformer_config(tensors, original | {"eps": 1e-5})["eps"] == 1e-5


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"num_heads": 4, "dim": 96}, "dim 96 in config.json and 48 in the tensors"),
        ({"num_heads": 4, "num_layers": 30}, "num_layers 30 in config.json and 2 in the tensors"),
        ({"num_heads": 4, "ffn_dim": 8960}, "ffn_dim 8960 in config.json and 64 in the tensors"),
        ({"num_heads": 4, "in_dim": 36}, "in_dim 36 in config.json and 16 in the tensors"),
        ({"num_attention_heads": 4, "in_channels": 36}, "in_channels 36 in config.json and 16 in"),
        ({"num_attention_heads": 4, "attention_head_dim": 128}, "attention_head_dim 128 in .* and 12 in"),
        (
            {"num_attention_heads": 4, "patch_size": [1, 4, 4]},
            r"patch_size \[1, 4, 4\] in .* and \[1, 2, 2\]",
        ),
        ({"num_attention_heads": 4, "image_dim": 1280}, "image_dim 1280 in config.json and None in"),
        ({"num_heads": 4, "out_dim": 48, "text_dim": 4096}, "out_dim 48 in .*; text_dim 4096 in"),
        *(({"num_heads": value}, f"num_heads={value!r}") for value in ("x", -2, 2.5, 5, True)),
        *(({"num_attention_heads": value}, f"num_attention_heads={value!r}") for value in ("4", 0)),
        *(({"num_heads": 4, "eps": value}, f"eps={value!r}; it is a number") for value in ("x", -1.0, True)),
        ({"num_heads": 4, "rope_max_seq_len": 1.5}, "rope_max_seq_len=1.5; .* whole, 1024 in"),
    ],
)
def test_a_configuration_that_was_meant_for_other_tensors_is_refused(beside, words):
    with pytest.raises(CheckpointError, match=f"weights.pth: the config.json beside .*{words}"):
        transformer_config(tiny_transformer("t2v"), beside, "weights.pth")


def test_a_text_has_as_many_slots_in_a_configuration_as_in_the_model():
    assert TEXT_TOKENS == TEXT_LENGTH


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_transformer_names_agree_with_diffusers_own_converter(variant):
    keys = names.original_transformer_names(meta(WanTransformer3DModel, ARCHITECTURES[variant]))
    original = {old: torch.tensor(number) for number, old in enumerate(keys.values())}
    numbers = {old: int(number) for old, number in original.items()}
    converted = convert_wan_transformer_to_diffusers(dict(original))
    ours = {new: numbers[old] for old, new in names.transformer_names(original).items()}
    if variant == "flf2v":  # the one name that diffusers' converter leaves as it is
        converted["condition_embedder.image_embedder.pos_embed"] = converted.pop("img_emb.emb_pos")
    assert {new: int(number) for new, number in converted.items()} == ours


def test_vae_names_agree_with_diffusers_own_converter():
    keys = names.original_vae_names(meta(AutoencoderKLWan, TINY_VAES["2.1"]))
    original = {old: torch.tensor(number) for number, old in enumerate(keys.values())}
    converted = convert_wan_vae_to_diffusers(original)
    ours = {new: int(original[old]) for old, new in names.vae_names(original).items()}
    assert {new: int(number) for new, number in converted.items()} == ours


@pytest.mark.parametrize(
    ("variant", "diffusers", "original"),
    [
        ("2.1", "encoder.down_blocks.5.time_conv.weight", "encoder.downsamples.5.time_conv.weight"),
        ("2.1", "decoder.up_blocks.1.upsamplers.0.resample.1.bias", "decoder.upsamples.7.resample.1.bias"),
        ("2.1", "decoder.up_blocks.3.resnets.2.conv2.weight", "decoder.upsamples.14.residual.6.weight"),
        (
            "2.2",
            "encoder.down_blocks.1.downsampler.time_conv.weight",
            "encoder.downsamples.1.downsamples.2.time_conv.weight",
        ),
        (
            "2.2",
            "encoder.down_blocks.2.resnets.0.conv_shortcut.weight",
            "encoder.downsamples.2.downsamples.0.shortcut.weight",
        ),
        (
            "2.2",
            "decoder.up_blocks.0.upsampler.resample.1.weight",
            "decoder.upsamples.0.upsamples.3.resample.1.weight",
        ),
        (
            "2.2",
            "decoder.up_blocks.2.resnets.1.norm2.gamma",
            "decoder.upsamples.2.upsamples.1.residual.3.gamma",
        ),
        ("2.2", "decoder.mid_block.attentions.0.to_qkv.weight", "decoder.middle.1.to_qkv.weight"),
        ("2.2", "decoder.norm_out.gamma", "decoder.head.0.gamma"),
        ("2.2", "quant_conv.weight", "conv1.weight"),
    ],
)
def test_vae_names_are_those_written_out_by_hand(variant, diffusers, original):
    assert names.original_vae_names(meta(AutoencoderKLWan, TINY_VAES[variant]))[diffusers] == original


@pytest.mark.parametrize(("variant", "tensors"), [("2.1", 194), ("2.2", 196)])
def test_a_vae_has_as_many_tensors_as_the_released_file(variant, tensors):
    assert len(set(names.original_vae_names(meta(AutoencoderKLWan, TINY_VAES[variant])).values())) == tensors


@pytest.mark.parametrize("variant", TINY_VAES)
def test_vae_names_there_and_back_are_the_same(variant):
    to_original = names.original_vae_names(meta(AutoencoderKLWan, TINY_VAES[variant]))
    assert names.vae_names(to_original.values()) == {old: new for new, old in to_original.items()}


def test_text_encoder_names_are_those_written_out_by_hand():
    found = names.original_text_encoder_names(umt5_keys())
    assert {old for old in found.values() if not old.startswith("blocks.1.")} == {
        "token_embedding.weight",
        "norm.weight",
        "blocks.0.norm1.weight",
        "blocks.0.attn.q.weight",
        "blocks.0.attn.k.weight",
        "blocks.0.attn.v.weight",
        "blocks.0.attn.o.weight",
        "blocks.0.pos_embedding.embedding.weight",
        "blocks.0.norm2.weight",
        "blocks.0.ffn.gate.0.weight",
        "blocks.0.ffn.fc1.weight",
        "blocks.0.ffn.fc2.weight",
    }
    attention = "encoder.block.1.layer.0.SelfAttention"
    dense = "encoder.block.1.layer.1.DenseReluDense"
    assert found[f"{attention}.relative_attention_bias.weight"] == "blocks.1.pos_embedding.embedding.weight"
    assert found[f"{dense}.wi_0.weight"] == "blocks.1.ffn.gate.0.weight"
    assert found[f"{dense}.wi_1.weight"] == "blocks.1.ffn.fc1.weight"
    assert found["shared.weight"] == found["encoder.embed_tokens.weight"] == "token_embedding.weight"
    back = names.text_encoder_names(found.values())
    assert set(back.values()) == set(umt5_keys()) - {"encoder.embed_tokens.weight"}


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_image_encoder_names_are_those_written_out_by_hand(prefix):
    found = names.original_image_encoder_names([f"{prefix}{key}" for key in clip_keys()])
    assert {old for old in found if not old.startswith("visual.transformer.1.")} == {
        "visual.cls_embedding",
        "visual.pos_embedding",
        "visual.patch_embedding.weight",
        *(f"visual.{norm}.{leaf}" for norm in ("pre_norm", "post_norm") for leaf in ("weight", "bias")),
        *(
            f"visual.transformer.0.{module}.{leaf}"
            for module in ("norm1", "norm2", "attn.to_qkv", "attn.proj", "mlp.0", "mlp.2")
            for leaf in ("weight", "bias")
        ),
    }
    assert found["visual.pre_norm.bias"] == (f"{prefix}pre_layrnorm.bias",)
    assert found["visual.transformer.1.attn.to_qkv.bias"] == tuple(
        f"{prefix}encoder.layers.1.self_attn.{part}_proj.bias" for part in "qkv"
    )
    assert names.image_encoder_names(found, prefix) == found


def test_what_clips_vision_model_lacks_has_no_name_there_and_a_count_no_name_here():
    rest = ["visual.head", "log_scale", "textual.token_embedding.weight"]
    assert names.image_encoder_names(rest) == dict.fromkeys(rest, ())
    old_files = [*clip_keys(), "embeddings.position_ids"]
    assert names.original_image_encoder_names(old_files) == names.original_image_encoder_names(clip_keys())


def both_sides():
    transformer = names.original_transformer_names(meta(WanTransformer3DModel, ARCHITECTURES["i2v"]))
    vae = names.original_vae_names(meta(AutoencoderKLWan, TINY_VAES["2.1"]))
    residual = names.original_vae_names(meta(AutoencoderKLWan, TINY_VAES["2.2"]))
    text = names.original_text_encoder_names(umt5_keys())
    image = names.original_image_encoder_names(clip_keys())
    yield from (("transformer", side, keys) for side, keys in _sides(transformer))
    yield from (("vae", side, keys) for maps in (vae, residual) for side, keys in _sides(maps))
    yield from (("text_encoder", side, keys) for side, keys in _sides(text))
    yield "image_encoder", "original", list(image)
    yield "image_encoder", "diffusers", clip_keys()
    yield "image_encoder", "diffusers", [f"vision_model.{key}" for key in clip_keys()]


def _sides(to_original):
    return ("diffusers", list(to_original)), ("original", list(to_original.values()))


@pytest.mark.parametrize(("component", "layout", "keys"), both_sides())
def test_a_kind_is_told_from_all_names_and_from_those_of_its_blocks_alone(component, layout, keys):
    assert names.kind_of(keys) == (component, layout)
    part = [key for key in keys if any(number in key for number in (".0.", ".1."))]
    assert names.kind_of(part) == (component, layout)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["some.weight"], r"file: unknown layout; looked for .*blocks\.0\.attn1.*but found some\.weight"),
        (
            ["diffusion_model.blocks.0.self_attn.lora_A"],
            "it looks like a LoRA adapter, not a model",
        ),
        ([], "found no tensors"),
        (
            ["blocks.0.self_attn.q.weight", "encoder.conv1.weight"],
            r"holds tensors of transformer \(original\) and vae \(original\)",
        ),
    ],
)
def test_what_is_no_component_is_said(keys, said):
    with pytest.raises(CheckpointError, match=said):
        names.kind_of(keys, "file")


@pytest.mark.parametrize(
    ("translate", "key", "whose"),
    [
        (names.transformer_names, "blocks.0.self_attn.query.weight", "Wan's original transformer"),
        (names.transformer_names, "vace_blocks.0.modulation", "Wan's original transformer"),
        (names.transformer_names, "blocks.0.norm2.weight", "Wan's original transformer"),
        (names.original_transformer_names, "blocks.0.norm3.weight", "diffusers' WanTransformer3DModel"),
        (names.vae_names, "encoder.downsamples.0.norm", "Wan's original VAE"),
        (names.original_vae_names, "loss.weight", "diffusers' AutoencoderKLWan"),
        (names.text_encoder_names, "decoder.norm.weight", "Wan's original UMT5 encoder"),
        (names.original_text_encoder_names, "lm_head.weight", "transformers' UMT5EncoderModel"),
        (names.image_encoder_names, "visual.neck.weight", "Wan's original CLIP"),
        (names.original_image_encoder_names, "text_model.norm", "transformers' CLIPVisionModel"),
    ],
)
def test_a_name_that_no_model_has_is_refused(translate, key, whose):
    with pytest.raises(CheckpointError, match=f"1 names are not of {whose}: {key}"):
        translate([key])
