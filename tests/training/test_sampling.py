"""Samples come from diffusers' pipelines and the experts' own weights."""

import json
import math

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from tests.models.variants import ARCHITECTURES, randomised
from tests.training.bars import GUIDANCE, SIZE, TINY, moving_bar, read_video
from wan_ds import streams
from wan_ds.errors import ConfigError
from wan_ds.models.conditioning import ImageToVideo
from wan_ds.models.encoders import ImageEncoder, encode_video
from wan_ds.models.transformer import WanTransformer
from wan_ds.training.sampling import (
    Sample,
    build_pipeline,
    generate,
    guidance_of,
    write_samples,
)


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

    # our forward and theirs round differently; six steps with guidance 4 let the last bits grow
    torch.testing.assert_close(made.latents, expected, rtol=1e-4, atol=1e-4)
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


# images

VAE_48 = {
    "base_dim": 4,
    "decoder_base_dim": 4,
    "z_dim": 48,
    "num_res_blocks": 1,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.3] * 48,
    "latents_std": [0.5] * 48,
}
CLIP = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
IMAGE_SIZE = {"num_frames": 5, "height": 32, "width": 64}
# variant: how many images, whether tokens have a timestep each
IMAGE_TASKS = {
    "i2v": (1, False),
    "flf2v": (2, False),
    "i2v-a14b": (1, False),
    "ti2v": (1, True),
    "ti2v from text": (0, True),
}


@pytest.fixture(scope="module")
def vae_48():
    return randomised(AutoencoderKLWan(**VAE_48), 0, 0.3).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def clip_encoder():
    encoder = CLIPVisionModel(CLIPVisionConfig(**CLIP, patch_size=14, hidden_act="gelu", projection_dim=16))
    return ImageEncoder(CLIPImageProcessorPil(), randomised(encoder), "cpu")


def drawn(count: int, seed: int) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    shape = (count, IMAGE_SIZE["height"], IMAGE_SIZE["width"], 3)
    return [Image.fromarray(levels) for levels in rng.integers(0, 256, shape, dtype=np.uint8)]


def pixels_of(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 127.5 - 1


def image_parts(variant: str, vae, vae_48, clip_encoder):
    """The transformer of a variant, and what its pipelines are made of beside the scheduler."""
    name = variant.removesuffix(" from text")
    transformer = randomised(WanTransformer(**ARCHITECTURES[name]))
    has_clip = ARCHITECTURES[name].get("image_dim") is not None
    return transformer, (vae_48 if name == "ti2v" else vae), (clip_encoder if has_clip else None)


@pytest.mark.parametrize("variant", IMAGE_TASKS)
def test_a_task_with_images_is_sampled_as_the_stock_pipeline_samples_it(variant, vae, vae_48, clip_encoder):
    images, expand_timesteps = IMAGE_TASKS[variant]
    transformer, autoencoder, image_encoder = image_parts(variant, vae, vae_48, clip_encoder)
    stock = WanTransformer3DModel(**transformer.config).eval()
    stock.load_state_dict(transformer.state_dict())
    parts = {
        "transformer": stock,
        "vae": autoencoder,
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        "tokenizer": None,
        "text_encoder": None,
        "expand_timesteps": expand_timesteps,
    }
    if image_encoder is not None:
        parts |= {"image_encoder": image_encoder.encoder, "image_processor": image_encoder.processor}
    theirs = (WanImageToVideoPipeline if images else WanPipeline)(**parts)
    theirs.set_progress_bar_config(disable=True)
    pictures, last_pictures = drawn(2, 0), drawn(2, 1)
    factor = autoencoder.config.scale_factor_spatial
    shape = (autoencoder.config.z_dim, 2, 32 // factor, 64 // factor)
    expected = []
    for number in range(2):
        given = {"image": pictures[number]} if images else {}
        given |= {"last_image": last_pictures[number]} if images == 2 else {}
        expected += theirs(
            **given,
            prompt_embeds=embeds(2)[number : number + 1],
            negative_prompt_embeds=embeds(1, 1),
            latents=streams.normal(shape, 3, "sample", number)[None],
            **IMAGE_SIZE,
            num_inference_steps=3,
            guidance_scale=4.0,
            output_type="latent",
        ).frames

    ours = build_pipeline(
        {"all": transformer},
        boundary=None,
        shift=3.0,
        vae=autoencoder,
        images=images,
        expand_timesteps=expand_timesteps,
        image_encoder=image_encoder,
    )
    settings = {**IMAGE_SIZE, "steps": 3, "guidance": {"all": 4.0}, "seeds": [3, 3]}
    given = {"images": [pixels_of(picture) for picture in pictures]} if images else {}
    given |= {"last_images": last_pictures} if images == 2 else {}
    made = generate(ours, embeds(2), embeds(1, 1), **settings, **given)

    # rounding, as above
    torch.testing.assert_close(made.latents, torch.stack(expected), rtol=1e-4, atol=1e-4)
    # three steps, with the prompt and without it; clips with images come one at a time
    assert made.expert_calls == {"all": 3 * 2 * (2 if images else 1)}
    for kind in given:  # each of the images counts
        other = given | {kind: drawn(2, 7)}
        changed = generate(ours, embeds(2), embeds(1, 1), **settings, **other).latents
        assert not torch.allclose(changed, made.latents, atol=1e-2)


def test_experts_are_given_what_training_gives_them_and_autocast_holds_in_them_alone(
    vae, vae_48, clip_encoder
):
    transformer, *_ = image_parts("i2v", vae, vae_48, clip_encoder)
    seen, inside = [], []

    def forward(self, hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image, **_):
        seen.append((hidden_states[:, 16:], encoder_hidden_states_image))
        inside.append(torch.is_autocast_enabled("cpu"))
        return (torch.tanh(hidden_states[:, :16] * timestep / 300) + encoder_hidden_states.mean(),)

    spy = type("Spy", (WanTransformer,), {"forward": forward})(**ARCHITECTURES["i2v"])
    pipeline = build_pipeline(
        {"all": spy}, boundary=None, shift=3.0, vae=vae, images=1, image_encoder=clip_encoder
    )
    made = {}
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            made[enabled] = generate(
                pipeline,
                embeds(1),
                embeds(1, 1),
                **IMAGE_SIZE,
                steps=4,
                guidance={"all": 4.0},
                seeds=[0],
                images=drawn(1, 0),
            ).latents

    trained_on = torch.zeros(3, 5, 32, 64)
    trained_on[:, 0] = pixels_of(drawn(1, 0)[0])
    condition = ImageToVideo().condition(trained_on, lambda pixels: encode_video(vae, pixels), clip_encoder)
    given = torch.cat([condition.frame_mask, condition.condition_latents])
    # diffusers scales pixels and latents by the inverse of what we divide by
    torch.testing.assert_close(seen[-1][0][0], given, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen[-1][1][0], condition.image_embeds, rtol=0, atol=0)
    assert inside == [False] * 8 + [True] * 8
    assert torch.equal(made[True], made[False])
    for one, other in zip(seen[:8], seen[8:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_images_that_do_not_fit_the_call_are_refused(vae, experts):
    settings = {**SIZE, "steps": 2, "guidance": {"all": 1.0}, "seeds": [0]}
    text = build_pipeline({"all": experts["low_noise"]}, boundary=None, shift=3.0, vae=vae)
    with pytest.raises(ValueError, match="1 clips of WanPipeline need 0 images .*, not 1 and 0"):
        generate(text, embeds(1), embeds(1, 1), **settings, images=drawn(1, 0))
    image = build_pipeline({"all": experts["low_noise"]}, boundary=None, shift=3.0, vae=vae, images=1)
    with pytest.raises(ValueError, match="need 1 images and as many or no last ones, not 0 and 0"):
        generate(image, embeds(1), embeds(1, 1), **settings)
    with pytest.raises(ValueError, match="an image of 32x64 for a video of 32x48"):
        generate(image, embeds(1), embeds(1, 1), **settings, images=drawn(1, 0))


def test_a_model_that_attends_to_clip_is_not_sampled_without_it(vae, vae_48, clip_encoder):
    transformer, *_ = image_parts("i2v", vae, vae_48, clip_encoder)
    with pytest.raises(ConfigError, match="model.image_encoder.weights=null: .*model.image_encoder.weights="):
        build_pipeline({"all": transformer}, boundary=None, shift=3.0, vae=vae, images=1)


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
