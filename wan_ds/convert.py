"""Files of a model from Wan's original layout to diffusers', or back: one component, or a whole folder.

python scripts/convert.py source=Wan2.2-T2V-A14B target=Wan2.2-T2V-A14B-diffusers format=diffusers
    [delete_source=true]

A component is a transformer, a VAE, UMT5 or CLIP, as a folder or a file. Tensors keep their dtype and their
bytes. The same command goes on where one was interrupted.

delete_source=true removes a weights file of the source once all that it holds is in the target, on the disk
and read back from there. A file that holds more than the target has a place for, or that is reached through a
link, is refused before anything is written.
"""

import logging
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath

from omegaconf import MISSING
from tqdm import tqdm

from wan_ds.config.command_line import simple_command
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.interop import journal as journals
from wan_ds.interop.conversion import Output, outputs
from wan_ds.interop.journal import Journal, read_journal
from wan_ds.interop.layouts import Found, find, place_of, surroundings
from wan_ds.interop.names import some
from wan_ds.interop.shards import (
    SHARD_BYTES,
    bytes_of,
    make_folder,
    refuse_full_disk,
    write_index,
    write_json,
)

logger = logging.getLogger(__name__)

JOURNAL = journals.NAME
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
    with _system_errors(f"source={source} and target={target}: cannot be looked at"):
        _refuse_paths(source, target, options.delete_source)
        journal = read_journal(target, source, options.format.value)
        is_new = journal is None
        journal = journal or _planned(source, options.format)
        planned = Planned(journal.found, _outputs(journal.found))
        if options.delete_source:
            _refuse_shared(planned, source)
            _refuse_loss(planned)
        finished = _finished(planned, target, journal.verified if options.delete_source else None)
    cannot = f"target={target} cannot be written"
    with _system_errors(cannot):
        if is_new:
            _begin(journal, planned, target, options.delete_source)
        with _explained(target) as removed, _system_errors(cannot):
            if not journal.is_surrounded:
                _surround(journal, planned, target)
            _write(planned, target, finished, journal, removed if options.delete_source else None)
        (target / JOURNAL).unlink()
    sys.stdout.write(f"{_summary(planned, target, removed)}\n")
    return 0


@contextmanager
def _system_errors(what: str) -> Iterator[None]:
    """The system's errors, which name a path, as ours."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error}") from error


def _refuse_paths(source: Path, target: Path, delete_source: bool) -> None:
    is_begun = (target / JOURNAL).is_file()
    if not source.exists() and not is_begun:  # a begun conversion may have removed it
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
    held = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if not is_begun and held - {f"{JOURNAL}.partial"}:
        raise ConfigError(f"target={target}: is not empty; name a folder that is new or empty")


@dataclass(frozen=True)
class Planned:
    """All that a conversion writes."""

    found: Found
    outputs: list[Output]

    def files(self) -> Iterator[tuple[Output, str]]:
        """Each weights file in the order of writing."""
        return ((output, file) for output in self.outputs for file in output.files)


def _planned(source: Path, wanted: Format) -> Journal:
    found = find(source)
    if found.layout == wanted.value:
        others = " or ".join(one.value for one in Format if one is not wanted)
        raise ConfigError(
            f"format={wanted.value}: source={source} is already in {LAYOUTS[wanted.value]} layout; "
            f"format={others} converts it"
        )
    return Journal(source, wanted.value, found, surroundings(found, source))


def _outputs(found: Found) -> list[Output]:
    return [made for one in found.components for made in outputs(one, place_of(one, found), SHARD_BYTES)]


def _refuse_shared(planned: Planned, source: Path) -> None:
    """A link's removal frees nothing, and what it points to may have other owners: file or folder."""
    owners: dict[tuple[int, int], Path] = {}
    paths = [path for component in planned.found.components for path in component.source.files]
    for path in [path for path in paths if path.exists()]:
        real = path.resolve()
        if path.is_symlink() or real != source.resolve() / path.relative_to(source):
            raise ConfigError(
                f"delete_source=true: {path} is a link, as those of a hub cache are, or in a folder that is "
                f"one, to {real}; only files of the source's own are removed (hf cache rm removes what was "
                "downloaded)"
            )
        status = path.stat()
        other = owners.setdefault((status.st_dev, status.st_ino), path)
        if other != path:
            raise ConfigError(f"delete_source=true: {other} and {path} are one file; leave delete_source out")


def _refuse_loss(planned: Planned) -> None:
    """A file goes whole, so all that it holds must have a place in the target."""
    written = {one for output, file in planned.files() for one in output.sources(file)}
    for listing in [component.source for component in planned.found.components]:
        for path, held in listing.files.items():
            lost = [name for name in held if (path, name) not in written] + listing.others.get(path, [])
            if lost:
                raise ConfigError(
                    f"delete_source=true: {path} also holds {some(lost)}, for which the target has no place; "
                    "leave delete_source out, and remove the file yourself if all of that may go"
                )


def _finished(planned: Planned, target: Path, verified: set[str] | None) -> set[tuple[PurePosixPath, str]]:
    """Folder and name of each file of the target that an interrupted conversion has written already.

    With ``verified`` the sources are to be removed. Raises CheckpointError if a file is not whole, or a
    source is gone that is still needed: to write a file, or to compare one that never was.
    """
    finished = set()
    for output, file in planned.files():
        path = target / output.folder / file
        gone = sorted({str(source) for source, _ in output.sources(file) if not source.is_file()})
        is_there = path.is_file()
        if is_there:
            output.refuse_other(target, file)
            finished.add((output.folder, file))
        if gone and not is_there:
            raise CheckpointError(
                f"{some(gone)}: not there, and {path} is still to be made of it; put it back"
            )
        if gone and verified is not None and str(output.folder / file) not in verified:
            raise CheckpointError(
                f"{path} was never compared with its source, and cannot be: {some(gone)} is gone; put it "
                "back, or leave delete_source out. Nothing was removed"
            )
    return finished


def _begin(journal: Journal, planned: Planned, target: Path, delete_source: bool) -> None:
    """The journal before all else: it tells a second start that the target is ours and what is to be done."""
    is_new = not target.exists()
    make_folder(target)
    try:
        refuse_full_disk(target, _bytes_needed(planned, target, delete_source))
    except CheckpointError:
        if is_new:
            target.rmdir()
        raise
    for remark in planned.found.remarks:
        logger.warning("%s", remark)
    journal.write(target)


def _surround(journal: Journal, planned: Planned, target: Path) -> None:
    """Everything but the weights."""
    for place, folder in planned.found.copies.items():
        shutil.copytree(folder, target / place, dirs_exist_ok=True)
    for place, content in journal.surroundings.items():
        write_json(target / place, content)
    for output in planned.outputs:
        if len(output.files) > 1:
            make_folder(target / output.folder)
            write_index(target / output.folder, output.stem, output.files, output.tensors)
    journal.is_surrounded = True
    journal.write(target)


def _write(
    planned: Planned,
    target: Path,
    finished: set[tuple[PurePosixPath, str]],
    journal: Journal,
    removed: list[Path] | None,
) -> None:
    """Write each file that is not finished; with ``removed``, compare it and remove sources that are done."""
    left = _Left(planned)
    if finished:
        logger.info("going on with the conversion that %s holds", target)
    total = sum(bytes_of(stored) for output in planned.outputs for stored in output.tensors.values())
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for output, file in planned.files():
            bar.set_postfix_str(file)
            if (output.folder, file) not in finished:
                make_folder(target / output.folder)
                output.write(target, file)
            if removed is not None:
                place = str(output.folder / file)
                if place not in journal.verified:
                    output.compare(target, file)
                    journal.verified.add(place)
                    journal.write(target)
                for source in left.finished_by(output, file):
                    source.unlink(missing_ok=True)
                    removed.append(source)
            bar.update(sum(bytes_of(output.tensors[name]) for name in output.files[file]))


class _Left:
    """How many files of the target are still to be made of each source file."""

    def __init__(self, planned: Planned) -> None:
        self._uses = Counter(path for output, file in planned.files() for path in _used(output, file))

    def finished_by(self, output: Output, file: str) -> list[Path]:
        """Source files of which nothing is left once this file is written."""
        used = _used(output, file)
        self._uses.subtract(used)
        return sorted(path for path in used if not self._uses[path])


def _used(output: Output, file: str) -> set[Path]:
    return {path for path, _ in output.sources(file)}


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
