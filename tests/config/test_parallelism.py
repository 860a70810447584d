"""What ranks cannot share is refused before anything is read, and what a refusal names works."""

import copy
import re

import pytest
from diffusers import WanTransformer3DModel

from wan_ds.config import Attention, Compile, Config, Dtype, Precision, Recompute, Storage, Ulysses, check
from wan_ds.config.command_line import parse
from wan_ds.config.composition import configure
from wan_ds.config.foreign_keys import OTHER_NAMES
from wan_ds.config.parallelism_checks import largest_trainable
from wan_ds.errors import ConfigError
from wan_ds.models.adapter import AdapterSettings, inject
from wan_ds.models.weights import on_meta


@pytest.fixture(scope="module")
def released() -> dict[str, Config]:
    typed = ["data.path=/clips", "train.steps=2", "train.global_batch_size=80"]
    names = ["wan2.1-t2v-1.3b", "wan2.1-i2v-14b-720p", "wan2.2-ti2v-5b"]
    return {name: configure(parse([f"model={name}", *typed])) for name in names}


@pytest.fixture
def config(released) -> Config:
    return copy.deepcopy(released["wan2.1-t2v-1.3b"])  # 12 heads


def refusal(config: Config, world_size: int) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config, world_size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "sp_size", "world_size", "told"),
    [
        ("wan2.1-t2v-1.3b", 8, 16, "the 12 heads of wan2.1-t2v-1.3b and the 16 ranks; choose 1, 2 or 4"),
        ("wan2.1-t2v-1.3b", 6, 8, "the 12 heads of wan2.1-t2v-1.3b and the 8 ranks; choose 1, 2 or 4"),
        ("wan2.1-i2v-14b-720p", 16, 80, "40 heads of wan2.1-i2v-14b-720p and the 80 ranks; choose 1, 2, 4"),
        ("wan2.2-ti2v-5b", 5, 40, "the 24 heads of wan2.2-ti2v-5b and the 40 ranks; choose 1, 2, 4 or 8"),
        ("wan2.2-ti2v-5b", 2, 1, "and the 1 rank; choose 1"),
    ],
)
def test_an_sp_size_that_does_not_divide_names_those_that_do(released, name, sp_size, world_size, told):
    config = copy.deepcopy(released[name])
    config.parallelism.sp_size = sp_size
    words = refusal(config, world_size)
    assert words.startswith(f"parallelism.sp_size={sp_size}: must divide the ") and told in words
    for size in words.partition("choose ")[2].replace(" or ", ", ").split(", "):
        config.parallelism.sp_size = int(size)
        check(config, world_size)


def test_clips_are_shared_between_groups_of_ranks(config):
    config.parallelism.sp_size = 2
    config.train.global_batch_size = 3
    check(config, 6)
    assert refusal(config, 8) == (
        "train.global_batch_size=3: must be a multiple of the 4 groups of 2 ranks that share it; "
        "choose 4, or start 2 or 6 ranks"
    )
    config.train.global_batch_size, config.train.micro_batch_size = 8, 3
    assert refusal(config, 8) == (
        "train.micro_batch_size=3: must divide the 2 clips of one group of 2 ranks "
        "(8 over 4 groups of 2 ranks); choose 1 or 2"
    )


def test_without_reduce_scatter_a_bucket_must_hold_the_largest_tensor(config):
    zero = config.parallelism.zero_optimization
    zero["reduce_scatter"], zero["reduce_bucket_size"] = False, 10_000_000
    check(config, 4)  # at sp 1 both ways of DeepSpeed's agree
    config.parallelism.sp_size = 2
    assert refusal(config, 4) == (
        "parallelism.zero_optimization.reduce_bucket_size=10000000: with reduce_scatter=false ZeRO-3 would "
        "divide gradients of larger tensors by 2 too often at parallelism.sp_size=2, and the largest that "
        "trains has 14155776 elements; type parallelism.zero_optimization.reduce_scatter=true, or a bucket "
        "that large"
    )
    zero["reduce_bucket_size"] = 14155776
    check(config, 4)
    zero["contiguous_gradients"] = False
    assert refusal(config, 4).endswith("type parallelism.zero_optimization.contiguous_gradients=true")
    zero["reduce_scatter"] = True
    check(config, 4)


def test_quantised_gradients_are_for_whole_clips(config):
    config.parallelism.zero_optimization["zero_quantized_gradients"] = True
    check(config, 2)
    config.parallelism.sp_size = 2
    assert refusal(config, 2).endswith("leave it out, or type parallelism.sp_size=1")


def test_a_first_frame_that_is_given_is_no_part_of_a_patch(released):
    config = copy.deepcopy(released["wan2.2-ti2v-5b"])
    config.model.transformer["patch_size"] = [2, 2, 2]
    assert refusal(config, 1) == (
        "model.transformer.patch_size=[2, 2, 2]: TextImageToVideo gives the first latent frame alone, and a "
        "patch has 2; type model.transformer.patch_size=[1,2,2]"
    )


def test_the_largest_tensor_is_the_models(released):
    for name, config in released.items():
        model: WanTransformer3DModel = on_meta(config.model.transformer)
        assert largest_trainable(config) == max(p.numel() for p in model.parameters()), name


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ulysses": Ulysses.deepspeed}, "gradients would be garbage; type parallelism.ulysses=fused"),
        ({"recompute": Recompute.full}, "keeps nothing of attention; type parallelism.recompute=selective"),
        ({"recompute": Recompute.none}, "keeps nothing of attention; type parallelism.recompute=selective"),
        ({"sp_size": 1}, "nothing is exchanged at parallelism.sp_size=1"),
    ],
)
def test_an_exchange_is_kept_where_it_can_be(config, changes, told):
    parallelism = config.parallelism
    parallelism.sp_size, parallelism.recompute = 2, Recompute.selective
    parallelism.recompute_keeps_exchange = True
    check(config, 2)
    for name, value in changes.items():
        setattr(parallelism, name, value)
    assert told in refusal(config, 2)


def test_what_the_feed_forward_gave_is_kept_by_selective_recomputation_alone(config):
    config.parallelism.recompute_keeps_ffn = True
    config.parallelism.recompute = Recompute.selective
    check(config, 1)
    config.train.compile = Compile.blocks
    config.parallelism.zero_optimization["stage"] = 2
    assert refusal(config, 1).endswith("type train.compile=none, or leave it out")
    config.train.compile = Compile.none
    config.parallelism.recompute = Recompute.full
    assert refusal(config, 1).endswith("type parallelism.recompute=selective")


def test_varlen_kernels_are_for_bf16(config):
    config.model.attention = Attention.varlen
    check(config, 1)  # bf16 by autocast
    config.precision = Precision(compute_dtype=Dtype.fp32)
    assert refusal(config, 1).endswith("type precision.compute_dtype=bf16, or model.attention=auto")
    config.precision = Precision(compute_dtype=None, frozen_dtype=Dtype.fp32)
    assert refusal(config, 1).endswith("type precision.frozen_dtype=bf16, or model.attention=auto")
    config.precision = Precision(compute_dtype=None)
    check(config, 1)


def test_varlen_kernels_are_for_heads_of_eights(config):
    config.model.attention = Attention.varlen
    config.model.transformer["attention_head_dim"] = 12
    assert refusal(config, 1) == (
        "model.attention=varlen: its kernels take heads of 8 to 256 by eights, and wan2.1-t2v-1.3b has "
        "attention_head_dim=12; type model.attention=auto"
    )
    config.model.attention = Attention.auto
    check(config, 1)


@pytest.mark.parametrize("targets", ["[to_q,to_v]", "[add_k_proj]", "[ffn.net.2]"])
def test_an_adapters_largest_tensor_fits_the_bucket_that_is_named(targets):
    typed = ["model=wan2.1-i2v-14b-720p", "adapter=lora", f"adapter.targets={targets}", "adapter.rank=16"]
    config = configure(parse([*typed, "data.path=/clips", "train.steps=2", "train.global_batch_size=2"]))
    zero = config.parallelism.zero_optimization
    config.parallelism.sp_size, zero["reduce_scatter"], zero["reduce_bucket_size"] = 2, False, 1
    (named,) = re.findall(r"the largest that trains has (\d+) elements", refusal(config, 2))
    zero["reduce_bucket_size"] = int(named)
    check(config, 2)
    model = on_meta(config.model.transformer)
    inject(model, AdapterSettings(rank=16, alpha=16.0, targets=config.adapter.targets))
    assert max(p.numel() for name, p in model.named_parameters() if "lora_" in name) <= int(named)


def test_compiled_blocks_are_refused_where_they_are_not_proved(config):
    config.train.compile = Compile.blocks
    zero = config.parallelism.zero_optimization
    assert refusal(config, 2) == (
        "train.compile=blocks: ZeRO-3 fetches the weights of each layer by calls inside the blocks, and no "
        "graph spans those; type parallelism.zero_optimization.leaf_module={classes:[WanTransformerBlock]}, "
        "which fetches a block at once, or parallelism=zero2"
    )
    zero["leaf_module"] = {"classes": ["WanTransformerBlock"]}
    check(config, 2)
    config.train.deterministic = True
    assert refusal(config, 2).endswith("type train.compile=none, or train.deterministic=false")
    config.train.deterministic = False
    config.precision.frozen_storage = Storage.float8_e4m3fn
    assert refusal(config, 2).endswith("type train.compile=none, or precision.frozen_storage=null")
    config.precision.frozen_storage = None
    del zero["leaf_module"]
    for stage in (0, 1, 2):
        zero["stage"] = stage
        check(config, 2)


def test_what_a_refusal_of_compiled_blocks_says_can_be_typed():
    typed = ["recipe=wan2.1-t2v-1.3b", "data.path=/clips", "train.compile=blocks"]
    words = refusal(configure(parse([*typed, "parallelism=zero3"])), 2)
    leaf, other = words.partition("type ")[2].replace(", which fetches a block at once", "").split(", or ")
    check(configure(parse([*typed, "parallelism=zero3", leaf])), 2)
    check(configure(parse([*typed, other])), 2)


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_what_other_trainers_call_a_setting_is_answered_with_our_name(name):
    for group in ("parallelism", "train"):
        with pytest.raises(ConfigError) as caught:
            configure(parse(["recipe=quickstart", f"{group}.{name}=2"]))
        assert str(caught.value) == f"{group}.{name}: no such setting; did you mean {OTHER_NAMES[name]}?"
