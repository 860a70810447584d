"""What a run exports opens where wan_ds is not, and is the same model there."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from tests.elsewhere import run_elsewhere
from tests.models.variants import randomised
from tests.network import no_network
from tests.training import sharded
from tests.world import World
from wan_ds import export, streams
from wan_ds.config import Config, Dtype, to_dict
from wan_ds.config.command_line import options, parse
from wan_ds.config.composition import configure
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.export import ExportOptions, Format
from wan_ds.interop import names
from wan_ds.models.weights import build_transformer, on_meta
from wan_ds.training import checkpoint as checkpoints
from wan_ds.training import parts, run_folder, runs
from wan_ds.training.sampling import build_pipeline, generate

MODELS = {
    "t2v": "wan2.1-t2v-1.3b",
    "i2v": "wan2.1-i2v-14b-480p",
    "flf2v": "wan2.1-flf2v-14b",
    "t2v-a14b": "wan2.2-t2v-a14b",
    "i2v-a14b": "wan2.2-i2v-a14b",
    "ti2v": "wan2.2-ti2v-5b",
}
FOUR_RANKS = "i2v-a14b"  # the others are written by two
SIZE = {"num_frames": 5, "height": 64, "width": 64}
STEPS = 3  # the fewest that reach the low-noise expert at a shift of 12
PLACES = {"all": "transformer", "high_noise": "transformer", "low_noise": "transformer_2"}


@pytest.fixture(autouse=True)
def _offline():
    """All of it is local, so nothing may ask the network."""
    with no_network():
        yield


def config_of(variant: str, run: str) -> Config:
    typed = [f"model=tiny-{MODELS[variant]}", f"run_dir={run}", "data.path=clips", "data.reader=null"]
    typed += [f"data.{name}={value}" for name, value in SIZE.items()]
    config = configure(parse(["recipe=quickstart", *typed, "parallelism=zero3"]))
    if variant == "t2v-a14b":
        config.train.experts = ["high_noise"]
        config.model.experts["low_noise"].weights = str(Path(run).parent / "base")
    if variant == "i2v":
        config.model.image_encoder.resize = type(config.model.image_encoder.resize).squash
    return config


def write_run(variant: str, run: str) -> dict[str, dict[str, torch.Tensor]]:
    """A run after one step of each expert, by all ranks; the weights that it trained to."""
    from deepspeed.utils import safe_get_full_fp32_param

    from tests.training.tiny import ZERO
    from wan_ds.parallel.mesh import Mesh
    from wan_ds.training.engine import Engine
    from wan_ds.training.precision import Precision

    config, mesh = config_of(variant, run), Mesh()
    architecture = config.model.transformer
    engines, weights = {}, {}
    for name in config.train.experts or config.model.experts:
        network = randomised(build_transformer(architecture, None, seed=len(name)), len(name), 0.1).train()
        engine = Engine(
            network,
            torch.optim.AdamW(network.parameters(), lr=1e-2),
            mesh,
            zero_optimization=dict(ZERO[3]),
            micro_batch_size=1,
            max_grad_norm=1.0,
            precision=Precision(),
        )
        clip = streams.normal((architecture["in_channels"], 2, 4, 4), mesh.rank, "clip")
        has_image = architecture.get("image_dim") is not None
        tokens = architecture.get("pos_embed_seq_len") or 257
        image = torch.ones(1, tokens, architecture["image_dim"]) if has_image else None
        text = streams.normal((1, 512, architecture["text_dim"]), 0, "text")
        (velocity,) = engine.train([clip], torch.tensor([500.0]), text, image)
        engine.backward(velocity.square().mean() / mesh.world_size)
        assert engine.step(1e-2)
        weights[name] = {key: safe_get_full_fp32_param(p).clone() for key, p in engine.parameters()}
        engines[name] = SimpleNamespace(engine=engine, adapter=None, ema=None)
    checkpoints.save(
        Path(run) / "checkpoints", state_of(list(engines), mesh.world_size), engines, keep_last=1
    )
    if mesh.is_main:
        run_folder.write(Path(run), to_dict(config))
    return weights if mesh.is_main else {}


def state_of(experts: list[str], world_size: int) -> checkpoints.TrainerState:
    counts = {name: checkpoints.ExpertState(1, 0, 0, 1, 1.0) for name in experts}
    return checkpoints.TrainerState(1, 1, world_size, "no clips", counts)


def write_run_of_four(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The same by four ranks that do not import the model, which makes their start quick."""
    config = config_of(FOUR_RANKS, str(run))
    model = on_meta(config.model.transformer)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    folder = run / "checkpoints" / "step_00000001"
    folder.mkdir(parents=True)
    world4 = World(4)
    try:
        weights, *_ = world4.run(sharded.save, str(folder), dict.fromkeys(config.model.experts, shapes))
    finally:
        world4.kill()
    checkpoints.seal(folder, state_of(list(weights), 4))
    run_folder.write(run, to_dict(config))
    return weights


@pytest.fixture(scope="module")
def written(world2, tmp_path_factory):
    """The folder with a run of each variant, and the weights of their experts."""
    root = tmp_path_factory.mktemp("runs")
    architecture = config_of("t2v-a14b", str(root / "t2v-a14b")).model.transformer
    base = randomised(WanTransformer3DModel(**architecture), 5, 0.1)
    base.to(torch.bfloat16).save_pretrained(root / "base")
    weights = {
        variant: world2.run(write_run, variant, str(root / variant))[0]
        for variant in MODELS
        if variant != FOUR_RANKS
    }
    frozen = {name: tensor.float() for name, tensor in base.state_dict().items()}
    weights["t2v-a14b"]["low_noise"] = frozen  # the expert that did not train
    weights[FOUR_RANKS] = write_run_of_four(root / FOUR_RANKS)
    return root, weights


@pytest.fixture(scope="module")
def exported(written):
    root, _ = written
    for variant in MODELS:
        assert export.main(ExportOptions(run=str(root / variant), format=Format.diffusers)) == 0
    return root


def picture(seed: int) -> Image.Image:
    levels = torch.randint(0, 256, (64, 64, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(levels.to(torch.uint8).numpy())


def embeds(width: int) -> torch.Tensor:
    return torch.randn(2, 512, width, generator=torch.Generator().manual_seed(0))


# What another program does; it is run where wan_ds cannot be imported.
STOCK = """
import json, sys
sys.modules["wan_ds"] = None
import torch
from PIL import Image
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline

torch.set_num_threads(1)
for case in json.load(open(sys.argv[1])):
    kinds = {"stock": DiffusionPipeline, "text": WanPipeline, "image": WanImageToVideoPipeline}
    pipeline = kinds[case["opened_by"]].from_pretrained(case["folder"], torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    given = torch.load(case["inputs"])
    images = {name: Image.open(path) for name, path in case["images"].items()}
    latents = pipeline(
        prompt_embeds=given["embeds"][:1],
        negative_prompt_embeds=given["embeds"][1:],
        latents=given["noise"],
        output_type="latent",
        **images,
        **case["settings"],
    ).frames
    quick = case["settings"] | {"num_inference_steps": 1}
    told = pipeline(prompt="a cat", output_type="np", **images, **quick).frames
    result = {"latents": latents, "pixels": torch.from_numpy(told), "class": type(pipeline).__name__}
    torch.save(result | {"transformer": type(pipeline.transformer).__name__}, case["outputs"])
try:
    import wan_ds
except ImportError:
    sys.exit(0)
sys.exit("wan_ds was there")
"""

CASES = {  # name: variant, how it is opened, images
    "t2v": ("t2v", "stock", 0),
    "t2v-a14b": ("t2v-a14b", "stock", 0),
    "i2v": ("i2v", "stock", 1),
    "flf2v": ("flf2v", "stock", 2),
    "i2v-a14b": ("i2v-a14b", "stock", 1),
    "ti2v from text": ("ti2v", "text", 0),
    "ti2v from an image": ("ti2v", "image", 1),
}


@pytest.fixture(scope="module")
def elsewhere(exported, tmp_path_factory):
    """What a process without wan_ds sampled from the exports, by case."""
    root = tmp_path_factory.mktemp("elsewhere")
    told = []
    for name, (variant, opened_by, images) in CASES.items():
        config = runs.run_config(exported / variant)
        torch.save(
            {"embeds": embeds(config.model.transformer["text_dim"]), "noise": noise_of(config)},
            root / f"{name}.pt",
        )
        paths = {}
        for seed, kind in enumerate(["image", "last_image"][:images]):
            paths[kind] = str(root / f"{kind}.png")
            picture(seed).save(paths[kind])
        guidance = list(config.model.guidance.values())
        settings = SIZE | {"num_inference_steps": STEPS, "guidance_scale": guidance[0]}
        if len(guidance) == 2:
            settings["guidance_scale_2"] = guidance[1]
        told.append(
            {
                "folder": str(exported / variant / "export" / "diffusers"),
                "opened_by": opened_by,
                "images": paths,
                "settings": settings,
                "inputs": str(root / f"{name}.pt"),
                "outputs": str(root / f"{name} made.pt"),
            }
        )
    (root / "cases.json").write_text(json.dumps(told))
    run_elsewhere(STOCK, root, str(root / "cases.json"))
    return {name: torch.load(root / f"{name} made.pt") for name in CASES}


def noise_of(config: Config) -> torch.Tensor:
    stride = 16 if config.model.transformer["out_channels"] == 48 else 8
    shape = (config.model.transformer["out_channels"], 2, 64 // stride, 64 // stride)
    return streams.normal(shape, 0, "sample", 0)[None]


@pytest.mark.parametrize("case", CASES)
def test_an_export_samples_elsewhere_what_the_run_samples_here(exported, elsewhere, case):
    variant, _, images = CASES[case]
    config = runs.run_config(exported / variant)
    checkpoint = checkpoints.find(exported / variant, "latest")
    encoders = parts.load_encoders(config, torch.device("cpu"))
    experts = {}
    for name in config.model.experts:  # in float32, as they are exported, whatever they were trained in
        source = runs.expert_source(config, checkpoint, name)
        experts[name] = build_transformer(config.model.transformer, source).eval().requires_grad_(False)
    pipeline = build_pipeline(
        experts,
        boundary=config.model.boundary,
        shift=config.model.shift,
        vae=encoders.vae,
        images=images,
        expand_timesteps=parts.conditioning_of(config).expand_timesteps,
        image_encoder=encoders.image,
    )
    given = {name: [picture(seed)] for seed, name in enumerate(["images", "last_images"][:images])}
    prompts = embeds(config.model.transformer["text_dim"])
    ours = generate(
        pipeline,
        prompts[:1],
        prompts[1:],
        **SIZE,
        steps=STEPS,
        guidance=config.model.guidance,
        seeds=[0],
        **given,
    )

    theirs = elsewhere[case]
    assert theirs["transformer"] == "WanTransformer3DModel"
    assert all(ours.expert_calls.values())
    scale = theirs["latents"].abs().max()
    assert (
        ours.latents - theirs["latents"]
    ).abs().max() / scale <= 1e-5  # the two forwards round differently
    assert theirs["pixels"].shape == (1, 5, 64, 64, 3)
    assert theirs["pixels"].isfinite().all()


def test_the_pipelines_are_of_the_classes_that_the_hub_names(exported, elsewhere):
    assert elsewhere["t2v"]["class"] == elsewhere["t2v-a14b"]["class"] == "WanPipeline"
    for name in ("i2v", "flf2v", "i2v-a14b"):
        assert elsewhere[name]["class"] == "WanImageToVideoPipeline"
    index = json.loads((exported / "ti2v/export/diffusers/model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline"  # which `opened_by` overrules above
    assert (index["expand_timesteps"], index["boundary_ratio"]) == (True, None)
    index = json.loads((exported / "i2v-a14b/export/diffusers/model_index.json").read_text())
    assert (index["expand_timesteps"], index["boundary_ratio"]) == (False, 0.9)
    assert index["image_encoder"] == [None, None]


@pytest.mark.parametrize("variant", MODELS)
def test_an_export_holds_the_weights_that_trained_and_how_to_sample_them(written, exported, variant):
    _, weights = written
    folder = exported / variant / "export" / "diffusers"
    config = runs.run_config(exported / variant)
    for name in config.model.experts:
        tensors = load_file(folder / PLACES[name] / "diffusion_pytorch_model.safetensors")
        expected = weights[variant][name]
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], expected[key]) for key in tensors)
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["_class_name"] == "UniPCMultistepScheduler"
    assert scheduler["flow_shift"] == config.model.shift
    assert scheduler["use_flow_sigmas"] and scheduler["prediction_type"] == "flow_prediction"
    note = json.loads((folder / "wan_ds.json").read_text())
    assert note["guidance"] == config.model.guidance
    assert {key: note[key] for key in SIZE} == SIZE
    assert (note["fps"], note["steps"]) == (config.model.fps, config.model.sampling_steps)


def test_the_exports_image_processor_has_the_rule_of_the_run(exported):
    def rule(variant):
        folder = exported / variant / "export" / "diffusers" / "image_processor"
        return json.loads((folder / "preprocessor_config.json").read_text())

    assert rule("i2v")["do_center_crop"] is False
    assert rule("i2v")["size"] == {"height": 224, "width": 224}
    assert rule("flf2v")["do_center_crop"] is True
    assert rule("flf2v")["size"] == {"shortest_edge": 224}


@pytest.mark.parametrize("variant", ["flf2v", "i2v-a14b"])
def test_original_and_comfyui_exports_are_the_same_tensors_under_their_names(written, tmp_path, variant):
    root, weights = written
    for kind in (Format.original, Format.comfyui):
        target = str(tmp_path / kind.name)
        assert export.main(ExportOptions(run=str(root / variant), format=kind, target=target)) == 0

    is_dual = len(weights[variant]) == 2
    for expert, expected in weights[variant].items():
        folder = tmp_path / "original" / (f"{expert}_model" if is_dual else "")
        original = load_file(folder / "diffusion_pytorch_model.safetensors")
        there = names.transformer_names(original)
        assert set(there.values()) == set(expected)
        assert all(torch.equal(original[old], expected[new]) for old, new in there.items())
        settings = json.loads((folder / "config.json").read_text())
        assert settings["_class_name"] == "WanModel"
        assert settings["model_type"] == ("i2v" if is_dual else "flf2v")
        assert settings["in_dim"] == 36
        suffix = f"_{expert}" if is_dual else ""
        single = load_file(tmp_path / "comfyui" / f"tiny-{MODELS[variant]}{suffix}.safetensors")
        assert single.keys() == {f"model.diffusion_model.{name}" for name in original}
        assert all(torch.equal(single[f"model.diffusion_model.{name}"], original[name]) for name in original)
    beside = {path.name for path in (tmp_path / "original").iterdir()}
    assert {"Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth", "google"} <= beside
    assert ("models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth" in beside) is (variant == "flf2v")


def test_an_export_in_bf16_keeps_in_float32_what_diffusers_keeps(written, tmp_path, monkeypatch):
    root, weights = written
    monkeypatch.setattr(export, "SHARD_BYTES", 300_000)
    target = tmp_path / "half"
    asked = ExportOptions(
        run=str(root / "i2v"), format=Format.diffusers, target=str(target), dtype=Dtype.bf16
    )
    assert export.main(asked) == 0

    theirs = WanTransformer3DModel.from_pretrained(target / "transformer", torch_dtype=torch.bfloat16)
    expected = {name: tensor.dtype for name, tensor in theirs.state_dict().items()}
    files = sorted((target / "transformer").glob("*.safetensors"))
    assert len(files) > 3
    found = {}
    for path in files:
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    assert {name: tensor.dtype for name, tensor in found.items()} == expected
    assert set(expected.values()) == {torch.float32, torch.bfloat16}
    trained = weights["i2v"]["all"]
    assert all(torch.equal(found[name], trained[name].to(expected[name])) for name in found)


def test_format_and_dtype_are_typed_by_name():
    typed = options(ExportOptions, ["run=~/mine", "format=comfyui", "dtype=bf16"])
    assert (typed.format, typed.dtype) == (Format.comfyui, Dtype.bf16)
    with pytest.raises(ConfigError, match="format=safetensors: must be diffusers, original, comfyui"):
        options(ExportOptions, ["run=mine", "format=safetensors"])


def test_a_target_that_exists_is_refused_and_left_as_it_is(exported):
    folder = exported / "t2v" / "export" / "diffusers"
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError, match=f"target={folder}: is there already; .*another target="):
        export.main(ExportOptions(run=str(exported / "t2v"), format=Format.diffusers))
    assert sorted(folder.rglob("*")) == before


def test_an_export_that_fails_leaves_nothing_and_says_why(written, tmp_path, monkeypatch):
    root, _ = written
    asked = ExportOptions(run=str(root / "t2v"), format=Format.diffusers, target=str(tmp_path / "new"))

    def no_space(*_args, **_settings):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(export.shutil, "copytree", no_space)
        with pytest.raises(
            CheckpointError, match="new cannot be written .*No space left.* GB are free there"
        ):
            export.main(asked)
    assert list(tmp_path.iterdir()) == []

    from wan_ds.interop import shards

    full = type("Usage", (), {"free": 1_000})
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda path: full)
    with pytest.raises(CheckpointError, match="are needed and .* are free on its disk"):
        export.main(asked)
    assert list(tmp_path.iterdir()) == []


def test_a_run_or_checkpoint_that_is_not_there_is_named(written, tmp_path):
    root, _ = written
    with pytest.raises(CheckpointError, match=f"run={tmp_path}: there is no .*config.yaml"):
        export.main(ExportOptions(run=str(tmp_path), format=Format.diffusers))
    with pytest.raises(CheckpointError, match="step_00000007 cannot be used: there is no such folder"):
        export.main(ExportOptions(run=str(root / "t2v"), format=Format.comfyui, checkpoint="step_00000007"))
