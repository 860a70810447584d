"""What a model's folder says of sampling: diffusers' layout has files for it, Wan's original has constants.

There `NOTE` keeps it, so that a way back brings a source's own values and not the official ones.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from wan_ds.errors import CheckpointError
from wan_ds.interop import configs
from wan_ds.interop.tensor_files import read_object

NOTE = "sampling.json"
INDEX = "model_index.json"
SCHEDULER = PurePosixPath("scheduler/scheduler_config.json")
PROCESSOR = PurePosixPath("image_processor/preprocessor_config.json")

Sampling = dict[str, Any]  # any of scheduler, image_processor (the content of their files) and boundary_ratio


def of_diffusers(source: Path, is_dual: bool) -> Sampling:
    """A diffusers folder's own values. Raises CheckpointError for a broken file or an impossible value."""
    found: Sampling = {}
    for name, place in (("scheduler", SCHEDULER), ("image_processor", PROCESSOR)):
        if (source / place).is_file():
            found[name] = read_object(source / place)
    boundary = read_object(source / INDEX).get("boundary_ratio") if (source / INDEX).is_file() else None
    if is_dual and boundary is not None:  # of one transformer it says nothing
        found["boundary_ratio"] = boundary
    _refuse_wrong(found, source / SCHEDULER, source / INDEX)
    return found


def of_original(source: Path, is_dual: bool) -> Sampling:
    """What a conversion noted; nothing beside released weights. Raises CheckpointError."""
    place = source / NOTE
    found = read_object(place) if place.is_file() else {}
    for name in ("scheduler", "image_processor"):
        if not isinstance(found.get(name, {}), dict):
            raise CheckpointError(
                f"{place}: {name} is {found[name]!r}; it is the content of a file of diffusers'"
            )
    _refuse_wrong(found, place, place)
    if not is_dual:
        found.pop("boundary_ratio", None)
    return found


def _refuse_wrong(found: Sampling, scheduler: Path, index: Path) -> None:
    shift, boundary = found.get("scheduler", {}).get("flow_shift"), found.get("boundary_ratio")
    if shift is not None and not (_is_number(shift) and shift > 0):
        raise CheckpointError(
            f"{scheduler}: flow_shift is {shift!r}; it is a number above 0, of Wan 3.0 to 16.0"
        )
    if boundary is not None and not (_is_number(boundary) and 0 < boundary < 1):
        raise CheckpointError(
            f"{index}: boundary_ratio is {boundary!r}; it is a number between 0 and 1, of Wan 0.875 or 0.9"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def remarks(sampling: Sampling, transformer: Mapping[str, Any], is_dual: bool) -> list[str]:
    """Where the original code, which has constants, will sample in another way than the source says."""
    said = {"flow_shift": sampling.get("scheduler", {}).get("flow_shift")}
    said["boundary_ratio"] = sampling.get("boundary_ratio")
    shifts = {configs.official_shift(transformer, is_dual, is_480p) for is_480p in (False, True)}
    official = {"flow_shift": shifts, "boundary_ratio": {configs.official_boundary(transformer)}}
    return [
        f"the source samples with {name} {value}, Wan's original code with its own "
        f"{' or '.join(map(str, sorted(official[name])))}; {NOTE} keeps the former for a way back"
        for name, value in said.items()
        if value is not None and value not in official[name]
    ]
