"""A stream spread over ranks: what each holds, what they exchange, and every gradient against float64."""

from collections import Counter
from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.models.test_recompute import Counting
from tests.models.test_transformer import (
    TOLERANCE,
    Batch,
    batch_of,
    distance,
    stock,
    stock_alone,
    through_clips,
    through_tensor,
    twin,
)
from wan_ds.errors import ConfigError
from wan_ds.models.attention import BACKENDS, WholeSequence
from wan_ds.models.recompute import recompute
from wan_ds.parallel.mesh import Mesh
from wan_ds.parallel.ulysses import SplitSequence

EXCHANGE = "deepspeed::dim_zero_all_to_all"
SIZES = [(3, 4, 8), (1, 2, 6), (1, 4, 4)]  # 24 + 3 + 4 tokens: borders inside ranges, one token of padding


def split_sequence(sp_size: int, exchange: str = "fused") -> SplitSequence:
    return SplitSequence(Mesh(sp_size), BACKENDS["auto"], exchange)


def allowed(name: str) -> float:
    """float32 against float64, by a tensor's largest value.

    Angles of up to 1000 have errors of 3e-5 in float32, and this layer's input is their sines.
    """
    return 3e-5 if name == "condition_embedder.time_embedder.linear_1.weight" else TOLERANCE


# where tokens lie


def _ranges(tokens: int) -> tuple:
    sequence = split_sequence(2)
    own = sequence.split(torch.arange(1, tokens + 1).float()[:, None])
    return sequence.bounds(tokens), own[:, 0].tolist(), sequence.gather(own, tokens)[:, 0].tolist()


@pytest.mark.parametrize("tokens", [32, 15, 1])
def test_ranks_hold_equal_ranges_in_order_and_the_padding_is_at_the_end(world2, tokens):
    found = world2.run(_ranges, tokens)
    share = -(-tokens // 2)
    assert [bounds for bounds, _, _ in found] == [(0, share), (share, 2 * share)]
    held = [value for _, own, _ in found for value in own]
    assert held == [*range(1, tokens + 1), *[0] * (2 * share - tokens)]
    assert all(whole == [*range(1, tokens + 1)] for *_, whole in found)


def _refusals() -> dict[str, str]:
    sequence, found = split_sequence(2), {}
    heads = torch.zeros(4, 3, 2)
    for name, call in {
        "heads": lambda: sequence.attend(heads, heads, heads, [8]),
        "gradient": lambda: sequence.gather(torch.zeros(2, 3, requires_grad=True), 4),
        "exchange": lambda: split_sequence(2, "ring"),
        "world": lambda: Mesh(3),
    }.items():
        try:
            call()
        except (ValueError, ConfigError) as error:
            found[name] = str(error)
    return found


def test_what_cannot_be_split_is_refused(world2):
    assert world2.run(_refusals)[0] == {
        "heads": "3 heads over 2 ranks: sp_size must divide them",
        "gradient": "a gathered stream has no gradient; call the model with local=True for a loss",
        "exchange": "exchange=ring: choose fused or deepspeed",
        "world": "parallelism.sp_size=3 does not divide the 2 ranks; choose 1, 2",
    }


# what comes out


def _without_gradients(model, batch: Batch, door):
    model.sequence = split_sequence(2)
    with torch.no_grad():
        return door(model, batch)


@pytest.mark.parametrize("door", [through_clips, through_tensor])
def test_every_rank_gets_the_whole_video(world2, door):
    model = stock("i2v")
    batch = batch_of("i2v", SIZES if door is through_clips else [(1, 6, 10)] * 2)
    with torch.no_grad():
        expected = stock_alone(model, batch)
    for outputs in world2.run(_without_gradients, twin(model), batch, door):
        assert max(map(distance, outputs, expected)) <= TOLERANCE


# what comes back


def _weights_of_loss(model, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, model.config.out_channels * 4, generator=torch.Generator().manual_seed(5))


def gradients(model, batch: Batch, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a loss over this rank's tokens."""
    model.zero_grad()
    columns = model(
        batch.clips, batch.timestep, batch.text, batch.image, segment_frames=batch.frames, local=True
    )
    (columns * model.sequence.split(weights)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _over_ranks(model, batch: Batch, exchange: str, kind: str, keep_exchange: bool) -> tuple[dict, Counter]:
    """Gradients summed over ranks, and what was called."""
    model.sequence = split_sequence(dist.get_world_size(), exchange)
    recompute(model, kind, keep_exchange=keep_exchange)
    weights = _weights_of_loss(model, sum(clip[0].numel() // 4 for clip in batch.clips))
    with Counting() as counting:
        found = gradients(model.train(), batch, weights)
    for gradient in found.values():
        dist.all_reduce(gradient)
    return found, counting.calls


@cache
def in_float64(variant: str) -> tuple:
    """The model in float32, its batch, and the gradients of our own forward in float64 on one rank."""
    model = twin(stock(variant))
    batch = batch_of(variant, SIZES, frames=[(1, 2), (1,), (1,)] if variant == "ti2v" else None)
    wide = twin(stock(variant)).double()
    doubled = batch.map(torch.Tensor.double)
    doubled.timestep = batch.timestep.double()
    exact = gradients(wide, doubled, _weights_of_loss(model, 31).double())
    return model, batch, exact


@pytest.mark.parametrize("exchange", ["fused", "deepspeed"])
@pytest.mark.parametrize("variant", ["t2v", "i2v", "flf2v", "i2v-a14b", "ti2v"])
def test_every_gradient_is_alive_and_that_of_float64(world2, variant, exchange):
    model, batch, exact = in_float64(variant)
    for found, _ in world2.run(_over_ranks, model, batch, exchange, "none", False):
        for name, gradient in exact.items():
            assert gradient.any() and found[name].any(), name
            assert distance(found[name], gradient) <= allowed(name), name


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("variant", ["i2v", "ti2v"])
def test_every_backend_on_one_rank_gives_the_gradients_of_float64(variant, attention):
    if attention == "varlen":
        pytest.skip("its kernels are for GPUs and half precision")
    model, batch, exact = in_float64(variant)
    model.sequence = WholeSequence(BACKENDS[attention])
    for name, gradient in gradients(model, batch, _weights_of_loss(model, 31)).items():
        assert gradient.any(), name
        assert distance(gradient, exact[name]) <= allowed(name), name


def test_recomputation_changes_no_gradient_and_sends_again_only_what_was_not_kept(world2):
    """Two blocks: an exchange there and one back, each again in backward."""
    model, batch, _ = in_float64("i2v")
    plain, calls = world2.run(_over_ranks, model, batch, "fused", "none", False)[0]
    assert calls[EXCHANGE] == 8
    for kind, keeps, expected in (("full", False, 12), ("selective", False, 12), ("selective", True, 8)):
        found, calls = world2.run(_over_ranks, model, batch, "fused", kind, keeps)[0]
        assert calls[EXCHANGE] == expected, (kind, keeps)
        assert all(torch.equal(found[name], plain[name]) for name in plain), (kind, keeps)


def test_selective_recomputation_is_exact_around_deepspeeds_own_attention(world2):
    model, batch, _ = in_float64("i2v")
    plain, _ = world2.run(_over_ranks, model, batch, "deepspeed", "none", False)[0]
    found, _ = world2.run(_over_ranks, model, batch, "deepspeed", "selective", False)[0]
    assert all(torch.equal(found[name], plain[name]) for name in plain)
