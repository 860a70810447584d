"""A component's tensors under the other layout's names, and the files that they become."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from wan_ds.errors import CheckpointError
from wan_ds.interop import configs, names
from wan_ds.interop.names import Kind
from wan_ds.interop.shards import (
    SHARD_BYTES,
    is_identical,
    leave_memory,
    plan_shards,
    write_safetensors,
    write_state_dict,
)
from wan_ds.interop.tensor_files import Stamp, Stored, TensorFiles, open_tensor_files

ORIGINAL_STEMS = {  # of the .pth files that the original code looks for
    "text_encoder": "models_t5_umt5-xxl-enc-bf16",
    "image_encoder": "models_clip_open-clip-xlm-roberta-large-vit-huge-14",
}
VAE_STEMS = {False: "Wan2.1_VAE", True: "Wan2.2_VAE"}  # by whether it is the residual one
# In diffusers' image_encoder: what the original CLIP has beyond it, where from_pretrained does not look.
REST_FOLDER, REST_STEM = "original", "rest_of_clip"


class Listing:
    """Tensors and the file that each lies in: a TensorFiles that outlives the removal of some files.

    ``stamps`` are the files' when they were first opened, ``others`` what they hold beside tensors.
    """

    def __init__(
        self,
        where: str,
        tensors: Mapping[str, Stored],
        files: Mapping[Path, list[str]],
        stamps: Mapping[Path, Stamp],
        others: Mapping[Path, list[str]],
    ) -> None:
        self.where, self.tensors, self.files = where, dict(tensors), dict(files)
        self.stamps, self.others = dict(stamps), dict(others)
        self._file = {name: path for path, held in self.files.items() for name in held}
        self._opened: dict[Path, TensorFiles] = {}

    @classmethod
    def of(cls, *sources: TensorFiles) -> "Listing":
        """The tensors of all sources together."""

        def joined(name: str) -> dict[Any, Any]:
            return {key: value for source in sources for key, value in getattr(source, name).items()}

        files = joined("files")
        listing = cls(sources[0].where, joined("tensors"), files, joined("stamps"), joined("others"))
        listing._opened = {path: source for source in sources for path in source.files}
        return listing

    def file(self, name: str) -> Path:
        """Where a tensor lies."""
        return self._file[name]

    def read(self, wanted: Iterable[str]) -> dict[str, Tensor]:
        """The tensors as they are stored. Raises CheckpointError if their file is gone or was changed."""
        found = {}
        for name in wanted:
            path = self._file[name]
            if path not in self._opened:
                self._opened[path] = open_tensor_files(path)
            found |= self._opened[path].read([name])
        return found

    def refuse_changed(self) -> None:
        """CheckpointError if a file that is still there has another stamp."""
        for path in self.files:
            now = Stamp.of(path.stat()) if path.is_file() else self.stamps[path]
            if now != self.stamps[path]:
                raise CheckpointError(
                    f"{path} is not the file that the conversion began with: it had {self.stamps[path].size} "
                    f"bytes and has {now.size}, or was changed since; put that one back, or convert into "
                    "another folder"
                )

    def to_json(self, root: Path) -> dict[str, Any]:
        """What `from_json` reads; the files are below ``root``, or it itself."""
        files = {
            str(path.relative_to(root)): {
                "stamp": self.stamps[path],
                "others": self.others.get(path, []),
                "tensors": {
                    name: [self.tensors[name].shape, _dtype_name(self.tensors[name].dtype)] for name in held
                },
            }
            for path, held in self.files.items()
        }
        return {"where": self.where, "files": files}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], root: Path) -> "Listing":
        """The same listing, whatever has become of the files.

        Raises KeyError, TypeError, ValueError or AttributeError for what `to_json` does not write.
        """
        held = {root / path: one for path, one in content["files"].items()}
        tensors = {
            name: Stored(tuple(map(int, shape)), _dtype(dtype))
            for one in held.values()
            for name, (shape, dtype) in one["tensors"].items()
        }
        return cls(
            str(content["where"]),
            tensors,
            {path: list(one["tensors"]) for path, one in held.items()},
            {path: Stamp(*map(int, one["stamp"])) for path, one in held.items()},
            {path: list(one["others"]) for path, one in held.items()},
        )


@dataclass(frozen=True)
class Component:
    """One model of a source: what it is, its tensors, and its config.json in diffusers' layout."""

    kind: Kind
    role: str  # its subfolder in diffusers' layout: the kind, or transformer_2
    source: Listing
    config: dict[str, Any]
    prefix: str = names.VISION  # of the image encoder's names in diffusers' layout


@dataclass(frozen=True)
class Made:
    """One tensor to write: what it is, what it is made of, and how."""

    stored: Stored
    of: tuple[str, ...]  # names in the source
    make: Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class Output:
    """One component's weights as they are written: a series of safetensors shards, or one .pth file."""

    folder: PurePosixPath  # in the target
    stem: str
    source: Listing
    made: Mapping[str, Made]
    is_pth: bool = False
    max_bytes: float | None = SHARD_BYTES  # of a shard; None: one file of any size

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """What is written."""
        return {name: made.stored for name, made in self.made.items()}

    @cached_property
    def files(self) -> dict[str, list[str]]:
        """The tensors in each file."""
        if self.is_pth:
            return {f"{self.stem}.pth": list(self.made)}
        return plan_shards(self.tensors, self.stem, self.max_bytes)

    def read(self, wanted: Iterable[str]) -> dict[str, Tensor]:
        """Tensors as they are to be written."""
        found = {}
        for name in wanted:
            made = self.made[name]
            parts = self.source.read(made.of)
            found[name] = made.make([parts[old] for old in made.of])
        return found

    def write(self, target: Path, file: str) -> None:
        """Write one of the files; raises CheckpointError, leaving nothing of it, if the disk fails."""
        tensors = {name: self.tensors[name] for name in self.files[file]}
        write = write_state_dict if self.is_pth else write_safetensors
        write(target / self.folder / file, tensors, self.read)

    def compare(self, target: Path, file: str) -> None:
        """CheckpointError unless every tensor of a written file is the source's to the byte, on the disk."""
        leave_memory(target / self.folder / file)
        written = open_tensor_files(target / self.folder / file)
        for name in self.files[file]:
            if not is_identical(self.read([name])[name], written.read([name])[name]):
                raise CheckpointError(
                    f"{target / self.folder / file}: {name} does not read back as it was written; the disk "
                    "cannot be trusted, and nothing more of the source is removed"
                )

    def refuse_other(self, target: Path, file: str) -> None:
        """CheckpointError unless a written file is whole, and its names, shapes and dtypes those planned."""
        path = target / self.folder / file
        try:
            found = open_tensor_files(path).tensors
            wanted = {name: self.tensors[name] for name in self.files[file]}
            differing = [name for name in wanted | found if wanted.get(name) != found.get(name)]
            if differing:
                raise CheckpointError(f"{path} is not what was written here: {names.some(differing)} differ")
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Remove it, and the same command writes it again") from error

    def sources(self, file: str) -> set[tuple[Path, str]]:
        """Which tensors of which source files a written file is made of."""
        return {(self.source.file(old), old) for name in self.files[file] for old in self.made[name].of}


def outputs(
    component: Component, folder: PurePosixPath, max_bytes: float | None = SHARD_BYTES
) -> list[Output]:
    """What a component becomes in the layout that it does not have; its weights go to ``folder``.

    Tensors are in the order of the source's files, so that these are done with one by one. Raises
    CheckpointError for a name that such a component does not have.
    """
    made = _in_order_of_files(_made(component), component.source)
    stem = stem_of(component)
    if component.kind.layout == "diffusers":
        is_pth = component.kind.component != "transformer"
        return [Output(folder, stem, component.source, made, is_pth=is_pth, max_bytes=max_bytes)]
    found = [Output(folder, stem, component.source, made, max_bytes=max_bytes)]
    rest = _as_they_are(
        component.source, [name for name in component.source.tensors if is_rest_of_clip(name)]
    )
    if rest:
        found.append(Output(folder / REST_FOLDER, REST_STEM, component.source, rest, max_bytes=None))
    return found


def stem_of(component: Component) -> str:
    """How the weights' file is called in the layout that the component does not have."""
    name, layout = component.kind
    if layout == "original":
        return "diffusion_pytorch_model" if name in ("transformer", "vae") else "model"
    if name == "transformer":
        return "diffusion_pytorch_model"
    return (
        VAE_STEMS[names.is_vae_residual(component.source.tensors)] if name == "vae" else ORIGINAL_STEMS[name]
    )


def configuration(component: Component) -> tuple[str, dict[str, Any]]:
    """Name and content of the JSON file beside the weights in the layout that the component does not have.

    Wan's original code keeps what is in it for a VAE or an encoder in its sources: there the file is ours, a
    note that brings diffusers' configuration back.
    """
    if component.kind.layout == "original":
        return "config.json", component.config
    if component.kind.component == "transformer":
        return "config.json", configs.original_transformer_config(component.config)
    return f"{stem_of(component)}.json", {"config": component.config, "prefix": component.prefix}


def is_rest_of_clip(name: str) -> bool:
    """Whether a tensor of the original CLIP has no place in transformers' CLIPVisionModel."""
    return name in ("visual.head", "log_scale") or name.startswith("textual.")


def to_diffusers(kind: Kind, source: Listing | TensorFiles, prefix: str = names.VISION) -> dict[str, Made]:
    """Each tensor of diffusers' layout, as made of the original's."""
    if kind.component != "image_encoder":
        to_new = {"transformer": names.transformer_names, "vae": names.vae_names}
        renamed = to_new.get(kind.component, names.text_encoder_names)(source.tensors)
        return {new: Made(source.tensors[old], (old,), _alone) for old, new in renamed.items()}
    made = {}
    for old, parts in names.image_encoder_names(source.tensors, prefix).items():
        shape, dtype = source.tensors[old]
        shape = shape[names.leading_ones(old) :]
        if len(parts) > 1:
            shape = (shape[0] // len(parts), *shape[1:])
        for number, new in enumerate(parts):
            made[new] = Made(Stored(shape, dtype), (old,), _part(number, shape))
    return made


def _part(number: int, shape: tuple[int, ...]) -> Callable[[list[Tensor]], Tensor]:
    return lambda found: found[0].reshape(-1, *shape)[number].clone()


def to_original(kind: Kind, source: Listing) -> dict[str, Made]:
    """Each tensor of the original layout, as made of diffusers'."""
    if kind.component == "image_encoder":
        return _clip_to_original(source)
    to_old = {"transformer": names.original_transformer_names, "vae": names.original_vae_names}
    renamed = to_old.get(kind.component, names.original_text_encoder_names)(source.tensors)
    of: dict[str, tuple[str, ...]] = {}
    for new, old in renamed.items():
        of[old] = (*of.get(old, ()), new)
    return {old: Made(source.tensors[found[0]], found, _alone) for old, found in of.items()}


def _clip_to_original(source: Listing) -> dict[str, Made]:
    rest = [name for name in source.tensors if is_rest_of_clip(name)]
    vision = [name for name in source.tensors if not is_rest_of_clip(name)]
    made = {}
    for old, parts in names.original_image_encoder_names(vision).items():
        stored = [source.tensors[part] for part in parts]
        first = stored[0].shape
        shape = (*(1,) * names.leading_ones(old), *first)
        if len(parts) > 1:
            shape = (sum(part.shape[0] for part in stored), *first[1:])
        made[old] = Made(Stored(shape, stored[0].dtype), parts, _joined(shape))
    return made | _as_they_are(source, rest)


def _joined(shape: tuple[int, ...]) -> Callable[[list[Tensor]], Tensor]:
    return lambda found: torch.cat(found).reshape(shape) if len(found) > 1 else found[0].reshape(shape)


def _alone(found: list[Tensor]) -> Tensor:
    """One tensor under whatever names: UMT5's embedding may be stored under two."""
    if not all(is_identical(other, found[0]) for other in found[1:]):
        raise CheckpointError(
            "shared.weight and encoder.embed_tokens.weight differ; in UMT5 they are one tensor, and Wan's "
            "original file has one"
        )
    return found[0]


def _made(component: Component) -> dict[str, Made]:
    if component.kind.layout == "original":
        return to_diffusers(component.kind, component.source, component.prefix)
    return to_original(component.kind, component.source)


def _as_they_are(source: Listing, wanted: Iterable[str]) -> dict[str, Made]:
    return {name: Made(source.tensors[name], (name,), _alone) for name in wanted}


def _in_order_of_files(made: Mapping[str, Made], source: Listing) -> dict[str, Made]:
    order = {path: number for number, path in enumerate(source.files)}
    return dict(sorted(made.items(), key=lambda item: max(order[source.file(old)] for old in item[1].of)))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found
