"""LoRA on the transformer, against W + scale B A written out: names, initialisation, outputs, gradients,
ranks."""

import math
import re

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn
from torch.nn import functional as F

from tests.models.test_transformer import (
    batch_of,
    distance,
    results,
    stock,
    stock_alone,
    through_clips,
    through_tensor,
)
from tests.models.variants import ARCHITECTURES
from tests.training import tiny
from wan_ds import streams
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.models.adapter import AdapterSettings, adapter_names, base_names, inject, plain_name, resolve
from wan_ds.models.weights import build_transformer, on_meta, refuse_misfit
from wan_ds.parallel.mesh import Mesh
from wan_ds.training.engine import partition_of

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
IMAGE = ["attn2.add_k_proj", "attn2.add_v_proj"]
FEED_FORWARD = ["ffn.net.0.proj", "ffn.net.2"]
# Two float32 computations of one formula, as in test_transformer.
TOLERANCE = 1e-5
MIXED = AdapterSettings(
    rank=4,
    alpha=6.0,
    targets=[*ATTENTION, *FEED_FORWARD],
    rslora=True,
    rank_pattern={"attn1.to_q": 2, "ffn.net.2": 3},
    alpha_pattern={"blocks.1.attn1.to_q": 1.5, "to_q": 5.0},
)


class Held:
    """Tensors in memory as a source."""

    where = "held"

    def __init__(self, tensors):
        self.tensors = tensors
        self.asked = []

    def read(self, names):
        self.asked += names
        return {name: self.tensors[name] for name in names}


class Trained:
    """An adapter of random numbers, as a file of one would be."""

    def __init__(self, architecture, settings, seed=0):
        model = on_meta(architecture)
        inject(model, settings)
        rng = torch.Generator().manual_seed(seed)
        self.tensors = {
            plain: torch.randn(model.get_parameter(name).shape, generator=rng) * 0.1
            for plain, name in adapter_names(model).items()
        }
        self._settings = settings

    def scale(self, module):
        """alpha / rank, or alpha / sqrt(rank), by the rule that users read."""
        rank = len(self.tensors[f"{module}.lora_A.weight"])
        alpha = self._settings.alpha
        for end in sorted(self._settings.alpha_pattern, key=len):
            alpha = self._settings.alpha_pattern[end] if module.endswith(end) else alpha
        return alpha / (math.sqrt(rank) if self._settings.rslora else rank)

    @property
    def modules(self):
        return list(dict.fromkeys(name.rpartition(".lora_")[0] for name in self.tensors))

    def of(self, module):
        return (self.tensors[f"{module}.lora_{letter}.weight"] for letter in "AB")


def built(variant="t2v", settings=MIXED, base=None, **options):
    base = stock(variant).state_dict() if base is None else base
    return build_transformer(ARCHITECTURES[variant], Held(base), adapter=settings, **options)


def targets_of(variant):
    return [*ATTENTION, *FEED_FORWARD, *(IMAGE if "image_dim" in ARCHITECTURES[variant] else [])]


# where it sits


def fitting(*targets, variant="i2v", **options):
    return resolve(on_meta(ARCHITECTURES[variant]), AdapterSettings(4, 4.0, targets, **options))


def test_a_target_is_the_end_of_module_names():
    assert fitting("attn1.to_q") == ["blocks.0.attn1.to_q", "blocks.1.attn1.to_q"]
    assert fitting("to_out.0") == [f"blocks.{b}.attn{a}.to_out.0" for b in (0, 1) for a in (1, 2)]
    assert fitting("blocks.1.ffn.net.2", "ffn.net.2") == ["blocks.0.ffn.net.2", "blocks.1.ffn.net.2"]
    assert fitting("add_k_proj") == [f"blocks.{b}.attn2.add_k_proj" for b in (0, 1)]
    assert len(fitting(*ATTENTION, *IMAGE, *FEED_FORWARD)) == 2 * (8 + 2 + 2)


@pytest.mark.parametrize(
    ("target", "variant", "words"),
    [
        ("to_z", "t2v", "adapter.targets: to_z fits no module; there are, in each of 2 blocks: attn1.to_q, "),
        ("o_q", "t2v", "adapter.targets: o_q fits no module"),  # half a name is no end of it
        ("add_k_proj", "t2v", "adapter.targets: add_k_proj fits no module"),
        ("attn1.add_k_proj", "i2v", "fits no module; .*, attn2.add_k_proj, attn2.add_v_proj, ffn.net.0.proj"),
        ("norm_q", "t2v", "norm_q fits blocks.0.attn1.norm_q, and adapters are for the linear layers of"),
        ("to_out", "t2v", "to_out fits blocks.0.attn1.to_out, and adapters are for the linear layers"),
        ("time_proj", "t2v", "time_proj fits condition_embedder.time_proj, and adapters are"),
        ("proj_out", "t2v", "proj_out fits proj_out, and adapters are"),
        ("patch_embedding", "t2v", "patch_embedding fits patch_embedding, and adapters are"),
        ("net.2", "i2v", r"net\.2 fits condition_embedder\.image_embedder\.ff\.net\.2, and adapters are"),
        ("", "t2v", "adapter.targets:  fits no module"),
    ],
)
def test_a_target_of_nothing_or_of_the_wrong_kind_is_an_error_that_lists_what_there_is(
    target, variant, words
):
    with pytest.raises(ConfigError, match=words) as error:
        fitting("to_q", target, variant=variant)
    assert "attn1.to_q, attn1.to_k, attn1.to_v, attn1.to_out.0, attn2.to_q" in str(error.value)


def test_a_pattern_without_an_adapter_below_it_is_an_error():
    with pytest.raises(ConfigError, match=r"adapter\.targets is empty: no module would train; there are"):
        fitting()
    with pytest.raises(ConfigError, match=r"adapter\.rank_pattern: to_z fits no module; there are"):
        fitting("to_q", rank_pattern={"to_z": 4})
    with pytest.raises(ConfigError, match=r"adapter\.alpha_pattern: norm_q fits blocks\.0\.attn1\.norm_q"):
        fitting("to_q", alpha_pattern={"norm_q": 4.0})
    words = r"adapter\.rank_pattern: to_k fits no module that has an adapter; adapter\.targets: to_q, to_v$"
    with pytest.raises(ConfigError, match=words):
        fitting("to_q", "to_v", rank_pattern={"to_k": 4})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 0}, r"adapter\.rank=0: a rank is a whole number from 1 on"),
        ({"rank": 2.5}, r"adapter\.rank=2\.5"),
        ({"rank_pattern": {"to_q": -1}}, r"adapter\.rank_pattern\.to_q=-1"),
        ({"alpha": 0.0}, r"adapter\.alpha=0\.0: the update is scaled by alpha / rank, so alpha is above 0"),
        ({"alpha": math.nan}, r"adapter\.alpha=nan"),
        ({"alpha": math.inf}, r"adapter\.alpha=inf"),
        ({"alpha_pattern": {"to_q": -2.0}}, r"adapter\.alpha_pattern\.to_q=-2\.0"),
        ({"dropout": 1.0}, r"adapter\.dropout=1\.0: a share of inputs, from 0 to below 1"),
        ({"dropout": -0.1}, r"adapter\.dropout=-0\.1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        AdapterSettings(**{"rank": 4, "alpha": 4.0, "targets": ["to_q"]} | change)


def test_the_longest_pattern_decides_the_rank_and_the_scale_of_a_module():
    model, expected = built(), Trained(ARCHITECTURES["t2v"], MIXED)
    wrappers = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}
    assert list(wrappers) == expected.modules == resolve(on_meta(ARCHITECTURES["t2v"]), MIXED)
    ranks = {name: wrapper.lora_A["default"].weight.shape[0] for name, wrapper in wrappers.items()}
    for name, rank in ranks.items():
        assert rank == (2 if "attn1.to_q" in name else 3 if "ffn.net.2" in name else 4)
        assert wrappers[name].scaling["default"] == pytest.approx(expected.scale(name), rel=1e-12)
        assert MIXED.scale_of(name) == pytest.approx(expected.scale(name), rel=1e-12)
    alphas = [MIXED.alpha_of(f"blocks.{name}") for name in ("1.attn1.to_q", "0.attn1.to_q", "1.attn1.to_k")]
    assert alphas == [1.5, 5.0, 6.0]
    assert all(m.lora_dropout["default"].p == 0.25 for m in _wrappers(dropout=0.25))
    assert all(isinstance(m.lora_dropout["default"], nn.Identity) for m in _wrappers(dropout=0.0))


def _wrappers(**options):
    model = on_meta(ARCHITECTURES["t2v"])
    inject(model, AdapterSettings(2, 2.0, ["to_q"], **options))
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def test_an_adapter_is_for_a_model_without_weights():
    with pytest.raises(ValueError, match="on a model of the meta device"):
        inject(build_transformer(ARCHITECTURES["t2v"], None), MIXED)
    before = torch.random.get_rng_state()
    model = on_meta(ARCHITECTURES["t2v"])
    inject(model, MIXED)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)


# names


def test_names_are_plain_whatever_wraps_the_model():
    module = "blocks.0.attn1.to_out.0"
    for name, plain in {
        f"{module}.base_layer.weight": f"{module}.weight",
        f"base_model.model.{module}.base_layer.bias": f"{module}.bias",
        f"base_model.model.{module}.lora_A.default.weight": f"{module}.lora_A.weight",
        f"module._orig_mod.{module}.lora_B.high_noise.weight": f"{module}.lora_B.weight",
        f"blocks.0._orig_mod.{module[9:]}.lora_A.weight": f"{module}.lora_A.weight",
        f"blocks.0._checkpoint_wrapped_module.{module[9:]}.base_layer._orig_mod.weight": f"{module}.weight",
        "blocks.0.scale_shift_table": "blocks.0.scale_shift_table",
    }.items():
        assert plain_name(name) == plain and plain_name(plain) == plain
    model = built()
    names = {name for name, _ in model.named_parameters()}
    bare = [name for name, _ in on_meta(ARCHITECTURES["t2v"]).named_parameters()]
    assert list(base_names(model)) == bare and set(base_names(model).values()) < names
    assert set(base_names(model).values()) | set(adapter_names(model).values()) == names
    assert list(adapter_names(model)) == list(Trained(ARCHITECTURES["t2v"], MIXED).tensors)
    assert adapter_names(on_meta(ARCHITECTURES["t2v"])) == {}


# reading


def test_the_base_is_read_under_its_own_names_and_frozen_as_it_is_stored():
    base = {
        name: tensor if "norm" in name else tensor.bfloat16()
        for name, tensor in stock("i2v").state_dict().items()
    }
    source = Held(base)
    settings = AdapterSettings(4, 4.0, targets_of("i2v"))
    units = []
    model = build_transformer(
        ARCHITECTURES["i2v"], source, adapter=settings, partition=lambda module: units.append(module)
    )
    assert sorted(source.asked) == sorted(base) and len(units) == 6
    for plain, name in base_names(model).items():
        parameter = model.get_parameter(name)
        assert parameter.dtype == base[plain].dtype and torch.equal(parameter, base[plain])
        assert not parameter.requires_grad
    for name in adapter_names(model).values():
        parameter = model.get_parameter(name)
        assert parameter.dtype == torch.float32 and parameter.requires_grad


def test_a_misfit_of_the_base_is_told_as_without_an_adapter():
    base = stock("t2v").state_dict()
    for tensors, variant in ((base, "i2v"), ({k: v for k, v in base.items() if "to_q" not in k}, "t2v")):
        words = []
        for adapter in (None, AdapterSettings(4, 4.0, ["to_q"])):
            with pytest.raises(CheckpointError) as error:
                build_transformer(ARCHITECTURES[variant], Held(tensors), adapter=adapter)
            words.append(str(error.value))
        assert words[0] == words[1]
    refuse_misfit(built(base=base), Held(base))


def test_the_start_depends_on_seed_expert_and_name_alone_and_gives_the_base():
    """Kaiming-uniform A by torch's initialiser from the same stream, and zeros."""
    base = stock("t2v")
    model = built(base=base.state_dict(), seed=5, expert="low_noise")
    for plain, name in adapter_names(model).items():
        expected = torch.zeros(model.get_parameter(name).shape)
        if "lora_A" in plain:
            nn.init.kaiming_uniform_(
                expected, a=math.sqrt(5), generator=streams.generator(5, "adapter", "low_noise", plain)
            )
            assert expected.any()
        assert torch.allclose(model.get_parameter(name), expected, rtol=1e-6, atol=0), plain
    fewer = built(settings=AdapterSettings(4, 1.0, ["to_k"]), seed=5, expert="low_noise")
    other = built(seed=6, expert="low_noise"), built(seed=5, expert="high_noise")
    key = "blocks.0.attn1.to_k.lora_A.default.weight"
    assert torch.equal(fewer.get_parameter(key), model.get_parameter(key))
    assert not any(torch.equal(m.get_parameter(key), model.get_parameter(key)) for m in other)
    assert not torch.equal(model.get_parameter(key.replace("0", "1", 1)), model.get_parameter(key))
    batch = batch_of("t2v")
    expected = stock_alone(base, batch)
    assert max(map(distance, through_clips(model.eval(), batch), expected)) < TOLERANCE


def test_a_drawn_base_is_the_same_with_and_without_an_adapter():
    with_adapter = build_transformer(ARCHITECTURES["t2v"], None, seed=3, adapter=MIXED)
    bare = build_transformer(ARCHITECTURES["t2v"], None, seed=3).state_dict()
    for plain, name in base_names(with_adapter).items():
        assert torch.equal(with_adapter.get_parameter(name), bare[plain])


def test_a_trained_adapter_is_taken_as_it_is():
    given = Trained(ARCHITECTURES["t2v"], MIXED)
    model = built(init_from=given)
    for plain, name in adapter_names(model).items():
        parameter = model.get_parameter(name)
        assert torch.equal(parameter, given.tensors[plain])
        assert (
            parameter.data_ptr() != given.tensors[plain].data_ptr()
        )  # training must not change what was given
    frozen = built(init_from=given, is_trainable=lambda name: False)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_an_adapter_of_another_rank_or_alpha_is_refused_with_both():
    targets = ["attn1.to_q", "attn1.to_k"]
    given = Trained(ARCHITECTURES["t2v"], AdapterSettings(8, 16.0, targets))
    source = Held(stock("t2v").state_dict())

    def refused(settings, words):
        with pytest.raises(CheckpointError, match=words):
            build_transformer(
                ARCHITECTURES["t2v"], source, adapter=settings, init_from=given, expert="low_noise"
            )

    words = (
        r"^adapter\.init_from\.low_noise has another rank or alpha: "
        r"blocks\.0\.attn1\.to_q \(rank 8, alpha 16 there, rank {}, alpha {} here\), .* and 1 more; "
        r"type adapter\.rank=8 adapter\.alpha=16, alpha as adapter\.rslora=false counts it$"
    )
    refused(AdapterSettings(4, 16.0, targets), words.format(4, 16))
    refused(AdapterSettings(8, 8.0, targets), words.format(8, 8))
    refused(
        AdapterSettings(8, 16.0, targets, rslora=True),
        r"rank 8, alpha 5\.65685 there, rank 8, alpha 16 here.*adapter\.alpha=5\.65685, alpha as adapter\.rs"
        r"lora=true",
    )
    refused(
        AdapterSettings(8, 16.0, targets, rank_pattern={"blocks.1.attn1.to_q": 2}), "rank 2, alpha 16 here"
    )
    refused(
        AdapterSettings(8, 16.0, ["to_q", "attn1.to_k"]),
        r"is not on the modules of adapter\.targets: it lacks blocks\.0\.attn2\.to_q\.lora_A\.weight, ",
    )
    refused(
        AdapterSettings(8, 16.0, ["attn1.to_k"]),
        r"it also has blocks\.0\.attn1\.to_q\.lora_A\.weight, .* 1 more",
    )
    assert source.asked == []
    equal = AdapterSettings(8, 16.0 / math.sqrt(8), targets, rslora=True)
    build_transformer(ARCHITECTURES["t2v"], source, adapter=equal, init_from=given)


def test_a_damaged_adapter_or_one_of_another_model_is_refused():
    settings = AdapterSettings(4, 4.0, ["attn1.to_q"])
    for name, shape in {"lora_A": (4, 40), "lora_B": (48, 3)}.items():
        given = Trained(ARCHITECTURES["t2v"], settings)
        given.tensors[f"blocks.1.attn1.to_q.{name}.weight"] = torch.ones(shape)
        there = re.escape(f"{name[-1]} {list(shape)}")
        with pytest.raises(
            CheckpointError, match=rf"blocks\.1\.attn1\.to_q has .*{there}.* there, A \[4, 48\]"
        ):
            built(settings=settings, init_from=given)
    given.tensors["blocks.1.attn1.to_q.lora_A.weight"] = torch.ones(0)
    with pytest.raises(CheckpointError, match=r"A \[0\] and B \[48, 3\] there"):
        built(settings=settings, init_from=given)


# numbers


def merged(base, given):
    """Stock diffusers with W + scale B A as its weights."""
    model = WanTransformer3DModel(**base.config)
    model.load_state_dict(base.state_dict())
    with torch.no_grad():
        for module in given.modules:
            a, b = given.of(module)
            model.get_submodule(module).weight += given.scale(module) * b @ a
    return model


@pytest.mark.parametrize(
    ("variant", "door"), [("t2v", through_clips), ("flf2v", through_clips), ("i2v", through_tensor)]
)
def test_outputs_and_gradients_are_those_of_the_merged_weights_in_stock_diffusers(variant, door):
    """The gradient of B is scale dW A^T, that of A is scale B^T dW."""
    settings = AdapterSettings(
        **{**vars(MIXED), "targets": targets_of(variant)},
    )
    base, given = stock(variant), Trained(ARCHITECTURES[variant], settings)
    batch = batch_of(variant, [(2, 8, 8)] * 2)
    expected = results(stock_alone, merged(base, given), batch)
    model = built(variant, settings, base.state_dict(), init_from=given)
    model.enable_gradient_checkpointing()
    found = results(door, model.train(), batch)
    for key in expected:
        if not key.startswith("gradient of ") or key.startswith(("gradient of clip", "gradient of the")):
            assert distance(found[key], expected[key]) < TOLERANCE, key
    for plain, name in base_names(model).items():
        assert found[f"gradient of {name}"] is None, plain
    for module in given.modules:
        a, b = given.of(module)
        of_w = expected[f"gradient of {module}.weight"] * given.scale(module)
        of_a, of_b = (found[f"gradient of {module}.lora_{letter}.default.weight"] for letter in "AB")
        assert distance(of_a, b.T @ of_w) < TOLERANCE and distance(of_b, of_w @ a.T) < TOLERANCE, module


class Written(nn.Module):
    """x W^T + bias in the base's dtype, and scale (x A^T) B^T in float32; their sum is rounded once."""

    def __init__(self, layer, a, b, scale):
        super().__init__()
        self.layer, self.scale = layer, scale
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x):
        base = F.linear(x, self.layer.weight, self.layer.bias)
        return (base.float() + (x.float() @ self.a.T) @ self.b.T * self.scale).to(base.dtype)


def test_a_bfloat16_base_with_a_float32_adapter_is_what_the_formula_gives():
    settings = AdapterSettings(4, 6.0, targets_of("i2v"), rslora=True)
    state = {
        name: tensor if "norm" in name or "scale_shift" in name else tensor.bfloat16()
        for name, tensor in stock("i2v").state_dict().items()
    }
    given = Trained(ARCHITECTURES["i2v"], settings)
    model = built("i2v", settings, state, init_from=given).train()
    reference = build_transformer(ARCHITECTURES["i2v"], Held(state)).train()
    for name, tensor in state.items():  # trainable tensors were read as float32
        reference.get_parameter(name).data = tensor.clone()
    reference.requires_grad_(False)
    for module in given.modules:
        parent, _, leaf = module.rpartition(".")
        written = Written(reference.get_submodule(module), *given.of(module), given.scale(module))
        setattr(reference.get_submodule(parent), leaf, written)
    batch = batch_of("i2v").map(lambda tensor: tensor.bfloat16())
    found, expected = results(through_clips, model, batch), results(through_clips, reference, batch)
    assert found["output 0"].dtype == torch.bfloat16
    assert torch.equal(found["output 0"], expected["output 0"])
    for module in given.modules:
        for letter in "AB":
            gradient = found[f"gradient of {module}.lora_{letter}.default.weight"]
            assert gradient.dtype == torch.float32
            of_formula = expected[f"gradient of {module}.{letter.lower()}"]
            # The same operations: what differs is the order in which two gradients of x are added.
            assert distance(gradient, of_formula) < 1e-2, module
    model.enable_gradient_checkpointing()
    again = results(through_clips, model, batch)
    for key, gradient in found.items():
        assert gradient is None or torch.equal(again[key], gradient), key


# ranks


def network_of(stage, base="float32", **options):
    """A model whose adapter's B is zero, on a base that listens to its inputs."""
    state = stock("t2v").state_dict()
    if base == "mixed":
        state = {name: t if "norm" in name or "scale" in name else t.bfloat16() for name, t in state.items()}
    partition = None if stage is None else partition_of(tiny.ZERO[stage])
    network = built(settings=MIXED, base=state, seed=3, partition=partition, **options).train()
    network.enable_gradient_checkpointing()
    return network


def whole(engine_or_model):
    """Whole tensors by plain names, by DeepSpeed's own gather."""
    import deepspeed

    found = {}
    for name, parameter in engine_or_model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[plain_name(name)] = parameter.detach().clone()
    return found


def loss_of_clip(network, index, dtype):
    """The loss of one of two clips, each of its own size, over the count of both."""
    size = [(3, 8, 8), (1, 6, 4)][index]
    rng = torch.Generator().manual_seed(index)
    clip, text = (torch.randn(shape, generator=rng).to(dtype) for shape in ((16, *size), (1, 512, 32)))
    (output,) = network([clip], torch.tensor([500.0 * index + 100]), text)
    return (output.float() - 0.1).square().sum() / 1000


def on_ranks(stage, base, steps, lr, **options):
    network = network_of(stage, base, **options)
    before = whole(network)
    expert = tiny.expert("all", None, Mesh(), stage=stage, network=network, lr=lr)
    dtype = torch.bfloat16 if base == "mixed" else torch.float32
    for _ in range(steps):
        expert.engine.backward(loss_of_clip(expert.engine.train, torch.distributed.get_rank(), dtype))
        assert expert.engine.step(lr)
    return before, whole(expert.engine.module)


def alone(base, steps, lr, **options):
    """One process without DeepSpeed."""
    network = network_of(None, base, **options)
    trainable = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr, weight_decay=0.1)
    dtype = torch.bfloat16 if base == "mixed" else torch.float32
    for _ in range(steps):
        sum(loss_of_clip(network, index, dtype) for index in range(2)).backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {plain_name(name): parameter.detach() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize(("stage", "base"), [(3, "float32"), (3, "mixed"), (2, "mixed")])
def test_two_ranks_train_the_adapter_as_one_process_and_leave_the_base(world2, stage, base):
    lr, steps = 1e-3, 3
    expected = alone(base, steps, lr)
    for before, after in world2.run(on_ranks, stage, base, steps, lr):
        assert before.keys() == after.keys() == expected.keys()
        for name, tensor in before.items():
            if ".lora_" not in name:
                assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
                continue
            assert not torch.equal(after[name], tensor) and after[name].dtype == torch.float32, name
            # As for full weights: 1% of lr, where 3 steps cover up to 3 lr.
            if base == "float32":
                assert (after[name] - expected[name]).abs().max() < 0.01 * lr, name
        # ZeRO-3's hooks change the order in which a bfloat16 tensor's gradients are added: 1% after 5 steps.
        adapter = [name for name in before if ".lora_" in name]
        off = torch.cat([(after[name] - expected[name]).flatten() for name in adapter])
        assert off.norm() < 0.05 * torch.cat([(expected[n] - before[n]).flatten() for n in adapter]).norm()


def _initial(stage):
    return whole(network_of(stage))


def test_the_start_is_the_same_on_any_number_of_ranks(world1, world2):
    expected = {plain_name(name): parameter for name, parameter in network_of(None).named_parameters()}
    for found in world1.run(_initial, 3) + world2.run(_initial, 3) + world2.run(_initial, 2):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
