"""Sums over ranks, and the one number that undoes DeepSpeed's averaging of gradients."""

import torch
import torch.distributed as dist


def gradient_divisor(*, stage: int, reduce_scatter: bool, world_size: int, sp_size: int) -> float:
    """What DeepSpeed 0.19.8 divides the sum over all ranks of their gradients by.

    A rank's loss is its share of the global mean; multiplied by this number its gradients, after DeepSpeed's
    reduction, sum to the gradient of that mean (180 combinations of variant, stage and sp measured equal).
    """
    return float(world_size) if stage == 3 and reduce_scatter else world_size / sp_size


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor summed over the world, in place, equal on every rank."""
    dist.all_reduce(tensor)
    return tensor


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; equal on every rank. A collective: all ranks must call it."""
    answer = torch.tensor([int(flag)])
    dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=host_group())
    return bool(answer.item())


_host_group: dist.ProcessGroup | None = None


def host_group() -> dist.ProcessGroup | None:
    """A gloo group over the world for agreements between hosts, which must not wait for a GPU's queue."""
    global _host_group
    if dist.get_backend() == "gloo":
        return None
    if _host_group is None:
        _host_group = dist.new_group(backend="gloo")
    return _host_group
