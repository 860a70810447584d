"""One window on ranks that share clips, and the same in one process by stock diffusers.

A row is one way to lay it out; what a rank does with it, and the reference, are here, the claims in
`test_parity.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from torch import Tensor, nn

from tests.models.variants import ARCHITECTURES, randomised
from tests.training import tiny
from wan_ds import streams
from wan_ds.data.clips import Clip
from wan_ds.data.latents import Encoded, EncodedClip
from wan_ds.data.loader import Item, slots_of_rank
from wan_ds.flow.timesteps import Interval, Uniform
from wan_ds.flow.weighting import bell
from wan_ds.models.adapter import AdapterSettings
from wan_ds.models.attention import BACKENDS, WholeSequence
from wan_ds.models.conditioning import (
    Condition,
    FirstLastFrame,
    ImageToVideo,
    TextImageToVideo,
    TextToVideo,
)
from wan_ds.models.recompute import recompute
from wan_ds.models.weights import build_transformer
from wan_ds.training.experts import plan_routing
from wan_ds.training.loop import Expert, Loop
from wan_ds.training.step import FlowMatching, Tokens

SEED, LR, MAX_GRAD_NORM = 11, 1e-3, 1.0
# In Adam's first step a gradient near 0 moves a weight as far as any: eps makes the step smooth in it.
ADAM = {"lr": LR, "weight_decay": 0.1, "eps": 1e-3}
CONDITIONING = {
    "t2v": TextToVideo(),
    "i2v": ImageToVideo(),
    "i2v-a14b": ImageToVideo(),
    "flf2v": FirstLastFrame(),
    "ti2v": TextImageToVideo(0.5),
}
IMAGE_TOKENS = {"i2v": 257, "flf2v": 514}  # neither is a multiple of 4, nor 257 of 2
ADAPTER = AdapterSettings(
    rank=3, alpha=5.0, targets=["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
)

# Of each clip (F, H, W) of its latents: f * h/2 * w/2 tokens.
SINGLE = {"32": (2, 8, 8), "27": (3, 6, 6), "15": (1, 6, 10), "5": (1, 2, 10)}
SEVERAL = [(1, 6, 6), (3, 4, 6), (1, 2, 4), (2, 4, 4), (1, 4, 6)]  # 9, 18, 2, 8, 6 tokens


@dataclass(frozen=True)
class Row:
    """One layout; the world has four ranks."""

    variant: str
    sp_size: int
    stage: int
    reduce_scatter: bool
    lora: bool
    stream: str  # a length of one clip for each group of ranks, or "several"
    exchange: str = "fused"
    recompute: str = "none"
    keeps: str = ""  # of selective recomputation: "exchange", "ffn", or both
    precision: str = "fp32"

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Of the global batch's clips: five in streams of up to three, or one for each group of ranks."""
        return SEVERAL if self.stream == "several" else [SINGLE[self.stream]] * (4 // self.sp_size)

    @property
    def zero_optimization(self) -> dict:
        zero = dict(tiny.ZERO[self.stage]) | {"reduce_scatter": self.reduce_scatter}
        if self.stage == 3 and self.stream == "several":  # ranks hold other clips, and weights are prefetched
            zero |= {
                "stage3_prefetch_bucket_size": 20_000,
                "stage3_max_live_parameters": 1_000_000,
                "stage3_max_reuse_distance": 1_000_000,
                "overlap_comm": True,
            }
        return zero


def drawn(shape, *key) -> Tensor:
    return streams.normal(tuple(shape), SEED, *key)


def clip_of(variant: str, sizes, index: int) -> EncodedClip:
    architecture, size = ARCHITECTURES[variant], sizes[index]
    latents = drawn((architecture["out_channels"], *size), "clip", index)
    if architecture["in_channels"] == architecture["out_channels"]:
        return EncodedClip(latents, Condition())
    mask = torch.zeros(4, *size)
    mask[:, 0] = 1
    tokens = IMAGE_TOKENS.get(variant)
    image = None if tokens is None else drawn((tokens, 24), "image", index)
    return EncodedClip(latents, Condition(drawn((16, *size), "condition", index), mask, image))


def text_of(caption: str) -> Tensor:
    return drawn((512, 32), "text", caption)


def network_of(variant: str, lora: bool, precision: str = "fp32") -> nn.Module:
    """Weights that listen to everything; norms about 1, else attention is uniform."""
    built = build_transformer(
        ARCHITECTURES[variant],
        None,
        seed=SEED,
        expert="all",
        dtype_of=tiny.PRECISIONS[precision].dtype_of,
        adapter=ADAPTER if lora else None,
    )
    randomised(built, SEED, 0.2)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    if lora:  # what networks.build_expert does: else ZeRO-3 lets the first block's weights go too early
        built.patch_embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
    return built.train()


def loop_of(row: Row) -> Loop:
    from wan_ds.parallel.mesh import Mesh
    from wan_ds.parallel.ulysses import SplitSequence

    mesh, timesteps = Mesh(row.sp_size), Uniform(5.0)
    attention = BACKENDS["auto"]
    sequence = WholeSequence(attention) if row.sp_size == 1 else SplitSequence(mesh, attention, row.exchange)
    network = network_of(row.variant, row.lora, row.precision)
    recompute(
        network, row.recompute, keep_exchange="exchange" in row.keeps, keep_ffn="ffn" in row.keeps
    )
    expert = tiny.expert(
        "all",
        Interval(0.0, 1.0),
        mesh,
        stage=row.zero_optimization,
        lr=LR,
        max_grad_norm=MAX_GRAD_NORM,
        network=network,
        sequence=sequence,
        precision=tiny.PRECISIONS[row.precision],
        optimizer=partial(torch.optim.AdamW, **ADAM),
    )
    sizes = row.sizes
    clips = [Clip(str(index), Path(str(index)), f"caption {index}") for index in range(len(sizes))]
    own = [Item(slot, slot, None) for slot in slots_of_rank(len(sizes), mesh.dp_rank, mesh.dp_size)]
    return Loop(
        experts={"all": expert},
        routing=plan_routing(timesteps, boundary=None, experts=None, policy="natural", seed=SEED),
        objective=FlowMatching(
            timesteps,
            bell,
            CONDITIONING[row.variant],
            seed=SEED,
            global_batch_size=len(sizes),
            tokens=Tokens((1, 2, 2), sequence),
        ),
        batches=(items for items in [own] * 2),
        encoded=Encoded(
            clips,
            read=lambda clip: torch.tensor(int(clip.key)),
            encode_clip=lambda index: clip_of(row.variant, sizes, index.item()),
            encode_text=lambda captions: torch.stack([text_of(caption) for caption in captions]),
            keep=True,
        ),
        mesh=mesh,
        steps=2,
        micro_batch_size=3,
        elements_per_token=64,
        caption_dropout=0.0,
        max_skipped_in_a_row=3,
    )


def run_row(row: Row) -> dict:
    """On every rank: the loss, the norm, all gradients and the weights after a step; of rank 0."""
    loop = loop_of(row)
    engine = loop.experts["all"].engine
    gradients: dict[str, Tensor] = {}

    def note() -> None:
        for name, parameter in engine.parameters():
            if parameter.requires_grad:
                gradients[name] = engine.full_gradient(parameter).clone()

    expert = loop.experts["all"]
    with mock.patch.object(type(expert), "step", lambda self: _stepped(self, note)):
        loop.train_step()
    (record,) = loop.meters.flush()
    weights = {n: engine.full_master(p).clone() for n, p in engine.parameters() if p.requires_grad}
    found = {
        "loss": record["train/loss"],
        "by_sigma": {key: value for key, value in record.items() if "by_sigma" in key},
        "norm": float(engine.grad_norm),
        "gradients": gradients,
        "weights": weights,
    }
    return found if loop.mesh.is_main else {}


def _stepped(expert: Expert, note: Callable[[], None]) -> bool:
    """`Expert.step` with a look at the gradients."""
    expert.engine.before_update = note
    applied = expert.engine.step(expert.lr)
    expert.steps += applied
    return applied


def reference(variant: str, sizes, lora: bool) -> dict:
    """The same by diffusers, one clip after the other, and torch's AdamW."""
    ours = network_of(variant, lora)
    stock = WanTransformer3DModel(**ARCHITECTURES[variant])
    if lora:
        stock.add_adapter(
            LoraConfig(r=ADAPTER.rank, lora_alpha=ADAPTER.alpha, target_modules=ADAPTER.targets)
        )
    stock.load_state_dict(ours.state_dict())
    trained = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    parameters = {name: p for name, p in stock.named_parameters() if name in trained}
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_(name in trained)
    count, total = 0, 0.0
    strata = torch.randperm(len(sizes), generator=streams.generator(SEED, "strata", 0))
    for slot in range(len(sizes)):
        u = (strata[slot].item() + streams.uniform(SEED, "sigma", 0, slot)) / len(sizes)
        sigma = torch.tensor(5 * u / (1 + 4 * u), dtype=torch.float32)
        clip = clip_of(variant, sizes, slot)
        noise = streams.normal(clip.latents.shape, SEED, "noise", 0, slot)
        hidden, timestep, first = (1 - sigma) * clip.latents + sigma * noise, (1000 * sigma)[None], 0
        frames, height, width = sizes[slot]
        if variant == "ti2v" and streams.uniform(SEED, "image", 0, slot) < 0.5 and frames > 1:
            first = 1
            hidden[:, 0] = clip.latents[:, 0]
            by_frame = torch.tensor([0.0, *[1000 * sigma.item()] * (frames - 1)])
            timestep = by_frame.repeat_interleave(height * width // 4)[None]
        condition, images = clip.condition, None
        if condition.frame_mask is not None:
            hidden = torch.cat([hidden, condition.frame_mask, condition.condition_latents])
        if condition.image_embeds is not None:
            images = condition.image_embeds.view(-1, 257, 24)
        predicted = stock(
            hidden[None], timestep, text_of(f"caption {slot}")[None], images, return_dict=False
        )[0][0]
        error = (predicted - (noise - clip.latents)).square()[:, first:]
        total = total + bell(sigma[None])[0] * error.sum()
        count += error.numel()
    loss = total / count
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in parameters.items()}
    norm = nn.utils.clip_grad_norm_(parameters.values(), MAX_GRAD_NORM)
    decayed = [p for name, p in parameters.items() if is_decayed(name)]
    others = [p for name, p in parameters.items() if not is_decayed(name)]
    torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], **ADAM).step()
    return {
        "loss": loss.item(),
        "norm": norm.item(),
        "gradients": gradients,
        "weights": {name: p.detach() for name, p in parameters.items()},
    }


def is_decayed(name: str) -> bool:
    return not (name.endswith(("bias", "scale_shift_table")) or ".norm" in name)
