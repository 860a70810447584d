"""Which weights files of a folder are meant, and whether all of them are there."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from wan_ds.errors import CheckpointError

PICKLES = (".pth", ".pt", ".bin")
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_USUAL = ("diffusion_pytorch_model", "model", "pytorch_model")  # names that diffusers and transformers open


def files_meant(folder: Path) -> tuple[dict[str, str] | None, list[Path]]:
    """The index (the file of each tensor), if there is one, and the files meant.

    They are what diffusers and transformers open, else those of the only index, the parts of one series, or
    the only file. Raises CheckpointError if there are none, or not all.
    """
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
        index = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        for file in map(Path, index.values()):
            if file.is_absolute() or ".." in file.parts:
                raise ValueError(f"{file} is elsewhere")
        return index
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


def refuse_misplaced(folder: Path, index: Mapping[str, str], places: Mapping[str, Path]) -> None:
    """CheckpointError unless each tensor is where the index says: shards may be swapped or stale."""
    for name, file in index.items():
        if name not in places:
            raise CheckpointError(
                f"{folder / file} does not hold {name}, which the index says is there; download it again"
            )
        if places[name].name != Path(file).name:
            raise CheckpointError(
                f"{folder}: {name} is in {places[name].name} and the index says {file}: shards are "
                "swapped or of two downloads; download them again"
            )
