"""LoRA adapters in one form of ours, whatever file they come from.

Letters: A [rank, in], B [out, rank]; the layer's weight [out, in] becomes W + scale * B @ A, with
scale = alpha / rank, or alpha / sqrt(rank) for rslora (Kalajdzievski 2023, arXiv 2312.03732).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wan_ds.errors import CheckpointError
from wan_ds.interop.lora_names import is_linear
from wan_ds.interop.names import some

Shapes = Mapping[
    str, tuple[int, int]
]  # of linear layers' weights: [out, in], by module in diffusers' spelling


@dataclass(eq=False)
class Lora:
    """An adapter of one expert.

    ``tensors``: fp32 `<module>.lora_A.weight` and `<module>.lora_B.weight`, modules as diffusers spells them.
    ``metadata`` says how it was made: expert, boundary, shift, base, rank, alpha, step, model. Its rank and
    alpha are those that trained; the numbers in force are ``ranks`` and ``alphas``, by module.
    """

    tensors: dict[str, Tensor]
    ranks: dict[str, float]
    alphas: dict[str, float]
    rslora: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    where: str = "this adapter"  # begins the message of an error

    @property
    def modules(self) -> list[str]:
        return sorted({key.rpartition(".lora_")[0] for key in self.tensors})

    def pair(self, module: str) -> tuple[Tensor, Tensor]:
        """A and B."""
        return self.tensors[f"{module}.lora_A.weight"], self.tensors[f"{module}.lora_B.weight"]

    def scale(self, module: str) -> float:
        rank = self.ranks[module]
        return self.alphas[module] / (math.sqrt(rank) if self.rslora else rank)

    def delta(self, module: str) -> Tensor:
        """What is added to the layer's weight: fp32 [out, in]."""
        a, b = self.pair(module)
        return self.scale(module) * (b @ a)

    def check(self) -> None:
        """Raise CheckpointError if there is no adapter or half of one, or an empty or non-finite tensor."""
        found = [problem for module in self.modules if (problem := self._problem(module))]
        if not self.tensors:
            raise CheckpointError(f"{self.where}: no tensor of an adapter is in it")
        if found:
            raise CheckpointError(f"{self.where}: {some(found)}")

    def _problem(self, module: str) -> str | None:
        if not is_linear(module):
            return f"{module!r} is no linear layer of a Wan transformer"
        absent = [part for part in "AB" if f"{module}.lora_{part}.weight" not in self.tensors]
        if absent:
            return f"{module} has no lora_{' and no lora_'.join(absent)}"
        a, b = self.pair(module)
        shapes = f"{module}: A has shape {tuple(a.shape)} and B {tuple(b.shape)}"
        if a.numel() == 0 or b.numel() == 0:
            return f"{shapes}: empty, as ZeRO-3 leaves what was not gathered before it was saved"
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            return f"{shapes}, not [rank, in] and [out, rank]"
        if self.ranks.get(module) != a.shape[0]:
            return f"{shapes}, and its rank is said to be {self.ranks.get(module)}"
        if not torch.isfinite(a).all() or not torch.isfinite(b).all():
            return f"{module} holds NaN or infinity"
        alpha = self.alphas.get(module)
        if alpha is None or not math.isfinite(alpha) or alpha <= 0:
            return f"{module} has alpha {alpha}; it must be a finite number above 0"
        return None


def lora_of(
    tensors: Mapping[str, Tensor],
    alphas: Mapping[str, float],
    *,
    rslora: bool = False,
    metadata: Mapping[str, str] | None = None,
    where: str = "this adapter",
) -> Lora:
    """An adapter of floating point tensors, whose ranks are theirs, checked; raises CheckpointError."""
    whole = [f"{key} ({tensor.dtype})" for key, tensor in tensors.items() if not tensor.is_floating_point()]
    if whole:
        raise CheckpointError(f"{where}: not floating point: {some(whole)}")
    kept = {key: tensor.detach().float().contiguous() for key, tensor in sorted(tensors.items())}
    lora = Lora(kept, ranks_of(kept), dict(alphas), rslora, dict(metadata or {}), where)
    lora.check()
    return lora


def ranks_of(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The rank of each module that has an A."""
    ends = ".lora_A.weight"
    return {
        key.removesuffix(ends): float(a.shape[0] if a.ndim else 0)
        for key, a in tensors.items()
        if key.endswith(ends)
    }


def linear_shapes(weights: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of the linear layers that an adapter may change, of a transformer's tensors by name.

    ``weights``: whatever has a ``shape``, under diffusers' names, as a state dict or a file's header has it.
    """
    shapes = {name.removesuffix(".weight"): tuple(one.shape) for name, one in weights.items()}
    return {module: shape for module, shape in shapes.items() if is_linear(module) and len(shape) == 2}


def refuse_unfit(lora: Lora, shapes: Shapes) -> None:
    """CheckpointError that names both sides if the adapter is of another architecture than the model."""
    unfit = []
    for module in lora.modules:
        a, b = lora.pair(module)
        made_for = (b.shape[0], a.shape[1])
        if module not in shapes:
            unfit.append(f"{module} {made_for} is not in the model")
        elif made_for != tuple(shapes[module]):
            unfit.append(f"{module} is for a weight of {made_for}, the model's has {tuple(shapes[module])}")
    if unfit:
        base = f" (made on {lora.metadata['base']})" if "base" in lora.metadata else ""
        raise CheckpointError(f"{lora.where}{base} does not fit this model: {some(unfit)}")
