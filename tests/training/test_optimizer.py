"""Decay groups and DeepSpeed's own optimizers, on real engines."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.training import tiny
from wan_ds.config import check
from wan_ds.config.command_line import parse
from wan_ds.config.composition import configure
from wan_ds.errors import ConfigError
from wan_ds.models.adapter import AdapterSettings
from wan_ds.models.weights import build_transformer
from wan_ds.training.optimizer import cpu_adamw, fused_adamw, is_decayed

SMALL = tiny.ARCHITECTURE | {"num_layers": 1}
ADAPTER = AdapterSettings(rank=2, alpha=2.0, targets=["to_q", "ffn.net.2"])


class FromOnes:
    """An adapter to start from, all of whose numbers are one."""

    def __init__(self, rank=2, width=48, ffn=64):
        self.tensors = {}
        for module, size in {"attn1.to_q": width, "attn2.to_q": width, "ffn.net.2": ffn}.items():
            self.tensors[f"blocks.0.{module}.lora_A.weight"] = torch.ones(rank, size)
            self.tensors[f"blocks.0.{module}.lora_B.weight"] = torch.ones(width, rank)

    def scale(self, module):
        return 1.0


def steps_of(stage, factory, *, steps, weight=1.0, adapter=None, lr=1e-2):
    """Masters before and after steps; ``weight`` scales the loss, 0 leaves decay alone."""
    from wan_ds.parallel.mesh import Mesh
    from wan_ds.training.engine import Engine, partition_of
    from wan_ds.training.optimizer import build_optimizer

    zero = dict(tiny.ZERO[stage])
    network = build_transformer(
        SMALL,
        None,
        seed=1,
        adapter=adapter,
        init_from=None if adapter is None else FromOnes(),
        partition=partition_of(dict(zero)),
    )
    engine = Engine(
        network.train(),
        build_optimizer(network, factory),
        Mesh(),
        zero_optimization=zero,
        micro_batch_size=1,
        max_grad_norm=1.0,
        precision=tiny.PRECISIONS["fp32"],
    )
    trainable = [(name, p) for name, p in engine.parameters() if p.requires_grad]
    before = {name: engine.full_master(p).clone() for name, p in trainable}
    for step in range(steps):
        timestep, text = torch.tensor([500.0]), tiny.prompt_of("a")[None]
        clips = engine.train([tiny.latents_of(step)], timestep, text)
        engine.backward(weight * (clips[0] - 1).square().mean() / 2)
        assert engine.step(lr)
    return before, {name: engine.full_master(p).clone() for name, p in trainable}


def _decayed_alone(stage, adapter):
    """By parameter, whether it shrank by lr times weight_decay, or stayed."""
    factory = partial(torch.optim.AdamW, weight_decay=10.0)
    before, after = steps_of(stage, factory, steps=1, weight=0.0, adapter=adapter)
    shrank = {}
    for name, start in before.items():
        assert torch.allclose(after[name], 0.9 * start, rtol=1e-6) or torch.equal(after[name], start), name
        shrank[name] = not torch.equal(after[name], start)
    alive = {name: bool(start.any()) for name, start in before.items()}
    return shrank, alive


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["full", "lora"])
def test_every_stage_decays_the_weights_of_layers_and_of_an_adapter_and_nothing_else(world2, stage, adapter):
    shrank, alive = world2.run(_decayed_alone, stage, adapter)[0]
    kept = ("bias", "scale_shift_table", "norm_q.weight", "norm_k.weight", "norm2.weight")
    assert shrank == {name: alive[name] and not name.endswith(kept) for name in shrank}
    if adapter is not None:
        assert len(shrank) == 6 and all(shrank.values())


def test_the_names_that_decay():
    decayed = {
        "blocks.0.attn1.to_q.weight": True,
        "blocks.0.attn1.to_q.bias": False,
        "blocks.0.attn2.norm_added_k.weight": False,
        "blocks.0.norm2.weight": False,
        "blocks.0.scale_shift_table": False,
        "scale_shift_table": False,
        "condition_embedder.image_embedder.norm1.weight": False,
        "condition_embedder.time_proj.weight": True,
        "patch_embedding.weight": True,
        "blocks.0.attn1.to_q.lora_A.default.weight": True,
        "blocks.0.ffn.net.2.lora_B.default.weight": True,
    }
    assert {name: is_decayed(name) for name in decayed} == decayed


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("optimizer=cpu_adamw parallelism=zero3", "optimizer=cpu_adamw: .* parallelism=zero3_offload"),
        ("optimizer=fused_adamw parallelism=zero3_offload", "optimizer=fused_adamw: .* optimizer=cpu_adamw"),
        ("precision=bf16_params parallelism=ddp", "no fp32 masters; type parallelism=zero2 or zero3"),
        ("optimizer=cpu_adamw parallelism=zero3_offload", None),
        ("optimizer=fused_adamw parallelism=zero3 precision=bf16_params", None),
    ],
)
def test_an_optimizer_and_masters_need_the_parallelism_that_keeps_them(typed, told):
    config = configure(parse(["recipe=quickstart", *typed.split()]))
    if told is None:
        check(config, 2)
        return
    with pytest.raises(ConfigError, match=told):
        check(config, 2)


def _refused():
    try:
        fused_adamw([{"params": [torch.nn.Parameter(torch.zeros(3))]}])
    except ConfigError as error:
        return str(error)


def test_the_fused_optimizer_is_refused_on_a_cpu(world2):
    refused = (
        "optimizer=fused_adamw: its kernels are for GPUs, and this machine computes on its CPU; type "
        "optimizer=adamw"
    )
    assert world2.run(_refused) == [refused] * 2


def _offloaded(factory):
    return steps_of("offload", factory, steps=3)[1]


def is_compiled() -> bool:
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    built = list(Path(root).glob("**/cpu_adam/cpu_adam.so"))
    return any(not (path.parent / "lock").exists() for path in built)  # of a build that was killed


@pytest.mark.skipif(
    not is_compiled(), reason="DeepSpeed's cpu_adam is not compiled here, which takes minutes"
)
def test_the_cpu_optimizer_gives_the_numbers_of_torchs_under_offload(world2):
    """To 1% of one step of lr: it takes reciprocals where torch divides."""
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    ours = world2.run(_offloaded, partial(cpu_adamw, **settings))[0]
    torchs = world2.run(_offloaded, partial(torch.optim.AdamW, **settings))[0]
    for name, expected in torchs.items():
        assert (ours[name] - expected).abs().max() < 0.01 * settings["lr"], name
