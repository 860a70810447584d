"""Composing a configuration: the groups and files that were chosen, the values on top, and the run's name.

Hydra composes, and does nothing else: it writes no folder, changes no directory and configures no logging.
"""

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from hydra import compose
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import wan_ds
from wan_ds.config import targets
from wan_ds.config.nearest import suggest
from wan_ds.config.overrides import Override, assign, keys
from wan_ds.config.schema import Config, read, sentence
from wan_ds.errors import ConfigError
from wan_ds.training.run_folder import changes_numbers, flatten


@dataclass
class Arguments:
    """argv, sorted: the flags that are understood, and the overrides."""

    overrides: list[Override] = field(default_factory=list)
    config_dir: Path | None = None
    config_name: str | None = None
    show: str | None = None  # cfg, help or info
    resolve: bool = False


def configure(arguments: Arguments) -> Config:
    """Compose, apply what was typed, and name the run; unchecked."""
    return read(settings(arguments))


def settings(arguments: Arguments) -> DictConfig:
    """The composed configuration with its run name; interpolations stand as they are."""
    with _composition_errors():
        return _settings(arguments)


def _settings(arguments: Arguments) -> DictConfig:
    groups, values = [], []
    with composer(arguments) as loader:
        names = [name for name in loader.list_groups("") if name != "hydra"]
        for override in arguments.overrides:
            (groups if _is_choice(override, names) else values).append(override)
        for override in groups:
            _refuse_unknown_option(loader, override)
        cfg, recipe = _composed(arguments, groups)
        alone = [override for override in groups if override.key == "recipe"]
        before = copy.deepcopy(cfg) if alone == groups else _composed(arguments, alone)[0]
    for override in values:
        assign(cfg, Config, override)
    _name_run(cfg, before, recipe, {override.key for override in values})
    return cfg


def conf_dir() -> Path:
    """Our configuration: inside the package when it is installed, beside it in a checkout."""
    package = Path(wan_ds.__file__).parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def _primary_dir(arguments: Arguments) -> Path:
    """--config-dir adds groups; what --config-name names is looked for there first (a run's config.yaml)."""
    folder, name = arguments.config_dir, arguments.config_name
    return folder if folder and name and (folder / f"{name}.yaml").is_file() else conf_dir()


@contextmanager
def composer(arguments: Arguments) -> Iterator[ConfigLoader]:
    ConfigStore.instance().store("schema", node=Config)
    primary = _primary_dir(arguments)
    # what hydra.initialize_config_dir does, with more than one folder
    search_path = create_config_search_path(str(primary))
    for other in (conf_dir(), arguments.config_dir):
        if other is not None and other != primary:
            search_path.append("wan_ds", f"file://{other}", anchor="main")
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2(task_name="wan_ds", config_search_path=search_path)
    try:
        yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().clear()


def _composed(arguments: Arguments, choices: list[Override]) -> tuple[DictConfig, str | None]:
    """The configuration that these group choices give, and the chosen recipe.

    An adapter that is typed brings its precision, which a recipe's own would win over.
    """
    typed = [override.typed for override in choices]
    chosen = {override.key: override.text for override in choices}
    if chosen.get("adapter") == "lora" and "precision" not in chosen:
        typed.append("precision=lora")
    cfg = compose(arguments.config_name or "config", overrides=typed, return_hydra_config=True)
    recipe = cfg.hydra.runtime.choices.get("recipe")
    with open_dict(cfg):
        cfg.pop("hydra")
    return cfg, recipe


def _is_choice(override: Override, groups: list[str]) -> bool:
    if override.key == "hydra" or override.key.startswith(("hydra.", "hydra/")):
        raise ConfigError(f"{override.typed}: Hydra only composes here, its own settings do nothing")
    return "/" in override.key or override.key.partition("@")[0] in groups


def _refuse_unknown_option(loader: ConfigLoader, override: Override) -> None:
    group = override.key.partition("@")[0]
    if override.prefix.startswith("+") and (conf_dir() / group).is_dir():
        raise ConfigError(f"{override.typed}: {group} has its place already; type it without the +")
    if override.text is None or override.text == "null":
        return
    if "," in override.text:
        raise ConfigError(
            f"{override.typed}: give {group} one option; several jobs are one process each (launch/sweeps)"
        )
    options = sorted(loader.get_group_options(group))
    if override.text.removesuffix(".yaml") not in options:
        near = get_close_matches(override.text, options, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{group}={override.text}: no such option; {hint}there are {', '.join(options) or 'none'}"
        )


def _name_run(cfg: DictConfig, before: DictConfig, recipe: str | None, typed: set[str]) -> None:
    """Fill `run_name` unless it was given: the recipe's name, and a hash of what was changed on top of it.

    A function of the command and the environment alone, so that every rank finds the same name.
    """
    if cfg.run_name is None:
        cfg.run_name = _default_name(cfg, before, recipe)
    elif "run_name" in typed and "run_dir" not in typed and cfg.run_dir == f"runs/{before.run_name}":
        cfg.run_dir = "runs/${run_name}"  # from a run's own config.yaml, where run_dir stands resolved


def _default_name(cfg: DictConfig, before: DictConfig, recipe: str | None) -> str:
    name = recipe or "run"
    old, new = _numbers(before), _numbers(cfg)
    every = sorted(old.keys() | new.keys())
    changed = [key for key in every if old.get(key, "absent") != new.get(key, "absent")]
    if changed:
        told = json.dumps([[key, new.get(key, "absent")] for key in changed], sort_keys=True, default=str)
        name += "-" + hashlib.sha256(told.encode()).hexdigest()[:8]
    sweep = os.environ.get("WANDB_SWEEP_ID")
    return f"sweeps/{sweep}/{os.environ.get('WANDB_RUN_ID') or name}" if sweep else name


def _numbers(cfg: DictConfig) -> dict[str, Any]:
    """Every setting that changes the numbers of a run, by dotted key."""
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False, enum_to_str=True)
    for group in targets.OPEN_GROUPS:
        first, _, last = group.partition(".")
        holder, name = (plain[first], last) if last else (plain, first)
        if isinstance(holder[name], dict):
            holder[name] = targets.with_numbers(group, holder[name])
    return {key: value for key, value in flatten(plain).items() if changes_numbers(key)}


@contextmanager
def _composition_errors() -> Iterator[None]:
    try:
        yield
    except OmegaConfBaseException as error:
        raise ConfigError(sentence(error)) from error
    except (HydraException, yaml.YAMLError) as error:
        raise ConfigError(_composition_sentence(error)) from error


def _composition_sentence(error: Exception) -> str:
    """Hydra's message in one line, with the nearest key where a file has a key that does not exist."""
    said = re.sub(r"In '([^']*)': \w+ raised while composing config:", r"in \1.yaml:", sentence(error))
    unknown = re.sub(r"Key '[^']*' not in '\w+'", "no such setting", said)
    if unknown == said:
        return said
    with composer(Arguments()):
        known = keys(_composed(Arguments(), [])[0], Config)
    return unknown + suggest(unknown.partition(":")[0], known)
