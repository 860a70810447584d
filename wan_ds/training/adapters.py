"""An expert's adapter in a checkpoint: written from the float32 shards, compared with them, and read back.

<expert>/adapter.safetensors     as diffusers' load_lora_weights opens it
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wan_ds.errors import CheckpointError
from wan_ds.interop import lora as files
from wan_ds.interop.lora import Lora
from wan_ds.interop.tensor_files import Stored
from wan_ds.models.adapter import AdapterSettings, some
from wan_ds.models.weights import Described, Source
from wan_ds.training import checkpoint

FILE = "adapter.safetensors"
_DIALECT = "diffusers"


@dataclass(frozen=True)
class Adapter:
    """What an expert's adapter is, beside its numbers."""

    settings: AdapterSettings
    metadata: Mapping[str, str]  # expert, boundary, shift, base, rank, alpha, model

    def lora(self, tensors: Mapping[str, Tensor], step: int, where: str = "this adapter") -> Lora:
        """The adapter of these tensors, by plain names; raises CheckpointError if they are none."""
        modules = dict.fromkeys(name.rpartition(".lora_")[0] for name in tensors)
        return files.lora_of(
            tensors,
            {module: self.settings.alpha_of(module) for module in modules},
            rslora=self.settings.rslora,
            metadata=dict(self.metadata) | {"step": str(step)},
            where=where,
        )


def write(folder: Path, lora: Lora) -> None:
    """Write the ready file into an expert's folder; raises CheckpointError, OSError."""
    files.write_file(lora, folder / FILE, _DIALECT)


def read(folder: Path) -> Lora:
    """The ready file of an expert's folder; raises CheckpointError."""
    path = folder / FILE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the adapter that this run trains")
    return files.read(path)


def of_run(run_dir: Path, expert: str) -> Lora:
    """An expert's adapter in the newest checkpoint of a run; raises CheckpointError."""
    return read(checkpoint.find(run_dir, "latest") / expert)


def refuse_unequal(
    lora: Lora, adapter: Adapter, shards: Iterable[tuple[str, tuple[int, ...], Tensor, int]]
) -> None:
    """CheckpointError unless the file is the adapter that is in training, to the bit.

    ``shards``: of each tensor its plain name, the shape of the whole, this rank's stretch and where it
    starts. Every rank compares its own, so that no gathering stands between.
    """
    shards = list(shards)
    shapes = {name: shape for name, shape, _, _ in shards}
    absent = [name for name in shapes if name not in lora.tensors]
    unexpected = [name for name in lora.tensors if name not in shapes]
    if absent or unexpected:
        parts = [f"lacks {some(absent)}"] if absent else []
        parts += [f"has {some(unexpected)}, which does not train"] if unexpected else []
        raise CheckpointError(f"{lora.where} {' and '.join(parts)}")
    for name, shape, values, start in shards:
        found = lora.tensors[name]
        if tuple(found.shape) != tuple(shape):
            raise CheckpointError(f"{lora.where}: {name} is {list(found.shape)}, in training {list(shape)}")
        stretch = found.flatten()[start : start + values.numel()]
        if not torch.equal(stretch.view(torch.int32), values.cpu().view(torch.int32)):
            raise CheckpointError(f"{lora.where}: {name} differs from what is in training")
    for module in lora.modules:
        if abs(lora.scale(module) / adapter.settings.scale_of(module) - 1) > 1e-6:
            raise CheckpointError(
                f"{lora.where}: {module} has the scale {lora.scale(module):g}, in training "
                f"{adapter.settings.scale_of(module):g}"
            )


class Merged:
    """A base with an adapter folded into it, one tensor at a time: W + scale B A in float32."""

    def __init__(self, base: Source, lora: Lora) -> None:
        """Raises CheckpointError if the adapter is not for this base."""
        files.refuse_unfit(lora, files.linear_shapes(base.tensors))
        self.where = f"{base.where} with {lora.where}"
        self.architecture = getattr(base, "architecture", {})
        self._base, self._lora = base, lora
        self._modules = {f"{module}.weight": module for module in lora.modules}
        self.tensors: dict[str, Described] = {
            name: Stored(tuple(one.shape), torch.float32) if name in self._modules else one
            for name, one in base.tensors.items()
        }

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return dict(self._merged(list(names)))

    def _merged(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._base.read(names).items():
            module = self._modules.get(name)
            yield name, tensor if module is None else tensor.float() + self._lora.delta(module)
