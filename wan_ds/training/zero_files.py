"""The weights in the files that a DeepSpeed engine writes, of any ZeRO stage and any number of ranks.

DeepSpeed's own reader puts the whole model together in memory. Here only places are kept, and a tensor is
put together from its pieces when it is asked for. The layouts are those of deepspeed/utils/zero_to_fp32.py in
0.19.8.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wan_ds.errors import CheckpointError
from wan_ds.interop.tensor_files import Span, Stored, described, read_spans, span_of
from wan_ds.training.engine import only_tensors


class _Pieces(NamedTuple):
    """A tensor as stretches of files that follow one another."""

    shape: tuple[int, ...]
    spans: list[Span]


class Pieces:
    """Tensors by name, each put together from stretches of files when it is read."""

    def __init__(self, where: str, pieces: Mapping[str, tuple[tuple[int, ...], list[Span]]]) -> None:
        self.where = where
        self._pieces = pieces
        self.tensors = {name: Stored(shape, spans[0].dtype) for name, (shape, spans) in pieces.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors on the CPU, each whole. Raises CheckpointError if a file cannot be read."""
        names = list(names)
        wanted: dict[Hashable, Span] = {
            (name, index): span for name in names for index, span in enumerate(self._pieces[name][1])
        }
        read = read_spans(wanted)
        tensors = {}
        for name in names:
            shape, spans = self._pieces[name]
            parts = [read.pop((name, index)).flatten() for index in range(len(spans))]
            tensors[name] = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(shape)
        return tensors


class ZeroFiles(Pieces):
    """An expert's tensors in a checkpoint: the float32 masters of those that trained."""

    def __init__(self, folder: Path) -> None:
        """Reads what the files say of themselves; raises CheckpointError unless they account for every
        parameter and every number."""
        super().__init__(str(folder), _pieces_of(folder))


def _pieces_of(folder: Path) -> dict[str, _Pieces]:
    model_files = _by_rank(folder, "*_model_states.pt")
    optimizer_files = _by_rank(folder, "*_optim_states.pt")
    if not model_files:
        raise CheckpointError(f"{folder} holds no model states of DeepSpeed's")
    with only_tensors():
        states = [_Described(file) for file in model_files]
        optimizers = [_Described(file, "optimizer_state_dict") for file in optimizer_files]
    try:
        if not optimizers:  # ZeRO-0 shards nothing
            pieces = {name: _whole(states[0].span(tensor)) for name, tensor in states[0]["module"].items()}
        elif int(optimizers[0].get("zero_stage", 1)) == 3:  # not named: stage 1 of bfloat16 parameters
            pieces = dict(_of_stage_3(folder, states, optimizers))
        else:
            pieces = dict(_of_stages_1_and_2(folder, states[0], optimizers))
        buffers = set(states[0]["buffer_names"])
        named = [name for name in states[0]["module"] if name not in buffers]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{folder} is not as DeepSpeed 0.19 writes it: {error!r}") from error
    absent = [name for name in named if name not in pieces]
    if absent:
        raise CheckpointError(f"{folder} lists {len(absent)} parameters that it does not hold: {absent[0]}")
    return {name: pieces[name] for name in named}


class _Described:
    """One of DeepSpeed's files as a dict whose tensors hold nothing and know their place."""

    def __init__(self, path: Path, part: str | None = None) -> None:
        content = described(path)
        if not isinstance(content, dict) or (part is not None and part not in content):
            raise CheckpointError(f"{path} is no file of a DeepSpeed engine")
        self._path, self._content = path, content if part is None else content[part]

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def get(self, key: str, default: Any) -> Any:
        return self._content.get(key) or default

    def span(self, tensor: Tensor) -> Span:
        return span_of(self._path, tensor)


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """The files in the order of ranks, which their names tell: [bf16_]zero_pp_rank_<n>_mp_rank_00_..."""

    def rank(path: Path) -> int:
        number = path.name.partition("zero_pp_rank_")[2].partition("_")[0]
        return int(number) if number.isdecimal() else 0

    return sorted(folder.glob(pattern), key=rank)


def _of_stage_3(
    folder: Path, states: Sequence[_Described], optimizers: Sequence[_Described]
) -> Iterator[tuple[str, _Pieces]]:
    """Every tensor is cut into one equal piece a rank, the last ones padded or empty."""
    world = optimizers[0]["partition_count"]
    _refuse_count(folder, world, optimizers)
    _refuse_count(folder, world, states)
    groups = [[one.span(flat) for flat in one["fp32_flat_groups"]] for one in optimizers]
    offset = 0
    for name, shape in _merged(states[0]["param_shapes"]).items():
        share = math.ceil(shape.numel() / world)
        counts = [min(share, max(0, shape.numel() - rank * share)) for rank in range(world)]
        cuts = [_cut(group, offset, count) for group, count in zip(groups, counts, strict=True)]
        yield name, _Pieces(tuple(shape), [span for cut in cuts for span in cut])
        offset += share
    for rank, group in enumerate(groups):
        _refuse_sum(folder, rank, offset, sum(span.shape[0] for span in group))


def _of_stages_1_and_2(
    folder: Path, state: _Described, optimizers: Sequence[_Described]
) -> Iterator[tuple[str, _Pieces]]:
    """Each group of tensors is one run of numbers, cut into one piece a rank."""
    counts = optimizers[0]["partition_count"]
    world = max(counts) if isinstance(counts, list) else counts
    _refuse_count(folder, world, optimizers)
    paddings = optimizers[0].get("param_alignment_paddings", None)
    for group, shapes in enumerate(state["param_shapes"]):
        run = [one.span(one["single_partition_of_fp32_groups"][group]) for one in optimizers]
        offset = 0
        for index, (name, shape) in enumerate(shapes.items()):
            yield name, _Pieces(tuple(shape), _cut(run, offset, shape.numel()))
            offset += shape.numel() + (paddings[group][index] if paddings else 0)
        # The run's end is aligned to two numbers a rank, with padding that no file tells of.
        aligned = 2 * world
        held = sum(span.shape[0] for span in run)
        _refuse_sum(folder, group, math.ceil(offset / aligned), math.ceil(held / aligned))


def _merged(shapes: Iterable[dict[str, torch.Size]]) -> dict[str, torch.Size]:
    return {name: shape for group in shapes for name, shape in group.items()}


def _whole(span: Span) -> _Pieces:
    return _Pieces(span.shape, [span])


def _cut(run: Sequence[Span], start: int, count: int) -> list[Span]:
    """``count`` numbers from ``start`` on, of flat spans that follow one another."""
    found = []
    for span in run:
        taken = min(count, span.shape[0] - start)
        if taken > 0:
            place = span.offset + start * span.dtype.itemsize
            found.append(Span(span.path, place, span.dtype, (taken,)))
            count -= taken
        start = max(0, start - span.shape[0])
    return found


def _refuse_count(folder: Path, world: int, files: Sequence[_Described]) -> None:
    if len(files) != world:
        raise CheckpointError(
            f"{folder} was written by {world} ranks and has the files of {len(files)}; copy the others there"
        )


def _refuse_sum(folder: Path, which: int, wanted: int, held: int) -> None:
    if wanted != held:
        raise CheckpointError(
            f"{folder}: its shards do not add up to its parameters ({held} for {wanted} in part {which})"
        )
