"""Keys of LoRA files: what each program writes around a module's name, and which module it means.

A module is spelled as diffusers does (`blocks.0.attn1.to_q`), as Wan's authors do (`blocks.0.self_attn.q`),
or as the latter with underscores for dots (kohya's).
"""

import re
from collections.abc import Iterable

from wan_ds.errors import CheckpointError
from wan_ds.interop import names

# One key of each dialect. `peft` is read alone: diffusers' spelling without its prefix.
EXAMPLES = {
    "diffusers": "transformer.blocks.0.attn1.to_q.lora_A.weight",
    "peft": "base_model.model.blocks.0.attn1.to_q.lora_A.weight",
    "comfyui": "diffusion_model.blocks.0.self_attn.q.lora_A.weight",
    "kohya": "lora_unet_blocks_0_self_attn_q.lora_down.weight",
    "diffsynth": "blocks.0.self_attn.q.lora_A.default.weight",
    "videox_fun": "lora_unet__blocks_0_self_attn_q.lora_down.weight",
}
_PREFIXES = {  # the first that fits
    "lora_unet__": "videox_fun",
    "lora_unet_": "kohya",
    "model.diffusion_model.": "comfyui",
    "diffusion_model.": "comfyui",
    "transformer.": "diffusers",
}
_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"}
)
_PARTS = {
    ".lora_A.weight": "A",
    ".lora_down.weight": "A",
    ".lora_B.weight": "B",
    ".lora_up.weight": "B",
    ".alpha": "alpha",
}
_MERGE = "merge it into the model's weights with the program that trained it"
_REFUSED = {
    r"dora_scale|lora_magnitude_vector": f"a DoRA adapter, whose magnitudes diffusers drops; {_MERGE}",
    r"\b(lokr|loha|hada|oft|boft|glora|lycoris)_": "an adapter of LyCORIS (LoKr, LoHa, OFT), which is no "
    f"product of two matrices; {_MERGE}",
    r"\.diff(_[bm])?$|\.set_weight$|\.lora_(B|up)\.bias$": "differences of whole weights or of biases, which "
    f"are no LoRA; {_MERGE}",
    r"^(diffusion_model\.)?transformer_[12]\.": "the adapters of both experts in one file; write each into a "
    "file of its own, with transformer. as the prefix",
    r"^lora_te\d*_|^text_encoder\.": "an adapter of a text encoder, which does not train here",
}


def plain_key(key: str) -> str:
    """The key without what wrappers add.

    PEFT puts ``base_model.model.`` before it and the adapter's name (``default``) into it, torch's DDP
    ``module.`` before it, torch.compile ``_orig_mod.``, recomputation and FSDP their own parts within it.
    """
    key = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
    while key.startswith("base_model.model."):
        key = key.removeprefix("base_model.model.")
    if key.startswith("lora_unet_"):
        key = key.replace("_orig_mod_", "")
    return re.sub(r"(\.lora_[AB])\.[^.]+\.(weight|bias)$", r"\1.\2", key)


def parse(keys: Iterable[str], where: str) -> tuple[str, dict[str, dict[str, str]]]:
    """The dialect of a file's keys, and of each module (diffusers' spelling) the key of its A, B and alpha.

    Raises CheckpointError for keys of no dialect or of several, and for adapters of another kind than LoRA.
    """
    keys = list(keys)
    plain = {key: plain_key(key) for key in keys}
    for sign, what in _REFUSED.items():
        if found := [key for key in keys if re.search(sign, plain[key])]:
            raise CheckpointError(f"{where} holds {what} ({names.some(found)})")
    dialects: dict[str, str] = {}
    modules: dict[str, dict[str, str]] = {}
    unknown = []
    for key in keys:
        prefix = next((prefix for prefix in _PREFIXES if plain[key].startswith(prefix)), "")
        spelled, part = _split(plain[key].removeprefix(prefix))
        module = diffusers_module(spelled) if part else None
        if module is None or part is None:
            unknown.append(key)
            continue
        bare = "peft" if spelled == module else "diffsynth"
        dialects.setdefault(_PREFIXES.get(prefix, bare), key)
        if part in modules.setdefault(module, {}):
            raise CheckpointError(
                f"{where}: {modules[module][part]} and {key} mean one tensor; keep one of the two adapters"
            )
        modules[module][part] = key
    if unknown or not keys:
        known = ", ".join(f"{dialect} ({example})" for dialect, example in EXAMPLES.items())
        raise CheckpointError(
            f"{where}: {len(unknown)} of {len(keys)} keys are of no Wan LoRA known here: "
            f"{names.some(unknown)}; "
            f"the dialects and a key of each: {known}"
        )
    if len(dialects) > 1:
        several = " and ".join(f"{dialect} ({key})" for dialect, key in dialects.items())
        raise CheckpointError(f"{where}: keys of several dialects, {several}; keep those of one")
    return next(iter(dialects)), modules


def _split(key: str) -> tuple[str, str | None]:
    for suffix, part in _PARTS.items():
        if key.endswith(suffix):
            return key.removesuffix(suffix), part
    return key, None


# Modules

TEXT_LINEARS = (  # of a block in every Wan; kohya's readers want them all
    *(f"{attention}.{one}" for attention in ("self_attn", "cross_attn") for one in "qkvo"),
    "ffn.0",
    "ffn.2",
)
IMAGE_LINEARS = ("cross_attn.k_img", "cross_attn.v_img")  # and of Wan 2.1 with a CLIP encoder
_ROOT_LINEARS = (
    "text_embedding.0",
    "text_embedding.2",
    "time_embedding.0",
    "time_embedding.2",
    "time_projection.1",
    "img_emb.proj.1",
    "img_emb.proj.3",
    "head.head",
)


def _translated(prefix: str, linears: Iterable[str]) -> dict[str, str]:
    table = names.transformer_names(f"{prefix}{one}.weight" for one in linears)
    return {
        old.removeprefix(prefix).removesuffix(".weight"): new.removeprefix(prefix).removesuffix(".weight")
        for old, new in table.items()
    }


_BLOCK = _translated("blocks.0.", (*TEXT_LINEARS, *IMAGE_LINEARS))
_ROOT = _translated("", _ROOT_LINEARS)


def _spellings(table: dict[str, str]) -> dict[str, str]:
    return {
        spelled: new
        for old, new in table.items()
        for spelled in (old, old.replace(".", "_"), new, new.replace(".", "_"))
    }


_ANY_BLOCK, _ANY_ROOT = _spellings(_BLOCK), _spellings(_ROOT)
_TO_ORIGINAL = {new: old for table in (_BLOCK, _ROOT) for old, new in table.items()}


def diffusers_module(spelled: str) -> str | None:
    """Diffusers' spelling of a linear layer in whatever spelling, None for what is none of Wan's."""
    block = re.fullmatch(r"blocks[._](\d+)[._](.+)", spelled)
    if block is None:
        return _ANY_ROOT.get(spelled)
    inner = _ANY_BLOCK.get(block[2])
    return None if inner is None else f"blocks.{int(block[1])}.{inner}"


def original_module(module: str) -> str:
    """Original spelling of a linear layer in diffusers' spelling; raises KeyError for another."""
    number = block_of(module)
    head = "" if number is None else f"blocks.{number}."
    return head + _TO_ORIGINAL[module.removeprefix(head)]


def block_of(module: str) -> int | None:
    """The block that a module in diffusers' spelling lies in, None for the transformer's own."""
    found = re.match(r"blocks\.(\d+)\.", module)
    return int(found[1]) if found else None


def is_linear(module: str) -> bool:
    """Whether this is diffusers' spelling of a linear layer that the dialects have a name for."""
    return diffusers_module(module) == module
