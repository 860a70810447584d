"""What only a GPU can show: half precision kernels inside the whole network, and the dtypes of a real run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.test_transformer import batch_of, results, stock, through_clips, twin
from wan_ds.models.attention import BACKENDS, WholeSequence
from wan_ds.models.recompute import recompute

ROOT = Path(__file__).parents[1]
# Seen on a CPU: 0.03 of a tensor's largest value at most, and 0.06 for the biases of keys, whose gradients
# are small differences of large numbers.
BF16, KEY_BIAS = 0.06, 0.12

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", ["i2v", "ti2v"])
@pytest.mark.parametrize("kind", ["none", "full", "selective"])
@pytest.mark.parametrize("attention", BACKENDS)
def test_every_gradient_under_bf16_autocast_is_alive_and_near_float64(variant, kind, attention):
    architecture = {"attention_head_dim": 24}  # kernels want a multiple of 8
    frames = [(1, 2), (1,), (2,)] if variant == "ti2v" else None
    batch = batch_of(variant, frames=frames)
    changes = architecture | ({"added_kv_proj_dim": 96} if variant == "i2v" else {})
    exact_model, model = (twin(stock(variant, **changes)).cuda() for _ in range(2))
    batch = batch.map(torch.Tensor.cuda)
    batch.timestep = batch.timestep.cuda()
    doubled = batch.map(torch.Tensor.double)
    doubled.timestep = batch.timestep.double()
    exact = results(_on_host, exact_model.double(), doubled)
    model.sequence = WholeSequence(BACKENDS[attention])
    recompute(model.train(), kind)
    with torch.autocast("cuda", torch.bfloat16):
        found = results(_on_host, model, batch)
    for name, tensor in exact.items():
        scale = tensor.abs().max()
        assert found[name].any(), name
        allowed = KEY_BIAS if name.endswith(("k.bias", "k_proj.bias")) else BF16
        assert (found[name] - tensor).abs().max() <= allowed * scale, name


def _on_host(model, batch):
    """The outputs where the weights of the loss are drawn."""
    return [output.float().cpu() for output in through_clips(model, batch)]


def _run(folder: Path, *arguments: str) -> list[dict]:
    command = [sys.executable, ROOT / "scripts/train.py", "recipe=quickstart", "tracker.mode=disabled"]
    command += ["train.steps=4", "parallelism.recompute=selective", "run_dir=run", *arguments]
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(list(map(str, command)), cwd=folder, env=environment, check=True, timeout=150)
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_a_run_in_bf16_keeps_its_dtypes_and_stays_near_fp32(tmp_path):
    wide = _run(tmp_path / "fp32")
    half = _run(tmp_path / "bf16", "precision=bf16_autocast")
    for one, other in zip(wide, half, strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], rel=BF16)
    told = (tmp_path / "bf16/run/log.txt").read_text()
    assert "bfloat16" in told and "float32" in told  # the table of what is stored, computed and sent
