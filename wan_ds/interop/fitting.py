"""Whether a configuration, the tensors and the parts of a model belong together."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from wan_ds.errors import CheckpointError
from wan_ds.interop.names import image_encoder_prefix, some
from wan_ds.interop.tensor_files import Stored

_WHOSE = {  # what the config.json of a component may say of itself
    ("transformer", "_class_name"): ("WanModel", "WanTransformer3DModel", "WanTransformer"),
    ("transformer", "model_type"): ("t2v", "i2v", "flf2v", "ti2v"),
    ("vae", "_class_name"): ("AutoencoderKLWan",),
    ("text_encoder", "model_type"): ("umt5",),
    ("image_encoder", "model_type"): ("clip_vision_model",),
}
_OWN = {"_class_name", "_diffusers_version", "_name_or_path"}  # of a config.json: not the model's


def is_of(component: str, config: Mapping[str, Any]) -> bool:
    """Whether a config.json is a Wan component's, going by what it says of itself; it may say nothing."""
    told = {name: config[name] for name in ("_class_name", "model_type") if config.get(name) is not None}
    return all(value in _WHOSE.get((component, name), ()) for name, value in told.items())


def refuse_misfits(
    component: str, config: Mapping[str, Any], tensors: Mapping[str, Stored], where: str
) -> None:
    """CheckpointError unless the library's class, built from ``config``, has just these names and shapes."""
    expected = _expected(component, config, where)
    found = {name: tuple(stored.shape) for name, stored in tensors.items()}
    if component == "image_encoder":
        prefix = image_encoder_prefix(found)
        found = {name.removeprefix(prefix): shape for name, shape in found.items()}
        found.pop("embeddings.position_ids", None)  # what transformers before 4.31 stored: a count
    elif component == "text_encoder":  # tied, so that one of the two names is enough
        embedding = found.pop("encoder.embed_tokens.weight", None)
        expected.pop("encoder.embed_tokens.weight", None)
        found.setdefault("shared.weight", embedding)
    wrong = {
        "missing": [name for name in expected if name not in found],
        "unknown": [name for name in found if name not in expected],
        "of another shape": [
            f"{name} ({found[name]}, not {expected[name]})"
            for name in expected
            if name in found and found[name] != expected[name]
        ],
    }
    listings = [f"{kind}: {some(names)}" for kind, names in wrong.items() if names]
    if listings:
        raise CheckpointError(
            f"{where}: is not a whole {component} of Wan: {'; '.join(listings)}; of several shards name the "
            "folder, not one file"
        )


def _expected(component: str, config: Mapping[str, Any], where: str) -> dict[str, tuple[int, ...]]:
    try:
        with torch.device("meta"):
            if component == "transformer":
                model = WanTransformer3DModel.from_config(dict(config))
            elif component == "vae":
                model = AutoencoderKLWan.from_config(dict(config))
            elif component == "text_encoder":
                model = UMT5EncoderModel(UMT5Config(**config))
            else:
                model = CLIPVisionModel(CLIPVisionConfig(**config))
    except Exception as error:  # the libraries' own, of any kind: the values may be anything
        raise CheckpointError(
            f"{where}: no {component} can be built from the configuration beside: {error}; correct it, or "
            "move it away"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def refuse_mixture(parts: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """CheckpointError unless the parts of a model, each a place and a configuration by its role, fit.

    Two experts are of one architecture, and the encoders give what the transformer takes.
    """
    where, transformer = parts["transformer"]
    if "transformer_2" in parts:
        second, other = parts["transformer_2"]
        differing = [
            f"{name} {value} and {other.get(name)}"
            for name, value in transformer.items()
            if name not in _OWN and other.get(name) != value
        ]
        if differing:
            raise CheckpointError(
                f"{where} and {second} are no two experts of one model: they have {some(differing)}; put the "
                "right one there, or convert them one by one"
            )
    widths = {  # the transformer's, the other part's with its class's default, and what it is
        "vae": ("out_channels", "z_dim", 16, "channels of the latents"),
        "text_encoder": ("text_dim", "d_model", 512, "the width of a word"),
        "image_encoder": ("image_dim", "hidden_size", 768, "the width of a patch of the image"),
    }
    for role, (name, other_name, default, what) in widths.items():
        if role in parts and transformer[name] is not None:
            place, other = parts[role]
            value = other.get(other_name, default)
            if transformer[name] != value:
                raise CheckpointError(
                    f"{place} is not the {role} of {where}: {what}, {value} there ({other_name}) and "
                    f"{transformer[name]} in the transformer ({name}); put the right one there, or convert "
                    "them one by one"
                )
