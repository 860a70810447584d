"""How fast this is, against diffusers' own model and against itself: ratios of turns taken side by side.

python scripts/bench.py [only=[step,segments]] [tokens=4096] [repeats=7] [folder=bench]

step       our training step against a plain loop over diffusers' model with torch's AdamW: the same weights
           and inputs, without recomputation, and with (ours selective, diffusers' of whole blocks)
recompute  our step with selective recomputation against full
rate       the arithmetic rate of our step against that of one large matrix product
segments   a first frame at timestep 0: our segments against diffusers' timestep for every token
sequence   one clip on two ranks against one, a thread or a GPU for each

The model is two blocks of the 1.3B's width. The two sides of a case must agree in their loss, or no time of
theirs is told.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wan_ds.config.command_line import simple_command
from wan_ds.errors import ConfigError, TrainingError
from wan_ds.models.flops import training_flops
from wan_ds.parallel.mesh import Mesh
from wan_ds.training.contenders import Diffusers, Ours, OurSegments, Size, precision, sharded
from wan_ds.training.engine import device, init_distributed
from wan_ds.training.run_folder import environment
from wan_ds.training.side_by_side import Ranks, in_turns, peak_bytes, ratios, spread

TOLERANCE = 1e-4  # between the losses of two sides, relative


@dataclass
class BenchOptions:
    only: list[str] | None = field(default=None, metadata={"help": "some of the cases above; default: all"})
    tokens: int = field(default=4096, metadata={"help": "of the clip; a multiple of 8"})
    repeats: int = field(default=7, metadata={"help": "turns of each side, after a warm-up"})
    folder: str = field(default="bench", metadata={"help": "where the JSON file goes", "path": True})


@dataclass(frozen=True)
class Aim:
    """What a ratio should be on two CPU cores at 4096 tokens."""

    bound: float
    at_most: bool = True

    def is_met(self, ratio: float) -> bool:
        return ratio <= self.bound if self.at_most else ratio >= self.bound

    def __str__(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.bound:.3g}"


@dataclass(frozen=True)
class Row:
    """Values of two sides, turn by turn, and the ratio of the first to the second."""

    case: str
    what: str
    values: dict[str, list[float]]
    unit: str = "s"
    aim: Aim | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        return ratios(*self.values.values())

    @property
    def is_met(self) -> bool | None:
        return None if self.aim is None else self.aim.is_met(spread(self.ratios).median)

    def record(self) -> dict[str, Any]:
        """For the file."""
        ratio = {"of": " / ".join(self.values), "values": self.ratios, **asdict(spread(self.ratios))}
        aim = None if self.aim is None else str(self.aim)
        return {
            "case": self.case,
            "what": self.what,
            "unit": self.unit,
            "values": self.values,
            "ratio": ratio,
            "aim": aim,
            "is_met": self.is_met,
            **self.more,
        }

    def cells(self) -> list[str]:
        """For a person."""
        sides = [f"{name} {_shown(values)} {self.unit}" for name, values in self.values.items()]
        aim = "" if self.aim is None else f"{self.aim}: {'met' if self.is_met else 'missed'}"
        return [f"{self.case}, {self.what}", *sides, _shown(self.ratios), aim]


def _shown(values: Sequence[float]) -> str:
    of = spread(values)
    if len(values) == 1:
        return f"{of.median:.4g}"
    return f"{of.median:.4g} ({of.lower:.4g} to {of.upper:.4g})"


class Bench:
    """What the cases share: the size, the number of turns, and the two training steps, built when needed."""

    def __init__(self, size: Size, repeats: int) -> None:
        self.size = size
        self.repeats = repeats
        self.device = device()
        self._built: dict[str, Any] = {}

    @property
    def ours(self) -> Ours:
        if "ours" not in self._built:
            self._built["ours"] = Ours(self.size, Mesh(), stage=0)
        return self._built["ours"]

    @property
    def diffusers(self) -> Diffusers:
        if "diffusers" not in self._built:
            self._built["diffusers"] = Diffusers(self.size)
        return self._built["diffusers"]

    def release(self) -> None:
        """Let the training steps go, and their memory."""
        self._built.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def in_turns(self, title: str, variants: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        return in_turns(variants, self.repeats, device=self.device, title=title)


def step(bench: Bench) -> list[Row]:
    plain = {"without recomputation": ("none", False)}
    selective = {
        "with recomputation": ("selective", False),
        "with recomputation, ours keeping the feed-forward's output": ("selective", True),
    }
    return [*_steps(bench, plain, False, Aim(1.03)), *_steps(bench, selective, True, Aim(0.88))]


def _steps(bench: Bench, ways: dict[str, tuple[str, bool]], checkpointing: bool, aim: Aim) -> list[Row]:
    """Our step in each of these ways, and diffusers' step, in turns."""
    ours, diffusers = bench.ours, bench.diffusers
    title = f"step {next(iter(ways))}"
    losses = [agreed(title, ours.loss(), diffusers.loss())]
    turns = {name: partial(ours.step, *way) for name, way in ways.items()}
    turns["diffusers"] = partial(diffusers.step, checkpointing)
    seconds = bench.in_turns(title, turns)
    peaks = {name: peak_bytes(turn, bench.device) for name, turn in turns.items()}
    if len(ways) == 1:  # else one side has taken more steps
        losses.append(agreed(f"{title}, at its end", ours.loss(), diffusers.loss()))
    return [
        Row(
            "step",
            name,
            {"ours": seconds[name], "diffusers": seconds["diffusers"]},
            aim=aim,
            more={
                "peak_bytes": {"ours": peaks[name], "diffusers": peaks["diffusers"]},
                "losses": losses,
            },
        )
        for name in ways
    ]


def recompute(bench: Bench) -> list[Row]:
    ours = bench.ours
    turns = {kind: partial(ours.step, kind) for kind in ("selective", "full")}
    seconds = bench.in_turns("recompute", turns)
    _, *shares = [ours.attention_share() for _ in range(bench.repeats + 1)]
    bound = 1 - spread(shares).median / 4 + 0.03  # of four forwards' worth, one without attention
    peaks = {name: peak_bytes(turn, bench.device) for name, turn in turns.items()}
    more = {"attention_share": shares, "peak_bytes": peaks}
    return [Row("recompute", "selective against full", seconds, aim=Aim(bound), more=more)]


def rate(bench: Bench) -> list[Row]:
    on_gpu = bench.device.type == "cuda"
    products, side = (10, 8192) if on_gpu else (1, min(4096, 8 * bench.size.tokens))
    dtype = torch.bfloat16 if precision().is_autocast else torch.float32
    left, right = torch.randn(2, side, side, device=bench.device, dtype=dtype)

    def multiply() -> None:
        for _ in range(products):
            left @ right

    flops = {
        "our step": training_flops(bench.size.config, [bench.size.grid]),
        "product": 2 * products * side**3,
    }
    seconds = bench.in_turns("rate", {"our step": bench.ours.step, "product": multiply})
    rates = {name: [flops[name] / turn / 1e12 for turn in turns] for name, turns in seconds.items()}
    more = {"flops": flops, "seconds": seconds, "side": side}
    return [Row("rate", "of a step without recomputation", rates, unit="TFLOP/s", more=more)]


def segments(bench: Bench) -> list[Row]:
    bench.release()
    sides = {"ours": OurSegments(bench.size), "diffusers": Diffusers(bench.size)}
    losses = [
        agreed(f"segments, first frame given: {given}", *(side.loss(given) for side in sides.values()))
        for given in (False, True)
    ]
    turns = {name: partial(side.forward_backward, True) for name, side in sides.items()}
    seconds = bench.in_turns("segments", turns)
    peaks = {  # the gradients are there by now, and so no part of it
        name: [peak_bytes(partial(side.forward_backward, given), bench.device) for given in (False, True)]
        for name, side in sides.items()
    }
    added = {name: [(given - plain) / 1e6] for name, (plain, given) in peaks.items()}
    return [
        Row("segments", "forward and backward", seconds, aim=Aim(0.95), more={"losses": losses}),
        Row("segments", "added peak memory", added, unit="MB", aim=Aim(0.5), more={"peak_bytes": peaks}),
    ]


def sequence(bench: Bench) -> list[Row]:
    bench.release()
    if bench.device.type == "cuda" and torch.cuda.device_count() < 2:
        sys.stderr.write("sequence: left out, because it needs two GPUs\n")
        return []
    rows = []
    arguments = {"size": bench.size}
    with Ranks("sp 1", 1, sharded, arguments) as one, Ranks("sp 2", 2, sharded, arguments) as two:
        for stage, aim in ((2, 1.7), (3, 1.5)):
            title = f"sequence at ZeRO-{stage}"
            losses = agreed(title, sum(one.turn("loss", stage)), sum(two.turn("loss", stage)))
            turns = {"sp 2": partial(two.turn, "step", stage), "sp 1": partial(one.turn, "step", stage)}
            seconds = bench.in_turns(title, turns)
            clips = {name: [1 / turn for turn in of_turns] for name, of_turns in seconds.items()}
            what, more = f"clips a second at ZeRO-{stage}", {"seconds": seconds, "losses": [losses]}
            rows.append(Row("sequence", what, clips, "/s", Aim(aim, at_most=False), more))
    return rows


CASES = {case.__name__: case for case in (step, recompute, rate, segments, sequence)}


def agreed(what: str, one: float, other: float, tolerance: float = TOLERANCE) -> list[float]:
    """The two losses; TrainingError unless they are the same."""
    if not math.isclose(one, other, rel_tol=tolerance):
        raise TrainingError(
            f"{what}: the losses of the two sides are {one:.7g} and {other:.7g}, not within {tolerance:g} of"
            " each other; they do not compute the same, so their times are not told"
        )
    return [one, other]


def main(options: BenchOptions) -> int:
    """Print the table, and write all times to `<folder>/<date and time>.json`."""
    unknown = [name for name in options.only or [] if name not in CASES]
    if unknown:
        raise ConfigError(f"only={','.join(unknown)}: no such case; there are {', '.join(CASES)}")
    if options.repeats < 1:
        raise ConfigError(f"repeats={options.repeats}: must be at least 1")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("the bench starts its own ranks: python scripts/bench.py, without a launcher")
    measure(Size(options.tokens), options.only or list(CASES), options.repeats, Path(options.folder))
    return 0


def measure(size: Size, only: Sequence[str], repeats: int, folder: Path) -> Path:
    """Run the cases, write and print what `main` says; the file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before anything takes long
    except OSError as error:
        raise ConfigError(f"folder={folder}: {error}; name another") from error
    path = folder / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}.json"
    rows: list[Row] = []
    init_distributed()
    try:
        bench = Bench(size, repeats)
        for name in [name for name in CASES if name in only]:
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {name}\n")  # which may take many minutes
            rows += CASES[name](bench)
            path.write_text(json.dumps(_found(size, repeats, rows), indent=2) + "\n")  # kept if it ends here
        bench.release()
    finally:
        dist.destroy_process_group()
    sys.stdout.write(f"{table(rows)}\n{path}\n")
    return path


def _found(size: Size, repeats: int, rows: Sequence[Row]) -> dict[str, Any]:
    """What the file says."""
    return {
        "model": size.config,
        "tokens": size.tokens,
        "grid": size.grid,
        "repeats": repeats,
        "dtype": "bfloat16 by autocast" if precision().is_autocast else "float32",
        "threads": torch.get_num_threads(),
        "threads_of_ranks": 1,
        "environment": environment(),
        "rows": [row.record() for row in rows],
    }


def table(rows: Sequence[Row]) -> str:
    """Medians, and quartiles in brackets; aims are for two CPU cores at 4096 tokens."""
    lines = [["case", "first", "second", "ratio", "aim (two CPU cores)"], *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


if __name__ == "__main__":
    simple_command(BenchOptions, main)
