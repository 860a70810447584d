"""The loop: which expert, which clips, one window, then whatever else wants to happen."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from wan_ds import streams
from wan_ds.data.latents import Encoded, EncodedClip
from wan_ds.data.loader import Item, slots_of_rank
from wan_ds.errors import TrainingError
from wan_ds.flow.timesteps import Interval
from wan_ds.parallel.mesh import Mesh
from wan_ds.parallel.reduce import sum_over_ranks
from wan_ds.training.adapters import Adapter
from wan_ds.training.ema import Ema
from wan_ds.training.engine import Engine, FrozenEngine
from wan_ds.training.experts import Routing
from wan_ds.training.guard import FirstSteps
from wan_ds.training.lr_schedule import Schedule
from wan_ds.training.meters import SIGMA_BINS, LossBySigma, Meters, loss_by_sigma
from wan_ds.training.places import Places
from wan_ds.training.same_clips import SameClips
from wan_ds.training.step import FlowMatching, Loss, MicroBatch


@dataclass
class Expert:
    """One expert in training: its engine, its learning rates, what it keeps beside, and its own counts."""

    name: str
    interval: Interval
    engine: Engine
    schedule: Schedule
    base_lr: float
    guard: FirstSteps | None = None
    adapter: Adapter | None = None  # None: all its weights train
    base: str | None = None  # the fingerprint of what an adapter stands on
    base_source: str = ""  # where that was read
    ema: Ema | None = None
    steps: int = 0  # applied
    skipped: int = 0
    skipped_in_a_row: int = 0
    clips: int = 0

    @property
    def lr(self) -> float:
        """The learning rate of its next step."""
        return self.base_lr * self.schedule(self.steps)

    def step(self) -> bool:
        """Apply the window; a non-finite one is skipped and changes nothing but the count of skips."""
        lr = self.lr
        watching = self.guard is not None and self.guard.is_watching
        self.engine.before_update = self.guard.before_update if watching else None
        applied = self.engine.step(lr)
        if watching:
            self.guard.after_step(applied, lr)
        if applied and self.ema is not None:
            self.ema.update()
        self.steps += applied
        self.skipped += not applied
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        return applied

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """The network as it is meant to be used: with its averages if it has any, without dropout and
        gradients. A collective at both ends.
        """
        with self.ema.applied() if self.ema else nullcontext(), self.engine.inference() as model:
            model.eval()
            try:
                yield model
            finally:
                model.train()


class Callback:
    """Something that happens beside training. All ranks call every method at the same step."""

    doing = "other callbacks"  # in a few words, for whoever asks where a rank is

    def before_training(self, loop: "Loop") -> None: ...

    def after_step(self, loop: "Loop") -> None: ...

    def after_training(self, loop: "Loop") -> None: ...


@dataclass
class Loop:
    """Trains from ``step`` finished steps to ``steps``."""

    experts: dict[str, Expert]
    routing: Routing
    objective: FlowMatching
    batches: Generator[list[Item]]  # this rank's clips of each step that is left
    encoded: Encoded
    mesh: Mesh
    steps: int
    micro_batch_size: int
    elements_per_token: int
    caption_dropout: float
    max_skipped_in_a_row: int
    callbacks: Sequence[Callback] = ()
    step: int = 0
    frozen: dict[str, FrozenEngine] = field(default_factory=dict)  # experts that only evaluate and sample
    meters: Meters = field(default_factory=Meters)
    places: Places = field(default_factory=Places)  # where this rank is, for the watchdog
    same_clips: SameClips | None = None  # None: the ranks' clips are not compared
    stopped_by: int | None = None  # the signal that ended training early
    _items: list[Item] = field(default_factory=list)  # the clips of a step that has begun

    @property
    def is_finished(self) -> bool:
        return self.step >= self.steps

    @property
    def networks(self) -> dict[str, Expert | FrozenEngine]:
        """All experts that are loaded; each has `inference`."""
        return self.experts | self.frozen

    def run(self) -> None:
        for callback in self.callbacks:
            self.places.move(callback.doing)
            callback.before_training(self)
        try:
            while not self.is_finished and self.stopped_by is None:
                self.train_step()
                for callback in self.callbacks:
                    self.places.move(callback.doing)
                    callback.after_step(self)
        finally:
            self.places.move("ending")
            self.batches.close()  # ends its worker processes, also when an error ends training
            for callback in self.callbacks:
                callback.after_training(self)

    def train_step(self) -> None:
        """One optimizer step of the expert whose turn it is."""
        started = time.perf_counter()
        expert = self.experts[self.routing.expert_of(self.step)]
        self.places.begin_step(self.step + 1, expert.name, "waiting for clips")
        self._items = self._items or next(self.batches)
        self.places.hold({item.slot: self.encoded.clips[item.index].key for item in self._items})
        waited = time.perf_counter() - started
        lr = expert.lr
        try:
            losses = self.window(expert, self._items)
            self.places.move("optimizer step")
            applied = expert.step()
        except Exception:
            expert.engine.abandon()  # whoever catches it may take the same step again
            raise
        self._items = []
        expert.clips += self.objective.global_batch_size
        self.step += 1
        self.places.move("adding up")
        self.meters.add(self.step, self._values(expert, losses, lr))
        seconds = time.perf_counter() - started
        self.meters.add(self.step, self._speed(losses, seconds, waited))
        if not applied and expert.skipped_in_a_row >= self.max_skipped_in_a_row:
            raise TrainingError(
                f"{expert.name} met a non-finite loss or gradient {expert.skipped_in_a_row} times in a row, "
                f"the last at step {self.step}; lower optimizer.lr, or look at the clips "
                "(train.max_skipped_in_a_row sets the limit)"
            )

    def window(self, expert: Expert, items: list[Item]) -> list[Loss]:
        """Forward and backward of the step's clips; the ranks' losses sum to the mean over the window."""
        micro_batches = self.split(items)
        self.places.move("comparing ranks")
        if self.same_clips is not None:
            self.same_clips(self.step, expert, micro_batches)
        count = torch.tensor(
            sum(self.objective.count(batch, self.step) for batch in micro_batches), dtype=torch.float64
        )
        # Ranks that share a clip count it once each.
        count = sum_over_ranks(count.to(micro_batches[0].prompt_embeds.device)) / self.mesh.sp_size
        # The one thing that draws from torch's own generator is the dropout of adapters. Ranks that share
        # clips draw alike, so that all tokens of a clip see one text.
        dropout = streams.generator(self.objective.seed, "dropout", self.step, self.mesh.dp_rank)
        torch.manual_seed(dropout.initial_seed())
        losses = []
        for batch in micro_batches:
            self.places.move("forward", batch.slots)
            loss = self.objective(expert.engine.train, batch, expert.interval, self.step)
            self.places.move("backward", batch.slots)
            expert.engine.backward(non_finite_stays(loss.weighted_sum / count))
            losses.append(replace(loss, weighted_sum=loss.weighted_sum.detach()))
        return losses

    def split(self, items: list[Item]) -> list[MicroBatch]:
        """This rank's clips as micro-batches, as many on every rank.

        A rank that holds fewer repeats its last at weight 0.
        """
        clips = [self._encode(item) for item in items]
        prompts = [self.encoded.prompt(None if self._drops_caption(item) else item.index) for item in items]
        size = self.micro_batch_size
        batches = [
            MicroBatch(
                slots=[item.slot for item in items[first : first + size]],
                latents=[clip.latents for clip in clips[first : first + size]],
                conditions=[clip.condition for clip in clips[first : first + size]],
                prompt_embeds=torch.stack(prompts[first : first + size]),
            )
            for first in range(0, len(items), size)
        ]
        most = len(slots_of_rank(self.objective.global_batch_size, 0, self.mesh.dp_size))
        idle = replace(batches[-1], weight=0.0)
        return batches + [idle] * (-(-most // size) - len(batches))

    def _encode(self, item: Item) -> EncodedClip:
        self.places.move("encoding", [item.slot])
        return self.encoded.clip(item.index, item.pixels)

    def _drops_caption(self, item: Item) -> bool:
        return self.objective.drops_caption(item.slot, self.step, self.caption_dropout)

    def _values(self, expert: Expert, losses: list[Loss], lr: float) -> dict:
        """The step's numbers over all ranks, still on the device."""
        real = [loss for loss in losses if loss.count]
        bins = loss_by_sigma(torch.cat([x.sigma for x in real]), torch.cat([x.clip_losses for x in real]))
        sums = torch.cat(
            [
                torch.stack([x.weighted_sum for x in real]).sum()[None].double(),
                torch.tensor([sum(x.count for x in real)], dtype=torch.float64, device=bins.sums.device),
                bins.sums.double(),
                bins.counts.double(),
            ]
        )
        sums = sum_over_ranks(sums)
        sums[1] /= self.mesh.sp_size  # ranks that share a clip count it once each
        sums[2 + SIGMA_BINS :] /= self.mesh.sp_size
        loss = sums[0] / sums[1]
        name = f"train/{expert.name}"
        return {
            "expert": expert.name,
            "train/loss": loss,
            f"{name}/loss": loss,
            f"{name}/step": expert.steps,
            f"{name}/lr": lr,
            f"{name}/grad_norm": expert.engine.grad_norm,
            f"{name}/skipped": expert.skipped,
            f"{name}/clips": expert.clips,
            "train/loss_by_sigma": LossBySigma(sums[2 : 2 + SIGMA_BINS], sums[2 + SIGMA_BINS :]),
        }

    def _speed(self, losses: list[Loss], seconds: float, waited: float) -> dict:
        tokens = sum(loss.size for loss in losses) * self.mesh.dp_size / self.elements_per_token
        return {
            "speed/step_seconds": seconds,
            "speed/tokens_per_second": tokens / seconds,
            "speed/clips_per_second": self.objective.global_batch_size / seconds,
            "speed/data_wait_fraction": waited / seconds,
        }


def non_finite_stays(loss: torch.Tensor) -> torch.Tensor:
    """The loss unchanged, but NaN with NaN gradients if it is not finite, so that every rank skips the step.

    Without reading it: infinity minus infinity is NaN, everything finite minus itself is 0.
    """
    return loss * (1 + (loss.detach() - loss.detach()))
