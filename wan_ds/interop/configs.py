"""Configurations that belong to weights, read off the tensors' shapes: diffusers', transformers' and Wan's.

Shapes do not tell the number of attention heads (but UMT5's): a configuration that lies beside does, else the
width of a head is that of every released model. Layers, channels and widths are never taken from beside, and
must be the same there.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import diffusers
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from transformers import CLIPVisionConfig, UMT5Config
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, PILImageResampling

from wan_ds.errors import CheckpointError
from wan_ds.interop.names import image_encoder_prefix, is_vae_residual
from wan_ds.interop.tensor_files import Stored

Tensors = Mapping[str, Stored]
Configuration = dict[str, Any]  # the content of a config.json

HEAD_DIM = 128  # of every released transformer
CLIP_HEAD_DIM = 80  # of ViT-H/14
TEXT_TOKENS = 512  # `text_len` of the original wan/configs/shared_config.py; models/tokens.py has it for us
_SIZES = (  # in a transformer's config.json of either layout, and in the shapes
    *("num_layers", "ffn_dim", "freq_dim", "text_dim", "in_channels", "out_channels", "patch_size"),
    *("attention_head_dim", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len"),
)

# Of the Wan 2.2 VAE: constants of Wan2_2_VAE in the original code, wan/modules/vae2_2.py. The 2.1 VAE's are
# diffusers' defaults.
LATENTS_MEAN_48 = [
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
    *(-0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825),
    *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
    *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230),
    *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748),
    *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
]
LATENTS_STD_48 = [
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013),
    *(0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978),
    *(0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
    *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093),
    *(0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
    *(0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
]


def transformer_config(
    tensors: Tensors, beside: Mapping[str, Any] | None = None, where: str = "these tensors"
) -> Configuration:
    """`config.json` of diffusers' WanTransformer3DModel for tensors under diffusers' names.

    ``beside`` is a config.json of either layout; ``where`` begins the messages. Raises CheckpointError if a
    tensor that tells a size is missing, ``beside`` says another size, or the heads do not divide the width.
    """
    beside = beside or {}
    sizes = _Shapes(tensors, where)
    width, in_channels, *patch = sizes["patch_embedding.weight"]
    image = "condition_embedder.image_embedder."
    heads = _heads(width, beside, where)
    has_clip = f"{image}norm1.weight" in tensors
    config = _diffusers_config(
        WanTransformer3DModel,
        patch_size=patch,
        num_attention_heads=heads,
        attention_head_dim=width // heads,
        in_channels=in_channels,
        out_channels=sizes["proj_out.weight"][0] // math.prod(patch),
        text_dim=sizes["condition_embedder.text_embedder.linear_1.weight"][1],
        freq_dim=sizes["condition_embedder.time_embedder.linear_1.weight"][1],
        ffn_dim=sizes["blocks.0.ffn.net.0.proj.weight"][0],
        num_layers=sizes.count("blocks."),
        cross_attn_norm="blocks.0.norm2.weight" in tensors,
        qk_norm="rms_norm_across_heads",
        eps=_number(beside, "eps", 1e-6, where),
        image_dim=sizes[f"{image}norm1.weight"][0] if has_clip else None,
        added_kv_proj_dim=sizes["blocks.0.attn2.add_k_proj.weight"][1] if has_clip else None,
        rope_max_seq_len=_number(beside, "rope_max_seq_len", 1024, where),
        pos_embed_seq_len=sizes[f"{image}pos_embed"][1] if f"{image}pos_embed" in tensors else None,
    )
    _refuse_other_sizes(config, width, beside, where)
    return config


def _heads(width: int, beside: Mapping[str, Any], where: str) -> int:
    said = [name for name in ("num_attention_heads", "num_heads") if beside.get(name) is not None]
    if not said and (width % HEAD_DIM or not width):
        raise CheckpointError(
            f"{where}: a width of {width} is not a number of heads of {HEAD_DIM}, and no config.json beside "
            "says num_heads (original) or num_attention_heads (diffusers) that divides it"
        )
    heads = beside[said[0]] if said else width // HEAD_DIM
    if type(heads) is not int or heads < 1 or width % heads:
        raise CheckpointError(
            f"{where}: the config.json beside says {said[0]}={heads!r}, which is no number of equal parts of "
            f"the tensors' width, {width}; correct it, or lay the right config.json there"
        )
    return heads


def _number(beside: Mapping[str, Any], name: str, default: float, where: str) -> Any:
    value = default if beside.get(name) is None else beside[name]
    if type(value) not in (int, type(default)) or not value > 0:
        raise CheckpointError(
            f"{where}: the config.json beside says {name}={value!r}; it is a number above 0, "
            f"{'whole, ' if type(default) is int else ''}{default} in every released model"
        )
    return value


def _refuse_other_sizes(config: Mapping[str, Any], width: int, beside: Mapping[str, Any], where: str) -> None:
    """A config.json that was meant for other tensors would give these its heads."""
    found = {"dim": width, "in_dim": config["in_channels"], "out_dim": config["out_channels"]}
    found |= {name: config[name] for name in _SIZES}
    differing = [
        f"{name} {beside[name]!r} in config.json and {value} in the tensors"
        for name, value in found.items()
        if beside.get(name) not in (None, value)
    ]
    if differing:
        raise CheckpointError(
            f"{where}: the config.json beside is of another model: {'; '.join(differing)}; lay the right one "
            "there, or move this one away"
        )


def original_transformer_config(config: Mapping[str, Any]) -> Configuration:
    """`config.json` of the original WanModel from diffusers' one.

    What the original code does not read from the file (patch_size, text_dim, norms) is not in it.
    """
    if config["image_dim"] is not None:
        model_type = "i2v" if config["pos_embed_seq_len"] is None else "flf2v"
    elif config["in_channels"] == config["out_channels"]:
        model_type = "ti2v" if is_expanding_timesteps(config) else "t2v"
    else:
        model_type = "i2v"  # Wan 2.2's, without CLIP
    return {
        "_class_name": "WanModel",
        "_diffusers_version": diffusers.__version__,
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "eps": config["eps"],
        "ffn_dim": config["ffn_dim"],
        "freq_dim": config["freq_dim"],
        "in_dim": config["in_channels"],
        "model_type": model_type,
        "num_heads": config["num_attention_heads"],
        "num_layers": config["num_layers"],
        "out_dim": config["out_channels"],
        "text_len": TEXT_TOKENS,
    }


def vae_config(tensors: Tensors, where: str = "these tensors") -> Configuration:
    """`config.json` of diffusers' AutoencoderKLWan, 2.1 or 2.2, for tensors under diffusers' names.

    Raises CheckpointError if a tensor is missing or the latents have neither 16 nor 48 channels.
    """
    sizes = _Shapes(tensors, where)
    is_residual = is_vae_residual(tensors)
    base, in_channels, *_ = sizes["encoder.conv_in.weight"]
    channels = sizes["post_quant_conv.weight"][0]
    levels = sizes.count("decoder.up_blocks.")
    widths = [sizes[f"decoder.up_blocks.{n}.resnets.0.conv2.weight"][0] for n in reversed(range(levels))]
    first = "encoder.down_blocks.0.resnets.0" if is_residual else "encoder.down_blocks.0"
    multiple = sizes[f"{first}.conv2.weight"][0] // base
    upsampler = "upsampler" if is_residual else "upsamplers.0"
    over_time = [f"decoder.up_blocks.{n}.{upsampler}.time_conv.weight" in tensors for n in range(levels - 1)]
    decoder_base = widths[0] // multiple
    patch = math.isqrt(in_channels // 3)
    statistics = {16: {}, 48: {"latents_mean": LATENTS_MEAN_48, "latents_std": LATENTS_STD_48}}
    if channels not in statistics:
        raise CheckpointError(
            f"{where}: latents of {channels} channels, whose mean and standard deviation are not known: "
            "Wan 2.1 has 16, Wan 2.2 has 48"
        )
    return _diffusers_config(
        AutoencoderKLWan,
        base_dim=base,
        decoder_base_dim=decoder_base if decoder_base != base else None,
        z_dim=channels,
        dim_mult=[multiple * width // widths[0] for width in widths],
        num_res_blocks=sizes.count("decoder.up_blocks.0.resnets.") - 1,
        temperal_downsample=over_time[::-1],
        is_residual=is_residual,
        in_channels=in_channels,
        out_channels=sizes["decoder.conv_out.weight"][0],
        patch_size=patch if patch > 1 else None,
        scale_factor_temporal=2 ** sum(over_time),
        scale_factor_spatial=2 ** (levels - 1) * patch,
        **statistics[channels],
    )


def text_encoder_config(tensors: Tensors, where: str = "these tensors") -> Configuration:
    """`config.json` of transformers' UMT5EncoderModel for tensors under its names."""
    sizes = _Shapes(tensors, where)
    attention = "encoder.block.0.layer.0.SelfAttention."
    vocabulary, width = sizes["shared.weight"]
    buckets, heads = sizes[f"{attention}relative_attention_bias.weight"]
    return _transformers_config(
        UMT5Config(
            vocab_size=vocabulary,
            d_model=width,
            d_kv=sizes[f"{attention}q.weight"][0] // heads,
            d_ff=sizes["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"][0],
            num_layers=sizes.count("encoder.block."),
            num_heads=heads,
            relative_attention_num_buckets=buckets,
            dtype=tensors["shared.weight"].dtype,
            architectures=["UMT5EncoderModel"],
        )
    )


def image_encoder_config(tensors: Tensors, where: str = "these tensors") -> Configuration:
    """`config.json` of transformers' CLIPVisionModel (CLIP's ViT-H/14) for tensors under its names."""
    sizes = _Shapes(tensors, where)
    prefix = image_encoder_prefix(tensors)
    width, _, patch, _ = sizes[f"{prefix}embeddings.patch_embedding.weight"]
    tokens = sizes[f"{prefix}embeddings.position_embedding.weight"][0]
    if width % CLIP_HEAD_DIM:
        raise CheckpointError(
            f"{where}: a width of {width} is not a number of heads of {CLIP_HEAD_DIM} as ViT-H's are; lay "
            "transformers' config.json of the CLIPVisionModel beside it"
        )
    return _transformers_config(
        CLIPVisionConfig(
            hidden_size=width,
            intermediate_size=sizes[f"{prefix}encoder.layers.0.mlp.fc1.weight"][0],
            num_hidden_layers=sizes.count(f"{prefix}encoder.layers."),
            num_attention_heads=width // CLIP_HEAD_DIM,
            image_size=math.isqrt(tokens - 1) * patch,
            patch_size=patch,
            hidden_act="gelu",  # exact, not CLIP's usual quick_gelu
            layer_norm_eps=1e-5,
            projection_dim=1024,
            dtype=tensors[f"{prefix}embeddings.class_embedding"].dtype,
            architectures=["CLIPVisionModel"],
        )
    )


def is_expanding_timesteps(transformer: Mapping[str, Any]) -> bool:
    """Whether diffusers' pipelines run a model with a timestep per token: Wan 2.2 TI2V, by its channels."""
    return transformer["in_channels"] == transformer["out_channels"] == len(LATENTS_MEAN_48)


def official_boundary(transformer: Mapping[str, Any]) -> float:
    """Where Wan 2.2's experts meet: t2v_A14B.py and i2v_A14B.py of the original wan/configs."""
    return 0.875 if transformer["in_channels"] == transformer["out_channels"] else 0.9


def official_shift(transformer: Mapping[str, Any], is_dual: bool, is_480p: bool = False) -> float:
    """`sample_shift` of the original wan/configs and generate.py.

    Nothing but a name tells the 480p model of Wan 2.1 I2V from the 720p one.
    """
    is_text_only = transformer["in_channels"] == transformer["out_channels"]
    if transformer["pos_embed_seq_len"] is not None:
        return 16.0
    if is_dual and is_text_only:
        return 12.0
    return 3.0 if is_480p and transformer["image_dim"] is not None else 5.0


def scheduler_config(shift: float) -> Configuration:
    """`scheduler_config.json` of the UniPC scheduler that Wan is sampled with."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
    )
    return json.loads(scheduler.to_json_string())


def image_processor_config(image_encoder: Mapping[str, Any]) -> Configuration:
    """`preprocessor_config.json` of CLIP's own preprocessing at the encoder's size."""
    size = image_encoder["image_size"]
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": size},
        "resample": int(PILImageResampling.BICUBIC),
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
    }


def model_index(transformer: Mapping[str, Any], parts: set[str]) -> Configuration:
    """`model_index.json` of the diffusers pipeline for a model of which ``parts`` (subfolders) are there.

    Two experts are told by ``transformer_2`` among the parts, and by nothing else.
    """
    is_text_only = transformer["in_channels"] == transformer["out_channels"]
    classes = {
        "image_encoder": ("transformers", "CLIPVisionModel"),
        "image_processor": ("transformers", "CLIPImageProcessor"),
        "scheduler": ("diffusers", "UniPCMultistepScheduler"),
        "text_encoder": ("transformers", "UMT5EncoderModel"),
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "transformer": ("diffusers", "WanTransformer3DModel"),
        "transformer_2": ("diffusers", "WanTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
    }
    if is_text_only:
        del classes["image_encoder"], classes["image_processor"]
    return {
        "_class_name": "WanPipeline" if is_text_only else "WanImageToVideoPipeline",
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": official_boundary(transformer) if "transformer_2" in parts else None,
        "expand_timesteps": is_expanding_timesteps(transformer),
        **{part: list(names) if part in parts else [None, None] for part, names in classes.items()},
    }


class _Shapes:
    """Shapes by name, with an error that names the file for one that is not there."""

    def __init__(self, tensors: Tensors, where: str) -> None:
        self._tensors, self._where = tensors, where

    def __getitem__(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise CheckpointError(f"{self._where}: there is no {name}; of several shards name the folder")
        return self._tensors[name].shape

    def count(self, prefix: str) -> int:
        """How many numbers follow the prefix."""
        return len({name[len(prefix) :].split(".")[0] for name in self._tensors if name.startswith(prefix)})


def _diffusers_config(model_class: type, **fields: Any) -> Configuration:
    return {"_class_name": model_class.__name__, "_diffusers_version": diffusers.__version__, **fields}


def _transformers_config(config: UMT5Config | CLIPVisionConfig) -> Configuration:
    return json.loads(config.to_json_string(use_diff=False))
