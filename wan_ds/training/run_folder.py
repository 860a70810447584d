"""A run's folder: what it was started with, and whether this command may go on with it. Takes plain dicts.

config.yaml holds everything, resolved, and Hydra composes it again: it begins with a defaults list, and any
`${` in a value is escaped.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from wan_ds.errors import ConfigError

# what may differ between two starts of one run: it changes no number that the run trains to
MAY_CHANGE = (
    "run_name",
    "run_dir",
    "resume",
    "train.steps",
    "train.check_every_steps",
    "train.stall_seconds",
    "checkpoint",
    "evaluation",
    "sampling",
    "tracker",
    "data.workers",
)
PACKAGES = (
    "wan_ds",
    "torch",
    "deepspeed",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "wandb",
    "hydra-core",
    "omegaconf",
)


def flatten(settings: dict[str, Any], key: str = "") -> dict[str, Any]:
    """Leaves by dotted key; lists and empty dicts are leaves."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        path = f"{key}.{name}" if key else str(name)
        found |= flatten(value, path) if isinstance(value, dict) and value else {path: value}
    return found


def changes_numbers(key: str) -> bool:
    """Whether two runs that differ in this dotted key alone train to different weights."""
    return not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, old, new) of every setting that differs and changes numbers; a missing one reads `not set`."""
    before, after = flatten(old), flatten(new)
    pairs = [
        (key, before.get(key, "not set"), after.get(key, "not set"))
        for key in sorted(before.keys() | after.keys())
    ]
    return [(key, was, now) for key, was, now in pairs if was != now and changes_numbers(key)]


def refuse_changes(folder: Path, settings: dict[str, Any]) -> None:
    """ConfigError if `folder` holds a run that these settings do not continue. Reads only, on any rank."""
    if settings["resume"] == "never" and has_checkpoints(folder):
        raise ConfigError(
            f"resume=never: {folder} has checkpoints, and nothing is deleted here; type another run_name, "
            "remove the folder, or leave out resume=never to continue"
        )
    if not (folder / "config.yaml").is_file():
        return
    old = read(folder)
    differing = changes(old, _escaped(settings))
    if differing:
        listed = "; ".join(f"{key}: {_shown(was)} -> {_shown(now)}" for key, was, now in differing)
        raise ConfigError(
            f"{folder} holds a run with other settings ({listed}); type another run_name, remove the folder, "
            "or type the old values"
        )
    steps, wanted = old["train"]["steps"], settings["train"]["steps"]
    if wanted < steps:
        raise ConfigError(
            f"train.steps={wanted}: {folder} was started with {steps}, and a run may be made longer but not "
            f"shorter; type train.steps={steps} or more, or another run_name"
        )


def literal(text: str) -> str:
    """`text` written so that OmegaConf reads it back as it stands: `${` would begin an interpolation."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def has_checkpoints(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step_*"))


def read(folder: Path) -> dict[str, Any]:
    """The settings in a run's config.yaml, as they stand there."""
    path = folder / "config.yaml"
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not readable as YAML ({' '.join(str(error).split())})") from error
    if not isinstance(settings, dict) or "train" not in settings:
        raise ConfigError(f"{path}: not the settings of a run; remove the folder or type another run_name")
    settings.pop("defaults", None)
    return settings


def write(
    folder: Path,
    settings: dict[str, Any],
    entry_point: str = "scripts/train.py",
    model_commit: str | None = None,
) -> None:
    """Write config.yaml and environment.json, each whole or not at all; on rank 0, after the refusals."""
    folder.mkdir(parents=True, exist_ok=True)
    command = f"python {entry_point} --config-dir {shlex.quote(str(folder))} --config-name config"
    header = f"# The same run again: {command}\n"
    composable = {"defaults": ["schema", "_self_"], **_escaped(settings)}
    body = yaml.dump(composable, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    _replace(folder / "config.yaml", header + body)
    found = environment() | {"model_commit": model_commit}
    _replace(folder / "environment.json", json.dumps(found, indent=2) + "\n")


def environment() -> dict[str, Any]:
    """Versions, devices and the commit of the code, for whoever compares two runs."""
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "devices": _devices(),
        "git_commit": _commit(),
    }


class _Loader(yaml.SafeLoader):
    """YAML as OmegaConf reads it: `1e-4` is a number."""


class _Dumper(yaml.SafeDumper):
    """Puts text that `_Loader` or OmegaConf would read as a number into quotes."""


# OmegaConf's floats beyond YAML 1.1's: an exponent without a point, or without a sign
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*)?\.?[0-9_]*[eE][-+]?[0-9]+$|^[-+]?[0-9][0-9_]*\.[0-9_]*$|^[-+]?\.[0-9_]+$"
)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return literal(value) if isinstance(value, str) else value


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    torch = sys.modules.get("torch")  # training has imported it; a tool that reads folders need not
    if torch is None or not torch.cuda.is_available():
        return [f"cpu ({os.cpu_count()} cores)"]
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _commit() -> str | None:
    """The commit of this checkout, with a + where files differ; null when installed or without git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
        status = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if commit.returncode else commit.stdout.strip() + ("+" if status.stdout.strip() else "")
