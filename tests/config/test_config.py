"""Reading and checking: every shipped recipe works, and what cannot work is refused with what would."""

import copy
import inspect
import math
import re
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from wan_ds.config import Config, Dtype, Policy, Storage, Weights, check, checks, read, targets, to_dict
from wan_ds.config.command_line import parse
from wan_ds.config.composition import conf_dir, configure
from wan_ds.config.foreign_keys import (
    OFFLOAD_KEYS,
    REFUSED_ZERO_KEYS,
    TRANSFORMER_KEYS,
    ZERO_KEYS,
    ZERO_SWITCHES,
)
from wan_ds.errors import ConfigError
from wan_ds.models import conditioning

RECIPES = sorted(path.stem for path in (conf_dir() / "recipe").glob("*.yaml"))
GROUPS = sorted(
    path.relative_to(conf_dir()).with_suffix("").as_posix() for path in conf_dir().glob("*/*.yaml")
)
NEEDED = {"optimizer/cpu_adamw": {"parallelism": "zero3_offload"}}  # options that work with another one alone


@pytest.fixture(scope="module")
def composed() -> Config:
    """The quickstart with what the refusals below tell of typed over it: another tuning breaks no test."""
    config = configure(parse(["recipe=quickstart"]))
    config.train.global_batch_size, config.train.micro_batch_size = 6, 1
    config.train.experts, config.train.lr_scale = None, {}
    config.model.transformer["num_attention_heads"] = 4
    config.timesteps = {"_target_": "wan_ds.flow.timesteps.Uniform", "shift": 3.0}
    cosine = OmegaConf.load(conf_dir() / "lr_schedule" / "cosine.yaml")
    config.lr_schedule = OmegaConf.to_container(cosine)
    return config


@pytest.fixture
def config(composed) -> Config:
    return copy.deepcopy(composed)


def put(config: Config, key: str, value) -> None:
    *path, last = key.split(".")
    holder = config
    for name in path:
        holder = holder[name] if isinstance(holder, dict) else getattr(holder, name)
    if isinstance(holder, dict):
        holder[last] = value
    else:
        setattr(holder, last, value)


def refusal(config: Config, world_size: int = 1, **changes) -> str:
    for key, value in changes.items():
        put(config, key, value)
    with pytest.raises(ConfigError) as refused:
        check(config, world_size)
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_passes(recipe):
    config = configure(parse([f"recipe={recipe}", "data.path=/clips"]))
    for world_size in (1, 2):
        check(config, world_size)


@pytest.mark.parametrize("choice", [name for name in GROUPS if not name.startswith("recipe/")])
def test_every_option_of_every_group_passes(choice):
    group, option = choice.split("/", 1)
    given = {"model": "quickstart", "data": "quickstart", **NEEDED.get(choice, {}), group: option}
    typed = [f"{name}={value}" for name, value in given.items()]
    check(configure(parse([*typed, "data.path=x", "train.steps=1", "train.global_batch_size=8"])), 8)


def test_group_files_are_short_and_name_no_machine():
    for path in conf_dir().rglob("*.yaml"):
        text = path.read_text()
        assert len(text.splitlines()) <= 25, path
        assert "#" in text, path


def test_the_a14b_recipes_train_what_their_names_say():
    assert configure(parse(["recipe=wan2.2-t2v-a14b"])).train.experts is None
    assert configure(parse(["recipe=wan2.2-t2v-a14b-low-noise"])).train.experts == ["low_noise"]
    assert configure(parse(["recipe=wan2.2-t2v-a14b-high-noise"])).train.experts == ["high_noise"]
    model = configure(parse(["recipe=wan2.2-t2v-a14b"])).model
    assert (model.boundary, model.shift, model.guidance) == (
        0.875,
        12.0,
        {"high_noise": 4.0, "low_noise": 3.0},
    )
    assert {name: expert.weights for name, expert in model.experts.items()} == {
        "high_noise": "transformer",
        "low_noise": "transformer_2",
    }


# What Wan's own code and hub folders say: parameters of one transformer, shift, boundary, guidance (high or
# all, low), sampling steps, frames, fps, default height and width.
PUBLISHED = {
    "wan2.1-t2v-1.3b": (1_418_996_800, 5.0, None, (5.0,), 50, 81, 16, 480, 832),
    "wan2.1-t2v-14b": (14_288_491_584, 5.0, None, (5.0,), 50, 81, 16, 720, 1280),
    "wan2.1-i2v-14b-480p": (16_394_878_784, 3.0, None, (5.0,), 40, 81, 16, 480, 832),
    "wan2.1-i2v-14b-720p": (16_394_878_784, 5.0, None, (5.0,), 40, 81, 16, 720, 1280),
    "wan2.1-flf2v-14b": (16_395_536_704, 16.0, None, (5.0,), 50, 81, 16, 720, 1280),
    "wan2.2-t2v-a14b": (14_288_491_584, 12.0, 0.875, (4.0, 3.0), 40, 81, 16, 720, 1280),
    "wan2.2-i2v-a14b": (14_288_901_184, 5.0, 0.9, (3.5, 3.5), 40, 81, 16, 720, 1280),
    "wan2.2-ti2v-5b": (4_999_787_712, 5.0, None, (5.0,), 50, 121, 24, 704, 1280),
}
TYPED = ["data.path=/clips", "train.steps=2", "train.global_batch_size=2"]


def test_every_released_model_has_a_file_and_a_tiny_twin():
    models = {path.stem for path in (conf_dir() / "model").glob("*.yaml")}
    assert models == PUBLISHED.keys() | {f"tiny-{name}" for name in PUBLISHED} | {"quickstart"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_model_has_the_published_size_and_numbers(name):
    from wan_ds.models.transformer import WanTransformer

    config = configure(parse([f"model={name}", *TYPED]))
    check(config, 2)
    model, data, sampling = config.model, config.data, config.sampling
    parameters, shift, boundary, guidance, steps, *shape = PUBLISHED[name]
    assert (model.shift, model.boundary, tuple(model.guidance.values())) == (shift, boundary, guidance)
    assert [data.num_frames, data.fps, data.height, data.width] == shape
    assert (sampling.steps, sampling.shift, sampling.guidance) == (steps, shift, model.guidance)
    assert config.timesteps["shift"] == shift
    assert list(model.experts) == (["high_noise", "low_noise"] if boundary else ["all"])
    started = time.perf_counter()
    with torch.device("meta"):
        built = WanTransformer(**model.transformer)
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tiny_twin_is_of_the_same_kind_as_the_model_it_stands_for(name):
    full, tiny = (configure(parse([f"model={choice}", *TYPED])).model for choice in (name, f"tiny-{name}"))
    for key in ("boundary", "shift", "guidance", "fps", "conditioning", "sampling_steps"):
        assert getattr(full, key) == getattr(tiny, key), key
    assert full.experts.keys() == tiny.experts.keys()
    assert full.transformer.keys() == tiny.transformer.keys()
    for key in ("in_channels", "out_channels", "pos_embed_seq_len"):
        assert full.transformer.get(key) == tiny.transformer.get(key), key
    assert all(expert.weights is None for expert in tiny.experts.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_quickstart_takes_every_tiny_twin(name):
    config = configure(parse(["recipe=quickstart", f"model=tiny-{name}"]))
    assert config.model.name == f"tiny-{name}"
    check(config, 2)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if not recipe.startswith("quickstart")])
def test_a_recipe_takes_the_tiny_twin_of_its_model(recipe):
    name = configure(parse([f"recipe={recipe}"])).model.name
    config = configure(parse([f"recipe={recipe}", f"model=tiny-{name}", "data.path=/clips"]))
    assert (config.data.num_frames, config.data.height, config.data.width) == (9, 64, 96)
    check(config, 2)


def test_what_is_written_as_a_dict_reads_back_equal(config):
    assert read(OmegaConf.create(to_dict(config))) == config


def test_a_dict_without_schema_is_held_to_it(config):
    settings = to_dict(config)
    settings["train"]["lerning_rate"] = 1
    with pytest.raises(ConfigError, match=r"train\.lerning_rate"):
        read(OmegaConf.create(settings))


def test_whole_floats_become_counts_in_the_zero_block():
    config = configure(parse(["recipe=quickstart", "parallelism.zero_optimization.reduce_bucket_size=5e7"]))
    assert config.parallelism.zero_optimization["reduce_bucket_size"] == 50_000_000
    assert type(config.parallelism.zero_optimization["reduce_bucket_size"]) is int


ZERO = "parallelism.zero_optimization"


@pytest.mark.parametrize(
    ("key", "value", "fragments"),
    [
        ("model.boundary", None, ["model.boundary=null", "between 0 and 1"]),
        ("model.boundary", 1.0, ["model.boundary=1.0"]),
        ("model.boundary", 0.0, ["model.boundary=0.0"]),
        ("model.boundary", float("nan"), ["model.boundary=nan"]),
        ("model.guidance", {"high_noise": 1.0}, ["model.guidance.low_noise: not set"]),
        ("model.guidance.all", 1.0, ["model.guidance: all is no expert", "high_noise, low_noise"]),
        (
            "sampling.guidance",
            {"high_noise": 1.0, "low_nois": 1.0},
            ["sampling.guidance", "did you mean low_noise?"],
        ),
        ("sampling.guidance", "a lot", ["sampling.guidance=a lot", "a number"]),
        ("train.lr_scale", {"low": 1.0}, ["train.lr_scale: low is no expert"]),
        ("train.lr_scale", {"low_noise": 0.0}, ["train.lr_scale.low_noise=0.0"]),
        ("train.experts", [], ["train.experts=[]"]),
        ("train.experts", ["low_noise", "low_noise"], ["train.experts=[low_noise, low_noise]", "once"]),
        ("train.experts", ["all"], ["all is no expert"]),
        ("train.routing.high_noise_share", 0.3, ["does nothing under train.routing.policy=natural", "fixed"]),
        ("train.routing.run_length", 5, ["does nothing under", "type train.routing.policy=alternate"]),
        ("train.routing.policy", Policy.fixed, ["train.routing.high_noise_share=null", "between 0 and 1"]),
        ("train.routing.policy", Policy.alternate, ["train.routing.run_length=null", "from 1"]),
        ("weighting", {"_target_": "wan_ds.flow.weighting.min_snr", "gamma": 0}, ["weighting.gamma=0"]),
        ("model.sampling_steps", 0, ["model.sampling_steps=0"]),
        ("model.transformer.in_channels", 36, ["in_channels=36", "must be 16 for TextToVideo"]),
        (
            "model.conditioning._target_",
            "wan_ds.models.conditioning.ImageToVido",
            ["did you mean wan_ds.models.conditioning.ImageToVideo?"],
        ),
        (
            "model.conditioning._target_",
            "wan_ds.flow.timesteps.Uniform",
            ["lacks in_ch", "Conditioning says"],
        ),
        ("model.image_encoder.weights", "image_encoder", ["no image_dim", "weights=null"]),
        ("model.transformer.image_dim", 32, ["model.image_encoder.weights=null", "needs CLIP"]),
        ("sampling.images", ["a.png"], ["sampling.images", "quickstart takes no such images"]),
        ("train.steps", 0, ["train.steps=0", "greater than 0"]),
        ("train.global_batch_size", -2, ["train.global_batch_size=-2"]),
        ("train.micro_batch_size", 0, ["train.micro_batch_size=0"]),
        (
            "train.micro_batch_size",
            4,
            ["train.micro_batch_size=4", "6 clips of one rank", "choose 1, 2, 3 or 6"],
        ),
        ("train.max_grad_norm", -1.0, ["train.max_grad_norm=-1.0"]),
        ("train.caption_dropout", 1.0, ["train.caption_dropout=1.0", "less than 1"]),
        ("train.max_skipped_in_a_row", -1, ["train.max_skipped_in_a_row=-1"]),
        ("data.num_frames", 80, ["data.num_frames=80", "4n + 1", "choose 77 or 81"]),
        ("data.num_frames", 0, ["choose 1"]),
        ("data.height", 70, ["data.height=70", "multiple of 16", "choose 64 or 80"]),
        ("data.width", 8, ["data.width=8", "choose 16"]),
        ("data.workers", -1, ["data.workers=-1"]),
        ("data.limit", 0, ["data.limit=0", "null"]),
        ("data.fps", 0.0, ["data.fps=0.0"]),
        ("data.reader", None, ["data.path: no clips named", "data.path=/folder/of/videos"]),
        ("model.shift", 0.0, ["model.shift=0.0"]),
        ("timesteps.shift", -1.0, ["timesteps.shift=-1.0"]),
        (
            "timesteps._target_",
            "wan_ds.flow.timesteps.Unifrom",
            ["did you mean wan_ds.flow.timesteps.Uniform?"],
        ),
        ("timesteps._target_", "no.such.module.X", ["no.such.module cannot be imported"]),
        ("timesteps._target_", "X", ["timesteps._target_=X"]),
        ("optimizer.lr", -1.0, ["optimizer.lr=-1.0"]),
        ("optimizer.lr", float("inf"), ["optimizer.lr=inf", "a number"]),
        ("optimizer.lr", True, ["optimizer.lr=True", "a number"]),
        ("optimizer.betas", [0.9, "x"], ["optimizer.betas=[0.9, 'x']", "a list such as"]),
        ("optimizer.params", [], ["optimizer.params", "leave it out"]),
        ("optimizer.amsgrad", 1, ["optimizer.amsgrad=1", "true or false"]),
        ("lr_schedule.warmup_steps", -1, ["lr_schedule.warmup_steps=-1"]),
        ("lr_schedule.flor", 0.1, ["lr_schedule.flor", "did you mean lr_schedule.floor?"]),
        ("sampling.every_steps", 0, ["sampling.every_steps=0"]),
        ("evaluation.every_steps", -5, ["evaluation.every_steps=-5"]),
        ("evaluation.clips", 0, ["evaluation.clips=0"]),
        ("checkpoint.save_every_steps", 0, ["checkpoint.save_every_steps=0"]),
        ("checkpoint.keep_last", 0, ["checkpoint.keep_last=0"]),
        ("tracker.log_every_steps", 0, ["tracker.log_every_steps=0"]),
        ("precision.trainable_dtype", Dtype.bf16, ["precision.compute_dtype=fp32", "compute in bf16"]),
        ("precision.frozen_storage", Storage.float8_e4m3fn, ["frozen_storage=float8_e4m3fn", "adapter=lora"]),
        ("ema.decay", 1.0, ["ema.decay=1.0", "between 0 and 1"]),
        ("adapter.alpha", 8.0, ["adapter.alpha=8.0: does nothing without an adapter"]),
        ("adapter.targets", ["to_q"], ["adapter.targets=['to_q']", "type adapter=lora"]),
        ("train.frozen_experts", ["low_noise"], ["low_noise trains as well", "train.experts=[high_noise]"]),
        ("train.frozen_experts", ["al"], ["train.frozen_experts: al is no expert"]),
        ("resume", "/no/such/checkpoint", ["resume=/no/such/checkpoint", "auto, never"]),
        ("run_dir", "", ["run_dir"]),
        ("model.transformer.num_layer", 4, ["model.transformer.num_layers"]),
        ("model.transformer.ffn_dim", "abc", ["model.transformer.ffn_dim=abc", "a whole number from 1"]),
        ("model.transformer.patch_size", [2, 2], ["model.transformer.patch_size=[2, 2]"]),
        (f"{ZERO}.stage", 4, [f"{ZERO}.stage=4", "0, 1, 2 or 3"]),
        (f"{ZERO}.stage", True, ["stage=True"]),
        (f"{ZERO}.overlap_com", True, ["did you mean", f"{ZERO}.overlap_comm?"]),
        (f"{ZERO}.reduce_bucket_size", "auto", [f"{ZERO}.reduce_bucket_size=auto"]),
        (f"{ZERO}.overlap_comm", "maybe", [f"{ZERO}.overlap_comm=maybe", "true or false"]),
        (f"{ZERO}.reduce_bucket_size", 0.5, [f"{ZERO}.reduce_bucket_size=0.5"]),
        (
            f"{ZERO}.offload_optimizer",
            {"device": "cpu", "buffer_count": "auto"},
            ["offload_optimizer.buffer_count=auto"],
        ),
        (
            f"{ZERO}.offload_optimizer",
            {"devise": "cpu"},
            ["offload_optimizer.devise", "offload_optimizer.device?"],
        ),
        (f"{ZERO}.leaf_module", {"classes": ["auto"]}, ["leaf_module.classes.0=auto"]),
        (f"{ZERO}.sequence_parallel_size", 2, ["parallelism.sp_size"]),
        (f"{ZERO}.data_parallel_size", 2, ["the mesh is ours"]),
        (f"{ZERO}.mesh_param", [1, 2], ["the mesh is ours"]),
        (f"{ZERO}.elastic_checkpoint", True, ["elastic_checkpoint"]),
        (f"{ZERO}.mics_shard_size", 2, ["MiCS"]),
        (f"{ZERO}.zero_hpz_partition_size", 8, ["zero_hpz_partition_size=8", "choose 1"]),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(config, key, value, fragments):
    message = refusal(config, **{key: value})
    for fragment in fragments:
        assert fragment in message


def test_offloading_needs_a_stage_that_shards(config):
    block = config.parallelism.zero_optimization
    block["offload_param"], block["stage"] = {"device": "cpu"}, 2
    assert "only stage 3" in refusal(config)


def test_one_expert_has_no_boundary_and_two_have_one(config):
    weights = config.model.experts["low_noise"]
    config.model.experts = {"all": weights}
    assert "type model.boundary=null" in refusal(config)
    config.model.boundary = None
    config.model.guidance = config.sampling.guidance = {"all": 5.0}
    check(config, 1)


@pytest.mark.parametrize("names", [["high_noise"], ["all", "low_noise"], ["one", "two"], []])
def test_other_sets_of_experts_are_refused(config, names):
    weights = config.model.experts["low_noise"]
    assert "high_noise and low_noise" in refusal(config, **{"model.experts": dict.fromkeys(names, weights)})


def test_what_does_not_divide_names_what_does(config):
    assert "choose 4 or 8, or start 1, 2, 3 or 6 ranks" in refusal(config, world_size=4)


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "ways"),
    [(7, 3, "choose 6 or 12"), (9, 3, "choose 6 or 12, or start 1 or 3 ranks"), (5, 8, "choose 16")],
)
def test_a_batch_size_that_is_named_works(config, global_batch_size, micro_batch_size, ways):
    config.train.global_batch_size, config.train.micro_batch_size = global_batch_size, micro_batch_size
    assert refusal(config, world_size=2).endswith(f"train.micro_batch_size={micro_batch_size}; {ways}")
    for size in re.findall(r"\d+", ways.partition(", or start")[0]):
        config.train.global_batch_size = int(size)
        check(config, 2)


def test_a_model_with_48_channels_has_the_larger_stride(config):
    config.model.transformer["in_channels"] = config.model.transformer["out_channels"] = 48
    config.data.height, config.data.width = 704, 1280
    check(config, 1)
    config.data.height = 720
    assert "choose 704 or 736" in refusal(config)
    assert checks.TEMPORAL_STRIDE == conditioning.TEMPORAL_STRIDE  # said twice: a check imports no model


@pytest.fixture(scope="module")
def image_to_video() -> Config:
    return configure(parse(["model=tiny-wan2.1-i2v-14b-480p", *TYPED]))


def test_prompts_of_a_model_that_sees_images_need_one_each(image_to_video):
    config = copy.deepcopy(image_to_video)
    config.sampling.prompts = ["a", "b"]
    assert "sampling.images: not set, and tiny-wan2.1-i2v-14b-480p needs one for each" in refusal(config)
    config.sampling.images = ["a.png"]
    assert "sampling.images: 1 image for 2 prompts" in refusal(config)
    config.sampling.images = ["a.png", "b.png"]
    check(config, 1)
    config.sampling.last_images = ["a.png", "b.png"]
    assert "sampling.last_images: tiny-wan2.1-i2v-14b-480p takes no such images" in refusal(config)


@pytest.fixture(scope="module")
def adapted() -> Config:
    return configure(parse(["recipe=quickstart", "adapter=lora"]))


@pytest.mark.parametrize(
    ("key", "value", "fragments"),
    [
        ("precision.trainable_dtype", Dtype.bf16, ["an adapter trains in fp32", "precision=lora"]),
        ("adapter.rank", 0, ["adapter.rank=0", "from 1"]),
        ("adapter.rank", None, ["does nothing without a rank (adapter.rank=null)", "adapter.rank=32"]),
        ("adapter.alpha", math.inf, ["adapter.alpha=inf", "finite"]),
        ("adapter.alpha", 0.0, ["adapter.alpha=0.0"]),
        ("adapter.dropout", 1.0, ["adapter.dropout=1.0"]),
        ("adapter.targets", [], ["adapter.targets=[]", "[to_q, to_v]"]),
        ("adapter.rank_pattern", {"to_q": 0}, ["adapter.rank_pattern.to_q=0"]),
        ("adapter.alpha_pattern", {"to_q": -1.0}, ["adapter.alpha_pattern.to_q=-1.0"]),
        ("adapter.init_from", {"all": "x"}, ["adapter.init_from.all", "high_noise, low_noise"]),
        ("precision.frozen_storage", Storage.float8_e4m3fn, ["recompute=full"]),
    ],
)
def test_an_adapter_that_cannot_work_is_refused(adapted, key, value, fragments):
    config = copy.deepcopy(adapted)
    if key == "precision.trainable_dtype":
        config.precision.compute_dtype = Dtype.bf16
    message = refusal(config, **{key: value})
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_adapter_computes_in_the_dtypes_of_the_base_in_every_recipe(recipe):
    typed = [f"recipe={recipe}", "adapter=lora", "data.path=/clips"]
    precision = configure(parse(typed)).precision
    assert (precision.trainable_dtype, precision.compute_dtype) == (Dtype.fp32, None)
    precision = configure(parse([*typed, "precision=bf16_autocast"])).precision  # typed, it is taken
    assert precision.compute_dtype is Dtype.bf16


def test_an_adapters_strength_does_not_depend_on_its_rank():
    adapter = configure(parse(["recipe=quickstart", "adapter=lora", "adapter.rank=8"])).adapter
    assert (adapter.rank, adapter.alpha) == (8, None)  # alpha is the rank, as the network's builder has it


def test_8_bits_and_their_surroundings_are_for_a_frozen_base():
    typed = [*TYPED, "precision.frozen_storage=float8_e4m3fn", "parallelism.recompute=full"]
    assert "only a frozen base can be stored in 8 bits" in refusal(configure(parse(typed)))
    typed = [*typed, "adapter=lora", "precision.frozen_dtype=fp32"]
    assert "leave precision.frozen_dtype out" in refusal(configure(parse(typed)))


def test_an_adapter_chooses_its_precision_and_the_base_may_be_stored_in_8_bits():
    config = configure(parse(["adapter=lora", *TYPED, "precision.frozen_storage=float8_e4m3fn"]))
    assert (config.precision.trainable_dtype, config.precision.compute_dtype) == (Dtype.fp32, None)
    check(config, 2)
    typed = ["adapter=lora", "precision=bf16_params", *TYPED]
    assert "an adapter trains in fp32" in refusal(configure(parse(typed)))


def test_a_first_and_a_last_frame_need_two():
    typed = ["model=tiny-wan2.1-flf2v-14b", *TYPED, "data.num_frames=1"]
    assert "data.num_frames=1: must be at least 5" in refusal(configure(parse(typed)))


def test_what_a_distribution_refuses_is_told_like_everything_else(config):
    config.timesteps = {"_target_": "wan_ds.flow.timesteps.Mode", "scale": 3.0}
    assert "timesteps.scale=3.0 must lie between -1 and 1.7519" in refusal(config)


def test_a_policy_that_chooses_needs_two_experts(config):
    config.train.experts, config.train.routing.policy = ["low_noise"], Policy.alternate
    config.train.routing.run_length = 2
    assert "train.routing.policy=alternate: chooses between two experts, and one trains" in refusal(config)


def test_the_share_of_clips_with_an_image_is_a_share():
    typed = ["model=tiny-wan2.2-ti2v-5b", *TYPED, "model.conditioning.image_share=1.5"]
    assert "model.conditioning.image_share=1.5: must be from 0" in refusal(configure(parse(typed)))


def test_resume_may_name_a_folder(config, tmp_path):
    config.resume = str(tmp_path)
    check(config, 1)


def required(first, second=2.0, *, third: str = "x"):
    return first, second, third


def anything(first: int = 1, **more):
    return first, more


def test_open_groups_are_held_to_the_signature_of_their_target():
    here = f"{__name__}.required"
    targets.refuse_misfits("timesteps", {"_target_": here, "first": 1})
    with pytest.raises(ConfigError, match=r"timesteps\.first: .* needs it"):
        targets.refuse_misfits("timesteps", {"_target_": here})
    with pytest.raises(ConfigError, match=r"timesteps\.third=3: must be text"):
        targets.refuse_misfits("timesteps", {"_target_": here, "first": 1, "third": 3})
    with pytest.raises(ConfigError, match=r"names no class"):
        targets.refuse_misfits("timesteps", {"first": 1})
    targets.refuse_misfits(
        "timesteps", {"_target_": f"{__name__}.anything", "whatever": 1, "_partial_": True}
    )
    with pytest.raises(ConfigError, match=r"timesteps\.first=x: must be a whole number"):
        targets.refuse_misfits("timesteps", {"_target_": f"{__name__}.anything", "first": "x"})


def test_the_zero_block_knows_deepspeeds_own_fields():
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    names, switches = set(), set()
    for name, field in zero.DeepSpeedZeroConfig.model_fields.items():
        if not (field.json_schema_extra or {}).get("deprecated"):
            names |= {name, field.alias} - {None}
        if field.annotation in (bool, bool | None):
            switches |= {name, field.alias} & ZERO_KEYS
    assert names - set(REFUSED_ZERO_KEYS) == ZERO_KEYS
    assert switches == ZERO_SWITCHES
    assert set(offload.DeepSpeedZeroOffloadOptimizerConfig.model_fields) == OFFLOAD_KEYS["offload_optimizer"]
    assert set(offload.DeepSpeedZeroOffloadParamConfig.model_fields) == OFFLOAD_KEYS["offload_param"]


@pytest.mark.parametrize(
    "path", sorted((conf_dir() / "parallelism").glob("*.yaml")), ids=lambda path: Path(path).stem
)
def test_deepspeed_takes_every_parallelism_option(path):
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    block = OmegaConf.to_container(OmegaConf.load(path))["zero_optimization"]
    assert zero.DeepSpeedZeroConfig(**block).stage == block["stage"]


def test_the_transformer_knows_diffusers_own_arguments():
    diffusers = pytest.importorskip("diffusers")
    names = set(inspect.signature(diffusers.WanTransformer3DModel.__init__).parameters) - {"self"}
    assert names == TRANSFORMER_KEYS


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"sampling.guidance": 0.5}, ["sampling.guidance=0.5", "at least 1"]),
        ({"model.vae": Weights()}, ["model.vae.weights=null", "only experts"]),
        (
            {"train.experts": ["low_noise"], "sampling.every_steps": 5},
            ["a video needs every expert", "high_noise"],
        ),
        ({"optimizer": {"_target_": "torch.optim.AdamW"}}, ["optimizer.lr: not set"]),
    ],
)
def test_what_would_fail_hours_later_is_refused(config, settings, fragments):
    message = refusal(config, **settings)
    assert all(fragment in message for fragment in fragments), message


def test_a_checkpoint_may_be_named_by_its_step(config):
    config.resume = "step_00000100"
    check(config, 1)
