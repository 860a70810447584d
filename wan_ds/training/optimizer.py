"""The optimizer of one expert, its decay groups chosen by name before ZeRO partitions the parameters."""

from collections.abc import Callable

import torch
from torch import nn

UNDECAYED = ("bias", "scale_shift_table")


def is_decayed(name: str) -> bool:
    """Whether weight decay acts on the parameter: not on biases, norms and modulation tables."""
    return not name.endswith(UNDECAYED) and ".norm" not in name


def build_optimizer(model: nn.Module, factory: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """``factory`` over two groups: weights that decay, and those that do not."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trainable if is_decayed(name)]
    undecayed = [p for name, p in trainable if not is_decayed(name)]
    return factory([{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}])
