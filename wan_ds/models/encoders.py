"""What the frozen networks beside Wan make: latents of pixels and back, embeddings of captions and of images.

Letters: B clips, C latent channels, F H W frames, height and width of the pixels, f h w those of the latents.
Each clip, caption and image passes alone, so that its values do not depend on what else is in the batch.
"""

import html
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import ftfy
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoTokenizer,
    # PIL's resampling even where torchvision is installed: features are the same on every machine.
    CLIPImageProcessorPil,
    CLIPVisionModel,
    PreTrainedTokenizerBase,
    UMT5EncoderModel,
)
from transformers.utils.logging import disable_progress_bar

from wan_ds.errors import CheckpointError, DataError
from wan_ds.models.tokens import TEXT_LENGTH

# Wan was trained on what enters CLIP's last block, every token of it (`use_31_block` in its own code).
CLIP_HIDDEN_STATE = -2

# The transformer of every Wan model joins 2 x 2 latents into a token, and would cut off an odd row or column.
PATCH = 2

# Scaling of images and codecs may leave the last bits of float32 outside [-1, 1].
PIXEL_LIMIT = 1.0001


def load_vae(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    tiling: bool = False,
) -> AutoencoderKLWan:
    """The autoencoder in diffusers' layout, without gradients; `CheckpointError` if it is not in `folder`.

    Tiling takes less memory for frames that are larger than a tile, and its latents are not quite those of
    the whole frame: what is made with it and without must not be mixed.
    """
    vae = _frozen(_load("vae", AutoencoderKLWan, folder, torch_dtype=dtype), device)
    if tiling:
        vae.enable_tiling()
    return vae


@torch.no_grad()
def encode_video(vae: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    """Normalised latents `[B, C, f, h, w]`, float32, of `pixels` `[B, 3, F, H, W]` in [-1, 1].

    They are the posterior's mean, as in Wan's own code. Raises `DataError` for pixels of another range or a
    size that the autoencoder or the transformer would cut, with the nearest that they would not. The range is
    read where the pixels are: those on the host do not make it wait for the GPU.
    """
    _check_pixels(vae, pixels)
    mean, std = _statistics(vae)
    clips = []
    with torch.autocast(vae.device.type, enabled=False):
        for clip in pixels.split(1):
            moments = vae.encode(clip.to(vae.device, vae.dtype)).latent_dist
            clips.append((moments.mode().float() - mean) / std)
    return torch.cat(clips)


@torch.no_grad()
def decode_latents(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Pixels `[B, 3, F, H, W]`, float32 in [-1, 1], of normalised `latents` `[B, C, f, h, w]`."""
    mean, std = _statistics(vae)
    clips = []
    with torch.autocast(vae.device.type, enabled=False):
        for clip in latents.split(1):
            moments = clip.to(vae.device, torch.float32) * std + mean
            clips.append(vae.decode(moments.to(vae.dtype), return_dict=False)[0].float())
    return torch.cat(clips).clamp(-1, 1)


def _statistics(vae: AutoencoderKLWan) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latents by channel, `[1, C, 1, 1, 1]` float32."""
    shape = (1, -1, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean, device=vae.device, dtype=torch.float32).view(shape)
    return mean, torch.tensor(vae.config.latents_std, device=vae.device, dtype=torch.float32).view(shape)


def _check_pixels(vae: AutoencoderKLWan, pixels: Tensor) -> None:
    _check_range("the autoencoder", pixels)
    if pixels.ndim != 5 or pixels.shape[1] != 3:
        raise DataError(
            f"the autoencoder takes pixels [clips, 3, frames, height, width], not {list(pixels.shape)}"
        )
    frames, height, width = pixels.shape[2:]
    time, space = vae.config.scale_factor_temporal, vae.config.scale_factor_spatial * PATCH
    near = [
        _nearest(name, size, step, offset)
        for name, size, step, offset in (
            ("frames", frames, time, 1),
            ("height", height, space, 0),
            ("width", width, space, 0),
        )
        if (size - offset) % step
    ]
    if near:
        raise DataError(
            f"{frames} frames of {height}x{width}: there must be {time} n + 1 frames, whose height and width"
            f" are multiples of {space}, or the rest would be cut off; choose {', '.join(near)}"
        )


def _nearest(name: str, size: int, step: int, offset: int) -> str:
    below = (size - offset) // step * step + offset
    return f"{name} {' or '.join(str(near) for near in (below, below + step) if near > 0)}"


def _check_range(taker: str, pixels: Tensor) -> None:
    rule = f"{taker} takes float pixels in [-1, 1]"
    if not pixels.is_floating_point():
        raise DataError(f"{rule}, these are {pixels.dtype}; use pixels.float() / 127.5 - 1")
    if not pixels.numel():
        raise DataError(f"{rule}, and there are none in {list(pixels.shape)}")
    low, high = torch.stack(pixels.aminmax()).tolist()
    if not (low >= -PIXEL_LIMIT and high <= PIXEL_LIMIT):  # so that NaN is refused too
        raise DataError(
            f"{rule}, these go from {low:g} to {high:g}; 0..255 become x / 127.5 - 1, 0..1 become 2 x - 1"
        )


class TextEncoder:
    """umT5 and its tokenizer: captions to what Wan attends to."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, encoder: UMT5EncoderModel, device: torch.device | str
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = _frozen(encoder, device)
        self.device = torch.device(device)

    @property
    def width(self) -> int:
        """Numbers per text slot."""
        return self.encoder.config.d_model

    @torch.no_grad()
    def __call__(self, captions: list[str]) -> Tensor:
        """Prompt embeddings `[B, 512, width]`, float32, zeros after its end; "" is the null caption.

        ValueError unless there is a list with a caption in it.
        """
        if isinstance(captions, str) or not captions:
            raise ValueError(f"captions must be a list of one or more, not {captions!r}")
        return torch.stack([self._encode(caption) for caption in captions])

    def _encode(self, caption: str) -> Tensor:
        tokens = self.tokenizer(
            [clean(caption)],
            padding="max_length",
            max_length=TEXT_LENGTH,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = tokens.attention_mask.to(self.device)
        with torch.autocast(self.device.type, enabled=False):
            embeds = self.encoder(tokens.input_ids.to(self.device), mask).last_hidden_state
        # A choice, not a product: what umT5 gives for padding may be anything.
        return torch.where(mask[0, :, None] > 0, embeds[0].float(), 0.0)


def load_text_encoder(
    tokenizer_folder: str | Path, encoder_folder: str | Path, device: torch.device | str, dtype: torch.dtype
) -> TextEncoder:
    """umT5 without gradients or dropout; `CheckpointError` names the part and the folder that is wrong."""
    disable_progress_bar()  # of transformers, which draws one on every rank
    tokenizer = _load("tokenizer", AutoTokenizer, tokenizer_folder, report=False)
    return TextEncoder(
        tokenizer, _load("text_encoder", UMT5EncoderModel, encoder_folder, dtype=dtype), device
    )


class ImageEncoder:
    """CLIP's image tower and the processor that makes its input: a frame to what Wan 2.1 I2V attends to."""

    def __init__(
        self, processor: CLIPImageProcessorPil, encoder: CLIPVisionModel, device: torch.device | str
    ) -> None:
        self.processor = processor
        self.encoder = _frozen(encoder, device)
        self.device = torch.device(device)

    @property
    def width(self) -> int:
        """Numbers per image token."""
        return self.encoder.config.hidden_size

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Embeddings `[tokens, width]`, float32, of `pixels` `[3, height, width]` in [-1, 1].

        They pass through 8 bits a colour, as a file's do: a frame in training and the same frame given to
        diffusers' pipeline as an image are one. Raises `DataError` for pixels of another range.
        """
        _check_range("the image encoder", pixels)
        colours = ((pixels.detach().float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        image = Image.fromarray(colours.permute(1, 2, 0).numpy())
        made = self.processor(images=image, return_tensors="pt").pixel_values.to(self.device)
        with torch.autocast(self.device.type, enabled=False):
            states = self.encoder(made, output_hidden_states=True).hidden_states
        return states[CLIP_HIDDEN_STATE][0].float()


def load_image_encoder(
    processor_folder: str | Path | None,
    encoder_folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    resize: Literal["crop", "squash"] = "crop",
) -> ImageEncoder:
    """CLIP's image tower without gradients; `CheckpointError` names the part and the folder that is wrong.

    `crop`, the rule of diffusers' pipelines, sees the middle square of a frame; `squash`, that of Wan's own
    code, sees all of it with its sides made equal (antialiased here, not there). All else is as the processor
    in `processor_folder` has it, or CLIP's own. The rule is one of the processor's settings, so that a saved
    processor carries it. `ValueError` for another rule.
    """
    if resize not in ("crop", "squash"):
        raise ValueError(f"model.image_encoder.resize={resize}: must be crop or squash")
    disable_progress_bar()  # of transformers, which draws one on every rank
    encoder = _load("image_encoder", CLIPVisionModel, encoder_folder, dtype=dtype)
    side = encoder.config.image_size
    square = {"height": side, "width": side}
    settings = {
        "do_resize": True,
        "size": {"shortest_edge": side} if resize == "crop" else square,
        "do_center_crop": resize == "crop",
        "crop_size": square,
    }
    if processor_folder is None:
        processor = CLIPImageProcessorPil(**settings)
    else:
        processor = _load(
            "image_processor", CLIPImageProcessorPil, processor_folder, report=False, **settings
        )
    return ImageEncoder(processor, encoder, device)


def clean(caption: str) -> str:
    """The caption as Wan's authors and diffusers clean it: encodings and HTML repaired, blanks single."""
    text = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return re.sub(r"\s+", " ", text).strip()


def _load(component: str, kind: Any, folder: str | Path, *, report: bool = True, **arguments: Any) -> Any:
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{component}: there is no folder {folder}; name one in model.{component}.weights"
        )
    try:
        if not report:
            return kind.from_pretrained(folder, local_files_only=True, **arguments)
        loaded, found = kind.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, **arguments
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(f"{component}: {folder} cannot be loaded: {error}") from error
    # Only a warning to the libraries, which fill them with random numbers.
    if found["missing_keys"] or found["mismatched_keys"]:
        names = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
        raise CheckpointError(
            f"{component}: {folder} lacks {len(names)} weights of this model, such as {names[0]}"
        )
    return loaded


def _frozen(module: Any, device: torch.device | str) -> Any:
    return module.to(device).eval().requires_grad_(False)
