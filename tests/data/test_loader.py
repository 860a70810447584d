import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.data.videos import numbers, write_video
from wan_ds.data.clips import Clip
from wan_ds.data.loader import Loader, slots_of_rank
from wan_ds.data.order import clips_of_step
from wan_ds.errors import DataError

NUM_CLIPS = 7


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Seven clips; clip k begins with frame number 3 k, so its pixels tell it."""
    folder = tmp_path_factory.mktemp("clips")
    whole = write_video(folder / "all.mkv", times=range(29))
    return [Clip(f"{k}.mkv", whole, f"clip {k}", start_seconds=k * 0.1) for k in range(NUM_CLIPS)]


def load(clips, **changes):
    options = {"num_frames": 5, "fps": 15, "height": 16, "width": 24, "seed": 1, "global_batch_size": 3}
    options |= {"dp_rank": 0, "dp_size": 1, "workers": 0, "keep_latents": False}
    return Loader(clips, **(options | changes))


def layout(batches):
    return [[(item.slot, item.index) for item in batch] for batch in batches]


def same(one, other):
    return layout(one) == layout(other) and all(
        (a.pixels is None and b.pixels is None) or torch.equal(a.pixels, b.pixels)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def workers_of(thread):
    """Process ids of the workers that a thread of this process started and that live."""
    pids = Path(f"/proc/self/task/{thread}/children").read_text().split()
    return [int(pid) for pid in pids if is_alive(pid)]


def is_alive(pid):
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()  # a zombie has no command line
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("size", "ranks"), [(7, 2), (8, 3), (3, 3), (2, 5), (64, 8), (1, 1)])
def test_ranks_share_the_slots_contiguously_and_evenly(size, ranks):
    shares = [list(slots_of_rank(size, rank, ranks)) for rank in range(ranks)]
    assert [slot for share in shares for slot in share] == list(range(size))
    lengths = [len(share) for share in shares]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_the_ranks_together_read_the_global_order(clips, dp_size):
    passes = [list(load(clips, dp_rank=rank, dp_size=dp_size).batches(2, 9)) for rank in range(dp_size)]
    for n, step in enumerate(range(2, 9)):
        items = [item for batches in passes for item in batches[n]]
        assert [item.slot for item in items] == [0, 1, 2]
        assert [item.index for item in items] == clips_of_step(step, 3, NUM_CLIPS, seed=1)
        for item in items:
            assert numbers(item.pixels) == [(3 * item.index + 2 * k) % 29 for k in range(5)]


def test_a_pass_that_begins_later_continues_the_same_order(clips):
    assert same(list(load(clips).batches(0, 8))[5:], list(load(clips).batches(5, 8)))


def test_any_number_of_workers_gives_the_same_batches(clips):
    before = torch.get_rng_state()
    for workers, keep_latents in ((1, True), (4, False)):
        reference = list(load(clips, keep_latents=keep_latents).batches(0, 5))
        assert [tuple(item.pixels.shape) for item in reference[0]] == [(3, 5, 16, 24)] * 3
        got = list(load(clips, keep_latents=keep_latents, workers=workers).batches(0, 5))
        assert same(got, reference), workers
    assert torch.equal(torch.get_rng_state(), before)


def test_a_clip_is_read_once_per_pass_and_rank_when_its_latents_are_kept(clips):
    loader = load(clips, keep_latents=True, dp_rank=1, dp_size=2, global_batch_size=5)
    everything = list(load(clips, dp_rank=1, dp_size=2, global_batch_size=5).batches(0, 9))
    seen = set()
    for batch, full in zip(loader.batches(0, 9), everything, strict=True):
        for item, reference in zip(batch, full, strict=True):
            assert (item.slot, item.index) == (reference.slot, reference.index)
            assert (item.pixels is None) == (item.index in seen)
            assert item.pixels is None or torch.equal(item.pixels, reference.pixels)
            seen.add(item.index)
    assert any(item.pixels is not None for item in next(loader.batches(8, 9))), "a new pass reads again"


def test_a_clip_twice_in_one_step_is_read_once(clips):
    (batch,) = load(clips[:2], keep_latents=True, global_batch_size=5).batches(0, 1)
    assert [item.pixels is not None for item in batch] == [True, True, False, False, False]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_clip_stops_the_run_where_it_is_due_with_its_name(clips, tmp_path, workers):
    broken = tmp_path / "broken 日本.mp4"
    broken.write_bytes(b"")
    order = clips_of_step(0, 7, NUM_CLIPS, seed=1)
    mixed = list(clips)
    mixed[order[4]] = Clip("broken.mp4", broken, "a cat")
    batches = load(mixed, global_batch_size=2, workers=workers).batches(0, 4)
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(DataError, match=r"^.*broken 日本\.mp4: the file is empty") as error:
        next(batches)
    assert type(error.value) is DataError


def test_a_rank_without_slots_reads_nothing(clips):
    loader = load(clips, global_batch_size=2, dp_rank=2, dp_size=3, workers=2)
    assert list(loader.batches(0, 3)) == [[], [], []]


def test_workers_live_through_stop_signals_from_birth_and_end_with_the_pass(clips):
    batches = load(clips, workers=1, global_batch_size=1).batches(0, 12)
    got = []
    reading = threading.Thread(target=lambda: got.extend(batches))
    reading.start()
    deadline = time.monotonic() + 30
    while not (workers := workers_of(reading.native_id)) and reading.is_alive():
        assert time.monotonic() < deadline
    while reading.is_alive():  # from before it can have set a handler until after its last clip
        for pid in workers:
            for stop in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, stop)
        time.sleep(0.05)
        assert time.monotonic() < deadline
    assert len(workers) == 1
    order = [clips_of_step(step, 1, NUM_CLIPS, seed=1) for step in range(12)]
    assert layout(got) == [[(0, index)] for (index,) in order]
    assert not is_alive(workers[0])


def test_an_unfinished_pass_ends_its_workers_when_closed(clips):
    others = workers_of(threading.get_native_id())
    batches = load(clips, workers=1, global_batch_size=1).batches(0, 1000)
    next(batches)
    (worker,) = set(workers_of(threading.get_native_id())) - set(others)
    began = time.monotonic()
    batches.close()
    assert not is_alive(worker)
    assert time.monotonic() - began < 4, "it was waited for in vain"


DIES_IN_A_PASS = """
from pathlib import Path
from wan_ds.data.clips import Clip
from wan_ds.data.loader import Loader

if __name__ == "__main__":
    batches = Loader(
        [Clip("a", Path({path!r}), "a cat")], num_frames=5, fps=15, height=16, width=16, seed=0,
        global_batch_size=1, dp_rank=0, dp_size=1, workers=1, keep_latents=False,
    ).batches(0, 1000)
    next(batches)
    raise SystemExit(7)
"""


def test_a_process_that_fails_within_a_pass_ends_with_its_own_exit_code(clips, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(DIES_IN_A_PASS.format(path=str(clips[0].path)))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, script], env=environment, timeout=90, check=False).returncode == 7


def test_no_clips_are_refused():
    with pytest.raises(DataError, match=r"no clip.*data\.path"):
        load([])
