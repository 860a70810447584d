"""A name of the hub becomes a folder: once per node, whole or not at all; a local path is sent nowhere.

Processes with a cache of their own ask a hub that this one serves.
"""

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.interop.fake_hub import COMMIT, FakeHub
from wan_ds.errors import CheckpointError
from wan_ds.interop.hub import local_path, resolve

ROOT = Path(__file__).parents[2]
NAME = "org/tiny"
FILES = {
    "model_index.json": b"{}",
    "README.md": b"of no use here",
    "transformer/config.json": b"{   }",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors": bytes(range(256)) * 40,
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors": bytes(range(256)) * 41,
    "transformer/diffusion_pytorch_model.safetensors.index.json": json.dumps(
        {"weight_map": {f"t{i}": f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)}}
    ).encode(),
    "transformer/diffusion_pytorch_model.bin": b"the same again",
    "transformer/diffusion_pytorch_model.bin.index.json": b"{    }",
    "vae/config.json": b"{ }",
    "vae/diffusion_pytorch_model.bin": b"the only one",
    "tokenizer/tokenizer.json": b"{  }",
}
SHARDS = [name for name in FILES if name.endswith(".safetensors")]
NEEDED = ["transformer", "vae"]
WANTED = {
    name
    for name in FILES
    if name.startswith(("transformer", "vae", "model_index"))
    and "transformer/diffusion_pytorch_model.bin" not in name
}

ASK = """
import json, logging, shutil, sys, types
from wan_ds.errors import CheckpointError
from wan_ds.interop.hub import resolve
logging.basicConfig(level=logging.INFO)
calls, free = json.loads(sys.argv[1])
if free is not None:
    shutil.disk_usage = lambda path: types.SimpleNamespace(free=free)
for path, revision, needed in calls:
    try:
        print(json.dumps([str(found) for found in resolve(path, revision=revision, needed=needed)]))
    except CheckpointError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture
def hub():
    served = FakeHub(NAME, FILES)
    yield served
    served.close()


@pytest.fixture
def start(hub, tmp_path):
    """Start a process that resolves names one after the other; all of a test's share one cache."""
    started = []

    def start(*calls, free=None, **environment):
        inherited = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        inherited |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.endpoint, "PYTHONPATH": str(ROOT)}
        inherited |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        inherited |= {"HF_HUB_DOWNLOAD_TIMEOUT": "60"}  # a file that is held is not asked for again
        process = subprocess.Popen(
            [sys.executable, "-c", ASK, json.dumps([calls, free])],
            env=inherited | environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def answers(process) -> list:
    """What each call gave: [folder, commit], or the text of its error."""
    told, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    return [json.loads(line) for line in told.splitlines()]


def files_in(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


def read_until(pipe, text: str, seconds: float = 30) -> str:
    """Read a process's log until `text` is in it."""
    os.set_blocking(pipe.fileno(), False)
    log, end = "", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while text not in log:
            assert time.monotonic() < end, f"no {text!r} in {log!r}"
            if selector.select(timeout=1):
                log += os.read(pipe.fileno(), 65536).decode()
    os.set_blocking(pipe.fileno(), True)
    return log


def test_two_processes_download_each_needed_file_once(hub, start):
    hub.hold = SHARDS[0]
    first = start([NAME, None, NEEDED])
    assert hub.held.wait(30)
    second = start([NAME, None, NEEDED])
    read_until(second.stderr, f"waiting for another process that looks for {NAME}")
    hub.release.set()
    ((folder, commit),) = answers(second)
    asked = len(hub.requests)
    assert answers(first) == [[folder, commit]]
    assert commit == COMMIT
    assert files_in(folder) == WANTED
    assert all((Path(folder) / name).read_bytes() == FILES[name] for name in WANTED)
    assert hub.downloads() == dict.fromkeys(WANTED, 1)
    # The second one asked nothing at all, and a third one asks one thing: where the branch stands.
    assert [path for _, path in hub.requests].count(f"/api/models/{NAME}") == 1
    assert answers(start([NAME, None, NEEDED])) == [[folder, commit]]
    assert len(hub.requests) == asked + 1


def test_a_cache_that_is_complete_needs_no_network(hub, start):
    (online,) = answers(start([NAME, None, NEEDED]))
    asked = len(hub.requests)
    assert answers(start([NAME, None, NEEDED], HF_HUB_OFFLINE="1")) == [online]
    # A commit never moves, so nobody is asked even where there is a network.
    assert answers(start([NAME, COMMIT, NEEDED])) == [online]
    assert len(hub.requests) == asked
    hub.close()
    assert answers(start([NAME, None, NEEDED])) == [online]


def test_what_an_offline_cache_lacks_is_one_error_with_the_ways_on(hub, start):
    (nothing,) = answers(start([NAME, None, NEEDED], HF_HUB_OFFLINE="1"))
    assert f"model.path={NAME}" in nothing
    assert "lacks transformer, vae" in nothing
    assert "HF_HUB_OFFLINE is set" in nothing
    assert f"hf download {NAME} --local-dir <folder>, then set model.path=<folder>" in nothing

    ((folder, _),) = answers(start([NAME, None, ["transformer"]]))
    absent, damaged = answers(start([NAME, None, NEEDED], [NAME, None, ["nothing"]], HF_HUB_OFFLINE="1"))
    assert "lacks vae/config.json, vae/diffusion_pytorch_model.bin of it" in absent
    assert "lacks nothing of it" in damaged
    (Path(folder) / SHARDS[1]).unlink()
    hub.close()
    offline = answers(start([NAME, None, ["transformer"]], HF_HUB_OFFLINE="1"))
    no_network = answers(start([NAME, None, ["transformer"]]))
    for (message,), reason in [(offline, "HF_HUB_OFFLINE"), (no_network, "ConnectError")]:
        assert f"lacks {SHARDS[1]} of it" in message
        assert reason in message
        assert "hf download" in message


def test_without_a_kept_list_the_index_says_which_shards_belong_to_the_cache(hub, start, tmp_path):
    ((folder, commit),) = answers(start([NAME, None, ["transformer"]]))
    for kept in tmp_path.rglob("trees/*.json"):
        kept.unlink()
    assert answers(start([NAME, None, ["transformer"]], HF_HUB_OFFLINE="1")) == [[folder, commit]]
    (Path(folder) / SHARDS[0]).unlink()
    (message,) = answers(start([NAME, None, ["transformer"]], HF_HUB_OFFLINE="1"))
    assert f"lacks {SHARDS[0]} of it" in message


def test_after_a_killed_download_only_the_rest_is_downloaded(hub, start, tmp_path):
    hub.hold = SHARDS[1]
    killed = start([NAME, None, NEEDED])
    assert hub.held.wait(30)
    snapshot = tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    end = time.monotonic() + 30
    while files_in(snapshot) != WANTED - {SHARDS[1]}:
        assert time.monotonic() < end, files_in(snapshot)
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    hub.hold = None
    hub.release.set()
    ((folder, _),) = answers(start([NAME, None, NEEDED]))
    assert all((Path(folder) / name).read_bytes() == FILES[name] for name in WANTED)
    assert hub.downloads() == dict.fromkeys(WANTED, 1) | {SHARDS[1]: 2}


def test_a_full_disk_is_refused_before_anything_is_downloaded(hub, start, tmp_path):
    total = sum(len(FILES[name]) for name in WANTED)
    (message,) = answers(start([NAME, None, NEEDED], free=total - 1))
    assert f"{total / 1e9:.2f} GB are still to be downloaded" in message
    assert "GB are free in" in message
    assert "HF_HOME" in message
    assert not hub.downloads()
    # What is there already needs no room.
    answers(start([NAME, None, ["transformer"]], free=total))
    rest = sum(len(FILES[name]) for name in WANTED if name.startswith("vae"))
    (refused,) = answers(start([NAME, None, NEEDED], free=rest - 1))
    assert "still to be downloaded" in refused
    assert isinstance(answers(start([NAME, None, NEEDED], free=rest))[0], list)


def test_what_the_hub_refuses_is_said_in_one_sentence(hub, start):
    missing, gated, revision, subfolder = answers(
        start(
            ["org/nothing", None, NEEDED],
            ["org/gated", None, NEEDED],
            [NAME, "v9", NEEDED],
            [NAME, None, ["image_encoder"]],
        )
    )
    assert f"org/nothing: neither a folder here nor a repository of {hub.endpoint}" in missing
    assert f"org/gated is gated: accept its terms at {hub.endpoint}/org/gated" in gated
    assert "hf auth login" in gated
    assert f"model.revision=v9: {NAME} has no such branch, tag or commit" in revision
    assert "has no image_encoder; it has tokenizer, transformer, vae" in subfolder
    assert all("\n" not in message for message in (missing, gated, revision, subfolder))


def test_files_at_the_top_are_asked_for_by_name_or_all_together(hub, start):
    hub.files = {"a.pth": b"1", "b.pth": b"2", "google/umt5/spiece.model": b"3", "other/c.pth": b"4"}
    (folder, _), another_layout = answers(
        start([NAME, None, ["a.pth", "google/umt5/"]], [NAME, None, ["vae"]])
    )
    assert files_in(folder) == {"a.pth", "google/umt5/spiece.model"}
    answers(start([NAME, None, ["."]]))
    assert files_in(folder) == {"a.pth", "b.pth", "google/umt5/spiece.model"}
    assert "has no vae; it has google, other, in another layout than diffusers'" in another_layout


@pytest.mark.parametrize(("rank", "local_rank", "bars"), [(1, 1, True), (9, 1, False)])
def test_the_first_node_alone_draws_a_bar_and_every_node_says_that_it_downloads(
    hub, start, rank, local_rank, bars
):
    hub.files = {"vae/config.json": b"{}"}
    always = {"TQDM_POSITION": "-1"}  # huggingface_hub's way to draw without a terminal
    process = start([NAME, None, ["vae"]], RANK=str(rank), LOCAL_RANK=str(local_rank), **always)
    log = process.communicate(timeout=60)[1]
    assert f"WARNING:wan_ds.interop.hub:downloading {NAME}: 1 files" in log
    assert ("Fetching 1 files" in log) == bars


def test_a_cache_that_can_only_be_read_is_used(hub, start, tmp_path):
    (found,) = answers(start([NAME, None, NEEDED]))
    locks = tmp_path / "hf" / "hub" / ".locks" / f"models--{NAME.replace('/', '--')}" / "wan_ds.lock"
    locks.unlink()
    locks.mkdir()  # nobody, root included, opens a folder as a lock
    assert answers(start([NAME, None, NEEDED])) == [found]


@pytest.fixture
def no_sockets(monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_sockets")
def test_a_local_path_is_itself_and_asks_nobody(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "one.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    for path in ["org/model", "./org/model", "org", str(tmp_path / "org" / "model"), "one.safetensors"]:
        assert resolve(path, revision="v1", needed=["transformer"]) == (Path(path), None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org", needed=[]) == (tmp_path / "org", None)
    assert resolve(None, needed=["vae"]) == (None, None)


@pytest.mark.usefixtures("no_sockets")
def test_a_repository_of_which_nothing_is_needed_is_not_asked_for():
    assert resolve(NAME, needed=[]) == (None, None)


@pytest.mark.usefixtures("no_sockets")
def test_the_packages_own_models_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, revision = resolve("wan_ds/assets/quickstart", needed=["vae"])
    assert folder.samefile(ROOT / "wan_ds" / "assets" / "quickstart")
    assert revision is None
    assert local_path("wan_ds/assets").samefile(
        ROOT / "wan_ds" / "assets"
    )  # with the one slash of a hub name


@pytest.mark.usefixtures("no_sockets")
@pytest.mark.parametrize(
    "path",
    [
        "./x",
        "../x",
        "/x",
        "~/x",
        "runs/2025/x",
        "x",
        "wan_ds/asets",
        "runs/x.safetensors",
        "a--b/c",
        "a\\b",
        "x/",
    ],
)
def test_a_mistyped_path_is_not_sent_to_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder here") as refused:
        resolve(path, needed=["transformer"])
    assert f"model.path={path}:" in str(refused.value)
