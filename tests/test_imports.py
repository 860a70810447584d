"""The directions of dependencies: entry points, config -> training -> leaves -> {errors, streams}."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "wan_ds"
MODULES = {path.relative_to(PACKAGE).with_suffix(""): path for path in sorted(PACKAGE.rglob("*.py"))}

FOUNDATIONS = {"errors", "streams"}
LEAVES = {"flow", "models", "data", "parallel", "interop"}
ENTRY_POINTS = {"train", "sample", "evaluate", "convert", "export", "bench"}
MAY_SEE_SETTINGS = {
    "training/networks",
    "training/parts",
    "training/progress",
    "training/run",
    "training/runs",
    "training/subjects",
}  # they turn settings into what the others are given
MAY_IMPORT_DEEPSPEED = {"training/engine", "parallel/ulysses"}


def imported(path: Path) -> set[str]:
    """Dotted names of all that a file imports, anywhere in it; of `from a import b` both `a` and `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide where something comes from"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def parts_of_ours(names: set[str]) -> set[str]:
    """The first component below `wan_ds` of each imported name."""
    return {name.split(".")[1] for name in names if name.startswith("wan_ds.")} - {"__version__"}


def allowed(part: str) -> set[str]:
    if part in FOUNDATIONS:
        return set()
    if part in LEAVES:
        return FOUNDATIONS | {part}
    return FOUNDATIONS | LEAVES | {"training"}


def test_every_module_has_a_layer():
    known = FOUNDATIONS | LEAVES | ENTRY_POINTS | {"training", "config", "assets", "__init__"}
    assert {module.parts[0] for module in MODULES} <= known


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_dependencies_point_one_way(module):
    part = module.parts[0]
    if part in FOUNDATIONS | LEAVES | {"training"}:
        settings = {"config"} if module.as_posix() in MAY_SEE_SETTINGS else set()
        wrong = parts_of_ours(imported(MODULES[module])) - allowed(part) - settings
        assert not wrong, f"wan_ds/{module}.py imports wan_ds.{'/'.join(sorted(wrong))}"


def test_the_configuration_knows_nothing_of_models_and_entry_points():
    for module in [module for module in MODULES if module.parts[0] == "config"]:
        names = imported(MODULES[module])
        assert parts_of_ours(names) <= FOUNDATIONS | {"config", "training"}, module
        ours = {name for name in names if name.startswith("wan_ds.training.")}
        assert all(name.startswith("wan_ds.training.run_folder") for name in ours), module


def test_importing_the_settings_is_cheap():
    code = "import sys, wan_ds.config; print(*{'torch', 'deepspeed', 'diffusers'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.split() == []


def test_the_mathematics_imports_torch_alone():
    known = {"torch", "wan_ds", *sys.stdlib_module_names}
    for module in [module for module in MODULES if module.parts[0] == "flow" or str(module) == "streams"]:
        assert {name.split(".")[0] for name in imported(MODULES[module])} <= known, module


def test_deepspeed_is_imported_where_its_traps_are_known():
    for module, path in MODULES.items():
        names = {name for name in imported(path) if name.split(".")[0] == "deepspeed"}
        if module.parts[0] == "parallel":  # its collectives are torch's with DeepSpeed's log of them
            names -= {name for name in names if name == "deepspeed" or name.startswith("deepspeed.comm")}
        assert not names or module.as_posix() in MAY_IMPORT_DEEPSPEED, f"{module} imports {sorted(names)}"


def test_what_takes_tensors_sees_no_configuration():
    for module, path in MODULES.items():
        names = {name.split(".")[0] for name in imported(path)} & {"omegaconf", "hydra"}
        assert not names or module.parts[0] in ENTRY_POINTS | {"config"}, f"{module} imports {names}"


def test_no_module_is_a_drawer_for_everything():
    drawers = {"utils", "util", "common", "helpers", "helper", "base", "misc"}
    assert not [module for module in MODULES if drawers & set(module.parts)]
