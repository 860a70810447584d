"""Names of tensors: Wan's original files and diffusers' (transformers' for the encoders), there and back.

Every name is looked up whole in a table built for the counts (layers, levels) that the names themselves show;
nothing is replaced within a name. `original` and `diffusers` are the two layouts throughout.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from wan_ds.errors import CheckpointError

T = TypeVar("T")

NAMES_SHOWN = 4  # of the names in an error's message
VISION = "vision_model."  # transformers before 5 wrote it before each name of a CLIPVisionModel, and reads it


class Kind(NamedTuple):
    """What a set of tensors is."""

    component: str  # transformer, vae, text_encoder, image_encoder
    layout: str  # original, diffusers


_SIGNS = {
    Kind("transformer", "original"): r"blocks\.\d+\.(self_attn|cross_attn)\.|head\.(head|modulation)\b",
    Kind("transformer", "diffusers"): r"blocks\.\d+\.attn[12]\.|condition_embedder\.",
    Kind("vae", "original"): r"(encoder|decoder)\.(conv1|downsamples|upsamples|middle|head)\.",
    Kind("vae", "diffusers"): r"(encoder|decoder)\.(conv_in|down_blocks|up_blocks|mid_block|conv_out)\.",
    Kind("text_encoder", "original"): r"blocks\.\d+\.attn\.[qkvo]\.",
    Kind("text_encoder", "diffusers"): r"encoder\.block\.\d+\.layer\.",
    Kind("image_encoder", "original"): r"visual\.",
    Kind(
        "image_encoder", "diffusers"
    ): r"(vision_model\.)?(encoder\.layers\.\d+\.|embeddings\.|pre_layrnorm)",
}


def kind_of(keys: Iterable[str], where: str = "these tensors") -> Kind:
    """The component and the layout that the names belong to.

    Raises CheckpointError if they belong to none or to several; ``where`` begins its message.
    """
    keys = list(keys)
    found = [kind for kind, sign in _SIGNS.items() if any(re.match(sign, key) for key in keys)]
    if len(found) == 1:
        return found[0]
    if found:
        several = " and ".join(f"{component} ({layout})" for component, layout in found)
        raise CheckpointError(f"{where}: holds tensors of {several}; name a file or folder with one of them")
    lora = "; it looks like a LoRA adapter, not a model" if any("lora" in key for key in keys) else ""
    raise CheckpointError(
        f"{where}: unknown layout{lora}; looked for the names of a Wan transformer (blocks.0.self_attn... or "
        "blocks.0.attn1...), VAE (encoder.downsamples... or encoder.down_blocks...), UMT5 (blocks.0.attn... "
        f"or encoder.block.0...) or CLIP (visual... or vision_model...), but found {some(keys)}"
    )


def transformer_names(keys: Iterable[str]) -> dict[str, str]:
    """Original name -> diffusers name of each tensor of any Wan 2.1 or 2.2 transformer.

    Raises CheckpointError for a name that no such transformer has, as do all functions here.
    """
    keys = list(keys)
    return _translate(keys, _transformer_table(_count(keys, "blocks.")), "Wan's original transformer")


def original_transformer_names(keys: Iterable[str]) -> dict[str, str]:
    """Diffusers name -> original name: the inverse of `transformer_names`."""
    keys = list(keys)
    table = _inverse(_transformer_table(_count(keys, "blocks.")))
    return _translate(keys, table, "diffusers' WanTransformer3DModel")


def vae_names(keys: Iterable[str]) -> dict[str, str]:
    """Original name -> diffusers name of each tensor of Wan's VAE, 2.1 (16 channels) or 2.2 (48 channels)."""
    keys = list(keys)
    return _translate(keys, _vae_table(*_original_vae_structure(keys)), "Wan's original VAE")


def original_vae_names(keys: Iterable[str]) -> dict[str, str]:
    """Diffusers name -> original name: the inverse of `vae_names`."""
    keys = list(keys)
    levels = _count(keys, "decoder.up_blocks.")
    resnets = _count(keys, "decoder.up_blocks.0.resnets.")
    table = _vae_table(is_vae_residual(keys), levels, resnets - 1)
    return _translate(keys, _inverse(table), "diffusers' AutoencoderKLWan")


def is_vae_residual(keys: Iterable[str]) -> bool:
    """Whether diffusers names are those of the 2.2 VAE, whose encoder's levels are modules of their own."""
    return any(key.startswith("encoder.down_blocks.0.resnets.") for key in keys)


def text_encoder_names(keys: Iterable[str]) -> dict[str, str]:
    """Original name -> name in transformers' UMT5EncoderModel (the tied embedding is ``shared.weight``)."""
    keys = list(keys)
    return _translate(keys, _text_encoder_table(_count(keys, "blocks.")), "Wan's original UMT5 encoder")


def original_text_encoder_names(keys: Iterable[str]) -> dict[str, str]:
    """Name in UMT5EncoderModel -> original name; both names of the tied embedding give the same one."""
    keys = list(keys)
    table = _inverse(_text_encoder_table(_count(keys, "encoder.block.")))
    table["encoder.embed_tokens.weight"] = table["shared.weight"]
    return _translate(keys, table, "transformers' UMT5EncoderModel")


def image_encoder_names(keys: Iterable[str], prefix: str = VISION) -> dict[str, tuple[str, ...]]:
    """Original name -> names in transformers' CLIPVisionModel: three (query, key, value) of each ``to_qkv``.

    What the vision model lacks (``visual.head``, ``textual.``, ``log_scale``) has no names there: ``()``.
    """
    keys = list(keys)
    table = _image_encoder_table(_count(keys, "visual.transformer."), prefix)
    rest = {key: () for key in keys if re.match(r"visual\.head$|textual\.|log_scale$", key)}
    return _translate(keys, table | rest, "Wan's original CLIP")


def original_image_encoder_names(keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The same map from a CLIPVisionModel's names, with or without ``vision_model.``.

    Old files' ``position_ids``, a mere count, is in no entry.
    """
    keys = list(keys)
    prefix = image_encoder_prefix(keys)
    table = _image_encoder_table(_count(keys, f"{prefix}encoder.layers."), prefix)
    known = {name: original for original, names in table.items() for name in names}
    found = _translate(
        [key for key in keys if key != f"{prefix}embeddings.position_ids"],
        known,
        "transformers' CLIPVisionModel",
    )
    return {original: table[original] for original in dict.fromkeys(found.values())}


def image_encoder_prefix(keys: Iterable[str]) -> str:
    """``vision_model.`` or nothing, whichever the names of a CLIPVisionModel begin with."""
    return VISION if any(key.startswith(VISION) for key in keys) else ""


def leading_ones(original: str) -> int:
    """Axes of length 1 at the front of an original CLIP tensor that transformers' lacks."""
    return {"visual.cls_embedding": 2, "visual.pos_embedding": 1}.get(original, 0)


def _translate(keys: Iterable[str], table: Mapping[str, T], what: str) -> dict[str, T]:
    unknown = [key for key in keys if key not in table]
    if unknown:
        raise CheckpointError(f"{len(unknown)} names are not of {what}: {some(unknown)}")
    return {key: table[key] for key in keys}


def some(keys: Iterable[str]) -> str:
    """The first few for an error's message, and how many more there are."""
    keys = list(keys)
    more = f" and {len(keys) - NAMES_SHOWN} more" if len(keys) > NAMES_SHOWN else ""
    return ", ".join(keys[:NAMES_SHOWN]) + more if keys else "no tensors"


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in table.items()}


def _count(keys: Iterable[str], prefix: str) -> int:
    """One more than the largest number that follows the prefix; 0 if none does."""
    numbers = [key[len(prefix) :].split(".", 1)[0] for key in keys if key.startswith(prefix)]
    return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)


def _leaves(modules: Mapping[str, str], *leaves: str) -> dict[str, str]:
    return {f"{old}.{leaf}": f"{new}.{leaf}" for old, new in modules.items() for leaf in leaves}


_TRANSFORMER_ROOT = {
    **_leaves(
        {
            "patch_embedding": "patch_embedding",
            "text_embedding.0": "condition_embedder.text_embedder.linear_1",
            "text_embedding.2": "condition_embedder.text_embedder.linear_2",
            "time_embedding.0": "condition_embedder.time_embedder.linear_1",
            "time_embedding.2": "condition_embedder.time_embedder.linear_2",
            "time_projection.1": "condition_embedder.time_proj",
            "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
            "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
            "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
            "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
            "head.head": "proj_out",
        },
        "weight",
        "bias",
    ),
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "head.modulation": "scale_shift_table",
}
_TRANSFORMER_BLOCK = {
    **_leaves(
        {
            "self_attn.q": "attn1.to_q",
            "self_attn.k": "attn1.to_k",
            "self_attn.v": "attn1.to_v",
            "self_attn.o": "attn1.to_out.0",
            "cross_attn.q": "attn2.to_q",
            "cross_attn.k": "attn2.to_k",
            "cross_attn.v": "attn2.to_v",
            "cross_attn.o": "attn2.to_out.0",
            "cross_attn.k_img": "attn2.add_k_proj",
            "cross_attn.v_img": "attn2.add_v_proj",
            "norm3": "norm2",  # the one norm of a block that has parameters: before the cross-attention
            "ffn.0": "ffn.net.0.proj",
            "ffn.2": "ffn.net.2",
        },
        "weight",
        "bias",
    ),
    **_leaves(
        {
            "self_attn.norm_q": "attn1.norm_q",
            "self_attn.norm_k": "attn1.norm_k",
            "cross_attn.norm_q": "attn2.norm_q",
            "cross_attn.norm_k": "attn2.norm_k",
            "cross_attn.norm_k_img": "attn2.norm_added_k",
        },
        "weight",
    ),
    "modulation": "scale_shift_table",
}


def _transformer_table(layers: int) -> dict[str, str]:
    blocks = {
        f"blocks.{layer}.{old}": f"blocks.{layer}.{new}"
        for layer in range(layers)
        for old, new in _TRANSFORMER_BLOCK.items()
    }
    return _TRANSFORMER_ROOT | blocks


_VAE_RESIDUAL = {
    "residual.0.gamma": "norm1.gamma",
    **_leaves({"residual.2": "conv1"}, "weight", "bias"),
    "residual.3.gamma": "norm2.gamma",
    **_leaves({"residual.6": "conv2", "shortcut": "conv_shortcut"}, "weight", "bias"),
}
_VAE_RESAMPLE = _leaves({"resample.1": "resample.1", "time_conv": "time_conv"}, "weight", "bias")
_VAE_ATTENTION = {
    "norm.gamma": "norm.gamma",
    **_leaves({"to_qkv": "to_qkv", "proj": "proj"}, "weight", "bias"),
}


def _vae_table(is_residual: bool, levels: int, res_blocks: int) -> dict[str, str]:
    """A level is ``res_blocks`` blocks (one more in the decoder) and, but for the last, a resampling."""
    table = _leaves({"conv1": "quant_conv", "conv2": "post_quant_conv"}, "weight", "bias")
    for half in ("encoder", "decoder"):
        table |= _leaves(
            {f"{half}.conv1": f"{half}.conv_in", f"{half}.head.2": f"{half}.conv_out"}, "weight", "bias"
        )
        table[f"{half}.head.0.gamma"] = f"{half}.norm_out.gamma"
        table |= _below(f"{half}.middle.0", f"{half}.mid_block.resnets.0", _VAE_RESIDUAL)
        table |= _below(f"{half}.middle.1", f"{half}.mid_block.attentions.0", _VAE_ATTENTION)
        table |= _below(f"{half}.middle.2", f"{half}.mid_block.resnets.1", _VAE_RESIDUAL)
    for level in range(levels):
        for half, blocks in (("encoder", res_blocks), ("decoder", res_blocks + 1)):
            for block in range(blocks + 1):
                inner = _VAE_RESIDUAL if block < blocks else _VAE_RESAMPLE
                old, new = _vae_module(half, level, block, blocks, is_residual)
                table |= _below(old, new, inner)
    return table


def _vae_module(half: str, level: int, block: int, blocks: int, is_residual: bool) -> tuple[str, str]:
    """Original and diffusers name of one block of a level, or of the level's resampling (block = blocks)."""
    down, ups, resampler = (
        ("down", "downsamples", "downsampler") if half == "encoder" else ("up", "upsamples", "upsampler")
    )
    flat = level * (blocks + 1) + block
    old = f"{half}.{ups}.{level}.{ups}.{block}" if is_residual else f"{half}.{ups}.{flat}"
    if not is_residual and half == "encoder":  # diffusers keeps the flat list here, but not in the decoder
        return old, f"encoder.down_blocks.{flat}"
    if block < blocks:
        return old, f"{half}.{down}_blocks.{level}.resnets.{block}"
    return old, f"{half}.{down}_blocks.{level}.{resampler}{'' if is_residual else 's.0'}"


def _below(old: str, new: str, inner: Mapping[str, str]) -> dict[str, str]:
    return {f"{old}.{a}": f"{new}.{b}" for a, b in inner.items()}


def _original_vae_structure(keys: list[str]) -> tuple[bool, int, int]:
    """Whether the levels are modules of their own (2.2), how many there are, and residual blocks in each."""
    if any(key.startswith("decoder.upsamples.0.upsamples.") for key in keys):
        blocks = _count((key for key in keys if ".residual." in key), "decoder.upsamples.0.upsamples.")
        return True, _count(keys, "decoder.upsamples."), blocks - 1
    total = _count(keys, "decoder.upsamples.")
    resampling = re.compile(r"decoder\.upsamples\.(\d+)\.resample\.")
    places = [int(found[1]) for key in keys if (found := resampling.match(key))]
    blocks = min(places, default=total)
    return False, (total + 1) // (blocks + 1), blocks - 1


def _text_encoder_table(layers: int) -> dict[str, str]:
    table = {"token_embedding.weight": "shared.weight", "norm.weight": "encoder.final_layer_norm.weight"}
    block = {
        "norm1": "layer.0.layer_norm",
        "attn.q": "layer.0.SelfAttention.q",
        "attn.k": "layer.0.SelfAttention.k",
        "attn.v": "layer.0.SelfAttention.v",
        "attn.o": "layer.0.SelfAttention.o",
        "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
        "norm2": "layer.1.layer_norm",
        "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
        "ffn.fc1": "layer.1.DenseReluDense.wi_1",
        "ffn.fc2": "layer.1.DenseReluDense.wo",
    }
    for layer in range(layers):
        table |= _below(f"blocks.{layer}", f"encoder.block.{layer}", _leaves(block, "weight"))
    return table


def _image_encoder_table(layers: int, prefix: str) -> dict[str, tuple[str, ...]]:
    table = {
        "cls_embedding": "embeddings.class_embedding",
        "pos_embedding": "embeddings.position_embedding.weight",
        "patch_embedding.weight": "embeddings.patch_embedding.weight",
        **_leaves({"pre_norm": "pre_layrnorm", "post_norm": "post_layernorm"}, "weight", "bias"),
    }
    block = {
        "norm1": "layer_norm1",
        "norm2": "layer_norm2",
        "attn.proj": "self_attn.out_proj",
        "mlp.0": "mlp.fc1",
        "mlp.2": "mlp.fc2",
    }
    fused = {}
    for layer in range(layers):
        table |= _below(f"transformer.{layer}", f"encoder.layers.{layer}", _leaves(block, "weight", "bias"))
        for leaf in ("weight", "bias"):
            fused[f"visual.transformer.{layer}.attn.to_qkv.{leaf}"] = tuple(
                f"{prefix}encoder.layers.{layer}.self_attn.{part}_proj.{leaf}" for part in "qkv"
            )
    return {f"visual.{old}": (f"{prefix}{new}",) for old, new in table.items()} | fused
