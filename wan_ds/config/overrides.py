"""One `key=value` of a command line, put into a composed configuration.

A value whose key is text arrives as typed: it never passes through Hydra's grammar. All other values are read
by that grammar (`[0.9,0.99]`, `{high_noise: 4}`, `null`, `1e-4`). In text, `${key}` of an existing setting
and `${oc.env:NAME}` are interpolations; any other `$` is a dollar sign.
"""

import re
import types
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from wan_ds.config import targets
from wan_ds.config.nearest import suggest
from wan_ds.errors import ConfigError
from wan_ds.training.run_folder import literal


@dataclass(frozen=True)
class Override:
    """What was typed: `+a.b=c` is prefix `+`, key `a.b`, text `c`; text is None where no `=` was typed."""

    prefix: str
    key: str
    text: str | None

    @property
    def typed(self) -> str:
        return self.prefix + self.key + ("" if self.text is None else f"={self.text}")


def split(argument: str) -> Override:
    found = re.fullmatch(r"(\+\+|\+|~)?([^=]*)(?:=(.*))?", argument, flags=re.DOTALL)
    override = Override(found[1] or "", found[2], found[3])
    if not override.key or (override.text is None and override.prefix != "~"):
        raise ConfigError(
            f"{argument}: not a setting; type key=value, quoted from the shell where it has spaces"
        )
    return override


def assign(cfg: DictConfig, schema: type, override: Override) -> None:
    """Put one value into `cfg`; ConfigError when there is no such setting or the value does not fit it."""
    key, text = override.key, override.text
    _refuse_unknown(cfg, schema, override)
    if override.prefix == "~":
        _remove(cfg, schema, key)
        return
    declared = declared_type(schema, key)
    _materialise_parents(cfg, key)
    if is_text(cfg, declared, key):
        value = _text_value(cfg, key, text, nullable=types.NoneType in get_args(declared))
    else:
        value = _parsed_value(key, text, declared)
    try:
        with flag_override(cfg, "struct", False):  # dataclasses stay closed, dicts take new names
            OmegaConf.update(cfg, key, value, merge=True)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{key}={text}: must be {description(declared)}") from error


def declared_type(schema: type, key: str) -> Any:
    """The annotation of a dotted key in a tree of dataclasses: Any in open groups, None for no such field."""
    hint: Any = schema
    for part in key.split("."):
        hint = _without_none(hint)
        if is_dataclass(hint):
            hint = get_type_hints(hint).get(part)
        elif get_origin(hint) is dict:
            hint = get_args(hint)[1]
        elif hint is not Any:
            return None
    return hint


def description(declared: Any) -> str:
    """What a value of this type looks like, in words."""
    inner = _without_none(declared)
    null = " or null" if inner is not declared else ""
    if isinstance(inner, type) and issubclass(inner, Enum):
        return ", ".join(option.name for option in inner) + null
    if get_origin(inner) is list:
        return f"a list such as ['first, with a comma', second]{null}"
    if get_origin(inner) is dict:
        return f"settings by name such as {{name: value}}{null}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(inner, "a group of settings: type one of those below it") + null


def keys(cfg: DictConfig, schema: type) -> list[str]:
    """Every key that may be set: those of `cfg`, and the arguments of open groups that it leaves alone."""
    found = _flatten(_plain(cfg))
    for group in targets.OPEN_GROUPS:
        settings = OmegaConf.select(cfg, group) if declared_type(schema, group) is not None else None
        if isinstance(settings, DictConfig):
            more = targets.arguments(group, _plain(settings))
            found += [f"{group}.{name}" for name in more if name not in settings]
    return found


def is_text(cfg: DictConfig, declared: Any, key: str) -> bool:
    if declared is Any:
        group, _, name = key.rpartition(".")
        settings = OmegaConf.select(cfg, group)
        if group in targets.OPEN_GROUPS and isinstance(settings, DictConfig):
            return targets.is_text(group, _plain(settings), name)
    return _without_none(declared) is str


def _refuse_unknown(cfg: DictConfig, schema: type, override: Override) -> None:
    key, declared = override.key, declared_type(schema, override.key)
    group = key.rpartition(".")[0]
    holder = OmegaConf.select(cfg, group) if group else cfg
    if (
        holder is None
        and _exists(cfg, group)
        and get_origin(_without_none(declared_type(schema, group))) is dict
    ):
        OmegaConf.update(cfg, group, {}, merge=False)  # data.reader is null until something below it is typed
        holder = OmegaConf.select(cfg, group)
    if declared is None or not isinstance(holder, DictConfig):
        raise ConfigError(f"{key}: no such setting{suggest(key, _flatten(_plain(cfg)))}")
    if group not in targets.OPEN_GROUPS or override.prefix == "~" or key.endswith(targets.DIRECTIVES):
        return
    target = OmegaConf.select(holder, "_target_")
    if key not in keys(cfg, schema) and target is not None and not targets.takes_any(group, target):
        name = key.rpartition(".")[2]  # of another group only the same name is meant
        here = [k for k in keys(cfg, schema) if k.startswith(f"{group}.") or k.endswith(f".{name}")]
        raise ConfigError(f"{key}: {target} takes no such argument{suggest(key, here)}")


def _remove(cfg: DictConfig, schema: type, key: str) -> None:
    parent, _, name = key.rpartition(".")
    holder = OmegaConf.select(cfg, parent) if parent else None
    if declared_type(schema, key) is not Any or not isinstance(holder, DictConfig) or name not in holder:
        raise ConfigError(
            f"~{key}: only what is there in an open group can be removed, such as ~optimizer.betas"
        )
    with flag_override(holder, "struct", False):
        del holder[name]


def _materialise_parents(cfg: DictConfig, key: str) -> None:
    """`sampling.guidance` refers to `model.guidance`: setting one number below it first copies the others."""
    parts = key.split(".")
    for end in range(1, len(parts)):
        holder = OmegaConf.select(cfg, ".".join(parts[: end - 1])) if end > 1 else cfg
        if not isinstance(holder, DictConfig) or parts[end - 1] not in holder:
            return
        if OmegaConf.is_interpolation(holder, parts[end - 1]):
            holder[parts[end - 1]] = OmegaConf.to_container(holder[parts[end - 1]], resolve=True)


def _text_value(cfg: DictConfig, key: str, text: str, nullable: bool) -> str | None:
    if text == "null" and nullable:
        return None
    if text == "???":
        raise ConfigError(
            f"{key}=???: three question marks mean a value that is still missing; choose another text"
        )
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):  # how Python passes on bytes that are no UTF-8
        raise ConfigError(f"{key}={text.encode(errors='replace').decode()}: not UTF-8; rename what it names")
    pieces = []
    position = 0
    for found in re.finditer(r"\$\{([\w.-]+)(:[^{}]*)?\}", text):
        resolves = OmegaConf.has_resolver(found[1]) if found[2] else _exists(cfg, found[1])
        if resolves:
            before = literal(text[position : found.start()])
            pieces.append(re.sub(r"\\+$", lambda end: end[0] * 2, before) + found[0])
            position = found.end()
    return "".join(pieces) + literal(text[position:])


def _exists(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    holder = OmegaConf.select(cfg, parent) if parent else cfg
    # `name in holder` is False where the value is missing
    return isinstance(holder, DictConfig) and name in holder.keys()  # noqa: SIM118


def _parsed_value(key: str, text: str, declared: Any) -> Any:
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException as error:
        raise ConfigError(
            f"{key}={text}: cannot be read as {description(declared)}; text with special characters goes in "
            "quotes inside lists and groups, such as ['a, b']"
        ) from error
    if parsed.is_sweep_override():
        raise ConfigError(
            f"{key}={text}: several values; a list is typed [{text}], and several jobs are started one "
            "process each (launch/sweeps, wandb agent)"
        )
    return parsed.value()


def _plain(cfg: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(cfg, resolve=False)


def _flatten(settings: Any, key: str = "") -> list[str]:
    if not isinstance(settings, dict):
        return []
    here = [f"{key}.{name}" if key else str(name) for name in settings]
    below = [_flatten(value, path) for value, path in zip(settings.values(), here, strict=True)]
    return here + [found for part in below for found in part]


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not types.NoneType]
        return options[0] if len(options) == 1 else hint
    return hint
