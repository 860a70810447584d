"""Regional compilation: what is done to single tokens in compiled graphs, attention and exchanges outside."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from shutil import which
from typing import Any

import torch
from torch import Tensor

from wan_ds.errors import ConfigError
from wan_ds.models.transformer import WanTransformer

# How many graphs one piece of a block may have; other streams then compute uncompiled, and torch warns once.
# Two serve all streams that have as many clips and segments, these all of one length or not.
GRAPHS = 64


def compile_blocks(model: WanTransformer, backend: str = "inductor") -> None:
    """Let blocks compute in compiled graphs where gradients are wanted, all blocks in the same ones.

    Attention stays outside, and with it every exchange between ranks and all that selective recomputation
    keeps: a compiled exchange of DeepSpeed's once gave zero gradients without an error
    (https://github.com/deepspeedai/DeepSpeed/pull/8491), and each set of lengths would be a graph of its own.
    Without gradients blocks compute uncompiled: evaluation and sampling have streams of their own.

    Under ZeRO-3 whole blocks must be fetched at once (DeepSpeed's leaf_module): its calls for single layers
    would cut the graphs to single layers, and be compiled themselves.
    """
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    for block in model.blocks:
        block.forward = _Compiled(block.forward, backend)


def refuse_missing_compiler(device: torch.device) -> None:
    """ConfigError if graphs for this device cannot be compiled here; before any weight is read."""
    variable, usual = ("CXX", ["g++"]) if device.type == "cpu" else ("CC", ["gcc", "clang"])
    compilers = [os.environ[variable]] if os.environ.get(variable) else usual
    if not any(which(name) for name in compilers):
        lacking = f"a compiler, and there is no {' or '.join(compilers)} (${variable} names another)"
    elif device.type != "cpu" and find_spec("triton") is None:
        lacking = "triton, which is not installed"
    else:
        return
    raise ConfigError(f"train.compile=blocks: needs {lacking}; type train.compile=none, or install it")


class _Compiled:
    """A block's forward, given nothing that differs between two blocks and would make two graphs of one."""

    def __init__(self, forward: Callable[..., Tensor], backend: str) -> None:
        self._forward = forward
        self._graphs = torch.compile(forward, backend=backend)

    def __call__(self, hidden_states: Tensor, *arguments: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self._forward(hidden_states, *arguments)
        text, image, modulation, rope, part, attend, attention, feed = arguments
        if hidden_states._is_view():  # the first block's input alone
            hidden_states = hidden_states.clone()
        turns = torch.view_as_real(rope)
        return self._graphs(
            hidden_states, text, image, modulation, turns, part, _Apart(attend), _Apart(attention), feed
        )


class _Apart:
    """A function that is called as it is, outside of the graph around the call, whichever function it is."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function

    @torch.compiler.disable
    def __call__(self, *arguments: Any) -> Tensor:
        return self._function(*arguments)
