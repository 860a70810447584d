"""LoRA adapters as the tensors and the header of each program's files, and back.

Where each dialect has the scale, and what its readers do without:

* diffusers: alpha and rank as PEFT's settings, in the header; without them alpha is the rank.
* comfyui: `<module>.alpha`, read as scale = alpha / rank; without it the scale is 1.
* kohya (musubi): the same, always there; diffusers' reader fails without it, others take the rank.
* videox_fun: the same; without it the scale is 1.
* diffsynth: nowhere, so it is multiplied into B.

So an absent alpha means alpha = rank in each of them. The readers of `.alpha` know no rslora: they get the
alpha that gives the same scale.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wan_ds.errors import CheckpointError
from wan_ds.interop.lora_form import Lora, Shapes, lora_of, ranks_of
from wan_ds.interop.lora_names import (
    IMAGE_LINEARS,
    TEXT_LINEARS,
    block_of,
    diffusers_module,
    original_module,
    parse,
)
from wan_ds.interop.names import some

ADAPTER_METADATA = "lora_adapter_metadata"  # where diffusers keeps PEFT's settings in a header
_IMAGE = ("add_k_proj", "add_v_proj")
_WITH_IMAGE = ".attn2.(to_k|add_k_proj|add_v_proj)"  # a pattern of PEFT's
_PEFT_DEFAULT = 8  # of LoraConfig's r and lora_alpha
Written = tuple[dict[str, Tensor], dict[str, str]]  # tensors by key, and the header's metadata

_SCALES = {  # what a header says of them
    "diffusers": ADAPTER_METADATA,
    "comfyui": "alpha / rank where there is an alpha, else 1",
    "kohya": "alpha / rank",
    "videox_fun": "alpha / rank",
    "diffsynth": "1: it is in lora_B",
}
_OWN = ("format", "dialect", "scale", "zero_filled", ADAPTER_METADATA)  # made anew by each writing


# Out


def to_diffusers(lora: Lora) -> Written:
    """For `load_lora_weights` of diffusers, whatever the ranks and alphas."""
    lora, filled = _with_zeros(lora, _other_image_layer(lora))
    config = {f"transformer.{key}": value for key, value in _peft_config(lora).items()}
    settings = {ADAPTER_METADATA: json.dumps(config, indent=2, sort_keys=True)}
    tensors = {f"transformer.{key}": tensor for key, tensor in sorted(lora.tensors.items())}
    return tensors, _header(lora, "diffusers") | filled | settings


def to_comfyui(lora: Lora) -> Written:
    """For ComfyUI and diffusers, which reads no alpha outside the blocks: there the scale is in B."""
    lora, filled = _with_zeros(lora, _other_image_layer(lora))
    tensors = {}
    for module in lora.modules:
        name = f"diffusion_model.{original_module(module)}"
        alpha = _file_alpha(lora, module)
        a, b = lora.pair(module)
        if block_of(module) is None:
            b = _folded(lora, module)
        elif lora.rslora or alpha != lora.ranks[module]:
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    return dict(sorted(tensors.items())), _header(lora, "comfyui") | filled


def to_kohya(lora: Lora, shapes: Shapes | None = None) -> Written:
    """For musubi-tuner, ComfyUI and diffusers, which wants all linear layers of every block.

    Those that the adapter lacks are filled with zeros, of its most common rank and in the ``shapes`` of the
    model; the header's zero_filled names them, and reading takes them out again. Raises CheckpointError for
    lack of ``shapes``, and for modules outside the blocks, which the dialect has no place for.
    """
    outside = [module for module in lora.modules if block_of(module) is None]
    if outside:
        raise CheckpointError(
            f"{lora.where}: a kohya file holds the layers of blocks alone, not {some(outside)}; write comfyui"
        )
    absent = _absent_in_blocks(lora)
    unknown = [module for module in absent if module not in (shapes or {})]
    if unknown:
        raise CheckpointError(
            f"{lora.where}: a kohya file must hold all linear layers of every block, and this adapter has "
            f"{len(lora.modules)} of {len(lora.modules) + len(absent)}; the others are filled with zeros in "
            f"the shapes of the model, which were not given for {some(unknown)}; write comfyui, or give them"
        )
    lora, filled = _with_zeros(lora, {module: shapes[module] for module in absent})
    return _flat(lora, "lora_unet_"), _header(lora, "kohya") | filled


def to_videox_fun(lora: Lora) -> Written:
    """For VideoX-Fun, any subset of modules; ComfyUI knows the dialect by block 0's cross_attn.k alone."""
    return _flat(lora, "lora_unet__"), _header(lora, "videox_fun")


def to_diffsynth(lora: Lora) -> Written:
    """For DiffSynth-Studio, which reads B @ A as it is."""
    tensors = {}
    for module in lora.modules:
        name = original_module(module)
        tensors[f"{name}.lora_A.default.weight"] = lora.pair(module)[0]
        tensors[f"{name}.lora_B.default.weight"] = _folded(lora, module)
    return dict(sorted(tensors.items())), _header(lora, "diffsynth")


WRITERS: dict[str, Callable[[Lora, Shapes | None], Written]] = {
    "diffusers": lambda lora, _: to_diffusers(lora),
    "comfyui": lambda lora, _: to_comfyui(lora),
    "kohya": to_kohya,
    "diffsynth": lambda lora, _: to_diffsynth(lora),
    "videox_fun": lambda lora, _: to_videox_fun(lora),
}


def _header(lora: Lora, dialect: str) -> dict[str, str]:
    said = {
        "rank": _number(_most_common(lora.ranks.values())),
        "alpha": _number(_most_common(lora.alphas.values())),
        "rslora": str(lora.rslora).lower(),
    }
    made = {"format": "pt", "dialect": dialect, "scale": _SCALES[dialect]}
    return {key: str(value) for key, value in sorted((said | lora.metadata | made).items())}


def _peft_config(lora: Lora) -> dict[str, Any]:
    """LoraConfig's settings; the modules that differ from most are named in full."""
    rank, alpha = int(_most_common(lora.ranks.values())), _most_common(lora.alphas.values())
    ranks = {module: int(lora.ranks[module]) for module in lora.modules}
    if not any(module.endswith(_IMAGE) for module in lora.modules):
        # Into a model with an image branch diffusers adds zeros for it, of the rank of the text's keys.
        ranks = {re.sub(r"\.attn2\.to_k$", _WITH_IMAGE, module): one for module, one in ranks.items()}
    return {
        "r": rank,
        "lora_alpha": _plain(alpha),
        "rank_pattern": {module: one for module, one in ranks.items() if one != rank},
        "alpha_pattern": {name: _plain(one) for name, one in sorted(lora.alphas.items()) if one != alpha},
        "target_modules": lora.modules,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
    }


def _flat(lora: Lora, prefix: str) -> dict[str, Tensor]:
    tensors = {}
    for module in lora.modules:
        name = prefix + original_module(module).replace(".", "_")
        a, b = lora.pair(module)
        tensors[f"{name}.alpha"] = torch.tensor(_file_alpha(lora, module))
        tensors |= {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b}
    return dict(sorted(tensors.items()))


def _with_zeros(lora: Lora, shapes: Shapes) -> tuple[Lora, dict[str, str]]:
    """The adapter with zeros for these modules too, and what the header says of them.

    They get the most common rank: what the readers take for the usual rank must not change.
    """
    if not shapes:
        return lora, {}
    rank, alpha = _most_common(lora.ranks.values()), _most_common(lora.alphas.values())
    zeros = {}
    for module, (out_width, in_width) in shapes.items():
        zeros[f"{module}.lora_A.weight"] = torch.zeros(int(rank), in_width)
        zeros[f"{module}.lora_B.weight"] = torch.zeros(out_width, int(rank))
    whole = replace(
        lora,
        tensors=lora.tensors | zeros,
        ranks=lora.ranks | dict.fromkeys(shapes, rank),
        alphas=lora.alphas | dict.fromkeys(shapes, alpha),
    )
    return whole, {"zero_filled": " ".join(sorted(shapes))}


def _other_image_layer(lora: Lora) -> Shapes:
    """One add_v_proj for an adapter of add_k_proj alone, or the reverse, whose shapes are the same.

    Without a single one of both kinds diffusers takes the adapter for one of a text-to-video model: it puts
    zeros in the place of the kind that is there, or refuses it.
    """
    held = {kind: [module for module in lora.modules if module.endswith(f".attn2.{kind}")] for kind in _IMAGE}
    lacking = [kind for kind, modules in held.items() if not modules]
    if len(lacking) != 1:
        return {}
    (first,) = [modules[0] for modules in held.values() if modules]
    a, b = lora.pair(first)
    return {f"{first.rpartition('.')[0]}.{lacking[0]}": (b.shape[0], a.shape[1])}


def _absent_in_blocks(lora: Lora) -> list[str]:
    held = set(lora.modules)
    has_images = any(original_module(module).endswith(IMAGE_LINEARS) for module in held)
    linears = TEXT_LINEARS + (IMAGE_LINEARS if has_images else ())
    blocks = range(1 + max(block_of(module) for module in held))
    wanted = [diffusers_module(f"blocks.{block}.{one}") for block in blocks for one in linears]
    return sorted(set(wanted) - held)


def _file_alpha(lora: Lora, module: str) -> float:
    """What readers of alpha / rank must find, as an fp32 file holds it."""
    alpha, rank = float(lora.alphas[module]), lora.ranks[module]
    return _rslora_alpha(alpha, rank) if lora.rslora else torch.tensor(alpha).item()


def _rslora_alpha(alpha: float, rank: float) -> float:
    return torch.tensor(alpha / math.sqrt(rank) * rank).item()


def _folded(lora: Lora, module: str) -> Tensor:
    return lora.pair(module)[1] * (_file_alpha(lora, module) / lora.ranks[module])


def _most_common(numbers: Iterable[float]) -> float:
    counts = Counter(numbers)
    return max(counts, key=lambda number: (counts[number], number))


def _plain(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


def _number(number: float) -> str:
    return str(_plain(number))


# In


def from_tensors(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    where: str,
    config: Mapping[str, Any] | None = None,
) -> Lora:
    """The adapter in a file's tensors and header, of any dialect; ``config``: PEFT's adapter_config.json.

    Raises CheckpointError as `parse` and `Lora.check` do, and for settings or an alpha that cannot be read.
    """
    _, modules = parse(tensors, where)
    for module in set(metadata.get("zero_filled", "").split()) & set(modules):
        if not any(tensors[key].any() for part, key in modules[module].items() if part != "alpha"):
            del modules[module]
    found = {
        f"{module}.lora_{part}.weight": tensors[key]
        for module, keys in modules.items()
        for part, key in keys.items()
        if part != "alpha"
    }
    ranks = ranks_of(found)
    said = {module: keys["alpha"] for module, keys in modules.items() if "alpha" in keys}
    if config is None and ADAPTER_METADATA in metadata:
        config = _parsed(metadata[ADAPTER_METADATA], where)
    if lonely := [key for module, key in said.items() if len(modules[module]) == 1]:
        raise CheckpointError(f"{where}: an alpha without A and B: {some(lonely)}")
    if config is not None and said:
        raise CheckpointError(
            f"{where} says alpha twice, in PEFT's settings and in {some(list(said.values()))}"
        )
    if config is not None:
        rslora = bool(config.get("use_rslora", False))
        alphas = _peft_alphas(config, ranks, where)
    else:
        rslora = bool(said) and metadata.get("rslora") == "true"
        alphas = ranks | {module: _one_number(tensors[key], key, where) for module, key in said.items()}
        if rslora:
            alphas = {module: _before_rslora(alphas[module], rank) for module, rank in ranks.items()}
    kept = {key: value for key, value in metadata.items() if key not in _OWN}
    return lora_of(found, alphas, rslora=rslora, metadata=kept, where=where)


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return {key.removeprefix("transformer."): value for key, value in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{where}: its {ADAPTER_METADATA} is no JSON object ({error})") from error


def _peft_alphas(config: Mapping[str, Any], ranks: Mapping[str, float], where: str) -> dict[str, float]:
    if config.get("use_dora"):
        raise CheckpointError(
            f"{where} holds a DoRA adapter (use_dora), whose magnitudes are in no dialect; merge it into the "
            "model's weights with the program that trained it"
        )
    try:
        alphas = {
            module: float(_by_pattern(config, "alpha_pattern", module, "lora_alpha")) for module in ranks
        }
        said = {module: _by_pattern(config, "rank_pattern", module, "r") for module in ranks}
    except (TypeError, ValueError, re.error) as error:
        raise CheckpointError(f"{where}: PEFT's settings cannot be read: {error}") from error
    wrong = [
        f"{module} has rank {_number(ranks[module])}, not {rank}"
        for module, rank in said.items()
        if rank != ranks[module]
    ]
    if wrong:
        raise CheckpointError(f"{where}: PEFT's settings are of another adapter: {some(wrong)}")
    return alphas


def _by_pattern(config: Mapping[str, Any], patterns: str, module: str, default: str) -> Any:
    """As PEFT looks a module up: the first pattern that is the end of its name, by whole parts."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return config.get(default, _PEFT_DEFAULT)


def _one_number(tensor: Tensor, key: str, where: str) -> float:
    if tensor.numel() != 1:
        raise CheckpointError(f"{where}: {key} has shape {tuple(tensor.shape)}; an alpha is one number")
    return float(tensor)


def _before_rslora(alpha: float, rank: float) -> float:
    """The alpha that `_file_alpha` made this of: the short number, if it gives the same to the last bit."""
    exact = alpha / math.sqrt(rank)
    short = float(f"{exact:.6g}")
    return short if _rslora_alpha(short, rank) == alpha else exact
