"""Run one job through DeepSpeed's launcher and answer for it; see `local.sh`, which is how to call this.

What the launcher alone does not do (DeepSpeed 0.19.8):

- Its runner dies of a SIGTERM and leaves the ranks training.
- Its `launch.py` passes a signal on rank by rank, waiting up to 30 s for each, so ranks that agree on when to
  stop wait for each other until they are killed. Here the ranks alone get the signal, all at once and once.
- Its runner exits with 0 when `launch.py` was killed. So the job says itself that it finished: rank 0 writes
  the run's folder into the file that WAN_DS_FINISHED names.
- With --num_gpus it takes the first GPUs of the machine whatever CUDA_VISIBLE_DEVICES says; without, it takes
  numbers alone, sorts them, and on a CPU accepts 0 alone. So `env` puts the devices back for the ranks.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import psutil

TRAIN = str(Path(__file__).resolve().parent.parent / "scripts" / "train.py")
POLL_SECONDS = 0.1
GRACE_SECONDS = float(os.environ.get("WAN_DS_GRACE_SECONDS", "25"))
ORPHAN_SECONDS = 5.0  # for the last processes to end by themselves once the launcher has

logger = logging.getLogger("local")


def main(arguments: list[str]) -> int:
    job = Job()
    ranks = arguments.pop(0) if arguments and arguments[0].isdigit() else None
    script = arguments.pop(0) if arguments and arguments[0].endswith(".py") else TRAIN
    devices = visible_devices()
    size = int(ranks or len(devices) or 1)
    if size < 1 or 0 < len(devices) < size:
        hint = "CUDA_VISIBLE_DEVICES= runs on the CPU"
        logger.error("%d ranks need as many GPUs, and %d are visible; %s", size, len(devices), hint)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        finished = Path(os.environ.get("WAN_DS_FINISHED") or Path(folder) / "finished")
        finished.unlink(missing_ok=True)
        code = job.run(command(size, devices, script, arguments), environment(devices, finished))
        if code == 0 and finished.is_file():
            logger.info("finished: %s", finished.read_text())
            return 0
    if job.received:
        return 128 + job.received
    if code == 0:
        logger.error("the job ended without an error, and did not finish")
        return 1
    return code if code > 0 else 128 - code


def visible_devices() -> list[str]:
    """The GPUs that this job may use, as CUDA_VISIBLE_DEVICES names them; empty on a CPU."""
    # Asked of another process: torch would hold memory here for as long as the job runs.
    count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    found = int(subprocess.run(count, stdout=subprocess.PIPE, text=True, check=True).stdout)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(found)] if named is None else named.split(",")
    return [name.strip() for name in names][:found]


def command(size: int, devices: list[str], script: str, arguments: list[str]) -> list[str]:
    # `env` replaces itself by Python, so a rank is still a child of the launcher.
    rank = ["env", f"CUDA_VISIBLE_DEVICES={','.join(devices[:size])}", sys.executable, "-u", script]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level=error"]
    # No hostfile: one that lies where the launcher looks by default would make several machines of it.
    here = ["--hostfile=", f"--num_gpus={size}", f"--master_port={free_port()}"]
    return [*launcher, *here, "--no_local_rank", "--no_python", *rank, *arguments]


def environment(devices: list[str], finished: Path) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    if not devices:
        inherited.setdefault("DS_ACCELERATOR", "cpu")
    return inherited | {"WAN_DS_FINISHED": str(finished.resolve())}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Job:
    """The launcher and its ranks in a process group of their own, and the signals that came for them."""

    def __init__(self) -> None:
        self.received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._receive)

    def run(self, command: list[str], environment: dict[str, str]) -> int:
        """Until no process of the job is left; the launcher's exit code."""
        if self.received:
            return 0
        self.launcher = subprocess.Popen(command, env=environment, start_new_session=True)
        while self.launcher.poll() is None and not self.received:
            time.sleep(POLL_SECONDS)
        if not self.received and self._alive_after(ORPHAN_SECONDS):
            logger.error("the launcher is gone and its ranks are not")
        if self._alive_after(0):
            self._stop(signal.SIGINT if self.received == signal.SIGINT else signal.SIGTERM)
        if self._alive_after(GRACE_SECONDS):
            self._kill()
        return self.launcher.wait()

    def _alive_after(self, seconds: float) -> bool:
        """Whether any process of the job is left after at most so many seconds."""
        deadline = time.monotonic() + seconds
        while self.launcher.poll() is None or self._members():
            if time.monotonic() >= deadline:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number

    def _stop(self, number: int) -> None:
        ranks = self._ranks()
        if ranks and self.launcher.poll() is None:
            name = signal.Signals(number).name
            logger.info("%s to %d ranks, which have %g s to save", name, len(ranks), GRACE_SECONDS)
            for rank in ranks:
                send(rank, number)
        else:  # nothing is being trained yet, or nobody is left who waits for the ranks
            os.killpg(self.launcher.pid, number)

    def _kill(self) -> None:
        logger.error("killing what is left of the job after %g s", GRACE_SECONDS)
        members = self._members()
        children = [child for process in members for child in children_of(process, recursive=True)]
        for process in {*members, *children}:  # the children too, because some leave the group
            send(process, signal.SIGKILL)

    def _members(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_member(process)]

    def _is_member(self, process: psutil.Process) -> bool:
        try:
            return os.getpgid(process.pid) == self.launcher.pid and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    def _ranks(self) -> list[psutil.Process]:
        starters = [process for process in self._members() if is_launch(process)]
        return [rank for starter in starters for rank in children_of(starter)]


def is_launch(process: psutil.Process) -> bool:
    """Whether this is DeepSpeed's `launch.py`, whose children are the ranks."""
    try:
        return "deepspeed.launcher.launch" in process.cmdline()
    except psutil.Error:
        return False


def children_of(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    try:
        return process.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may be gone already."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="local.sh: %(message)s")
    sys.exit(main(sys.argv[1:]))
