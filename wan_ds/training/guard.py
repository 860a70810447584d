"""A check of each expert's first steps: what should train trains, what should not does not."""

import torch
import torch.distributed as dist

from wan_ds.errors import TrainingError
from wan_ds.training.engine import Engine

GUARDED_STEPS = 3  # a zero-initialised head lets gradients through only after its own first step


class FirstSteps:
    """Watches an expert's first applied steps with a learning rate above zero.

    After them every trainable parameter must have had a finite, non-zero gradient and have moved, and every
    frozen one must be as it was; else TrainingError names those that differ. All ranks see the same and
    raise together. """

    def __init__(self, expert: str, engine: Engine) -> None:
        self._expert = expert
        self._engine = engine
        self._steps_left = GUARDED_STEPS
        self._names = [name for name, _ in engine.parameters()]
        self._with_gradient = torch.zeros(len(self._names), dtype=torch.bool)
        self._before = self._hashes()

    @property
    def is_watching(self) -> bool:
        return self._steps_left > 0

    def look_at_gradients(self) -> None:
        """Note which parameters have a gradient that is finite and not zero; called inside the engine's
        step."""
        for index, (_, parameter) in enumerate(self._engine.parameters()):
            if parameter.requires_grad:
                gradient = self._engine.full_gradient(parameter)
                if gradient is not None and gradient.isfinite().all() and gradient.any():
                    self._with_gradient[index] = True

    def after_step(self, applied: bool, learning_rate: float) -> None:
        """Count the step and, after the last one watched, judge."""
        if not (applied and learning_rate > 0):
            return
        self._steps_left -= 1
        if self.is_watching:
            return
        moved = self._hashes() != self._before
        flags = torch.stack([self._with_gradient, moved]).to(torch.uint8)
        flags = flags.to(next(iter(self._engine.parameters()))[1].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        self._raise_for(*flags.bool().tolist())

    def _raise_for(self, with_gradient: list[bool], moved: list[bool]) -> None:
        trainable = {name for name, parameter in self._engine.parameters() if parameter.requires_grad}
        faults = {
            "trainable parameters without a finite, non-zero gradient": [
                name
                for name, flag in zip(self._names, with_gradient, strict=True)
                if name in trainable and not flag
            ],
            "trainable parameters that did not move": [
                name for name, flag in zip(self._names, moved, strict=True) if name in trainable and not flag
            ],
            "frozen parameters that moved": [
                name for name, flag in zip(self._names, moved, strict=True) if name not in trainable and flag
            ],
        }
        found = [f"{len(names)} {what} ({', '.join(names[:5])})" for what, names in faults.items() if names]
        if found:
            raise TrainingError(f"{self._expert}, after its first {GUARDED_STEPS} steps: {'; '.join(found)}")

    def _hashes(self) -> torch.Tensor:
        """A hash per parameter of what this rank holds of it."""
        shards = (self._engine.shard(parameter) for _, parameter in self._engine.parameters())
        return torch.tensor([hash(torch.hash_tensor(shard.detach()).item()) for shard in shards])
