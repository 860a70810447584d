"""A tiny run whose experts train adapters on frozen bases."""

from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from tests.models.variants import randomised
from tests.training import tiny
from wan_ds import streams
from wan_ds.config.command_line import parse
from wan_ds.config.composition import configure
from wan_ds.models.adapter import AdapterSettings
from wan_ds.models.weights import build_transformer
from wan_ds.training.adapters import Adapter
from wan_ds.training.ema import Ema
from wan_ds.training.loop import Loop

SETTINGS = AdapterSettings(
    rank=4, alpha=8.0, targets=["to_q", "to_out.0", "ffn.net.0.proj"], rank_pattern={"attn2.to_q": 3}
)


def model(expert: str, architecture: dict = tiny.ARCHITECTURE):
    built = build_transformer(architecture, None, seed=tiny.SEED, expert=expert, adapter=SETTINGS)
    with torch.no_grad():
        built.proj_out.weight.normal_(std=0.1, generator=streams.generator(tiny.SEED, "head", expert))
    return built.train()


def loop(decay: float | None = None, **options) -> Loop:
    """`tiny.loop` with adapters, and averages of them."""
    with mock.patch.object(tiny, "model", model):
        made = tiny.loop(precision=tiny.PRECISIONS["lora"], **options)
    for name, expert in made.experts.items():
        expert.adapter = Adapter(SETTINGS, {"expert": name, "base": "somewhere", "rank": "4", "alpha": "8"})
        expert.ema = None if decay is None else Ema(expert.engine, decay)
    return made


def write_base(folder: Path, typed: list[str], attention: torch.dtype = torch.float32) -> list[str]:
    """Bases with a head that is not zero, of the model that these overrides describe, and what names them.

    ``attention``: what the weights of its attention are stored in, all else in float32.
    """
    architecture = configure(parse([*typed, "run_dir=x"])).model.transformer
    named = []
    for number, name in enumerate(("high_noise", "low_noise")):
        built = randomised(build_transformer(architecture, None, seed=number), number, 0.1)
        (folder / name).mkdir(parents=True)
        state = {
            key: value.to(attention) if ".attn" in key and value.ndim == 2 else value
            for key, value in built.state_dict().items()
        }
        save_file(state, folder / name / "diffusion_pytorch_model.safetensors")
        named.append(f"model.experts.{name}.weights={folder / name}")
    return named
