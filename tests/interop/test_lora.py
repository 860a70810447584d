"""LoRA files in every dialect, read by diffusers and by a reader of alpha that is written here."""

import copy
import json
import logging
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.elsewhere import run_elsewhere
from tests.models.variants import ARCHITECTURES, IMAGE_TOKENS, randomised
from wan_ds.errors import CheckpointError
from wan_ds.interop import lora as lora_files
from wan_ds.interop import names
from wan_ds.interop.lora import (
    DIALECTS,
    Lora,
    file_name,
    linear_shapes,
    lora_of,
    plain_key,
    read,
    readme,
    refuse_swapped,
    refuse_unfit,
    to_comfyui,
    to_diffsynth,
    to_diffusers,
    to_kohya,
    to_videox_fun,
    write,
    write_file,
)
from wan_ds.models.adapter import AdapterSettings
from wan_ds.models.transformer import WanTransformer
from wan_ds.models.weights import build_transformer

METADATA = {
    "expert": "high_noise",
    "boundary": "0.875",
    "shift": "3.0",
    "base": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "rank": "4",
    "alpha": "16",
    "step": "700",
    "model": "wan2.2-t2v-a14b",
    "config": "0123456789abcdef",
}
# rank, alpha, rslora, ranks and alphas by the end of a module's name
SETTINGS = {
    "alpha over rank": (4, 16.0, False, {}, {}),
    "alpha is rank": (4, 4.0, False, {}, {}),
    "rslora": (3, 7.0, True, {}, {}),
    "by module": (4, 8.0, False, {"to_q": 2, "ffn.net.2": 5}, {"to_v": 1.5, "1.attn2.to_k": 6}),
    "rslora by module": (4, 8.0, True, {"to_k": 2, "to_out.0": 1}, {"to_v": 0.3}),
}


def model_of(variant: str, seed: int = 0) -> WanTransformer3DModel:
    return randomised(WanTransformer3DModel(**ARCHITECTURES[variant]), seed)


@pytest.fixture(scope="module")
def shapes() -> dict[str, dict[str, tuple[int, int]]]:
    return {name: linear_shapes(model_of(name).state_dict()) for name in ("t2v", "i2v")}


def by_ending(patterns: dict[str, float], module: str, default: float) -> float:
    return next((value for end, value in patterns.items() if module.endswith(end)), default)


def scale_of(setting: str, module: str) -> float:
    rank, alpha, rslora, ranks, alphas = SETTINGS[setting]
    rank, alpha = by_ending(ranks, module, rank), by_ending(alphas, module, alpha)
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def adapter(
    shapes: dict[str, tuple[int, int]],
    setting: str = "by module",
    modules: str = r"blocks\.",
    metadata: dict[str, str] = METADATA,
    seed: int = 7,
) -> Lora:
    """Random A and B for the modules whose names match."""
    rng = torch.Generator().manual_seed(seed)
    rank, alpha, rslora, ranks, alphas = SETTINGS[setting]
    tensors, chosen = {}, {}
    for module, (out_width, in_width) in shapes.items():
        if re.search(modules, module):
            r = by_ending(ranks, module, rank)
            tensors[f"{module}.lora_A.weight"] = torch.randn(r, in_width, generator=rng) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(out_width, r, generator=rng) * 0.1
            chosen[module] = by_ending(alphas, module, alpha)
    return lora_of(tensors, chosen, rslora=rslora, metadata=metadata)


def deltas(lora: Lora, setting: str) -> dict[str, torch.Tensor]:
    """scale * B @ A from the setting's numbers."""
    found = {}
    for module in lora.modules:
        a, b = (lora.tensors[f"{module}.lora_{part}.weight"].double() for part in "AB")
        found[module] = scale_of(setting, module) * (b @ a)
    return found


@torch.no_grad()
def merged(model: WanTransformer3DModel, changes: dict[str, torch.Tensor]) -> WanTransformer3DModel:
    model = copy.deepcopy(model)
    for module, delta in changes.items():
        model.get_submodule(module).weight += delta.float()
    return model


@torch.no_grad()
def velocity(model: WanTransformer3DModel, variant: str) -> torch.Tensor:
    settings = ARCHITECTURES[variant]
    rng = torch.Generator().manual_seed(3)
    inputs = {
        "hidden_states": torch.randn(1, settings["in_channels"], 2, 4, 6, generator=rng),
        "timestep": torch.tensor([900.0]),
        "encoder_hidden_states": torch.randn(1, 7, settings["text_dim"], generator=rng),
    }
    if variant in IMAGE_TOKENS:
        inputs["encoder_hidden_states_image"] = torch.randn(
            1, IMAGE_TOKENS[variant], settings["image_dim"], generator=rng
        )
    return model(**inputs, return_dict=False)[0]


def pipeline_of(variant: str, second: str | None = None) -> WanPipeline:
    two = None if second is None else model_of(second, 1)
    return WanPipeline(
        None, None, None, UniPCMultistepScheduler(), model_of(variant), two, boundary_ratio=0.875
    )


def same_velocity(found: torch.Tensor, expected: torch.Tensor, base: torch.Tensor) -> bool:
    """Equal but for the rounding of fp32 products in another order, and not what the base gives."""
    size = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * size)
    assert (expected - base).abs().max() > 1e-3 * size
    return True


def loaded_deltas(model: WanTransformer3DModel) -> dict[str, torch.Tensor]:
    """What PEFT adds to each weight under its adapter."""
    return {
        name: module.get_delta_weight(module.active_adapters[0]).detach()
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


# diffusers' own loader


@pytest.mark.parametrize("dialect", ["diffusers", "comfyui", "kohya"])
@pytest.mark.parametrize(("variant", "setting"), [*(("i2v", one) for one in SETTINGS), ("t2v", "by module")])
def test_diffusers_loads_what_was_written_at_its_strength(tmp_path, shapes, variant, dialect, setting):
    lora = adapter(shapes[variant], setting)
    path = write(lora, tmp_path, dialect, "mine")
    pipe = pipeline_of(variant)
    base = copy.deepcopy(pipe.transformer)
    pipe.load_lora_weights(tmp_path, weight_name=path.name)
    expected = merged(base, deltas(lora, setting))
    assert same_velocity(*(velocity(one, variant) for one in (pipe.transformer, expected, base)))


@pytest.mark.parametrize("dialect", ["diffusers", "comfyui", "kohya"])
def test_each_expert_gets_its_own_file(tmp_path, shapes, dialect):
    pipe = pipeline_of("t2v", "t2v")
    bases = {"high_noise": copy.deepcopy(pipe.transformer), "low_noise": copy.deepcopy(pipe.transformer_2)}
    loras = {}
    for seed, expert in enumerate(bases):
        loras[expert] = adapter(shapes["t2v"], "rslora", metadata=METADATA | {"expert": expert}, seed=seed)
        write(loras[expert], tmp_path, dialect, "mine")
    pipe.load_lora_weights(tmp_path, weight_name="mine-high_noise.safetensors")
    pipe.load_lora_weights(tmp_path, weight_name="mine-low_noise.safetensors", load_into_transformer_2=True)
    for expert, model in (("high_noise", pipe.transformer), ("low_noise", pipe.transformer_2)):
        expected = merged(bases[expert], deltas(loras[expert], "rslora"))
        assert same_velocity(*(velocity(one, "t2v") for one in (model, expected, bases[expert])))


@pytest.mark.parametrize(("dialect", "modules"), [
    ("diffusers", r"blocks\.1\.attn1\.to_[qv]$"),
    ("comfyui", r"blocks\.1\.attn1\.to_[qv]$"),
    ("kohya", r"blocks\.1\.attn1\.to_[qv]$"),
    ("diffusers", r"add_k_proj|attn2\.to_k"),
    ("comfyui", r"add_v_proj|attn2\.to_k"),
    ("kohya", r"add_k_proj"),
    ("diffusers", r"attn1.to_q|time_proj|text_embedder|proj_out"),
    ("comfyui", r"attn1.to_q|time_proj|text_embedder|image_embedder|proj_out"),
])  # fmt: skip
def test_diffusers_loads_a_subset_of_modules(tmp_path, shapes, dialect, modules):
    lora = adapter(shapes["i2v"], "by module", modules)
    path = write(lora, tmp_path, dialect, "mine", shapes["i2v"])
    pipe = pipeline_of("i2v")
    pipe.load_lora_weights(tmp_path, weight_name=path.name)
    expected = deltas(lora, "by module")
    for module, change in loaded_deltas(pipe.transformer).items():
        wanted = expected.pop(module, torch.zeros(()).expand(change.shape))
        torch.testing.assert_close(change, wanted.float(), rtol=1e-5, atol=1e-6)  # fp32 products
    assert not expected
    assert read(path).modules == lora.modules


@pytest.mark.parametrize("dialect", ["diffusers", "comfyui", "kohya"])
def test_an_adapter_for_text_loads_into_a_model_for_images(tmp_path, shapes, dialect):
    lora = adapter(shapes["i2v"], "rslora by module", r"blocks\..*(attn1|attn2\.to|ffn)")
    path = write(lora, tmp_path, dialect, "mine")
    pipe = pipeline_of("i2v")
    base = copy.deepcopy(pipe.transformer)
    pipe.load_lora_weights(tmp_path, weight_name=path.name)
    expected = merged(base, deltas(lora, "rslora by module"))
    assert same_velocity(*(velocity(one, "i2v") for one in (pipe.transformer, expected, base)))


# diffusers' own loader, where wan_ds cannot be imported

ELSEWHERE = """
import json, sys
sys.modules["wan_ds"] = None
import torch
from diffusers import WanPipeline

torch.set_num_threads(1)
given = torch.load("given.pt")
outputs = {}
for name, folder in json.load(open("cases.json")).items():
    pipeline = WanPipeline.from_pretrained("base", vae=None, text_encoder=None, tokenizer=None)
    pipeline.set_progress_bar_config(disable=True)
    if folder is not None:
        pipeline.load_lora_weights(folder, weight_name="mine-high_noise.safetensors")
        second = {"weight_name": "mine-low_noise.safetensors", "load_into_transformer_2": True}
        pipeline.load_lora_weights(folder, **second)
    experts = {"high_noise": pipeline.transformer, "low_noise": pipeline.transformer_2}
    with torch.no_grad():
        made = {expert: model(**given["velocity"])[0] for expert, model in experts.items()}
    outputs[name] = made | {"latents": pipeline(**given["sample"]).frames}
torch.save(outputs, "outputs.pt")
try:
    import wan_ds
except ImportError:
    sys.exit(0)
sys.exit("wan_ds was there")
"""
OPENED = ("diffusers", "comfyui", "kohya")  # by diffusers
# For each expert a setting; modules. kohya's files of the second are filled with zeros.
PAIRS = {
    "all modules": ({"high_noise": "by module", "low_noise": "rslora by module"}, r"blocks\."),
    "some modules": ({"high_noise": "rslora", "low_noise": "alpha over rank"}, r"attn1|ffn\.net\.0"),
}


def given_elsewhere() -> dict[str, dict]:
    """What the models and the pipeline are called with."""
    rng = torch.Generator().manual_seed(4)
    noise, text = (torch.randn(1, *shape, generator=rng) for shape in ((16, 2, 4, 6), (512, 32)))
    inputs = {"hidden_states": noise, "timestep": torch.tensor([900.0]), "encoder_hidden_states": text}
    sizes = {"num_frames": 5, "height": 32, "width": 48, "num_inference_steps": 3, "guidance_scale": 1.0}
    return {
        "velocity": inputs | {"return_dict": False},
        "sample": sizes | {"prompt_embeds": text, "latents": noise, "output_type": "latent"},
    }


def two_experts(models: dict[str, WanTransformer3DModel]) -> WanPipeline:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return WanPipeline(None, None, None, scheduler, *models.values(), boundary_ratio=0.875)


def ours_with(lora: Lora, base: WanTransformer3DModel, setting: str) -> WanTransformer:
    """The adapter as it trains in a run: on our model, by PEFT, from settings."""
    rank, alpha, rslora, ranks, alphas = SETTINGS[setting]
    settings = AdapterSettings(rank, alpha, lora.modules, rslora, rank_pattern=ranks, alpha_pattern=alphas)
    state = base.state_dict()
    source = SimpleNamespace(where="here", tensors=state, read=lambda names: {n: state[n] for n in names})
    return build_transformer(ARCHITECTURES["t2v"], source, adapter=settings, init_from=lora).eval()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory, shapes):
    """Adapters by case and expert, their bases, and what diffusers made of their files in another process."""
    root = tmp_path_factory.mktemp("elsewhere")
    bases = {expert: model_of("t2v", seed) for seed, expert in enumerate(("high_noise", "low_noise"))}
    two_experts(bases).save_pretrained(root / "base")
    adapters, cases = {}, {"base": None}
    for case, (settings, modules) in PAIRS.items():
        adapters[case] = {
            expert: adapter(shapes["t2v"], setting, modules, METADATA | {"expert": expert}, seed)
            for seed, (expert, setting) in enumerate(settings.items())
        }
        for dialect in OPENED:
            cases[f"{case}, {dialect}"] = folder = str(root / case / dialect)
            for lora in adapters[case].values():
                write(lora, folder, dialect, "mine", shapes["t2v"])
    (root / "cases.json").write_text(json.dumps(cases))
    torch.save(given_elsewhere(), root / "given.pt")
    run_elsewhere(ELSEWHERE, root)
    return adapters, bases, torch.load(root / "outputs.pt")


@pytest.mark.parametrize("case", PAIRS)
def test_elsewhere_every_dialect_of_diffusers_gives_what_our_model_gives(elsewhere, case):
    """diffusers opens no file of DiffSynth or VideoX-Fun, whose readers' formulas are compared below."""
    adapters, bases, outputs = elsewhere
    settings, _ = PAIRS[case]
    ours = {
        expert: ours_with(lora, bases[expert], settings[expert]) for expert, lora in adapters[case].items()
    }
    given, pipeline = given_elsewhere(), two_experts(ours)
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        expected = {expert: model(**given["velocity"])[0] for expert, model in ours.items()}
    expected["latents"] = pipeline(**given["sample"]).frames
    for dialect in OPENED:
        for output, theirs in outputs[f"{case}, {dialect}"].items():
            size = expected[output].abs().max().item()
            off, change = (
                (one - expected[output]).abs().max().item() / size
                for one in (theirs, outputs["base"][output])
            )
            print(f"{case}, {dialect}, {output}: {off:.1e} off, the base {change:.1e}")  # noqa: T201
            assert off <= 1e-5 and change > 0.01


# Readers of alpha


def read_by_alpha(path: Path, variant: str, prefix: str, sep: str) -> dict[str, torch.Tensor]:
    """What ComfyUI, musubi, VideoX-Fun and DiffSynth add to each weight, by its name in diffusers.

    They go over the model's weights (original names) and look for keys made of each name.
    """
    tensors, found = load_file(path), {}
    for name, original in names.original_transformer_names(model_of(variant).state_dict()).items():
        key = prefix + original.removesuffix(".weight").replace(".", sep)
        pair = [
            [
                tensors.pop(f"{key}.{part}{adapter}.weight", None)
                for part in parts
                for adapter in ("", ".default")
            ]
            for parts in (("lora_A", "lora_down"), ("lora_B", "lora_up"))
        ]
        a, b = (next((one for one in some if one is not None), None) for some in pair)
        if a is None:
            continue
        alpha = tensors.pop(f"{key}.alpha", None)
        scale = 1.0 if alpha is None else alpha.item() / b.shape[1]
        found[name.removesuffix(".weight")] = scale * (b.double() @ a.double())
    assert not tensors, "keys that nobody asked for"
    return found


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("dialect", "prefix", "sep"), [
    ("comfyui", "diffusion_model.", "."),
    ("kohya", "lora_unet_", "_"),
    ("videox_fun", "lora_unet__", "_"),
    ("diffsynth", "", "."),
])  # fmt: skip
def test_a_reader_that_knows_alpha_alone_finds_the_same_update(
    tmp_path, shapes, dialect, prefix, sep, setting
):
    lora = adapter(shapes["i2v"], setting, r"blocks\.")
    found = read_by_alpha(write(lora, tmp_path, dialect, "mine"), "i2v", prefix, sep)
    expected = deltas(lora, setting)
    assert set(found) == set(expected)
    for module, delta in expected.items():
        size = delta.abs().max().item()
        torch.testing.assert_close(found[module], delta, rtol=0, atol=3e-7 * size)  # B and alpha in fp32
        torch.testing.assert_close(lora.delta(module).double(), delta, rtol=1e-5, atol=1e-7)  # fp32 products


BLOCK_GOLDEN = {
    "diffusers": [
        "transformer.blocks.1.attn1.to_k.lora_A.weight",
        "transformer.blocks.1.attn1.to_k.lora_B.weight",
        "transformer.blocks.1.attn1.to_out.0.lora_A.weight",
        "transformer.blocks.1.attn1.to_out.0.lora_B.weight",
        "transformer.blocks.1.attn1.to_q.lora_A.weight",
        "transformer.blocks.1.attn1.to_q.lora_B.weight",
        "transformer.blocks.1.attn1.to_v.lora_A.weight",
        "transformer.blocks.1.attn1.to_v.lora_B.weight",
        "transformer.blocks.1.attn2.add_k_proj.lora_A.weight",
        "transformer.blocks.1.attn2.add_k_proj.lora_B.weight",
        "transformer.blocks.1.attn2.add_v_proj.lora_A.weight",
        "transformer.blocks.1.attn2.add_v_proj.lora_B.weight",
        "transformer.blocks.1.attn2.to_k.lora_A.weight",
        "transformer.blocks.1.attn2.to_k.lora_B.weight",
        "transformer.blocks.1.attn2.to_out.0.lora_A.weight",
        "transformer.blocks.1.attn2.to_out.0.lora_B.weight",
        "transformer.blocks.1.attn2.to_q.lora_A.weight",
        "transformer.blocks.1.attn2.to_q.lora_B.weight",
        "transformer.blocks.1.attn2.to_v.lora_A.weight",
        "transformer.blocks.1.attn2.to_v.lora_B.weight",
        "transformer.blocks.1.ffn.net.0.proj.lora_A.weight",
        "transformer.blocks.1.ffn.net.0.proj.lora_B.weight",
        "transformer.blocks.1.ffn.net.2.lora_A.weight",
        "transformer.blocks.1.ffn.net.2.lora_B.weight",
    ],
    "comfyui": [
        "diffusion_model.blocks.1.cross_attn.k.alpha",
        "diffusion_model.blocks.1.cross_attn.k.lora_A.weight",
        "diffusion_model.blocks.1.cross_attn.k.lora_B.weight",
        "diffusion_model.blocks.1.cross_attn.k_img.alpha",
        "diffusion_model.blocks.1.cross_attn.k_img.lora_A.weight",
        "diffusion_model.blocks.1.cross_attn.k_img.lora_B.weight",
        "diffusion_model.blocks.1.cross_attn.o.alpha",
        "diffusion_model.blocks.1.cross_attn.o.lora_A.weight",
        "diffusion_model.blocks.1.cross_attn.o.lora_B.weight",
        "diffusion_model.blocks.1.cross_attn.q.alpha",
        "diffusion_model.blocks.1.cross_attn.q.lora_A.weight",
        "diffusion_model.blocks.1.cross_attn.q.lora_B.weight",
        "diffusion_model.blocks.1.cross_attn.v.alpha",
        "diffusion_model.blocks.1.cross_attn.v.lora_A.weight",
        "diffusion_model.blocks.1.cross_attn.v.lora_B.weight",
        "diffusion_model.blocks.1.cross_attn.v_img.alpha",
        "diffusion_model.blocks.1.cross_attn.v_img.lora_A.weight",
        "diffusion_model.blocks.1.cross_attn.v_img.lora_B.weight",
        "diffusion_model.blocks.1.ffn.0.alpha",
        "diffusion_model.blocks.1.ffn.0.lora_A.weight",
        "diffusion_model.blocks.1.ffn.0.lora_B.weight",
        "diffusion_model.blocks.1.ffn.2.alpha",
        "diffusion_model.blocks.1.ffn.2.lora_A.weight",
        "diffusion_model.blocks.1.ffn.2.lora_B.weight",
        "diffusion_model.blocks.1.self_attn.k.alpha",
        "diffusion_model.blocks.1.self_attn.k.lora_A.weight",
        "diffusion_model.blocks.1.self_attn.k.lora_B.weight",
        "diffusion_model.blocks.1.self_attn.o.alpha",
        "diffusion_model.blocks.1.self_attn.o.lora_A.weight",
        "diffusion_model.blocks.1.self_attn.o.lora_B.weight",
        "diffusion_model.blocks.1.self_attn.q.alpha",
        "diffusion_model.blocks.1.self_attn.q.lora_A.weight",
        "diffusion_model.blocks.1.self_attn.q.lora_B.weight",
        "diffusion_model.blocks.1.self_attn.v.alpha",
        "diffusion_model.blocks.1.self_attn.v.lora_A.weight",
        "diffusion_model.blocks.1.self_attn.v.lora_B.weight",
    ],
    "kohya": [
        "lora_unet_blocks_1_cross_attn_k.alpha",
        "lora_unet_blocks_1_cross_attn_k.lora_down.weight",
        "lora_unet_blocks_1_cross_attn_k.lora_up.weight",
        "lora_unet_blocks_1_cross_attn_k_img.alpha",
        "lora_unet_blocks_1_cross_attn_k_img.lora_down.weight",
        "lora_unet_blocks_1_cross_attn_k_img.lora_up.weight",
        "lora_unet_blocks_1_cross_attn_o.alpha",
        "lora_unet_blocks_1_cross_attn_o.lora_down.weight",
        "lora_unet_blocks_1_cross_attn_o.lora_up.weight",
        "lora_unet_blocks_1_cross_attn_q.alpha",
        "lora_unet_blocks_1_cross_attn_q.lora_down.weight",
        "lora_unet_blocks_1_cross_attn_q.lora_up.weight",
        "lora_unet_blocks_1_cross_attn_v.alpha",
        "lora_unet_blocks_1_cross_attn_v.lora_down.weight",
        "lora_unet_blocks_1_cross_attn_v.lora_up.weight",
        "lora_unet_blocks_1_cross_attn_v_img.alpha",
        "lora_unet_blocks_1_cross_attn_v_img.lora_down.weight",
        "lora_unet_blocks_1_cross_attn_v_img.lora_up.weight",
        "lora_unet_blocks_1_ffn_0.alpha",
        "lora_unet_blocks_1_ffn_0.lora_down.weight",
        "lora_unet_blocks_1_ffn_0.lora_up.weight",
        "lora_unet_blocks_1_ffn_2.alpha",
        "lora_unet_blocks_1_ffn_2.lora_down.weight",
        "lora_unet_blocks_1_ffn_2.lora_up.weight",
        "lora_unet_blocks_1_self_attn_k.alpha",
        "lora_unet_blocks_1_self_attn_k.lora_down.weight",
        "lora_unet_blocks_1_self_attn_k.lora_up.weight",
        "lora_unet_blocks_1_self_attn_o.alpha",
        "lora_unet_blocks_1_self_attn_o.lora_down.weight",
        "lora_unet_blocks_1_self_attn_o.lora_up.weight",
        "lora_unet_blocks_1_self_attn_q.alpha",
        "lora_unet_blocks_1_self_attn_q.lora_down.weight",
        "lora_unet_blocks_1_self_attn_q.lora_up.weight",
        "lora_unet_blocks_1_self_attn_v.alpha",
        "lora_unet_blocks_1_self_attn_v.lora_down.weight",
        "lora_unet_blocks_1_self_attn_v.lora_up.weight",
    ],
    "diffsynth": [
        "blocks.1.cross_attn.k.lora_A.default.weight",
        "blocks.1.cross_attn.k.lora_B.default.weight",
        "blocks.1.cross_attn.k_img.lora_A.default.weight",
        "blocks.1.cross_attn.k_img.lora_B.default.weight",
        "blocks.1.cross_attn.o.lora_A.default.weight",
        "blocks.1.cross_attn.o.lora_B.default.weight",
        "blocks.1.cross_attn.q.lora_A.default.weight",
        "blocks.1.cross_attn.q.lora_B.default.weight",
        "blocks.1.cross_attn.v.lora_A.default.weight",
        "blocks.1.cross_attn.v.lora_B.default.weight",
        "blocks.1.cross_attn.v_img.lora_A.default.weight",
        "blocks.1.cross_attn.v_img.lora_B.default.weight",
        "blocks.1.ffn.0.lora_A.default.weight",
        "blocks.1.ffn.0.lora_B.default.weight",
        "blocks.1.ffn.2.lora_A.default.weight",
        "blocks.1.ffn.2.lora_B.default.weight",
        "blocks.1.self_attn.k.lora_A.default.weight",
        "blocks.1.self_attn.k.lora_B.default.weight",
        "blocks.1.self_attn.o.lora_A.default.weight",
        "blocks.1.self_attn.o.lora_B.default.weight",
        "blocks.1.self_attn.q.lora_A.default.weight",
        "blocks.1.self_attn.q.lora_B.default.weight",
        "blocks.1.self_attn.v.lora_A.default.weight",
        "blocks.1.self_attn.v.lora_B.default.weight",
    ],
    "videox_fun": [
        "lora_unet__blocks_1_cross_attn_k.alpha",
        "lora_unet__blocks_1_cross_attn_k.lora_down.weight",
        "lora_unet__blocks_1_cross_attn_k.lora_up.weight",
        "lora_unet__blocks_1_cross_attn_k_img.alpha",
        "lora_unet__blocks_1_cross_attn_k_img.lora_down.weight",
        "lora_unet__blocks_1_cross_attn_k_img.lora_up.weight",
        "lora_unet__blocks_1_cross_attn_o.alpha",
        "lora_unet__blocks_1_cross_attn_o.lora_down.weight",
        "lora_unet__blocks_1_cross_attn_o.lora_up.weight",
        "lora_unet__blocks_1_cross_attn_q.alpha",
        "lora_unet__blocks_1_cross_attn_q.lora_down.weight",
        "lora_unet__blocks_1_cross_attn_q.lora_up.weight",
        "lora_unet__blocks_1_cross_attn_v.alpha",
        "lora_unet__blocks_1_cross_attn_v.lora_down.weight",
        "lora_unet__blocks_1_cross_attn_v.lora_up.weight",
        "lora_unet__blocks_1_cross_attn_v_img.alpha",
        "lora_unet__blocks_1_cross_attn_v_img.lora_down.weight",
        "lora_unet__blocks_1_cross_attn_v_img.lora_up.weight",
        "lora_unet__blocks_1_ffn_0.alpha",
        "lora_unet__blocks_1_ffn_0.lora_down.weight",
        "lora_unet__blocks_1_ffn_0.lora_up.weight",
        "lora_unet__blocks_1_ffn_2.alpha",
        "lora_unet__blocks_1_ffn_2.lora_down.weight",
        "lora_unet__blocks_1_ffn_2.lora_up.weight",
        "lora_unet__blocks_1_self_attn_k.alpha",
        "lora_unet__blocks_1_self_attn_k.lora_down.weight",
        "lora_unet__blocks_1_self_attn_k.lora_up.weight",
        "lora_unet__blocks_1_self_attn_o.alpha",
        "lora_unet__blocks_1_self_attn_o.lora_down.weight",
        "lora_unet__blocks_1_self_attn_o.lora_up.weight",
        "lora_unet__blocks_1_self_attn_q.alpha",
        "lora_unet__blocks_1_self_attn_q.lora_down.weight",
        "lora_unet__blocks_1_self_attn_q.lora_up.weight",
        "lora_unet__blocks_1_self_attn_v.alpha",
        "lora_unet__blocks_1_self_attn_v.lora_down.weight",
        "lora_unet__blocks_1_self_attn_v.lora_up.weight",
    ],
}  # fmt: skip


def test_the_keys_of_a_block_are_what_they_are(shapes):
    lora = adapter(shapes["i2v"], "alpha over rank")
    written = {
        "diffusers": to_diffusers(lora),
        "comfyui": to_comfyui(lora),
        "kohya": to_kohya(lora),
        "diffsynth": to_diffsynth(lora),
        "videox_fun": to_videox_fun(lora),
    }
    assert set(written) == set(DIALECTS)
    for dialect, (tensors, _) in written.items():
        assert [key for key in tensors if re.search(r"blocks[._]1[._]", key)] == BLOCK_GOLDEN[dialect]
        assert len(tensors) == 2 * len(BLOCK_GOLDEN[dialect])  # two blocks and nothing else


def test_comfyuis_files_say_alpha_where_the_scale_is_not_one(shapes):
    assert not [key for key in to_comfyui(adapter(shapes["t2v"], "alpha is rank"))[0] if "alpha" in key]
    tensors, _ = to_comfyui(adapter(shapes["t2v"], "rslora"))
    assert tensors["diffusion_model.blocks.0.ffn.0.alpha"].item() == pytest.approx(7 * math.sqrt(3), rel=1e-7)


# There and back


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_written_read_and_written_again_is_the_same_file(tmp_path, shapes, dialect, setting):
    lora = adapter(shapes["t2v"], setting, r"attn1|ffn.net.0")
    first = write(lora, tmp_path / "first", dialect, "mine", shapes["t2v"])
    again = write(read(first), tmp_path / "again", dialect, "mine", shapes["t2v"])
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_reading_gives_the_adapter_that_was_written(tmp_path, shapes, dialect, setting):
    lora = adapter(shapes["t2v"], setting, r"attn1|ffn.net.0")
    found = read(write(lora, tmp_path, dialect, "mine", shapes["t2v"]))
    assert found.modules == lora.modules
    if dialect != "diffsynth":  # whose B has the scale in it
        assert found.alphas == lora.alphas
        assert found.rslora == lora.rslora
        assert all(torch.equal(found.tensors[key], tensor) for key, tensor in lora.tensors.items())
    for module, delta in deltas(lora, setting).items():
        torch.testing.assert_close(found.delta(module).double(), delta, rtol=1e-5, atol=1e-7)  # fp32 products
    assert {key: found.metadata[key] for key in METADATA} == METADATA


def test_through_all_dialects_in_turn_the_update_stays(tmp_path, shapes):
    first = lora = adapter(shapes["i2v"], "rslora by module", r"attn2")
    order = ("comfyui", "kohya", "diffusers", "videox_fun", "diffsynth", "kohya", "comfyui", "diffusers")
    for number, dialect in enumerate(order):
        lora = read(write(lora, tmp_path, dialect, str(number), shapes["i2v"]))
    for module, delta in deltas(first, "rslora by module").items():
        torch.testing.assert_close(lora.delta(module).double(), delta, rtol=1e-5, atol=1e-7)
    assert {key: lora.metadata[key] for key in METADATA} == METADATA


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_header_says_how_the_adapter_was_made(tmp_path, shapes, dialect):
    path = write(adapter(shapes["t2v"], "alpha over rank"), tmp_path, dialect, "mine")
    assert path.name == "mine-high_noise.safetensors"
    with safe_open(path, "pt") as file:
        said = file.metadata()
    assert said.items() >= METADATA.items()
    assert (said["dialect"], said["rslora"], said["format"]) == (dialect, "false", "pt")
    assert ("lora_B" in said["scale"]) == (dialect == "diffsynth")


def test_without_metadata_the_header_still_says_rank_and_alpha(shapes):
    _, said = to_comfyui(adapter(shapes["t2v"], "by module", metadata={}))
    assert (said["rank"], said["alpha"], said["rslora"]) == ("4", "8", "false")
    assert file_name("mine", "all") == "mine.safetensors"


def test_kohyas_zeros_are_told_and_taken_out_again(tmp_path, shapes):
    lora = adapter(shapes["t2v"], "rslora", r"blocks\.1\.attn1\.to_q")
    with pytest.raises(CheckpointError, match="1 of 20.*filled with zeros.*comfyui"):
        to_kohya(lora)
    tensors, said = to_kohya(lora, shapes["t2v"])
    assert len(tensors) == 3 * 20
    assert len(said["zero_filled"].split()) == 19
    assert not tensors["lora_unet_blocks_0_ffn_0.lora_down.weight"].any()
    path = write(lora, tmp_path, "kohya", "mine", shapes["t2v"])
    assert read(path).modules == ["blocks.1.attn1.to_q"]
    tensors["lora_unet_blocks_0_ffn_0.lora_up.weight"] += 1  # somebody trained on
    save_file(tensors, path, said)
    assert read(path).modules == ["blocks.0.ffn.net.0.proj", "blocks.1.attn1.to_q"]
    with pytest.raises(CheckpointError, match=r"blocks alone, not proj_out.*comfyui"):
        to_kohya(adapter(shapes["t2v"], "rslora", "proj_out"), shapes["t2v"])


# Files of others


def test_pefts_own_folder_is_read_with_its_patterns(tmp_path):
    model = model_of("t2v")
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["to_q", "to_out.0", "ffn.net.2"],
        rank_pattern={"attn1.to_q": 2, r"blocks\.1\..*to_out.0": 3},
        alpha_pattern={"ffn.net.2": 1},
        init_lora_weights=False,
    )
    wrapped = get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path)
    lora = read(tmp_path)
    assert lora.rslora
    assert len(lora.modules) == 10
    for module in lora.modules:
        theirs = model.get_submodule(module).get_delta_weight("default")
        torch.testing.assert_close(lora.delta(module), theirs)
    assert read(tmp_path / "adapter_model.safetensors").alphas == lora.alphas
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"r": 5}))
    with pytest.raises(CheckpointError, match="blocks.0.attn1.to_out.0 has rank 4, not 5"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(CheckpointError, match="DoRA"):
        read(tmp_path)


def test_what_diffusers_saves_is_read(tmp_path):
    model = model_of("t2v")
    model.add_adapter(
        LoraConfig(
            r=4,
            lora_alpha=10,
            target_modules=["to_v"],
            alpha_pattern={"attn2.to_v": 3},
            init_lora_weights=False,
        )
    )
    WanPipeline.save_lora_weights(
        tmp_path,
        get_peft_model_state_dict(model),
        transformer_lora_adapter_metadata=model.peft_config["default"].to_dict(),
    )
    lora = read(tmp_path)
    for module in lora.modules:
        theirs = model.get_submodule(module).get_delta_weight("default")
        torch.testing.assert_close(lora.delta(module), theirs)
    assert len(lora.modules) == 4


@pytest.mark.parametrize("key", [
    "transformer.blocks.0.attn1.to_q.lora_{}.weight",
    "base_model.model.blocks.0.attn1.to_q.lora_{}.default.weight",
    "base_model.model.blocks.0.self_attn.q.lora_{}.weight",
    "blocks.0.attn1.to_q.lora_{}.weight",
    "module._orig_mod.blocks.0._checkpoint_wrapped_module.self_attn.q.lora_{}.default.weight",
    "diffusion_model.blocks.0.self_attn.q.lora_{}.weight",
    "model.diffusion_model.blocks.0.self_attn.q.lora_{}.weight",
])  # fmt: skip
def test_an_absent_alpha_is_the_rank(tmp_path, key):
    a, b = torch.randn(3, 48), torch.randn(48, 3)
    save_file({key.format("A"): a.half(), key.format("B"): b.half()}, tmp_path / "mine.safetensors")
    lora = read(tmp_path)
    assert lora.modules == ["blocks.0.attn1.to_q"]
    torch.testing.assert_close(lora.delta("blocks.0.attn1.to_q"), b.half().float() @ a.half().float())


@pytest.mark.parametrize(
    "prefix", ["diffusion_model.blocks.0.ffn.0", "lora_unet_blocks_0_ffn_0", "lora_unet__blocks_0_ffn_0"]
)
def test_down_up_and_a_stored_alpha_are_read(tmp_path, prefix):
    a, b = torch.randn(4, 48), torch.randn(64, 4)
    tensors = {
        f"{prefix}.lora_down.weight": a,
        f"{prefix}.lora_up.weight": b,
        f"{prefix}.alpha": torch.tensor(1.0),
    }
    torch.save(tensors, tmp_path / "mine.pt")
    torch.testing.assert_close(read(tmp_path / "mine.pt").delta("blocks.0.ffn.net.0.proj"), 0.25 * b @ a)


@pytest.mark.parametrize(("key", "plain"), [
    ("base_model.model.blocks.0.attn1.to_q.lora_A.default.weight", "blocks.0.attn1.to_q.lora_A.weight"),
    ("base_model.model.base_model.model.x.lora_B.my_style.weight", "x.lora_B.weight"),
    ("module.blocks.0.ffn.net.2.lora_B.weight", "blocks.0.ffn.net.2.lora_B.weight"),
    ("_orig_mod.module.blocks.0._orig_mod.ffn.0.lora_A.default.weight", "blocks.0.ffn.0.lora_A.weight"),
    ("transformer._orig_mod.blocks.3.ffn.0.lora_B.weight", "transformer.blocks.3.ffn.0.lora_B.weight"),
    ("blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.ffn.0.alpha", "blocks.0.ffn.0.alpha"),
    ("lora_unet__orig_mod_blocks_0_ffn_0.alpha", "lora_unet_blocks_0_ffn_0.alpha"),
    ("lora_unet_blocks_0__orig_mod_ffn_0.lora_up.weight", "lora_unet_blocks_0_ffn_0.lora_up.weight"),
    ("lora_unet__blocks_0_ffn_0.alpha", "lora_unet__blocks_0_ffn_0.alpha"),
    ("blocks.0.attn1.to_q.base_layer.weight", "blocks.0.attn1.to_q.weight"),
    ("diffusion_model.blocks.0.ffn.0.lora_A.weight", "diffusion_model.blocks.0.ffn.0.lora_A.weight"),
])  # fmt: skip
def test_what_wrappers_add_to_a_key_is_taken_off(key, plain):
    assert plain_key(key) == plain == plain_key(plain)


# What is refused

A, B = torch.ones(2, 48), torch.ones(48, 2)
KEY = "diffusion_model.blocks.0.self_attn.q"
PAIR = {f"{KEY}.lora_A.weight": A, f"{KEY}.lora_B.weight": B}


@pytest.mark.parametrize(("tensors", "message"), [
    ({"unet.down.0.lora_A.weight": A}, r"1 of 1 keys.*unet.down.0.lora_A.weight.*diffusers \(transformer\."),
    ({"blocks.0.self_attn.q.weight": A}, "1 of 1 keys"),
    (PAIR | {f"{KEY}.dora_scale": A}, r"DoRA.*dora_scale"),
    (PAIR | {f"{KEY}.lora_magnitude_vector.weight": A}, "DoRA"),
    ({f"{KEY}.lokr_w1": A, f"{KEY}.lokr_w2": B}, r"LyCORIS.*lokr_w1"),
    ({f"{KEY}.hada_w1_a": A}, "LyCORIS"),
    (PAIR | {f"{KEY}.diff_b": A}, "whole weights or of biases"),
    (PAIR | {f"{KEY}.lora_B.bias": A}, "whole weights or of biases"),
    (PAIR | {"lora_te1_x.lora_down.weight": A}, "text encoder"),
    ({"diffusion_model.transformer_1.blocks.0.ffn.0.lora_A.weight": A}, "both experts in one file"),
    (PAIR | {"blocks.0.self_attn.k.lora_A.weight": A}, "diffsynth .* and comfyui"),
    (PAIR | {f"{KEY}.lora_A.second.weight": A}, "mean one tensor"),
    ({f"{KEY}.lora_A.weight": A}, "blocks.0.attn1.to_q has no lora_B"),
    ({f"{KEY}.lora_B.weight": B}, "blocks.0.attn1.to_q has no lora_A"),
    (PAIR | {"diffusion_model.blocks.0.ffn.0.alpha": A[0, 0]}, r"alpha without A and B.*ffn\.0\.alpha"),
    (PAIR | {f"{KEY}.lora_B.weight": B[:, :1]}, r"\(2, 48\) and B \(48, 1\)"),
    (PAIR | {f"{KEY}.lora_A.weight": torch.empty(0)}, r"\(0,\).*empty, as ZeRO-3"),
    (PAIR | {f"{KEY}.lora_A.weight": torch.full((2, 48), math.nan)}, "NaN or infinity"),
    (PAIR | {f"{KEY}.lora_A.weight": A.int()}, "not floating point"),
    (PAIR | {f"{KEY}.alpha": torch.tensor(0.0)}, "alpha 0.0"),
    (PAIR | {f"{KEY}.alpha": torch.tensor(math.inf)}, "alpha inf"),
    (PAIR | {f"{KEY}.alpha": torch.ones(2)}, "an alpha is one number"),
])  # fmt: skip
def test_a_file_that_is_no_whole_lora_is_refused_in_a_sentence(tmp_path, tensors, message):
    path = tmp_path / "mine.safetensors"
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, path)
    with pytest.raises(CheckpointError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("settings", ["[]", "no json", '{"transformer.lora_alpha": "much"}'])
def test_settings_that_are_none_are_refused(tmp_path, settings):
    tensors = {
        "transformer.blocks.0.attn1.to_q.lora_A.weight": A,
        "transformer.blocks.0.attn1.to_q.lora_B.weight": B,
    }
    save_file(tensors, tmp_path / "mine.safetensors", {"lora_adapter_metadata": settings})
    with pytest.raises(CheckpointError, match="mine.safetensors"):
        read(tmp_path)


def test_a_folder_must_hold_one_adapter(tmp_path, shapes):
    with pytest.raises(CheckpointError, match="holds no adapter"):
        read(tmp_path)
    for expert in ("high_noise", "low_noise"):
        write(adapter(shapes["t2v"], metadata={"expert": expert}), tmp_path, "comfyui", "mine")
    with pytest.raises(
        CheckpointError, match="mine-high_noise.safetensors, mine-low_noise.safetensors; name"
    ):
        read(tmp_path)


def test_an_adapter_of_another_architecture_is_refused_with_both_sides(shapes):
    lora = adapter(shapes["i2v"], modules=r"blocks\.1\..*(add_k_proj|ffn.net.2)")
    refuse_unfit(lora, shapes["i2v"])
    other = linear_shapes(WanTransformer3DModel(**ARCHITECTURES["t2v"] | {"ffn_dim": 80}).state_dict())
    with pytest.raises(CheckpointError) as error:
        refuse_unfit(lora, other)
    assert "blocks.1.attn2.add_k_proj (48, 48) is not in the model" in str(error.value)
    assert "blocks.1.ffn.net.2 is for a weight of (48, 64), the model's has (48, 80)" in str(error.value)
    assert METADATA["base"] in str(error.value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_swapped_files_are_refused(tmp_path, shapes, dialect):
    path = write(adapter(shapes["t2v"]), tmp_path, dialect, "mine")
    path = path.rename(tmp_path / "mine-low_noise.safetensors")  # a name does not make it another
    refuse_swapped(read(path), "high_noise")
    with pytest.raises(CheckpointError, match="for the expert high_noise, by its metadata.*into low_noise"):
        refuse_swapped(read(path), "low_noise")


@pytest.mark.parametrize(
    "name", ["style_HighNoise.safetensors", "high_noise/lora.safetensors", "x-high-noise-5.pt"]
)
def test_without_metadata_the_name_says_the_expert(name):
    lora = lora_of({f"blocks.0.attn1.to_q.lora_{k}.weight": v for k, v in zip("AB", (A, B), strict=True)},
                   {"blocks.0.attn1.to_q": 2.0}, where=name)  # fmt: skip
    refuse_swapped(lora, "high_noise")
    with pytest.raises(CheckpointError, match="by its name"):
        refuse_swapped(lora, "low_noise")


@pytest.mark.parametrize(("name", "said", "expert"), [
    ("style.safetensors", {}, "low_noise"),
    ("high_noise_and_low_noise.safetensors", {}, "low_noise"),
    ("style.safetensors", {"expert": "all"}, "high_noise"),
    ("style.safetensors", {"expert": "low_noise"}, "all"),
])  # fmt: skip
def test_a_file_that_may_be_of_the_expert_is_taken_with_a_warning(caplog, shapes, name, said, expert):
    lora = adapter(shapes["t2v"], metadata=said)
    lora.where = name
    with caplog.at_level(logging.WARNING, "wan_ds"):
        refuse_swapped(lora, expert)
    assert len(caplog.messages) == 1
    assert name in caplog.messages[0]


# Writing


def test_a_write_that_fails_leaves_the_old_file(tmp_path, shapes, monkeypatch):
    path = write(adapter(shapes["t2v"]), tmp_path, "diffusers", "mine")
    old = path.read_bytes()
    new = adapter(shapes["t2v"], seed=8)
    with monkeypatch.context() as patch:
        honest = lora_files.read_spans
        patch.setattr(lora_files, "read_spans", lambda spans: {k: v + 1 for k, v in honest(spans).items()})
        with pytest.raises(CheckpointError, match="reads back changed"):
            write_file(new, path, "diffusers")
    with monkeypatch.context() as patch:
        patch.setattr(lora_files, "read_spans", lambda spans: {})
        with pytest.raises(CheckpointError, match="other keys"):
            write_file(new, path, "diffusers")
    new.tensors["blocks.0.attn1.to_q.lora_A.weight"] = torch.empty(0)
    with pytest.raises(CheckpointError, match="empty, as ZeRO-3"):
        write_file(new, path, "diffusers")
    with pytest.raises(CheckpointError, match="no tensor of an adapter"):
        write_file(Lora({}, {}, {}), path, "diffusers")
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(CheckpointError, match="'patch_embedding' is no linear layer"):
        lora_of({"patch_embedding.lora_A.weight": A, "patch_embedding.lora_B.weight": B}, {})
    with pytest.raises(ValueError, match="dialect=onnx: there are diffusers"):
        write_file(new, path, "onnx")


# The README of an export


def test_the_readmes_lines_load_both_experts(tmp_path, shapes, monkeypatch):
    pipe = pipeline_of("t2v", "t2v")
    bases = {"high_noise": copy.deepcopy(pipe.transformer), "low_noise": copy.deepcopy(pipe.transformer_2)}
    loras, files = {}, {"diffusers": {}, "comfyui": {}, "diffsynth": {}}
    for seed, expert in enumerate(bases):
        loras[expert] = adapter(shapes["t2v"], "rslora", metadata=METADATA | {"expert": expert}, seed=seed)
        for dialect in files:
            path = write(loras[expert], tmp_path / dialect, dialect, "mine")
            files[dialect][expert] = path.relative_to(tmp_path).as_posix()
    text = readme(loras, files)
    for said in (
        "wan2.2-t2v-a14b",
        METADATA["base"],
        "| high_noise | 3 | 7 (alpha / sqrt(rank)) | 700 | 20 |",
    ):
        assert said in text
    assert "`comfyui/mine-low_noise.safetensors`: into ComfyUI's `models/loras`" in text
    assert "diffsynth: diffsynth/mine-high_noise.safetensors" in text

    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", lambda base, **_: pipe)
    exec(code, {})
    for expert, model in (("high_noise", pipe.transformer), ("low_noise", pipe.transformer_2)):
        expected = merged(bases[expert], deltas(loras[expert], "rslora"))
        assert same_velocity(*(velocity(one, "t2v") for one in (model, expected, bases[expert])))


def test_the_readme_says_what_a_dialect_is_not_for(shapes):
    text = readme({"all": adapter(shapes["t2v"], metadata={})}, {"videox_fun": {"all": "mine.safetensors"}})
    assert text.count("export once more") == 2
    assert "videox_fun: mine.safetensors" in text
