"""Scripts in a process that does not see this repository and does not ask the network."""

import os
import subprocess
import sys
from pathlib import Path


def run_elsewhere(script: str, folder: Path, *arguments: str) -> None:
    """Run the script with ``folder`` as its working directory; its own words if it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
