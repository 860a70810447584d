"""Dtypes of every mode, on real engines of two ranks: stored, computed in, sent, stepped."""

import random
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models.variants import ARCHITECTURES
from tests.training import tiny
from tests.training.tiny import PRECISIONS
from wan_ds import streams
from wan_ds.errors import CheckpointError
from wan_ds.models.adapter import AdapterSettings, is_adapter, plain_name
from wan_ds.models.quantised import Float8Linear
from wan_ds.models.weights import Drawn, build_transformer, on_meta
from wan_ds.training.precision import FAMILIES, AuditRow, Precision, audit_table, family_of, named

F32, BF16, F16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
ARCHITECTURE = ARCHITECTURES["i2v"]  # every family of modules
WIDE = ARCHITECTURES["t2v"] | {"ffn_dim": 512, "num_layers": 4, "attention_head_dim": 24}
# As conf/parallelism has it; else DeepSpeed computes linear layers itself, and adds biases after rounding.
ZERO = tiny.ZERO | {3: tiny.ZERO[3] | {"memory_efficient_linear": False}}
SEED = 3
LR = 1e-5
ADAPTER = AdapterSettings(rank=2, alpha=4.0, targets=["to_q", "ffn.net.2"])
FAMILIES_OF_LINEAR = ("text", "image", "attention", "ffn", "head")


class Mixed:
    """A base whose tensors are each stored in one of several dtypes, biases apart from their weights."""

    where = "a mixed base"

    def __init__(self, *dtypes, architecture=ARCHITECTURE):
        drawn = Drawn(on_meta(architecture), SEED, "all")
        chosen = random.Random(SEED)
        self.tensors = {
            name: (tensor + 0.1 * streams.normal(tensor.shape, SEED, name)).to(chosen.choice(dtypes))
            for name, tensor in drawn.read(drawn.tensors).items()
        }
        self.reads = 0

    def read(self, names):
        self.reads += 1
        return {name: self.tensors[name].clone() for name in names}


def built(precision, stage, source, adapter=None, architecture=ARCHITECTURE):
    from wan_ds.training.engine import partition_of

    return build_transformer(
        architecture,
        source,
        seed=SEED,
        dtype_of=precision.dtype_of,
        adapter=adapter,
        frozen_storage=precision.frozen_storage,
        partition=partition_of(dict(ZERO[stage])),
    ).train()


def engine_of(precision, stage, source, adapter=None, architecture=ARCHITECTURE, recompute=False):
    from wan_ds.parallel.mesh import Mesh
    from wan_ds.training.engine import Engine
    from wan_ds.training.optimizer import build_optimizer

    network = built(precision, stage, source, adapter, architecture)
    if recompute:
        network.enable_gradient_checkpointing()
    return Engine(
        network,
        build_optimizer(network, partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)),
        Mesh(),
        zero_optimization=dict(ZERO[stage]),
        micro_batch_size=1,
        max_grad_norm=1.0,
        precision=precision,
    )


def inputs(*key, architecture=ARCHITECTURE):
    """One clip of 2 x 2 x 2 tokens with random text and image."""
    given = {
        "hidden_states": [streams.normal((architecture["in_channels"], 2, 4, 4), SEED, "clip", *key)],
        "timestep": torch.tensor([1000 * streams.uniform(SEED, "timestep", *key)]),
        "encoder_hidden_states": streams.normal((1, 512, architecture["text_dim"]), SEED, "text", *key),
    }
    if "image_dim" in architecture:
        image = streams.normal((1, 257, architecture["image_dim"]), SEED, "image", *key)
        given["encoder_hidden_states_image"] = image
    return given


def loss_of(clips, *key):
    target = streams.normal(tuple(clips[0].shape), SEED, "target", *key)
    return (clips[0].float() - target).square().mean()


class Sent(TorchDispatchMode):
    """Counts the numbers that collectives sum over ranks, by dtype."""

    def __init__(self):
        super().__init__()
        self.numbers = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "reduce" in func.overloadpacket.__name__:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            largest = max(tensors, key=torch.Tensor.numel)
            self.numbers[largest.dtype] += largest.numel()
        return func(*args, **(kwargs or {}))


def _linear_outputs(network):
    """Hooks that note, by parameter, the dtype in which each layer with a product gives its output."""
    seen = {}

    def note(name, layer, given, output):
        seen[f"{name}.weight"] = output.dtype

    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv3d):
            layer.register_forward_hook(partial(note, name))
    return seen


def _audited(precision, stage, dtypes, adapter):
    """The audit before the first step, and what that step really did."""
    from deepspeed.utils import safe_get_full_fp32_param

    from wan_ds.training.precision import audit

    source = Mixed(*dtypes)
    engine = engine_of(precision, stage, source, adapter)
    rows = audit(engine)
    outputs = _linear_outputs(engine.module)
    clips = engine.train(**inputs(dist.get_rank()))
    before = {name: engine.shard(p).clone() for name, p in engine.parameters()}
    trainable = [(name, p) for name, p in engine.parameters() if p.requires_grad]
    masters = {name: engine.full_master(p).clone() for name, p in trainable}
    sent = Sent()
    with sent:
        engine.backward(loss_of(clips, dist.get_rank()) / 2)
        assert engine.step(LR)
    moved = {name: (engine.full_master(p) != masters[name]).float().mean().item() for name, p in trainable}
    after = {name: (engine.shard(p) != before[name]).float().mean().item() for name, p in engine.parameters()}
    # DeepSpeed's own way to the masters; a frozen one holds to the bit this rank's stretch of what was read
    for name, p in engine.parameters():
        if p.requires_grad:
            assert torch.equal(engine.full_master(p), safe_get_full_fp32_param(p)), name
        elif p.dtype != U8 and not name.endswith("row_scale"):
            stretch = source.tensors[plain_name(name)].flatten()
            if stage == 3:
                share = engine.shard(p).ds_numel
                stretch = stretch[dist.get_rank() * share :][:share]
            assert torch.equal(engine.shard(p).flatten()[: stretch.numel()], stretch), name
    parts = {name: None if (m := engine.master(p)) is None else m.clone() for name, p in trainable}
    wholes = {name: engine.full_master(p).clone() for name, p in trainable}
    sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in engine.parameters()}
    dtypes_sent = {
        dtype: sum(sizes[name] for name, p in trainable if engine.gradient_dtype(p) == dtype)
        for dtype in (F32, BF16)
    }
    return rows, outputs, (moved, after), (parts, wholes), (sent.numbers, dtypes_sent, len(trainable))


SOME = (F32, BF16)
ANY = (F32, BF16, F16)
STORED = {"fp32": ANY, "bf16_autocast": SOME, "bf16_params": ANY, "lora": ANY}
AUDITED = [(mode, stage) for mode in STORED for stage in (2, 3)] + [("bf16_params", 1)]


@pytest.mark.parametrize(("mode", "stage"), AUDITED)
def test_each_mode_stores_computes_steps_and_sends_as_its_audit_says(world2, mode, stage):
    adapter = ADAPTER if mode == "lora" else None
    ranks = world2.run(_audited, PRECISIONS[mode], stage, STORED[mode], adapter)
    rows, outputs, (moved, after), _, (sent, announced, tensors) = ranks[0]
    assert rows == ranks[1][0]
    found = {row.family: row for row in rows if row.is_trainable or mode == "lora"}
    assert list(found) == [family for family in FAMILIES if family != "adapter" or mode == "lora"]

    trainable = [row for row in rows if row.is_trainable]
    stored = BF16 if mode == "bf16_params" else F32
    assert all((row.stored, row.masters) == ({stored}, {F32}) for row in trainable)
    if mode == "lora":
        assert [row.family for row in trainable] == ["adapter"]
        assert set().union(*(row.stored for row in rows)) == set(ANY)
        assert found["adapter"].computes == found["adapter"].gradients == {F32}
        # each product in the dtype of its weight
        assert set().union(*(found[family].computes for family in FAMILIES_OF_LINEAR)) == set(ANY)
    else:
        product = F32 if mode == "fp32" else BF16
        assert all(found[family].computes == {product} for family in ("patch_embedding", *FAMILIES_OF_LINEAR))
        travels = BF16 if mode == "bf16_autocast" else F32
        assert all(found[family].gradients == {travels} for family in FAMILIES_OF_LINEAR)
        assert all(found[f].gradients == {F32} for f in ("patch_embedding", "time", "norms", "modulation"))
    assert all(found[family].computes == {F32} for family in ("time", "norms", "modulation"))

    # the same, seen by hooks in the training step
    for family in found:
        seen = {dtype for name, dtype in outputs.items() if family_of(name) == family}
        assert seen <= found[family].computes and (seen or family in ("norms", "modulation")), family
    # what was sent beyond the gradients: the norm, and ZeRO-3's padding of each tensor to two equal parts
    for dtype, numbers in announced.items():
        assert 0 <= sent[dtype] - numbers <= tensors + 4, (dtype, sent)

    # a lora_A has no gradient before lora_B has moved; some sums of bfloat16 gradients cancel to zero
    assert min(share for name, share in moved.items() if "lora_A" not in name) > 0.9
    if mode == "bf16_params":  # 1e-5 is below half a step of most bfloat16 weights: the masters are needed
        assert sum(after.values()) / len(after) < 0.5
    assert not any(share for name, share in after.items() if name not in moved)
    for name, whole in ranks[0][3][1].items():
        parts = [part for rank in ranks if (part := rank[3][0][name]) is not None]
        assert torch.equal(torch.cat(parts).view_as(whole), whole), name


def _stored_in_8_bits(stage):
    from wan_ds.training.precision import audit

    precision = named("fp32", "bf16", None, "float8_e4m3fn")
    engine = engine_of(precision, stage, Mixed(*ANY), ADAPTER)
    rows = {row.family: row for row in audit(engine)}
    layers = sum(type(module) is Float8Linear for module in engine.module.modules())
    return rows, layers


def test_the_audit_sees_through_a_base_in_8_bits(world2):
    rows, layers = world2.run(_stored_in_8_bits, 3)[0]
    assert layers == 2 * (8 + 2 + 2)
    assert rows["ffn"].stored == rows["attention"].stored == {U8, F32, BF16}  # codes, scales and biases
    assert rows["ffn"].computes == rows["attention"].computes == rows["head"].computes == {BF16}
    assert rows["norms"].stored == rows["modulation"].stored == {BF16}
    assert rows["adapter"].stored == rows["adapter"].computes == {F32}


def test_the_table_has_a_line_for_each_family():
    rows = [
        AuditRow("text", True, 4, {F32}, {F32}, {BF16}, {BF16}),
        AuditRow("norms", False, 12, {F32, BF16}, set(), {F32}, set()),
    ]
    assert audit_table(rows).splitlines() == [
        "family          tensors  stored                masters  computes in  gradients travel in",
        "text            4        float32               float32  bfloat16     bfloat16",
        "norms (frozen)  12       bfloat16 and float32  -        float32      -",
    ]


def test_every_parameter_of_every_variant_belongs_to_a_family():
    for architecture in ARCHITECTURES.values():
        assert {family_of(name) for name, _ in on_meta(architecture).named_parameters()} <= set(FAMILIES)


def test_one_function_gives_every_dtype():
    for mode, trained in {"fp32": F32, "bf16_autocast": F32, "bf16_params": BF16, "lora": F32}.items():
        dtype_of = PRECISIONS[mode].dtype_of
        for stored in SOME:
            assert (dtype_of("a", stored, True), dtype_of("a", stored, False)) == (trained, stored)
        assert dtype_of("a", F16, True) == trained
    assert named("fp32", "bf16", "bf16").dtype_of("a", F16, False) == BF16
    with pytest.raises(ValueError, match="compute in it"):
        Precision(trainable_dtype=BF16)


@pytest.mark.parametrize("mode", PRECISIONS)
def test_a_frozen_float16_tensor_is_refused_under_autocast_before_anything_is_read(mode):
    source = Mixed(F32)
    source.tensors["blocks.1.ffn.net.2.bias"] = source.tensors["blocks.1.ffn.net.2.bias"].half()
    build = partial(build_transformer, ARCHITECTURE, source, is_trainable=lambda name: "attn" in name)
    if mode != "bf16_autocast":
        assert build(dtype_of=PRECISIONS[mode].dtype_of).blocks[1].ffn.net[2].bias.dtype == F16
        return
    told = r"^blocks\.1\.ffn\.net\.2\.bias is stored as float16.*precision\.frozen_dtype=bf16.*precision=lora"
    with pytest.raises(CheckpointError, match=told):
        build(dtype_of=PRECISIONS[mode].dtype_of)
    assert source.reads == 0
    model = build(dtype_of=named("fp32", "bf16", "bf16").dtype_of)
    assert model.blocks[1].ffn.net[2].bias.dtype == model.proj_out.weight.dtype == BF16


MICRO_BATCHES = 2


def _bf16_window(stage):
    """Reduced gradients and masters of one window of an engine, and of plain torch on both ranks' data."""
    precision = PRECISIONS["bf16_params"]
    engine = engine_of(precision, stage, Mixed(F32))
    gradients = {}

    def note():
        gradients.update({name: engine.full_gradient(p).float().clone() for name, p in engine.parameters()})

    engine.before_update = note
    for micro_batch in range(MICRO_BATCHES):
        key = dist.get_rank(), micro_batch
        engine.backward(loss_of(engine.train(**inputs(*key)), *key) / (2 * MICRO_BATCHES))
    assert engine.step(LR)
    ours = {name: engine.full_master(p).clone() for name, p in engine.parameters()}
    weights = {name: engine.shard(p).clone() for name, p in engine.parameters()} if stage < 3 else None

    plain = built(precision, 0, Mixed(F32))
    masters = {name: nn.Parameter(p.detach().float()) for name, p in plain.named_parameters()}
    for master in masters.values():
        master.grad = torch.zeros_like(master)
    for key in ((rank, micro_batch) for rank in range(2) for micro_batch in range(MICRO_BATCHES)):
        plain.zero_grad()
        (loss_of(plain(**inputs(*key)), *key) / (2 * MICRO_BATCHES)).backward()
        for name, p in plain.named_parameters():
            masters[name].grad += p.grad.float()
    summed = {name: master.grad.clone() for name, master in masters.items()}
    nn.utils.clip_grad_norm_(masters.values(), 1.0)
    decayed = [master for name, master in masters.items() if "norm" not in name and master.ndim > 1]
    tables = [master for name, master in masters.items() if "scale_shift_table" in name]
    decays = {id(master): 0.1 for master in decayed} | {id(master): 0.0 for master in tables}
    groups = [{"params": [m], "weight_decay": decays.get(id(m), 0.0)} for m in masters.values()]
    torch.optim.AdamW(groups, lr=LR).step()
    return gradients, summed, ours, {name: m.detach() for name, m in masters.items()}, weights


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_parameters_have_float32_gradients_and_masters_like_plain_torch(world2, stage):
    """Four products' gradients in bfloat16, summed in float32: 1e-6 of a tensor's largest is the order of
    sums, where a sum in bfloat16 would be off by 4e-3.

    What both blocks see of text and image gets its gradient as a sum in bfloat16 over them, in an order that
    ZeRO-3's hooks change: two roundings, 2**-7."""
    gradients, summed, ours, expected, weights = world2.run(_bf16_window, stage)[0]
    for name, gradient in summed.items():
        is_shared = stage == 3 and ("text_embedder" in name or "image_embedder" in name)
        bound = 2**-7 if is_shared else 1e-6
        assert (gradients[name] - gradient).abs().max() <= bound * gradient.abs().max(), name
        if is_shared:
            continue
        # clipped gradients near Adam's eps of 1e-8 show the rounding of the norm
        assert (ours[name] - expected[name]).abs().max() < 0.02 * LR, name
        assert weights is None or torch.equal(weights[name], ours[name].bfloat16()), name


def _skipped():
    engine = engine_of(PRECISIONS["bf16_params"], 1, Mixed(F32))
    before = {name: engine.full_master(p).clone() for name, p in engine.parameters()}
    outcomes = []
    for factor in (float("nan") if dist.get_rank() else 1.0, 1.0):
        engine.backward(factor * loss_of(engine.train(**inputs(0)), 0) / 2)
        outcomes.append(engine.step(LR))
        same = all(torch.equal(engine.full_master(p), before[name]) for name, p in engine.parameters())
        outcomes.append(same)
    return outcomes


def test_stage_1_skips_a_step_of_bf16_parameters_that_is_not_finite_and_goes_on(world2):
    assert world2.run(_skipped) == [[False, True, True, False]] * 2


def _frozen_beside_bf16():
    source, precision = Mixed(*ANY), PRECISIONS["bf16_params"]
    from wan_ds.parallel.mesh import Mesh
    from wan_ds.training.engine import Engine
    from wan_ds.training.optimizer import build_optimizer

    network = build_transformer(
        ARCHITECTURE, source, dtype_of=precision.dtype_of, is_trainable=lambda name: "ffn" in name
    )
    optimizer = build_optimizer(network, torch.optim.AdamW)
    options = {"zero_optimization": dict(ZERO[2]), "micro_batch_size": 1, "max_grad_norm": 1.0}
    engine = Engine(network, optimizer, Mesh(), **options, precision=precision)
    return [
        (name, str(p.dtype), str(source.tensors[name].dtype))
        for name, p in engine.parameters()
        if not p.requires_grad and p.dtype != source.tensors[name].dtype
    ]


def test_deepspeed_casts_no_frozen_parameter_of_a_bf16_engine(world2):
    assert world2.run(_frozen_beside_bf16) == [[], []]


class _Made(TorchDispatchMode):
    """Every storage of bfloat16 that an operation makes, for as long as anything holds it."""

    def __init__(self):
        super().__init__()
        self._storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == BF16:
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self):
        return sum(nbytes for reference, nbytes in self._storages.values() if not reference.expired())


def _copies(stage, cache):
    """bfloat16 that is alive when a training forward ends, as a share of the model in bfloat16."""
    precision = PRECISIONS["bf16_autocast"]
    engine = engine_of(precision, stage, Mixed(F32, architecture=WIDE), architecture=WIDE, recompute=True)
    torch.set_autocast_cache_enabled(cache or torch.is_autocast_cache_enabled())
    alive = []
    made = _Made()
    engine.module.proj_out.register_forward_hook(lambda *args: alive.append(made.alive()))
    with made:
        loss_of(engine.train(**inputs(0, architecture=WIDE)), 0)
    torch.set_autocast_cache_enabled(False)
    return alive[0] / sum(2 * getattr(p, "ds_numel", p.numel()) for _, p in engine.parameters())


@pytest.mark.parametrize("stage", [2, 3])
def test_no_second_copy_of_the_model_lives_through_the_forward_under_autocast(world2, stage):
    """Activations and the layer at hand are a fifth of this model; autocast's cache would hold all of it."""
    for share in world2.run(_copies, stage, cache=False):
        assert share < 0.3
    if stage == 2:
        assert min(world2.run(_copies, stage, cache=True)) > 0.9


def _inferred(mode, stage):
    precision = PRECISIONS[mode]
    source, adapter = Mixed(*STORED[mode]), ADAPTER if mode == "lora" else None
    engine = engine_of(precision, stage, source, adapter)
    trained = engine.train(**inputs(0))[0].detach()
    with engine.inference() as module:
        return torch.equal(module(**inputs(0))[0], trained), trained.dtype


@pytest.mark.parametrize("mode", PRECISIONS)
def test_inference_computes_as_training_does(world2, mode):
    for stage in (2, 3) if mode == "bf16_autocast" else (3,):
        assert [equal for equal, _ in world2.run(_inferred, mode, stage)] == [True, True]


def _frozen(mode, stage):
    """A frozen expert: is its output that of the bare model; its bytes here; the most gathered at once."""
    from wan_ds.parallel.mesh import Mesh
    from wan_ds.training.engine import FrozenEngine, partition_of
    from wan_ds.training.precision import audit

    precision = PRECISIONS[mode]
    source = Mixed(*SOME, architecture=WIDE)
    build = partial(
        build_transformer, WIDE, source, dtype_of=precision.dtype_of, is_trainable=lambda _: False
    )
    plain = build()
    if not precision.is_autocast:
        from wan_ds.training.precision import compute_in_own_dtypes

        compute_in_own_dtypes(plain)
    with torch.no_grad(), torch.autocast("cpu", BF16, enabled=mode == "bf16_autocast"):
        expected = plain(**inputs(0, architecture=WIDE))[0]
    whole = sum(p.numel() for p in plain.parameters())
    sharded = build(partition=partition_of(dict(ZERO[stage])))
    engine = FrozenEngine(sharded, Mesh(), zero_optimization=dict(ZERO[stage]), precision=precision)
    gathered = []

    def note(*args):
        gathered.append(sum(p.numel() for _, p in engine.parameters()))

    for layer in engine.module.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(note)
    with engine.inference() as module:
        given = module(**inputs(0, architecture=WIDE))[0]
    held = sum(engine.shard(p).numel() for _, p in engine.parameters())
    rows = audit(engine)
    kept = all(engine.shard(p).dtype == source.tensors[name].dtype for name, p in engine.parameters())
    silent = not any(row.is_trainable or row.masters or row.gradients for row in rows)
    return torch.equal(given, expected), kept and silent, held / whole, max(gathered) / whole


@pytest.mark.parametrize(("mode", "stage"), [("bf16_autocast", 3), ("lora", 3), ("bf16_params", 2)])
def test_a_frozen_expert_is_sharded_gathered_block_by_block_and_computes_as_any(world2, mode, stage):
    for equal, kept, held, gathered in world2.run(_frozen, mode, stage):
        assert equal and kept
        assert held == pytest.approx(0.5, rel=0.01) if stage == 3 else held == 1.0
        assert 0 < gathered < 0.3 if stage == 3 else gathered == 1.0


def _beside_a_frozen_one(stage):
    from wan_ds.parallel.mesh import Mesh
    from wan_ds.training.engine import FrozenEngine

    precision, source = PRECISIONS["bf16_autocast"], Mixed(*SOME)
    engine = engine_of(precision, stage, source, ADAPTER)
    sent = {engine.gradient_dtype(p) for _, p in engine.parameters() if p.requires_grad}
    FrozenEngine(built(precision, stage, source), Mesh(), zero_optimization=ZERO[stage], precision=precision)
    engine.backward(loss_of(engine.train(**inputs(0)), 0) / 2)
    return engine.step(LR), sent == {
        engine.gradient_dtype(p) for _, p in engine.parameters() if p.requires_grad
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_expert_changes_nothing_of_how_an_engine_beside_it_sends_gradients(world2, stage):
    assert world2.run(_beside_a_frozen_one, stage) == [(True, True)] * 2


def test_the_adapters_names_are_an_adapters():
    assert is_adapter("blocks.0.attn1.to_q.lora_A.default.weight")
    assert family_of("blocks.0.attn1.to_q.lora_A.default.weight") == "adapter"
    assert family_of("blocks.0.attn1.to_q.base_layer.weight") == "attention"
