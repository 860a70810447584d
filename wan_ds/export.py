"""A run's model for other programs, by one process without a GPU, whatever wrote the run.

python scripts/export.py run=runs/mine format=diffusers [checkpoint=step_00000100] [weights=live] [target=...]
    [dtype=bf16] [merge=true]

diffusers: a folder that WanPipeline or WanImageToVideoPipeline opens, every part of the model in it.
original: a folder as Wan's authors release theirs, high_noise_model/ and low_noise_model/ if there are two
experts.
comfyui: one file for each expert; ComfyUI has the other parts of its own.

An expert that did not train is its base weights. What is written is the float32 weights that trained, or bf16
beside what diffusers keeps in float32. Tensors pass one at a time: memory does not grow with the model.

A run of adapters is a file for each expert that trained, in the dialect of diffusers, comfyui, kohya,
diffsynth or videox_fun, with a README.md that says how to load it; merge=true folds them into the base and
writes one of the three layouts above, with a README.md that says of what.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from omegaconf import MISSING
from torch import Tensor

from wan_ds.config import Config, Dtype
from wan_ds.config.command_line import simple_command
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.interop import configs, layouts, lora, names
from wan_ds.interop.conversion import REST_FOLDER, configuration, outputs
from wan_ds.interop.lora import Lora
from wan_ds.interop.shards import SHARD_BYTES, refuse_full_disk, write_shards
from wan_ds.interop.tensor_files import Stored
from wan_ds.models.encoders import load_image_encoder
from wan_ds.models.weights import Source, on_meta
from wan_ds.training import checkpoint as checkpoints
from wan_ds.training import networks, parts
from wan_ds.training.exported import INDEX, Note
from wan_ds.training.runs import (
    Kind,
    component_folders,
    expert_lora,
    expert_source,
    is_lora,
    kind_of,
    opened,
    run_config,
)
from wan_ds.training.sampling import PLACES
from wan_ds.training.sources import is_run

README = "README.md"
STEM = "diffusion_pytorch_model"
COMFYUI_PREFIX = "model.diffusion_model."
KEPT_IN_FP32 = frozenset(WanTransformer3DModel._keep_in_fp32_modules)


class Format(Enum):
    diffusers = "diffusers"
    original = "original"
    comfyui = "comfyui"
    kohya = "kohya"
    diffsynth = "diffsynth"
    videox_fun = "videox_fun"


WHOLE = (Format.diffusers, Format.original, Format.comfyui)  # of full weights; the others are of adapters


@dataclass
class ExportOptions:
    run: str = field(default=MISSING, metadata={"help": "the run's folder", "path": True})
    format: Format = MISSING
    checkpoint: str = field(default="latest", metadata={"help": "latest, or a folder's name: step_00000100"})
    weights: Kind | None = field(
        default=None, metadata={"help": "live, or ema: the averages, the default where the run keeps any"}
    )
    target: str | None = field(
        default=None,
        metadata={"help": "a new folder; default: <run>/export/<format>, <format>-merged", "path": True},
    )
    dtype: Dtype | None = field(default=None, metadata={"help": "of full weights; default: fp32"})
    merge: bool = field(default=False, metadata={"help": "fold a run's adapters into full weights"})


def main(options: ExportOptions) -> int:
    """Write the folder beside its place, give it its name once it is whole, and tell where it is."""
    run = Path(options.run)
    name = f"{options.format.name}-merged" if options.merge else options.format.name
    target = Path(options.target) if options.target else run / "export" / name
    if target.exists():
        raise ConfigError(f"target={target}: is there already; remove it, or type another target=...")
    _refuse_format(options, is_lora(run_config(run)))
    config, checkpoint = opened(run, options.checkpoint)
    kind = kind_of(config, options.weights)
    if kind is Kind.base:
        raise ConfigError("weights=base: is what the run started from; export that")
    adapters = {}
    if is_lora(config):
        trained = checkpoints.read_state(checkpoint).experts
        adapters = {expert: expert_lora(checkpoint, expert, kind) for expert in trained}
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an export that was killed
    try:
        unfinished.mkdir(parents=True)
        if adapters and not options.merge:
            write_adapters(unfinished, config, adapters, options.format, run.resolve().name)
            written = f"adapters of {', '.join(adapters)}"
        else:
            written = _write_whole(unfinished, config, checkpoint, options, kind)
        if adapters and options.merge:
            _write_merged_readme(unfinished, config, adapters, options.format)
        os.replace(unfinished, target)
    except OSError as error:
        free = shutil.disk_usage(next(p for p in target.absolute().parents if p.exists())).free
        raise CheckpointError(
            f"target={target} cannot be written ({error}); {free / 1e9:.2f} GB are free there"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sys.stdout.write(f"{config.model.name} of {checkpoint.name}: {written}\n{target}\n")
    return 0


def _refuse_format(options: ExportOptions, has_adapters: bool) -> None:
    """ConfigError for a format that does not hold what the run trained."""
    key, whole = f"format={options.format.name}", ", ".join(one.name for one in WHOLE)
    if not has_adapters and (options.merge or options.format not in WHOLE):
        said = "merge=true" if options.merge else key
        raise ConfigError(f"{said}: this run trained all weights, no adapter; type format={whole} alone")
    if options.merge and options.format not in WHOLE:
        raise ConfigError(f"{key}: is for adapters; with merge=true type one of {whole}")
    if has_adapters and not options.merge:
        if options.format.name not in lora.DIALECTS:
            raise ConfigError(
                f"{key}: is for full weights, and this run trained adapters; type merge=true to fold them "
                f"into the base, or one of {', '.join(lora.DIALECTS)}"
            )
        if options.dtype is not None:
            raise ConfigError(f"dtype={options.dtype.name}: adapters are written in fp32; leave it out")


def _write_whole(target: Path, config: Config, checkpoint: Path, options: ExportOptions, kind: Kind) -> str:
    """The full weights of every expert; what was written, for a person."""
    write = {
        Format.diffusers: write_diffusers,
        Format.original: write_original,
        Format.comfyui: write_comfyui,
    }
    dtype = torch.bfloat16 if options.dtype is Dtype.bf16 else torch.float32
    experts = {
        name: Cast(expert_source(config, checkpoint, name, kind), dtype) for name in config.model.experts
    }
    write[options.format](target, config, experts)
    return f"{_size(_bytes(experts.values()))} of {', '.join(experts)}"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


class Cast:
    """A source's tensors in one dtype, but for those that diffusers keeps in float32.

    These are named by modules, matched as `from_pretrained` matches them: a whole part of the dotted name.
    """

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self.where = source.where
        self._source = source
        self.tensors = {
            name: Stored(tuple(one.shape), torch.float32 if KEPT_IN_FP32 & set(name.split(".")) else dtype)
            for name, one in source.tensors.items()
        }

    def read(self, wanted: Iterable[str]) -> dict[str, Tensor]:
        read = self._source.read(list(wanted))
        return {name: tensor.detach().to(self.tensors[name].dtype) for name, tensor in read.items()}


# The formats


def write_diffusers(target: Path, config: Config, experts: Mapping[str, Cast]) -> None:
    """Every part of the model in a subfolder of its own, and an index with diffusers' class names."""
    model = config.model
    copied = component_folders(config)
    folders = {name: copied[name] for name in ("vae", "text_encoder", "tokenizer")}
    conditioning = parts.conditioning_of(config)
    has_clip = conditioning.images > 0 and model.image_encoder.weights is not None
    if has_clip:
        folders["image_encoder"] = copied["image_encoder"]
    refuse_full_disk(target, _bytes(experts.values()) + sum(map(_bytes_of_folder, folders.values())))

    architecture = diffusers_architecture(config)
    for name, source in experts.items():
        folder = target / PLACES[name]
        write_shards(folder, STEM, source.tensors, source.read, max_bytes=SHARD_BYTES)
        _write_json(folder / "config.json", architecture)
    for name, folder in folders.items():
        _copy(folder, target / name)
    _write_json(target / "scheduler" / "scheduler_config.json", configs.scheduler_config(model.shift))
    if has_clip:
        processor = copied.get("image_processor")
        rule = model.image_encoder.resize.name
        encoder = load_image_encoder(processor, copied["image_encoder"], "cpu", torch.bfloat16, resize=rule)
        encoder.processor.save_pretrained(target / "image_processor")
    index = configs.model_index(architecture, {path.name for path in target.iterdir()})
    own = {"boundary_ratio": model.boundary, "expand_timesteps": conditioning.expand_timesteps}
    _write_json(target / INDEX, index | own)
    note_of(config).write(target)


def write_original(target: Path, config: Config, experts: Mapping[str, Cast]) -> None:
    """What Wan's own code opens: transformers under their original names, encoders as .pth files."""
    found = component_folders(config)
    roles = [role for role in ("vae", "text_encoder", "image_encoder") if role in found]
    encoders = [layouts.component_at(found[role], role) for role in roles]
    sizes = [_bytes(experts.values()), *(_bytes([component.source]) for component in encoders)]
    refuse_full_disk(target, sum(sizes))

    architecture = configs.original_transformer_config(diffusers_architecture(config))
    for name, source in experts.items():
        folder = target if name == "all" else target / layouts.EXPERTS[PLACES[name]]
        tensors, read = renamed(source, names.original_transformer_names(source.tensors))
        write_shards(folder, STEM, tensors, read, max_bytes=SHARD_BYTES)
        _write_json(folder / "config.json", architecture)
    for component in encoders:
        for output in outputs(component, PurePosixPath(".")):
            for file in output.files:
                output.write(target, file)
        name, content = configuration(component)
        _write_json(target / name, content)
    _copy(found["tokenizer"], target / layouts.TOKENIZER)
    if "image_encoder" in found:
        kept = found["image_encoder"] / REST_FOLDER / layouts.CLIP_TOKENIZER  # where a conversion puts it
        if kept.is_dir():
            _copy(kept, target / layouts.CLIP_TOKENIZER)


def write_comfyui(target: Path, config: Config, experts: Mapping[str, Cast]) -> None:
    """A file for each expert, the original names behind ComfyUI's prefix."""
    refuse_full_disk(target, _bytes(experts.values()))
    for name, source in experts.items():
        originals = names.original_transformer_names(source.tensors)
        prefixed = {old: f"{COMFYUI_PREFIX}{new}" for old, new in originals.items()}
        tensors, read = renamed(source, prefixed)
        stem = config.model.name if name == "all" else f"{config.model.name}_{name}"
        write_shards(target, stem, tensors, read, single=True)


def write_adapters(
    target: Path, config: Config, adapters: Mapping[str, Lora], dialect: Format, name: str
) -> None:
    """A file for each expert that trained, and how to load them."""
    shapes = networks.linear_shapes(config)
    files = {
        expert: lora.write(adapter, target, dialect.name, name, shapes).name
        for expert, adapter in adapters.items()
    }
    text = lora.readme(adapters, {dialect.name: files}, *base_in_diffusers(adapters))
    (target / README).write_text(text, encoding="utf-8")


def base_in_diffusers(adapters: Mapping[str, Lora]) -> tuple[str, str | None]:
    """The base as diffusers opens it, and the command that makes it where it is in another layout."""
    metadata = next(iter(adapters.values())).metadata
    base = metadata.get("base", lora.UNKNOWN_BASE)
    if not Path(base).is_dir():
        return base, None  # of the hub
    folder = Path(base).resolve()  # else it would be looked for beside the README
    if is_run(folder):
        step, merges = metadata.get("base_checkpoint", "latest"), is_lora(run_config(folder))
        target = folder / "export" / f"{step}-for-adapters"
        typed = ["format=diffusers", f"checkpoint={step}", "weights=live", *["merge=true"] * merges]
        return str(target), shlex.join(
            ["python", "scripts/export.py", f"run={folder}", *typed, f"target={target}"]
        )
    if (folder / INDEX).is_file():
        return str(folder), None
    made = folder.with_name(f"{folder.name}-diffusers")
    typed = [f"source={folder}", f"target={made}", "format=diffusers"]
    return str(made), shlex.join(["python", "scripts/convert.py", *typed])


def _write_merged_readme(
    target: Path, config: Config, adapters: Mapping[str, Lora], layout: Format
) -> None:
    lines = [f"# {config.model.name} with adapters folded in", ""]
    for expert, adapter in adapters.items():
        said = adapter.metadata
        lines.append(
            f"- {expert}: rank {said['rank']}, alpha {said['alpha']}, {said['step']} steps, on "
            f"{said.get('base', 'random weights')}"
        )
    opening = {
        Format.diffusers: "`DiffusionPipeline.from_pretrained(<this folder>)` of diffusers opens it.",
        Format.original: "The layout is that of Wan's authors, whose own code opens it.",
        Format.comfyui: "The files belong into ComfyUI's `models/diffusion_models`.",
    }
    lines += ["", opening[layout]]
    (target / README).write_text("\n".join(lines) + "\n", encoding="utf-8")


def diffusers_architecture(config: Config) -> dict[str, Any]:
    """The transformer's config.json, its class named as diffusers names it."""
    ours = {name: value for name, value in on_meta(config.model.transformer).config.items() if name[0] != "_"}
    head = {
        "_class_name": WanTransformer3DModel.__name__,
        "_diffusers_version": configs.diffusers.__version__,
    }
    return head | ours


def note_of(config: Config) -> Note:
    """How the model is to be sampled: as the run samples it, at the size that it trained on."""
    data = config.data
    return Note(
        name=config.model.name,
        num_frames=data.num_frames,
        height=data.height,
        width=data.width,
        fps=data.fps,
        steps=config.model.sampling_steps,
        guidance=dict(config.model.guidance),
    )


def renamed(
    source: Cast, new_names: Mapping[str, str]
) -> tuple[dict[str, Stored], Callable[[list[str]], dict[str, Tensor]]]:
    """A source's tensors under new names, given by the old ones, and how they are read."""
    old_names = {new: old for old, new in new_names.items()}

    def read(wanted: list[str]) -> dict[str, Tensor]:
        tensors = source.read([old_names[name] for name in wanted])
        return {name: tensors[old_names[name]] for name in wanted}

    return {new: source.tensors[old] for new, old in old_names.items()}, read


def _copy(folder: Path, target: Path) -> None:
    """The files themselves where a hub's cache has links to them."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(".*"))


def _bytes(sources: Iterable[Any]) -> int:
    stored = [one for source in sources for one in source.tensors.values()]
    return sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in stored)


def _bytes_of_folder(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    simple_command(ExportOptions, main)
