"""Tensors by name in other people's files, looked at through their headers and read a few at a time.

A file is opened anew for each read and nothing of it is mapped: mapped pages count as resident memory, and
one mapping that stays open grows to the whole file."""

import json
import pickle
import re
import struct
import zipfile
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from wan_ds.errors import CheckpointError

PREFIXES = ("model.diffusion_model.", "diffusion_model.")  # ComfyUI's, and of files made from its
PICKLES = (".pth", ".pt", ".bin")
_Key = TypeVar("_Key", bound=Hashable)
_HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_USUAL = ("diffusion_pytorch_model", "model", "pytorch_model")  # names that diffusers and transformers open
_SCALES = ("scaled_fp8", "scale_weight", "scale_input", "weight_scale", "input_scale")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class Stored(NamedTuple):
    """What a header tells of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Span(NamedTuple):
    """Where a tensor's bytes lie: from ``offset`` on in the file, as torch strides them."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # None: row by row


class TensorFiles:
    """The tensors of one file or of a folder's shards, under their names without ComfyUI's prefixes."""

    def __init__(self, where: Path, spans: dict[str, Span]) -> None:
        self.where = str(where)
        self._spans = _without_prefix(where, spans)
        _refuse_eight_bits(where, self._spans)
        self.tensors = {name: Stored(span.shape, span.dtype) for name, span in self._spans.items()}

    @property
    def files(self) -> dict[Path, list[str]]:
        """The names in each file."""
        found: dict[Path, list[str]] = {}
        for name, span in self._spans.items():
            found.setdefault(span.path, []).append(name)
        return found

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors on the CPU, in their stored dtype. Raises CheckpointError if a file has changed."""
        return read_spans({name: self._spans[name] for name in names})


class Renamed:
    """Some tensors of a source under other names: ``names`` maps the new ones to those of the source."""

    def __init__(self, source: Any, names: Mapping[str, str]) -> None:
        self.where: str = source.where
        self._source, self._names = source, dict(names)
        self.tensors: dict[str, Stored] = {new: source.tensors[old] for new, old in self._names.items()}

    @property
    def files(self) -> dict[Path, list[str]]:
        """The new names in each file; a file that holds none is left out."""
        held = {
            path: [new for new, old in self._names.items() if old in set(names)]
            for path, names in self._source.files.items()
        }
        return {path: names for path, names in held.items() if names}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        names = list(names)
        tensors = self._source.read(list(dict.fromkeys(self._names[name] for name in names)))
        return {name: tensors[self._names[name]] for name in names}


def open_tensor_files(path: str | Path) -> TensorFiles:
    """The tensors of a .safetensors or .pth/.pt/.bin file, or of a folder that holds one or their shards.

    A folder's index is believed, and checked against every shard; without one its shards must be all of
    one series. Reads headers alone. Raises CheckpointError if there is nothing, a file is truncated or of
    another kind, a shard is missing or is not the one that its name says, or the weights have 8 bits.
    """
    path = Path(path)
    if not path.is_dir():
        return TensorFiles(path, spans_of(path))
    index, files = _listed(path)
    spans: dict[str, Span] = {}
    for file in files:
        for name, span in spans_of(file).items():
            if name in spans:
                raise CheckpointError(
                    f"{path}: {name} is in {spans[name].path.name} and in {file.name}; name the one "
                    "that is meant, or move the other away"
                )
            spans[name] = span
    _refuse_misplaced(path, index, spans)
    return TensorFiles(path, spans)


def spans_of(path: Path) -> dict[str, Span]:
    """Where the tensors of one file lie; raises CheckpointError."""
    if path.suffix in PICKLES:
        return _spans_of_state_dict(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path}: no such folder, and the name ends in none of .safetensors, {', '.join(PICKLES)}"
        )
    try:
        with path.open("rb") as file:
            return _safetensors_spans(path, file, path.stat().st_size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_spans(spans: Mapping[_Key, Span]) -> dict[_Key, Tensor]:
    """The tensors that lie there, each file opened once and read front to back. Raises CheckpointError."""
    tensors: dict[_Key, Tensor] = {}
    for path in dict.fromkeys(span.path for span in spans.values()):
        here = sorted(
            (item for item in spans.items() if item[1].path == path), key=lambda item: item[1].offset
        )
        try:
            with path.open("rb", buffering=0) as file:
                for name, span in here:
                    tensors[name] = _read(file, span)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return {name: tensors[name] for name in spans}


def _read(file: BinaryIO, span: Span) -> Tensor:
    if 0 in span.shape:
        return torch.empty(span.shape, dtype=span.dtype)
    count = torch.Size(span.shape).numel()
    if span.stride is not None:  # of the memory between the first element and the last
        count = 1 + sum((size - 1) * step for size, step in zip(span.shape, span.stride, strict=True))
    flat = torch.empty(count, dtype=span.dtype)
    bytes_left = memoryview(flat.view(torch.uint8).numpy())
    file.seek(span.offset)
    while bytes_left:
        got = file.readinto(bytes_left)
        if not got:
            raise EOFError(f"it ends {len(bytes_left)} bytes before a tensor does")
        bytes_left = bytes_left[got:]
    return flat.view(span.shape) if span.stride is None else flat.as_strided(span.shape, span.stride)


def _safetensors_spans(path: Path, file: BinaryIO, size: int) -> dict[str, Span]:
    """Header and layout as https://github.com/huggingface/safetensors#format has them."""
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
    if start.startswith(b"version "):
        raise CheckpointError(f"{path} is git-lfs's note on a file, not the file; run git lfs pull there")
    if length > min(_HEADER_LIMIT, size - 8):
        raise CheckpointError(f"{path} is truncated or no safetensors file: {size} bytes hold no header")
    try:
        header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        spans, end = {}, 8 + length
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            dtype = _DTYPES[entry["dtype"]]
            spans[name] = Span(path, 8 + length + first, dtype, tuple(entry["shape"]))
            if last - first != torch.Size(entry["shape"]).numel() * dtype.itemsize:
                raise ValueError(f"{name} has {last - first} bytes for {entry['dtype']} {entry['shape']}")
            end = max(end, 8 + length + last)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its header is no safetensors header ({error!r})") from error
    if size != end:
        raise CheckpointError(
            f"{path} is truncated or was written over: it has {size} bytes, and its header describes {end}; "
            "download it again"
        )
    return spans


def described(path: Path) -> Any:
    """What torch.save wrote, with tensors that know their place and hold nothing, for `span_of`.

    Tensors and plain containers only (torch.load's weights_only, and what the caller lets through by
    `torch.serialization.safe_globals`). Raises CheckpointError if the file is missing, truncated, of
    torch before 1.6, or holds anything else.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise RuntimeError(
                "it is truncated, or torch wrote it before version 1.6; torch.save(torch.load(file, "
                "weights_only=True), file) writes the latter anew"
            )
        with FakeTensorMode():
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))  # torch's advice would be to run what is pickled there
        more = f": {found[1]}" if found else ""
        raise CheckpointError(f"{path} holds more than tensors and plain containers{more}") from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def span_of(path: Path, tensor: Tensor) -> Span:
    """Where the bytes of a tensor of `described` lie."""
    start = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.dtype.itemsize
    stride = None if tensor.is_contiguous() else tensor.stride()
    return Span(path, start, tensor.dtype, tuple(tensor.shape), stride)


def _spans_of_state_dict(path: Path) -> dict[str, Span]:
    content = described(path)
    if isinstance(content, dict):
        content = content.get("state_dict", content)
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path} is no dict of tensors by name")
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(f"{path} is no dict of tensors by name ({others[0]} is no tensor)")
    return {name: span_of(path, tensor) for name, tensor in content.items()}


def _listed(folder: Path) -> tuple[dict[str, str] | None, list[Path]]:
    """The index, if there is one, and the files meant: what diffusers and transformers open, else the only
    index, the parts of one series, or the only file."""
    for suffix in (".safetensors", *PICKLES):
        indexes = sorted(folder.glob(f"*{suffix}.index.json"))
        files = sorted(folder.glob(f"*{suffix}"))
        usual = [path for path in indexes if path.name.removesuffix(f"{suffix}.index.json") in _USUAL]
        plain = [path for path in files if path.stem in _USUAL]
        if usual or (indexes and not plain):
            index = _read_index(*_one(folder, usual or indexes))
            listed = [folder / name for name in dict.fromkeys(index.values())]
            _refuse_absent(folder, listed)
            return index, listed
        if plain:
            return None, _one(folder, plain)
        if files:
            _refuse_incomplete(folder, files)
            return None, files
    raise CheckpointError(
        f"{folder} holds no weights: there is no .safetensors, .pth, .pt or .bin file in it"
    )


def _one(folder: Path, found: list[Path]) -> list[Path]:
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{folder} holds {names}; name the one meant, or move the others away")
    return found


def _read_index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no readable index of shards: {error!r}") from error


def _refuse_absent(folder: Path, files: list[Path]) -> None:
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{folder}: the index names {', '.join(absent)}, not there; download it again")


def _refuse_incomplete(folder: Path, files: list[Path]) -> None:
    """Files without an index must be all the numbered parts of one series, or one file alone."""
    parts = [_PART.search(file.stem) for file in files]
    if not all(parts):
        _one(folder, files)
        return
    held = {(int(part[1]), int(part[2])) for part in parts}
    count = max(of for _, of in held)
    absent = sorted({(number, count) for number in range(1, count + 1)} - held)
    if absent:
        listing = ", ".join(f"{number:05d}-of-{of:05d}" for number, of in absent)
        raise CheckpointError(f"{folder} is not complete: the part {listing} is missing; download it again")


def _refuse_misplaced(folder: Path, index: dict[str, str] | None, spans: dict[str, Span]) -> None:
    """An index tells swapped or stale shards from right ones."""
    if index is None:
        return
    for name, file in index.items():
        if name not in spans:
            raise CheckpointError(
                f"{folder / file} does not hold {name}, which the index says is there; download it again"
            )
        if spans[name].path.name != Path(file).name:
            raise CheckpointError(
                f"{folder}: {name} is in {spans[name].path.name} and the index says {file}: shards are "
                "swapped or of two downloads; download them again"
            )


def _without_prefix(where: Path, spans: dict[str, Span]) -> dict[str, Span]:
    stripped: dict[str, Span] = {}
    for name, span in spans.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        short = name.removeprefix(prefix)
        if short in stripped:
            raise CheckpointError(f"{where} holds {short} twice, with a prefix and without")
        stripped[short] = span
    return stripped


def _refuse_eight_bits(where: Path, spans: dict[str, Span]) -> None:
    scales = [name for name in spans if name.rsplit(".", 1)[-1] in _SCALES]
    scaled = scales + [name for name, span in spans.items() if "float8" in str(span.dtype)]
    if scaled:
        kind = "fp8 weights with scales" if scales else "fp8 weights"
        raise CheckpointError(
            f"{where} holds {kind} ({scaled[0]}): made for inference, and nothing to train from; use the "
            "bf16, fp16 or fp32 file of the same model"
        )
