"""Routing: the shares of the experts and their schedules, known before the run."""

import math

import pytest
import torch

from wan_ds.errors import ConfigError
from wan_ds.flow.timesteps import LogitNormal, Uniform
from wan_ds.training.experts import plan_routing
from wan_ds.training.lr_schedule import Constant, Cosine, Linear

STEPS = 2_000
# boundary, shift and the share of the high-noise expert of Wan 2.2's two dual models at their official shifts
T2V, I2V = (0.875, 12.0, 0.632), (0.9, 5.0, 0.357)


def routing(boundary, shift, policy="natural", experts=None, seed=0, **options):
    return plan_routing(
        Uniform(shift), boundary=boundary, experts=experts, policy=policy, seed=seed, **options
    )


@pytest.mark.parametrize(("boundary", "shift", "share"), [T2V, I2V], ids=["t2v", "i2v"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_natural_shares_lie_within_three_binomial_deviations(boundary, shift, share, seed):
    counts = routing(boundary, shift, seed=seed).counts(STEPS)
    assert sum(counts.values()) == STEPS
    assert abs(counts["high_noise"] - STEPS * share) < 3 * math.sqrt(STEPS * share * (1 - share))


@pytest.mark.parametrize(("boundary", "shift", "share"), [T2V, I2V], ids=["t2v", "i2v"])
def test_balanced_is_never_more_than_half_a_step_from_its_share(boundary, shift, share):
    plan = routing(boundary, shift, "balanced")
    exact = 1 - boundary / (shift - (shift - 1) * boundary)
    assert plan.shares["high_noise"] == pytest.approx(share, abs=5e-4) == pytest.approx(exact, abs=5e-4)
    high = 0
    for step in range(STEPS):
        high += plan.expert_of(step) == "high_noise"
        assert abs(high - exact * (step + 1)) <= 0.5 + 1e-9


def test_the_expert_of_a_step_depends_on_seed_and_step_alone():
    one, other = routing(*T2V[:2], seed=3), routing(*T2V[:2], seed=3)
    torch.rand(10)  # a global generator that moved on must not matter
    assert [one.expert_of(s) for s in range(200)] == [other.expert_of(s) for s in reversed(range(200))][::-1]
    assert [one.expert_of(s) for s in range(200)] != [
        routing(*T2V[:2], seed=4).expert_of(s) for s in range(200)
    ]


def test_one_expert_alone_takes_every_step():
    plan = routing(*T2V[:2], experts=["high_noise"])
    assert plan.shares == {"high_noise": 1.0} and plan.counts(50) == {"high_noise": 50}
    assert plan.intervals["high_noise"].low == 0.875


def test_a_model_without_a_boundary_has_one_expert_for_all_of_sigma():
    plan = routing(None, 5.0)
    assert plan.counts(10) == {"all": 10} and (plan.intervals["all"].low, plan.intervals["all"].high) == (
        0,
        1,
    )


def test_an_expert_that_the_distribution_never_reaches_is_refused():
    with pytest.raises(ConfigError, match="low_noise no noise level"):
        plan_routing(LogitNormal(40.0, 0.01), boundary=0.875, experts=None, policy="natural", seed=0)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.85])
def test_fixed_draws_with_the_given_share(share):
    plan = routing(*T2V[:2], "fixed", high_noise_share=share)
    assert plan.shares == pytest.approx({"high_noise": share, "low_noise": 1 - share})
    high = plan.counts(STEPS)["high_noise"]
    assert abs(high - STEPS * share) < 3 * math.sqrt(STEPS * share * (1 - share))


def test_alternate_gives_each_expert_its_run_of_steps_in_turn():
    plan = routing(*T2V[:2], "alternate", run_length=3)
    assert [plan.expert_of(step)[0] for step in range(14)] == list("hhhlllhhhlllhh")
    assert plan.counts(14) == {"high_noise": 8, "low_noise": 6}
    assert plan.shares == {"high_noise": 0.5, "low_noise": 0.5}
    assert [routing(*T2V[:2], "alternate").expert_of(step)[0] for step in range(4)] == list("hlhl")


def test_one_expert_alone_needs_no_policy():
    for policy, options in (("alternate", {"run_length": 2}), ("fixed", {"high_noise_share": 0.2})):
        plan = routing(*T2V[:2], policy, experts=["low_noise"], **options)
        assert plan.counts(9) == {"low_noise": 9}


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("fixt", {}, "policy=fixt: must be natural, balanced, fixed, alternate"),
        ("fixed", {}, "high_noise_share=None: must lie between 0 and 1"),
        ("fixed", {"high_noise_share": 1.0}, "high_noise_share=1.0"),
        ("alternate", {"run_length": 0}, "run_length=0: must be at least 1"),
        ("natural", {"experts": ["high"]}, "high is no expert; there are high_noise, low_noise"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(policy, options, message):
    with pytest.raises(ConfigError, match=message):
        routing(*T2V[:2], policy, **options)


def test_a_sigma_that_rounds_to_the_boundary_is_the_high_noise_experts():
    plan = routing(0.9, 5.0)
    at = torch.tensor(0.9, dtype=torch.float32).item()  # 0.899999976..., below 0.9 in float64
    assert plan.owner_of(at) == "high_noise"


def test_no_policy_changes_the_noise_levels_of_an_expert():
    ways = {"natural": {}, "fixed": {"high_noise_share": 0.1}, "alternate": {"run_length": 7}}
    plans = [routing(*T2V[:2], policy, **options) for policy, options in ways.items()]
    assert plans[0].intervals == plans[1].intervals == plans[2].intervals


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("natural", {}),
        ("balanced", {}),
        ("fixed", {"high_noise_share": 0.2}),
        ("alternate", {"run_length": 4}),
    ],
)
@pytest.mark.parametrize("curve", [Cosine, Linear])
def test_each_schedule_ends_at_its_floor_on_that_experts_last_step(policy, options, curve):
    plan = routing(*T2V[:2], policy=policy, **options)
    counts = plan.counts(300)
    schedules = {name: curve(steps=count, warmup_steps=5, floor=0.1) for name, count in counts.items()}
    taken = dict.fromkeys(counts, 0)
    seen = {name: [] for name in counts}
    for step in range(300):
        name = plan.expert_of(step)
        seen[name].append(schedules[name](taken[name]))
        taken[name] += 1
    assert taken == counts
    for factors in seen.values():
        assert factors[:5] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])
        assert factors[5] == 1 and factors[-1] == pytest.approx(0.1) and min(factors[5:]) == factors[-1]


def test_cosine_follows_the_closed_formula():
    schedule = Cosine(steps=20, warmup_steps=5, floor=0.0)
    expected = [(s + 1) / 6 if s < 5 else 0.5 * (1 + math.cos(math.pi * (s - 5) / 14)) for s in range(20)]
    assert [schedule(s) for s in range(20)] == pytest.approx(expected)


def test_constant_stays_and_warmup_that_does_not_fit_is_refused():
    assert [Constant(steps=5, warmup_steps=1)(s) for s in range(5)] == [0.5, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match=r"warmup_steps=8 does not fit into the 8 steps"):
        Cosine(steps=8, warmup_steps=8)
    with pytest.raises(ConfigError, match=r"lr_schedule\.floor=1\.5"):
        Linear(steps=8, floor=1.5)
