"""Learning-rate schedules: the factor on `optimizer.lr` as a function of one expert's own applied steps.

Built with ``steps``, the number of steps that this expert will take, so that the floor is reached on its
last one."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from wan_ds.errors import ConfigError


@dataclass(frozen=True)
class Schedule(ABC):
    """A linear warm-up over ``warmup_steps``, then a curve over the steps that are left."""

    steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < max(self.steps, 1):
            raise ConfigError(
                f"lr_schedule.warmup_steps={self.warmup_steps} does not fit into the {self.steps} steps that "
                f"an expert takes of its own; choose 0 to {max(self.steps - 1, 0)}, or raise train.steps"
            )

    def __call__(self, step: int) -> float:
        """The factor for the step that follows ``step`` applied ones, step >= 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        after_warmup = self.steps - 1 - self.warmup_steps
        return self.curve(1.0 if after_warmup <= 0 else min(1.0, (step - self.warmup_steps) / after_warmup))

    @abstractmethod
    def curve(self, progress: float) -> float:
        """The factor at a progress in [0, 1], 1 being the expert's last step."""


@dataclass(frozen=True)
class Constant(Schedule):
    """1 after the warm-up."""

    def curve(self, progress: float) -> float:  # noqa: ARG002 - every schedule is told
        return 1.0


@dataclass(frozen=True)
class _Decay(Schedule):
    floor: float = 0.0  # the factor on the expert's last step

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise ConfigError(
                f"lr_schedule.floor={self.floor} is a share of optimizer.lr; choose a number in [0, 1]"
            )

    @abstractmethod
    def falling(self, progress: float) -> float:
        """1 at progress 0, 0 at progress 1."""

    def curve(self, progress: float) -> float:
        return self.floor + (1 - self.floor) * self.falling(progress)


@dataclass(frozen=True)
class Cosine(_Decay):
    """Half a cosine from 1 to the floor."""

    def falling(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Linear(_Decay):
    """A straight line from 1 to the floor."""

    def falling(self, progress: float) -> float:
        return 1 - progress
