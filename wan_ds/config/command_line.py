"""From what was typed to a checked `Config`, and from errors to one sentence per job."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from hydra.core.config_loader import ConfigLoader
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wan_ds.config.checks import check
from wan_ds.config.composition import Arguments, composer, configure, settings
from wan_ds.config.overrides import assign, description, split
from wan_ds.config.schema import Config, sentence
from wan_ds.errors import CheckpointError, ConfigError, DataError, TrainingError
from wan_ds.training.run_folder import flatten

SECONDS_FOR_RANK_0_TO_TELL = 5.0

T = TypeVar("T")


def command(run: Callable[[Config], int | None]) -> NoReturn:
    """Run an entry point with the configuration that was typed, and exit with its code.

    What a person can fix is one message on stderr, from rank 0, and exit code 2; all else is a traceback.
    """
    with _messages_instead_of_tracebacks():
        arguments = parse(sys.argv[1:])
        if arguments.show:
            _show(arguments, run)
        config = configure(arguments)
        check(config, int(os.environ.get("WORLD_SIZE", "1")))
    with _messages_instead_of_tracebacks():
        sys.exit(run(config) or 0)
    raise AssertionError("unreachable: either block ends the process")


def simple_command(dataclass_type: type[T], run: Callable[[T], int | None]) -> NoReturn:
    """`command` for a small entry point, whose settings are the fields of one dataclass."""
    with _messages_instead_of_tracebacks():
        argv = sys.argv[1:]
        if "--help" in argv or "-h" in argv:
            _tell(_fields_help(dataclass_type, run))
            sys.exit(0)
        given = options(dataclass_type, argv)
    with _messages_instead_of_tracebacks():
        sys.exit(run(given) or 0)
    raise AssertionError("unreachable: either block ends the process")


def options(dataclass_type: type[T], argv: list[str]) -> T:
    """An instance from `key=value` arguments; fields without a default are required.

    `field(metadata={"help": ...})` is told by --help; `metadata={"path": True}` expands `~`.
    """
    arguments = parse(argv)
    if arguments.config_dir or arguments.config_name or arguments.show:
        raise ConfigError(
            "--config-dir, --config-name, --cfg and --info belong to training; --help tells what is here"
        )
    cfg = OmegaConf.structured(dataclass_type)
    for override in arguments.overrides:
        assign(cfg, dataclass_type, override)
    missing = [name for name in cfg if OmegaConf.is_missing(cfg, name)]
    if missing:
        raise ConfigError("; ".join(f"{name}: not set; type {name}=..." for name in missing))
    try:
        given = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(sentence(error)) from error
    for entry in fields(dataclass_type):
        value = getattr(given, entry.name)
        if entry.metadata.get("path") and isinstance(value, str):
            setattr(given, entry.name, os.path.expanduser(value))
    return given


def parse(argv: list[str]) -> Arguments:
    """Sort argv into flags and overrides; what launchers append is dropped, several jobs are refused."""
    found = Arguments()
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        if flag in ("--local_rank", "--local-rank"):
            if not equals and rest and rest[0].lstrip("-").isdigit():
                rest.pop(0)
        elif flag in ("-m", "--multirun"):
            raise ConfigError(f"{flag}: a process is one job; start one per job (launch/sweeps, wandb agent)")
        elif flag in ("--help", "-h", "--info"):
            found.show = "info" if flag == "--info" else "help"
        elif flag == "--resolve":
            found.resolve = True
        elif flag in ("--config-dir", "-cd", "--config-name", "-cn", "--cfg", "-c"):
            if not equals and not rest:
                raise ConfigError(f"{flag}: needs a value")
            _take(found, flag, value if equals else rest.pop(0))
        elif argument.startswith("-"):
            raise ConfigError(f"{argument}: no such flag{_flag_hint(flag, equals)}")
        else:
            found.overrides.append(split(argument))
    return found


def _take(found: Arguments, flag: str, value: str) -> None:
    if flag in ("--config-name", "-cn"):
        found.config_name = value.removesuffix(".yaml")
    elif flag in ("--cfg", "-c"):
        if value != "job":
            raise ConfigError(f"{flag} {value}: only --cfg job; Hydra's own configuration does nothing here")
        found.show = "cfg"
    else:
        found.config_dir = Path(value).expanduser().resolve()
        if not found.config_dir.is_dir():
            raise ConfigError(f"--config-dir {value}: no such folder")


def _flag_hint(flag: str, equals: str) -> str:
    if equals:
        return f"; a setting has no dashes: {flag.lstrip('-')}=... (in a wandb sweep: ${{args_no_hyphens}})"
    return "; there are --config-dir, --config-name, --cfg job, --resolve, --info and --help"


@contextmanager
def _messages_instead_of_tracebacks() -> Iterator[None]:
    """ConfigErrors are the same on every rank, so rank 0 speaks; a file may be broken on one rank alone."""
    try:
        yield
    except ConfigError as error:
        _fail(str(error))
    except (DataError, CheckpointError) as error:
        _fail(str(error), only_first_rank=False)
    except TrainingError as error:  # nothing that was typed wrong, so not the code of a mistake
        _fail(str(error), code=1)


def _fail(message: str, only_first_rank: bool = True, code: int = 2) -> NoReturn:
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        sys.stderr.write(f"wan_ds: error: {message}\n")
        sys.stderr.flush()
        sys.exit(code)
    # A launcher ends all ranks when the first one exits. So the others wait until rank 0 has told, and are
    # ended while they wait; whoever outlives the wait failed alone.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(SECONDS_FOR_RANK_0_TO_TELL)
    if not only_first_rank:
        sys.stderr.write(f"wan_ds: error on rank {rank}: {message}\n")
        sys.stderr.flush()
    sys.exit(code)


def _tell(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text)
        sys.stdout.flush()


def _fields_help(dataclass_type: type, run: Callable[..., Any]) -> str:
    hints = get_type_hints(dataclass_type)
    lines = [(sys.modules[run.__module__].__doc__ or "").strip(), "", "settings, typed as key=value"]
    for entry in fields(dataclass_type):
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        shown = "null" if default is None else getattr(default, "name", default)
        shown = "required" if default is MISSING else f"default {shown}"
        told = f"  {entry.metadata['help']}" if "help" in entry.metadata else ""
        lines.append(f"  {entry.name}  ({description(hints[entry.name])}; {shown}){told}")
    return "\n".join([*lines, ""])


def _show(arguments: Arguments, run: Callable[..., Any]) -> NoReturn:
    show = {"cfg": _composed_yaml, "info": _info, "help": _help}[arguments.show]
    _tell(show(arguments, run))
    sys.exit(0)


def _composed_yaml(arguments: Arguments, _run: Callable[..., Any]) -> str:
    return OmegaConf.to_yaml(settings(arguments), resolve=arguments.resolve)


def _info(arguments: Arguments, _run: Callable[..., Any]) -> str:
    with composer(arguments) as loader:
        places = [
            element.path for element in loader.get_search_path().get_path() if element.provider != "hydra"
        ]
        lines = [
            "configuration is looked for in",
            *(f"  {place}" for place in places),
            "groups and their options",
        ]
        return "\n".join([*lines, *_options(loader), ""])


def _options(loader: ConfigLoader) -> list[str]:
    groups = [name for name in loader.list_groups("") if name != "hydra"]
    return [f"  {name}: {', '.join(sorted(loader.get_group_options(name)))}" for name in groups]


def _help(arguments: Arguments, run: Callable[..., Any]) -> str:
    with composer(arguments) as loader:
        options = _options(loader)
    plain = flatten(OmegaConf.to_container(settings(arguments), resolve=False, enum_to_str=True))
    said = (sys.modules[run.__module__].__doc__ or "").strip()
    lines = [said, "", "groups, chosen by name: recipe=quickstart", *options]
    lines += ["", "settings and their values here: train.steps=100"]
    lines += [f"  {key}={value}" for key, value in plain.items()]
    lines += ["", "flags: --cfg job [--resolve]  --config-dir FOLDER  --config-name NAME  --info  --help", ""]
    return "\n".join(lines)
