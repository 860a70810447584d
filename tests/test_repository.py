"""What holds for the repository as a whole: what may lie where, and nothing of the machine it was made on."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TOP = {"setup.py", "README.md", "wan_ds", "conf", "launch", "scripts", "tests"}
LARGEST_BYTES = 1_000_000

# What differs between machines is an environment variable with a default; each of these is somebody's own.
ROOTS = "home|root|tmp|mnt|data|opt|work|workspace|scratch|var|usr"
OF_ONE_MACHINE = {
    "an absolute path": rf"(?<![\w.$}}\]*/-])/(?:{ROOTS})\b",
    "a host": r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:https?|ssh|git)://|\b[\w-]+@[\w-]+\.\w+",
    "a port": r"(?i)port[\"']?\s*[=:]\s*\d+|:\d{4,5}\b",
    "a user": r"(?im)^#SBATCH\s+--(?:account|partition|mail-user|qos)\b",
}
HARMLESS = ("127.0.0.1", "#!/usr/bin/env", "override /")  # the last is how Hydra names a group


def tracked() -> list[Path]:
    """Files that git has or would add: what is ignored is nobody's business."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_the_top_level_holds_only_what_it_should():
    top = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert not {name for name in top if not name.startswith(".")} - TOP


@pytest.mark.parametrize("folder", ["launch", "conf", "scripts"])
@pytest.mark.parametrize("what", OF_ONE_MACHINE)
def test_nothing_belongs_to_one_machine(folder, what):
    found = []
    for path in (ROOT / folder).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                for harmless in HARMLESS:
                    line = line.replace(harmless, "")
                if re.search(OF_ONE_MACHINE[what], line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line}")
    assert not found, f"{what}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("an absolute path", "data: {path: /data/clips}"),
        ("an absolute path", "cd /home/me"),
        ("a host", "--master_addr 10.0.0.7"),
        ("a port", "--master_port=29500"),
        ("a port", "endpoint: node:29500"),
        ("a user", "#SBATCH --account=me"),
    ],
)
def test_the_patterns_find_what_belongs_to_one_machine(what, line):
    assert re.search(OF_ONE_MACHINE[what], line)


def test_no_large_file_is_in_the_way():
    large = [path for path in tracked() if path.stat().st_size > LARGEST_BYTES and "assets" not in path.parts]
    assert not large


def test_shell_scripts_parse_and_stop_at_errors():
    scripts = [ROOT / ".ci" / "run", *(ROOT / "scripts").glob("*.sh"), *(ROOT / "launch").glob("*.s*")]
    assert len(scripts) >= 6
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
        if script.name != "environment.sh":  # which is sourced
            assert "set -euo pipefail" in script.read_text(), script


def test_sweeps_call_the_launcher_with_plain_overrides():
    for path in (ROOT / "launch" / "sweeps").glob("*.yaml"):
        sweep = yaml.safe_load(path.read_text())
        assert sweep["command"][:2] == ["bash", "launch/local.sh"], path
        assert sweep["command"][-1] == "${args_no_hyphens}", path  # else the settings would begin with dashes


def test_entry_points_are_the_modules():
    scripts = sorted((ROOT / "scripts").glob("*.py"))
    assert scripts
    for script in scripts:
        assert len([line for line in script.read_text().splitlines() if line.strip()]) == 2
        assert f'run_module("wan_ds.{script.stem}", run_name="__main__"' in script.read_text()
