"""What dtype every parameter has, and what a model computes in: settings, modes and an audit of the engines.

    mode            trainable  computes in                    masters  gradients travel in
    without         float32    the dtype of each weight       itself   float32
    bf16 autocast   float32    bfloat16 where autocast says   itself   bfloat16 of linear layers, float32
    bf16 weights    bfloat16   the dtype of each weight       float32  float32

Frozen tensors keep the dtype that they were stored in unless ``frozen_dtype`` says another. Norms, the time
embedding and the modulation compute in at least float32 in every mode, by their own forward."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from wan_ds.errors import CheckpointError
from wan_ds.models.adapter import is_adapter, plain_name
from wan_ds.models.tokens import TEXT_LENGTH
from wan_ds.models.weights import DtypeOf

if TYPE_CHECKING:
    from wan_ds.training.engine import Engine, FrozenEngine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
_IMAGE_TOKENS = 257  # of one image, where the model's config does not say


@dataclass(frozen=True)
class Precision:
    """How an engine stores and computes.

    Attributes:
        frozen_dtype: of frozen tensors; None as each was stored, or bfloat16 around linear weights in 8 bits.
        compute_dtype: bfloat16 over float32 weights is torch's autocast; None or float32: each product in
            the dtype of its weights.
        frozen_storage: of the frozen linear weights in blocks, see `wan_ds.models.quantised`; None as
            ``frozen_dtype``.
    """

    trainable_dtype: torch.dtype = torch.float32
    frozen_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = torch.float32
    frozen_storage: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.has_masters and self.compute_dtype != torch.bfloat16:
            raise ValueError(f"{self.trainable_dtype} parameters compute in it, not in {self.compute_dtype}")

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer steps float32 copies of the trainable parameters."""
        return self.trainable_dtype == torch.bfloat16

    @property
    def is_autocast(self) -> bool:
        """Whether float32 weights are cast to bfloat16 for each product."""
        return self.compute_dtype == torch.bfloat16 and not self.has_masters

    @property
    def dtype_of(self) -> DtypeOf:
        """What `build_transformer` casts each tensor to."""
        return partial(dtype_of, precision=self)

    def autocast(self, device_type: str) -> torch.autocast:
        """A context in which a bare module computes as it does in training."""
        return torch.autocast(device_type, torch.bfloat16, enabled=self.is_autocast, cache_enabled=False)


def named(
    trainable_dtype: str,
    frozen_dtype: str | None,
    compute_dtype: str | None,
    frozen_storage: str | None = None,
) -> Precision:
    """The precision of the settings' names: fp32, bf16, and float8_e4m3fn for storage.

    A base in 8 bits is bfloat16 elsewhere, whatever it was stored in, and so computes in it.
    """
    if frozen_storage is not None and frozen_dtype is None:
        frozen_dtype = "bf16"
    names = (trainable_dtype, frozen_dtype, compute_dtype, frozen_storage)
    return Precision(*(None if name is None else DTYPES[name] for name in names))


def dtype_of(name: str, loaded: torch.dtype, trainable: bool, precision: Precision) -> torch.dtype:
    """The dtype that a parameter has from before it is partitioned on; nothing else casts one.

    Raises CheckpointError for a frozen float16 tensor under autocast: ZeRO-3 would gather it in bfloat16, and
    its gather only narrows float32.
    """
    if trainable:
        return precision.trainable_dtype
    dtype = loaded if precision.frozen_dtype is None else precision.frozen_dtype
    if precision.is_autocast and dtype not in (torch.float32, torch.bfloat16):
        stored = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} is stored as {stored}, which cannot be gathered under autocast; type "
            "precision.frozen_dtype=bf16, or precision=lora, which computes without autocast"
        )
    return dtype


class TypedLinear(nn.Linear):
    """Computes in the dtype of its weight, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.weight.dtype
        return F.linear(x.to(dtype), self.weight, None if self.bias is None else self.bias.to(dtype))


def compute_in_own_dtypes(model: nn.Module) -> None:
    """Let the linear layers of a base whose tensors have several dtypes work on each other's outputs.

    For modes without autocast, whose DeepSpeed does not ask for the exact class of layers.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = TypedLinear


FAMILIES = (
    "patch_embedding",
    "time",
    "text",
    "image",
    "attention",
    "ffn",
    "norms",
    "modulation",
    "head",
    "adapter",
)


def family_of(name: str) -> str:
    """The family of modules that a parameter of this name belongs to."""
    if is_adapter(name):
        return "adapter"
    name = plain_name(name)
    inside = {
        ".norm": "norms",
        "scale_shift_table": "modulation",
        "patch_embedding": "patch_embedding",
        "proj_out": "head",
        "time_": "time",
        "text_embedder": "text",
        "image_embedder": "image",
        ".attn": "attention",
        ".ffn": "ffn",
    }
    return next((family for part, family in inside.items() if part in name), "other")


class AuditRow(NamedTuple):
    """What is true of a family's parameters, of the trainable ones or of the frozen ones.

    Several dtypes stand in one set. ``masters`` and ``gradients`` are empty for frozen ones.
    """

    family: str
    is_trainable: bool
    tensors: int
    stored: set[torch.dtype]
    masters: set[torch.dtype]
    computes: set[torch.dtype]
    gradients: set[torch.dtype]


def audit(engine: "Engine | FrozenEngine") -> list[AuditRow]:
    """What each family of modules is stored in, computes in, and has its gradients travel in.

    What it computes in is seen in a forward of one smallest clip, without gradients: the dtype in which the
    first operation that is no cast and no view uses the parameter. A collective under ZeRO-3; draws no random
    numbers that training would have drawn.
    """
    computes = observe(engine)
    trainable = [parameter for _, parameter in engine.parameters() if parameter.requires_grad]
    masters = {part.dtype for parameter in trainable if (part := engine.master(parameter)) is not None}
    rows: dict[tuple[str, bool], AuditRow] = {}
    for name, parameter in engine.parameters():
        family, trains = family_of(name), parameter.requires_grad
        row = rows.setdefault((family, trains), AuditRow(family, trains, 0, set(), set(), set(), set()))
        row.stored.add(engine.shard(parameter).dtype)
        row.computes.update(computes.get(name, ()))
        if trains:
            row.masters.update(masters)
            row.gradients.add(engine.gradient_dtype(parameter))
        rows[family, trains] = row._replace(tensors=row.tensors + 1)
    order = {family: index for index, family in enumerate(FAMILIES)}
    return sorted(rows.values(), key=lambda row: (order.get(row.family, len(order)), not row.is_trainable))


def audit_table(rows: list[AuditRow]) -> str:
    """The audit as text, a line for each family."""
    head = ("family", "tensors", "stored", "masters", "computes in", "gradients travel in")
    lines = [head]
    for row in rows:
        frozen = "" if row.is_trainable else " (frozen)"
        dtypes = (_text(row.stored), _text(row.masters), _text(row.computes), _text(row.gradients))
        lines.append((row.family + frozen, str(row.tensors), *dtypes))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _text(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "-"


def observe(engine: "Engine | FrozenEngine") -> dict[str, set[torch.dtype]]:
    """By parameter, the dtypes that its products are seen to have in one forward without gradients."""
    uses = Uses(dict(engine.parameters()))
    device = next(engine.module.buffers()).device
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices), engine.inference() as module, uses:
        module(**smallest_inputs(module.config, device))
    return uses.dtypes


def smallest_inputs(config: Any, device: torch.device) -> dict[str, Any]:
    """What a model of this config can be called with: one clip of one latent frame, one patch, zeros."""
    clip = torch.zeros(config.in_channels, *config.patch_size, device=device)
    inputs = {
        "hidden_states": [clip],
        "timestep": torch.full((1,), 500.0, device=device),
        "encoder_hidden_states": torch.zeros(1, TEXT_LENGTH, config.text_dim, device=device),
    }
    if config.image_dim is not None:
        tokens = config.pos_embed_seq_len or _IMAGE_TOKENS
        inputs["encoder_hidden_states_image"] = torch.zeros(1, tokens, config.image_dim, device=device)
    return inputs


# What hands a parameter on without computing with it: casts, views and copies.
_HANDED_ON = {
    "_to_copy", "alias", "clone", "contiguous", "detach", "expand", "flatten", "permute", "reshape", "select",
    "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip


class Uses(TorchDispatchMode):
    """Notes the dtype of the first computation on each of these parameters, below autocast.

    Of a product or sum that is the dtype of its result, which torch promotes or was cast to.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}
        # Weak, or what ZeRO-3 gathered would stay.
        self._names = WeakTensorKeyDictionary({parameter: name for name, parameter in parameters.items()})

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for name in {self._names[tensor] for tensor in given if tensor in self._names}:
            if func.overloadpacket.__name__ in _HANDED_ON:
                self._names.update((tensor, name) for tensor in made)
            elif func.namespace == "aten":
                dtypes = {tensor.dtype for tensor in made if tensor.dtype.is_floating_point}
                self.dtypes.setdefault(name, set()).update(dtypes)
        return result
