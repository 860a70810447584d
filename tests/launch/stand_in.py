"""What `local.sh` starts in its tests: writes down what it was given, then ends as the test says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

rank = os.environ["RANK"]
folder = Path(os.environ["STAND_IN_FOLDER"])
end = os.environ.get("STAND_IN_END", "finish")
received = []


def report() -> None:
    names = ("CUDA_VISIBLE_DEVICES", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK")
    seen = {name: os.environ.get(name) for name in names}
    text = json.dumps({"argv": sys.argv[1:], "pid": os.getpid(), "received": received, **seen})
    (folder / f"{rank}.part").write_text(text)
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")  # a reader never sees half a file


def take(number: int, _frame: object) -> None:
    received.append(number)
    report()


signal.signal(signal.SIGINT, take)
signal.signal(signal.SIGTERM, take)
report()

if end == "finish" and rank == "0":
    Path(os.environ["WAN_DS_FINISHED"]).write_text("runs/stand in")
elif end == "kill the launcher" and rank == "0":
    os.kill(os.getppid(), signal.SIGKILL)
if end in ("wait for a signal", "kill the launcher"):
    while not received:
        time.sleep(0.05)
    time.sleep(0.5)  # a save
    report()
    sys.exit(128 + received[0])
while end == "ignore signals" or (end == "one ignores signals" and rank == "1"):
    time.sleep(0.05)
if end == "one ignores signals":
    while not received:
        time.sleep(0.05)
    sys.exit(128 + received[0])
