"""From what a person calls a model to a folder on this machine: a local path, or a repository of the hub.

What is local is never asked of the network. What is not is downloaded once per node: every rank of a node may
call `resolve` at the same time, before there is a process group to coordinate by.
"""

import fcntl
import glob
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from httpx2 import HTTPError
from huggingface_hub import (
    HfApi,
    constants,
    get_cached_repo_tree,
    is_offline_mode,
    snapshot_download,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm, validate_repo_id

from wan_ds.errors import CheckpointError

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_WEIGHTS_FILES = (".safetensors", ".bin", ".pth", ".pt", ".ckpt")
_OTHER_FRAMEWORKS = (".msgpack", ".h5", ".onnx", ".onnx_data", ".gguf")
_GB = 1e9


class _File(NamedTuple):
    name: str
    bytes: int
    blob: str | None  # its name in the cache, where revisions share files


class _Cached(NamedTuple):
    """What the cache has of a repository without asking the hub."""

    folder: Path | None
    missing: list[str]


def local_path(path: str) -> Path | None:
    """Where `path` is on this machine, None if nowhere; one that begins with wan_ds/ may lie beside the
    installed package."""
    named = Path(path).expanduser()
    if named.exists():
        return named
    if PurePosixPath(path).parts[:1] == (_PACKAGE.name,):
        packaged = _PACKAGE.parent / path
        return packaged if packaged.exists() else None
    return None


def resolve(
    path: str | None, *, revision: str | None = None, needed: Sequence[str]
) -> tuple[Path | None, str | None]:
    """The folder of a model and, if the hub has it, the commit that it is of.

    A local path is itself, of no commit, and None stays None. Of a repository `organisation/name` those
    subfolders (or files, "." for the files at the top) that are `needed` are downloaded into the hub's cache,
    with model_index.json; weights as safetensors where there are any. Where nothing is needed nobody is
    asked, and there is no folder. A branch may move between the calls of two nodes: compare the commits, or
    name one as `revision`, which is then asked of the hub only once.

    Raises CheckpointError if there is no such folder, repository, revision or subfolder, the disk is too
    small, or the cache lacks something and the hub cannot be asked (HF_HUB_OFFLINE, no network).
    """
    if path is None:
        return None, None
    local = local_path(path)
    if local is not None:
        return local, None
    if not _may_be_a_repository(path):
        raise CheckpointError(
            f"model.path={path}: no such folder here, and not a repository of the hub, which would be called"
            " organisation/name"
        )
    if not needed:
        return None, None
    with _turn(path) as waited:
        return _in_turn(path, revision, [PurePosixPath(entry).as_posix() for entry in needed], waited)


def _in_turn(repository: str, revision: str | None, needed: list[str], waited: bool) -> tuple[Path, str]:
    offline = is_offline_mode()
    if waited or offline or _is_commit(revision):
        cached = _in_cache(repository, revision, needed)
        if not cached.missing:
            return cached.folder, cached.folder.name
        if offline:
            raise CheckpointError(_not_here(repository, cached, "HF_HUB_OFFLINE is set"))
    try:
        return _from_hub(repository, revision, needed)
    except CheckpointError:
        raise
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"model.revision={revision}: {repository} has no such branch, tag or commit"
        ) from error
    except (HTTPError, OSError, RuntimeError) as error:  # the last of hf_xet, when a download breaks off
        cached = _in_cache(repository, revision, needed)
        if cached.missing:
            raise CheckpointError(_why(repository, cached, error)) from error
        logger.warning("%s: using the cache's copy; %s", repository, _first_line(error))
        return cached.folder, cached.folder.name


def _may_be_a_repository(path: str) -> bool:
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    organisation, slash, _ = path.partition("/")
    return bool(slash) and organisation != _PACKAGE.name and not path.endswith(_WEIGHTS_FILES)


def _is_commit(revision: str | None) -> bool:
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def _storage(repository: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


@contextmanager
def _turn(repository: str) -> Iterator[bool]:
    """One process at a time for each cache and repository; yields whether another one went before.

    Where the lock cannot be had (a cache that can only be read, a file system without locks) all go at once:
    huggingface_hub keeps the cache whole even so, and only loads more often than necessary.
    """
    path = Path(constants.HF_HUB_CACHE) / ".locks" / _storage(repository).name / "wan_ds.lock"
    waited = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError:
        yield waited
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            logger.info("waiting for another process that looks for %s", repository)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.info("%s cannot be locked: %s", path, error)
        yield waited


def _from_hub(repository: str, revision: str | None, needed: list[str]) -> tuple[Path, str]:
    """Ask the hub, and download what the cache lacks."""
    info = HfApi().model_info(
        repository, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )
    listed = [
        _File(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else file.blob_id)
        for file in info.siblings or []
    ]
    files = _chosen(repository, listed, needed)
    storage = _storage(repository)
    folder = storage / "snapshots" / info.sha
    absent = [file for file in files if not (folder / file.name).is_file()]
    blobs = [file for file in absent if not (file.blob and (storage / "blobs" / file.blob).is_file())]
    if absent:
        _check_space(repository, sum(file.bytes for file in blobs))
        # A warning, so that it is heard whichever rank has the turn.
        logger.warning(
            "downloading %s: %d files, %.1f GB, into %s",
            repository,
            len(blobs),
            sum(file.bytes for file in blobs) / _GB,
            constants.HF_HUB_CACHE,
        )
    elif _commit(repository, revision) == info.sha:
        return folder, info.sha
    folder = Path(
        snapshot_download(
            repository,
            revision=revision,
            allow_patterns=[glob.escape(file.name) for file in files],
            tqdm_class=tqdm if _on_first_node() else _NoBar,
        )
    )
    return folder, folder.name


def _chosen(repository: str, listed: list[_File], needed: list[str]) -> list[_File]:
    """The files that are needed; weights in other formats only where there are no safetensors."""
    names = [file.name for file in listed]
    for entry in needed:
        if not any(_belongs(name, entry) for name in names):
            folders = sorted({name.split("/")[0] for name in names if "/" in name})
            advice = ""
            if "model_index.json" not in names:
                advice = ", in another layout than diffusers'; those of Wan-AI that have it end in -Diffusers"
            raise CheckpointError(
                f"model.path={repository}: that repository has no {entry};"
                f" it has {', '.join(folders or names)}{advice}"
            )
    safe = {PurePosixPath(name).parent for name in names if name.endswith(".safetensors")}

    def is_wanted(name: str) -> bool:
        if name == "model_index.json" or name in needed:
            return True
        if not any(_belongs(name, entry) for entry in needed) or name.endswith(_OTHER_FRAMEWORKS):
            return False
        stem = name.removesuffix(".index.json")
        other = stem.endswith(_WEIGHTS_FILES) and not stem.endswith(".safetensors")
        return not (other and PurePosixPath(name).parent in safe)

    return [file for file in listed if is_wanted(file.name)]


def _belongs(name: str, entry: str) -> bool:
    if entry == ".":
        return "/" not in name
    return name == entry or name.startswith(f"{entry}/")


def _check_space(repository: str, needed_bytes: int) -> None:
    cache = Path(constants.HF_HUB_CACHE).absolute()
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise CheckpointError(
            f"model.path={repository}: {needed_bytes / _GB:.2f} GB are still to be downloaded, but"
            f" {free / _GB:.2f} GB are free in {cache}; free some, or set HF_HOME to a folder on a larger"
            " disk"
        )


def _commit(repository: str, revision: str | None) -> str | None:
    """The commit of a revision as the cache remembers it."""
    if _is_commit(revision):
        return revision
    reference = _storage(repository) / "refs" / (revision or constants.DEFAULT_REVISION)
    return reference.read_text().strip() if reference.is_file() else None


def _in_cache(repository: str, revision: str | None, needed: list[str]) -> _Cached:
    """What the cache has; complete by the list of files that the hub gave, where one was kept."""
    commit = _commit(repository, revision)
    if commit is None:
        return _Cached(None, needed)
    folder = _storage(repository) / "snapshots" / commit
    try:
        listed = [_File(f.path, f.size, None) for f in get_cached_repo_tree(repository, revision=commit)]
    except CachedRepoTreeNotFoundError:
        listed = [_File(name, 0, None) for name in _files_and_shards(folder)]
    names = [file.name for file in listed]
    missing = [entry for entry in needed if not any(_belongs(name, entry) for name in names)]
    if not missing:
        files = _chosen(repository, listed, needed)
        missing = [file.name for file in files if not (folder / file.name).is_file()]
    return _Cached(folder, missing)


def _files_and_shards(folder: Path) -> list[str]:
    """The files of a snapshot, and those that the indices among them name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.relative_to(folder) for path in files}
    for path in files:
        if path.name.endswith(".index.json"):
            shards = set(json.loads(path.read_text()).get("weight_map", {}).values())
            names |= {path.relative_to(folder).parent / shard for shard in shards}
    return sorted(name.as_posix() for name in names)


def _why(repository: str, cached: _Cached, error: Exception) -> str:
    """One sentence on why the hub did not give a repository that the cache lacks."""
    if isinstance(error, GatedRepoError):
        return (
            f"model.path={repository} is gated: accept its terms at {constants.ENDPOINT}/{repository}, then"
            " type hf auth login, or set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"model.path={repository}: neither a folder here nor a repository of {constants.ENDPOINT} that"
            " you may read; correct the name, or, if it is private, type hf auth login or set HF_TOKEN"
        )
    return _not_here(repository, cached, f"it could not be downloaded ({_first_line(error)})")


def _not_here(repository: str, cached: _Cached, reason: str) -> str:
    missing = ", ".join(cached.missing[:3])
    if len(cached.missing) > 3:
        missing += f" and {len(cached.missing) - 3} more"
    return (
        f"model.path={repository}: no such folder here, {constants.HF_HUB_CACHE} lacks {missing} of it, and"
        f" {reason}; where"
        f" there is a network, type hf download {repository} --local-dir <folder>, then set"
        " model.path=<folder>"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _on_first_node() -> bool:
    """One bar for the job, by whichever rank of the first node has the turn (and none beside a terminal)."""
    rank = os.environ.get("RANK", "0")
    return rank == os.environ.get("LOCAL_RANK", rank)


class _NoBar(tqdm):
    def __init__(self, *args, **arguments):
        super().__init__(*args, **{**arguments, "disable": True})
