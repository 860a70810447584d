"""Tensors in other people's files, against safetensors' and torch's own readers."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import _TYPES as TYPES_OF_SAFETENSORS
from safetensors.torch import load_file, save_file

from wan_ds.errors import CheckpointError
from wan_ds.interop import tensor_files
from wan_ds.interop.tensor_files import Renamed, Span, Stored, open_tensor_files, read_object, read_spans

RNG = torch.Generator().manual_seed(0)
TENSORS = {
    "blocks.0.weight": torch.randn(3, 5, generator=RNG),
    "blocks.0.bias": torch.randn(7, generator=RNG).to(torch.bfloat16),
    "half": torch.randn(2, 2, generator=RNG).to(torch.float16),
    "double": torch.randn(3, generator=RNG, dtype=torch.float64),
    "count": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
}


def shards(folder: Path, parts: int = 3, stem: str = "model") -> list[Path]:
    """The tensors in safetensors shards without an index."""
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(parts):
        names = list(TENSORS)[number::parts]
        paths.append(folder / f"{stem}-{number + 1:05d}-of-{parts:05d}.safetensors")
        save_file({name: TENSORS[name] for name in names}, paths[-1])
    return paths


def with_index(folder: Path) -> list[Path]:
    paths = shards(folder)
    weight_map = {name: path.name for path in paths for name in load_file(path)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return paths


def same(read: dict, expected: dict) -> bool:
    return read.keys() == expected.keys() and all(
        read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
        for name, tensor in expected.items()
    )


def test_a_file_of_safetensors_is_read_as_safetensors_reads_it(tmp_path):
    path = tmp_path / "any name.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    files = open_tensor_files(path)
    assert same(files.read(files.tensors), load_file(path))
    assert files.tensors["blocks.0.bias"] == Stored((7,), torch.bfloat16) and files.where == str(path)
    assert {file: sorted(names) for file, names in files.files.items()} == {path: sorted(TENSORS)}
    assert list(files.read(["mask", "half"])) == ["mask", "half"]


@pytest.mark.parametrize("make", [shards, with_index])
def test_a_folder_of_shards_is_one_set_of_tensors(tmp_path, make):
    paths = make(tmp_path)
    files = open_tensor_files(tmp_path)
    assert same(files.read(TENSORS), TENSORS)
    assert list(files.files) == paths and sorted(sum(files.files.values(), [])) == sorted(TENSORS)


def test_an_index_chooses_among_files_and_so_does_the_usual_name(tmp_path):
    with_index(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "another.safetensors")
    assert open_tensor_files(tmp_path).tensors.keys() == TENSORS.keys()
    folder = tmp_path / "single"
    shards(folder, 2, "diffusion_pytorch_model.fp16")
    save_file({"other": torch.ones(1)}, folder / "diffusion_pytorch_model.safetensors")
    assert list(open_tensor_files(folder).tensors) == ["other"]


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin"])
def test_a_state_dict_that_torch_saved_is_read_as_torch_reads_it(tmp_path, suffix):
    base = torch.randn(6, 5, generator=RNG)
    tensors = TENSORS | {"view": base[2:4], "turned": base.t(), "strided": base[:, ::2], "last": base[-1, -1]}
    tensors["parameter"] = torch.nn.Parameter(torch.ones(2))
    path = tmp_path / f"model{suffix}"
    torch.save(tensors, path)
    files = open_tensor_files(path)
    assert same(files.read(files.tensors), torch.load(path, weights_only=True))
    assert {name: one.shape for name, one in files.tensors.items()} == {
        k: v.shape for k, v in tensors.items()
    }
    torch.save({"state_dict": TENSORS}, path)
    assert same(open_tensor_files(tmp_path).read(TENSORS), TENSORS)


def test_what_a_file_holds_beside_its_tensors_is_told(tmp_path):
    torch.save({"state_dict": TENSORS, "ema": TENSORS, "step": 7}, tmp_path / "more.pth")
    save_file(TENSORS, tmp_path / "more.safetensors", metadata={"format": "pt", "by": "me"})
    save_file(TENSORS, tmp_path / "plain.safetensors", metadata={"format": "pt"})
    torch.save({"state_dict": TENSORS}, tmp_path / "plain.pth")
    told = {path.name: open_tensor_files(path).others.get(path) for path in sorted(tmp_path.iterdir())}
    assert told == {
        "more.pth": ["ema", "step"],
        "more.safetensors": ["__metadata__.by"],
        "plain.pth": None,
        "plain.safetensors": None,
    }


def test_dtypes_are_called_as_safetensors_calls_them():
    assert len(tensor_files.DTYPES) == 12 and tensor_files.DTYPES.items() <= TYPES_OF_SAFETENSORS.items()


def test_an_object_is_read_and_nothing_else_is(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_object(tmp_path / "a.json") == {"a": 1}
    for content in (b"[1, 2]", b"3", b"", b"{", b"\xff"):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(CheckpointError, match="a.json is no readable JSON object"):
            read_object(tmp_path / "a.json")
    with pytest.raises(CheckpointError, match="b.json is no readable JSON object: .*No such file"):
        read_object(tmp_path / "b.json")


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model."])
def test_the_prefix_of_comfyui_is_understood(tmp_path, prefix):
    path = tmp_path / "comfy.safetensors"
    save_file({prefix + name: tensor for name, tensor in TENSORS.items()} | {"vae.x": torch.ones(1)}, path)
    files = open_tensor_files(path)
    assert same(files.read(TENSORS), TENSORS) and set(files.tensors) - set(TENSORS) == {"vae.x"}


def test_a_read_takes_the_bytes_of_its_tensors_and_maps_nothing(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file({name: torch.full((1000,), float(name)) for name in "0123456789"}, path)
    files, taken = open_tensor_files(path), []
    before = Path("/proc/self/maps").read_text()
    read = tensor_files._read

    def noting(file, span):
        tensor = read(file, span)
        taken.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(tensor_files, "_read", noting)
    held = files.read(["3", "7"])
    assert taken == [4000, 4000] and "model.safetensors" not in before + Path("/proc/self/maps").read_text()
    path.unlink()  # nothing that was read depends on the file
    assert held["3"].unique() == 3 and held["7"].unique() == 7


def test_tensors_go_by_other_names(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    files = open_tensor_files(tmp_path)
    renamed = Renamed(files, {"new": "half", "twice": "count", "thrice": "count"})
    assert renamed.tensors == {"new": files.tensors["half"]} | dict.fromkeys(
        ("twice", "thrice"), files.tensors["count"]
    )
    read = renamed.read(["thrice", "new", "twice"])
    assert list(read) == ["thrice", "new", "twice"] and torch.equal(read["new"], TENSORS["half"])
    assert read["thrice"] == read["twice"] == 3 and renamed.where == files.where
    assert renamed.files == {tmp_path / "model.safetensors": ["new", "twice", "thrice"]}


def _raw(path, header, size=0):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))


def _of_an_object(path):
    torch.save({"weight": torch.ones(1), "path": Path("x")}, path)


def _f32(shape, first, last):
    return {"dtype": "F32", "shape": shape, "data_offsets": [first, last]}


ONE_FILE = {
    "nothing there": ("a.safetensors", lambda path: None, "cannot be read: .*No such file"),
    "a name of nothing": ("a.ckpt", lambda path: path.touch(), "the name ends in none of .safetensors, .pth"),
    "empty": ("a.safetensors", lambda path: path.touch(), "truncated or no safetensors file: 0 bytes"),
    "cut in the header": (
        "a.safetensors",
        lambda path: path.write_bytes(struct.pack("<Q", 1000) + b"{}"),
        "truncated or no safetensors file: 10 bytes hold no header",
    ),
    "too long": (
        "a.safetensors",
        lambda path: _raw(path, {"x": _f32([2], 0, 8)}, 9),
        r"truncated or was written over: it has \d\d bytes, and its header describes \d\d",
    ),
    "no JSON": ("a.safetensors", lambda path: _raw(path, b"no JSON"), "its header is no safetensors header"),
    "sizes that differ": (
        "a.safetensors",
        lambda path: _raw(path, {"x": _f32([3], 0, 8)}, 8),
        r"no safetensors header .*x has 8 bytes for F32 \[3\]",
    ),
    "a dtype unknown to torch": (
        "a.safetensors",
        lambda path: _raw(path, {"x": _f32([1], 0, 4) | {"dtype": "F4"}}, 4),
        "no safetensors header .*F4",
    ),
    "a note of git-lfs": (
        "a.safetensors",
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "is git-lfs's note on a file, not the file; run git lfs pull",
    ),
    "a cut .pth": (
        "a.pth",
        lambda path: (torch.save(TENSORS, path), path.write_bytes(path.read_bytes()[:-100])),
        "truncated, or torch wrote it before version 1.6",
    ),
    "an old .pth": (
        "a.pth",
        lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False),
        "truncated, or torch wrote it before version 1.6",
    ),
    "a pickle of more than tensors": (
        "a.pth",
        _of_an_object,
        "more than tensors and plain containers: pathlib",
    ),
    "a list": ("a.pth", lambda path: torch.save([torch.ones(1)], path), "is no dict of tensors by name"),
    "numbers among tensors": (
        "a.pth",
        lambda path: torch.save({"weight": torch.ones(1), "step": 3}, path),
        r"is no dict of tensors by name \(step is no tensor\)",
    ),
    "a state dict a level down": (
        "a.pth",
        lambda path: torch.save({"model": TENSORS, "optimizer": {"step": 3}}, path),
        r"those are a level down, in model; save the one meant .*torch.load\(path, mmap=True\)\['model'\]",
    ),
    "two state dicts a level down": (
        "a.pth",
        lambda path: torch.save({"module": TENSORS, "ema": TENSORS, "step": torch.ones(1)}, path),
        "a level down, in module and ema; save the one meant",
    ),
    "a .pth that is not there": ("a.pth", lambda path: None, "cannot be read: .*No such file"),
    "a name with a prefix and without": (
        "a.safetensors",
        lambda path: save_file({"x": torch.ones(1), "diffusion_model.x": torch.ones(1)}, path),
        "holds x twice, with a prefix and without",
    ),
    "fp8": (
        "a.safetensors",
        lambda path: save_file({"x": torch.ones(2).to(torch.float8_e5m2)}, path),
        r"holds fp8 weights \(x\): made for inference",
    ),
    "fp8 with scales": (
        "a.safetensors",
        lambda path: save_file({"scaled_fp8": torch.ones(2), "x": torch.ones(1)}, path),
        r"holds fp8 weights with scales \(scaled_fp8\)",
    ),
}


@pytest.mark.parametrize("case", ONE_FILE)
def test_a_file_that_cannot_be_used_is_named_with_what_is_wrong(tmp_path, case):
    name, make, words = ONE_FILE[case]
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=words) as error:
        open_tensor_files(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def _index_of(folder, change):
    with_index(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def _swap(folder):
    one, other, _ = with_index(folder)
    content = one.read_bytes(), other.read_bytes()
    one.write_bytes(content[1])
    other.write_bytes(content[0])


FOLDERS = {
    "nothing": (lambda folder: None, "holds no weights: there is no .safetensors, .pth, .pt or .bin file"),
    "a missing shard": (
        lambda folder: with_index(folder)[1].unlink(),
        "the index names model-00002-of-00003.safetensors, not there",
    ),
    "a missing part without an index": (
        lambda folder: shards(folder)[2].unlink(),
        "is not complete: the part 00003-of-00003 is missing",
    ),
    "parts of two series": (
        lambda folder: (shards(folder)[0].unlink(), shards(folder, 2)),
        "is not complete: the part 00001-of-00003 is missing",
    ),
    "swapped shards": (_swap, "shards are swapped or of two downloads"),
    "a shard without what the index says": (
        lambda folder: _index_of(folder, lambda index: index.update(more="model-00001-of-00003.safetensors")),
        "00001-of-00003.safetensors does not hold more, which the index says is there",
    ),
    "an index of files elsewhere": (
        lambda folder: _index_of(folder, lambda index: index.update(more="../model.safetensors")),
        "is no readable index of shards: .*model.safetensors is elsewhere",
    ),
    "an index of numbers": (
        lambda folder: _index_of(folder, lambda index: index.update(more=3)),
        "is no readable index of shards",
    ),
    "an index that is none": (
        lambda folder: (with_index(folder), (folder / "model.safetensors.index.json").write_text("{}")),
        "is no readable index of shards",
    ),
    "two files": (
        lambda folder: [save_file(TENSORS, folder / f"{name}.safetensors") for name in ("high", "low")],
        "holds high.safetensors, low.safetensors; name the one meant",
    ),
    "one tensor twice": (
        lambda folder: [
            save_file(TENSORS, folder / f"x-{part}-of-00002.safetensors") for part in ("00001", "00002")
        ],
        "is in x-00001-of-00002.safetensors and in x-00002-of-00002.safetensors",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_cannot_be_used_is_named_with_what_is_wrong(tmp_path, case):
    make, words = FOLDERS[case]
    make(tmp_path)
    with pytest.raises(CheckpointError, match=words) as error:
        open_tensor_files(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_that_changed_after_it_was_opened_is_an_error(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    save = torch.save if suffix == ".pth" else save_file
    save(TENSORS, path)
    before = path.stat()
    changes = {
        "shorter": lambda: path.write_bytes(path.read_bytes()[:-30]),
        "of the same size": lambda: os.utime(path, ns=(0, before.st_mtime_ns + 1)),
        "replaced": lambda: (save(TENSORS, tmp_path / "new"), os.replace(tmp_path / "new", path)),
        "longer, at the same time": lambda: (
            path.write_bytes(path.read_bytes() + b"x"),
            os.utime(path, ns=(0, before.st_mtime_ns)),
        ),
    }
    for change in changes.values():
        save(TENSORS, path)
        os.utime(path, ns=(0, before.st_mtime_ns))
        files = open_tensor_files(path)
        assert same(files.read(TENSORS), TENSORS)
        change()
        with pytest.raises(CheckpointError, match=rf"model\{suffix} has changed since it was opened: it had"):
            files.read(TENSORS)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    files, read = open_tensor_files(path), tensor_files._read
    monkeypatch.setattr(tensor_files, "_read", lambda *given: (read(*given), os.utime(path, ns=(0, 1)))[0])
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        files.read(["half"])


def test_a_file_that_ends_early_or_is_gone_is_an_error(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    files = open_tensor_files(path)
    beyond = Span(path, path.stat().st_size - 4, torch.float32, (5,))
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: it ends 16 bytes before"):
        read_spans({"x": beyond})
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: .*No such file"):
        files.read(["half"])
