"""A transformer's weights, put in one block at a time, from whatever holds tensors by name or from a seed.

The model is built on the meta device, and nothing is read before all names and shapes are known to fit. Then
each block is read, cast, given its adapter's tensors, perhaps stored in 8 bits and, under ZeRO-3, handed to
``partition``, which leaves each rank its shard: no process ever holds more than its shards and one block."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wan_ds import streams
from wan_ds.errors import CheckpointError
from wan_ds.models.adapter import (
    AdapterSettings,
    AdapterStart,
    AdapterTensors,
    inject,
    is_adapter,
    plain_name,
    some,
)
from wan_ds.models.quantised import STORAGE, quantise
from wan_ds.models.transformer import WanTransformer, WanTransformerBlock, check_rope, reset_rope

IMAGE_KEY = "blocks.0.attn2.add_k_proj.weight"  # k_img in original files: Wan 2.1's models that see images
# The sizes that tensors show, each with the tensor and the axis that shows it.
_SIZES = {
    "in_channels": ("patch_embedding.weight", 1),
    "ffn_dim": ("blocks.0.ffn.net.0.proj.weight", 0),
    "text_dim": ("condition_embedder.text_embedder.linear_1.weight", 1),
    "freq_dim": ("condition_embedder.time_embedder.linear_1.weight", 1),
    "image_dim": ("condition_embedder.image_embedder.norm1.weight", 0),
    "pos_embed_seq_len": ("condition_embedder.image_embedder.pos_embed", 1),
}
_OPTIONAL = ("image_dim", "pos_embed_seq_len")  # whose absence says something
IGNORED = "norm_added_q"  # diffusers ignores it in files, too: no model has used it


DtypeOf = Callable[[str, torch.dtype, bool], torch.dtype]  # name, stored dtype, whether it trains


class Described(Protocol):
    """What is known of a tensor before it is read; a tensor is one, too."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class Source(Protocol):
    """Tensors by diffusers' names that can be read a few at a time.

    It may have an attribute ``architecture`` as well: what its config says, in diffusers' words.
    """

    where: str
    tensors: Mapping[str, Described]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors on the CPU; on the meta device those that another rank reads, to be broadcast."""
        ...


def build_transformer(  # noqa: PLR0913
    architecture: Mapping[str, Any],
    source: Source | None,
    *,
    seed: int = 0,
    expert: str = "all",
    dtype_of: DtypeOf | None = None,
    is_trainable: Callable[[str], bool] = lambda name: True,  # noqa: ARG005
    adapter: AdapterSettings | None = None,
    init_from: AdapterTensors | None = None,
    frozen_storage: torch.dtype | None = None,
    partition: Callable[[nn.Module], None] | None = None,
) -> WanTransformer:
    """A transformer of diffusers' ``architecture`` on the CPU, its tensors read from the source in one walk.

    Args:
        source: None draws them from the stream of (seed, expert, name).
        dtype_of: what a tensor of this plain name and stored dtype, trainable or not, is cast to as it is
            read; None makes trainable ones float32 and leaves frozen ones as they are stored.
        is_trainable: whether the tensor of this plain name requires gradients; with an adapter, which of its.
        adapter: put on the blocks; the base is frozen, and read under its plain names.
        init_from: what the adapter starts from; None draws it from the stream of (seed, expert, name).
        frozen_storage: float8_e4m3fn keeps the frozen linear weights of blocks in 8 bits; None as stored.
        partition: called with each module whose parameters are complete; the whole model comes last, for
            the parameters of its own. A collective where there are several ranks.

    Raises:
        CheckpointError: the source or ``init_from`` does not fit, told before anything is read; or a read
            fails.
        ConfigError: the adapter does not fit the model.
    """
    if frozen_storage not in (None, STORAGE):
        raise ValueError(f"frozen_storage={frozen_storage}: {STORAGE} or None")
    model = on_meta(architecture)
    if source is None:
        source = Drawn(model, seed, expert)
    refuse_misfit(model, source)
    start = None
    if adapter is not None:
        inject(model, adapter)
        start = AdapterStart(model, adapter, seed=seed, expert=expert, given=init_from)
    for name, parameter in model.named_parameters():
        trains = is_trainable(plain_name(name)) and (adapter is None or is_adapter(name))
        parameter.requires_grad_(trains)
    dtypes = _dtypes(model, source, dtype_of or _as_stored)
    for module, names in _units(model):
        _fill(model, names, source, start, dtypes)
        if frozen_storage is not None and isinstance(module, WanTransformerBlock):
            quantise(module)
        if partition is not None:
            partition(module)
    reset_rope(model, "cpu")
    check_rope(model)
    return model


def on_meta(architecture: Mapping[str, Any]) -> WanTransformer:
    """The transformer without memory for its weights."""
    with torch.device("meta"):
        return WanTransformer(**architecture)


def _as_stored(name: str, loaded: torch.dtype, trainable: bool) -> torch.dtype:  # noqa: ARG001
    return torch.float32 if trainable else loaded


def _dtypes(model: WanTransformer, source: Source, dtype_of: DtypeOf) -> dict[str, torch.dtype]:
    """Of every parameter, by its name in the model; an adapter's are float32 before they are cast."""
    dtypes = {}
    for name, parameter in model.named_parameters():
        plain = plain_name(name)
        stored = torch.float32 if is_adapter(name) else source.tensors[plain].dtype
        dtypes[name] = dtype_of(plain, stored, parameter.requires_grad)
    return dtypes


def _units(model: WanTransformer) -> Iterator[tuple[nn.Module, list[str]]]:
    """Modules with the names of their parameters: blocks one by one, other children, the model's own."""
    for child_name, child in model.named_children():
        listed = isinstance(child, nn.ModuleList)
        for name, module in child.named_children() if listed else [("", child)]:
            prefix = f"{child_name}.{name}." if listed else f"{child_name}."
            names = [f"{prefix}{parameter}" for parameter, _ in module.named_parameters()]
            if names:
                yield module, names
    yield model, [name for name, _ in model.named_parameters(recurse=False)]


def _fill(
    model: WanTransformer,
    names: list[str],
    source: Source,
    start: AdapterStart | None,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    tensors = source.read([plain_name(name) for name in names if not is_adapter(name)])
    if start is not None:
        tensors |= start.read([plain_name(name) for name in names if is_adapter(name)])
    for name in names:
        # Let go one by one: a cast block must not stand beside the stored one.
        tensor = tensors.pop(plain_name(name))
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        requires_grad = owner.get_parameter(leaf).requires_grad
        tensor = tensor.to(dtypes[name])
        tensor = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.contiguous()
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=requires_grad))


class Drawn:
    """Random float32 weights, each from its own stream (seed, expert, name), as Wan's authors start theirs.

    Xavier-uniform linear layers with zero biases, normal 0.02 in the time and text embedders, a zero head,
    unit norms, zero positions of image tokens.
    """

    def __init__(self, model: WanTransformer, seed: int, expert: str) -> None:
        self.where = f"seed {seed}"
        self.tensors = _base(model)
        self._key = (seed, "initialise", expert)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._draw(name, self.tensors[name].shape) for name in names}

    def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        kind = name.rsplit(".", 1)[-1]
        tensor, rng = torch.empty(shape), streams.generator(*self._key, name)
        if kind == "scale_shift_table":
            return tensor.normal_(std=shape[-1] ** -0.5, generator=rng)
        if kind in ("bias", "pos_embed") or name.startswith("proj_out"):
            return tensor.zero_()
        if tensor.ndim == 1:
            return tensor.fill_(1)
        if "time_embedder" in name or "text_embedder" in name:
            return tensor.normal_(std=0.02, generator=rng)
        bound = math.sqrt(6 / (math.prod(shape[1:]) + shape[0]))
        return tensor.uniform_(-bound, bound, generator=rng)


def _base(model: WanTransformer) -> dict[str, nn.Parameter]:
    """The parameters by the names that files have them under: no adapter's."""
    return {plain_name(name): p for name, p in model.named_parameters() if not is_adapter(name)}


def refuse_misfit(model: WanTransformer, source: Source) -> None:
    """Raise one CheckpointError for all that differs between the model and what the source says it holds.

    An adapter of the model is not its concern.
    """
    ours, theirs = _base(model), source.tensors
    sizes = _differing_sizes(model, source)
    found = sizes or _differing_keys(ours, theirs)
    whole = [name for name in ours if name in theirs and not theirs[name].dtype.is_floating_point]
    if whole:
        found.append(f"{whole[0]} holds whole numbers ({theirs[whole[0]].dtype}): a quantised model")
    if not found:
        return
    kind = ""
    if (IMAGE_KEY in theirs) != (IMAGE_KEY in ours):
        kind = f": it {'has' if IMAGE_KEY in theirs else 'lacks'} the image keys of Wan 2.1's image to video"
    advice = "; choose the model that it was released as" if sizes or kind else ""
    raise CheckpointError(f"{source.where} does not fit model.transformer{kind}; {'; '.join(found)}{advice}")


def _differing_sizes(model: WanTransformer, source: Source) -> list[str]:
    ours, theirs = _sizes(_base(model)), _sizes(source.tensors)
    config = dict(model.config)
    stated = getattr(source, "architecture", {})
    ours |= {key: config[key] for key in stated if key in config and key not in theirs}
    theirs |= {key: value for key, value in stated.items() if key in config and key not in theirs}
    return [
        f"{key}: {_text(theirs[key])} there, {_text(ours[key])} here"
        for key in ours
        if key in theirs and _plain(theirs[key]) != _plain(ours[key])
    ]


def _sizes(tensors: Mapping[str, Described]) -> dict[str, Any]:
    """What the shapes tell of the architecture; a size that a missing tensor would show is left out."""
    sizes: dict[str, Any] = {}
    for key, (name, axis) in _SIZES.items():
        if name in tensors and len(tensors[name].shape) > axis:
            sizes[key] = tensors[name].shape[axis]
        elif key in _OPTIONAL:
            sizes[key] = None
    sizes["num_layers"] = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    patch = tensors["patch_embedding.weight"].shape if "patch_embedding.weight" in tensors else ()
    if len(patch) == 5:
        sizes |= {"width": patch[0], "patch_size": list(patch[2:])}
        if "proj_out.weight" in tensors:
            sizes["out_channels"] = tensors["proj_out.weight"].shape[0] / math.prod(patch[2:])
    return sizes


def _differing_keys(ours: Mapping[str, Described], theirs: Mapping[str, Described]) -> list[str]:
    found = []
    missing = [name for name in ours if name not in theirs]
    unexpected = [name for name in theirs if name not in ours and IGNORED not in name]
    misshapen = [
        f"{name} {list(theirs[name].shape)} there, {list(ours[name].shape)} here"
        for name in ours
        if name in theirs and tuple(theirs[name].shape) != tuple(ours[name].shape)
    ]
    for kind, names in {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}.items():
        if names:
            found.append(f"{kind}: {some(names)}")
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def count_parameters(module: nn.Module) -> int:
    """The number of parameters, ZeRO-3 partitioned ones counted whole."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
