"""What ranks cannot share is refused before anything is read, and what a refusal names works."""

import copy

import pytest
from diffusers import WanTransformer3DModel

from wan_ds.config import Attention, Config, Dtype, Precision, Recompute, Ulysses, check
from wan_ds.config.command_line import parse
from wan_ds.config.composition import configure
from wan_ds.config.parallelism_checks import largest_trainable
from wan_ds.errors import ConfigError
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


def test_varlen_kernels_are_for_bf16(config):
    config.model.attention = Attention.varlen
    check(config, 1)  # bf16 by autocast
    config.precision = Precision(compute_dtype=Dtype.fp32)
    assert refusal(config, 1).endswith("type precision.compute_dtype=bf16, or model.attention=auto")
    config.precision = Precision(compute_dtype=None, frozen_dtype=Dtype.fp32)
    assert refusal(config, 1).endswith("type precision.frozen_dtype=bf16, or model.attention=auto")
    config.precision = Precision(compute_dtype=None)
    check(config, 1)
