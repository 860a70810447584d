"""Readers: a reader is a callable that is given ``data.path`` and returns the clips there.

``data.reader`` names a reader by ``_target_`` and its options; where it is null, ``detect`` looks at the
files.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from unicodedata import normalize

from wan_ds.data.clips import Clip
from wan_ds.errors import DataError

Reader = Callable[[Path], list[Clip]]

VIDEO_EXTENSIONS = (".mp4", ".mov", ".mkv", ".webm", ".m4v", ".avi")
NAMES_SHOWN = 5

# Files that tell a dataset of another kind, by name or by extension.
OTHER_FORMATS = {
    "metadata.csv": "a table of clips",
    "metadata.json": "a table of clips",
    "metadata.jsonl": "a table of clips",
    "videos2caption.json": "a table of clips",
    "captions.json": "a table of captions",
    ".csv": "a table of clips",
    ".jsonl": "a table of clips",
    ".json": "a table of clips",
    ".tar": "WebDataset shards",
    ".parquet": "a parquet dataset or cache",
    ".toml": "another trainer's dataset file",
}

logger = logging.getLogger(__name__)


class FolderWithCaptions:
    """Videos in a folder and those below it, each with its caption beside it: ``cat.mp4``, ``cat.txt``.

    A caption is UTF-8 text; its lines are joined and its runs of white space become one space each.
    Extensions count in either case; names that begin with a dot are passed over; linked folders are followed.
    Clips come sorted by their path relative to the folder.
    """

    def __init__(self, extensions: Sequence[str] = VIDEO_EXTENSIONS, caption_extension: str = ".txt") -> None:
        self.extensions = tuple(_with_dot(extension) for extension in extensions)
        self.caption_extension = _with_dot(caption_extension)

    def __call__(self, path: str | Path) -> list[Clip]:
        """The clips; raises ``DataError`` unless every video has exactly one caption that says something."""
        folder = _folder(path)
        files = sorted(_files(folder), key=lambda file: file.relative_to(folder).as_posix())
        videos = [file for file in files if file.suffix.lower() in self.extensions]
        captions = {_stem(file): file for file in files if file.suffix.lower() == self.caption_extension}
        if not videos:
            raise DataError(
                f"{folder}: there is no video in it or below it; videos end in {' '.join(self.extensions)}"
            )
        self._check_pairs(folder, videos, captions)
        stems = {_stem(video) for video in videos}
        alone = [caption for stem, caption in captions.items() if stem not in stems]
        if alone:
            count, names = _counted(folder, alone, "captions")
            logger.warning("%s: %s without a video, not used: %s", folder, count, names)
        texts = [_caption(captions[_stem(video)]) for video in videos]
        empty = [captions[_stem(video)] for video, text in zip(videos, texts, strict=True) if not text]
        if empty:
            count, names = _counted(folder, empty, "empty captions")
            raise DataError(f"{folder}: {count}: {names}; write them, or move their videos away")
        return [
            Clip(key=video.relative_to(folder).as_posix(), path=video, caption=text)
            for video, text in zip(videos, texts, strict=True)
        ]

    def _check_pairs(self, folder: Path, videos: list[Path], captions: dict) -> None:
        count = Counter(_stem(video) for video in videos)
        twins = [video for video in videos if count[_stem(video)] > 1]
        if twins:
            number, names = _counted(folder, twins, "videos")
            raise DataError(
                f"{folder}: {number} share their name and differ in extension, so one caption would"
                f" serve several: {names}; rename or move all but one"
            )
        bare = [video for video in videos if _stem(video) not in captions]
        if bare:
            number, names = _counted(folder, bare, "videos")
            raise DataError(
                f"{folder}: {number} without a caption: {names}; write the caption of {bare[0].name} to"
                f" {bare[0].stem}{self.caption_extension} beside it, or move the video away"
            )


def detect(path: str | Path) -> Reader:
    """The reader for what lies at ``path``; raises ``DataError`` naming what was found if there is none."""
    path = Path(path).expanduser()
    if path.is_file():
        kind = OTHER_FORMATS.get(path.name.lower()) or OTHER_FORMATS.get(path.suffix.lower())
        if kind:
            raise DataError(_no_reader(path, f"is {kind}"))
    folder = _folder(path)
    files = sorted(_files(folder))
    videos = {_stem(file) for file in files if file.suffix.lower() in VIDEO_EXTENSIONS}
    paired = any(_stem(file) in videos for file in files if file.suffix.lower() == ".txt")
    others = () if paired else OTHER_FORMATS.items()
    for name, kind in others:
        found = [file for file in files if name in (file.name.lower(), file.suffix.lower())]
        if found:
            raise DataError(_no_reader(folder, f"holds {found[0].relative_to(folder).as_posix()}, {kind}"))
    return FolderWithCaptions()


def _no_reader(path: Path, found: str) -> str:
    return (
        f"{path} {found}; without data.reader, folders of videos with same-stem .txt captions are read: lay"
        " the clips out so, or set data.reader to a class of your own (a callable path -> list[Clip])"
    )


def _folder(path: str | Path) -> Path:
    path = Path(path).expanduser()
    if path.is_file():
        raise DataError(f"{path} is a file; data.path names a folder with videos, such as {path.parent}")
    if not path.is_dir():
        raise DataError(f"{path}: there is no such folder; data.path names the folder with the videos")
    return path


def _files(folder: Path) -> Iterator[Path]:
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:  # a link to a folder above it
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in names if not name.startswith("."))


def _stem(file: Path) -> tuple[Path, str]:
    """What a video and its caption share; NFC, because systems differ in how they spell an accented letter.
    """
    return file.parent, normalize("NFC", file.stem)


def _with_dot(extension: str) -> str:
    return "." + extension.lower().removeprefix(".")


def _caption(file: Path) -> str:
    try:
        return " ".join(file.read_text(encoding="utf-8-sig").split())
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: the caption is not UTF-8 text ({error}); save it as UTF-8") from error


def _counted(folder: Path, files: Iterable[Path], what: str) -> tuple[str, str]:
    names = [file.relative_to(folder).as_posix() for file in files]
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} {what}", ", ".join(names[:NAMES_SHOWN]) + more
