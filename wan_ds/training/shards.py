"""What a rank holds of each trainable parameter in float32, and where it lies in the whole.

Each ZeRO stage keeps its masters elsewhere (DeepSpeed 0.19.8): 0 in the parameter itself, 1 and 2 in a flat
run over a group's parameters, cut into one piece a rank, 3 in one piece of every parameter. A fragment is
looked up anew for each use: DeepSpeed replaces the tensors when it loads a checkpoint.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wan_ds.models.adapter import plain_name

if TYPE_CHECKING:
    from wan_ds.training.engine import Engine


class Fragment(NamedTuple):
    """A stretch of a flattened parameter."""

    values: Tensor  # float32, one axis; DeepSpeed's own, without padding, empty if this rank holds none
    start: int


def trainable(engine: "Engine") -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that the engine's optimizer moves."""
    return ((name, p) for name, p in engine.parameters() if p.requires_grad)


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the whole parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def fragment(parameter: nn.Parameter) -> Fragment:
    """This rank's float32 master of a trainable parameter."""
    if hasattr(parameter, "ds_tensor"):
        optimizer = parameter._z3_optimizer
        piece, _ = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=True)
        start = optimizer._get_param_partition_rank(parameter) * piece.numel()
        count = min(piece.numel(), max(0, parameter.ds_numel - start))
        return Fragment(piece.detach()[:count], start)
    if not hasattr(parameter, "_hp_mapping"):
        return Fragment(parameter.detach().view(-1), 0)
    mapping = parameter._hp_mapping
    if mapping is None:
        return Fragment(torch.empty(0, device=parameter.device), 0)
    return Fragment(mapping.hp_fragment.detach(), mapping.lp_fragment_address.start)


def whole(parameter: nn.Parameter) -> Tensor:
    """The float32 master of the whole parameter, on every rank; a collective."""
    if hasattr(parameter, "ds_tensor"):
        return parameter._z3_optimizer.get_full_hp_param(parameter)
    if hasattr(parameter, "_hp_mapping"):
        return parameter.get_full_hp_param()
    return parameter.detach()


def overwrite(engine: "Engine", values: dict[str, Tensor]) -> None:
    """Make the model compute with these fragments of float32 instead of its own; a collective.

    The masters stay as they are but where they are the very tensors that the model computes with: ZeRO-0.
    """
    if engine.stage == 3:
        optimizer = engine.engine.optimizer
        optimizer.checkpoint_event_prologue()  # nothing is left gathered
        for name, parameter in trainable(engine):
            parameter.ds_tensor.data.view(-1)[: values[name].numel()].copy_(values[name])
        optimizer.checkpoint_event_epilogue()  # hpZ's second copies, and small tensors that stay gathered
        return
    for name, parameter in trainable(engine):
        parameter.data.copy_(_joined(parameter, values[name]).view_as(parameter))


def _joined(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """The whole flattened parameter from every rank's fragment."""
    if not hasattr(parameter, "_hp_mapping"):
        return values
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    start = fragment(parameter).start
    whole[start : start + values.numel()].copy_(values)
    dist.all_reduce(whole, group=parameter._dp_group)
    return whole


def pieces(engine: "Engine") -> list[tuple[str, tuple[int, ...], Tensor, int]]:
    """Of each trainable parameter its plain name, the whole's shape, this rank's stretch and its start."""
    return [(plain_name(name), shape_of(p), *fragment(p)) for name, p in trainable(engine)]


def gathered(engine: "Engine") -> dict[str, Tensor]:
    """The float32 masters by plain names, in rank 0's memory, one by one; empty elsewhere. A collective."""
    is_main = dist.get_rank() == 0
    found = {}
    for name, parameter in trainable(engine):
        values = whole(parameter)
        if is_main:
            found[plain_name(name)] = values.to("cpu", copy=True)
    return found
