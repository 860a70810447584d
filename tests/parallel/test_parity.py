"""Every gradient of ranks that share clips is that of one process: variants, sp, ZeRO, LoRA, streams.

The full product has 1,200 rows; these cover every pair of values. `ROWS` lists them.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from unittest import mock

import pytest
import torch

from tests.parallel import parity
from tests.parallel.parity import LR, Row, reference, run_row

# Of one process: max |difference| / max |value| of each tensor, and relative.
GRADIENT, NORM, LOSS = 1e-5, 1e-6, 1e-6

ROWS = [
    Row("t2v", 2, 2, False, True, "several", "fused", "full"),
    Row("t2v", 1, 2, True, True, "15", "fused", "none"),
    Row("t2v", 2, 0, False, False, "27", "deepspeed", "none"),
    Row("t2v", 2, 3, False, False, "32", "deepspeed", "none"),
    Row("t2v", 4, 1, True, True, "27", "fused", "selective", "exchange"),
    Row("t2v", 4, 3, True, False, "5", "fused", "selective", "exchange and ffn"),
    Row("i2v", 4, 1, True, False, "several", "fused", "full"),
    Row("i2v", 1, 2, True, True, "32", "fused", "none"),
    Row("i2v", 2, 0, False, True, "5", "deepspeed", "full"),
    Row("i2v", 2, 3, True, False, "27", "fused", "selective"),
    Row("i2v", 4, 2, False, True, "15", "deepspeed", "selective"),
    Row("i2v-a14b", 1, 3, True, False, "several", "fused", "selective"),
    Row("i2v-a14b", 1, 3, False, True, "27", "fused", "full"),
    Row("i2v-a14b", 2, 1, True, True, "32", "deepspeed", "selective"),
    Row("i2v-a14b", 2, 2, False, False, "5", "fused", "none"),
    Row("i2v-a14b", 4, 0, False, False, "15", "fused", "none"),
    Row("flf2v", 1, 0, True, False, "several", "fused", "selective"),
    Row("flf2v", 2, 1, False, False, "15", "fused", "full"),
    Row("flf2v", 2, 2, False, False, "32", "fused", "none"),
    Row("flf2v", 4, 2, True, False, "5", "fused", "full"),
    Row("flf2v", 4, 3, False, True, "27", "deepspeed", "none"),
    Row("ti2v", 4, 0, False, True, "several", "deepspeed", "none"),
    Row("ti2v", 1, 1, False, True, "5", "fused", "none"),
    Row("ti2v", 2, 2, True, False, "27", "deepspeed", "full"),
    Row("ti2v", 4, 0, True, False, "32", "deepspeed", "full"),
    Row("ti2v", 4, 3, True, True, "15", "deepspeed", "selective", "ffn"),
    # One dp rank holds three clips of other sizes than the two of the other, and weights are prefetched.
    Row("i2v", 2, 3, False, True, "several", "fused", "selective", "exchange and ffn"),
    Row("ti2v", 2, 3, True, False, "several", "fused", "none"),
]
VALUES = {
    "variant": ["t2v", "i2v", "i2v-a14b", "flf2v", "ti2v"],
    "sp_size": [1, 2, 4],
    "stage": [0, 1, 2, 3],
    "reduce_scatter": [True, False],
    "lora": [False, True],
    "stream": ["32", "27", "15", "5", "several"],
    "exchange": ["fused", "deepspeed"],
    "recompute": ["none", "full", "selective"],
}


def test_the_rows_hold_every_pair_of_values():
    for one, other in combinations(VALUES, 2):
        covered = {(getattr(row, one), getattr(row, other)) for row in ROWS}
        wanted = {(a, b) for a in VALUES[one] for b in VALUES[other]}
        # One rank exchanges nothing, so there is no other way to do it.
        wanted -= {(1, "deepspeed"), ("deepspeed", 1)}
        assert covered >= wanted, (one, other, wanted - covered)


@cache
def expected(variant: str, sizes: tuple, lora: bool) -> dict:
    return reference(variant, sizes, lora)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_window_on_ranks_is_that_of_one_process(world4, row):
    found = world4.run(run_row, row)[0]
    one = expected(row.variant, tuple(row.sizes), row.lora)
    assert found["gradients"].keys() == one["gradients"].keys()
    for name, gradient in one["gradients"].items():
        scale = gradient.abs().max()
        assert scale > 0, name
        assert (found["gradients"][name] - gradient).abs().max() <= GRADIENT * scale, name
    assert found["norm"] == pytest.approx(one["norm"], rel=NORM)
    assert found["loss"] == pytest.approx(one["loss"], rel=LOSS)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-3 * LR, msg=name)
    counts = [count for key, count in found["by_sigma"].items() if key.endswith("/count")]
    assert sum(counts) == len(row.sizes)


@pytest.mark.parametrize(
    ("precision", "stage"),
    [("bf16_params", 1), ("bf16_params", 2), ("bf16_params", 3), ("bf16_autocast", 2), ("bf16_autocast", 3)],
)
def test_in_bfloat16_shared_clips_have_nearly_the_numbers_of_whole_ones(world4, precision, stage):
    """Between the two lie a rounding of 2^-9 in each product, another order of sums, and no factor."""
    whole, split = (
        world4.run(run_row, Row("i2v", sp_size, stage, True, False, "several", precision=precision))[0]
        for sp_size in (1, 4)
    )
    assert split["loss"] == pytest.approx(whole["loss"], rel=2e-3)
    assert split["norm"] == pytest.approx(whole["norm"], rel=5e-3)
    for name, gradient in whole["gradients"].items():
        difference = (split["gradients"][name].float() - gradient.float()).norm()
        assert difference <= 0.15 * gradient.float().norm(), name


def _masks_of_dropout(sp_size: int) -> dict[str, torch.Tensor]:
    """What an adapter's dropout leaves of ones, by module, in the forward of a window."""
    row = Row("i2v", sp_size, 0, True, True, "27")
    with mock.patch.object(parity, "ADAPTER", replace(parity.ADAPTER, dropout=0.5)):
        loop = parity.loop_of(row)
    masks = {}

    def note(module, args, out, name):
        masks[name] = out.detach() != 0

    for name, module in loop.experts["all"].engine.module.named_modules():
        if name.endswith("lora_dropout.default"):
            module.register_forward_hook(partial(note, name=name))
    loop.train_step()
    return masks


def test_ranks_that_share_a_clip_drop_the_same_of_its_text(world4):
    one, other, third, _ = world4.run(_masks_of_dropout, 2)
    text = [name for name in one if ".attn2.to_k." in name or ".attn2.to_v." in name]
    assert len(text) == 4 and all(0.4 < one[name].float().mean() < 0.6 for name in text)
    for name in text:
        assert torch.equal(one[name], other[name]), name
        assert not torch.equal(one[name], third[name]), name
