"""What DeepSpeed 0.19.8 keeps of a window that an error ended, taken away, so that the next begins clean.

It knows no such call of its own: gradients wait in buckets and parameters, ZeRO-3's weights stay gathered and
its hooks count on a backward that never comes, and the next window's gradients would be added to these.
"""

from typing import Any

from torch import nn


def forget_gradients(module: nn.Module, optimizer: Any) -> None:
    """Drop the gradients of every stage, reduced or not."""
    for parameter in module.parameters():
        parameter.grad = None
        if hasattr(parameter, "grad_accum"):
            parameter.grad_accum = None
    state = getattr(optimizer, "_backward_hook_state", None)
    if state is not None:
        state.backward_active_depth = 0
        state.remaining_grad_acc_hooks = 0
        state.reset_for_new_step()
    if hasattr(optimizer, "clear_hp_grads"):  # bfloat16 parameters below ZeRO-2
        optimizer.clear_lp_grads()
        optimizer.clear_hp_grads()
    if not hasattr(optimizer, "ipg_buckets"):
        return
    optimizer.averaged_gradients = {}
    optimizer.zero_grad()
    if hasattr(optimizer, "parameter_offload"):
        _forget_partitions(optimizer)
    else:
        _forget_reductions(optimizer)


def _forget_reductions(optimizer: Any) -> None:
    """ZeRO-1 and 2: no parameter has been reduced, and no bucket is begun."""
    optimizer.micro_step_id = -1
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    optimizer.extra_large_param_to_reduce.clear()
    optimizer.previous_reduced_grads.clear()
    optimizer.all_grad_tensors = {}
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer._release_ipg_buffers()
    if optimizer.partition_gradients:
        optimizer.reset_partition_gradient_structures()
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()


def _forget_partitions(optimizer: Any) -> None:
    """ZeRO-3: the next gradients overwrite this rank's share instead of adding to it."""
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear_params()
    optimizer.param_reduce_events.clear()
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
        optimizer._offload_boundary_param_ids = set()


def release_weights(module: nn.Module, optimizer: Any, calls: list[nn.Module], depth: int) -> None:
    """ZeRO-3: give gathered weights back, and let no hook wait for a backward of the lost forward.

    ``calls``: DeepSpeed's stack of modules that are being called; ``depth``: its height outside of a forward.
    """
    del calls[depth:]
    for part in module.modules():
        if "applied_pre_backward_ref_cnt" in part.__dict__:
            part.applied_pre_backward_ref_cnt = 0
        part.ds_grads_remaining = 0
        if hasattr(part, "ds_recompute_parameters"):
            part.ds_recompute_parameters.clear()
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    coordinator.release_backward_leftovers()
    coordinator.release_and_reset_all(module)
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()  # the order of modules, of which half was seen, is recorded anew
