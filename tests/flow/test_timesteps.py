"""The distributions of sigma against closed formulas and scipy-free statistics."""

import math

import pytest
import torch

from wan_ds.flow.path import latents_from, mix, noise_from, shifted, timestep, unshifted, velocity
from wan_ds.flow.timesteps import (
    Interval,
    LogitNormal,
    Mode,
    Uniform,
    expert_intervals,
    mass,
    stratified,
    truncated,
)
from wan_ds.flow.weighting import bell, constant, min_snr

DISTRIBUTIONS = [
    Uniform(),
    Uniform(3.0),
    Uniform(12.0),
    LogitNormal(),
    LogitNormal(0.5, 1.3, 5.0),
    Mode(),
    Mode(-0.9, 5.0),
    Mode(1.75, 12.0),
]


@pytest.mark.parametrize("timesteps", DISTRIBUTIONS, ids=str)
def test_cdf_undoes_quantile(timesteps):
    u = torch.linspace(1e-6, 1 - 1e-6, 10_001, dtype=torch.float64)
    torch.testing.assert_close(timesteps.cdf(timesteps.quantile(u)), u, rtol=0, atol=1e-9)


@pytest.mark.parametrize("timesteps", DISTRIBUTIONS, ids=str)
def test_quantile_reaches_both_ends(timesteps):
    assert timesteps.quantile(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist() == [0.0, 1.0]
    assert timesteps.cdf(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
@pytest.mark.parametrize(
    "make", [Uniform, lambda shift: LogitNormal(shift=shift), lambda shift: Mode(shift=shift)]
)
def test_median_of_shifted_sigma_is_s_over_one_plus_s(make, shift):
    assert make(shift).quantile(torch.tensor(0.5)).item() == pytest.approx(shift / (1 + shift), abs=1e-12)


# The shares of the high-noise expert that invariants of the models give for a uniform draw,
# by boundary and shift.
UNIFORM_SHARES = {
    0.875: {1: 0.125, 3: 0.300, 5: 0.4167, 8: 0.5333, 12: 0.6316},
    0.900: {1: 0.100, 3: 0.250, 5: 0.3571, 8: 0.4706, 12: 0.5714},
}
LOGIT_NORMAL_SHARES = {
    0.875: {1: 0.026, 3: 0.198, 5: 0.368, 8: 0.553, 12: 0.705},
    0.900: {1: 0.014, 3: 0.136, 5: 0.278, 8: 0.453, 12: 0.613},
}


@pytest.mark.parametrize("boundary", [0.875, 0.9])
@pytest.mark.parametrize("shift", [1, 3, 5, 8, 12])
def test_share_of_the_high_noise_expert(boundary, shift):
    high = expert_intervals(boundary)["high_noise"]
    uniform, logit_normal = mass(Uniform(shift), high), mass(LogitNormal(shift=shift), high)
    assert uniform == pytest.approx(1 - boundary / (shift - (shift - 1) * boundary), abs=1e-12)
    assert uniform == pytest.approx(UNIFORM_SHARES[boundary][shift], abs=5e-5)
    assert logit_normal == pytest.approx(LOGIT_NORMAL_SHARES[boundary][shift], abs=5e-4)


def test_masses_of_the_experts_sum_to_one():
    for timesteps in DISTRIBUTIONS:
        masses = [mass(timesteps, interval) for interval in expert_intervals(0.875).values()]
        assert sum(masses) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("boundary", [0.875, 0.9, 0.1])
def test_the_boundary_itself_is_high_noise_and_every_sigma_has_one_owner(boundary):
    intervals = expert_intervals(boundary)
    at = torch.tensor([boundary], dtype=torch.float32)
    below = torch.nextafter(at, torch.zeros(1))
    assert intervals["high_noise"].contains(at).all() and not intervals["low_noise"].contains(at).any()
    assert intervals["low_noise"].contains(below).all() and not intervals["high_noise"].contains(below).any()
    sigma = torch.cat([torch.linspace(0, 1, 9_999), at, below])
    owners = sum(i.contains(sigma).int() for i in intervals.values())
    assert (owners == 1).all()


def test_ownership_agrees_with_the_pipelines_comparison_of_timesteps():
    for boundary in (0.875, 0.9):
        high = expert_intervals(boundary)["high_noise"]
        t = torch.arange(0, 1001, dtype=torch.float32)
        assert torch.equal(high.contains(t / 1000), t >= boundary * 1000)


@pytest.mark.parametrize("timesteps", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("expert", ["high_noise", "low_noise"])
def test_truncated_draws_are_the_true_conditional(timesteps, expert):
    """Against rejection from the whole distribution, which defines a conditional, by Kolmogorov-Smirnov."""
    interval = expert_intervals(0.875)[expert]
    rng = torch.Generator().manual_seed(0)
    sigma = truncated(timesteps, interval, torch.rand(20_000, generator=rng, dtype=torch.float64))
    assert sigma.dtype == torch.float32 and interval.contains(sigma).all()
    everywhere = timesteps.quantile(torch.rand(2_000_000, generator=rng, dtype=torch.float64))
    kept = everywhere[interval.contains(everywhere)][:20_000]
    both = torch.cat([sigma.double(), kept]).sort().values
    distance = (
        (
            torch.searchsorted(sigma.double().sort().values, both, right=True) / len(sigma)
            - torch.searchsorted(kept.sort().values, both, right=True) / len(kept)
        )
        .abs()
        .max()
        .item()
    )
    critical = 1.95 * math.sqrt(1 / len(sigma) + 1 / len(kept))  # alpha 0.001
    assert distance < critical


def test_a_draw_at_the_very_edge_stays_inside_in_float32():
    low = expert_intervals(0.9)["low_noise"]
    edge = truncated(Uniform(5.0), low, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert low.contains(edge).all()
    high = expert_intervals(0.9)["high_noise"]
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert high.contains(truncated(Uniform(5.0), high, ends)).all()


def test_stratified_draws_fill_each_stratum_once_and_stay_uniform():
    u = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    placed = stratified(u, torch.arange(8), 8)
    assert (placed * 8).floor().tolist() == list(range(8))
    assert ((placed * 8) % 1 - u).abs().max() < 1e-12


@pytest.mark.parametrize("wrong", [0.0, 1.0, -0.1, 875.0])
def test_a_boundary_outside_the_range_is_refused(wrong):
    with pytest.raises(ValueError, match=r"model\.boundary"):
        expert_intervals(wrong)


def test_intervals_refuse_to_be_empty():
    with pytest.raises(ValueError, match="low < high"):
        Interval(0.5, 0.5)


def test_path_identities():
    rng = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(4, 5, generator=rng, dtype=torch.float64) for _ in range(2))
    sigma = torch.rand(4, 1, generator=rng, dtype=torch.float64)
    noised, v = mix(latents, noise, sigma), velocity(latents, noise)
    torch.testing.assert_close(latents_from(noised, v, sigma), latents)
    torch.testing.assert_close(noise_from(noised, v, sigma), noise)
    assert torch.equal(mix(latents, noise, 0.0), latents) and torch.equal(mix(latents, noise, 1.0), noise)
    moved = mix(latents, noise, sigma + 1e-3) - noised
    torch.testing.assert_close(moved, 1e-3 * v)  # v is d noised / d sigma
    torch.testing.assert_close(unshifted(shifted(sigma, 5.0), 5.0), sigma)
    torch.testing.assert_close(shifted(shifted(sigma, 3.0), 4.0), shifted(sigma, 12.0))  # shifts multiply
    assert timestep(torch.tensor(0.99839)).item() == pytest.approx(998.39, abs=1e-4)
    assert timestep(torch.tensor(0.5, dtype=torch.float64)).dtype == torch.float32


def test_bell_is_normalised_over_the_fixed_grid_and_pure():
    grid = torch.arange(1, 1001, dtype=torch.float64) / 1000
    w = bell(grid)
    assert w.mean().item() == pytest.approx(1, abs=1e-9)
    assert w.max().item() == pytest.approx(0.39347 / 0.24909, abs=1e-3) and w.min().item() == 0
    y = [math.exp(-2 * ((t - 500) / 1000) ** 2) for t in range(1, 1001)]
    floor, total = min(y), sum(y)
    expected = [(v - floor) * 1000 / (total - 1000 * floor) for v in y]
    torch.testing.assert_close(w, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    single = torch.tensor([0.3], dtype=torch.float32)
    assert bell(single).isfinite().all() and bell(single)[0] == bell(torch.tensor([0.3, 0.9, 0.1]))[0]
    assert torch.equal(constant(grid), torch.ones_like(grid))


def test_mode_is_the_sampling_of_stable_diffusion_3():
    from diffusers.training_utils import compute_density_for_timestep_sampling

    for scale in (-0.9, 0.0, 0.81, 1.29):
        torch.manual_seed(0)
        theirs = compute_density_for_timestep_sampling("mode", 2_000, mode_scale=scale)
        torch.manual_seed(0)
        u = torch.rand(2_000)  # theirs runs from noise to the clip
        torch.testing.assert_close(Mode(scale).quantile(1 - u.double()).float(), theirs, rtol=0, atol=1e-6)
    assert torch.equal(Mode(0.0).quantile(u), Uniform().quantile(u))
    assert Mode().scale == 1.29  # the best of the paper's, section 5.1
    assert Mode(1.75).quantile(torch.linspace(0, 1, 999)).max() <= 1
    for wrong in (-1.01, 1.76, math.nan):
        with pytest.raises(ValueError, match=r"timesteps\.scale="):
            Mode(wrong)


def test_min_snr_weights_the_velocity_as_min_snr_weights_the_latents():
    sigma = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    latents, noise, error = torch.tensor(0.3), torch.tensor(-1.1), torch.tensor(0.25)
    noised = mix(latents, noise, sigma)
    of_latents = latents_from(noised, velocity(latents, noise) + error, sigma) - latents
    snr = ((1 - sigma) / sigma) ** 2
    expected = snr.clamp(max=5.0) * of_latents.square() / error.square()
    torch.testing.assert_close(min_snr(sigma), expected, rtol=1e-6, atol=1e-9)
    assert min_snr(torch.tensor([0.0, 1.0])).tolist() == [0, 0]
    assert sigma[min_snr(sigma, 4.0).argmax()].item() == pytest.approx(1 / 3, abs=1e-3)
