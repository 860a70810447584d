"""Where a component's weights are: a diffusers folder, an original Wan folder, one file, or another run.

Every rank finds and describes them by itself; one rank reads them."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wan_ds.errors import CheckpointError
from wan_ds.interop import hub
from wan_ds.interop.names import kind_of, transformer_names
from wan_ds.interop.tensor_files import Renamed, open_tensor_files
from wan_ds.models.weights import IGNORED, Described, Drawn, Source, on_meta
from wan_ds.training import adapters, checkpoint, run_folder
from wan_ds.training.adapters import Merged
from wan_ds.training.agreement import agreed

_SECOND = "transformer_2"  # the low-noise expert in diffusers' folders
_ENCODER_FILE = re.compile(r"(?i)vae|t5|clip")  # Wan's own folders hold these .pth files beside the model's
_SAMPLE = 1 << 16  # numbers of a tensor that its fingerprint is made of, at least
_ORIGINAL_CONFIG = {"num_heads": "num_attention_heads", "eps": "eps"}  # the rest is seen in the tensors


def locate(path: str | None, weights: str, component: str) -> Path:
    """The folder of a component: a subfolder of ``path``, or ``weights`` itself.

    A ``path`` that is a run stands for the model that the run was started from. Raises CheckpointError if
    there is none.
    """
    base = None if path is None else hub.local_path(path)
    for folder in ([] if base is None else [base / weights]) + [Path(weights)]:
        if folder.is_dir():
            return folder.resolve()
    if base is not None and is_run(base):
        model = run_folder.read(base)["model"]
        weights = model.get(component, {}).get("weights")
        if weights is None:
            raise CheckpointError(
                f"model.path={path}: that run has no {component}; choose the run's own model, or name a "
                f"folder in model.{component}.weights"
            )
        return locate(_path_of(model, weights), weights, component)
    raise CheckpointError(
        f"model.{component}.weights={weights}: no such folder under model.path={path}; "
        f"{_advice(base, weights, component)}"
    )


def _advice(base: Path | None, weights: str, component: str) -> str:
    """What to type for a component that is not where it was looked for."""
    if base is None:
        return "there is no such model.path here either; name a folder in diffusers' layout"
    if weights != component and (base / component).is_dir():
        return f"type model.{component}.weights={component}"
    if _pickles(base) or any(base.glob("*.pth")):
        return (
            "Wan's own files of it are read once they are converted: "
            f"python scripts/convert.py source={base} target=... format=diffusers"
        )
    return "name a folder in diffusers' layout"


def is_run(folder: Path) -> bool:
    """Whether training wrote the folder."""
    return (folder / "config.yaml").is_file() and not (folder / "model_index.json").exists()


def newest_of_run(path: str) -> str | None:
    """The name of the newest complete checkpoint if the path is a run's."""
    if not is_run(Path(path)):
        return None
    newest = checkpoint.newest(Path(path) / "checkpoints")
    return None if newest is None else newest.name


def _path_of(model: Mapping[str, Any], weights: str | None) -> str | None:
    """The folder of a run's own model on this machine."""
    needed = [] if weights is None else [weights]
    folder, _ = hub.resolve(model["path"], revision=model.get("revision"), needed=needed)
    return None if folder is None else str(folder)


class _Transformer(Renamed):
    """A transformer's tensors by diffusers' names, with what its config says of it."""

    def __init__(self, source: Any, names: Mapping[str, str], architecture: Mapping[str, Any]) -> None:
        super().__init__(source, names)
        self.architecture = dict(architecture)


def transformer_source(path: str | None, weights: str | None, expert: str) -> Source | None:
    """An expert's tensors by diffusers' names; None where they are to be drawn from the seed.

    A run as ``path`` or ``weights`` is its newest complete checkpoint, an adapter folded in: the weights that
    train, also where it keeps averages, because a run that starts from them goes on training. For an
    expert that did not train there what the run was started from; below a run as ``path``, only an absolute
    ``weights`` is something else. Reads headers, and a run's adapter. Raises CheckpointError.
    """
    for run in (weights, None if weights is not None and Path(weights).is_absolute() else path):
        if run is not None and is_run(Path(run)):
            return _of_run(Path(run), expert)
    if weights is None:
        _refuse_unread(path, expert)
        return None
    place = _place(path, weights, expert)
    files = open_tensor_files(place)
    kind = kind_of(files.tensors, files.where)
    if kind.component != "transformer":
        raise CheckpointError(f"{files.where} is a {kind.component}; name the transformer's file or folder")
    names = {name: name for name in files.tensors}
    if kind.layout == "original":
        try:
            names = {new: old for old, new in transformer_names(files.tensors).items()}
        except CheckpointError as error:
            raise CheckpointError(f"{files.where}: {error}") from error
    return _Transformer(files, names, _config(place))


def _refuse_unread(path: str | None, expert: str) -> None:
    """Random numbers are no surprise: not beside a folder that holds what the expert could start from."""
    base = None if path is None else hub.local_path(path)
    if base is None:
        return
    place = _SECOND if expert == "low_noise" else "transformer"
    found = [name for name in (place, f"{expert}_model") if (base / name).is_dir()]
    if base.is_file() or any(base.glob("*.safetensors")):
        found.append(path)
    if found:
        raise CheckpointError(
            f"model.experts.{expert}.weights=null: model.path={path} holds {found[0]}, which would not be "
            f"read; type model.experts.{expert}.weights={found[0]}, or another model.path to start from "
            "the seed"
        )


def _of_run(run: Path, expert: str) -> Source | None:
    settings = run_folder.read(run)
    model = settings["model"]
    if expert not in model["experts"]:
        there = ", ".join(model["experts"])
        raise CheckpointError(
            f"{run} has {there} and the model declares {expert}; choose the run's own model"
        )
    folder = checkpoint.find(run, "latest")
    counts = checkpoint.read_state(folder).experts.get(expert)
    weights = model["experts"][expert]["weights"]
    if counts is None:
        return transformer_source(_path_of(model, weights), weights, expert)
    if settings.get("adapter", {}).get("rank") is not None:
        source: Source | None = transformer_source(_path_of(model, weights), weights, expert)
        if source is None:
            source = Drawn(on_meta(model["transformer"]), settings["seed"], expert)
        return Merged(Fingerprint(source, counts.base), adapters.read(folder / expert))
    source = checkpoint.checkpoint_source(folder, expert)
    return _Transformer(source, {name: name for name in source.tensors}, model["transformer"])


def _place(path: str | None, weights: str, expert: str) -> Path:
    """The file or folder of an expert's tensors."""
    base = None if path is None else hub.local_path(path)
    if base is not None:
        if (base / weights).exists():
            _refuse_other_count(base, weights, expert)
            return base / weights
        if found := _original(base, expert):
            return found
    if Path(weights).exists():
        return Path(weights)
    if base is not None and expert != "all" and (base / "transformer").is_dir():
        _refuse_one(base, expert)
    raise CheckpointError(
        f"model.experts.{expert}.weights={weights}: there is none under model.path={path}; name a local "
        "folder in diffusers' or Wan's own layout, a file, or a run (a hub name is downloaded first: "
        "hf download <name> --local-dir <folder>)"
    )


def _original(base: Path, expert: str) -> Path | None:
    """The expert in a folder as Wan's authors release it, or in one file."""
    folder = base / f"{expert}_model"
    if folder.is_dir():
        return _single_pickle(folder)
    if base.is_file() or any(base.glob("*.safetensors")) or _pickles(base):
        if expert != "all":
            _refuse_one(base, expert)
        return _single_pickle(base)
    if expert == "all" and (base / "high_noise_model").is_dir():
        _refuse_two(base, "high_noise_model and low_noise_model")
    return None


def _pickles(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.pth")) if not _ENCODER_FILE.search(path.name)]


def _single_pickle(place: Path) -> Path:
    """The folder, or where it has no safetensors its one .pth file that is no encoder's."""
    if place.is_dir() and not any(place.glob("*.safetensors")) and len(pickles := _pickles(place)) == 1:
        return pickles[0]
    return place


def _refuse_other_count(base: Path, weights: str, expert: str) -> None:
    """A folder of two transformers is no one-expert model, nor the other way round."""
    has_second = (base / _SECOND).is_dir()
    if expert == "all" and has_second and (base / weights).parent == base:
        _refuse_two(base, f"{weights} and {_SECOND}" if weights != _SECOND else f"transformer and {_SECOND}")
    index = base / "model_index.json"
    if expert != "all" and not has_second and weights == "transformer" and index.is_file():
        try:
            second = json.loads(index.read_text(encoding="utf-8")).get(_SECOND)
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error}") from error
        if not second or second[0] is None:  # else it was just not downloaded
            _refuse_one(base, expert)


def _refuse_two(base: Path, both: str) -> None:
    raise CheckpointError(
        f"model.path={base} holds two experts ({both}) and the model declares one, all; choose the "
        "two-expert model that it was released as"
    )


def _refuse_one(base: Path, expert: str) -> None:
    raise CheckpointError(
        f"model.path={base} holds one transformer and the model declares two experts: there is no second "
        f"transformer for {expert}; choose the one-expert model that it was released as, or name the file or "
        f"folder in model.experts.{expert}.weights"
    )


def _config(place: Path) -> dict[str, Any]:
    """What config.json beside the tensors says of the architecture, in diffusers' words."""
    path = (place if place.is_dir() else place.parent) / "config.json"
    if not path.is_file():
        return {}
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if "num_heads" in config:
        return {new: config[old] for old, new in _ORIGINAL_CONFIG.items() if old in config}
    return {key: value for key, value in config.items() if not key.startswith("_")}


class Fingerprint:
    """A source that knows it again: a hash of names, shapes, dtypes and a sample of each tensor's numbers.

    Any other training of the same architecture has another one; the same weights in another file have not.
    """

    def __init__(self, source: Source, expected: str | None = None) -> None:
        """``expected``: what `value` must be once every tensor has been read."""
        self.where, self.tensors = source.where, source.tensors
        self.architecture = getattr(source, "architecture", {})
        self._source, self._expected = source, expected
        self._wanted = {name for name in source.tensors if IGNORED not in name}
        self._hashes: dict[str, str] = {}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The source's tensors. Raises CheckpointError with the last of them if it is not as expected."""
        tensors = self._source.read(names)
        for name, tensor in tensors.items():
            self._hashes[name] = _hash_of(tensor)
        if self._expected is not None and self._hashes.keys() >= self._wanted:
            refuse_other_base(self.where, self.value(), self._expected)
        return tensors

    def value(self) -> str:
        """The fingerprint, after every tensor has been read."""
        unread = self._wanted - self._hashes.keys()
        if unread:
            raise ValueError(f"{len(unread)} tensors of {self.where} were not read")
        return hashlib.blake2b(repr(sorted(self._hashes.items())).encode(), digest_size=16).hexdigest()


def _hash_of(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].contiguous()
    digest = hashlib.blake2b(repr((tuple(tensor.shape), str(tensor.dtype))).encode(), digest_size=16)
    digest.update(sample.view(torch.uint8).numpy())
    return digest.hexdigest()


def refuse_other_base(where: str, found: str | None, expected: str | None) -> None:
    """CheckpointError if an adapter was trained on other weights than these."""
    if found != expected:
        raise CheckpointError(
            f"{where} holds other weights than the adapter was trained on; an adapter fits its own base "
            "alone: put that back where it was"
        )


class ByOneRank:
    """The same tensors, read by rank 0; the others get meta tensors in their place, for a broadcast to fill.

    Reading is a collective: if it fails on rank 0, every rank raises CheckpointError.
    """

    def __init__(self, source: Source) -> None:
        self.where, self.tensors = source.where, source.tensors
        self.architecture = getattr(source, "architecture", {})
        self._source = source

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        names = list(names)
        return agreed(lambda: self._source.read(names) if dist.get_rank() == 0 else self._empty(names))

    def _empty(self, names: Iterable[str]) -> dict[str, Tensor]:
        described: dict[str, Described] = {name: self.tensors[name] for name in names}
        return {
            name: torch.empty(tuple(one.shape), dtype=one.dtype, device="meta")
            for name, one in described.items()
        }
