"""LoRA by PEFT: where an adapter sits, what its tensors are called, and what they start from.

Letters: r rank; a module's weight W `[out, in]` becomes W + scale B A, with A `[r, in]` and B `[out, r]`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from peft import LoraConfig
from torch import Tensor, nn

from wan_ds import streams
from wan_ds.errors import CheckpointError, ConfigError

NAMES_SHOWN = 3  # of the names in an error's message
_NAME = "default"  # PEFT's name for a model's only adapter
# Attention to itself and to text, attention to images, feed-forward.
_TARGETABLE = re.compile(
    r"blocks\.\d+\.(attn[12]\.to_[qkv]|attn[12]\.to_out\.0|attn2\.add_[kv]_proj|ffn\.net\.0\.proj|ffn\.net\.2)"
)
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "base_layer"}  # torch.compile's, FSDP's, PEFT's
_PREFIXES = re.compile(r"^(?:module\.|_orig_mod\.|base_model\.model\.)+")
_ADAPTER = re.compile(r"(?:^|\.)lora_[AB]\.")
_NAMED_ADAPTER = re.compile(r"(\blora_[AB])\.[^.]+\.weight$")


@dataclass(frozen=True)
class AdapterSettings:
    """An adapter's shape and where it sits; ConfigError for what cannot be.

    Attributes:
        targets: ends of module names, such as `attn1.to_q`, `to_q` (both attentions) or
            `blocks.3.ffn.net.2`.
        rslora: the scale is alpha / sqrt(rank), not alpha / rank.
        rank_pattern: by ends of module names, ranks other than ``rank``; the longest end that fits wins.
        alpha_pattern: likewise for alpha; a module with a rank of its own has ``alpha`` all the same.
    """

    rank: int
    alpha: float
    targets: Sequence[str]
    rslora: bool = False
    dropout: float = 0.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = {"rank": self.rank} | {f"rank_pattern.{key}": rank for key, rank in self.rank_pattern.items()}
        for key, rank in ranks.items():
            if rank < 1 or rank != int(rank):
                raise ConfigError(f"adapter.{key}={rank}: a rank is a whole number from 1 on")
        alphas = {"alpha": self.alpha} | {f"alpha_pattern.{key}": a for key, a in self.alpha_pattern.items()}
        for key, alpha in alphas.items():
            if not 0 < alpha < math.inf:
                raise ConfigError(
                    f"adapter.{key}={alpha}: the update is scaled by alpha / rank, so alpha is above 0; "
                    "with alpha equal to the rank it is not scaled"
                )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"adapter.dropout={self.dropout}: a share of inputs, from 0 to below 1")

    def rank_of(self, module: str) -> int:
        return self._of(module, self.rank_pattern, self.rank)

    def alpha_of(self, module: str) -> float:
        return self._of(module, self.alpha_pattern, self.alpha)

    def scale_of(self, module: str) -> float:
        """What B A is multiplied by in the module of this name."""
        return self.alpha_of(module) / self._divisor(self.rank_of(module))

    def alpha_for(self, scale: float, rank: int) -> float:
        """The alpha that has this scale at this rank."""
        return scale * self._divisor(rank)

    def _divisor(self, rank: int) -> float:
        return math.sqrt(rank) if self.rslora else rank

    @staticmethod
    def _of(module: str, pattern: Mapping[str, float], default: float) -> float:
        fitting = [end for end in pattern if _ends_with(module, end)]
        return pattern[max(fitting, key=len)] if fitting else default


def inject(model: nn.Module, settings: AdapterSettings) -> list[str]:
    """Put an adapter on a transformer of the meta device, and return the names of the modules that have one.

    Its tensors have no numbers yet; they alone require gradients. Raises ConfigError, see `resolve`.
    """
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("an adapter is put on a model of the meta device, before its weights are read")
    modules = resolve(model, settings)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        use_rslora=settings.rslora,
        lora_dropout=settings.dropout,
        target_modules=modules,
        rank_pattern=_as_peft(settings.rank_pattern),
        alpha_pattern=_as_peft(settings.alpha_pattern),
        init_lora_weights=False,
    )
    with torch.device("meta"):  # PEFT would draw weights on the CPU from the global generator
        model.add_adapter(config, _NAME)
    return modules


def _as_peft(pattern: Mapping[str, float]) -> dict[str, float]:
    """PEFT takes the first fitting end, as a regular expression."""
    return {re.escape(end): pattern[end] for end in sorted(pattern, key=len, reverse=True)}


def resolve(model: nn.Module, settings: AdapterSettings) -> list[str]:
    """Full names, in the model's order, of the modules that the settings put an adapter on.

    Raises ConfigError where a target or a pattern fits no module or one of the wrong kind; it lists what
    there is.
    """
    names = [name for name, _ in model.named_modules() if name]
    possible = [name for name in names if _TARGETABLE.fullmatch(name)]
    if not settings.targets:
        raise ConfigError(f"adapter.targets is empty: no module would train; {_there(possible)}")
    chosen: set[str] = set()
    for target in settings.targets:
        fitting = [name for name in names if _ends_with(name, target)]
        _refuse_other_kind(f"adapter.targets: {target}", fitting, possible)
        chosen.update(fitting)
    for key in ("rank_pattern", "alpha_pattern"):
        for end in getattr(settings, key):
            what = f"adapter.{key}: {end}"
            fitting = [name for name in names if _ends_with(name, end)]
            _refuse_other_kind(what, fitting, possible)
            if not chosen.intersection(fitting):
                raise ConfigError(
                    f"{what} fits no module that has an adapter; "
                    f"adapter.targets: {', '.join(settings.targets)}"
                )
    return [name for name in possible if name in chosen]


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _refuse_other_kind(what: str, fitting: Sequence[str], possible: Sequence[str]) -> None:
    other = [name for name in fitting if not _TARGETABLE.fullmatch(name)]
    if other:
        raise ConfigError(
            f"{what} fits {other[0]}, and adapters are for the linear layers of attention and feed-forward; "
            f"{_there(possible)}"
        )
    if not fitting:
        raise ConfigError(f"{what} fits no module; {_there(possible)}")


def _there(possible: Sequence[str]) -> str:
    ends = dict.fromkeys(name.split(".", 2)[2] for name in possible)
    blocks = len({name.split(".")[1] for name in possible})
    return f"there are, in each of {blocks} blocks: {', '.join(ends)} (to_q is attn1.to_q and attn2.to_q)"


def is_adapter(name: str) -> bool:
    """Whether a parameter's name, in PEFT's or in plain form, is an adapter's."""
    return _ADAPTER.search(name) is not None


def plain_name(name: str) -> str:
    """A parameter's name without what PEFT, torch.compile and wrappers add to it.

    `blocks.0.attn1.to_q.base_layer.weight` is `blocks.0.attn1.to_q.weight`, and
    `blocks.0.attn1.to_q.lora_A.default.weight` is `blocks.0.attn1.to_q.lora_A.weight`.
    """
    parts = _PREFIXES.sub("", name).split(".")
    return _NAMED_ADAPTER.sub(r"\1.weight", ".".join(part for part in parts if part not in _WRAPPERS))


def base_names(model: nn.Module) -> dict[str, str]:
    """The names of the base's parameters in the model, by their plain ones."""
    return {plain_name(name): name for name, _ in model.named_parameters() if not is_adapter(name)}


def adapter_names(model: nn.Module) -> dict[str, str]:
    """The names of the adapter's parameters in the model, by their plain ones; empty without an adapter."""
    return {plain_name(name): name for name, _ in model.named_parameters() if is_adapter(name)}


class AdapterTensors(Protocol):
    """An adapter that was trained before."""

    tensors: Mapping[str, Tensor]  # `<module>.lora_A.weight` [r, in] and `<module>.lora_B.weight` [out, r]

    def scale(self, module: str) -> float:
        """What B A is multiplied by in the module of this name."""
        ...


class AdapterStart:
    """What an adapter's tensors are before the first step, by plain names.

    Of ``given`` both as they are; else, as PEFT has it, A uniform in +-1 / sqrt(in), each from its own stream
    (seed, expert, name), and B zero, so that the first step starts from the base.

    Raises CheckpointError where ``given`` has other modules, shapes, ranks or scales than the settings.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: AdapterSettings,
        *,
        seed: int,
        expert: str,
        given: AdapterTensors | None = None,
    ) -> None:
        own = dict(model.named_parameters())
        self._shapes = {plain: tuple(own[name].shape) for plain, name in adapter_names(model).items()}
        self._key = (seed, "adapter", expert)
        self._given = None if given is None else given.tensors
        if given is not None:
            _refuse_other_adapter(self._shapes, settings, given, f"adapter.init_from.{expert}")

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        if self._given is not None:
            return {name: self._given[name].clone() for name in names}
        return {name: self._draw(name) for name in names}

    def _draw(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("lora_B.weight"):
            return torch.zeros(shape)
        bound = shape[1] ** -0.5  # Kaiming-uniform with a = sqrt(5)
        return torch.empty(shape).uniform_(-bound, bound, generator=streams.generator(*self._key, name))


def _refuse_other_adapter(
    ours: Mapping[str, tuple[int, ...]], settings: AdapterSettings, given: AdapterTensors, where: str
) -> None:
    theirs = {name: tuple(tensor.shape) for name, tensor in given.tensors.items()}
    absent = [name for name in ours if name not in theirs]
    extra = [name for name in theirs if name not in ours]
    if absent or extra:
        parts = [f"it lacks {some(absent)}"] if absent else []
        parts += [f"it also has {some(extra)}"] if extra else []
        raise CheckpointError(f"{where} is not on the modules of adapter.targets: {'; '.join(parts)}")
    other: list[str] = []
    found: Counter[tuple[int, float]] = Counter()
    for module in dict.fromkeys(name.rpartition(".lora_")[0] for name in ours):
        shapes = [shape[f"{module}.lora_{letter}.weight"] for shape in (theirs, ours) for letter in "AB"]
        (a, b), (our_a, our_b) = shapes[:2], shapes[2:]
        if len(a) != 2 or len(b) != 2 or not a[0] or a[0] != b[1] or (b[0], a[1]) != (our_b[0], our_a[1]):
            raise CheckpointError(
                f"{where}: {module} has A {list(a)} and B {list(b)} there, A {list(our_a)} and B "
                f"{list(our_b)} here: it was trained on another model, or the file is damaged"
            )
        rank, scale = a[0], given.scale(module)
        alpha = settings.alpha_for(scale, rank)
        found[rank, round(alpha, 6)] += 1
        if rank != our_a[0] or not math.isclose(scale, settings.scale_of(module), rel_tol=1e-6):
            here = f"rank {our_a[0]}, alpha {settings.alpha_of(module):g}"
            other.append(f"{module} (rank {rank}, alpha {alpha:g} there, {here} here)")
    if other:
        (rank, alpha), count = found.most_common(1)[0]
        each = "" if count == found.total() else " and patterns for the modules that differ"
        raise CheckpointError(
            f"{where} has another rank or alpha: {some(other)}; type adapter.rank={rank} "
            f"adapter.alpha={alpha:g}{each}, alpha as adapter.rslora={str(settings.rslora).lower()} counts it"
        )


def some(names: Sequence[str]) -> str:
    """The first of them for an error's message, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more}"
