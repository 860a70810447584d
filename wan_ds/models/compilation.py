"""Regional compilation: the blocks' own arithmetic in compiled graphs, attention and all exchanges outside."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wan_ds.models.transformer import WanTransformer


def compile_blocks(model: WanTransformer) -> None:
    """draft"""
    for block in model.blocks:
        block.forward = _Compiled(block.forward)


class _Compiled:
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._forward = forward
        self._compiled = torch.compile(forward)

    def __call__(self, *arguments: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self._forward(*arguments)
        *others, attend, attention = arguments
        return self._compiled(*others, _Apart(attend), _Apart(attention))


class _Apart:
    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function

    @torch.compiler.disable
    def __call__(self, *arguments: Any) -> Tensor:
        return self._function(*arguments)
