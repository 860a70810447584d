"""Where a model's weights come from: a folder, the package, or seeded random numbers."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wan_ds import streams
from wan_ds.errors import CheckpointError
from wan_ds.models.transformer import WanTransformer

_PACKAGE = Path(__file__).parents[1]


def locate(path: str | None, weights: str, component: str) -> Path:
    """The folder of a component: ``weights`` itself if it is a folder, else a subfolder of ``path``.

    A ``path`` that begins with wan_ds/ may lie beside the installed package. Raises CheckpointError if there
    is none.
    """
    tried = [Path(weights)]
    if path is not None:
        tried = [Path(path) / weights, _PACKAGE.parent / path / weights, Path(weights)]
    for folder in tried:
        if folder.is_dir():
            return folder.resolve()
    raise CheckpointError(
        f"model.{component}.weights={weights}: no such folder under model.path={path}; "
        "name a local folder in diffusers' layout (a hub name is downloaded first: "
        "hf download <name> --local-dir <folder>)"
    )


def build_transformer(
    architecture: dict[str, Any], *, path: str | None, weights: str | None, seed: int, expert: str
) -> WanTransformer:
    """A float32 transformer on the CPU: loaded from its folder, or, where ``weights`` is null, from the seed.

    Raises CheckpointError if the folder is missing or holds a model of another architecture.
    """
    if weights is None:
        model = WanTransformer(**architecture)
        initialise(model, seed, expert)
        return model
    folder = locate(path, weights, f"experts.{expert}")
    try:
        model, found = WanTransformer.from_pretrained(
            folder, torch_dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} holds no transformer in diffusers' layout: {error}") from error
    wrong = {kind: keys for kind, keys in found.items() if keys and kind != "error_msgs"}
    if wrong:
        listing = "; ".join(f"{kind}: {', '.join(map(str, list(keys)[:3]))}" for kind, keys in wrong.items())
        raise CheckpointError(f"{folder} does not fit this transformer: {listing}")
    differing = {
        key: (model.config.get(key), value)
        for key, value in architecture.items()
        if _plain(model.config.get(key)) != _plain(value)
    }
    if differing:
        listing = ", ".join(
            f"{key}: {theirs} there, {ours} here" for key, (theirs, ours) in differing.items()
        )
        raise CheckpointError(f"{folder} holds another architecture than model.transformer says: {listing}")
    return model


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


@torch.no_grad()
def initialise(model: WanTransformer, seed: int, expert: str) -> None:
    """Fill every parameter from its own stream (seed, expert, name), as Wan's authors initialise theirs.

    Xavier-uniform linear layers with zero biases, normal 0.02 in the time and text embedders, a zero head,
    unit norms.
    """
    for name, parameter in model.named_parameters():
        kind = name.rsplit(".", 1)[-1]
        rng = streams.generator(seed, "initialise", expert, name)
        if kind == "scale_shift_table":
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=rng)
        elif kind == "bias" or name.startswith("proj_out"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1)
        elif "time_embedder" in name or "text_embedder" in name:
            parameter.normal_(std=0.02, generator=rng)
        else:
            fan_out, fan_in = parameter.shape[0], math.prod(parameter.shape[1:])
            bound = math.sqrt(6 / (fan_in + fan_out))
            parameter.uniform_(-bound, bound, generator=rng)


def count_parameters(module: nn.Module) -> int:
    """The number of parameters, ZeRO-3 partitioned ones counted whole."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
