"""A run that stands still ends by itself and says which rank is the odd one; a healthy one is left alone."""

import bdb
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch import nn

from wan_ds.config.command_line import parse
from wan_ds.config.composition import configure
from wan_ds.errors import ConfigError
from wan_ds.training import watchdog
from wan_ds.training.places import PATIENCE, Heartbeat, Place, Places, Process, read_heartbeat
from wan_ds.training.stall import Seen, is_stall, odd_ranks, report
from wan_ds.training.watchdog import STALLED, RunningClock

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STALL_SECONDS = 8
PAUSE_SECONDS = 5  # longer than a silence of the watchdog's, and no stall
HEALTHY_STEPS = 200
SMALL = [
    "recipe=quickstart",
    "model.transformer.num_layers=1",
    "data.height=32",
    "data.width=48",
    "train.steps=100000",
    "train.experts=[low_noise]",
    "checkpoint.save_every_steps=null",
    "tracker.mode=disabled",
    f"train.stall_seconds={STALL_SECONDS}",
    "run_name=mine",
]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return kept | path | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | more


@pytest.fixture(scope="module")
def stalled(tmp_path_factory):
    """The folder of the runs of `stalled.py`, all at once."""
    folder = tmp_path_factory.mktemp("stalled")
    script = Path(__file__).with_name("stalled.py")
    command = [sys.executable, script, folder, *map(str, (STALL_SECONDS, PAUSE_SECONDS, HEALTHY_STEPS))]
    subprocess.run(command, env=environment(), cwd=folder, check=True, timeout=240)
    return folder, json.loads((folder / "codes.json").read_text())


def said(run: Path, rank: int) -> str:
    return (run / f"rank_{rank}.err").read_text()


def test_a_rank_that_sleeps_in_encoding_is_named_by_its_place(stalled):
    folder, codes = stalled
    run = folder / "sleeps in encoding"
    assert codes[run.name] == [STALLED, STALLED]
    told = (run / "log.txt").read_text()
    assert f"nothing has moved on any rank for {STALL_SECONDS} s (train.stall_seconds=8)" in told
    assert "The odd rank is rank 1 (step 4, low_noise, encoding, slots 1 (" in told
    assert "not where the others are" in told and "exit code 75" in told
    assert ": step 4, low_noise, comparing ranks; there for" in told
    for rank in range(2):  # each says where it is, down to the line
        assert f"rank {rank} E rank {rank} on " in said(run, rank)
    assert "time.sleep(600)" in said(run, 1) and "sum_over_ranks" in said(run, 0)
    assert said(run, 1).count("training stands still") == 0 and told.count("training stands still") == 1


def test_a_stopped_rank_is_ended_by_the_others_and_named_in_log_txt_even_if_it_is_rank_0(stalled):
    folder, codes = stalled
    run = folder / "rank 0 is stopped"
    assert codes[run.name] == [-signal.SIGKILL, STALLED]
    told = (run / "log.txt").read_text()
    assert "rank 1 E training stands still" in told
    assert "The odd rank is rank 0 (step 4, low_noise, backward, slots 0 (" in told
    assert "rank 0 on " in told and "its process is stopped" in told and "rank 1 on " in told
    assert told.count("training stands still") == 1 and "that rank's machine" in told


def test_where_the_disk_hangs_the_job_ends_as_well_and_blames_no_rank(stalled):
    folder, codes = stalled
    assert codes["no disk"] == [STALLED, STALLED]
    for rank in range(2):
        told = said(folder / "no disk", rank)
        assert "The disk of run_dir does not answer this rank" in told and "odd rank" not in told


def test_a_healthy_run_of_hundreds_of_steps_with_a_long_pause_is_left_alone(stalled):
    folder, codes = stalled
    run = folder / "healthy"
    assert codes[run.name] == [0, 0]
    assert said(run, 0) == said(run, 1) == (run / "log.txt").read_text() == ""
    for rank in range(2):
        left = json.loads((run / f"finished_{rank}").read_text())
        assert left["step"] == HEALTHY_STEPS
        assert not {"places", "watchdog"} & set(left["threads"])
    assert not (run / "places").exists()  # nor what an earlier start had left there


@pytest.fixture
def launched(tmp_path):
    """A run by the real launcher, in a session of its own, which is ended whatever the test does."""
    command = [str(BIN / "deepspeed"), "--num_gpus", "2", str(ROOT / "scripts/train.py"), *SMALL]
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
    yield job
    for process in members(job.pid):
        process.kill()
    job.wait()


def members(session: int) -> list[psutil.Process]:
    """What lives of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return found


def test_a_rank_stopped_in_a_launched_job_is_named_and_the_job_ends(launched, tmp_path):
    run, output = tmp_path / "runs/mine", tmp_path / "output"
    deadline = time.monotonic() + 240
    while (seen := heartbeat_of(run, 1)) is None or seen["place"]["step"] < 4:
        assert launched.poll() is None and time.monotonic() < deadline, output.read_text()[-4000:]
        time.sleep(0.1)
    os.kill(seen["process"]["pid"], signal.SIGSTOP)
    stopped = time.monotonic()
    code = launched.wait(timeout=STALL_SECONDS + 60)
    assert time.monotonic() - stopped > STALL_SECONDS / 2
    # the launcher passes on the code of the rank that it saw end first, the other having been killed
    assert code in (STALLED, (-signal.SIGKILL) % 256), output.read_text()[-4000:]
    told = (run / "log.txt").read_text()
    place = str(Place(**heartbeat_of(run, 1)["place"]))  # the last that it wrote
    assert f"The odd rank is rank 1 ({place}): no sign of life since" in told
    assert "noise, " in place and "step " in place and "its process is stopped" in told
    while left := members(launched.pid):
        assert time.monotonic() - stopped < STALL_SECONDS + 60, left
        time.sleep(0.1)


def heartbeat_of(run: Path, rank: int) -> dict | None:
    try:
        return json.loads((run / f"places/rank_{rank:05d}.json").read_text())
    except OSError:
        return None


PROCESS = Process("here", "another kernel", 1, "1")


def seen(rank: int, place: Place, still: float = 700.0, silent: float = 0.0) -> Seen:
    return Seen(rank, Heartbeat("run", rank, PROCESS, 1, still, place), silent, is_silent=silent > 20)


FORWARD = Place(13, "low_noise", "forward", 4, ("1 (cat)",), 1.0)
BACKWARD = replace(FORWARD, phase="backward", order=5)
ENCODING = replace(FORWARD, phase="encoding", order=1)


@pytest.mark.parametrize(
    ("places", "odd"),
    [
        ([FORWARD, FORWARD, ENCODING, FORWARD], [2]),
        ([FORWARD, FORWARD, BACKWARD, FORWARD], [2]),  # ahead, having left out what the others wait for
        ([FORWARD, replace(FORWARD, order=6), FORWARD], [1]),  # the forward of another micro-batch
        ([FORWARD, replace(FORWARD, expert="high_noise"), FORWARD], [1]),
        ([FORWARD, replace(FORWARD, step=12)], [1]),  # no majority: who is behind
        ([BACKWARD, ENCODING, BACKWARD, ENCODING], [1, 3]),
        ([FORWARD, replace(FORWARD, clips=("2 (dog)",))], []),  # their clips are other ones anyway
        ([FORWARD], []),
    ],
)
def test_the_odd_rank_is_the_one_elsewhere_or_furthest_behind(places, odd):
    assert odd_ranks([seen(rank, place) for rank, place in enumerate(places)]) == odd


def test_a_silent_rank_is_the_odd_one_wherever_the_others_are():
    found = [seen(0, FORWARD), seen(1, BACKWARD), seen(2, FORWARD, silent=30.0), seen(3, FORWARD)]
    assert odd_ranks(found) == [2]
    never = Seen(4, None, 30.0, is_silent=True)
    assert odd_ranks([*found, never]) == [2, 4]
    told = report([*found, never], 600.0, STALLED)
    assert "The odd ones are ranks 2 and 4 (step 13, low_noise, forward, slots 1 (cat); never seen)" in told
    assert "rank 4: no sign of life since this run began" in told
    assert "rank 2 on here: last seen at step 13, low_noise, forward, slots 1 (cat), 30 s ago\n" in told


def test_the_report_tells_all_places_and_where_to_look():
    told = report([seen(0, FORWARD), seen(1, FORWARD)], 600.0, STALLED).splitlines()
    assert "for 700 s (train.stall_seconds=600). All ranks are at the same place" in told[0]
    place = "step 13, low_noise, forward, slots 1 (cat)"
    assert told[1:3] == [f"  rank {rank} on here: {place}; there for 700 s" for rank in (0, 1)]
    assert told[3].startswith("Look at the network") and "raise train.stall_seconds" in told[3]
    waiting = replace(FORWARD, phase="waiting for clips", order=0)
    assert "data.workers" in report([seen(0, FORWARD), seen(1, waiting)], 600.0, STALLED)
    assert "data.workers" in report([seen(0, waiting)], 600.0, STALLED)


def test_nothing_is_a_stall_while_any_rank_that_lives_may_still_be_where_it_is():
    saving = replace(FORWARD, phase="saving", patience=PATIENCE)
    assert is_stall([seen(0, FORWARD), seen(1, FORWARD)], 600.0)
    assert not is_stall([seen(0, FORWARD), seen(1, FORWARD, still=599.0)], 600.0)
    assert not is_stall([seen(0, FORWARD, still=1700.0), seen(1, saving, still=1700.0)], 600.0)
    assert is_stall([seen(0, FORWARD, still=1800.0), seen(1, saving, still=1800.0)], 600.0)
    assert is_stall([seen(0, FORWARD), seen(1, saving, still=0.0, silent=61.0)], 600.0)


def test_what_is_done_first_and_saving_have_more_patience():
    places = Places()
    patience = []
    for step in (1, 2):
        places.begin_step(step, "low_noise", "waiting for clips")
        for phase in ("encoding", "encoding", "forward", "backward", "forward", "saving", "writing samples"):
            places.move(phase, [3])
            patience.append((phase, places.now.patience))
    long, short = PATIENCE, 1.0
    first, second = patience[:7], patience[7:]
    assert [one for _, one in first] == [long, long, long, long, short, long, long]
    assert [one for _, one in second] == [short] * 5 + [long, long]
    places.begin_step(3, "high_noise", "waiting for clips")  # another expert is compiled for itself
    places.move("forward")
    assert places.now.patience == PATIENCE


def test_a_place_tells_its_clips_and_counts_the_phases_of_its_step():
    places = Places()
    before = places.now
    assert str(before) == "before the first step, starting"
    places.begin_step(7, "all", "waiting for clips")
    assert places.now.order == 0
    places.hold({4: "cat.mp4"})
    places.move("encoding", [4])
    places.move("encoding", [5])
    places.move("forward", [4, 5])
    assert str(places.now) == "step 7, all, forward, slots 4 (cat.mp4), 5" and places.now.order == 2


def test_each_forward_of_a_network_is_a_move_while_it_is_watched():
    places, module = Places(), nn.Identity()
    with places.moved_by([module]):
        before = places.now
        module(1)
        assert places.now is not before and places.now == before
    before = places.now
    module(1)
    assert places.now is before


def test_a_heartbeat_comes_back_as_it_was_and_none_of_another_start_does(tmp_path):
    heartbeat = Heartbeat("run", 3, Process.own(), 5, 1.5, FORWARD)
    heartbeat.write(tmp_path)
    assert read_heartbeat(tmp_path, 3, "run") == heartbeat
    assert read_heartbeat(tmp_path, 3, "earlier") is None and read_heartbeat(tmp_path, 2, "run") is None
    assert [path.name for path in tmp_path.iterdir()] == ["rank_00003.json"]
    (tmp_path / "rank_00003.json").write_text('{"run": "run"}')
    assert read_heartbeat(tmp_path, 3, "run") is None


def test_only_the_process_that_wrote_a_heartbeat_is_killed():
    sleeper = subprocess.Popen(["sleep", "60"])
    own = Process.own()
    born = Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19]
    wrote = replace(own, pid=sleeper.pid, born=born)
    for other in (replace(wrote, born="1"), replace(wrote, kernel="another"), replace(wrote, kernel=""), own):
        watchdog._kill(other)
    time.sleep(0.1)
    assert sleeper.poll() is None and wrote.state in ("S", "R")
    sleeper.send_signal(signal.SIGSTOP)
    while wrote.state != "T":
        time.sleep(0.01)
    watchdog._kill(wrote)
    assert sleeper.wait(10) == -signal.SIGKILL
    assert wrote.state == ""


def test_time_in_which_the_process_did_not_run_does_not_count(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    clock = RunningClock(most=10.0)
    now[0] += 2
    assert clock.read() == 2
    now[0] += 3600  # suspended
    assert clock.read() == 12 and clock.seconds == 12


def test_who_sits_in_a_debugger_is_no_stall():
    assert not watchdog._is_in_debugger()
    assert bdb.Bdb().runcall(watchdog._is_in_debugger)


def test_a_time_out_beyond_that_of_the_collectives_is_refused(monkeypatch):
    from wan_ds.training import run  # it imports DeepSpeed

    monkeypatch.setattr(run, "COLLECTIVE_TIMEOUT", timedelta(minutes=30))
    config = configure(parse(["recipe=quickstart", "train.stall_seconds=1800"]))
    sentence = r"^train\.stall_seconds=1800: .* 1800 s .*DEEPSPEED_TIMEOUT.* than 30$"
    with pytest.raises(ConfigError, match=sentence):
        run.watchdog_of(config)
    run.watchdog_of(configure(parse(["recipe=quickstart", "train.stall_seconds=1799"])))
