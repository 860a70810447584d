"""Which expert works at which step, and how many steps each will take: known before the run starts.

The experts of Wan 2.2 share no weights, so a step trains one of them. It is chosen once per optimizer step
from a stream that is a function of (seed, step) alone, with the share of the timestep distribution that its
interval holds; sigma is then drawn from the distribution given that interval, so the sigmas of the whole
run follow the distribution exactly."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wan_ds import streams
from wan_ds.errors import ConfigError
from wan_ds.flow.timesteps import Interval, Timesteps, expert_intervals, mass

POLICIES = ("natural", "balanced", "fixed", "alternate")


@dataclass(frozen=True)
class Routing:
    """The schedule of experts of one run.

    ``shares`` maps the experts that train to their expected share of the steps; one or two experts, summing
    to 1. Where there are two, ``policy`` chooses: ``natural`` and ``fixed`` draw each step by itself, with
    the distribution's own share or a given one; ``balanced`` diffuses the error, so that no expert is ever
    more than half a step from its share; ``alternate`` gives each ``run_length`` steps in turn."""

    timesteps: Timesteps
    shares: dict[str, float]
    intervals: dict[str, Interval]
    policy: str
    seed: int
    run_length: int = 1

    def expert_of(self, step: int) -> str:
        """The expert of the step that follows ``step`` finished ones; equal on every rank."""
        first, *others = self.shares
        return first if not others or self._is_first(self.shares[first], step) else others[0]

    def _is_first(self, share: float, step: int) -> bool:
        if self.policy == "alternate":
            return step // self.run_length % 2 == 0
        if self.policy == "balanced":
            return math.floor((step + 1) * share + 0.5) > math.floor(step * share + 0.5)
        return streams.uniform(self.seed, "expert", step) < share

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


def plan_routing(  # noqa: PLR0913 - one argument a setting
    timesteps: Timesteps,
    *,
    boundary: float | None,
    experts: Sequence[str] | None,
    policy: str,
    seed: int,
    high_noise_share: float | None = None,
    run_length: int | None = None,
) -> Routing:
    """The routing of the experts that train (null: all) under the one stored boundary.

    ``high_noise_share`` belongs to the policy ``fixed`` and ``run_length`` to ``alternate``. Raises
    ConfigError for what they cannot be, and where an expert would never be chosen.
    """
    intervals = expert_intervals(boundary)
    _refuse_policy(policy, high_noise_share, run_length)
    unknown = [name for name in experts or () if name not in intervals]
    if unknown:
        raise ConfigError(f"train.experts: {unknown[0]} is no expert; there are {', '.join(intervals)}")
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
    if len(shares) == 2 and policy in ("fixed", "alternate"):
        high = 0.5 if policy == "alternate" else high_noise_share
        shares = {"high_noise": high, "low_noise": 1 - high}
    return Routing(timesteps, shares, intervals, policy, seed, run_length or 1)


def _refuse_policy(policy: str, high_noise_share: float | None, run_length: int | None) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"train.routing.policy={policy}: must be {', '.join(POLICIES)}")
    if policy == "fixed" and not (high_noise_share is not None and 0 < high_noise_share < 1):
        raise ConfigError(f"train.routing.high_noise_share={high_noise_share}: must lie between 0 and 1")
    if run_length is not None and run_length < 1:
        raise ConfigError(f"train.routing.run_length={run_length}: must be at least 1")
