"""What backward computes again instead of keeping it: nothing, every block, or every block but its attention.

Selective recomputation keeps what self-attention gave, [tokens, width] a block, and computes the rest of the
block again: at long clips attention is most of the arithmetic and little of the memory.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from wan_ds.models.attention import Attend
from wan_ds.models.transformer import WanTransformer, WanTransformerBlock

# The operators that compute attention, one for each kind of kernel; what they give is what backward needs.
ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
# DeepSpeed's functional exchange gives a tensor of its own. A collective of torch's fills one that it was
# given: kept, it would be whatever that memory holds by then, and gradients silently wrong.
EXCHANGE = frozenset({"deepspeed::dim_zero_all_to_all"})


def recompute(model: WanTransformer, kind: str, *, keep_exchange: bool = False) -> None:
    """Let backward compute blocks again.

    Args:
        model: without gradients it computes as ever.
        kind: ``none``; ``full``, where a block keeps its input alone; ``selective``, where it keeps what its
            self-attention gave as well.
        keep_exchange: with ``selective``, keep also what the ranks of a clip exchanged, so that it is not
            sent again. Of the exchange ``fused``; any other has nothing that can be kept.

    Raises:
        ValueError: another kind, or ``keep_exchange`` without ``selective``.
    """
    if kind not in ("none", "full", "selective"):
        raise ValueError(f"recompute={kind}: choose none, full or selective")
    if keep_exchange and kind != "selective":
        raise ValueError(f"keep_exchange: only selective recomputation keeps anything, and this is {kind}")
    if kind == "none":
        model.disable_gradient_checkpointing()
        return
    # Not reentrant: with an adapter no input of the first block needs a gradient.
    again = partial(checkpoint, use_reentrant=False)
    if kind == "selective":
        again = partial(_selective, again, ATTENTION | EXCHANGE if keep_exchange else ATTENTION)
    model.enable_gradient_checkpointing(again)


def _selective(  # noqa: PLR0913 - what a block takes
    again: Callable[..., Tensor],
    kept: frozenset[str],
    block: WanTransformerBlock,
    *arguments: Any,
) -> Tensor:
    *others, attend, attention = arguments
    return again(block, *others, _Remembered(attend, kept), attention)


class _Remembered:
    """Self-attention that gives, from its second call on, what some of its operators gave in the first.

    It sees only what happens inside the call: ZeRO-3's hooks, which gather and release weights between, are
    none of it.
    """

    def __init__(self, attend: Attend, operators: frozenset[str]) -> None:
        self._attend = attend
        self._operators = operators
        self._results: list[Any] | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._results is None:
            self._results = []
            mode: TorchDispatchMode = _Keeping(self._operators, self._results)
        else:
            mode = _Recalling(self._operators, iter(self._results))
        with mode:
            return self._attend(query, key, value)


class _Keeping(TorchDispatchMode):
    def __init__(self, operators: frozenset[str], results: list[Any]) -> None:
        super().__init__()
        self._operators, self._results = operators, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        result = func(*args, **(kwargs or {}))
        if func.name() in self._operators:
            self._results.append(_alias(result))
        return result


class _Recalling(TorchDispatchMode):
    def __init__(self, operators: frozenset[str], results: Iterator[Any]) -> None:
        super().__init__()
        self._operators, self._results = operators, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        if func.name() in self._operators:
            return _alias(next(self._results))
        return func(*args, **(kwargs or {}))


def _alias(result: Any) -> Any:
    """The same numbers as other tensor objects: autograd writes into those that it is given."""
    return tree_map_only(Tensor, torch.detach, result)
