"""Samples come from diffusers' pipeline and the experts' own weights, and what is written reads back."""

import json
import math

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from omegaconf import OmegaConf
from PIL import Image
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from wan_ds import sample, streams
from wan_ds.config import command_line, read, to_dict
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.models.transformer import WanTransformer
from wan_ds.training import checkpoint as checkpoints
from wan_ds.training import run_folder
from wan_ds.training.sampling import (
    SHEET_FRAMES,
    Sample,
    build_pipeline,
    contact_sheet,
    generate,
    guidance_of,
    nearest,
    psnr,
    slug,
    to_uint8,
    write_samples,
    write_video,
)

TINY = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 1,
}
SIZE = {"num_frames": 5, "height": 32, "width": 48}
GUIDANCE = {"high_noise": 4.0, "low_noise": 3.0}


def randomised(module: torch.nn.Module, seed: int, std: float = 0.15) -> torch.nn.Module:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std, generator=rng)
    return module


@pytest.fixture(scope="module")
def vae():
    made = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return randomised(made, 0, 0.3).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def experts():
    return {name: randomised(WanTransformer(**TINY), seed) for seed, name in enumerate(GUIDANCE, 1)}


def embeds(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 512, 32, generator=torch.Generator().manual_seed(seed))


class Constant(WanTransformer):
    """An expert whose velocity is one number everywhere; keeps the timesteps that it was called with."""

    def __init__(self, value: float):
        super().__init__(**TINY)
        self.value, self.timesteps = value, []

    def forward(self, hidden_states, timestep, *args, **kwargs):
        assert timestep.unique().numel() == 1
        self.timesteps.append(timestep[0].item())
        return (torch.full_like(hidden_states, self.value),)


# the pipeline


@pytest.mark.parametrize("boundary", [0.875, 0.9])
def test_each_expert_works_on_its_side_of_the_boundary_which_belongs_to_high_noise(vae, boundary):
    high, low = Constant(1.0), Constant(-1.0)
    pipeline = build_pipeline({"high_noise": high, "low_noise": low}, boundary=boundary, shift=1.0, vae=vae)
    # without a shift these steps hit the boundary exactly
    pipeline.scheduler.set_timesteps(40)
    assert boundary * 1000 in pipeline.scheduler.timesteps.tolist()

    made = generate(
        pipeline, embeds(1), embeds(1, 1), **SIZE, steps=40, guidance=dict.fromkeys(GUIDANCE, 1.0), seeds=[0]
    )

    assert min(high.timesteps) == boundary * 1000
    assert max(low.timesteps) < boundary * 1000
    assert high.timesteps + low.timesteps == pipeline.scheduler.timesteps.tolist()
    assert made.expert_calls == {"high_noise": len(high.timesteps), "low_noise": len(low.timesteps)}


def test_a_velocity_that_is_constant_carries_the_noise_along_a_straight_line(vae):
    pipeline = build_pipeline({"all": Constant(0.5)}, boundary=None, shift=3.0, vae=vae)

    made = generate(pipeline, embeds(1), embeds(1, 1), **SIZE, steps=5, guidance={"all": 1.0}, seeds=[7])

    noise = streams.normal((16, 2, 4, 6), 7, "sample", 0)
    # from sigma near 1 to 0 at velocity 0.5
    begin = pipeline.scheduler.sigmas[0].item()
    torch.testing.assert_close(made.latents[0], noise - begin * 0.5, rtol=1e-4, atol=1e-4)
    assert made.latents.dtype == torch.float32


@pytest.mark.parametrize("guidance", [GUIDANCE, {"high_noise": 1.0, "low_noise": 1.0}])
def test_latents_are_those_of_the_stock_pipeline_with_the_same_weights(vae, experts, guidance):
    stock = []
    for expert in experts.values():
        stock.append(WanTransformer3DModel(**TINY).eval())
        stock[-1].load_state_dict(expert.state_dict())
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=5.0
    )
    theirs = WanPipeline(None, None, vae, scheduler, *stock, boundary_ratio=0.875)
    theirs.set_progress_bar_config(disable=True)
    noise = torch.stack([streams.normal((16, 2, 4, 6), seed, "sample", i) for i, seed in enumerate([3, 4])])
    expected = theirs(
        prompt_embeds=embeds(2),
        negative_prompt_embeds=embeds(1, 1).repeat(2, 1, 1),
        latents=noise,
        **SIZE,
        num_inference_steps=6,
        guidance_scale=guidance["high_noise"],
        guidance_scale_2=guidance["low_noise"],
        output_type="latent",
    ).frames

    ours = build_pipeline(experts, boundary=0.875, shift=5.0, vae=vae)
    made = generate(ours, embeds(2), embeds(1, 1), **SIZE, steps=6, guidance=guidance, seeds=[3, 4])

    assert torch.equal(made.latents, expected)
    assert set(made.expert_calls) == set(GUIDANCE)
    assert sum(made.expert_calls.values()) == 6 * (2 if guidance is GUIDANCE else 1)
    assert all(made.expert_calls.values())


def test_guidance_of_the_low_noise_expert_counts_where_the_high_noise_expert_has_none(vae, experts):
    def velocity(scale_high, scale_low):
        pipeline = build_pipeline(experts, boundary=0.875, shift=1.0, vae=vae)
        guidance = {"high_noise": scale_high, "low_noise": scale_low}
        return generate(
            pipeline, embeds(1), embeds(1, 1), **SIZE, steps=4, guidance=guidance, seeds=[0]
        ).latents

    assert not torch.allclose(velocity(1.0, 3.0), velocity(1.0, 1.0), atol=1e-2)
    # one step of the last bit of a float is no guidance
    torch.testing.assert_close(velocity(1.0, 1.0 + 1e-6), velocity(1.0, 1.0), rtol=1e-3, atol=1e-3)


def test_every_expert_changes_the_sample(vae, experts):
    def latents():
        pipeline = build_pipeline(experts, boundary=0.875, shift=5.0, vae=vae)
        return generate(
            pipeline, embeds(1), embeds(1, 1), **SIZE, steps=4, guidance=GUIDANCE, seeds=[0]
        ).latents

    before = latents()
    assert torch.equal(latents(), before)
    for expert in experts.values():
        bias = expert.proj_out.bias
        with torch.no_grad():
            bias += 0.1
            assert not torch.allclose(latents(), before, atol=1e-3)
            bias -= 0.1


def test_a_clip_is_the_same_in_whatever_call_it_is_made(vae, experts):
    pipeline = build_pipeline(experts, boundary=0.875, shift=5.0, vae=vae)
    settings = {**SIZE, "steps": 2, "guidance": GUIDANCE}
    together = generate(pipeline, embeds(3), embeds(1, 1), **settings, seeds=[5, 5, 5]).latents

    alone = generate(pipeline, embeds(3)[2:], embeds(1, 1), **settings, seeds=[5], first=2).latents
    other = generate(pipeline, embeds(3)[2:], embeds(1, 1), **settings, seeds=[6], first=2).latents

    # the same noise; matrix products of another size sum in another order
    torch.testing.assert_close(alone[0], together[2], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(other, alone, atol=1e-2)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


def test_experts_are_sampled_in_eval_mode_and_come_back_as_they_were(vae, experts):
    seen = []
    experts["high_noise"].train()
    experts["high_noise"].rope.eval()
    experts["low_noise"].eval()
    hook = experts["high_noise"].register_forward_pre_hook(lambda module, _: seen.append(module.training))

    pipeline = build_pipeline(experts, boundary=0.875, shift=5.0, vae=vae)
    generate(pipeline, embeds(1), embeds(1, 1), **SIZE, steps=2, guidance=GUIDANCE, seeds=[0])
    hook.remove()

    assert seen and not any(seen)
    assert experts["high_noise"].training and experts["high_noise"].blocks[0].training
    assert not experts["high_noise"].rope.training
    assert not experts["low_noise"].training
    assert not experts["high_noise"]._forward_hooks


@pytest.mark.parametrize(
    ("boundary", "names"), [(0.875, ["high_noise"]), (0.875, ["all"]), (None, ["low_noise"])]
)
def test_sampling_without_every_expert_is_refused_with_what_to_type(vae, experts, boundary, names):
    given = dict.fromkeys(names, experts["low_noise"])
    with pytest.raises(ConfigError, match="sampling needs the experts .*sampling.every_steps=null"):
        build_pipeline(given, boundary=boundary, shift=5.0, vae=vae)


def test_guidance_is_one_number_or_one_for_each_expert():
    assert guidance_of(4, ["high_noise", "low_noise"]) == {"high_noise": 4.0, "low_noise": 4.0}
    assert guidance_of({**GUIDANCE, "all": 1}, ["low_noise"]) == {"low_noise": 3.0}
    with pytest.raises(ConfigError, match="says nothing of low_noise"):
        guidance_of({"high_noise": 4}, ["high_noise", "low_noise"])


def test_every_prompt_needs_a_seed(vae, experts):
    pipeline = build_pipeline(experts, boundary=0.875, shift=5.0, vae=vae)
    with pytest.raises(ValueError, match="2 prompts need as many seeds, not 1"):
        generate(pipeline, embeds(2), embeds(1, 1), **SIZE, steps=2, guidance=GUIDANCE, seeds=[0])


def test_guidance_below_one_is_refused(vae, experts):
    pipeline = build_pipeline(experts, boundary=0.875, shift=5.0, vae=vae)
    with pytest.raises(ConfigError, match="guidance of low_noise is 0.5: must be at least 1"):
        guidance = {"high_noise": 4.0, "low_noise": 0.5}
        generate(pipeline, embeds(1), embeds(1, 1), **SIZE, steps=2, guidance=guidance, seeds=[0])


# numbers


def test_psnr_is_the_textbooks_on_pixels_in_0_to_255():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (2, 3, 5, 16, 16))
    mse = np.mean((a.astype(float) - b) ** 2)
    expected = 20 * math.log10(255) - 10 * math.log10(mse)

    def pixels(levels):
        return torch.from_numpy(levels).float() / 127.5 - 1

    assert psnr(pixels(a), pixels(b)) == pytest.approx(expected, rel=1e-6)
    assert psnr(pixels(a), pixels(a)) == math.inf


def test_the_nearest_clip_has_the_least_error_over_its_variance():
    bank = torch.randn(3, 4, 2, 3, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 3.0, 0.5]
    ).view(3, 1, 1, 1, 1)
    latents = torch.stack([bank[1] * 1.1, bank[2] + 0.01])

    index, distances = nearest(latents, bank)

    expected = [
        [np.mean((x - y) ** 2) / np.var(y) for y in bank.double().numpy()] for x in latents.double().numpy()
    ]
    assert index.tolist() == [1, 2]
    np.testing.assert_allclose(distances.numpy(), expected, rtol=1e-5)
    mean = bank[:1].mean() * torch.ones_like(bank[:1])
    assert nearest(mean, bank[:1]).mse_over_variance.item() == pytest.approx(1.0, rel=1e-5)


# files


def moving_bar(frames: int = 9, height: int = 32, width: int = 48) -> torch.Tensor:
    pixels = torch.full((3, frames, height, width), -0.8)
    for frame in range(frames):
        pixels[0, frame, :, 4 * frame : 4 * frame + 8] = 0.9
    return pixels


def read_video(path) -> tuple[np.ndarray, av.video.stream.VideoStream]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        return frames, stream


def test_a_video_reads_back_with_its_frames_rate_and_pixels(tmp_path):
    pixels = moving_bar()
    path = tmp_path / "a: clip.mp4"

    write_video(path, pixels, 16)

    with av.open(f"file:{path}") as container:
        stream = container.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        assert (stream.average_rate, stream.codec_context.name, stream.pix_fmt) == (16, "h264", "yuv420p")
    assert frames.shape == (9, 32, 48, 3)
    # chroma has half the resolution; luma is nearly lossless
    assert np.abs(frames.astype(int).mean(axis=-1) - to_uint8(pixels).astype(int).mean(axis=-1)).mean() < 8


def test_levels_of_black_and_white_are_0_and_255():
    pixels = torch.tensor([-1.0, 1.0, 0.0, -2.0, 3.0]).view(1, 5, 1, 1).expand(3, -1, -1, -1)

    assert to_uint8(pixels)[:, 0, 0, 0].tolist() == [0, 255, 128, 0, 255]


def test_a_sheet_has_a_row_for_each_clip_and_each_generated_one(tmp_path):
    clip = moving_bar()
    contact_sheet(tmp_path / "two.png", [("a bar moves", clip, -clip), ("no clip of this", None, clip)])
    contact_sheet(tmp_path / "one.png", [("a bar moves", clip, -clip)])

    two, one = Image.open(tmp_path / "two.png"), Image.open(tmp_path / "one.png")
    cell = (4 * 48, 4 * 32)
    assert one.width == two.width > SHEET_FRAMES * cell[0]
    assert one.height > 2 * cell[1]
    assert two.height - one.height > cell[1]
    assert two.height < 2 * one.height
    seen = {one.getpixel((x, y)) for x in range(0, one.width, 3) for y in range(0, one.height, 3)}
    bar, ground = tuple(to_uint8(clip)[0, 0, 0].tolist()), tuple(to_uint8(clip)[0, 0, 47].tolist())
    assert {bar, ground, (255, 255, 255)} <= seen
    assert tuple(255 - level for level in bar) in {tuple(pixel) for pixel in seen}


def test_a_sheet_of_large_clips_stays_small_and_any_caption_fits(tmp_path):
    clip = torch.zeros(3, 1, 480, 832)

    contact_sheet(
        tmp_path / "a.png", [("word " * 500, None, clip), ("x" * 5000, None, clip), ("", None, clip)]
    )

    width, height = Image.open(tmp_path / "a.png").size
    assert width < 300
    assert height < 3 * 200


def test_slugs_are_file_names_that_can_be_read():
    assert slug("A cat, running!  (fast)") == "a-cat-running-fast"
    assert slug("") == slug("...") == "empty"
    assert slug("日本の猫") == "日本の猫"
    assert slug("../../etc/passwd") == "etc-passwd"
    assert len(slug("word " * 100)) <= 40
    assert not slug("x" * 39 + " y").endswith("-")


def test_samples_are_videos_a_sheet_and_their_numbers(tmp_path):
    clip = moving_bar()
    settings = {"seed": 3, "steps": 4, "guidance": GUIDANCE, "shift": 5.0, "checkpoint": "step_00000100"}
    samples = [
        Sample("a bar moves", expert_calls={"high_noise": 4, "low_noise": 4}, psnr=math.inf, **settings),
        Sample("日本", expert_calls={"high_noise": 4, "low_noise": 4}, **settings),
    ]

    write_samples(tmp_path / "samples" / "step_00000100", samples, [clip, clip], [clip, None], 16)

    folder = tmp_path / "samples" / "step_00000100"
    names = {"00-a-bar-moves.mp4", "01-日本.mp4", "contact.png", "samples.json"}
    assert {path.name for path in folder.iterdir()} == names
    first, second = json.loads((folder / "samples.json").read_text())
    assert first["prompt"] == "a bar moves"
    assert first["psnr"] is None  # infinite
    assert second["file"] == "01-日本.mp4"
    assert second["guidance"] == GUIDANCE
    assert len(read_video(folder / first["file"])[0]) == 9


# scripts/sample.py


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
    (root / "clips").mkdir()
    for name, clip in (("a", moving_bar()), ("b", -moving_bar().flip(-1))):
        write_video(root / "clips" / f"{name}.mp4", clip, 16)
        (root / "clips" / f"{name}.txt").write_text(f"bar {name}")
    settings = command_line.settings(command_line.parse(["recipe=quickstart", "data=clips"]))
    OmegaConf.set_struct(settings, False)
    settings.model.path = str(root / "model")
    settings.model.transformer = {**TINY, "in_channels": 16, "out_channels": 16}
    settings.data.path, settings.data.fps = str(root / "clips"), 16
    settings.data.reader = {"_target_": "wan_ds.data.readers.FolderWithCaptions"}
    settings.data.num_frames, settings.data.height, settings.data.width = 5, 32, 48
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
    monkeypatch.setattr(checkpoints, "read_weights", lambda folder, expert: experts[expert].state_dict())


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
