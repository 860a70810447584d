"""Which expert works at which step, and how many steps each will take: known before the run starts.

The experts of Wan 2.2 share no weights, so a step trains one of them. It is chosen once per optimizer step
from a stream that is a function of (seed, step) alone, with the share of the timestep distribution that its
interval holds; sigma is then drawn from the distribution given that interval, so the sigmas of the whole
run follow the distribution exactly."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from wan_ds import streams
from wan_ds.errors import ConfigError
from wan_ds.flow.timesteps import Interval, Timesteps, expert_intervals, mass


def natural(share: float, seed: int, step: int) -> bool:
    """Whether the first expert works at ``step``: an independent draw with probability ``share``."""
    return streams.uniform(seed, "expert", step) < share


def balanced(share: float, seed: int, step: int) -> bool:  # noqa: ARG001 - the same shape as every policy
    """Whether the first expert works at ``step``: error diffusion, never more than half a step from its
    share."""
    return math.floor((step + 1) * share + 0.5) > math.floor(step * share + 0.5)


POLICIES: dict[str, Callable[[float, int, int], bool]] = {"natural": natural, "balanced": balanced}


@dataclass(frozen=True)
class Routing:
    """The schedule of experts of one run.

    ``shares`` maps the experts that train to their expected share of the steps; one or two experts, summing
    to 1."""

    timesteps: Timesteps
    shares: dict[str, float]
    intervals: dict[str, Interval]
    policy: str
    seed: int

    def expert_of(self, step: int) -> str:
        """The expert of the step that follows ``step`` finished ones; equal on every rank."""
        first, *others = self.shares
        if not others or POLICIES[self.policy](self.shares[first], self.seed, step):
            return first
        return others[0]

    def counts(self, steps: int) -> dict[str, int]:
        """How many of the first ``steps`` steps each expert takes."""
        counts = dict.fromkeys(self.shares, 0)
        for step in range(steps):
            counts[self.expert_of(step)] += 1
        return counts

    def owner_of(self, sigma: float) -> str:
        """The expert whose interval holds sigma, among all that the model declares."""
        value = torch.tensor(sigma, dtype=torch.float32)
        return next(name for name, interval in self.intervals.items() if interval.contains(value))


def plan_routing(
    timesteps: Timesteps, *, boundary: float | None, experts: Sequence[str] | None, policy: str, seed: int
) -> Routing:
    """The routing of the experts that train (null: all) under the one stored boundary.

    Raises ConfigError where an expert would never be chosen.
    """
    intervals = expert_intervals(boundary)
    trained = [name for name in intervals if experts is None or name in experts]
    masses = {name: mass(timesteps, intervals[name]) for name in trained}
    idle = [name for name, share in masses.items() if not share > 0]
    if idle:
        raise ConfigError(
            f"the timestep distribution {timesteps} gives {', '.join(idle)} no noise level at "
            f"model.boundary={boundary}; change timesteps, or leave the expert out of train.experts"
        )
    total = sum(masses.values())
    shares = {name: share / total for name, share in masses.items()}
    return Routing(timesteps, shares, intervals, policy, seed)
