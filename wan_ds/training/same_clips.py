"""Whether the ranks that share a clip train on the same numbers, and the others on other clips.

Each rank hashes what it is about to train on, and every rank compares all hashes: so all of them refuse
together, before a forward in which some would wait for the others.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from wan_ds.data.loader import slots_of_rank
from wan_ds.errors import TrainingError
from wan_ds.parallel.mesh import Mesh
from wan_ds.parallel.reduce import host_group
from wan_ds.training.step import FlowMatching, MicroBatch

if TYPE_CHECKING:
    from wan_ds.training.loop import Expert

# What the whole world must agree on, and what the ranks that share a clip must.
WORLD = ("step", "expert", "learning rate", "number of micro-batches")
SETTINGS, DRAWS, CONTENT = (
    ("slots",),
    ("caption dropout", "given images", "sigma", "noise"),
    ("latents", "condition latents", "frame mask", "image embeddings", "text"),
)
SHARED = (*SETTINGS, *DRAWS, *CONTENT)
NO_SLOT = -1


class SameClips:
    """The comparison, at its first call and then at every ``every_steps``-th.

    Counted in calls, not by the step's number: a rank whose step is another would not come.
    """

    def __init__(
        self,
        mesh: Mesh,
        objective: FlowMatching,
        experts: Iterable[str],
        caption_dropout: float,
        every_steps: int,
    ) -> None:
        self._mesh = mesh
        self._objective = objective
        self._experts = list(experts)
        self._caption_dropout = caption_dropout
        self._every_steps = every_steps
        self._calls = 0

    def __call__(self, step: int, expert: "Expert", batches: Sequence[MicroBatch]) -> None:
        """Of the window that follows ``step`` finished steps; where it is due a collective.

        Raises TrainingError on every rank, naming what differs and the odd rank.
        """
        self._calls += 1
        if (self._calls - 1) % self._every_steps:
            return
        own = torch.tensor(self.hashes(step, expert, batches))
        gathered = [torch.empty_like(own) for _ in range(self._mesh.world_size)]
        dist.all_gather(gathered, own, group=host_group())
        fault = disagreement(torch.stack(gathered), self._mesh.sp_size, self._experts)
        if fault is not None:
            raise TrainingError(fault)

    def hashes(self, step: int, expert: "Expert", batches: Sequence[MicroBatch]) -> list[int]:
        """One number for each of WORLD and SHARED, then the slots of this rank, as many on every rank."""
        real = [batch for batch in batches if batch.weight]
        slots = [slot for batch in real for slot in batch.slots]
        conditions = [condition for batch in real for condition in batch.conditions]
        draw = self._objective
        world = [step + 1, self._experts.index(expert.name), _bits(expert.lr), len(batches)]
        shared = {
            "slots": [(batch.slots, batch.weight) for batch in batches],
            "caption dropout": [draw.drops_caption(slot, step, self._caption_dropout) for slot in slots],
            "given images": draw.given(slots, step),
            "sigma": [draw.draw_sigma(batch.slots, expert.interval, step) for batch in real],
            "noise": [noise for batch in real for noise in draw.draw_noise(batch, step)],
            "latents": [clip for batch in real for clip in batch.latents],
            "condition latents": [condition.condition_latents for condition in conditions],
            "frame mask": [condition.frame_mask for condition in conditions],
            "image embeddings": [condition.image_embeds for condition in conditions],
            "text": [batch.prompt_embeds for batch in real],
        }
        most = len(slots_of_rank(draw.global_batch_size, 0, self._mesh.dp_size))
        padded = (slots + [NO_SLOT] * most)[:most]
        return [*world, *(digest(shared[name]) for name in SHARED), *padded]


def disagreement(gathered: torch.Tensor, sp_size: int, experts: Sequence[str]) -> str | None:
    """What is wrong with the hashes int64 [ranks, numbers] of all ranks, in a sentence; None if nothing is.

    Where the world does not agree on the step, nothing else is compared: all draws depend on it.
    """
    rows = gathered.tolist()
    groups = [list(range(first, first + sp_size)) for first in range(0, len(rows), sp_size)]
    step, expert = (Counter(row[column] for row in rows).most_common(1)[0][0] for column in (0, 1))
    where = f"at step {step} ({experts[expert]})"
    everyone = list(range(len(rows)))
    shown = {"expert": lambda code: experts[code], "learning rate": _from_bits}
    faults = [
        _difference(name, column, rows, everyone, shown.get(name, str)) for column, name in enumerate(WORLD)
    ]
    if told := "; ".join(filter(None, faults)):
        return (
            f"the ranks do not do the same {where}: {told}. Compare the code, the settings and the "
            "environment of the odd rank's machine with the others'"
        )
    found = {
        name: [_difference(name, len(WORLD) + column, rows, group, _short) for group in groups]
        for column, name in enumerate(SHARED)
    }
    odd = {name: "; ".join(filter(None, told)) for name, told in found.items() if any(told)}
    if odd:
        return (
            f"the ranks that share a clip do not train on the same numbers {where}: "
            f"{'; '.join(odd.values())}. {_advice(odd)}"
        )
    return _shared_slots(rows, groups, where)


def digest(value: Any) -> int:
    """64 bits of a value's bytes, dtypes and shapes: of a tensor, a list of values, or what `repr` tells."""
    state = hashlib.blake2b(digest_size=8)
    _update(state, value)
    return int.from_bytes(state.digest(), "little", signed=True)


def _update(state: Any, value: Any) -> None:
    if isinstance(value, list):
        state.update(f"{len(value)} of".encode())
        for one in value:
            _update(state, one)
    elif isinstance(value, torch.Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        state.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    else:
        state.update(repr(value).encode())


def _difference(name: str, column: int, rows: list[list[int]], ranks: list[int], shown: Any) -> str | None:
    """Who differs from whom in one column; the majority is right, and where there is none all are told."""
    values = {rank: rows[rank][column] for rank in ranks}
    counts = Counter(values.values())
    if len(counts) == 1:
        return None
    usual, count = counts.most_common(1)[0]
    if 2 * count <= len(ranks):
        told = ", ".join(f"rank {rank} {shown(value)}" for rank, value in values.items())
        return f"{named(ranks)} differ in {name} ({told})"
    others = named([rank for rank, value in values.items() if value == usual])
    return "; ".join(
        f"rank {rank} differs from {others} in {name} ({shown(value)} against {shown(usual)})"
        for rank, value in values.items()
        if value != usual
    )


def _shared_slots(rows: list[list[int]], groups: list[list[int]], where: str) -> str | None:
    owner: dict[int, list[int]] = {}
    for group in groups:
        for slot in rows[group[0]][len(WORLD) + len(SHARED) :]:
            if slot == NO_SLOT:
                continue
            if slot in owner:
                return (
                    f"{named(owner[slot])} and {named(group)} train on the same clip {where}, slot {slot} of "
                    "its global batch, and must have clips of their own: compare the settings and the "
                    "environment (RANK, WORLD_SIZE) that the ranks were started with"
                )
            owner[slot] = group
    return None


def _advice(odd: dict[str, str]) -> str:
    if not odd.keys() & set(CONTENT):
        return "Draws follow from seed, step and slot: compare the ranks' code, settings and version of torch"
    if odd.keys() - set(CONTENT):
        return "They were started with other settings or other code, or the memory of the odd one is faulty"
    return (
        "The odd rank's machine has other files in data.path, other weights of an encoder or faulty memory; "
        "if its GPU only rounds otherwise, train.deterministic=true helps"
    )


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 3`, or `ranks 0, 1, 2, 3 and 60 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *first, last = map(str, ranks) if len(ranks) <= 8 else [*map(str, ranks[:4]), f"{len(ranks) - 4} more"]
    return f"ranks {', '.join(first)} and {last}"


def _short(value: int) -> str:
    return f"{value & (2**64 - 1):016x}"[:8]


def _bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _from_bits(value: int) -> str:
    return str(struct.unpack("<d", struct.pack("<q", value))[0])
