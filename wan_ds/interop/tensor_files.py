"""Tensors by name in other people's files, looked at through their headers and read a few at a time.

A file is opened anew for each read and nothing of it is mapped: mapped pages count as resident memory, and
one mapping that stays open grows to the whole file."""

import json
import os
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
from wan_ds.interop.weight_folders import PICKLES, files_meant, refuse_misplaced

PREFIXES = ("model.diffusion_model.", "diffusion_model.")  # ComfyUI's, and of files made from its
_Key = TypeVar("_Key", bound=Hashable)
_HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
_SCALES = ("scaled_fp8", "scale_weight", "scale_input", "weight_scale", "input_scale")
DTYPES = {  # by their names in safetensors' headers
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


class Stamp(NamedTuple):
    """What tells one content of a file from another without reading it."""

    size: int  # bytes
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        """The stamp in what `os.stat` tells."""
        return cls(status.st_size, status.st_mtime_ns)


class Span(NamedTuple):
    """Where a tensor's bytes lie: from ``offset`` on in the file, as torch strides them."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # None: row by row
    stamp: Stamp | None = None  # the file's when it was looked at; None: not to be checked


class Contents(NamedTuple):
    """What one file holds."""

    spans: dict[str, Span]
    others: list[str]  # names of what is in it beside the tensors
    stamp: Stamp


class TensorFiles:
    """The tensors of one file or of a folder's shards, under their names without ComfyUI's prefixes.

    ``others`` are the names of what the files hold beside them, ``stamps`` the files' when they were opened.
    """

    def __init__(self, where: Path, contents: Mapping[Path, Contents]) -> None:
        self.where = str(where)
        self.others = {path: held.others for path, held in contents.items() if held.others}
        self.stamps = {path: held.stamp for path, held in contents.items()}
        spans = {name: span for held in contents.values() for name, span in held.spans.items()}
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
        """The tensors on the CPU, in their stored dtype.

        Raises CheckpointError if a file is gone, or has another size or time of change than when it was
        opened.
        """
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
        return TensorFiles(path, {path: _contents(path)})
    index, files = files_meant(path)
    contents = {file: _contents(file) for file in files}
    places: dict[str, Path] = {}
    for file, held in contents.items():
        for name in held.spans:
            if name in places:
                raise CheckpointError(
                    f"{path}: {name} is in {places[name].name} and in {file.name}; name the one "
                    "that is meant, or move the other away"
                )
            places[name] = file
    if index is not None:
        refuse_misplaced(path, index, places)
    return TensorFiles(path, contents)


def read_object(path: Path) -> dict[str, Any]:
    """What a JSON file says; raises CheckpointError unless it is an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds {str(content)[:40]}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no readable JSON object: {error}") from error
    return content


def spans_of(path: Path) -> dict[str, Span]:
    """Where one file's tensors lie, under their own names; errors as `open_tensor_files`.

    Unlike there, any prefix and any dtype may stand in it.
    """
    return _contents(path).spans


def _contents(path: Path) -> Contents:
    if path.suffix not in (".safetensors", *PICKLES):
        raise CheckpointError(
            f"{path}: no such folder, and the name ends in none of .safetensors, {', '.join(PICKLES)}"
        )
    try:
        with path.open("rb") as file:
            stamp = Stamp.of(os.fstat(file.fileno()))
            if path.suffix == ".safetensors":
                return _safetensors_contents(path, file, stamp)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _state_dict_contents(path, stamp)


def read_spans(spans: Mapping[_Key, Span]) -> dict[_Key, Tensor]:
    """The tensors that lie there, each file opened once and read front to back.

    Raises CheckpointError if a file is gone, ends early, or has another stamp than its spans.
    """
    tensors: dict[_Key, Tensor] = {}
    for path in dict.fromkeys(span.path for span in spans.values()):
        here = sorted(
            (item for item in spans.items() if item[1].path == path), key=lambda item: item[1].offset
        )
        try:
            with path.open("rb", buffering=0) as file:
                _refuse_changed(file, here)
                for name, span in here:
                    tensors[name] = _read(file, span)
                _refuse_changed(file, here)  # while it was read
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return {name: tensors[name] for name in spans}


def _refuse_changed(file: BinaryIO, spans: Iterable[tuple[Any, Span]]) -> None:
    now = Stamp.of(os.fstat(file.fileno()))
    for stamp in {span.stamp for _, span in spans} - {None, now}:
        raise CheckpointError(
            f"{file.name} has changed since it was opened: it had {stamp.size} bytes and has {now.size}, and "
            f"was last changed {(now.mtime_ns - stamp.mtime_ns) / 1e9:+.3f} s from then; start anew once "
            "nothing writes to it"
        )


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


def _safetensors_contents(path: Path, file: BinaryIO, stamp: Stamp) -> Contents:
    """Header and layout as https://github.com/huggingface/safetensors#format has them."""
    size = stamp.size
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
    if start.startswith(b"version "):
        raise CheckpointError(f"{path} is git-lfs's note on a file, not the file; run git lfs pull there")
    if length > min(_HEADER_LIMIT, size - 8):
        raise CheckpointError(f"{path} is truncated or no safetensors file: {size} bytes hold no header")
    try:
        header: dict[str, Any] = json.loads(file.read(length))
        others = [f"__metadata__.{name}" for name in header.pop("__metadata__", {}) if name != "format"]
        spans, end = {}, 8 + length
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            dtype = DTYPES[entry["dtype"]]
            spans[name] = Span(path, 8 + length + first, dtype, tuple(entry["shape"]), stamp=stamp)
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
    return Contents(spans, others, stamp)


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


def _state_dict_contents(path: Path, stamp: Stamp) -> Contents:
    content, others = described(path), []
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        others = [str(name) for name in content if name != "state_dict"]
        content = content["state_dict"]
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path} is no dict of tensors by name")
    odd = [name for name, value in content.items() if not isinstance(value, Tensor)]
    within = [name for name in odd if _is_state_dict(content[name])]
    if within:
        raise CheckpointError(
            f"{path} is no dict of tensors by name: those are a level down, in "
            f"{' and '.join(map(str, within))}; save the one meant to a file of its own: "
            f"torch.save(torch.load(path, mmap=True)[{within[0]!r}], other_path)"
        )
    if odd:
        raise CheckpointError(f"{path} is no dict of tensors by name ({odd[0]} is no tensor)")
    spans = {str(name): span_of(path, tensor)._replace(stamp=stamp) for name, tensor in content.items()}
    return Contents(spans, others, stamp)


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(one, Tensor) for one in value.values())


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
