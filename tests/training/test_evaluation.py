"""Routed validation against one clip at a time, and the same in any layout."""

import statistics

import pytest
import torch

from tests.training import tiny
from wan_ds import streams
from wan_ds.flow.timesteps import Uniform
from wan_ds.models.conditioning import TextImageToVideo, TextToVideo
from wan_ds.training import evaluation
from wan_ds.training.experts import plan_routing
from wan_ds.training.meters import Meters

ROUTING = plan_routing(Uniform(5.0), boundary=0.875, experts=None, policy="natural", seed=0)
SIGMAS = evaluation.levels(ROUTING.timesteps, 6)
PROBES = evaluation.probes(tiny.CLIPS, SIGMAS, ROUTING.owner_of)


def losses(models, batch_size, order=None):
    encoded = tiny.encoded()
    result = {}
    for name, routed in PROBES.items():
        shuffled = routed if order is None else [routed[i] for i in order[name]]
        result[name] = evaluation.probe_losses(
            shuffled, SIGMAS, encoded, models[name], TextToVideo(), seed=3, batch_size=batch_size
        )
    return result


@pytest.fixture(scope="module")
def models():
    return {name: tiny.model(name) for name in PROBES}


def test_levels_are_medians_of_equal_shares():
    u = [(k + 0.5) / 6 for k in range(6)]
    assert SIGMAS.tolist() == pytest.approx([5 * x / (1 + 4 * x) for x in u])


def test_every_clip_and_level_goes_to_the_expert_that_owns_it():
    assert {p.expert for routed in PROBES.values() for p in routed} == {"high_noise", "low_noise"}
    for name, routed in PROBES.items():
        assert all((SIGMAS[p.level] >= 0.875) == (name == "high_noise") for p in routed)
    pairs = [(p.clip, p.level) for routed in PROBES.values() for p in routed]
    assert sorted(pairs) == [(clip, level) for clip in range(tiny.CLIPS) for level in range(6)]


def test_the_loss_is_that_of_each_clip_alone_by_stock_code(models):
    from diffusers import WanTransformer3DModel

    ours = losses(models, batch_size=4)
    for name, routed in PROBES.items():
        stock = WanTransformer3DModel(**tiny.ARCHITECTURE)
        stock.load_state_dict(models[name].state_dict())
        for probe, value in zip(routed, ours[name], strict=True):
            sigma, clip = SIGMAS[probe.level], tiny.latents_of(probe.clip)
            noise = streams.normal(tiny.LATENTS, 3, "evaluation", probe.clip, probe.level)
            with torch.no_grad():
                predicted = stock(
                    ((1 - sigma) * clip + sigma * noise)[None],
                    (1000 * sigma)[None],
                    tiny.prompt_of(f"caption {probe.clip}")[None],
                    return_dict=False,
                )[0][0]
            expected = torch.nn.functional.mse_loss(predicted, noise - clip)
            assert value.item() == pytest.approx(expected.item(), rel=1e-5)


def test_batch_size_and_order_change_no_loss(models):
    one, four = losses(models, 1), losses(models, 4)
    order = {
        name: torch.randperm(len(routed), generator=torch.Generator().manual_seed(1)).tolist()
        for name, routed in PROBES.items()
    }
    mixed = losses(models, 3, order)
    for name in PROBES:
        torch.testing.assert_close(one[name], four[name], rtol=1e-5, atol=0)
        torch.testing.assert_close(one[name][order[name]], mixed[name], rtol=1e-5, atol=0)


def _on_ranks(world_size):
    import torch.distributed as dist

    gathered = {}
    for name, routed in PROBES.items():
        share = evaluation.share_of_rank(routed, dist.get_rank(), world_size)
        own = torch.tensor([10.0 * p.clip + p.level for p in share], dtype=torch.float64)
        gathered[name] = evaluation.gathered(own, len(routed))
    return gathered, {
        name: len(evaluation.share_of_rank(r, dist.get_rank(), world_size)) for name, r in PROBES.items()
    }


def test_ranks_share_the_work_and_give_the_same_losses_in_order(world2):
    results = world2.run(_on_ranks, 2)
    for gathered, counts in results:
        assert counts == results[0][1]
        for name, routed in PROBES.items():
            assert gathered[name].tolist() == [10.0 * p.clip + p.level for p in routed]


def test_the_summary_weighs_every_probe_the_same(models):
    by_expert = losses(models, 4)
    meters = Meters()
    meters.add(0, evaluation.summary(by_expert, PROBES, SIGMAS))
    (record,) = meters.flush()
    everything = torch.cat(list(by_expert.values()))
    assert record["eval/loss"] == pytest.approx(everything.mean().item())
    of_clip = {clip: [] for clip in range(tiny.CLIPS)}
    for name, routed in PROBES.items():
        for probe, value in zip(routed, by_expert[name].tolist(), strict=True):
            of_clip[probe.clip].append(value)
    means = [statistics.fmean(values) for values in of_clip.values()]
    assert record["eval/loss_stderr"] == pytest.approx(statistics.stdev(means) / tiny.CLIPS**0.5)
    assert record["eval/high_noise/loss"] == pytest.approx(by_expert["high_noise"].mean().item())
    counts = {k: v for k, v in record.items() if k.endswith("/count")}
    assert sum(counts.values()) == tiny.CLIPS * 6


def test_a_clip_is_judged_with_its_image_at_every_level_or_at_none():
    """TI2V: what is given belongs to the clip, so that levels of one clip can be compared."""
    seen = []

    def network(clips, timestep, prompts, images, *, segment_frames, local):  # noqa: ARG001
        seen.extend(len(segments) > 1 for segments in segment_frames)
        return torch.zeros(sum(clip[0].numel() // 4 for clip in clips), 64)

    probes = [evaluation.Probe(clip, level, "all") for clip in range(tiny.CLIPS) for level in range(6)]
    encoded = tiny.encoded()
    evaluation.probe_losses(probes, SIGMAS, encoded, network, TextImageToVideo(0.5), seed=3, batch_size=4)
    by_clip = [set(seen[6 * clip : 6 * clip + 6]) for clip in range(tiny.CLIPS)]
    assert all(len(given) == 1 for given in by_clip) and len(set().union(*by_clip)) == 2
