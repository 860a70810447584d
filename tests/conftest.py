"""What every test may use: living worlds of ranks, and the rule for tests that need a GPU."""

import os
from collections.abc import Iterator

# Before torch is imported, and also for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.world import World  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world1() -> Iterator[World]:
    """One rank with DeepSpeed's backend, shared by the session."""
    world = World(1)
    yield world
    world.kill()


@pytest.fixture(scope="session")
def world2() -> Iterator[World]:
    """Two gloo ranks, shared by the session."""
    world = World(2)
    yield world
    world.kill()


@pytest.fixture(scope="session")
def world4() -> Iterator[World]:
    """Four gloo ranks, shared by the session."""
    world = World(4, timeout=300.0)
    yield world
    world.kill()


# Files that take long come first, so that two workers end together.
SLOW_FIRST = [
    "test_quickstart.py",
    "test_parity.py",
    "test_compilation.py",
    "test_watchdog.py",
    "test_variants.py",
    "test_train.py",
    "test_resume.py",
    "test_loop.py",
    "test_export.py",
    "test_readme.py",
    "test_local.py",
    "test_checkpoint.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: SLOW_FIRST.index(item.path.name) if item.path.name in SLOW_FIRST else len(SLOW_FIRST)
    )
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU here"))
