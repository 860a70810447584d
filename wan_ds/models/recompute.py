"""What backward computes again instead of keeping it: nothing, every block, or every block but its attention.

Selective recomputation keeps what self-attention gave, [tokens, width] a block, and computes the rest of the
block again: at long clips attention is most of the arithmetic and little of the memory. It may keep as much
of the feed-forward: its second product, which backward needs for the gradient of the gate behind it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

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


def recompute(
    model: WanTransformer, kind: str, *, keep_exchange: bool = False, keep_ffn: bool = False
) -> None:
    """Let backward compute blocks again.

    Args:
        model: without gradients it computes as ever.
        kind: ``none``; ``full``, where a block keeps its input alone; ``selective``, where it keeps what its
            self-attention gave as well.
        keep_exchange: with ``selective``, keep also what the ranks of a clip exchanged, so that it is not
            sent again. Of the exchange ``fused``; any other has nothing that can be kept.
        keep_ffn: with ``selective``, keep also what the feed-forward gave.

    Raises:
        ValueError: another kind, or something to keep without ``selective``.
    """
    if kind not in ("none", "full", "selective"):
        raise ValueError(f"recompute={kind}: choose none, full or selective")
    if (keep_exchange or keep_ffn) and kind != "selective":
        raise ValueError(f"only selective recomputation keeps anything of a block, and this is {kind}")
    if kind == "none":
        model.disable_gradient_checkpointing()
        return
    # Not reentrant: with an adapter no input of the first block needs a gradient.
    again = partial(checkpoint, use_reentrant=False)
    if kind == "selective":
        operators = ATTENTION | EXCHANGE if keep_exchange else ATTENTION
        width = model.config.num_attention_heads * model.config.attention_head_dim
        again = partial(_selective, again, operators, width if keep_ffn else None)
    model.enable_gradient_checkpointing(again)


def _selective(
    again: Callable[..., Tensor],
    operators: frozenset[str],
    width_of_ffn: int | None,
    block: WanTransformerBlock,
    *arguments: Any,
) -> Tensor:
    *others, attend, attention, feed = arguments
    attend = _Remembered(attend, lambda func, args: func.name() in operators)  # noqa: ARG005
    if width_of_ffn is not None:
        # bias, input and weight of the one linear layer there that gives the model's width
        feed = _Remembered(
            feed, lambda func, args: func.name() == "aten::addmm" and args[2].shape[1] == width_of_ffn
        )
    return again(block, *others, attend, attention, feed)


Choice = Callable[[Any, tuple], bool]  # whether the result of an operator, called so, is remembered


class _Remembered:
    """A function that gives, from its second call on, what some of its operators gave in the first."""

    def __init__(self, function: Callable[..., Tensor], is_kept: Choice) -> None:
        self._function = function
        self._is_kept = is_kept
        self._results: list[Any] | None = None

    def __call__(self, *arguments: Any) -> Tensor:
        if self._results is None:
            self._results = []
            mode: TorchDispatchMode = _Keeping(self._is_kept, self._results)
        else:
            mode = _Recalling(self._is_kept, iter(self._results))
        with mode:
            return self._function(*arguments)


class _Keeping(TorchDispatchMode):
    def __init__(self, is_kept: Choice, results: list[Any]) -> None:
        super().__init__()
        self._is_kept, self._results = is_kept, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        result = func(*args, **(kwargs or {}))
        if self._is_kept(func, args):
            self._results.append(_alias(result))
        return result


class _Recalling(TorchDispatchMode):
    def __init__(self, is_kept: Choice, results: Iterator[Any]) -> None:
        super().__init__()
        self._is_kept, self._results = is_kept, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        if self._is_kept(func, args):
            return _alias(next(self._results))
        return func(*args, **(kwargs or {}))


def _alias(result: Any) -> Any:
    """The same numbers as other tensor objects: autograd writes into those that it is given."""
    return tree_map_only(Tensor, torch.detach, result)
