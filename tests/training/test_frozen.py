"""One expert trains an adapter, the other is sharded beside it: used to evaluate and sample, never saved."""

import ctypes
import gc
import json
import shutil

import pytest
import torch

from tests.training import adapted
from tests.training.test_resume import (
    KILLED,
    SMALL,
    optimizer_states,
    records,
    runs,
    same_to_the_byte,
)
from wan_ds import evaluate
from wan_ds.config import Config
from wan_ds.config.command_line import parse
from wan_ds.config.composition import configure
from wan_ds.errors import CheckpointError
from wan_ds.evaluate import EvaluateOptions
from wan_ds.training import adapters, checkpoint
from wan_ds.training.sources import transformer_source

ALONE = [
    *SMALL,
    "train.experts=[low_noise]",
    "train.frozen_experts=[high_noise]",
    "train.routing.policy=natural",
    "train.steps=6",
    "adapter=lora",
    "adapter.rank=4",
    "adapter.dropout=0.1",
    "ema.decay=0.9",
    "evaluation.every_steps=2",
    "evaluation.sigmas_per_clip=4",
    "sampling.every_steps=6",
    "sampling.steps=3",
    "sampling.prompts=[a rabbit]",
]


def test_a_killed_run_ends_as_one_that_never_was_and_holds_one_expert(tmp_path):
    typed = [*ALONE, *adapted.write_base(tmp_path / "base", SMALL, torch.bfloat16)]
    plan = [
        {"arguments": [*typed, "run_dir=straight"], "moment": None},
        {"arguments": [*typed, "run_dir=killed"], "moment": ["inside a step", 5]},
        {"arguments": [*typed, "run_dir=killed"], "moment": None},
    ]
    assert runs(tmp_path, plan) == [[0, 0], KILLED, [0, 0]], (tmp_path / "log").read_text()[-3000:]

    found = records(tmp_path / "straight")
    assert records(tmp_path / "killed") == found and len(found) == 7
    evaluated = [record for record in found if "eval/loss" in record]
    assert [record["step"] for record in evaluated] == [0, 2, 4, 6]
    assert len({record["eval/high_noise/loss"] for record in evaluated}) == 1  # it is frozen
    assert len({record["eval/low_noise/loss"] for record in evaluated}) == 4

    ends = [checkpoint.find(tmp_path / name, "latest") for name in ("straight", "killed")]
    for end in ends:
        assert sorted(path.name for path in end.iterdir() if path.is_dir()) == ["low_noise"]
    for name in (adapters.FILE, "ema_rank_00000.safetensors", "ema_rank_00001.safetensors"):
        one, other = ((end / "low_noise" / name).read_bytes() for end in ends)
        assert one == other
    assert same_to_the_byte(*(optimizer_states(end, "low_noise") for end in ends))
    # one process computes what two did, the base's dtypes and the averages included
    evaluate.main(EvaluateOptions(run=str(tmp_path / "straight")))
    again = json.loads((tmp_path / "straight" / "evaluation" / f"{ends[0].name}.json").read_text())
    for key in ("eval/loss", "eval/high_noise/loss", "eval/low_noise/loss"):
        assert again[key] == pytest.approx(found[-1][key], rel=1e-5)
    assert "its dtypes" in (tmp_path / "log").read_text()
    (made,) = json.loads((tmp_path / "straight" / "samples" / ends[0].name / "samples.json").read_text())
    assert all(calls > 0 for calls in made["expert_calls"].values()) and len(made["expert_calls"]) == 2

    run = tmp_path / "straight"
    folded = transformer_source(str(run), None, "low_noise")  # another run may start from it
    before = folded._base.read(["blocks.0.attn1.to_q.weight"])["blocks.0.attn1.to_q.weight"]
    assert not torch.equal(folded.read(["blocks.0.attn1.to_q.weight"])["blocks.0.attn1.to_q.weight"], before)
    assert transformer_source(str(run), None, "high_noise").where == str(tmp_path / "base" / "high_noise")

    other = tmp_path / "base" / "low_noise" / "diffusion_pytorch_model.safetensors"
    shutil.copy(tmp_path / "base" / "high_noise" / other.name, other)
    folded = transformer_source(str(run), None, "low_noise")
    with pytest.raises(CheckpointError, match="holds other weights than the adapter was trained on"):
        folded.read(folded.tensors)


def _config() -> Config:
    wide = [f"model.transformer.{key}" for key in ("num_attention_heads=8", "attention_head_dim=128")]
    return configure(
        parse(
            [
                "recipe=quickstart",
                *wide,
                "model.transformer.ffn_dim=4096",
                "model.transformer.num_layers=3",
                "run_dir=x",
            ]
        )
    )


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not the process's any more
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _frozen_bytes() -> tuple[int, int, int]:
    """Bytes of a frozen expert, of this rank's shards, and by which the process grew."""
    from wan_ds.parallel.mesh import Mesh
    from wan_ds.training import networks

    config, mesh = _config(), Mesh()
    networks.build_frozen(config, "low_noise", mesh)  # what the first one of a process takes is not asked
    before = _resident()
    engine = networks.build_frozen(config, "high_noise", mesh)
    grown = _resident() - before
    whole = sum(parameter.ds_numel * 4 for _, parameter in engine.parameters())
    held = sum(engine.shard(parameter).nbytes for _, parameter in engine.parameters())
    assert not any(parameter.requires_grad for _, parameter in engine.parameters())
    return whole, held, grown


def test_a_frozen_expert_takes_its_bytes_over_the_world_size(world2):
    for whole, held, grown in world2.run(_frozen_bytes, timeout=200):
        assert whole > 1.5e8
        assert 0 <= held - whole / 2 < 4 * 200  # a number of padding for each odd tensor
        assert abs(grown - held) < 0.1 * held
