"""What `scripts/bench.py` times: this project's training step, and what it is measured against.

The other side is a plain loop over diffusers' own model with torch's AdamW. Weights, clip, noise, noise level
and the clipping of gradients are the same.

Letters: C channels, F H W of the latents.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor

from wan_ds import streams
from wan_ds.errors import ConfigError
from wan_ds.flow.path import mix, timestep, velocity
from wan_ds.flow.timesteps import Interval, Uniform
from wan_ds.flow.weighting import constant
from wan_ds.models.attention import BACKENDS, TokenSequence, WholeSequence
from wan_ds.models.conditioning import Condition, Conditioning, TextImageToVideo, TextToVideo
from wan_ds.models.recompute import recompute
from wan_ds.models.tokens import TEXT_LENGTH, Grid
from wan_ds.models.transformer import WanTransformer
from wan_ds.models.weights import build_transformer
from wan_ds.parallel.mesh import Mesh
from wan_ds.parallel.ulysses import SplitSequence
from wan_ds.training.engine import Engine, device, init_distributed
from wan_ds.training.optimizer import build_optimizer
from wan_ds.training.precision import Precision, named
from wan_ds.training.side_by_side import synchronize
from wan_ds.training.step import FlowMatching, MicroBatch, Tokens

SEED = 0
LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0
WHOLE_RANGE = Interval(0.0, 1.0)
_BUCKET = 5_000_000  # elements; the model is small, and so is what its ranks send at a time
ZERO = {
    0: {"stage": 0},
    2: {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": _BUCKET,
        "allgather_bucket_size": _BUCKET,
    },
    3: {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": _BUCKET,
        "stage3_prefetch_bucket_size": _BUCKET,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "memory_efficient_linear": True,  # else gathered weights live until backward
    },
}


@dataclass(frozen=True)
class Size:
    """Of the model and its clip: two blocks of the 1.3B's width, one clip of so many tokens.

    ConfigError for tokens that are no box of at least 2 x 2 x 2.
    """

    tokens: int = 4096
    layers: int = 2
    heads: int = 12
    head_width: int = 128
    ffn_width: int = 8960
    text_width: int = 4096

    def __post_init__(self) -> None:
        if self.tokens < 8 or self.tokens % 8:
            raise ConfigError(
                f"tokens={self.tokens}: must be a multiple of 8, such as 4096: the clip is a box of at"
                " least 2 frames, rows and columns"
            )

    @property
    def grid(self) -> Grid:
        """(frames, rows, columns) in tokens, all at least 2, as near to a cube as the number allows."""
        eighth = self.tokens // 8
        frames = max(n for n in range(1, eighth + 1) if eighth % n == 0 and n**3 <= eighth)
        area = eighth // frames
        rows = max(n for n in range(1, area + 1) if area % n == 0 and n * n <= area)
        return 2 * frames, 2 * rows, 2 * area // rows

    @property
    def config(self) -> dict[str, Any]:
        """The transformer's, in diffusers' words."""
        return {
            "patch_size": [1, 2, 2],
            "num_layers": self.layers,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head_width,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": self.text_width,
            "freq_dim": 256,
            "ffn_dim": self.ffn_width,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 1024,
        }

    def build(self) -> WanTransformer:
        """The transformer with weights from the seed, its head filled, so that there is something to learn
        everywhere."""
        model = build_transformer(self.config, None, seed=SEED)
        with torch.no_grad():
            model.proj_out.weight.normal_(std=0.02, generator=streams.generator(SEED, "head"))
        return model.to(device()).train()

    def build_diffusers(self) -> WanTransformer3DModel:
        """diffusers' own class with the same weights."""
        model = WanTransformer3DModel(**self.config)
        model.load_state_dict(self.build().state_dict())
        return model.to(device()).train()

    def batch(self) -> MicroBatch:
        """The clip, on the device."""
        frames, rows, columns = self.grid
        latents = streams.normal((16, frames, 2 * rows, 2 * columns), SEED, "clip")
        prompt = streams.normal((1, TEXT_LENGTH, self.text_width), SEED, "caption")
        return MicroBatch([0], [latents.to(device())], [Condition()], prompt.to(device()))


def precision() -> Precision:
    """bfloat16 products over float32 weights on a GPU, float32 on a CPU."""
    return named("fp32", None, "fp32" if device().type == "cpu" else "bf16")


def _objective(conditioning: Conditioning, tokens: Tokens) -> FlowMatching:
    """What both sides learn, of one clip in a step."""
    return FlowMatching(
        Uniform(5.0), constant, conditioning, seed=SEED, global_batch_size=1, tokens=tokens
    )


def _tokens(size: Size, mesh: Mesh | None = None) -> Tokens:
    attention = BACKENDS["auto"]
    sequence: TokenSequence = WholeSequence(attention)
    if mesh is not None and mesh.sp_size > 1:
        sequence = SplitSequence(mesh, attention)
    return Tokens(tuple(size.config["patch_size"]), sequence)


_adamw = partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.01)


class Ours:
    """The training step of this project: objective, engine, optimizer."""

    def __init__(self, size: Size, mesh: Mesh, stage: int) -> None:
        model = size.build()
        tokens = _tokens(size, mesh)
        model.sequence = tokens.sequence
        self.objective = _objective(TextToVideo(), tokens)
        self.batch = size.batch()
        self.engine = Engine(
            model,
            build_optimizer(model, _adamw),
            mesh,
            zero_optimization=dict(ZERO[stage]),
            micro_batch_size=1,
            max_grad_norm=MAX_GRAD_NORM,
            precision=precision(),
        )
        self.steps = 0

    def step(self, kind: str = "none", keep_ffn: bool = False) -> None:
        """One optimizer step with this recomputation."""
        recompute(self.engine.module, kind, keep_ffn=keep_ffn)
        loss = self.objective(self.engine.train, self.batch, WHOLE_RANGE, self.steps)
        self.engine.backward(loss.weighted_sum / loss.count)
        self.engine.step(LEARNING_RATE)
        self.steps += 1

    @torch.no_grad()
    def loss(self) -> float:
        """This rank's share of the loss that the next step begins with, in float32."""
        loss = self.objective(self.engine.module, self.batch, WHOLE_RANGE, self.steps)
        return (loss.weighted_sum / loss.count).item()

    def attention_share(self) -> float:
        """Of the time of one forward, what self-attention takes between its projections, RoPE done."""
        with self.engine.inference() as model:
            attention = model.sequence = _TimedAttention(model.sequence)
            try:
                started = _now()
                model(self.batch.latents, torch.full((1,), 500.0, device=device()), self.batch.prompt_embeds)
                return attention.seconds / (_now() - started)
            finally:
                model.sequence = attention.sequence


class _TimedAttention(WholeSequence):
    def __init__(self, sequence: TokenSequence) -> None:
        super().__init__(sequence.attention)
        self.sequence = sequence
        self.seconds = 0.0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, clip_tokens: Sequence[int]) -> Tensor:
        started = _now()
        attended = self.sequence.attend(query, key, value, clip_tokens)
        self.seconds += _now() - started
        return attended


def _now() -> float:
    synchronize(device())
    return time.perf_counter()


class Diffusers:
    """A plain loop over diffusers' model; with ``given`` the clip's first frame is clean, at timestep 0."""

    def __init__(self, size: Size) -> None:
        self.model = size.build_diffusers()
        self.optimizer = _adamw(self.model.parameters())
        self.objective = _objective(TextToVideo(), _tokens(size))
        self.batch = size.batch()
        self.grid = size.grid
        self.steps = 0

    def step(self, checkpointing: bool = False) -> None:
        """One optimizer step, with diffusers' own checkpointing of whole blocks or without."""
        switch = "enable" if checkpointing else "disable"
        getattr(self.model, f"{switch}_gradient_checkpointing")()
        self.forward_backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def forward_backward(self, given: bool = False) -> None:
        # Its cache is torch's default, which our engine turns off for the process.
        enabled = precision().is_autocast
        with torch.autocast(device().type, torch.bfloat16, enabled=enabled, cache_enabled=True):
            loss = self._loss(given)
        loss.backward()

    @torch.no_grad()
    def loss(self, given: bool = False) -> float:
        """The loss that the next step begins with, in float32."""
        return self._loss(given).item()

    def _loss(self, given: bool) -> Tensor:
        (latents,) = self.batch.latents
        sigma = self.objective.draw_sigma([0], WHOLE_RANGE, self.steps).to(latents.device)
        noise = streams.normal(latents.shape, SEED, "noise", self.steps, 0).to(latents.device)
        noised, times = mix(latents, noise, sigma), timestep(sigma)
        if given:
            frames, rows, columns = self.grid
            noised = torch.cat([latents[:, :1], noised[:, 1:]], dim=1)
            times = torch.cat([torch.zeros_like(times), times.repeat(frames - 1)])
            times = times.repeat_interleave(rows * columns)[None]
        (velocities,) = self.model(noised[None], times, self.batch.prompt_embeds, return_dict=False)
        first = int(given)
        target = velocity(latents, noise)[:, first:]
        return torch.nn.functional.mse_loss(velocities[0, :, first:].float(), target)


class OurSegments:
    """Forward and backward of our model alone; with ``given`` the first frame is a segment at timestep 0."""

    def __init__(self, size: Size) -> None:
        self.model = size.build()
        tokens = _tokens(size)
        self.objectives = [_objective(TextImageToVideo(share), tokens) for share in (0.0, 1.0)]
        self.batch = size.batch()

    def forward_backward(self, given: bool) -> None:
        with precision().autocast(device().type):
            loss = self._loss(given)
        loss.backward()

    @torch.no_grad()
    def loss(self, given: bool) -> float:
        """In float32."""
        return self._loss(given).item()

    def _loss(self, given: bool) -> Tensor:
        loss = self.objectives[given](self.model, self.batch, WHOLE_RANGE, 0)
        return loss.weighted_sum / loss.count


def sharded(size: Size) -> Callable[[str, int], float | None]:
    """For one rank of a world whose ranks share the clip: what does a "step" at a ZeRO stage, or tells the
    "loss" there. Joins the world."""
    init_distributed()
    if device().type == "cuda":
        torch.cuda.set_device(device())
    mesh = Mesh(dist.get_world_size())
    built: dict[int, Ours] = {}

    def turn(what: str, stage: int) -> float | None:
        if stage not in built:
            built.clear()  # one at a time: they are large
            gc.collect()
            built[stage] = Ours(size, mesh, stage)
        if what == "loss":
            return built[stage].loss()
        built[stage].step()
        synchronize(device())
        return None

    return turn
