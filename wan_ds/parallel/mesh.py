"""All rank arithmetic: the axes dp (ranks that read different clips) and sp (ranks that share one clip)."""

import os
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from wan_ds.errors import ConfigError

# How long a rank waits for the others, in minutes as DeepSpeed reads it too.
COLLECTIVE_TIMEOUT = timedelta(minutes=float(os.environ.get("DEEPSPEED_TIMEOUT", "30")))


class Mesh:
    """The world of ranks as dp x sp, sp contiguous so that the ranks of one clip sit in one machine.

    ``sequence_parallel_unit`` is what DeepSpeed calls mpu; one object serves every engine of the process,
    at every sp size, because an engine made without one inherits the last (DeepSpeed keeps it in a module
    global)."""

    def __init__(self, sp_size: int = 1) -> None:
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        if self.world_size % sp_size:
            fitting = ", ".join(str(n) for n in range(1, self.world_size + 1) if self.world_size % n == 0)
            raise ConfigError(
                f"parallelism.sp_size={sp_size} does not divide the {self.world_size} ranks; choose {fitting}"
            )
        self.sp_size = sp_size
        self.sp_rank = self.rank % sp_size
        self.dp_size = self.world_size // sp_size
        self.dp_rank = self.rank // sp_size
        self.sequence_parallel_unit = SequenceParallelUnit(self)

    @property
    def sp_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's clips."""
        return self.sequence_parallel_unit.get_sequence_parallel_group()

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to people."""
        return self.rank == 0


@cache  # gloo keeps threads awake for every group that was ever made
def _group(world: dist.ProcessGroup, ranks: range) -> dist.ProcessGroup:  # noqa: ARG001
    """A group of these ranks of the world; all ranks call it for the same groups in the same order."""
    return dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)


@cache
def _own_group(world: dist.ProcessGroup) -> dist.ProcessGroup:  # noqa: ARG001
    """A group of this rank alone, for which no other waits."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


class SequenceParallelUnit:
    """The ``mpu`` for DeepSpeed 0.19.8: sp groups, and gradients reduced over the whole world.

    DeepSpeed recognises a sequence-parallel unit by the attribute ``initialize_sequence_parallel`` and
    would split ZeRO-3 parameters over dp alone if it found ``get_data_parallel_group``; so the first must
    exist, the second not. Of model parallelism there is none: every rank is alone in its group. Its optimizer
    for bfloat16 under ZeRO-1, which does not know the first attribute, would otherwise leave the gradients
    of all ranks but the first of a clip out of the norm."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        world = dist.group.WORLD
        firsts = range(0, mesh.world_size, mesh.sp_size)
        sp_groups = [_group(world, range(first, first + mesh.sp_size)) for first in firsts]
        self._sp_group = sp_groups[mesh.dp_rank]
        self._world_group = _group(world, range(mesh.world_size))
        self._own_group = _own_group(world)

    def initialize_sequence_parallel(self) -> None:
        raise RuntimeError("the groups exist already; DeepSpeed only looks for this attribute")

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        return self._sp_group

    def get_sequence_parallel_world_size(self) -> int:
        return self._mesh.sp_size

    def get_sequence_parallel_rank(self) -> int:
        return self._mesh.sp_rank

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        return self._world_group

    def get_sequence_data_parallel_world_size(self) -> int:
        return self._mesh.world_size

    def get_sequence_data_parallel_rank(self) -> int:
        return self._mesh.rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._own_group

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0
