"""Distributions of sigma, and exact draws from one expert's interval of them.

A distribution has two methods, inverse to each other, both float64 in and out:
``quantile(u)``, the sigma below which a share u of the draws lies, and ``cdf(sigma)``.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from wan_ds.flow.path import shifted, unshifted

MODE_SCALE_LIMIT = 2 / (math.pi - 2)
BISECTIONS = 64  # halvings of [0, 1]: beyond the last bit of float64


class Timesteps(Protocol):
    """What a distribution of sigma must be able to do."""

    def quantile(self, u: torch.Tensor) -> torch.Tensor: ...

    def cdf(self, sigma: torch.Tensor) -> torch.Tensor: ...


def _check_shift(shift: float) -> None:
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"timesteps.shift={shift} must be a finite number above 0; 1 leaves sigma as it is")


@dataclass(frozen=True)
class Uniform:
    """sigma = shifted(u) with u uniform on [0, 1]; its median is shift / (1 + shift)."""

    shift: float = 1.0

    def __post_init__(self) -> None:
        _check_shift(self.shift)

    def quantile(self, u: torch.Tensor) -> torch.Tensor:
        return shifted(u.double(), self.shift)

    def cdf(self, sigma: torch.Tensor) -> torch.Tensor:
        return unshifted(sigma.double(), self.shift)


@dataclass(frozen=True)
class LogitNormal:
    """logit(sigma) is normal, then warped: a shift s moves the logit's mean by ln s.

    Esser et al. 2024, section 3.1.
    """

    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0

    def __post_init__(self) -> None:
        _check_shift(self.shift)
        if not (math.isfinite(self.std) and self.std > 0):
            raise ValueError(f"timesteps.std={self.std} must be a finite number above 0")

    def quantile(self, u: torch.Tensor) -> torch.Tensor:
        logit = self.mean + math.log(self.shift) + self.std * torch.special.ndtri(u.double())
        return torch.sigmoid(logit)

    def cdf(self, sigma: torch.Tensor) -> torch.Tensor:
        logit = torch.special.logit(sigma.double())
        return torch.special.ndtr((logit - self.mean - math.log(self.shift)) / self.std)


@dataclass(frozen=True)
class Mode:
    """Draws that gather in the middle (scale > 0) or at both ends (scale < 0), then the shift.

    With u uniform, sigma = u - scale (sin^2(pi u / 2) - u) before the shift: Esser et al. 2024, eq. 20,
    written from the clean end. It is monotonic for -1 <= scale <= 2 / (pi - 2) = 1.75; 0 is `Uniform`.
    """

    scale: float = 1.29
    shift: float = 1.0

    def __post_init__(self) -> None:
        _check_shift(self.shift)
        if not -1 <= self.scale <= MODE_SCALE_LIMIT:
            raise ValueError(
                f"timesteps.scale={self.scale} must lie between -1 and {MODE_SCALE_LIMIT:.4f}, where every "
                "sigma belongs to one draw"
            )

    def quantile(self, u: torch.Tensor) -> torch.Tensor:
        return shifted(self._bent(u.double()), self.shift)

    def cdf(self, sigma: torch.Tensor) -> torch.Tensor:
        """By bisection: the bend has no inverse in closed form."""
        wanted = unshifted(sigma.double(), self.shift)
        low, high = torch.zeros_like(wanted), torch.ones_like(wanted)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            is_below = self._bent(middle) < wanted
            low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
        return torch.where(
            wanted <= 0, low, torch.where(wanted >= 1, torch.ones_like(high), (low + high) / 2)
        )

    def _bent(self, u: torch.Tensor) -> torch.Tensor:
        bent = u - self.scale * (torch.sin(math.pi / 2 * u).square() - u)
        return bent.clamp(0, 1)  # the sine of pi / 2 may miss 1 by the last bit


@dataclass(frozen=True)
class Interval:
    """The noise levels of one expert: [low, high), or [low, 1] at the noisy end."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(
                f"an interval of sigma needs 0 <= low < high <= 1, not [{self.low}, {self.high})"
            )

    def contains(self, sigma: torch.Tensor) -> torch.Tensor:
        """Whether each sigma is this expert's, compared in sigma's own dtype.

        Wan's pipelines compare timesteps in the same way.
        """
        below = sigma <= 1 if self.high == 1 else sigma < torch.tensor(self.high, dtype=sigma.dtype)
        return (sigma >= torch.tensor(self.low, dtype=sigma.dtype)) & below

    def to_float32(self, sigma: torch.Tensor) -> torch.Tensor:
        """Round float64 draws to float32 without leaving the interval, whose ends round too."""
        rounded = sigma.to(torch.float32)
        low, high = torch.tensor([self.low, self.high], dtype=torch.float32)
        rounded = torch.where(rounded < low, low, rounded)
        if self.high < 1:
            rounded = torch.where(rounded >= high, torch.nextafter(high, torch.zeros(())), rounded)
        return rounded


def expert_intervals(boundary: float | None) -> dict[str, Interval]:
    """The interval of each expert in shifted sigma; the high-noise expert owns the boundary itself.

    See wan.md, section 3.1.
    """
    if boundary is None:
        return {"all": Interval(0.0, 1.0)}
    if not 0 < boundary < 1:
        raise ValueError(
            f"model.boundary={boundary} must lie inside (0, 1): it is a sigma, 0.875 for Wan 2.2 T2V"
        )
    return {"high_noise": Interval(boundary, 1.0), "low_noise": Interval(0.0, boundary)}


def mass(timesteps: Timesteps, interval: Interval) -> float:
    """The share of the distribution's draws that fall into the interval."""
    low, high = timesteps.cdf(torch.tensor([interval.low, interval.high], dtype=torch.float64)).tolist()
    return high - low


def truncated(timesteps: Timesteps, interval: Interval, u: torch.Tensor) -> torch.Tensor:
    """Map u, uniform on [0, 1), to float32 sigma of the distribution given that it falls into the interval.

    Inverse CDF between the interval's ends: no clamping, rescaling or rejection, so the shape inside is
    exact.
    """
    ends = timesteps.cdf(torch.tensor([interval.low, interval.high], dtype=torch.float64))
    return interval.to_float32(timesteps.quantile(ends[0] + (ends[1] - ends[0]) * u.double()))


def stratified(u: torch.Tensor, stratum: torch.Tensor | int, strata: int) -> torch.Tensor:
    """Move u in [0, 1) into the given one of ``strata`` equal slices of [0, 1).

    With the strata dealt out by a random permutation each draw stays uniform, and a batch covers the range
    evenly.
    """
    return (stratum + u.double()) / strata
