"""A check of each expert's first steps: what should train trains, what should not does not."""

import torch
import torch.distributed as dist

from wan_ds.errors import TrainingError
from wan_ds.training.engine import Engine

GUARDED_STEPS = 3  # a zero-initialised head lets gradients through only after its own first step
# A long warm-up, and Adam's eps beside tiny gradients, may hold a weight this many steps.
LAST_LOOK = GUARDED_STEPS * 2**7


class FirstSteps:
    """Watches an expert's first applied steps with a learning rate above zero.

    After three of them every trainable parameter must have had a finite, non-zero gradient; an adapter's
    lora_A, which can have none while its lora_B is zero, as in the first step, by the first look after its
    lora_B was not. Weights are looked at after 3, 6, 12 ... steps: a frozen one must be as it was, and a
    trainable one must have moved by the last look; the looks end once all have. Else TrainingError names
    those that differ, on all ranks.
    """

    def __init__(self, expert: str, engine: Engine) -> None:
        self._expert = expert
        self._engine = engine
        self._steps = 0
        self._next_look = GUARDED_STEPS
        parameters = dict(engine.parameters())
        self._with_gradient = torch.zeros(len(parameters), dtype=torch.bool)
        # Whether this rank has seen a gradient be possible: for lora_A, some of lora_B that is not zero.
        self._possible = torch.tensor([".lora_A." not in name for name in parameters])
        self._lora_b = {
            index: parameters[name.replace(".lora_A.", ".lora_B.")]
            for index, name in enumerate(parameters)
            if ".lora_A." in name
        }
        self._lacking = [index for index, p in enumerate(parameters.values()) if p.requires_grad]
        self._before: torch.Tensor | None = None  # hashes of the weights before the first watched update

    @property
    def is_watching(self) -> bool:
        return self._next_look <= LAST_LOOK

    def before_update(self) -> None:
        """Note which parameters have a finite, non-zero gradient; called inside the engine's step."""
        if self._before is None:
            self._before = self._hashes()
        parameters = list(self._engine.parameters())
        for index in self._lacking:
            if index in self._lora_b:
                self._possible[index] |= self._engine.shard(self._lora_b[index]).any().item()
            gradient = self._engine.full_gradient(parameters[index][1])
            if gradient is not None and gradient.isfinite().all() and gradient.any():
                self._with_gradient[index] = True

    def after_step(self, applied: bool, learning_rate: float) -> None:
        """Count the step, and judge when a look is due."""
        if not (applied and learning_rate > 0):
            return
        self._steps += 1
        if self._steps < self._next_look:
            return
        with_gradient = self._on_any_rank(self._with_gradient)
        possible = self._on_any_rank(self._possible)
        names = [name for name, _ in self._engine.parameters()]
        lacking = [index for index in self._lacking if not with_gradient[index]]
        self._refuse(
            [names[index] for index in lacking if possible[index]],
            "trainable",
            "had no finite, non-zero gradient",
        )
        self._lacking = lacking
        moved = self._on_any_rank((self._hashes() != self._before).any(dim=1))
        self._refuse(self._those(False, moved, True), "frozen", "moved")
        still = self._those(True, moved, False)
        if self._steps >= LAST_LOOK:
            self._refuse(still, "trainable", "did not move")
        self._next_look = 2 * self._steps if still or lacking else LAST_LOOK + 1

    def _those(self, trainable: bool, flags: list[bool], flag: bool) -> list[str]:
        """Names of the trainable, or frozen, parameters with this flag."""
        parameters = zip(self._engine.parameters(), flags, strict=True)
        return [name for (name, p), own in parameters if p.requires_grad == trainable and own == flag]

    def _refuse(self, names: list[str], kind: str, what: str) -> None:
        if names:
            raise TrainingError(
                f"{self._expert}: {len(names)} {kind} parameters {what} in the first {self._steps} steps "
                f"({', '.join(names[:5])})"
            )

    def _on_any_rank(self, flags: torch.Tensor) -> list[bool]:
        where = next(self._engine.parameters())[1].device
        shared = flags.to(where, torch.uint8)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.bool().tolist()

    def _hashes(self) -> torch.Tensor:
        """Two int64 per parameter that change with this rank's share: its bits' exclusive or, and sum."""
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        rows = []
        for _, parameter in self._engine.parameters():
            shard = self._engine.shard(parameter).detach().contiguous()
            bits = shard.view(integers[shard.element_size()])
            exclusive_or = torch.hash_tensor(bits).item() % 2**63
            rows.append((exclusive_or, bits.sum(dtype=torch.int64).item()))
        return torch.tensor(rows)
