"""Tensors into files, one in memory at a time: safetensors shards with their index, and .pth state dicts.

A file gets its name when it is whole: it is written beside, to `<name>.partial`, and then renamed. Once a
call returns, content and name are on the disk, not only in the system's memory: what a file was made of may
be removed.
"""

import errno
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from wan_ds.errors import CheckpointError
from wan_ds.interop.tensor_files import DTYPES, Stored, described, span_of

SHARD_BYTES = 5_000_000_000  # what transformers and the original Wan files have
METADATA = {"format": "pt"}  # without it transformers does not open a file

Read = Callable[[list[str]], Mapping[str, Tensor]]

_OVERHEAD = 1_000_000  # bytes kept free for headers, indexes and configurations
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def bytes_of(stored: Stored) -> int:
    """The size of a tensor."""
    return torch.Size(stored.shape).numel() * stored.dtype.itemsize


def is_identical(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and bytes are the same; NaNs of the same bits are."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def plan_shards(
    tensors: Mapping[str, Stored], stem: str, max_bytes: float | None = SHARD_BYTES
) -> dict[str, list[str]]:
    """The names of tensors in each file, by the file's name, in the order of ``tensors``.

    One file is `<stem>.safetensors`; of several each holds at most ``max_bytes`` (or a single larger tensor).
    None is one file of any size. Raises ValueError if there are no tensors.
    """
    if not tensors:
        raise ValueError(f"{stem}: no tensors to write")
    groups: list[list[str]] = [[]]
    held = 0
    for name, stored in tensors.items():
        size = bytes_of(stored)
        if groups[-1] and max_bytes is not None and held + size > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {
        f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def write_shards(
    folder: Path,
    stem: str,
    tensors: Mapping[str, Stored],
    read: Read,
    *,
    max_bytes: float = SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    single: bool = False,
) -> list[Path]:
    """Write `<stem>.safetensors`, or shards of ``max_bytes`` and their index; returns the weights' files.

    ``read`` is asked for one tensor at a time and must give what ``tensors`` says. The folder is made. Raises
    CheckpointError, with nothing of this call left, if the disk has no room for all of it or fails.
    """
    plan = plan_shards(tensors, stem, None if single else max_bytes)
    make_folder(folder)
    refuse_full_disk(folder, sum(map(bytes_of, tensors.values())))
    written: list[Path] = []
    try:
        for file, names in plan.items():
            write_safetensors(folder / file, {name: tensors[name] for name in names}, read, metadata)
            written.append(folder / file)
        if len(plan) > 1:
            write_index(folder, stem, plan, tensors)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return written


def write_index(
    folder: Path, stem: str, plan: Mapping[str, Sequence[str]], tensors: Mapping[str, Stored]
) -> None:
    """Which shard holds which tensor: `<stem>.safetensors.index.json`, as the other libraries read it."""
    where = {name: file for file, names in plan.items() for name in names}
    index = {
        "metadata": {"total_size": sum(map(bytes_of, tensors.values()))},
        "weight_map": dict(sorted(where.items())),
    }
    write_json(folder / f"{stem}.safetensors.index.json", index)


def write_json(path: Path, content: Any) -> None:
    """One JSON file, its folder made if need be; errors as `write_shards`."""
    text = (json.dumps(content, indent=2) + "\n").encode()
    make_folder(path.parent)
    with _whole(path, len(text)) as partial, partial.open("wb") as file:
        file.write(text)
        _to_disk(file)


def write_safetensors(
    path: Path, tensors: Mapping[str, Stored], read: Read, metadata: Mapping[str, str] | None = None
) -> None:
    """One file as https://github.com/huggingface/safetensors#format has it; errors as `write_shards`."""
    # Wide types first, as the library has it: its readers view bytes as the type, which needs alignment.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(METADATA if metadata is None else metadata)}
    end = 0
    for name in names:
        stored, start = tensors[name], end
        end += bytes_of(stored)
        if stored.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{name}: no safetensors name for {stored.dtype}")
        header[name] = {
            "dtype": _DTYPE_NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with _whole(path, end) as partial, partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(_read_one(read, name, tensors[name]))
        _to_disk(file)


def write_state_dict(path: Path, tensors: Mapping[str, Stored], read: Read) -> None:
    """One .pth file that torch.load opens with weights_only=True; errors as `write_shards`.

    torch.save lays the file out for tensors that hold nothing, then each is written into its place.
    """
    with FakeTensorMode():
        empty = {name: torch.empty(stored.shape, dtype=stored.dtype) for name, stored in tensors.items()}
    with _whole(path, sum(map(bytes_of, tensors.values()))) as partial:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            _save(empty, partial)
        places = {name: span_of(partial, tensor).offset for name, tensor in described(partial).items()}
        checksums = {}
        with partial.open("r+b") as file:
            for name, stored in tensors.items():
                content = _read_one(read, name, stored)
                file.seek(places[name])
                file.write(content)
                checksums[places[name]] = zlib.crc32(content)
            _write_checksums(file, checksums)
            _to_disk(file)


def _save(content: dict[str, Tensor], path: Path) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:  # torch's own for a full disk, too
        raise OSError(error) from error


def _write_checksums(file: BinaryIO, checksums: Mapping[int, int]) -> None:
    """The CRC of each record that was skipped, by the offset of its bytes.

    torch does without, other readers of zip files do not. A CRC stands behind the record's bytes, as PyTorch
    writes them, and in the archive's directory (.ZIP File Format Specification, 4.3.9 and 4.3.12).
    """
    with zipfile.ZipFile(file) as archive:
        entries, place = archive.infolist(), archive.start_dir
    for entry in entries:
        file.seek(entry.header_offset + 26)
        start = entry.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        if start in checksums:
            crc = struct.pack("<L", checksums[start])
            file.seek(start + entry.file_size + 4)
            file.write(crc)
            file.seek(place + 16)
            file.write(crc)
        file.seek(place + 28)
        place += 46 + sum(struct.unpack("<HHH", file.read(6)))


def refuse_full_disk(folder: Path, needed: int) -> None:
    """CheckpointError if the folder's disk has less room than ``needed`` bytes and a little."""
    free = shutil.disk_usage(folder).free
    if free < needed + _OVERHEAD:
        raise CheckpointError(
            f"{folder}: {_gb(needed)} are needed and {_gb(free)} are free on its disk; make room or write to "
            "another one"
        )


def _read_one(read: Read, name: str, stored: Stored) -> memoryview:
    tensor = read([name])[name]
    if tensor.shape != stored.shape or tensor.dtype != stored.dtype:
        raise ValueError(
            f"{name}: {tuple(tensor.shape)} {tensor.dtype} was read, {stored.shape} {stored.dtype} announced"
        )
    return memoryview(_bytes(tensor).numpy())


@contextmanager
def _whole(path: Path, size: int) -> Iterator[Path]:
    """The place to write to, renamed to ``path`` at the end, gone if anything fails; explains OSErrors."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        free = shutil.disk_usage(path.parent).free  # before the half file makes room
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{path} cannot be written ({error}): {_gb(size)} are needed and {_gb(free)} were left on "
                "its disk; nothing of the file remains"
            ) from error
        raise
    try:
        _folder_to_disk(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} is written, and its folder cannot be brought to the disk ({error}): after a power cut "
            "the file may be gone; look after the disk"
        ) from error


def make_folder(folder: Path) -> None:
    """The folder and those above it, on the disk; OSErrors as `Path.mkdir`."""
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(absent):
        _folder_to_disk(path.parent)


def leave_memory(path: Path) -> None:
    """Ask the system to read the file from the disk next time, where it can be asked."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _folder_to_disk(folder: Path) -> None:
    """The names in it: a synced file whose folder is not may have none after a power cut (man 2 fsync)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # systems that sync no folders, and folders that may be passed and not read
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EACCES):
            raise


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB ({count} bytes)"
