"""Averages of an expert's weights over its own steps, kept by each rank for its shard alone.

average <- decay * average + (1 - decay) * weight, after each step that is applied, from the weights that the
run starts with. In float32 on the masters; nothing is gathered but to compute with the averages.

    <expert>/ema_rank_00000.safetensors     a rank's stretch of each flattened tensor, and in the header
                                            where it begins and the shape of the whole
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from wan_ds.errors import CheckpointError
from wan_ds.interop.shards import write_safetensors
from wan_ds.interop.tensor_files import Span, Stored, read_spans, spans_of
from wan_ds.training.engine import Engine
from wan_ds.training.shards import fragment, overwrite, shape_of, trainable
from wan_ds.training.zero_files import Pieces

_FILE = "ema_rank_{:05d}.safetensors"
_PATTERN = "ema_rank_*.safetensors"


class Ema:
    """The averages of the parameters that an engine trains."""

    def __init__(self, engine: Engine, decay: float) -> None:
        self._engine, self._decay = engine, decay
        self._averages = {name: fragment(p).values.clone() for name, p in trainable(engine)}

    @torch.no_grad()
    def update(self) -> None:
        """Follow the weights after one of the expert's steps."""
        masters = [fragment(p).values for _, p in trainable(self._engine)]
        torch._foreach_lerp_(list(self._averages.values()), masters, 1 - self._decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model computes with the averages, and must not train; a collective at both ends.

        The weights wait in the host's memory, and are what they were to the bit. An error inside leaves the
        averages in place: it ends the run, and putting the weights back would wait for the other ranks.
        """
        weights = {name: fragment(p).values.to("cpu", copy=True) for name, p in trainable(self._engine)}
        overwrite(self._engine, self._averages)
        yield
        overwrite(self._engine, weights)

    def save(self, folder: Path, rank: int) -> None:
        """Write this rank's averages into an expert's folder."""
        if self._engine.stage == 0 and rank > 0:
            return  # every rank holds the same
        parameters = dict(trainable(self._engine))
        held = {name: average for name, average in self._averages.items() if average.numel()}
        layout = {name: [fragment(p).start, *shape_of(p)] for name, p in parameters.items()}
        write_safetensors(
            folder / _FILE.format(rank),
            {name: Stored(tuple(average.shape), average.dtype) for name, average in held.items()},
            lambda names: {name: held[name].cpu() for name in names},
            {"format": "pt", "layout": json.dumps(layout), "decay": str(self._decay)},
        )

    def load(self, folder: Path, rank: int) -> None:
        """Take up what `save` wrote, in a world of the same size.

        Raises CheckpointError if it is of other tensors, or not whole.
        """
        path = folder / _FILE.format(0 if self._engine.stage == 0 else rank)
        parameters = dict(trainable(self._engine))
        layout = {name: [fragment(p).start, *shape_of(p)] for name, p in parameters.items()}
        spans = _spans(path)
        held = {name: average for name, average in self._averages.items() if average.numel()}
        sizes = {name: (average.numel(),) for name, average in held.items()}
        if _layout(path) != layout or {name: span.shape for name, span in spans.items()} != sizes:
            raise CheckpointError(f"{path} holds the averages of other tensors than this run trains")
        for name, average in read_spans(spans).items():
            self._averages[name].copy_(average)


class EmaFiles(Pieces):
    """The averages that a world of any size wrote, each tensor whole."""

    def __init__(self, folder: Path) -> None:
        """Reads headers alone. Raises CheckpointError if there are none, or they are not whole."""
        paths = sorted(folder.glob(_PATTERN))
        if not paths:
            raise CheckpointError(
                f"{folder} holds no averaged weights: the run was not told to keep any (ema.decay); "
                "leave weights=ema out"
            )
        stretches: dict[str, list[tuple[int, Span]]] = {}
        for path in paths:
            layout = _layout(path)
            for name, span in _spans(path).items():
                stretches.setdefault(name, []).append((layout[name][0], span))
        shapes = {name: tuple(shape) for name, (_, *shape) in _layout(paths[0]).items()}
        pieces = {}
        for name, shape in shapes.items():
            ordered = sorted(stretches.get(name, []), key=lambda stretch: stretch[0])
            end = 0
            for start, span in ordered:
                end = end + span.shape[0] if start == end else -1
            if end != torch.Size(shape).numel():
                raise CheckpointError(f"{folder}: the averages of {name} are not whole; copy all its files")
            pieces[name] = (shape, [span for _, span in ordered])
        super().__init__(str(folder), pieces)


def is_there(folder: Path) -> bool:
    """Whether an expert's folder holds averages."""
    return any(folder.glob(_PATTERN))


def _spans(path: Path) -> dict[str, Span]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the averaged weights of one rank")
    return spans_of(path)


def _layout(path: Path) -> dict[str, list[int]]:
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return json.loads(header["__metadata__"]["layout"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is no file of averaged weights: {error!r}") from error
