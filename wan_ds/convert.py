"""Files of a model from Wan's original layout to diffusers', or back: one component, or a whole folder.

python scripts/convert.py source=Wan2.2-T2V-A14B target=Wan2.2-T2V-A14B-diffusers format=diffusers
    [delete_source=true]

A component is a transformer, a VAE, UMT5 or CLIP, as a folder or a file. Tensors keep their dtype and their
bytes. The same command goes on where one was interrupted.
"""

import json
import logging
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

from omegaconf import MISSING
from tqdm import tqdm

from wan_ds.config.command_line import simple_command
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.interop.conversion import Component, Listing, Output, outputs
from wan_ds.interop.layouts import Found, find, place_of, surroundings
from wan_ds.interop.names import Kind
from wan_ds.interop.shards import SHARD_BYTES, bytes_of, refuse_full_disk, write_index

logger = logging.getLogger(__name__)

JOURNAL = "conversion.json"  # in the target while it is not whole
LAYOUTS = {"original": "Wan's original", "diffusers": "diffusers'"}


class Format(Enum):
    """A layout to convert to."""

    diffusers = "diffusers"
    original = "original"


@dataclass
class ConvertOptions:
    """What `scripts/convert.py` can be told."""

    source: str = field(
        default=MISSING, metadata={"help": "a component's file or folder, or a model's folder", "path": True}
    )
    target: str = field(default=MISSING, metadata={"help": "a folder, new or empty", "path": True})
    format: Format = field(default=MISSING, metadata={"help": "the layout of the target"})
    delete_source: bool = field(
        default=False,
        metadata={"help": "remove each weights file of the source once all of it is written and read back"},
    )


def main(options: ConvertOptions) -> int:
    """Writes the target, and tells what it holds."""
    source, target = Path(options.source), Path(options.target)
    _refuse_paths(source, target, options.delete_source)
    planned = _resumed(source, target, options.format) or _planned(source, options.format)
    if options.delete_source:
        _refuse_links(planned)
    if not (target / JOURNAL).is_file():
        _begin(planned, source, target, options)
    with _explained(target) as removed:
        _write(planned, target, removed if options.delete_source else None)
    (target / JOURNAL).unlink()
    sys.stdout.write(f"{_summary(planned, target, removed)}\n")
    return 0


def _refuse_paths(source: Path, target: Path, delete_source: bool) -> None:
    if not source.exists():
        raise ConfigError(
            f"source={source}: no such file or folder (a hub name is downloaded first: hf download <name> "
            "--local-dir <folder>)"
        )
    if source.resolve() == target.resolve():
        raise ConfigError(f"target={target}: is the source; name a folder that is new or empty")
    if target.suffix in (".safetensors", ".pth", ".pt", ".bin") or target.is_file():
        raise ConfigError(
            f"target={target}: is a file's name; name a folder, whose files are then called as the loaders "
            "of that layout look for them"
        )
    inside = target.resolve().is_relative_to(source.resolve()) or source.resolve().is_relative_to(
        target.resolve()
    )
    if delete_source and inside:
        raise ConfigError(
            f"delete_source=true: source={source} and target={target} overlap; name a target outside of "
            "the source"
        )
    is_begun = (target / JOURNAL).is_file()
    if target.is_dir() and any(target.iterdir()) and not is_begun:
        raise ConfigError(f"target={target}: is not empty; name a folder that is new or empty")


@dataclass(frozen=True)
class Planned:
    """All that a conversion writes."""

    found: Found
    outputs: list[Output]

    def files(self) -> Iterator[tuple[Output, str]]:
        """Each weights file in the order of writing."""
        return ((output, file) for output in self.outputs for file in output.files)


def _planned(source: Path, wanted: Format) -> Planned:
    found = find(source)
    if found.layout == wanted.value:
        others = " or ".join(one.value for one in Format if one is not wanted)
        raise ConfigError(
            f"format={wanted.value}: source={source} is already in {LAYOUTS[wanted.value]} layout; "
            f"format={others} converts it"
        )
    return Planned(found, _outputs(found))


def _outputs(found: Found) -> list[Output]:
    return [made for one in found.components for made in outputs(one, place_of(one, found), SHARD_BYTES)]


def _refuse_links(planned: Planned) -> None:
    """Removing a link frees nothing, and what it points to may have other owners."""
    for component in planned.found.components:
        for path in component.source.files:
            if path.is_symlink():
                raise ConfigError(
                    f"delete_source=true: {path} is a link, as those of a hub cache are; only files are "
                    "removed (hf cache rm removes a downloaded model)"
                )


def _begin(planned: Planned, source: Path, target: Path, options: ConvertOptions) -> None:
    """Everything but the weights, and last the journal, which tells a second start what is to be done."""
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        refuse_full_disk(target, _bytes_needed(planned, target, options.delete_source))
    except CheckpointError:
        if is_new:
            target.rmdir()
        raise
    for remark in planned.found.remarks:
        logger.warning("%s", remark)
    for place, folder in planned.found.copies.items():
        shutil.copytree(folder, target / place, dirs_exist_ok=True)
    for place, content in surroundings(planned.found, source).items():
        _write_json(target / place, content)
    for output in planned.outputs:
        if len(output.files) > 1:
            (target / output.folder).mkdir(parents=True, exist_ok=True)
            write_index(target / output.folder, output.stem, output.files, output.tensors)
    journal = {
        "source": str(source.resolve()),
        "format": options.format.value,
        "is_whole": planned.found.is_whole,
        "components": [
            {
                "kind": component.kind,
                "role": component.role,
                "source": component.source.to_json(),
                "config": component.config,
                "prefix": component.prefix,
            }
            for component in planned.found.components
        ],
    }
    _write_json(target / f"{JOURNAL}.partial", journal).rename(target / JOURNAL)


def _resumed(source: Path, target: Path, wanted: Format) -> Planned | None:
    """What an interrupted conversion of the same was to write; its source may have lost files since."""
    if not (target / JOURNAL).is_file():
        return None
    journal = json.loads((target / JOURNAL).read_text(encoding="utf-8"))
    if (journal["source"], journal["format"]) != (str(source.resolve()), wanted.value):
        raise ConfigError(
            f"target={target}: holds the unfinished conversion source={journal['source']} "
            f"format={journal['format']}; finish it with those, or name another folder"
        )
    components = [
        Component(
            Kind(*one["kind"]), one["role"], Listing.from_json(one["source"]), one["config"], one["prefix"]
        )
        for one in journal["components"]
    ]
    found = Found(components, journal["is_whole"])
    logger.info("going on with the conversion that %s holds", target)
    return Planned(found, _outputs(found))


def _write(planned: Planned, target: Path, removed: list[Path] | None) -> None:
    """Write each file that is not there; with ``removed``, read it back and remove sources that are done."""
    left = _Left(planned)
    total = sum(bytes_of(stored) for output in planned.outputs for stored in output.tensors.values())
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for output, file in planned.files():
            path = target / output.folder / file
            bar.set_postfix_str(path.name)
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                output.write(target, file)
            if removed is not None:
                if all(source.is_file() for source, _ in output.sources(file)):
                    output.compare(target, file)
                for source in left.finished_by(output, file):
                    source.unlink(missing_ok=True)
                    removed.append(source)
            bar.update(sum(bytes_of(output.tensors[name]) for name in output.files[file]))


class _Left:
    """Which tensors of each source file are still to be written."""

    def __init__(self, planned: Planned) -> None:
        self._left: dict[Path, set[str]] = {}
        for output, file in planned.files():
            for source, name in output.sources(file):
                self._left.setdefault(source, set()).add(name)

    def finished_by(self, output: Output, file: str) -> list[Path]:
        """Source files of which nothing is left once this file is written."""
        done = output.sources(file)
        for source, name in done:
            self._left[source].discard(name)
        return sorted({source for source, _ in done if not self._left[source]})


def _bytes_needed(planned: Planned, target: Path, delete_source: bool) -> int:
    """The most that the target's disk has to hold beyond what it holds now."""
    left, held, most = _Left(planned), 0, 0
    for output, file in planned.files():
        held += sum(bytes_of(output.tensors[name]) for name in output.files[file])
        most = max(most, held)
        for source in left.finished_by(output, file):
            if delete_source and source.stat().st_dev == target.stat().st_dev:
                held -= source.stat().st_size
    return most


@contextmanager
def _explained(target: Path) -> Iterator[list[Path]]:
    """Fill in the source files that are removed; an error while writing says how to go on."""
    removed: list[Path] = []
    try:
        yield removed
    except CheckpointError as error:
        gone = (
            f"; removed from the source, as they are in it: {', '.join(map(str, removed))}" if removed else ""
        )
        raise CheckpointError(
            f"{error}. {target} holds what was written until then{gone}. The same command goes on from here"
        ) from error


def _write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def _summary(planned: Planned, target: Path, removed: Iterable[Path]) -> str:
    lines = []
    for output in planned.outputs:
        size = sum(map(bytes_of, output.tensors.values()))
        where = PurePosixPath(target) / output.folder / next(iter(output.files))
        several = f" and {len(output.files) - 1} more" if len(output.files) > 1 else ""
        lines.append(f"{where}{several}: {len(output.tensors)} tensors, {size / 1e9:.2f} GB")
    gone = list(removed)
    if gone:
        lines.append(f"removed from the source: {', '.join(map(str, gone))}")
    return "\n".join(lines)


if __name__ == "__main__":
    simple_command(ConvertOptions, main)
