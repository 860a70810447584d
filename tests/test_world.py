import os
import signal
import time

import pytest
import torch

from tests.world import RankDied
from wan_ds.errors import ConfigError


def _sum_of_ranks(start: torch.Tensor) -> torch.Tensor:
    total = start + torch.distributed.get_rank()
    torch.distributed.all_reduce(total)
    return total


def _folder_and_draw() -> tuple[str, float]:
    return os.getcwd(), torch.rand(()).item()


def _refuse_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        raise ConfigError("train.steps=0 is not positive")
    torch.distributed.barrier()


def _wait_for_a_rank_that_never_comes() -> None:
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    else:
        time.sleep(300)


def _die() -> None:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def test_ranks_share_a_group_and_return_tensors(world2):
    results = world2.run(_sum_of_ranks, torch.tensor([1.0]))
    assert [result.item() for result in results] == [3.0, 3.0]


def test_a_world_of_one_rank_has_a_group_too(world1):
    assert world1.run(_sum_of_ranks, torch.tensor([1.0]))[0].item() == 1.0


def test_ranks_stay_alive_between_runs(world2):
    assert world2.run(os.getpid) == world2.run(os.getpid)


def test_ranks_work_in_the_folder_of_the_test_with_one_seed(world2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = world2.run(_folder_and_draw)
    assert first == second == world2.run(_folder_and_draw)[1]
    assert first[0] == str(tmp_path)


def test_what_one_rank_raises_is_raised_in_the_test_and_the_next_run_has_new_ranks(world2):
    before = world2.run(os.getpid)
    with pytest.raises(ConfigError, match="not positive") as caught:
        world2.run(_refuse_on, 1)
    assert "_refuse_on" in str(caught.value.__cause__)
    assert "rank 1 of 2" in str(caught.value.__cause__)
    assert not set(before) & set(world2.run(os.getpid))


def test_a_deadlock_is_a_time_out_that_names_the_ranks(world2):
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        world2.run(_wait_for_a_rank_that_never_comes, timeout=1)


def test_a_rank_that_dies_is_named_with_its_exit_code(world2):
    with pytest.raises(RankDied, match="rank 1 died with exit code -9"):
        world2.run(_die)
    assert len(world2.run(os.getpid)) == 2
