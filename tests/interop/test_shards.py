"""Files that shards.py writes, read by the libraries whose formats they are."""

import errno
import json
import os
import re
import shutil
import stat
import struct
import tracemalloc
import zipfile
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, CLIPVisionModel

from wan_ds.errors import CheckpointError
from wan_ds.interop import shards
from wan_ds.interop.shards import plan_shards, write_shards, write_state_dict
from wan_ds.interop.tensor_files import Stored, open_tensor_files

TENSORS = {
    "odd.bf16": torch.randn(3, 5).bfloat16(),  # 30 bytes, so that what follows is aligned only by sorting
    "wide.f64": torch.randn(2, 3, dtype=torch.float64),
    "scalar.f32": torch.tensor(2.5),
    "half.f16": torch.randn(7).half(),
    "count.i64": torch.arange(4),
    "small.i32": torch.arange(3, dtype=torch.int32),
    "tiny.i16": torch.arange(3, dtype=torch.int16),
    "byte.u8": torch.arange(5, dtype=torch.uint8),
    "signed.i8": torch.arange(-2, 3, dtype=torch.int8),
    "flag.bool": torch.tensor([True, False, True]),
    "empty.f32": torch.empty(0, 4),
    "turned.f32": torch.randn(4, 3).T,
    "nan.f32": torch.tensor([float("nan"), float("inf"), -0.0]),
}
METADATA = {"format": "pt"}


def stored(tensors):
    return {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def reading(tensors):
    return lambda names: {name: tensors[name] for name in names}


def same(found, tensors):
    """The same names, and of each tensor dtype, shape and bytes."""
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*raw), name
    return True


def equal_tensors(count, elements):
    return {f"layer.{number}.weight": torch.randn(elements) for number in range(count)}


def test_the_library_reads_every_dtype_to_the_byte(tmp_path):
    (path,) = write_shards(tmp_path, "model", stored(TENSORS), reading(TENSORS))
    assert path == tmp_path / "model.safetensors"
    assert same(load_file(path), TENSORS)
    with safe_open(path, "pt") as file:
        assert file.metadata() == METADATA


def test_a_file_is_as_large_as_the_librarys_own(tmp_path):
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    (path,) = write_shards(tmp_path, "model", stored(tensors), reading(tensors))
    save_file(tensors, tmp_path / "theirs.safetensors", metadata=METADATA)
    assert path.stat().st_size == (tmp_path / "theirs.safetensors").stat().st_size


def test_every_tensor_starts_where_its_type_is_aligned(tmp_path):
    (path,) = write_shards(tmp_path, "model", stored(TENSORS), reading(TENSORS))
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    assert (8 + length) % 8 == 0
    header = json.loads(content[8 : 8 + length])
    for name, tensor in TENSORS.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0, name


def test_shards_hold_at_most_what_they_may_and_their_index_names_each_tensor_once(tmp_path):
    tensors = equal_tensors(7, 100)  # 400 bytes each
    paths = write_shards(tmp_path, "model", stored(tensors), reading(tensors), max_bytes=1000)
    assert [path.name for path in paths] == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2800
    found = {}
    for path in paths:
        held = load_file(path)
        assert sum(tensor.nbytes for tensor in held.values()) <= 1000
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(held)
        found |= held
    assert same(found, tensors)
    assert same(open_tensor_files(tmp_path).read(tensors), tensors)


def test_transformers_loads_the_shards(tmp_path):
    config = CLIPVisionConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, patch_size=14
    )
    tensors = CLIPVisionModel(config).state_dict()
    assert len(write_shards(tmp_path, "model", stored(tensors), reading(tensors), max_bytes=30_000)) > 2
    config.save_pretrained(tmp_path)
    assert same(CLIPVisionModel.from_pretrained(tmp_path).state_dict(), tensors)


def test_a_tensor_larger_than_a_shard_has_one_to_itself():
    sizes = {"a": 10, "b": 5000, "c": 10, "d": 10}
    plan = plan_shards({name: Stored((size,), torch.uint8) for name, size in sizes.items()}, "m", 100)
    assert list(plan.values()) == [["a"], ["b"], ["c", "d"]]


def test_single_is_one_file_of_any_size(tmp_path):
    tensors = equal_tensors(7, 100)
    paths = write_shards(tmp_path, "all", stored(tensors), reading(tensors), max_bytes=1000, single=True)
    assert [path.name for path in paths] == ["all.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["all.safetensors"]


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    held = 4_000_000
    tensors = {f"{number}": Stored((held,), torch.uint8) for number in range(12)}
    asked = []

    def read(names):  # numpy's memory is traced, torch's is not
        asked.append(names)
        return {name: torch.from_numpy(np.zeros(held, dtype=np.uint8)) for name in names}

    for write in (write_shards_of, write_state_dict_of):
        asked.clear()
        tracemalloc.start()
        write(tmp_path, tensors, read)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sorted(asked) == sorted([name] for name in tensors)
        assert peak < 3 * held  # the one being written, the one being read, and what the writers need


def write_shards_of(folder, tensors, read):
    return write_shards(folder, "model", tensors, read)


def write_state_dict_of(folder, tensors, read):
    return write_state_dict(folder / "model.pth", tensors, read)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_a_state_dict_to_the_byte(tmp_path, mmap):
    write_state_dict(tmp_path / "model.pth", stored(TENSORS), reading(TENSORS))
    found = torch.load(tmp_path / "model.pth", weights_only=True, mmap=mmap)
    assert type(found) is dict
    assert same(found, TENSORS)
    assert same(open_tensor_files(tmp_path / "model.pth").read(TENSORS), TENSORS)


def test_a_state_dicts_archive_has_the_checksums_of_its_content(tmp_path):
    write_state_dict(tmp_path / "model.pth", stored(TENSORS), reading(TENSORS))
    with zipfile.ZipFile(tmp_path / "model.pth") as archive:
        assert archive.testzip() is None  # every record read and its CRC compared
    torch.save({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "theirs.pth")
    sizes = [(tmp_path / name).stat().st_size for name in ("model.pth", "theirs.pth")]
    assert sizes[0] == pytest.approx(sizes[1], abs=2000)  # torch's own differs in how it orders and names


DiskUsage = namedtuple("DiskUsage", "total used free")


def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(10**12, 10**12, 1_002_000))
    tensors = equal_tensors(7, 100)
    with pytest.raises(CheckpointError, match=r"\(2800 bytes\) are needed and .*\(1002000 bytes\) are free"):
        write_shards(tmp_path / "new", "model", stored(tensors), reading(tensors))
    assert list((tmp_path / "new").iterdir()) == []


def fails_at(tensors, last):
    """Reads until a tensor at which the disk is full, as the writers see it: an OSError within a file."""

    def read(names):
        if names == [last]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return {name: tensors[name] for name in names}

    return read


def test_a_disk_that_fills_up_leaves_no_file_and_says_what_was_needed(tmp_path):
    tensors = equal_tensors(7, 100)
    with pytest.raises(
        CheckpointError, match=r"model-00002.*No space left.*\(800 bytes\) are needed.*bytes\) were left"
    ):
        write_shards(tmp_path, "model", stored(tensors), fails_at(tensors, "layer.3.weight"), max_bytes=1000)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "model.pth"))):
        write_state_dict(tmp_path / "model.pth", stored(tensors), fails_at(tensors, "layer.3.weight"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["new/folder/model.safetensors", "new/folder/model.pth"])
def test_content_and_names_are_on_the_disk_when_a_file_is_written(tmp_path, monkeypatch, name):
    events, fsync, replace = [], os.fsync, os.replace

    def syncing(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path).as_posix())
        fsync(descriptor)

    def replacing(old, new):
        events.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    write = write_state_dict if name.endswith("pth") else shards.write_safetensors
    shards.make_folder((tmp_path / name).parent)
    write(tmp_path / name, stored(TENSORS), reading(TENSORS))
    assert events == [".", "new", f"{name}.partial", "replace", "new/folder"]


@pytest.mark.parametrize(("number", "is_error"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_system_that_syncs_no_folders_is_no_error_and_a_failing_disk_is(
    tmp_path, monkeypatch, number, is_error
):
    fsync = os.fsync

    def failing(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, "of a folder")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match="of a folder") if is_error else nullcontext():
        write_state_dict(tmp_path / "model.pth", stored(TENSORS), reading(TENSORS))
    assert same(torch.load(tmp_path / "model.pth", weights_only=True), TENSORS)


def test_torchs_own_error_of_a_full_disk_is_explained_too(tmp_path, monkeypatch):
    def save(content, path):
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(shards.torch, "save", save)
    with pytest.raises(CheckpointError, match="model.pth cannot be written .*file write failed"):
        write_state_dict(tmp_path / "model.pth", stored(TENSORS), reading(TENSORS))
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_gives_another_tensor_than_announced_is_a_programmers_mistake(tmp_path):
    announced = {"a": Stored((3,), torch.float32)}
    for given in (torch.zeros(4), torch.zeros(3, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="a: .* was read, .* announced"):
            write_shards(tmp_path, "model", announced, reading({"a": given}))
    with pytest.raises(ValueError, match="model: no tensors"):
        write_shards(tmp_path, "model", {}, reading({}))
    with pytest.raises(ValueError, match="a: no safetensors name for torch.complex64"):
        write_shards(tmp_path, "model", {"a": Stored((3,), torch.complex64)}, reading({}))
    assert list(tmp_path.iterdir()) == []


def test_identical_is_to_the_bit_in_one_dtype_and_shape():
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert shards.is_identical(nan, nan.clone())
    assert not shards.is_identical(zero, -zero)
    assert not shards.is_identical(zero, zero.bfloat16())
    assert not shards.is_identical(zero, zero[0])
