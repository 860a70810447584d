"""Open groups of a configuration (timesteps, optimizer, a reader ...): their `_target_` and its arguments."""

import importlib
import inspect
import math
import types
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any, Union, get_args, get_origin, get_type_hints

from wan_ds.config.nearest import suggest
from wan_ds.errors import ConfigError

# arguments that training gives
SUPPLIED = {"optimizer": ("params",), "lr_schedule": ("steps",), "weighting": ("sigma",)}
OPEN_GROUPS = (
    "timesteps",
    "weighting",
    "optimizer",
    "lr_schedule",
    "data.reader",
    "model.conditioning",
)
DIRECTIVES = ("_target_", "_partial_")


def find(key: str, target: Any) -> Callable[..., Any]:
    """The class or function that `key`._target_ names; ConfigError says what does not exist."""
    if not isinstance(target, str) or "." not in target:
        raise ConfigError(
            f"{key}._target_={target}: must name a class or function, such as torch.optim.AdamW"
        )
    module_name, _, attribute = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{key}._target_={target}: {module_name} cannot be imported ({error})") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        public = [name for name in dir(module) if not name.startswith("_")]
        near = get_close_matches(attribute, public, n=1, cutoff=0.4)
        hint = f"; did you mean {module_name}.{near[0]}?" if near else ""
        raise ConfigError(f"{key}._target_={target}: {module_name} has no {attribute}{hint}")
    return found


def bind(key: str, settings: dict[str, Any]) -> Callable[..., Any]:
    """The target of an open group with its settings bound, to be called with what training supplies."""
    given = {name: value for name, value in settings.items() if name not in DIRECTIVES}
    return partial(find(key, settings["_target_"]), **given)


def make(key: str, settings: dict[str, Any], **supplied: Any) -> Any:
    """What the target of an open group makes of its settings."""
    return bind(key, settings)(**supplied)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_POSITIONAL
    }


def arguments(key: str, settings: dict[str, Any]) -> list[str]:
    """The names that may be set below `key`; empty when the target cannot be found."""
    try:
        found = parameters(find(key, settings.get("_target_")))
    except (ConfigError, ValueError):
        return []
    named = (name for name, parameter in found.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD)
    return [name for name in named if name not in SUPPLIED.get(key, ())]


def refuse_values(key: str, settings: dict[str, Any]) -> None:
    """ConfigError for values that the target itself refuses; only for targets that are built of settings."""
    try:
        find(key, settings["_target_"])(**{k: v for k, v in settings.items() if k not in DIRECTIVES})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def takes_any(key: str, target: Any) -> bool:
    """Whether the target has `**kwargs`, so that nothing can be said about names."""
    found = parameters(find(key, target)).values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found)


def refuse_misfits(key: str, settings: dict[str, Any]) -> None:
    """ConfigError unless the target of an open group exists and takes exactly these arguments and values."""
    if "_target_" not in settings:
        raise ConfigError(f"{key}: names no class; set {key}._target_")
    function = find(key, settings["_target_"])
    found = parameters(function)
    open_ended = takes_any(key, settings["_target_"])
    supplied = SUPPLIED.get(key, ())
    for name in settings:
        if name in DIRECTIVES or (name in found and name not in supplied):
            continue
        if name in supplied:
            raise ConfigError(f"{key}.{name}: training gives {name} to {settings['_target_']}; leave it out")
        if not open_ended:
            hint = suggest(f"{key}.{name}", [f"{key}.{other}" for other in found if other not in supplied])
            raise ConfigError(f"{key}.{name}: {settings['_target_']} takes no such argument{hint}")
    for name, parameter in found.items():
        required = (
            parameter.default is parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        )
        if required and name not in settings and name not in supplied:
            raise ConfigError(f"{key}.{name}: {settings['_target_']} needs it; type {key}.{name}=...")
    kinds = _kinds(function)
    for name, value in settings.items():
        if name in found and (problem := _misfit(value, kinds.get(name))):
            raise ConfigError(f"{key}.{name}={'null' if value is None else value}: must be {problem}")


def with_numbers(key: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings, with text (`"1e-4"`) and whole numbers made the numbers that the target declares."""
    try:
        kinds = _kinds(find(key, settings.get("_target_")))
    except (ConfigError, ValueError):
        return settings  # `refuse_misfits` says why
    return {name: _as_number(value, kinds.get(name)) for name, value in settings.items()}


def is_text(key: str, settings: dict[str, Any], name: str) -> bool:
    """Whether the target of `key` declares its argument `name` as text."""
    try:
        return _kinds(find(key, settings.get("_target_"))).get(name, (None,))[0] is str
    except (ConfigError, ValueError):
        return False


def _kinds(function: Callable[..., Any]) -> dict[str, tuple[Any, bool, Any]]:
    """By argument: bool, int, float, str, tuple or None for anything; whether null is fine; the default."""
    declared = function.__init__ if inspect.isclass(function) else function
    try:
        hints = get_type_hints(declared)
    except Exception:  # a hint may name what only type checkers import; then the default alone speaks
        hints = {}
    return {
        name: _kind(hints.get(name), parameter.default) for name, parameter in parameters(function).items()
    }


def _kind(hint: Any, default: Any) -> tuple[Any, bool, Any]:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    nullable = default is None or types.NoneType in options
    if float in options or (type(default) is float and hint is None):
        return float, nullable, default
    if hint is None and type(default) in (bool, int, str):
        # without an annotation an int default says no more than that numbers are meant
        return (float if type(default) is int else type(default)), nullable, default
    for kind in (bool, int, str):
        if kind in options:
            return kind, nullable, default
    if isinstance(default, tuple) and all(isinstance(part, int | float) for part in default):
        return tuple, nullable, default
    return None, True, default


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _misfit(value: Any, kind: tuple[Any, bool, Any] | None) -> str | None:
    if kind is None or kind[0] is None or (value is None and kind[1]):
        return None
    expected, _, default = kind
    if expected is tuple:
        return None if _is_list_like(value, default) else f"a list such as {list(default)}"
    fits, words = {
        bool: (isinstance(value, bool), "true or false"),
        int: (_is_number(value) and isinstance(value, int), "a whole number"),
        float: (_is_number(value), "a number"),
        str: (isinstance(value, str), "text"),
    }[expected]
    return None if fits else words


def _is_list_like(value: Any, default: Any) -> bool:
    return isinstance(value, list) and len(value) == len(default) and all(_is_number(part) for part in value)


def _as_number(value: Any, kind: tuple[Any, bool, Any] | None) -> Any:
    expected = kind[0] if kind else None
    if expected is tuple and isinstance(value, list):
        return [_as_number(part, (float, False, None)) for part in value]
    if expected not in (int, float) or isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        return expected(value) if expected is float or isinstance(value, str) else value
    except ValueError:
        return value
