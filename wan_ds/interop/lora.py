"""LoRA files of every program: read, written, told apart by expert, and explained.

An expert's adapter is one file, `<name>-<expert>.safetensors` (`<name>.safetensors` if the model has one
expert), and its header's metadata says how it was made. diffusers opens it by `load_lora_weights(folder,
weight_name=...)`; without weight_name it looks for `pytorch_lora_weights.safetensors` or the first file.
"""

import json
import logging
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wan_ds.errors import CheckpointError
from wan_ds.interop.lora_dialects import (
    WRITERS,
    from_tensors,
    to_comfyui,
    to_diffsynth,
    to_diffusers,
    to_kohya,
    to_videox_fun,
)
from wan_ds.interop.lora_form import Lora, Shapes, linear_shapes, lora_of, refuse_unfit
from wan_ds.interop.lora_names import plain_key
from wan_ds.interop.shards import is_identical, write_safetensors
from wan_ds.interop.tensor_files import Stored, read_spans, spans_of

__all__ = [
    "DIALECTS",
    "Lora",
    "Shapes",
    "file_name",
    "from_tensors",
    "linear_shapes",
    "lora_of",
    "plain_key",
    "read",
    "readme",
    "refuse_swapped",
    "refuse_unfit",
    "to_comfyui",
    "to_diffsynth",
    "to_diffusers",
    "to_kohya",
    "to_videox_fun",
    "write",
    "write_file",
]

logger = logging.getLogger(__name__)

DIALECTS = tuple(WRITERS)
ONE_EXPERT = "all"
EXPERTS = ("high_noise", "low_noise")
UNKNOWN_BASE = "<folder or hub id of the base>"
_PEFT_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PEFT_CONFIG = "adapter_config.json"
_USUAL = (
    "adapter.safetensors",  # of a checkpoint of ours
    *_PEFT_WEIGHTS,
    "pytorch_lora_weights.safetensors",
    "pytorch_lora_weights.bin",
)
_SAID_BY_NAME = re.compile(r"(high|low)[-_ ]?noise", re.IGNORECASE)


def read(path: str | Path) -> Lora:
    """The adapter in a file of any dialect, or in a folder that holds one.

    PEFT's adapter_model.safetensors is read with the adapter_config.json beside it. Raises CheckpointError if
    there is none or several, the keys are of no dialect or of two, an A has no B, a tensor is empty or not
    finite, or the adapter is of another kind than LoRA.
    """
    file = _only_file(Path(path))
    tensors = read_spans(spans_of(file))
    metadata = _metadata(file) if file.suffix == ".safetensors" else {}
    config = None
    if file.name in _PEFT_WEIGHTS and (file.parent / _PEFT_CONFIG).is_file():
        config = _json(file.parent / _PEFT_CONFIG)
        if base := config.get("base_model_name_or_path"):
            metadata = {"base": str(base)} | metadata
    return from_tensors(tensors, metadata, str(file), config)


def _only_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    usual = [path / name for name in _USUAL if (path / name).is_file()]
    files = usual or sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no adapter: there is no .safetensors file in it")
    if len(files) > 1:
        raise CheckpointError(
            f"{path} holds {', '.join(file.name for file in files)}; name the one that is meant"
        )
    return files[0]


def _metadata(file: Path) -> dict[str, str]:
    with file.open("rb") as opened:
        length = struct.unpack("<Q", opened.read(8))[0]
        found = json.loads(opened.read(length)).get("__metadata__") or {}
    return {str(key): str(value) for key, value in found.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def file_name(name: str, expert: str) -> str:
    """The name of an expert's adapter file."""
    return f"{name}.safetensors" if expert == ONE_EXPERT else f"{name}-{expert}.safetensors"


def write(lora: Lora, folder: str | Path, dialect: str, name: str, shapes: Shapes | None = None) -> Path:
    """Write an adapter under its expert's `file_name`; see `write_file`. Returns the file."""
    path = Path(folder) / file_name(name, lora.metadata.get("expert", ONE_EXPERT))
    write_file(lora, path, dialect, shapes)
    return path


def write_file(lora: Lora, path: str | Path, dialect: str, shapes: Shapes | None = None) -> None:
    """Write an adapter beside its place, read it back, and only then give it its name.

    ``dialect``: one of `DIALECTS`; ``shapes`` of the model's layers: kohya's needs them if some layers have
    no adapter. Raises CheckpointError, and leaves what was there, if the adapter has empty or non-finite
    tensors, the dialect cannot carry it, the disk is full, or the file does not hold what it was given.
    """
    path = Path(path)
    if dialect not in WRITERS:
        raise ValueError(f"dialect={dialect}: there are {', '.join(DIALECTS)}")
    lora.check()
    tensors, metadata = WRITERS[dialect](lora, shapes)
    stored = {key: Stored(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    beside = path.with_name(f"{path.stem}.unfinished.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_safetensors(beside, stored, lambda keys: {key: tensors[key] for key in keys}, metadata)
        found = read_spans(spans_of(beside))
        if set(found) != set(tensors) or _metadata(beside) != metadata:
            raise CheckpointError(f"{path}: what was written reads back with other keys; is its disk sound?")
        if changed := [key for key, tensor in tensors.items() if not is_identical(found[key], tensor)]:
            raise CheckpointError(f"{path}: {changed[0]} reads back changed; is its disk sound?")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def refuse_swapped(lora: Lora, expert: str) -> None:
    """CheckpointError if the adapter is another expert's than the one it is loaded into.

    Its metadata says whose it is, else high_noise or low_noise in its file's name or folder's. One that says
    neither, or is of a model with one expert where there are two (or the reverse), is taken with a warning.
    """
    said = lora.metadata.get("expert")
    source = "its metadata"
    if said is None:
        said, source = _expert_by_name(Path(lora.where)), "its name"
    if said == expert:
        return
    if said not in (None, ONE_EXPERT, *EXPERTS):
        raise CheckpointError(
            f"{lora.where} is for the expert {said}, by {source}: no Wan has one; there are {ONE_EXPERT}, "
            f"{', '.join(EXPERTS)}"
        )
    if said is None:
        logger.warning("%s does not say which expert it is for; taken for %s", lora.where, expert)
    elif ONE_EXPERT in (said, expert):
        logger.warning("%s is for the expert %s, by %s; taken for %s", lora.where, said, source, expert)
    else:
        raise CheckpointError(
            f"{lora.where} is for the expert {said}, by {source}, and would be loaded into {expert}; swap "
            "the two files, or leave this one out"
        )


def _expert_by_name(path: Path) -> str | None:
    for name in (path.name, path.parent.name):
        said = {f"{found.lower()}_noise" for found in _SAID_BY_NAME.findall(name)}
        if len(said) == 1:
            return said.pop()
    return None


def readme(
    loras: Mapping[str, Lora],
    files: Mapping[str, Mapping[str, str]],
    base: str | None = None,
    making: str | None = None,
) -> str:
    """The README.md of an export: what the adapters are and the lines that load them.

    ``loras`` by expert; ``files``: of each dialect written, each expert's file, relative to the README;
    ``base``: what diffusers opens, if not what the adapters' metadata
    say; ``making``: the command that makes it, where it has to be made.
    """
    first = next(iter(loras.values()))
    said = {key: first.metadata.get(key, "not said") for key in ("model", "base", "shift", "boundary")}
    lines = [f"# LoRA for {said['model']}", "", f"Base: {said['base']}."]
    if "shift" in first.metadata:
        lines.append(f"Trained and sampled with a shift of {said['shift']}.")
    if first.metadata.get("weights") == "ema":
        lines.append("The weights are averages over the steps of training (EMA).")
    lines += ["", "| expert | rank | alpha | steps | modules |", "|---|---|---|---|---|"]
    for expert, lora in loras.items():
        ranks = ", ".join(sorted({f"{rank:g}" for rank in lora.ranks.values()}, key=float))
        alphas = ", ".join(sorted({f"{alpha:g}" for alpha in lora.alphas.values()}, key=float))
        scale = "alpha / sqrt(rank)" if lora.rslora else "alpha / rank"
        step = lora.metadata.get("step", "not said")
        lines.append(f"| {expert} | {ranks} | {alphas} ({scale}) | {step} | {len(lora.modules)} |")
    for_diffusers = next((d for d in ("diffusers", "comfyui", "kohya") if d in files), None)
    for_comfyui = next((d for d in ("comfyui", "kohya") if d in files), None)
    lines += ["", "## diffusers", ""]
    if for_diffusers is None:
        lines.append("None of these files; export once more with format=diffusers.")
    else:
        if making is not None:
            lines += [f"`{making}` makes the base in diffusers' layout.", ""]
        lines += [
            "```python",
            *_diffusers_lines(base or first.metadata.get("base", UNKNOWN_BASE), files[for_diffusers]),
            "```",
        ]
    lines += ["", "## ComfyUI", ""]
    if for_comfyui is None:
        lines.append("None of these files; export once more with format=comfyui.")
    else:
        lines += [f"{_comfyui_line(expert, file)}" for expert, file in files[for_comfyui].items()]
    if others := {
        dialect: named for dialect, named in files.items() if dialect not in (for_diffusers, for_comfyui)
    }:
        lines += ["", "## Other programs", ""]
        lines += [f"- {dialect}: {', '.join(named.values())}" for dialect, named in others.items()]
    return "\n".join(lines) + "\n"


def _diffusers_lines(base: str, files: Mapping[str, str]) -> list[str]:
    lines = [
        "import torch",
        "from diffusers import DiffusionPipeline",
        "",
        f"pipe = DiffusionPipeline.from_pretrained({base!r}, torch_dtype=torch.bfloat16)",
    ]
    for expert, file in files.items():
        path = Path(file)
        second = ", load_into_transformer_2=True" if expert == "low_noise" else ""
        lines.append(
            f"pipe.load_lora_weights({path.parent.as_posix()!r}, weight_name={path.name!r}, "
            f"adapter_name={expert!r}{second})"
        )
    return lines


def _comfyui_line(expert: str, file: str) -> str:
    place = "the model" if expert == ONE_EXPERT else f"the {expert} model"
    return f"- `{file}`: into ComfyUI's `models/loras`; a LoraLoaderModelOnly node behind {place} loads it."
