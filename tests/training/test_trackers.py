"""The JSON lines are the truth; wandb has the same objects, and may fail in any way without harm to a run."""

import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import wandb
from PIL import Image

from wan_ds.training.trackers import JsonLines, Trackers, Wandb, WandbSettings

EXPERTS = ("high_noise", "low_noise")
OFFLINE = WandbSettings(mode="offline", project="tests", name="a run", tags=("tiny",))


@pytest.fixture(autouse=True)
def without_the_users_wandb(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", os.devnull)
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    monkeypatch.setenv("WANDB_X_DISABLE_META", "true")


def records(first: int, last: int) -> list[dict]:
    made = []
    for step in range(first, last + 1):
        expert = EXPERTS[step % 2]
        made.append(
            {
                "step": step,
                "expert": expert,
                "train/loss": 1 / step,
                f"train/{expert}/loss": 1 / step,
                f"train/{expert}/step": (step + 1) // 2,
                f"train/{expert}/lr": 1e-5,
                "train/loss_by_sigma/0.9-1.0": 0.1 + step,
                "train/loss_by_sigma/0.9-1.0/count": 2,
                "speed/step_seconds": 0.25,
            }
        )
    made[-1]["eval/loss"] = 0.7
    return made


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_wandb(file: Path) -> list[dict]:
    """Every record of an offline run's file, as wandb's own reader prints them: one JSON object a line."""
    reader = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(file)]
    done = subprocess.run(reader, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def history(file: Path) -> list[dict]:
    """The logged objects without wandb's own keys."""
    items = [record["history"]["item"] for record in read_wandb(file) if record["type"] == "history"]
    return [{name: value for name, value in item.items() if not name.startswith("_")} for item in items]


def pieces(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))


# JSON lines


def test_every_record_is_a_line_that_is_on_the_disk_when_write_returns(tmp_path, monkeypatch):
    synced = []
    lines = JsonLines(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.path.getsize(lines.path)))

    lines.write([{"step": 1, "expert": "日本", "train/loss": 0.1}])
    lines.write(records(2, 4))

    text = lines.path.read_bytes()
    assert text.startswith('{"step":1,"expert":"日本","train/loss":0.1}\n'.encode())
    assert read_lines(lines.path)[1:] == records(2, 4)
    assert synced[-1] == len(text)


@pytest.mark.parametrize("torn", [b"", b'{"step":5,"train/lo', b'{"step":5}', b"\x00\x00\x00", b'{"step":2'])
def test_cutting_back_drops_later_steps_and_a_torn_line_and_keeps_the_rest_byte_for_byte(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step": 0, "eval/loss": 1.50}\n{"step":1}\n{"step":2,"a":"\xe2\x80\xa8"}\n'
    path.write_bytes(kept + b'{"step":3}\n{"step":4}\n' + torn)
    lines = JsonLines(path)

    lines.cut_back(2)
    assert path.read_bytes() == kept

    lines.write([{"step": 3}])
    assert path.read_bytes() == kept + b'{"step":3}\n'
    lines.cut_back(-1)
    assert path.read_bytes() == b""
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_cutting_back_replaces_the_file_at_once(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}\n')

    def killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        JsonLines(path).cut_back(1)

    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n'


def test_cutting_back_a_file_that_is_not_there_is_fine(tmp_path):
    JsonLines(tmp_path / "metrics.jsonl").cut_back(3)

    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_that_names_the_steps_and_the_file(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")

    with pytest.raises(OSError, match=r"steps 3 to 5 cannot be written; free space.*jsonl") as caught:
        JsonLines(path).write(records(3, 5))
    assert caught.value.errno == errno.ENOSPC


def test_nan_never_reaches_the_file(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        JsonLines(tmp_path / "metrics.jsonl").write([{"step": 1, "train/loss": float("nan")}])

    assert not list(tmp_path.iterdir())


# wandb


def test_the_offline_file_holds_every_object_of_the_json_lines(tmp_path):
    trackers = Trackers.for_rank(0, tmp_path, {"optimizer": {"lr": 1e-5}}, EXPERTS, OFFLINE)
    trackers.write([{"step": 0, "eval/loss": 0.9, "eval/low_noise/loss": 0.8}])
    trackers.write(records(1, 4))
    trackers.write([])
    trackers.write(records(5, 6))
    trackers.close()
    (file,) = pieces(tmp_path)

    found = history(file)

    assert len(found) == 7
    assert found == read_lines(tmp_path / "metrics.jsonl")
    (run,) = (record["run"] for record in read_wandb(file) if record["type"] == "run")
    assert run["config"]["update"]["optimizer"] == {"lr": 1e-5}
    assert (run["project"], run["display_name"], run["tags"]) == ("tests", "a run", ["tiny"])


def test_an_experts_charts_have_its_own_axis_and_all_others_the_steps(tmp_path):
    tracker = Wandb(tmp_path, {}, EXPERTS, OFFLINE)
    tracker.write(records(1, 2))
    tracker.close()

    metrics = [record["metric"] for record in read_wandb(pieces(tmp_path)[0]) if record["type"] == "metric"]
    axis = {metric.get("name") or metric["glob_name"]: metric.get("step_metric") for metric in metrics}

    assert axis == {
        "step": None,
        "train/high_noise/step": None,
        "train/low_noise/step": None,
        "train/high_noise/*": "train/high_noise/step",
        "train/low_noise/*": "train/low_noise/step",
        "expert": "step",
        "train/loss": "step",
        "train/loss_by_sigma/0.9-1.0": "step",
        "train/loss_by_sigma/0.9-1.0/count": "step",
        "speed/step_seconds": "step",
        "eval/loss": "step",
    }
    assert list(axis)[:2] == ["step", "train/high_noise/step"]


def test_a_run_that_is_resumed_twice_keeps_its_id_and_loses_nothing(tmp_path):
    # killed after 4 with a checkpoint at 3, resumed, killed after 6 with one at 5, resumed
    for first, last, config in ((1, 4, {"steps": 6}), (4, 6, {"steps": 6}), (6, 8, {"steps": 8})):
        trackers = Trackers.for_rank(0, tmp_path, config, EXPERTS, OFFLINE)
        trackers.cut_back(first - 1)
        trackers.write(records(first, last))
        trackers.close()
        time.sleep(1.1)  # wandb names a piece's folder by the second

    run_id = (tmp_path / "wandb" / "run_id.txt").read_text().strip()
    logged = [[item["step"] for item in history(file)] for file in pieces(tmp_path)]

    assert [file.name for file in pieces(tmp_path)] == [f"run-{run_id}.wandb"] * 3
    assert logged == [[1, 2, 3, 4], [4, 5, 6], [6, 7, 8]]
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 9))


class Recording:
    """wandb's run, recorded; keeps wandb's rule that a step it has passed is thrown away."""

    url = None

    def __init__(self, **arguments):
        self.arguments = arguments
        self.logged = []
        self.finished = None
        self.step = 0

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, values, step=None):
        if step is not None and step < self.step:
            return
        self.step = self.step + 1 if step is None else step
        self.logged.append(values)

    def finish(self, exit_code=None):
        self.finished = exit_code


@pytest.fixture
def recorded(monkeypatch):
    runs = []
    monkeypatch.setattr(wandb, "init", lambda **arguments: runs.append(Recording(**arguments)) or runs[-1])
    return runs


def test_no_record_is_lost_to_the_rule_that_steps_grow(tmp_path, recorded):
    tracker = Wandb(tmp_path, {}, EXPERTS, OFFLINE)
    tracker.write([*records(1, 12), {"step": 12, "eval/loss": 1.0}, *records(10, 14), {"step": 2, "a": 1}])
    tracker.close(exit_code=3)

    assert [record["step"] for record in recorded[0].logged] == [*range(1, 13), 12, *range(10, 15), 2]
    assert recorded[0].finished == 3


def test_a_resumed_run_may_have_changed_settings(tmp_path, recorded):
    Wandb(tmp_path, {"a": 1}, EXPERTS, OFFLINE).close()

    assert recorded[0].arguments["allow_val_change"] is True
    assert recorded[0].arguments["resume"] == "allow"
    assert recorded[0].arguments["dir"] == tmp_path


def test_the_id_of_a_sweep_agent_is_honoured_and_kept(tmp_path, recorded, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "fromagent")
    Wandb(tmp_path, {}, EXPERTS, OFFLINE).close()
    monkeypatch.delenv("WANDB_RUN_ID")
    Wandb(tmp_path, {}, EXPERTS, OFFLINE).close()

    assert [run.arguments["id"] for run in recorded] == ["fromagent", "fromagent"]


@pytest.mark.parametrize(
    ("mode", "variable", "has_key", "expected"),
    [
        ("auto", None, True, "online"),
        ("auto", None, False, "offline"),
        ("auto", "disabled", True, "disabled"),
        ("online", "offline", False, "online"),
        ("offline", None, True, "offline"),
    ],
)
def test_without_a_key_auto_is_offline(tmp_path, recorded, monkeypatch, mode, variable, has_key, expected):
    monkeypatch.setattr(wandb, "login", lambda prompt: has_key)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)

    Wandb(tmp_path, {}, EXPERTS, WandbSettings(mode=mode)).close()

    assert recorded[0].arguments["mode"] == expected


def test_auto_finds_no_key_without_asking_anybody(tmp_path):
    tracker = Wandb(tmp_path, {}, EXPERTS, WandbSettings(mode="auto"))
    tracker.write(records(1, 2))
    tracker.close()

    assert history(pieces(tmp_path)[0]) == records(1, 2)


def test_only_the_first_rank_tracks_and_disabled_is_no_wandb(tmp_path, recorded):
    for rank in range(4):
        trackers = Trackers.for_rank(rank, tmp_path, {}, EXPERTS, OFFLINE)
        trackers.write(records(1, 2))
        trackers.close()
    assert len(recorded) == 1
    assert read_lines(tmp_path / "metrics.jsonl") == records(1, 2)

    disabled = Trackers.for_rank(0, tmp_path, {}, EXPERTS, WandbSettings(mode="disabled"))
    disabled.write(records(3, 4))
    disabled.close()
    assert len(recorded) == 1
    assert read_lines(tmp_path / "metrics.jsonl") == [*records(1, 2), *records(3, 4)]


def raises(**arguments):
    raise wandb.errors.CommError("the server said no")


class RaisesAtThree(Recording):
    def log(self, values, step=None):
        if values["step"] >= 3:
            raise RuntimeError("logging broke")
        super().log(values)


class HangsAtThree(Recording):
    def log(self, values, step=None):
        if values["step"] >= 3:
            threading.Event().wait(120)
        super().log(values)


@pytest.mark.parametrize(
    ("init", "reason"),
    [
        (raises, "the server said no"),
        (lambda **arguments: threading.Event().wait(120), "did not start within 0.3 s"),
        (RaisesAtThree, "logging broke"),
        (HangsAtThree, "did not finish within 0.3 s"),
    ],
    ids=["init raises", "init hangs", "log raises", "log hangs"],
)
def test_whatever_wandb_does_the_run_goes_on_with_one_warning(tmp_path, monkeypatch, caplog, init, reason):
    monkeypatch.setattr(wandb, "init", init)
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        tracker = Wandb(tmp_path, {}, EXPERTS, OFFLINE, start_seconds=0.3, finish_seconds=0.3)
        trackers = Trackers([JsonLines(tmp_path / "metrics.jsonl"), tracker])
        for step in range(1, 7):
            trackers.write(records(step, step))
            time.sleep(0.01)
        trackers.close()
        trackers.close()

    assert time.monotonic() - begun < 5
    expected = [record for step in range(1, 7) for record in records(step, step)]
    assert read_lines(tmp_path / "metrics.jsonl") == expected
    warnings = [record.getMessage() for record in caplog.records if record.name == "wan_ds.training.trackers"]
    assert len(warnings) == 1
    assert reason in warnings[0]


def test_a_start_that_comes_too_late_is_ended_at_once(tmp_path, monkeypatch):
    late = threading.Event()
    run = Recording()
    monkeypatch.setattr(wandb, "init", lambda **arguments: late.wait(60) and run)
    tracker = Wandb(tmp_path, {}, EXPERTS, OFFLINE, start_seconds=0.1)
    time.sleep(0.2)
    tracker.write(records(1, 1))
    late.set()
    tracker._thread.join(10)

    assert (run.logged, run.finished) == ([], 1)


def test_a_run_folder_that_wandb_cannot_write_to_is_a_warning(tmp_path, caplog):
    (tmp_path / "wandb").write_text("a file where the folder should be")

    with caplog.at_level(logging.WARNING):
        trackers = Trackers.for_rank(0, tmp_path, {}, EXPERTS, OFFLINE)
        trackers.write(records(1, 3))
        trackers.close()

    assert read_lines(tmp_path / "metrics.jsonl") == records(1, 3)
    assert "no wandb from here on" in caplog.text


def test_media_are_logged_by_name(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "contact.png")
    tracker = Wandb(tmp_path, {}, EXPERTS, OFFLINE)
    tracker.media(3, {"samples/contact": tmp_path / "contact.png"})
    tracker.close()

    (item,) = history(pieces(tmp_path)[0])
    assert item["step"] == 3
    assert item["samples/contact._type"] == "image-file"
