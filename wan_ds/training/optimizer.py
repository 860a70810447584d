"""The optimizer of one expert, its decay groups chosen by name before ZeRO partitions the parameters.

Any torch optimizer whose numbers are elementwise serves: ZeRO steps flat shards, so what is one matrix to
the model is a stretch of a vector to the optimizer. Two that are not offered:

Muon orthogonalises whole matrices. DeepSpeed's own (0.19.8) needs `reduce_scatter: false` under ZeRO-3, where
at sp 2 a tensor larger than the bucket gets half its gradient, and takes its matrices by number of axes and
by the word "embed" in names: Wan's modulation tables would be among them.

8-bit Adam quantises moments in blocks of the tensor that it is given. Blocks of a shard are other ones at
another number of ranks, so the same run on more ranks would be another run. Sharding the moments over ranks,
or `optimizer=cpu_adamw`, saves more."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

UNDECAYED = ("bias", "scale_shift_table")


def is_decayed(name: str) -> bool:
    """Whether weight decay acts on the parameter: not on biases, norms and modulation tables."""
    return not name.endswith(UNDECAYED) and ".norm" not in name


def build_optimizer(model: nn.Module, factory: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """``factory`` over two groups: weights that decay, and those that do not; an adapter's all decay."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trainable if is_decayed(name)]
    undecayed = [p for name, p in trainable if not is_decayed(name)]
    return factory([{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}])


def fused_adamw(
    params: Iterable[dict[str, Any]],
    lr: float = 1e-5,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW in few GPU kernels, compiled at its first use; ConfigError where there is no GPU."""
    from wan_ds.training import engine  # only now: it takes seconds, and settings are checked without it

    return engine.fused_adamw(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def cpu_adamw(
    params: Iterable[dict[str, Any]],
    lr: float = 1e-5,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for masters and moments in CPU memory, compiled at its first use, which needs g++.

    ConfigError where it cannot be compiled.
    """
    from wan_ds.training import engine

    return engine.cpu_adamw(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def complete_plain_step(optimizer: torch.optim.Optimizer, max_grad_norm: float) -> None:
    """Give a ZeRO-0 optimizer what ZeRO's own step does: the norm, clipping, and skipping what is not finite.

    DeepSpeed reads ``overflow`` and ``_global_grad_norm`` from whatever optimizer it holds.
    """
    update = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        optimizer._global_grad_norm = norm
        optimizer.overflow = not torch.isfinite(norm).item()  # the one sync of a ZeRO-0 step
        if optimizer.overflow:
            return None
        if max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        return update(*args, **kwargs)

    optimizer.step = step
