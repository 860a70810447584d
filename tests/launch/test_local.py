"""`launch/local.sh` through the real launcher, with a stand-in for the training script."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in.py"
START_SECONDS = 60
VALUES = [
    'prompt=a cat, "hi" = 50% #1 🎬',
    'quotes=it\'s "so"',
    "list=[1, 2]",
    "group={a: b}",
    "shell=$HOME `x` $(y) * ? ~ | & ; < >",
    "text=日本",
    "path=/my set (1)",
    "escapes=\\n \\\\",
    "lines=one\ntwo",
    "empty=",
    "",
    " spaces ",
    "negative=-1",
    "--cfg",
    "--",
    "--num_gpus=7",
    "@file",
]


class Started:
    """A job of `local.sh` whose ranks write into `folder`."""

    def __init__(self, folder: Path, *arguments: str, end: str = "finish", **environment: str):
        self.folder = folder
        told = {"STAND_IN_FOLDER": str(folder), "STAND_IN_END": end, "WAN_DS_PYTHON": sys.executable}
        self.process = subprocess.Popen(
            ["bash", str(ROOT / "launch" / "local.sh"), *arguments],
            env={**os.environ, **told, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def reports(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))]

    def wait_for_ranks(self, count: int) -> list[dict]:
        deadline = time.monotonic() + START_SECONDS
        while len(self.reports()) < count:
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()[0]
            time.sleep(0.05)
        return self.reports()

    def end(self, timeout: float = START_SECONDS) -> tuple[int, str]:
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, output


def test_every_rank_gets_the_values_as_typed_and_a_free_port(tmp_path):
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        busy.bind(("127.0.0.1", 29500))  # DeepSpeed's own choice of port
        busy.listen()
        job = Started(tmp_path, "2", str(STAND_IN), *VALUES, CUDA_VISIBLE_DEVICES="1")
        code, output = job.end()
    assert code == 0, output
    assert "finished: runs/stand in" in output
    ranks = job.reports()
    assert [rank["argv"] for rank in ranks] == [VALUES, VALUES]
    assert [(rank["WORLD_SIZE"], rank["LOCAL_RANK"]) for rank in ranks] == [("2", "0"), ("2", "1")]
    assert all(rank["MASTER_PORT"] != "29500" for rank in ranks)


def test_a_sigterm_reaches_every_rank_once_and_ranks_may_save(tmp_path):
    job = Started(tmp_path, "2", str(STAND_IN), end="wait for a signal", CUDA_VISIBLE_DEVICES="")
    job.wait_for_ranks(2)
    job.process.terminate()
    code, output = job.end(30)
    assert code == 143, output
    assert [rank["received"] for rank in job.reports()] == [[signal.SIGTERM], [signal.SIGTERM]]


def test_ranks_that_ignore_a_sigint_are_killed(tmp_path):
    job = Started(tmp_path, "2", str(STAND_IN), end="one ignores signals", WAN_DS_GRACE_SECONDS="2")
    ranks = job.wait_for_ranks(2)
    job.process.send_signal(signal.SIGINT)
    code, output = job.end(15)
    assert code == 130, output
    assert not any(is_alive(rank["pid"]) for rank in ranks)


def test_a_killed_launcher_is_an_error_and_its_ranks_do_not_outlive_it(tmp_path):
    code, output = Started(tmp_path, str(STAND_IN), end="kill the launcher").end()
    assert code == 1
    assert "did not finish" in output  # DeepSpeed's runner exits with 0
    (rank,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert rank["WORLD_SIZE"] == "1"
    assert not is_alive(rank["pid"])


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # which nobody may have waited for
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def local():
    spec = importlib.util.spec_from_file_location("local", ROOT / "launch" / "local.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield module
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("named", "found", "devices"),
    [
        (None, 0, []),
        ("", 0, []),
        ("0", 0, []),
        (None, 2, ["0", "1"]),
        ("3,1", 2, ["3", "1"]),
        ("GPU-5a, GPU-1b", 2, ["GPU-5a", "GPU-1b"]),
        ("0,9", 1, ["0"]),  # CUDA stops at the first that does not exist
    ],
)
def test_devices_are_those_that_are_visible(local, monkeypatch, named, found, devices):
    answer = subprocess.CompletedProcess([], 0, stdout=f"{found}\n")
    monkeypatch.setattr(local.subprocess, "run", lambda *_, **__: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert local.visible_devices() == devices


def test_ranks_get_the_first_visible_devices(local):
    assert "CUDA_VISIBLE_DEVICES=3,1" in local.command(2, ["3", "1", "2"], "scripts/train.py", [])


def test_more_ranks_than_visible_devices_are_refused(local, monkeypatch, caplog):
    monkeypatch.setattr(local, "visible_devices", lambda: ["0"])
    assert local.main(["2", "recipe=quickstart"]) == 2
    assert "2 ranks need as many GPUs, and 1 are visible" in caplog.text
