"""The numbers of each step: reported from anywhere as they are, read from the device together.

Reading one number from a GPU makes the host wait for everything queued before it. So values stay where they
are until `flush`, which brings the values of all pending steps over in one transfer.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

SIGMA_BINS = 10


class LossBySigma(NamedTuple):
    """Losses by noise level; both `[10]` and float, so that `torch.stack` makes one all-reduce of them."""

    sums: Tensor
    counts: Tensor


Value = Tensor | LossBySigma | float | int | str


def loss_by_sigma(sigma: Tensor, loss: Tensor) -> LossBySigma:
    """Sum and count of the clips' losses in ten bins of sigma; bin k holds `k/10 <= sigma < (k+1)/10`.

    `sigma` and `loss` are `[n]`, n may be 0. Sigma 1 belongs to the last bin. Reads nothing from the device.
    """
    index = (sigma * SIGMA_BINS).floor().clamp(0, SIGMA_BINS - 1).long()
    inside = index[:, None] == torch.arange(SIGMA_BINS, device=sigma.device)
    # A choice, not a product with 0 and 1: one clip's NaN must not reach the other bins.
    sums = torch.where(inside, loss.detach()[:, None], 0.0).sum(dim=0)
    return LossBySigma(sums, inside.sum(dim=0).to(sums.dtype))


class Meters:
    """Collects values by step; `flush` turns them into one object per step."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, Value]] = {}
        self._flushed = -1

    def add(self, step: int, values: Mapping[str, Value]) -> None:
        """Notes values of `step`; a later call for the step adds to its object and overwrites equal names.

        Tensors have one element, and what they hold now is what counts: they may be changed in place later.
        A `LossBySigma` becomes a mean and a count for each bin that holds a clip.
        """
        if step <= self._flushed:
            raise ValueError(
                f"step {step} is already written (up to step {self._flushed}); its object cannot grow"
            )
        if "step" in values:
            raise ValueError("'step' is the object's own key and comes from the argument")
        kept = self._steps.setdefault(step, {})
        for name, value in values.items():
            if isinstance(value, LossBySigma):
                value = LossBySigma(*(part.detach().clone() for part in value))
            elif isinstance(value, Tensor):
                value = value.detach().reshape(()).clone()
            kept[name] = value

    def flush(self) -> list[dict[str, float | int | str]]:
        """The pending steps' objects in order, `step` first; waits for each device once.

        A value that is not finite is left out: JSON has no word for it.
        """
        steps = sorted(self._steps.items())
        self._steps = {}
        tensors = [
            part
            for _, values in steps
            for value in values.values()
            if isinstance(value, Tensor | LossBySigma)
            for part in (value if isinstance(value, LossBySigma) else (value,))
        ]
        numbers = iter(_read(tensors))
        records = []
        for step, values in steps:
            record: dict[str, float | int | str] = {"step": step}
            for name, value in values.items():
                if isinstance(value, LossBySigma):
                    record.update(_expand(name, next(numbers), next(numbers)))
                else:
                    number = next(numbers) if isinstance(value, Tensor) else value
                    if not isinstance(number, float) or math.isfinite(number):
                        record[name] = number
            records.append(record)
        if steps:
            self._flushed = steps[-1][0]
        return records


def _expand(name: str, sums: list[float], counts: list[float]) -> dict[str, float | int]:
    """The bins that hold clips: their mean loss, unless it is not finite, and how many clips they hold."""
    found: dict[str, float | int] = {}
    for k, (total, count) in enumerate(zip(sums, counts, strict=True)):
        if count > 0:
            label = f"{name}/{k / SIGMA_BINS:.1f}-{(k + 1) / SIGMA_BINS:.1f}"
            if math.isfinite(total):
                found[label] = total / count
            found[f"{label}/count"] = round(count)
    return found


def _read(tensors: list[Tensor]) -> list[float | int | list[float]]:
    """The tensors' values on the host, numbers for 0-d ones; one transfer per device, whatever the dtypes.

    Values travel as float64, which holds every float32 and every integer up to 2^53 exactly.
    """
    values: list = [None] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        # By dtype first: concatenating different ones would round integers to float32.
        groups: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.device == device:
                groups.setdefault(tensor.dtype, []).append(index)
        order = [index for group in groups.values() for index in group]
        flat = torch.cat(
            [torch.cat([tensors[index].reshape(-1) for index in group]).double() for group in groups.values()]
        ).tolist()
        start = 0
        for index in order:
            tensor = tensors[index]
            part = flat[start : start + tensor.numel()]
            start += tensor.numel()
            if tensor.dim():
                values[index] = part
            else:
                values[index] = part[0] if tensor.dtype.is_floating_point else int(part[0])
    return values
