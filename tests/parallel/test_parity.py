"""Every gradient of ranks that share clips is that of one process: variants, sp, ZeRO, LoRA, streams.

The full product has 1,200 rows; these cover every pair of values. `ROWS` lists them.
"""

from functools import cache
from itertools import combinations

import pytest
import torch

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
