"""A folder in diffusers' layout: what its files say of the model, and our note of what they cannot say."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan

from wan_ds.errors import CheckpointError
from wan_ds.models.encoders import (
    ImageEncoder,
    TextEncoder,
    load_image_encoder,
    load_text_encoder,
    load_vae,
)
from wan_ds.models.transformer import WanTransformer
from wan_ds.models.weights import build_transformer
from wan_ds.training.sampling import PLACES
from wan_ds.training.sources import transformer_source

INDEX = "model_index.json"
NOTE = "wan_ds.json"
PIPELINES = ("WanPipeline", "WanImageToVideoPipeline")


@dataclass(frozen=True)
class Note:
    """How the model is meant to be sampled; None where nobody said."""

    name: str | None = None
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    fps: float | None = None
    steps: int | None = None
    guidance: dict[str, float] | None = None  # by expert

    def write(self, folder: Path) -> None:
        (folder / NOTE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Exported:
    """What the files of a folder say; see `describe`."""

    folder: Path
    experts: dict[str, str]  # their subfolders
    boundary: float | None
    shift: float | None
    images: int  # that each clip needs
    images_optional: bool
    expand_timesteps: bool
    patch_size: tuple[int, int, int]
    image_encoder: bool
    note: Note

    @property
    def places(self) -> list[str]:
        """The subfolders of the model's parts."""
        image = ["image_encoder", "image_processor"] if self.image_encoder else []
        return [*self.experts.values(), "vae", "text_encoder", "tokenizer", *image]

    def load_encoders(self, where: torch.device) -> tuple[AutoencoderKLWan, TextEncoder, ImageEncoder | None]:
        """The networks beside the experts; CLIP with the resize rule that stands in the folder's settings."""
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
        vae = load_vae(self.folder / "vae", where)
        text = load_text_encoder(self.folder / "tokenizer", self.folder / "text_encoder", where, dtype)
        if not self.image_encoder:
            return vae, text, None
        processor = self.folder / "image_processor"
        crops = _read(processor / "preprocessor_config.json").get("do_center_crop", True)
        image = load_image_encoder(
            processor, self.folder / "image_encoder", where, dtype, resize="crop" if crops else "squash"
        )
        return vae, text, image

    def load_experts(self, where: torch.device) -> dict[str, WanTransformer]:
        """Without gradients, in float32 on the CPU, elsewhere as they are stored."""
        experts = {}
        for name, place in self.experts.items():
            expert = build_transformer(
                architecture(self.folder / place),
                transformer_source(str(self.folder), place, name),
                is_trainable=lambda _: where.type == "cpu",  # which are cast to float32
            )
            experts[name] = expert.to(where).eval().requires_grad_(False)
        return experts


def architecture(folder: Path) -> dict[str, Any]:
    """The arguments of diffusers' transformer in a folder's config.json."""
    content = _read(folder / "config.json")
    return {name: value for name, value in content.items() if not name.startswith("_")}


def describe(folder: Path) -> Exported:
    """The model in a folder that `WanPipeline` or `WanImageToVideoPipeline` opens; reads no weights.

    There are two experts where there is a `transformer_2`, whatever `boundary_ratio` says: diffusers' own
    conversion writes one for models of one expert. Raises `CheckpointError` for what is no such folder.
    """
    index = _read(folder / INDEX)
    kind = index.get("_class_name")
    if kind not in PIPELINES:
        raise CheckpointError(
            f"{folder / INDEX}: a pipeline of {kind}; one of {' and '.join(PIPELINES)} is sampled"
        )
    has_two = _is_there(index, "transformer_2")
    boundary = index.get("boundary_ratio") if has_two else None
    if has_two and boundary is None:
        raise CheckpointError(
            f"{folder / INDEX}: there is a transformer_2 and no boundary_ratio, the sigma where it takes"
            " over; Wan 2.2 has 0.875 (text to video) and 0.9 (image to video)"
        )
    transformer = _read(folder / "transformer" / "config.json")
    expand_timesteps = bool(index.get("expand_timesteps"))
    scheduler = _read(folder / "scheduler" / "scheduler_config.json")
    return Exported(
        folder=folder,
        experts={name: PLACES[name] for name in (("high_noise", "low_noise") if has_two else ("all",))},
        boundary=boundary,
        shift=scheduler.get("flow_shift", scheduler.get("shift")),
        images=_images(transformer, expand_timesteps),
        images_optional=expand_timesteps,
        expand_timesteps=expand_timesteps,
        patch_size=tuple(transformer.get("patch_size", (1, 2, 2))),
        image_encoder=_is_there(index, "image_encoder"),
        note=read_note(folder),
    )


def read_note(folder: Path) -> Note:
    """Our note in the folder; an empty one where there is none."""
    if not (folder / NOTE).is_file():
        return Note()
    content = _read(folder / NOTE)
    return Note(**{field.name: content.get(field.name) for field in fields(Note)})


def _images(transformer: dict[str, Any], expand_timesteps: bool) -> int:
    """Images beside the noise: channels for one or two, and CLIP's positions for two."""
    if transformer["in_channels"] == transformer["out_channels"]:
        return int(expand_timesteps)
    return 1 if transformer.get("pos_embed_seq_len") is None else 2


def _is_there(index: dict[str, Any], component: str) -> bool:
    entry = index.get(component)
    return entry is not None and entry[1] is not None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): not a folder in diffusers' layout, with {INDEX} and a"
            " subfolder for each part"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not an object in JSON")
    return content
