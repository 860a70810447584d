"""The bench at a size that tells nothing of speed: its table, its file, and what it refuses."""

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wan_ds import bench
from wan_ds.bench import Aim, BenchOptions, Row
from wan_ds.errors import ConfigError, TrainingError
from wan_ds.models.flops import training_flops
from wan_ds.training.contenders import Size

ROOT = Path(__file__).parents[1]
TINY = "Size(tokens=64, heads=2, head_width=12, ffn_width=64, text_width=32)"
ROWS = {
    ("step", "without recomputation"): ("ours", "diffusers"),
    ("step", "with recomputation"): ("ours", "diffusers"),
    ("step", "with recomputation, ours keeping the feed-forward's output"): ("ours", "diffusers"),
    ("recompute", "selective against full"): ("selective", "full"),
    ("rate", "of a step without recomputation"): ("our step", "product"),
    ("segments", "forward and backward"): ("ours", "diffusers"),
    ("segments", "added peak memory"): ("ours", "diffusers"),
    ("sequence", "clips a second at ZeRO-2"): ("sp 2", "sp 1"),
    ("sequence", "clips a second at ZeRO-3"): ("sp 2", "sp 1"),
}


def measured(folder: Path, size: str, repeats: int, seconds: float) -> tuple[str, dict]:
    """What all cases print, and their file; in a process of their own, which becomes a world of one rank."""
    code = (
        "from pathlib import Path; from wan_ds.bench import CASES, measure;"
        "from wan_ds.training.contenders import Size;"
        f"measure({size}, list(CASES), {repeats}, Path({str(folder)!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.json")
    return done.stdout, json.loads(path.read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("bench"), TINY, 3, 240)


def test_every_case_is_in_the_file_with_all_its_times(tiny):
    _, found = tiny
    assert {(row["case"], row["what"]): tuple(row["values"]) for row in found["rows"]} == ROWS
    for row in found["rows"]:
        expected = 1 if row["what"] == "added peak memory" else 3
        assert [len(values) for values in row["values"].values()] == [expected] * 2
        assert all(value > 0 for values in row["values"].values() for value in values)


def test_a_ratio_is_of_pairs_of_turns_and_told_by_median_and_quartiles(tiny):
    _, found = tiny
    for row in found["rows"]:
        first, second = row["values"].values()
        pairs = [one / other for one, other in zip(first, second, strict=True)]
        ratio = row["ratio"]
        assert ratio["values"] == pytest.approx(pairs)
        assert ratio["median"] == pytest.approx(statistics.median(pairs))
        assert min(pairs) <= ratio["lower"] <= ratio["median"] <= ratio["upper"] <= max(pairs)
        assert ratio["of"] == " / ".join(row["values"])


def test_aims_are_held_against_the_median(tiny):
    _, found = tiny
    aims = {(row["case"], row["what"]): row["aim"] for row in found["rows"]}
    assert aims["step", "without recomputation"] == "at most 1.03"
    assert aims["step", "with recomputation"] == "at most 0.88"
    assert aims["sequence", "clips a second at ZeRO-2"] == "at least 1.7"
    assert aims["sequence", "clips a second at ZeRO-3"] == "at least 1.5"
    assert [aims["segments", what] for what in ("forward and backward", "added peak memory")] == [
        "at most 0.95",
        "at most 0.5",
    ]
    for row in found["rows"]:
        if row["aim"] is None:
            assert row["is_met"] is None
            continue
        kind, bound = row["aim"].rsplit(" ", 1)
        if row["case"] == "recompute":  # whose bound is not a round number
            bound = 1 - statistics.median(row["attention_share"]) / 4 + 0.03
            assert row["aim"] == f"at most {bound:.3g}"
        above = row["ratio"]["median"] >= float(bound)
        assert row["is_met"] == (above if kind == "at least" else not above)


def test_the_two_sides_of_a_case_agree_in_their_losses(tiny):
    _, found = tiny
    pairs = [pair for row in found["rows"] for pair in row.get("losses", [])]
    # step's first at begin and end, the others' at the begin; segments' with and without; sequence's
    assert len(pairs) == 2 + 1 + 1 + 2 + 2
    for one, other in pairs:
        assert one == pytest.approx(other, rel=1e-4)


def test_rates_are_operations_over_seconds(tiny):
    _, found = tiny
    (row,) = [row for row in found["rows"] if row["case"] == "rate"]
    assert row["flops"]["our step"] == training_flops(found["model"], [found["grid"]])
    for name, rates in row["values"].items():
        times = [row["flops"][name] / rate / 1e12 for rate in rates]
        assert times == pytest.approx(row["seconds"][name])


def test_segments_add_less_memory_than_timesteps_of_tokens(tiny):
    """Counted, not timed, and so true of any size."""
    _, found = tiny
    (row,) = [row for row in found["rows"] if row["what"] == "added peak memory"]
    assert row["is_met"]
    for name, (plain, given) in row["peak_bytes"].items():
        assert row["values"][name] == [(given - plain) / 1e6]


def test_the_file_says_what_was_measured_on_what(tiny):
    _, found = tiny
    assert found["tokens"] == 64
    assert found["grid"] == [4, 4, 4]
    assert found["repeats"] == 3
    assert found["dtype"] == ("bfloat16 by autocast" if torch.cuda.is_available() else "float32")
    assert found["threads"] >= found["threads_of_ranks"] == 1
    assert {"torch", "diffusers", "deepspeed"} <= set(found["environment"]["packages"])
    assert found["environment"]["devices"]


def test_the_table_has_a_line_for_each_case(tiny):
    printed, found = tiny
    lines = printed[printed.index("case ") :].splitlines()  # DeepSpeed may have said something before
    assert lines[0].split()[:5] == ["case", "first", "second", "ratio", "aim"]
    for line, row in zip(lines[1:], found["rows"], strict=False):
        assert line.startswith(f"{row['case']}, {row['what']}")
        assert f"{row['ratio']['median']:.4g}" in line
        assert (row["aim"] or "") in line
    assert lines[len(ROWS) + 1].endswith(".json")


def test_a_row_shows_medians_quartiles_and_whether_its_aim_is_met():
    row = Row("step", "so", {"ours": [1.0, 2.0, 6.0], "diffusers": [2.0, 2.0, 4.0]}, aim=Aim(0.88))
    first, *cells = row.cells()
    assert first == "step, so"
    assert cells == [
        "ours 2 (1.5 to 4) s",
        "diffusers 2 (2 to 3) s",
        "1 (0.75 to 1.25)",
        "at most 0.88: missed",
    ]
    assert Row("", "", {"a": [1.0], "b": [1.0]}, aim=Aim(1.0, at_most=False)).is_met


@pytest.mark.parametrize("losses", [(1.0, 1.001), (1.0, float("nan"))])
def test_sides_that_disagree_are_not_timed(losses):
    sides = [SimpleNamespace(loss=lambda loss=loss: loss) for loss in losses]  # and nothing else: no step
    with pytest.raises(TrainingError, match="do not compute the same"):
        bench.step(SimpleNamespace(ours=sides[0], diffusers=sides[1]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (BenchOptions(only=["step", "speed"]), "only=speed: no such case; there are step, recompute, rate"),
        (BenchOptions(repeats=0), "repeats=0"),
        (BenchOptions(tokens=4095), "tokens=4095: must be a multiple of 8"),
    ],
)
def test_what_is_typed_wrong_is_refused_in_a_sentence(options, said, tmp_path):
    options.folder = str(tmp_path / "bench")
    with pytest.raises(ConfigError, match=said):
        bench.main(options)
    assert not (tmp_path / "bench").exists()


def test_a_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="starts its own ranks"):
        bench.main(BenchOptions())


@pytest.mark.parametrize(
    ("tokens", "grid"), [(8, (2, 2, 2)), (512, (8, 8, 8)), (4096, (16, 16, 16)), (32760, (30, 26, 42))]
)
def test_a_clip_is_a_box_of_exactly_so_many_tokens(tokens, grid):
    assert Size(tokens).grid == grid
    assert math.prod(grid) == tokens


def test_the_model_is_two_blocks_of_the_smallest_wan():
    size = Size()
    assert size.config["num_attention_heads"] * size.config["attention_head_dim"] == 1536
    assert (size.config["num_layers"], size.config["ffn_dim"], size.tokens) == (2, 8960, 4096)


@pytest.mark.gpu
def test_the_bench_runs_on_a_gpu(tmp_path):
    printed, found = measured(tmp_path, "Size()", 3, 200)
    cases = {row["case"] for row in found["rows"]}
    assert {"step", "recompute", "rate", "segments"} <= cases
    assert ("sequence" in cases) == (torch.cuda.device_count() > 1)
    assert found["dtype"] == "bfloat16 by autocast"
    assert all(row["peak_bytes"]["ours"] > 0 for row in found["rows"] if row["case"] == "step")
    sys.stdout.write(printed)
