"""What a conversion is to write and how far it has come, kept in its target until that is whole."""

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.interop.conversion import Component, Listing
from wan_ds.interop.layouts import Found
from wan_ds.interop.names import Kind
from wan_ds.interop.shards import write_json
from wan_ds.interop.tensor_files import read_object

NAME = "conversion.json"


@dataclass
class Journal:
    """The source as it was found, what is to lie beside the weights, and what is done of both."""

    source: Path
    wanted: str  # the layout
    found: Found
    surroundings: dict[PurePosixPath, dict[str, Any]]  # JSON files by their places in the target
    is_surrounded: bool = False  # whether all but the weights is in the target
    verified: set[str] = field(default_factory=set)  # files of the target that were compared with the source

    def write(self, target: Path) -> None:
        """Keep it in the target, on the disk. Raises CheckpointError if that cannot be written."""
        content = {
            "source": str(self.source.resolve()),
            "format": self.wanted,
            "is_whole": self.found.is_whole,
            "copies": {
                str(place): str(path.relative_to(self.source)) for place, path in self.found.copies.items()
            },
            "surroundings": {str(place): content for place, content in self.surroundings.items()},
            "is_surrounded": self.is_surrounded,
            "verified": sorted(self.verified),
            "components": [
                {
                    "kind": component.kind,
                    "role": component.role,
                    "source": component.source.to_json(self.source),
                    "config": component.config,
                    "prefix": component.prefix,
                }
                for component in self.found.components
            ],
        }
        write_json(target / NAME, content)


def read_journal(target: Path, source: Path, wanted: str) -> Journal | None:
    """The journal that an interrupted conversion left in the target, if one did.

    Raises ConfigError if it was of another source or format, CheckpointError if it is no journal or a file of
    the source is not what it was; files that are gone may have been removed by the conversion.
    """
    place = target / NAME
    if not place.is_file():
        return None
    try:
        content = read_object(place)
        begun = str(content["source"]), str(content["format"])
        journal = _parsed(content, source)
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{place} is no journal of a conversion ({error!r}); name another target, and if files of the "
            f"source are gone, look for what they held in {target}"
        ) from error
    if begun != (str(source.resolve()), wanted):
        raise ConfigError(
            f"target={target}: holds the unfinished conversion source={begun[0]} format={begun[1]}; finish "
            "it with those, or name another folder"
        )
    for component in journal.found.components:
        component.source.refuse_changed()
    return journal


def _parsed(content: dict[str, Any], source: Path) -> Journal:
    components = [
        Component(
            Kind(*one["kind"]),
            str(one["role"]),
            Listing.from_json(one["source"], source),
            dict(one["config"]),
            str(one["prefix"]),
        )
        for one in content["components"]
    ]
    if not components:
        raise ValueError("no components")
    copies = {PurePosixPath(place): source / path for place, path in content["copies"].items()}
    return Journal(
        source,
        content["format"],
        Found(components, bool(content["is_whole"]), copies),
        {PurePosixPath(place): dict(held) for place, held in content["surroundings"].items()},
        bool(content["is_surrounded"]),
        set(map(str, content["verified"])),
    )
