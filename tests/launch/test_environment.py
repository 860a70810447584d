"""`launch/environment.sh` with a stand-in for Python that makes environments in no time."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Makes `.venv/bin/python` a copy of itself, and writes down each time that pip is called.
PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
  "-c "*) exit 0 ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") echo "$@" >>"$PIP_LOG"; sleep 0.5; [[ -z "${PIP_FAILS:-}" ]] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "a checkout"
    (folder / "launch").mkdir(parents=True)
    for name in ("setup.py", "launch/environment.sh", "launch/constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return folder


def start(checkout: Path, **environment: str) -> subprocess.Popen:
    clean = {key: value for key, value in os.environ.items() if key != "WAN_DS_PYTHON"}
    told = {"PYTHON": str(checkout.parent / "python"), "PIP_LOG": str(checkout.parent / "pip.log")}
    script = 'set -euo pipefail; source "$0/launch/environment.sh"; echo "$WAN_DS_PYTHON"'
    return subprocess.Popen(
        ["bash", "-c", script, str(checkout)],
        env={**clean, **told, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def calls_of_pip(checkout: Path) -> int:
    return len((checkout.parent / "pip.log").read_text().splitlines())


def test_two_jobs_at_once_install_once_and_the_next_not_at_all(checkout):
    jobs = [start(checkout), start(checkout)]
    for job in jobs:
        output, errors = job.communicate(timeout=60)
        assert job.returncode == 0, errors
        assert output == f"{checkout}/.venv/bin/python\n"
    assert calls_of_pip(checkout) == 1
    assert start(checkout).communicate(timeout=60)[1] == "environment: .venv\n"
    assert calls_of_pip(checkout) == 1


def test_an_installation_that_failed_is_taken_up_again_and_says_so(checkout):
    job = start(checkout, PIP_FAILS="1")
    assert "run the same command again" in job.communicate(timeout=60)[1]
    assert job.returncode != 0
    assert start(checkout).communicate(timeout=60)[0]
    assert calls_of_pip(checkout) == 2


def test_other_constraints_are_installed(checkout):
    start(checkout).communicate(timeout=60)
    with (checkout / "launch" / "constraints.txt").open("a") as constraints:
        constraints.write("einops==0.8.2\n")
    start(checkout).communicate(timeout=60)
    assert calls_of_pip(checkout) == 2


def test_an_environment_that_was_named_is_used_as_it_is(checkout):
    named = str(checkout.parent / "python")
    output, _ = start(checkout, WAN_DS_PYTHON=named).communicate(timeout=60)
    assert output == f"{named}\n"
    assert not (checkout / ".venv").exists()
