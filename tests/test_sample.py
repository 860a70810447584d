"""Runs and exports are sampled as they say or as was typed; what cannot be is refused in a sentence."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from omegaconf import OmegaConf
from PIL import Image
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from tests.models.variants import randomised
from tests.training.bars import GUIDANCE, SIZE, TINY, moving_bar, read_video
from wan_ds import sample, streams
from wan_ds.config import command_line, read, to_dict
from wan_ds.config.command_line import parse
from wan_ds.config.composition import configure
from wan_ds.errors import CheckpointError, ConfigError, DataError
from wan_ds.models.transformer import WanTransformer
from wan_ds.training import checkpoint as checkpoints
from wan_ds.training import run_folder, runs
from wan_ds.training.exported import Note
from wan_ds.training.videos import write_video


class Held:
    """A source of weights that are in memory."""

    where = "memory"

    def __init__(self, network: torch.nn.Module):
        self.tensors = dict(network.state_dict())

    def read(self, names):
        return {name: self.tensors[name] for name in names}


@pytest.fixture(scope="module")
def vae():
    made = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return randomised(made, 0, 0.3).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def experts():
    return {name: randomised(WanTransformer(**TINY), seed) for seed, name in enumerate(GUIDANCE, 1)}


def write_clips(folder: Path) -> None:
    folder.mkdir()
    for name, clip in (("a", moving_bar()), ("b", -moving_bar().flip(-1))):
        write_video(folder / f"{name}.mp4", clip, 16)
        (folder / f"{name}.txt").write_text(f"bar {name}")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, vae):
    """A run folder of a model with two experts and two clips, as training leaves it."""
    root = tmp_path_factory.mktemp("run")
    vae.save_pretrained(root / "model" / "vae")
    vocabulary = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        *((x, -3.0) for x in "abcdefgh"),
    ]
    T5Tokenizer(vocab=vocabulary, extra_ids=0).save_pretrained(root / "model" / "tokenizer")
    text = UMT5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    randomised(UMT5EncoderModel(text), 1).save_pretrained(root / "model" / "text_encoder")
    write_clips(root / "clips")
    settings = command_line.settings(command_line.parse(["recipe=quickstart", "data=clips"]))
    OmegaConf.set_struct(settings, False)
    settings.model.path = str(root / "model")
    settings.model.transformer = {**TINY, "in_channels": 16, "out_channels": 16}
    settings.data.path, settings.data.fps = str(root / "clips"), 16
    settings.data.reader = {"_target_": "wan_ds.data.readers.FolderWithCaptions"}
    settings.data.update(SIZE)
    settings.sampling.steps = 3
    run_folder.write(root, to_dict(read(settings)))
    (root / "checkpoints" / "step_00000010").mkdir(parents=True)
    losses = [{"step": 9, "train/low_noise/loss": 0.5}, {"step": 10, "train/high_noise/loss": 0.25}]
    later = {"step": 11, "train/high_noise/loss": 9.0}
    lines = "".join(json.dumps(record) + "\n" for record in [*losses, later])
    (root / "metrics.jsonl").write_text(lines + '{"step": 12, "tr')
    return root


@pytest.fixture
def with_checkpoint(run_dir, experts, monkeypatch):
    """Stands for the checkpoint's files, which need DeepSpeed to make: tested where they are written."""
    state = checkpoints.TrainerState(
        step=10,
        planned_steps=10,
        world_size=2,
        dataset="3 clips, 0",
        experts={
            "high_noise": checkpoints.ExpertState(4, 0, 0, 8, 0.42),
            "low_noise": checkpoints.ExpertState(6, 0, 0, 12, 0.58),
        },
    )
    monkeypatch.setattr(checkpoints, "find", lambda run, which: run / "checkpoints" / "step_00000010")
    monkeypatch.setattr(checkpoints, "read_state", lambda folder: state)
    monkeypatch.setattr(checkpoints, "checkpoint_source", lambda folder, expert: Held(experts[expert]))


@pytest.mark.usefixtures("with_checkpoint")
def test_a_run_is_sampled_with_its_captions_and_settings(run_dir, capsys):
    assert sample.main(sample.SampleOptions(run=str(run_dir))) == 0

    folder = run_dir / "samples" / "step_00000010"
    found = json.loads((folder / "samples.json").read_text())
    assert [one["prompt"] for one in found] == ["bar a", "bar b"]
    assert [one["clip"] for one in found] == ["a.mp4", "b.mp4"]
    assert all(one["expert_calls"]["high_noise"] and one["expert_calls"]["low_noise"] for one in found)
    assert all(one["steps"] == 3 and one["checkpoint"] == "step_00000010" for one in found)
    assert all(0 < one["psnr"] < 60 and one["mse_over_variance"] > 0 for one in found)
    assert all(one["nearest"] in ("a.mp4", "b.mp4") for one in found)
    frames, stream = read_video(folder / "00-bar-a.mp4")
    assert frames.shape == (5, 32, 48, 3)
    assert stream.average_rate == 16
    assert Image.open(folder / "contact.png").height > 4 * 128
    told = capsys.readouterr().out
    assert f"vae           {run_dir / 'model' / 'vae'}" in told
    words = [line.split() for line in told.splitlines()]
    assert ["high_noise", "4", "0.420", "0.400", "0.2500"] in words
    assert ["low_noise", "6", "0.580", "0.600", "0.5000"] in words
    assert f"{found[0]['psnr']:.2f} dB" in told


@pytest.mark.usefixtures("with_checkpoint")
def test_a_sample_is_what_diffusers_makes_of_the_runs_weights(run_dir, experts, vae):
    options = sample.SampleOptions(run=str(run_dir), prompt="bar a")
    sample.main(options)
    folder = run_dir / "samples" / "step_00000010-bar-a"
    (told,) = json.loads((folder / "samples.json").read_text())

    stock = []
    for expert in experts.values():
        stock.append(WanTransformer3DModel(**TINY).eval())
        stock[-1].load_state_dict(expert.state_dict())
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=told["shift"],
    )
    model = run_dir / "model"
    theirs = WanPipeline(
        T5Tokenizer.from_pretrained(model / "tokenizer"),
        UMT5EncoderModel.from_pretrained(model / "text_encoder").eval(),
        vae,
        scheduler,
        *stock,
        boundary_ratio=0.875,
    )
    theirs.set_progress_bar_config(disable=True)
    frames = theirs(
        "bar a",
        latents=streams.normal((1, 16, 2, 4, 6), told["seed"], "sample", 0),
        **SIZE,
        num_inference_steps=told["steps"],
        guidance_scale=told["guidance"]["high_noise"],
        guidance_scale_2=told["guidance"]["low_noise"],
        output_type="pt",
    ).frames[0]  # [F, 3, H, W] in [0, 1]
    write_video(run_dir / "theirs.mp4", frames.transpose(0, 1) * 2 - 1, 16)

    assert told["clip"] == "a.mp4"
    # one level: their decoder divides by 1 / std where ours multiplies by std
    ours, expected = (
        read_video(path)[0].astype(int) for path in (folder / told["file"], run_dir / "theirs.mp4")
    )
    assert np.abs(ours - expected).max() <= 2


@pytest.mark.usefixtures("with_checkpoint")
def test_what_differs_from_the_run_is_in_the_folders_name(run_dir):
    options = sample.SampleOptions(run=str(run_dir), prompt="a cat, running", seed=1, steps=2, guidance=2.5)
    sample.main(options)

    folder = run_dir / "samples" / "step_00000010-seed1-steps2-guidance2.5-a-cat-running"
    (told,) = json.loads((folder / "samples.json").read_text())
    assert (told["seed"], told["steps"]) == (1, 2)
    assert told["guidance"] == {"high_noise": 2.5, "low_noise": 2.5}
    assert told["psnr"] is None
    assert told["clip"] is None
    assert told["nearest"] in ("a.mp4", "b.mp4")
    assert (folder / "00-a-cat-running.mp4").exists()


@pytest.mark.usefixtures("with_checkpoint")
def test_a_prompt_needs_no_training_clips(run_dir, tmp_path):
    for name in ("model", "checkpoints"):
        (tmp_path / name).symlink_to(run_dir / name)
    settings = run_folder.read(run_dir)
    settings["data"]["path"] = str(tmp_path / "gone")
    run_folder.write(tmp_path, settings)

    assert sample.main(sample.SampleOptions(run=str(tmp_path), prompt="bar a")) == 0

    (told,) = json.loads((tmp_path / "samples" / "step_00000010-bar-a" / "samples.json").read_text())
    assert told["nearest"] is None


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=f"run={tmp_path}: there is no .*config.yaml"):
        sample.main(sample.SampleOptions(run=str(tmp_path)))


# models that begin with images

MODELS = {
    "t2v": "wan2.1-t2v-1.3b",
    "i2v": "wan2.1-i2v-14b-480p",
    "flf2v": "wan2.1-flf2v-14b",
    "ti2v": "wan2.2-ti2v-5b",
}


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    """The folder with a run of each of the models, none trained yet: their weights are the seed's."""
    root = tmp_path_factory.mktemp("studio")
    write_clips(root / "clips")
    levels = np.random.default_rng(0).integers(0, 256, (40, 90, 3), dtype=np.uint8)
    for name in ("first", "last"):
        Image.fromarray(levels).save(root / f"{name}.png")
    for name, model in MODELS.items():
        typed = [f"model=tiny-{model}", f"data.path={root / 'clips'}", "data.fps=16", "sampling.steps=2"]
        sizes = [
            "data.num_frames=5",
            "data.height=64",
            "data.width=96",
            "data.reader=null",
            "data.limit=null",
        ]
        run_folder.write(root / name, to_dict(configure(parse(["recipe=quickstart", *typed, *sizes]))))
    return root


@pytest.fixture
def untrained(monkeypatch):
    """Stands for a checkpoint in which no expert has trained."""
    state = checkpoints.TrainerState(0, 10, 1, "2 clips, 0", {})
    monkeypatch.setattr(checkpoints, "find", lambda run, which: run / "checkpoints" / "step_00000000")
    monkeypatch.setattr(checkpoints, "read_state", lambda folder: state)


@pytest.fixture
def calls(monkeypatch):
    """What each call of `generate` was given, and which pipeline."""
    seen = []

    def spy(pipeline, prompt_embeds, negative_prompt_embeds, **settings):
        seen.append({"pipeline": type(pipeline).__name__, **settings})
        return generate(pipeline, prompt_embeds, negative_prompt_embeds, **settings)

    generate = sample.generate
    monkeypatch.setattr(sample, "generate", spy)
    return seen


@pytest.mark.usefixtures("untrained")
def test_training_clips_are_made_anew_from_their_captions_and_their_own_frames(studio, calls):
    assert sample.main(sample.SampleOptions(run=str(studio / "flf2v"))) == 0

    frames = sample.decode(
        studio / "clips" / "b.mp4", start_seconds=0, num_frames=5, fps=16, height=64, width=96
    )
    first, second = calls
    assert second["pipeline"] == "WanImageToVideoPipeline"
    assert torch.equal(second["images"][0], frames[:, 0])
    assert torch.equal(second["last_images"][0], frames[:, -1])
    assert not torch.equal(first["images"][0], second["images"][0])
    told = json.loads((studio / "flf2v" / "samples" / "step_00000000" / "samples.json").read_text())
    assert [one["image"] for one in told] == ["a.mp4, first frame", "b.mp4, first frame"]
    assert told[1]["last_image"] == "b.mp4, last frame"
    assert told[1]["clip"] == "b.mp4"


@pytest.mark.usefixtures("untrained")
def test_a_text_and_image_model_is_sampled_with_an_image_or_without(studio, calls):
    run, image = str(studio / "ti2v"), str(studio / "first.png")
    sample.main(sample.SampleOptions(run=run, prompt="bar a"))
    sample.main(sample.SampleOptions(run=run, prompt="bar a", image=image, num_frames=9))

    assert [call["pipeline"] for call in calls] == ["WanPipeline", "WanImageToVideoPipeline"]
    (picture,) = calls[1]["images"]
    assert picture.shape == (3, 64, 96)
    (folder,) = (studio / "ti2v" / "samples").glob("step_00000000-num_frames9-bar-a-first-*")
    (told,) = json.loads((folder / "samples.json").read_text())
    assert (told["image"], told["last_image"]) == (image, None)
    frames, stream = read_video(folder / told["file"])
    assert (frames.shape, stream.average_rate) == ((9, 64, 96, 3), 16)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("run", "typed", "words"),
    [
        ("t2v", {"image": "first.png"}, "image: tiny-wan2.1-t2v-1.3b is made from the prompt alone; leave"),
        ("i2v", {}, "image: not set, and tiny-wan2.1-i2v-14b-480p needs it; type image=<file>"),
        ("i2v", {"image": "first.png", "last_image": "last.png"}, "last_image: .* is made from image; leave"),
        ("flf2v", {"image": "first.png"}, "last_image: not set, and .* needs it; type last_image=<file>"),
        ("flf2v", {}, "image, last_image: not set, .* type image=<file> last_image=<file>"),
        ("ti2v", {"last_image": "last.png"}, "last_image: .* is made from image; leave last_image=... out"),
        ("i2v", {"prompt": None, "image": "first.png"}, "image: needs a prompt as well; type prompt=..."),
        ("i2v", {"image": "first.png", "steps": 0}, "steps=0: must be at least 1"),
        ("t2v", {"guidance": 0.5}, "guidance of all is 0.5: must be at least 1"),
        ("t2v", {"num_frames": 6}, r"num_frames=6: must be 4n \+ 1; choose 5 or 9"),
        ("t2v", {"height": 70}, "height=70: must be a multiple of 16; choose 64 or 80"),
        ("ti2v", {"width": 16}, "width=16: must be a multiple of 32; choose 32"),
    ],
)
def test_what_a_model_cannot_begin_from_is_refused_with_what_to_type(studio, run, typed, words):
    typed = {"prompt": "bar a", **typed}
    for name in ("image", "last_image"):
        if name in typed:
            typed[name] = str(studio / typed[name])
    with pytest.raises(ConfigError, match=words):
        sample.main(sample.SampleOptions(run=str(studio / run), **typed))


@pytest.mark.usefixtures("untrained")
def test_an_image_that_cannot_be_read_is_named(studio):
    options = sample.SampleOptions(run=str(studio / "i2v"), prompt="bar a", image=str(studio / "none.png"))
    with pytest.raises(DataError, match="none.png: there is no such image file"):
        sample.main(options)


@pytest.mark.usefixtures("untrained")
def test_of_a_hubs_model_the_commit_that_was_trained_is_asked_for(studio, tmp_path, monkeypatch):
    settings = run_folder.read(studio / "t2v")
    settings["model"] |= {"path": "somebody/model", "experts": {"all": {"weights": "transformer"}}}
    run_folder.write(tmp_path, settings, model_commit="c" * 40)
    asked = []

    def resolve(path, *, revision, needed):
        asked.append((path, revision, sorted(needed)))
        return studio, revision

    monkeypatch.setattr(runs.parts.hub, "resolve", resolve)
    config, _ = runs.opened(tmp_path, "latest")
    trained = checkpoints.TrainerState(1, 1, 1, "", {"all": checkpoints.ExpertState(1, 0, 0, 1, 1.0)})
    monkeypatch.setattr(checkpoints, "read_state", lambda folder: trained)
    runs.opened(tmp_path, "latest")

    parts = ["quickstart/text_encoder", "quickstart/tokenizer", "quickstart/vae"]
    assert asked[0] == ("somebody/model", "c" * 40, [*parts, "transformer"])
    assert asked[1] == ("somebody/model", "c" * 40, parts)  # what trained needs no base
    assert config.model.path == str(studio)


# exports


@pytest.fixture(scope="module")
def export_dir(run_dir, experts, vae):
    """A folder in diffusers' layout as diffusers itself writes it, without a note of ours."""
    stock = [WanTransformer3DModel(**TINY).eval() for _ in experts]
    for module, expert in zip(stock, experts.values(), strict=True):
        module.load_state_dict(expert.state_dict())
    model = run_dir / "model"
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=4.0
    )
    WanPipeline(
        T5Tokenizer.from_pretrained(model / "tokenizer"),
        UMT5EncoderModel.from_pretrained(model / "text_encoder"),
        vae,
        scheduler,
        *stock,
        boundary_ratio=0.875,
    ).save_pretrained(run_dir / "export" / "theirs")
    return run_dir / "export" / "theirs"


@pytest.mark.usefixtures("with_checkpoint")
def test_an_export_is_sampled_as_the_run_that_it_is_of(run_dir, export_dir):
    settings = {**SIZE, "fps": 16.0, "steps": 3, "guidance": 2.0, "shift": 4.0, "prompt": "bar a"}
    sample.main(sample.SampleOptions(run=str(run_dir), **settings))
    del settings["shift"]  # the scheduler's
    sample.main(sample.SampleOptions(export=str(export_dir), **settings))

    (of_run,) = run_dir.glob("samples/*guidance2-shift4-bar-a")
    of_export = (
        export_dir.parent / "samples" / "theirs-steps3-guidance2-num_frames5-height32-width48-fps16-bar-a"
    )
    told, expected = (json.loads((folder / "samples.json").read_text())[0] for folder in (of_export, of_run))
    for name in ("prompt", "seed", "steps", "guidance", "shift", "expert_calls", "file"):
        assert told[name] == expected[name], name
    assert told["checkpoint"] == "theirs"
    ours, theirs = (read_video(folder / told["file"])[0].astype(int) for folder in (of_export, of_run))
    assert np.array_equal(ours, theirs)


def test_what_an_export_does_not_say_is_asked_for_and_a_note_says_it(export_dir, tmp_path):
    (tmp_path / "noted").symlink_to(export_dir)
    options = sample.SampleOptions(export=str(export_dir), prompt="bar a", steps=2)
    subject = sample.of_export(Path(options.export))
    with pytest.raises(
        ConfigError, match="guidance, num_frames, height, width, fps: not set, and .*wan_ds.json"
    ):
        sample.resolve(options, subject)

    noted = Note("mine", **SIZE, fps=16.0, steps=5, guidance=GUIDANCE)
    noted.write(export_dir)
    try:
        settings = sample.resolve(options, sample.of_export(Path(options.export)))
    finally:
        (export_dir / "wan_ds.json").unlink()
    assert settings == sample.Settings(0, 2, GUIDANCE, 4.0, **SIZE, fps=16.0)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ({"run": None}, r"run: type run=... .* or export=..."),
        ({"run": "a", "export": "b"}, r"run: type run=... .* or export=..."),
        ({"export": "b", "checkpoint": "step_00000010"}, "checkpoint=step_00000010: an export holds one"),
    ],
)
def test_either_a_run_or_an_export_is_typed(typed, words):
    with pytest.raises(ConfigError, match=words):
        sample.main(sample.SampleOptions(**typed))


def test_an_export_needs_a_prompt(export_dir):
    settings = {**SIZE, "fps": 16.0, "steps": 3, "guidance": 2.0}
    with pytest.raises(ConfigError, match="prompt: not set, and an export has no training clips"):
        sample.main(sample.SampleOptions(export=str(export_dir), **settings))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "model_index.json cannot be read .*: not a folder in diffusers' layout"),
        ({"_class_name": "FluxPipeline"}, "a pipeline of FluxPipeline; one of WanPipeline and"),
        ({"boundary_ratio": None}, "there is a transformer_2 and no boundary_ratio"),
    ],
)
def test_a_folder_that_is_no_export_of_wan_is_refused(export_dir, tmp_path, change, words):
    if change is not None:
        index = json.loads((export_dir / "model_index.json").read_text())
        (tmp_path / "model_index.json").write_text(json.dumps(index | change))
    with pytest.raises(CheckpointError, match=words):
        sample.main(sample.SampleOptions(export=str(tmp_path), prompt="bar a"))


def test_a_boundary_without_a_second_transformer_means_nothing(export_dir, tmp_path):
    index = json.loads((export_dir / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"transformer_2": [None, None]}))
    for name in ("transformer", "scheduler"):
        (tmp_path / name).symlink_to(export_dir / name)

    subject = sample.of_export(tmp_path)

    assert (subject.experts, subject.boundary) == (["all"], None)


def test_images_of_one_name_do_not_share_a_folder(tmp_path):
    names = set()
    for folder in ("one", "two"):
        image = tmp_path / folder / "0001.png"
        options = sample.SampleOptions(run="r", prompt="a cat", image=str(image))
        subject = mock.Mock(weights=Path("step_00000004"), kind="", defaults={})
        names.add(sample.folder_name(subject, options))
    assert len(names) == 2 and all(name.startswith("step_00000004-a-cat-0001-") for name in names)
