"""What one expert that trains writes into a checkpoint, and reads from it: one walk for both.

The engine's own files hold the tensors that train and their optimizer's state, and nothing that is frozen. A
run of adapters has a ready file of its adapter beside them, a run with averages those.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from wan_ds.errors import CheckpointError
from wan_ds.training import adapters, ema
from wan_ds.training.adapters import Adapter
from wan_ds.training.agreement import agreed
from wan_ds.training.ema import Ema
from wan_ds.training.engine import Engine
from wan_ds.training.shards import gathered, pieces, shape_of, trainable
from wan_ds.training.zero_files import ZeroFiles

Together = Callable[[Callable[[], None] | None], None]


class Component(Protocol):
    """An expert that trains."""

    engine: Engine
    adapter: Adapter | None  # None: all its weights train
    ema: Ema | None


def save_component(folder: Path, component: Component, step: int, together: Together) -> None:
    """Write the expert's folder, then read its adapter back; a collective.

    ``together`` does each rank's part and fails on all if it failed on any; ``step``: of the expert.
    """
    engine, adapter, averages = component.engine, component.adapter, component.ema
    rank = dist.get_rank()
    together(lambda: engine.save(folder.parent, folder.name))
    if averages is not None:
        together(lambda: averages.save(folder, rank))
    if adapter is None:
        return
    tensors = gathered(engine)

    def write() -> None:
        adapters.write(folder, adapter.lora(tensors, step, f"the adapter of {folder.name}"))

    together(write if rank == 0 else None)
    together(lambda: _refuse_unequal(folder, engine, adapter))


def load_component(folder: Path, component: Component) -> None:
    """Put what `save_component` wrote into a fresh engine of the same world; a collective.

    Raises CheckpointError on every rank unless the folder holds what trains, all of it and nothing else.
    """
    engine, adapter, averages = component.engine, component.adapter, component.ema
    rank = dist.get_rank()
    agreed(lambda: _refuse_unaccounted(folder, component) if rank == 0 else None)
    engine.load(folder.parent, folder.name)
    if adapter is not None:
        agreed(lambda: _refuse_unequal(folder, engine, adapter))
    if averages is not None:
        agreed(lambda: averages.load(folder, rank))


def _refuse_unequal(folder: Path, engine: Engine, adapter: Adapter) -> None:
    """CheckpointError unless the ready file is what this rank's float32 shards hold."""
    adapters.refuse_unequal(adapters.read(folder), adapter, pieces(engine))


def _refuse_unaccounted(folder: Path, component: Component) -> None:
    """CheckpointError unless the engine's files hold each tensor that trains, in its size, and no other."""
    saved = {name: tuple(one.shape) for name, one in ZeroFiles(folder).tensors.items()}
    wanted = {name: shape_of(parameter) for name, parameter in trainable(component.engine)}
    differing = {
        "missing": [name for name in wanted if name not in saved],
        "unexpected": [name for name in saved if name not in wanted],
        "of another size": [
            f"{name} {list(saved[name])}, not {list(shape)}"
            for name, shape in wanted.items()
            if name in saved and saved[name] != shape
        ],
    }
    found = [
        f"{kind}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for kind, names in differing.items()
        if names
    ]
    for what, is_wanted, is_there in (
        (adapters.FILE, component.adapter is not None, (folder / adapters.FILE).is_file()),
        ("averaged weights", component.ema is not None, ema.is_there(folder)),
    ):
        if is_wanted != is_there:
            found.append(f"{'unexpected' if is_there else 'missing'}: {what}")
    if found:
        raise CheckpointError(f"{folder} does not hold what this run trains; {'; '.join(found)}")
