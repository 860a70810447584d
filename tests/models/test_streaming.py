"""Weights from a file into a model that several ranks share: block by block, read by one of them."""

import json
import re
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.models.variants import ARCHITECTURES, randomised
from tests.training import tiny
from tests.world import World
from wan_ds.errors import CheckpointError
from wan_ds.interop.tensor_files import open_tensor_files
from wan_ds.models.weights import Drawn, build_transformer, on_meta
from wan_ds.parallel.mesh import Mesh
from wan_ds.training.engine import partition_of
from wan_ds.training.sources import ByOneRank, agreed, transformer_source

KEPT_IN_FLOAT32 = ("scale_shift_table", "time_embedder", "norm2")  # what diffusers' released files hold so


class Counting:
    """A source that notes what is asked of it."""

    def __init__(self, source):
        self.where, self.tensors, self._source = source.where, source.tensors, source
        self.asked = []

    def read(self, names):
        self.asked += list(names)
        return self._source.read(names)


def written(folder: Path, variant: str = "t2v") -> Path:
    """A file of random weights in bfloat16, the sensitive ones in float32."""
    model = randomised(WanTransformer3DModel(**ARCHITECTURES[variant]))
    tensors = {
        name: tensor if any(part in name for part in KEPT_IN_FLOAT32) else tensor.to(torch.bfloat16)
        for name, tensor in model.state_dict().items()
    }
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    path.parent.mkdir()
    save_file(tensors, path)
    return path


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def gathered(model) -> dict[str, torch.Tensor]:
    """Whole parameters under ZeRO-3, by DeepSpeed's own collective."""
    import deepspeed

    found = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


def _streamed(path, variant, zero, trains):
    source = Counting(open_tensor_files(path))
    model = build_transformer(
        ARCHITECTURES[variant],
        ByOneRank(source),
        is_trainable=lambda name: trains and name.startswith("blocks."),
        partition=partition_of(tiny.ZERO[zero]),
    )
    shards = {name: tuple(p.ds_tensor.shape) for name, p in model.named_parameters()}
    held = {name: p.numel() for name, p in model.named_parameters()}
    grads = {name for name, p in model.named_parameters() if p.requires_grad}
    rope = (model.rope.freqs_cos, model.rope.freqs_sin)
    return source.asked, gathered(model), shards, held, grads, rope


@pytest.mark.parametrize("variant", ["t2v", "flf2v"])
def test_two_ranks_hold_the_file_to_the_byte_each_tensor_read_once_by_one_of_them(world2, tmp_path, variant):
    path = written(tmp_path, variant)
    stored = load_file(path)
    results = world2.run(_streamed, path, variant, 3, trains=False)
    for _, weights, shards, held, grads, rope in results:
        assert weights.keys() == stored.keys()
        for name, tensor in stored.items():
            assert weights[name].dtype == tensor.dtype and weights[name].shape == tensor.shape, name
            assert torch.equal(bits(weights[name]), bits(tensor)), name
            assert shards[name] == (-(-tensor.numel() // 2),) and held[name] == 0
        assert not grads
        stock = WanTransformer3DModel(**ARCHITECTURES[variant]).rope
        assert rope[0].dtype == torch.float32  # of cosines up to 1; diffusers rounds each angle otherwise
        assert (rope[0] - stock.freqs_cos).abs().max() < 1e-7 > (rope[1] - stock.freqs_sin).abs().max()
    assert sorted(results[0][0]) == sorted(stored) and results[1][0] == []


def test_trainable_tensors_become_float32_and_frozen_ones_stay_as_stored(world2, tmp_path):
    path = written(tmp_path)
    stored = load_file(path)
    for _, weights, _, _, grads, _ in world2.run(_streamed, path, "t2v", "offload", trains=True):
        assert grads == {name for name in stored if name.startswith("blocks.")}
        for name, tensor in stored.items():
            expected = tensor.float() if name in grads else tensor
            assert weights[name].dtype == expected.dtype and torch.equal(weights[name], expected), name


def _drawn(seed):
    model = on_meta(ARCHITECTURES["t2v"])
    source = ByOneRank(Drawn(model, seed, "low_noise"))
    partition = partition_of(tiny.ZERO[3])
    return gathered(build_transformer(ARCHITECTURES["t2v"], source, partition=partition))


def test_weights_of_the_seed_are_the_same_streamed_and_whole(world2):
    whole = build_transformer(ARCHITECTURES["t2v"], None, seed=3, expert="low_noise").state_dict()
    for weights in world2.run(_drawn, 3):
        assert weights.keys() == whole.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in whole.items())


def _engine(network, stage):
    return tiny.expert("all", None, Mesh(), stage=stage, network=network)


def _whole(path, stage):
    """What a rank holds that did not read, once DeepSpeed has made its engine."""
    model = build_transformer(
        ARCHITECTURES["t2v"], ByOneRank(open_tensor_files(path)), partition=partition_of(tiny.ZERO[stage])
    )
    if dist.get_rank() == 1:
        for parameter in model.parameters():  # memory that was not written may hold the right numbers by luck
            parameter.data.fill_(7.0)
    expert = _engine(model.train(), stage)
    buffers = {name: buffer.clone() for name, buffer in expert.engine.module.named_buffers()}
    return {name: p.detach().clone() for name, p in expert.engine.parameters()}, buffers


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_sharding_deepspeed_gives_every_rank_what_one_read(world2, tmp_path, stage):
    path = written(tmp_path)
    stored = load_file(path)
    results = world2.run(_whole, path, stage)
    for weights, _ in results:
        assert weights.keys() == stored.keys()
        assert all(torch.equal(weights[name], tensor.float()) for name, tensor in stored.items())
    buffers = [buffers for _, buffers in results]
    assert set(buffers[0]) == {"rope.freqs_cos", "rope.freqs_sin"}
    assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in buffers[0])


def _stepped(path, stage, streamed):
    """The weights and moments of this rank after two steps."""
    if streamed:
        source, partition = ByOneRank(open_tensor_files(path)), partition_of(tiny.ZERO[stage])
        network = build_transformer(tiny.ARCHITECTURE, source, partition=partition).train()
    else:
        network = build_transformer(tiny.ARCHITECTURE, open_tensor_files(path)).train()
    loop = tiny.loop(stage=stage, experts=["high_noise"], network=network)
    for _ in range(2):
        loop.train_step()
    return tiny.state_of(loop.experts["high_noise"])


@pytest.mark.parametrize("stage", [2, 3, "offload", "hpz"])
def test_training_goes_on_from_streamed_weights_as_from_whole_ones(world2, tmp_path, stage):
    path = written(tmp_path)
    streamed = world2.run(_stepped, path, stage, streamed=True)
    whole = world2.run(_stepped, path, stage, streamed=False)
    assert all(tiny.equal(one, other) for one, other in zip(streamed, whole, strict=True))


def _refused(path, weights, expert):
    started = time.monotonic()
    try:
        source = agreed(lambda: transformer_source(path, weights, expert))
        build_transformer(
            ARCHITECTURES["t2v"],
            ByOneRank(source),
            is_trainable=lambda name: False,  # noqa: ARG005
            partition=partition_of(tiny.ZERO[3]),
        )
    except CheckpointError as error:
        return str(error), time.monotonic() - started
    return None


def _rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _shard(path, damage):
    """The same model in shards with an index, and the damage done to their paths."""
    path.unlink()
    model = WanTransformer3DModel(**ARCHITECTURES["t2v"])
    model.save_pretrained(path.parent, max_shard_size="100KB")
    shards = sorted(path.parent.glob("*.safetensors"))
    assert len(shards) > 2
    damage(shards)


def _swap(shards):
    one, other = (shard.read_bytes() for shard in shards[:2])
    shards[0].write_bytes(other)
    shards[1].write_bytes(one)


def _other_variant(path, variant):
    path.unlink()
    path.parent.rmdir()
    written(path.parent.parent, variant)


DAMAGE = {  # what is done to the file, and what must be told of it
    "missing": (
        lambda path: _rewrite(path, lambda t: t.pop("blocks.1.norm2.weight")),
        r"does not fit model\.transformer; missing: blocks\.1\.norm2\.weight$",
    ),
    "unexpected": (
        lambda path: _rewrite(path, lambda t: t.update({"blocks.1.extra": torch.ones(1)})),
        r"does not fit model\.transformer; unexpected: blocks\.1\.extra$",
    ),
    "mis-shaped": (
        lambda path: _rewrite(path, lambda t: t.update({"blocks.1.attn1.to_q.bias": torch.ones(4)})),
        r"of another shape: blocks\.1\.attn1\.to_q\.bias \[4\] there, \[48\] here$",
    ),
    "image to video": (
        lambda path: _other_variant(path, "i2v"),
        r": it has the image keys of Wan 2\.1's image to video; in_channels: 36 there, 16 here; "
        "image_dim: 24 there, none here; choose the model that it was released as",
    ),
    "image to video of 2.2": (
        lambda path: _other_variant(path, "i2v-a14b"),
        r"does not fit model\.transformer; in_channels: 36 there, 16 here; choose the model",
    ),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "truncated or was written over"),
    "scaled fp8": (
        lambda path: _rewrite(path, lambda t: t.update({"blocks.0.ffn.net.2.scale_weight": torch.ones(1)})),
        r"fp8 weights with scales \(blocks\.0\.ffn\.net\.2\.scale_weight\): made for inference",
    ),
    "fp8": (
        lambda path: _rewrite(
            path, lambda t: t.update({"proj_out.weight": t["proj_out.weight"].to(torch.float8_e4m3fn)})
        ),
        r"holds fp8 weights \(proj_out\.weight\)",
    ),
    "swapped shards": (lambda path: _shard(path, _swap), "shards are swapped or of two downloads"),
    "truncated shard": (
        lambda path: _shard(path, lambda shards: shards[1].write_bytes(shards[1].read_bytes()[:-1])),
        "00002-of-.*safetensors is truncated or was written over",
    ),
    "missing shard": (
        lambda path: _shard(path, lambda shards: shards[1].unlink()),
        "the index names .*00002-of-.*safetensors, not there",
    ),
    "two experts for one": (
        lambda path: (path.parent.parent / "transformer_2").mkdir(),
        r"holds two experts \(transformer and transformer_2\) and the model declares one, all",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_used_is_one_error_on_every_rank(world2, tmp_path, damage):
    path = written(tmp_path)
    change, words = DAMAGE[damage]
    change(path)
    (one, seconds), (other, _) = world2.run(_refused, str(tmp_path), "transformer", "all", timeout=60)
    assert one == other and "\n" not in one and re.search(words, one) and seconds < 30, one


def test_two_experts_without_a_second_transformer_are_refused_on_every_rank(world2, tmp_path):
    written(tmp_path)
    (one, _), (other, _) = world2.run(_refused, str(tmp_path), "transformer_2", "low_noise", timeout=60)
    assert one == other and "holds one transformer and the model declares two experts" in one


def _seen_by_one(path):
    """The header of rank 1's file alone is unreadable, as when a node lacks it."""
    place = path if dist.get_rank() == 0 else path.with_name("elsewhere.safetensors")
    try:
        agreed(lambda: open_tensor_files(place))
    except CheckpointError as error:
        return str(error)
    return None


def test_a_file_that_one_rank_does_not_see_is_an_error_of_all(world2, tmp_path):
    messages = world2.run(_seen_by_one, written(tmp_path), timeout=60)
    assert messages[0] == messages[1] and "elsewhere.safetensors cannot be read" in messages[0]


def _cut_while_read(path):
    source = ByOneRank(open_tensor_files(path))
    dist.barrier()
    if dist.get_rank() == 0:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 40_000)
    try:
        build_transformer(ARCHITECTURES["t2v"], source, partition=partition_of(tiny.ZERO[3]))
    except CheckpointError as error:
        return str(error)
    return None


def test_a_read_that_fails_on_the_reading_rank_is_an_error_of_all(world2, tmp_path):
    messages = world2.run(_cut_while_read, written(tmp_path), timeout=60)
    assert messages[0] == messages[1] and "start anew once nothing writes to it" in messages[0]


WIDE = {
    "patch_size": [1, 2, 2],
    "num_layers": 8,
    "num_attention_heads": 8,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 64,
    "freq_dim": 64,
    "ffn_dim": 11776,
}
MB = 2**20


def _write_wide(path: Path) -> int:
    """About 1 GB of float32 in safetensors' format, one megabyte of random numbers over and over."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in WanTransformer3DModel(**WIDE).named_parameters()}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape.numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        chunk = torch.randn(MB // 4 - 1).numpy().tobytes()  # not a power of two: no two tensors look alike
        for start in range(0, end, len(chunk)):
            file.write(chunk[: end - start])
    return end


def _resident() -> int:
    """Resident bytes of this process, mapped pages among them."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])


def _peak(path):
    """The largest resident size above what the interpreter had, sampled every 10 ms; and the shards."""
    architecture, partition = WIDE, partition_of(tiny.ZERO[3])
    dist.barrier()
    before = peak = _resident()
    done = threading.Event()

    def sample():
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, _resident())

    sampler = threading.Thread(target=sample)
    sampler.start()
    started = time.monotonic()
    source = ByOneRank(agreed(lambda: open_tensor_files(path)))
    model = build_transformer(architecture, source, partition=partition)
    seconds = time.monotonic() - started
    done.set()
    sampler.join()
    shards = sum(p.ds_tensor.numel() * 4 for p in model.parameters())
    block = sum(p.ds_numel * 4 for p in model.blocks[0].parameters())
    rank, wrong = dist.get_rank(), []
    for name, tensor in open_tensor_files(path).read(["blocks.3.ffn.net.2.weight", "proj_out.bias"]).items():
        shard = model.get_parameter(name).ds_tensor
        half = tensor.flatten()[rank * shard.numel() : (rank + 1) * shard.numel()]
        wrong += [] if torch.equal(bits(shard), bits(half)) else [name]
    return {
        "above": peak - before,
        "before": before,
        "shards": shards,
        "block": block,
        "seconds": seconds,
        "wrong": wrong,
    }


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_streaming_a_gigabyte_needs_the_shards_and_one_block(tmp_path):
    path = tmp_path / "wide.safetensors"
    world = World(2)  # fresh ones, whose interpreters hold nothing of other tests
    try:
        size = _write_wide(path)
        results = world.run(_peak, path, timeout=100)
    finally:
        world.kill()
        path.unlink()
    assert size > 1e9
    for rank, r in enumerate(results):
        told = {key: f"{r[key] / MB:.0f} MB" for key in ("above", "shards", "block", "before")}
        print(f"rank {rank}: {told}, read in {r['seconds']:.1f} s")  # noqa: T201
        assert r["wrong"] == []
        assert r["shards"] < 0.51 * size
        assert r["above"] < r["shards"] + r["block"] + 300 * MB
