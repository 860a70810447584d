"""A run small enough for a test, its parts real: WanTransformer experts in DeepSpeed engines, clips of
random latents."""

from functools import partial
from pathlib import Path

import torch

from wan_ds import streams
from wan_ds.data.clips import Clip
from wan_ds.data.latents import Encoded, EncodedClip
from wan_ds.data.loader import Item, slots_of_rank
from wan_ds.data.order import clips_of_step
from wan_ds.flow.timesteps import Uniform
from wan_ds.flow.weighting import bell
from wan_ds.models.attention import WholeSequence, attend_within_clips
from wan_ds.models.conditioning import Condition, TextToVideo
from wan_ds.models.weights import build_transformer
from wan_ds.parallel.mesh import Mesh
from wan_ds.parallel.ulysses import SplitSequence
from wan_ds.training.engine import Engine
from wan_ds.training.experts import plan_routing
from wan_ds.training.guard import FirstSteps
from wan_ds.training.loop import Expert, Loop
from wan_ds.training.lr_schedule import Constant
from wan_ds.training.optimizer import build_optimizer
from wan_ds.training.precision import named
from wan_ds.training.step import FlowMatching, Tokens

ARCHITECTURE = {
    "patch_size": [1, 2, 2],
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
}
LATENTS = (16, 3, 8, 8)  # C, F, H, W
CLIPS = 5
SEED = 7
ZERO = {
    0: {"stage": 0},
    1: {"stage": 1, "reduce_bucket_size": 20_000},
    2: {"stage": 2, "reduce_bucket_size": 20_000},
    3: {
        "stage": 3,
        "reduce_bucket_size": 20_000,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    },
}


ZERO["offload"] = ZERO[3] | {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
PRECISIONS = {
    "fp32": named("fp32", None, "fp32"),
    "bf16_autocast": named("fp32", None, "bf16"),
    "bf16_params": named("bf16", None, "bf16"),
    "lora": named("fp32", None, None),
}

ZERO["hpz"] = ZERO[3] | {"zero_hpz_partition_size": 2}


def latents_of(index: int) -> torch.Tensor:
    return streams.normal(LATENTS, SEED, "clip", index)


def filled(value: float) -> dict[int, EncodedClip]:
    """Every clip with all latents at one value, to be put in place of the encoded ones."""
    clip = EncodedClip(torch.full(LATENTS, value), Condition())
    return dict.fromkeys(range(CLIPS), clip)


def prompt_of(caption: str) -> torch.Tensor:
    return streams.normal((512, ARCHITECTURE["text_dim"]), SEED, "caption text", caption)


def condition_of(index: int, architecture: dict) -> Condition:
    """What an image model is given of a clip; nothing for the others."""
    if architecture["in_channels"] == architecture["out_channels"]:
        return Condition()
    mask = torch.zeros(4, *LATENTS[1:])
    mask[:, 0] = 1
    image = architecture.get("image_dim")
    tokens = architecture.get("pos_embed_seq_len", 257)
    return Condition(
        streams.normal(LATENTS, SEED, "condition", index),
        mask,
        image and streams.normal((tokens, image), SEED, "image", index),
    )


def encoded(architecture: dict = ARCHITECTURE) -> Encoded:
    clips = [Clip(str(index), Path(str(index)), f"caption {index}") for index in range(CLIPS)]
    shape = (architecture["out_channels"], *LATENTS[1:])
    return Encoded(
        clips,
        read=lambda clip: torch.tensor(int(clip.key)),
        encode_clip=lambda index: EncodedClip(
            streams.normal(shape, SEED, "clip", index.item()), condition_of(index.item(), architecture)
        ),
        encode_text=lambda captions: torch.stack([prompt_of(caption) for caption in captions]),
        keep=True,
    )


def items(steps, global_batch_size, mesh):
    """This rank's items of each step, as the loader gives them once all latents are kept."""
    for step in steps:
        order = clips_of_step(step, global_batch_size, CLIPS, SEED)
        yield [
            Item(slot, order[slot], None)
            for slot in slots_of_rank(global_batch_size, mesh.dp_rank, mesh.dp_size)
        ]


def model(expert: str, architecture: dict = ARCHITECTURE):
    """A float32 transformer whose head is not zero, so that every gradient is alive from the first step."""
    built = build_transformer(architecture, None, seed=SEED, expert=expert)
    with torch.no_grad():
        built.proj_out.weight.normal_(std=0.1, generator=streams.generator(SEED, "head", expert))
    return built.train()


def expert(  # noqa: PLR0913
    name,
    interval,
    mesh,
    *,
    stage,
    lr=1e-3,
    max_grad_norm=1.0,
    guarded=False,
    network=None,
    architecture=ARCHITECTURE,
    precision=PRECISIONS["fp32"],
    sequence=None,
    optimizer=None,
) -> Expert:
    network = model(name, architecture) if network is None else network
    network.sequence = sequence or network.sequence
    engine = Engine(
        network,
        build_optimizer(network, optimizer or partial(torch.optim.AdamW, lr=lr, weight_decay=0.1)),
        mesh,
        zero_optimization=dict(ZERO[stage] if isinstance(stage, int | str) else stage),
        micro_batch_size=1,
        max_grad_norm=max_grad_norm,
        precision=precision,
    )
    guard = FirstSteps(name, engine) if guarded else None
    return Expert(name, interval, engine, Constant(steps=1000), lr, guard)


def loop(  # noqa: PLR0913
    *,
    stage,
    experts=None,
    global_batch_size=4,
    micro_batch_size=1,
    steps=100,
    first_step=0,
    policy="natural",
    architecture=ARCHITECTURE,
    conditioning=None,
    sp_size=1,
    ulysses="fused",
    **options,
) -> Loop:
    mesh = Mesh(sp_size)
    sequence = WholeSequence() if sp_size == 1 else SplitSequence(mesh, attend_within_clips, ulysses)
    timesteps = Uniform(5.0)
    routing = plan_routing(timesteps, boundary=0.875, experts=experts, policy=policy, seed=SEED)
    return Loop(
        experts={
            name: expert(
                name,
                routing.intervals[name],
                mesh,
                stage=stage,
                architecture=architecture,
                sequence=sequence,
                **options,
            )
            for name in routing.shares
        },
        routing=routing,
        objective=FlowMatching(
            timesteps,
            bell,
            conditioning or TextToVideo(),
            seed=SEED,
            global_batch_size=global_batch_size,
            tokens=Tokens((1, 2, 2), sequence),
        ),
        batches=items(range(first_step, steps), global_batch_size, mesh),
        encoded=encoded(architecture),
        mesh=mesh,
        steps=steps,
        micro_batch_size=micro_batch_size,
        elements_per_token=64,
        caption_dropout=0.2,
        max_skipped_in_a_row=3,
        step=first_step,
    )


def state_of(expert: Expert) -> dict[str, torch.Tensor | float | int]:
    """Everything that a step may change, of what this rank holds: shards of weights, moments, counts, the
    rate."""
    state = {f"weight {name}": Engine.shard(p).clone() for name, p in expert.engine.parameters()}
    optimizer = expert.engine.engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    for index, (key, moments) in enumerate(inner.state.items()):
        state[f"master {index}"] = key.detach().clone()
        for name, value in moments.items():
            state[f"{name} {index}"] = value.clone() if isinstance(value, torch.Tensor) else value
    return state | {"steps": expert.steps, "lr": expert.lr}


def equal(one: dict, other: dict) -> bool:
    """Whether two states are the same to the byte."""
    if one.keys() != other.keys():
        return False
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        if isinstance(a, torch.Tensor) and a.dim()
        else a == b
        for a, b in ((one[key], other[key]) for key in one)
    )


def full_weights(expert: Expert) -> dict[str, torch.Tensor]:
    """The float32 weights, whole; a collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    if expert.engine.stage == 0:
        return {name: p.detach().clone() for name, p in expert.engine.parameters()}
    return {name: safe_get_full_fp32_param(p).clone() for name, p in expert.engine.parameters()}
