"""scripts/convert.py on tiny models of every variant: opened by the libraries, the same there and back."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

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
from safetensors.torch import save_file
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.models.variants import ARCHITECTURES, randomised
from tests.network import no_network
from wan_ds import convert
from wan_ds.convert import ConvertOptions, Format, main
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.interop import configs, conversion, fitting, layouts, names, shards
from wan_ds.interop.conversion import Component, Listing, Made, Output
from wan_ds.interop.journal import read_journal
from wan_ds.interop.tensor_files import Stamp, Stored, open_tensor_files

ROOT = Path(__file__).parents[2]
DUAL = {"t2v-a14b": "t2v", "i2v-a14b": "i2v-a14b"}  # variants with two experts: the architecture of each
VARIANTS = ("t2v", "i2v", "flf2v", "t2v-a14b", "i2v-a14b", "ti2v")
ROLES = ("transformer", "transformer_2", "vae", "text_encoder", "image_encoder")
T5 = "models_t5_umt5-xxl-enc-bf16"
CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14"

VAE_21 = {"base_dim": 3, "z_dim": 16, "num_res_blocks": 1, "latents_mean": [0.1] * 16}
VAE_22 = {"base_dim": 4, "decoder_base_dim": 8, "z_dim": 48, "num_res_blocks": 1, "is_residual": True}
VAE_22 |= {"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
VAE_22 |= {"latents_mean": configs.LATENTS_MEAN_48, "latents_std": configs.LATENTS_STD_48}
CLIP_CONFIG = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP_CONFIG |= {"patch_size": 14, "image_size": 224, "hidden_act": "gelu", "projection_dim": 16}


@pytest.fixture(autouse=True)
def _offline():
    """All of it is local, so nothing may ask the network."""
    with no_network():
        yield


def transformer(variant, seed=0, **changes):
    """bf16 with some float32, as the released files are mixed."""
    model = randomised(WanTransformer3DModel(**ARCHITECTURES[DUAL.get(variant, variant)] | changes), seed)
    model.bfloat16()
    for block in model.blocks:
        block.scale_shift_table.data = block.scale_shift_table.data.float()
    return model


def text_encoder():
    config = UMT5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return randomised(UMT5EncoderModel(config), 1).bfloat16()


def image_encoder(**changes):
    return randomised(CLIPVisionModel(CLIPVisionConfig(**CLIP_CONFIG | changes)), 2).half()


def tokenizer():
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in "act")]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def pipeline(variant):
    """diffusers' own, filled with random numbers."""
    is_text = variant in ("t2v", "t2v-a14b", "ti2v")
    shift = {"t2v": 5.0, "i2v": 5.0, "flf2v": 16.0, "t2v-a14b": 12.0, "i2v-a14b": 5.0, "ti2v": 5.0}[variant]
    clip = {}
    if not is_text:
        has_clip = variant in ("i2v", "flf2v")
        clip = {"image_encoder": image_encoder() if has_clip else None}
        clip["image_processor"] = CLIPImageProcessor(do_convert_rgb=True) if has_clip else None
    return (WanPipeline if is_text else WanImageToVideoPipeline)(
        tokenizer=tokenizer(),
        text_encoder=text_encoder(),
        vae=randomised(AutoencoderKLWan(**(VAE_22 if variant == "ti2v" else VAE_21)), 3),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            num_train_timesteps=1000,
            flow_shift=shift,
        ),
        transformer=transformer(variant),
        transformer_2=transformer(variant, seed=1) if variant in DUAL else None,
        boundary_ratio={"t2v-a14b": 0.875, "i2v-a14b": 0.9}.get(variant),
        expand_timesteps=variant == "ti2v",
        **clip,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For a variant: diffusers' own folder, the original made of it, and diffusers' made of that."""
    made = {}

    def of(variant):
        if variant not in made:
            root = tmp_path_factory.mktemp(variant)
            pipeline(variant).save_pretrained(root / "diffusers")
            converted(root / "diffusers", root / "original", "original")
            converted(root / "original", root / "back", "diffusers")
            made[variant] = root
        return made[variant]

    return of


def converted(source, target, layout, **options):
    assert main(ConvertOptions(str(source), str(target), Format[layout], **options)) == 0
    return target


def tensors_at(path):
    files = open_tensor_files(path)
    return files.read(files.tensors)


def same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(*raw), name
    return True


def said(folder, name="config.json"):
    """A configuration without what tells only which library wrote it."""
    content = json.loads((folder / name).read_text())
    return {
        key: value for key, value in content.items() if key not in ("_diffusers_version", "_name_or_path")
    }


def latents(folder):
    is_text = said(folder, "model_index.json")["_class_name"] == "WanPipeline"
    found = (WanPipeline if is_text else WanImageToVideoPipeline).from_pretrained(folder)
    found.set_progress_bar_config(disable=True)
    image = {} if is_text else {"image": Image.linear_gradient("L").convert("RGB").resize((32, 32))}
    if found.transformer.config.pos_embed_seq_len:
        image["last_image"] = image["image"].rotate(90)
    return found(
        prompt="a cat",
        height=32,
        width=32,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        **image,
    ).frames


# ---- whole models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back_is_identical_to_the_byte(variant, folders):
    before, after = folders(variant) / "diffusers", folders(variant) / "back"
    present = [role for role in ROLES if (before / role).is_dir()]
    assert [role for role in ROLES if (after / role).is_dir()] == present
    for role in present:
        expected = tensors_at(before / role)
        if role == "image_encoder":  # transformers 5 writes it without the prefix
            assert not names.image_encoder_prefix(expected)
        assert same(tensors_at(after / role), expected), role
        assert said(after / role) == said(before / role), role
    for name in ("tokenizer_config.json", "tokenizer.json"):
        assert (after / "tokenizer" / name).read_bytes() == (before / "tokenizer" / name).read_bytes()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stock_pipeline_opens_what_was_converted_and_samples_the_same(variant, folders):
    before, after = folders(variant) / "diffusers", folders(variant) / "back"
    was, now = (said(folder, "model_index.json") for folder in (before, after))
    for class_names in (was, now):  # those of the installed transformers, and those of released models
        class_names["tokenizer"] = "T5Tokenizer" in class_names.pop("tokenizer")[1]
        class_names["image_processor"] = (class_names.get("image_processor") or [None])[0]
    assert now == was
    scheduler = said(after / "scheduler", "scheduler_config.json")
    assert scheduler == said(before / "scheduler", "scheduler_config.json")
    assert torch.equal(latents(after), latents(before))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_original_folder_is_laid_out_as_the_released_ones(variant, folders):
    folder = folders(variant) / "original"
    weights = {"diffusion_pytorch_model.safetensors", "config.json"}
    experts = ("high_noise_model", "low_noise_model") if variant in DUAL else (".",)
    vae = "Wan2.2_VAE" if variant == "ti2v" else "Wan2.1_VAE"
    expected = {f"{expert}/{name}".removeprefix("./") for expert in experts for name in weights}
    expected |= {f"{vae}.pth", f"{vae}.json", f"{T5}.pth", f"{T5}.json", "sampling.json"}
    if variant in ("i2v", "flf2v"):
        expected |= {f"{CLIP}.pth", f"{CLIP}.json"}
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {name for name in found if not name.startswith("google/umt5-xxl/")} == expected
    assert "google/umt5-xxl/tokenizer.json" in found

    model_type = {"t2v-a14b": "t2v", "i2v-a14b": "i2v"}.get(variant, variant)
    channels = {"t2v": (16, 16), "ti2v": (48, 48)}.get(model_type, (36, 16))
    assert said(folder / experts[0]) == {
        "_class_name": "WanModel",
        "model_type": model_type,
        "dim": 48,
        "ffn_dim": 64,
        "freq_dim": 32,
        "num_heads": 4,
        "num_layers": 2,
        "in_dim": channels[0],
        "out_dim": channels[1],
        "text_len": 512,
        "eps": 1e-6,
    }


def test_experts_stay_in_their_places(folders):
    root = folders("t2v-a14b")
    for role, expert in (("transformer", "high_noise_model"), ("transformer_2", "low_noise_model")):
        key = "condition_embedder.time_proj.weight"
        expected = tensors_at(root / "diffusers" / role)[key]
        assert torch.equal(tensors_at(root / "original" / expert)["time_projection.1.weight"], expected)


def test_a_boundary_without_a_second_transformer_is_not_two_experts(folders, tmp_path):
    source = shutil.copytree(folders("t2v") / "diffusers", tmp_path / "source")
    index = json.loads((source / "model_index.json").read_text())
    (source / "model_index.json").write_text(json.dumps(index | {"boundary_ratio": 0.875}))
    original = converted(source, tmp_path / "original", "original")
    assert (original / "diffusion_pytorch_model.safetensors").is_file()
    back = converted(original, tmp_path / "back", "diffusers")
    assert said(back, "model_index.json")["boundary_ratio"] is None


def test_the_name_of_a_480p_folder_gives_its_shift(folders, tmp_path):
    source = shutil.copytree(folders("i2v") / "original", tmp_path / "Wan2.1-I2V-14B-480P")
    (source / "sampling.json").unlink()  # as released
    target = converted(source, tmp_path / "target", "diffusers")
    assert said(target / "scheduler", "scheduler_config.json")["flow_shift"] == 3.0


def test_a_model_without_encoders_says_so_and_still_opens(folders, tmp_path, caplog):
    source = shutil.copytree(folders("t2v") / "original", tmp_path / "source")
    (source / f"{T5}.pth").unlink()
    shutil.rmtree(source / "google")
    target = converted(source, tmp_path / "target", "diffusers")
    assert "has no text_encoder, no tokenizer, and neither has what is written" in caplog.text
    opened = WanPipeline.from_pretrained(target, text_encoder=None, tokenizer=None)
    assert same(opened.vae.state_dict(), tensors_at(target / "vae"))


# ---- single components -----------------------------------------------------------------------------------


def test_names_and_settings_of_a_real_width_need_no_configuration_beside(tmp_path):
    """Heads of 128 (transformer) and 80 (CLIP), the official latent statistics: all from the shapes."""
    models = {
        "transformer": transformer(
            "flf2v", num_attention_heads=2, attention_head_dim=128, added_kv_proj_dim=256
        ),
        "vae": randomised(AutoencoderKLWan(**VAE_22)),
        "vae_21": randomised(AutoencoderKLWan(base_dim=3)),
        "text_encoder": text_encoder(),
        "image_encoder": image_encoder(hidden_size=160, projection_dim=1024),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name / "diffusers")
        original = converted(tmp_path / name / "diffusers", tmp_path / name / "original", "original")
        for note in original.glob("*.json"):
            note.unlink()
        back = converted(original, tmp_path / name / "back", "diffusers")
        opened = type(model).from_pretrained(back)
        for key, tensor in opened.state_dict().items():
            assert torch.equal(tensor.float(), model.state_dict()[key].float()), key
        assert told(opened.config) == told(model.config), name


def told(config):
    """A model's settings as plain values, without where they were read from and how they are stored."""
    plain = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    left_out = ("dtype", "transformers_version", "architectures")
    kept = {key: value for key, value in plain.items() if not key.startswith("_") and key not in left_out}
    return json.loads(json.dumps(kept))


def original_clip(model):
    """Wan's file for a CLIPVisionModel by hand, with a text half and a head."""
    state = {key.removeprefix("vision_model."): tensor for key, tensor in model.state_dict().items()}
    made = {
        "visual.cls_embedding": state["embeddings.class_embedding"][None, None],
        "visual.pos_embedding": state["embeddings.position_embedding.weight"][None],
        "visual.patch_embedding.weight": state["embeddings.patch_embedding.weight"],
        "visual.head": torch.randn(24, 16).half(),
        "textual.token_embedding.weight": torch.randn(9, 4).half(),
        "textual.blocks.0.attn.q.weight": torch.randn(4, 4).half(),
        "log_scale": torch.tensor(2.5).half(),
    }
    for leaf in ("weight", "bias"):
        made[f"visual.pre_norm.{leaf}"] = state[f"pre_layrnorm.{leaf}"]
        made[f"visual.post_norm.{leaf}"] = state[f"post_layernorm.{leaf}"]
        for layer in range(CLIP_CONFIG["num_hidden_layers"]):
            theirs, ours = f"encoder.layers.{layer}", f"visual.transformer.{layer}"
            qkv = [state[f"{theirs}.self_attn.{part}_proj.{leaf}"] for part in ("q", "k", "v")]
            made[f"{ours}.attn.to_qkv.{leaf}"] = torch.cat(qkv)
            made[f"{ours}.attn.proj.{leaf}"] = state[f"{theirs}.self_attn.out_proj.{leaf}"]
            made[f"{ours}.mlp.0.{leaf}"] = state[f"{theirs}.mlp.fc1.{leaf}"]
            made[f"{ours}.mlp.2.{leaf}"] = state[f"{theirs}.mlp.fc2.{leaf}"]
            for norm in (1, 2):
                made[f"{ours}.norm{norm}.{leaf}"] = state[f"{theirs}.layer_norm{norm}.{leaf}"]
    return made


def clip_folder(folder):
    """An original CLIP file, with the heads of its tiny model beside."""
    model = image_encoder()
    state = original_clip(model)
    folder.mkdir()
    torch.save(state, folder / f"{CLIP}.pth")
    (folder / f"{CLIP}.json").write_text(model.config.to_json_string())
    return model, state


def test_the_original_clip_comes_back_whole_with_its_text_half(tmp_path):
    model, state = clip_folder(tmp_path / "original")
    diffusers = converted(tmp_path / "original", tmp_path / "diffusers", "diffusers")
    assert all(key.startswith("vision_model.") for key in open_tensor_files(diffusers).tensors)
    opened, told = CLIPVisionModel.from_pretrained(diffusers, output_loading_info=True, dtype=torch.float16)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    pixels = torch.randn(1, 3, 224, 224).half()
    expected = model(pixels, output_hidden_states=True).hidden_states[-2]
    assert torch.equal(opened(pixels, output_hidden_states=True).hidden_states[-2], expected)
    back = converted(diffusers, tmp_path / "back", "original")
    assert same(torch.load(back / f"{CLIP}.pth", weights_only=True), state)


def test_a_whole_models_clip_keeps_its_text_half_and_tokenizer(folders, tmp_path):
    source = shutil.copytree(folders("i2v") / "original", tmp_path / "source")
    (source / "xlm-roberta-large").mkdir()
    (source / "xlm-roberta-large" / "tokenizer.json").write_text("{}")
    _, state = clip_folder(tmp_path / "clip")
    shutil.copy(tmp_path / "clip" / f"{CLIP}.pth", source)
    diffusers = converted(source, tmp_path / "diffusers", "diffusers")
    WanImageToVideoPipeline.from_pretrained(diffusers)
    back = converted(diffusers, tmp_path / "back", "original")
    assert same(torch.load(back / f"{CLIP}.pth", weights_only=True), state)
    assert (back / "xlm-roberta-large" / "tokenizer.json").read_text() == "{}"


def test_a_clip_without_its_text_half_is_remarked_upon(folders, tmp_path, caplog):
    converted(folders("i2v") / "diffusers", tmp_path / "original", "original")
    assert "has no text half of CLIP" in caplog.text and "will not load" in caplog.text


def test_a_prefixed_single_file_is_read_and_a_tied_embedding_is_written_once(tmp_path):
    model = transformer("t2v")
    to_original = names.original_transformer_names(model.state_dict())
    prefixed = {
        f"model.diffusion_model.{to_original[name]}": tensor for name, tensor in model.state_dict().items()
    }
    (tmp_path / "comfy").mkdir()
    torch.save(prefixed, tmp_path / "comfy" / "wan.pt")
    (tmp_path / "comfy" / "config.json").write_text('{"num_heads": 4}')
    target = converted(tmp_path / "comfy" / "wan.pt", tmp_path / "target", "diffusers")
    assert same(tensors_at(target), model.state_dict())

    state = text_encoder().state_dict()
    assert {"shared.weight", "encoder.embed_tokens.weight"} <= set(state)
    (tmp_path / "text").mkdir()
    torch.save(state, tmp_path / "text" / "pytorch_model.bin")
    original = converted(tmp_path / "text", tmp_path / "text_original", "original")
    written = torch.load(original / f"{T5}.pth", weights_only=True)
    assert len(written) == len(state) - 1
    assert torch.equal(written["token_embedding.weight"], state["shared.weight"])

    torch.save(state | {"shared.weight": state["shared.weight"] + 1}, tmp_path / "text" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="shared.weight and encoder.embed_tokens.weight differ"):
        converted(tmp_path / "text", tmp_path / "untied", "original")


def test_large_components_become_shards_that_diffusers_opens(tmp_path, monkeypatch):
    model = transformer("i2v")
    model.save_pretrained(tmp_path / "diffusers", max_shard_size="40KB")
    monkeypatch.setattr(convert, "SHARD_BYTES", 50_000)
    original = converted(tmp_path / "diffusers", tmp_path / "original", "original")
    back = converted(original, tmp_path / "back", "diffusers")
    for folder in (original, back):
        held = sorted(path.name for path in folder.glob("*.safetensors"))
        assert len(held) > 3
        assert held[0] == f"diffusion_pytorch_model-00001-of-{len(held):05d}.safetensors"
    assert same(tensors_at(back), model.state_dict())
    opened = WanTransformer3DModel.from_pretrained(back)
    assert same(opened.state_dict(), model.float().state_dict())


# ---- delete_source ---------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    """An original transformer in shards, and what it holds."""
    monkeypatch.setattr(convert, "SHARD_BYTES", 50_000)
    transformer("t2v").save_pretrained(tmp_path / "diffusers")
    converted(tmp_path / "diffusers", tmp_path / "original", "original")
    assert len(list((tmp_path / "original").glob("*.safetensors"))) > 3
    monkeypatch.setattr(convert, "SHARD_BYTES", 30_000)  # so that a source shard becomes parts of several
    return tmp_path / "original", tensors_at(tmp_path / "diffusers")


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_source_is_kept_unless_told_otherwise(sharded, tmp_path):
    source, _ = sharded
    before = files_of(source)
    converted(source, tmp_path / "target", "diffusers")
    assert files_of(source) == before


def test_delete_source_removes_each_shard_and_keeps_what_is_no_weights(sharded, tmp_path, capsys):
    source, state = sharded
    shards_of_source = sorted(source.glob("*.safetensors"))
    target = converted(source, tmp_path / "target", "diffusers", delete_source=True)
    assert same(tensors_at(target), state)
    assert not list(source.glob("*.safetensors")) and (source / "config.json").is_file()
    assert all(str(path) in capsys.readouterr().out.split("removed")[1] for path in shards_of_source[:1])


def test_delete_source_needs_room_for_little_more_than_a_shard(sharded, tmp_path):
    source, state = sharded
    found = convert._planned(source, Format.diffusers).found
    planned = convert.Planned(found, convert._outputs(found))
    total = sum(tensor.nbytes for tensor in state.values())
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    assert convert._bytes_needed(planned, tmp_path, delete_source=False) == total
    assert convert._bytes_needed(planned, tmp_path, delete_source=True) <= 3 * largest < total


@pytest.mark.parametrize("name", ["vae", "text_encoder", "image_encoder"])
def test_delete_source_removes_a_pth_file(name, tmp_path):
    model = {"vae": lambda: randomised(AutoencoderKLWan(**VAE_21)), "text_encoder": text_encoder}
    model.get(name, image_encoder)().save_pretrained(tmp_path / "diffusers")
    expected = tensors_at(tmp_path / "diffusers")
    original = converted(tmp_path / "diffusers", tmp_path / "original", "original", delete_source=True)
    assert not list((tmp_path / "diffusers").glob("*.safetensors"))
    back = converted(original, tmp_path / "back", "diffusers", delete_source=True)
    assert not list(original.glob("*.pth"))
    assert same(tensors_at(back), expected)


def filling_up(monkeypatch, after):
    """The disk is full once so many weights files are written."""
    to_disk, written = shards._to_disk, []

    def full(file):
        if str(file.name).endswith(".safetensors.partial"):
            if len(written) == after:
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(file)
        to_disk(file)

    monkeypatch.setattr(shards, "_to_disk", full)


@pytest.mark.parametrize("delete_source", [False, True])
@pytest.mark.parametrize("after", [0, 3])
def test_a_disk_that_fills_up_loses_nothing_and_the_same_command_goes_on(
    sharded, tmp_path, monkeypatch, after, delete_source
):
    source, state = sharded
    before = files_of(source)
    with monkeypatch.context() as patch:
        filling_up(patch, after)
        with pytest.raises(CheckpointError, match=r"No space left.*target holds.*The same command goes on"):
            converted(source, tmp_path / "target", "diffusers", delete_source=delete_source)
    if not delete_source or not after:
        assert files_of(source) == before
    else:
        assert 0 < len(list(source.glob("*.safetensors"))) < len([n for n in before if n.endswith("tensors")])
    assert not list((tmp_path / "target").glob("*.partial"))
    held = dict(state)
    to_new = names.transformer_names(names.original_transformer_names(state).values())
    for folder, rename in ((source, to_new), (tmp_path / "target", None)):
        for path in folder.glob("*.safetensors"):
            for name, tensor in tensors_at(path).items():
                new = rename[name] if rename else name
                assert torch.equal(tensor, state[new])
                held.pop(new, None)
    assert not held  # every tensor is in a whole file of the source or of the target

    target = converted(source, tmp_path / "target", "diffusers", delete_source=delete_source)
    assert same(tensors_at(target), state)
    WanTransformer3DModel.from_pretrained(target)
    assert not (target / convert.JOURNAL).exists()


def test_a_file_that_reads_back_differently_keeps_its_source(sharded, tmp_path, monkeypatch):
    source, _ = sharded
    before = files_of(source)
    write = conversion.write_safetensors

    def corrupting(path, *arguments):
        write(path, *arguments)
        with path.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))

    monkeypatch.setattr(conversion, "write_safetensors", corrupting)
    with pytest.raises(CheckpointError, match="does not read back as it was written"):
        converted(source, tmp_path / "target", "diffusers", delete_source=True)
    assert files_of(source) == before


def planned_of(*paths):
    """A conversion of files with a tensor each, as far as its sources are looked at."""
    components = []
    for number, path in enumerate(paths):
        listing = Listing(
            str(path), {f"{number}": Stored((2,), torch.float32)}, {path: [f"{number}"]}, {}, {}
        )
        components.append(Component(names.Kind("vae", "original"), f"{number}", listing, {}))
    return convert.Planned(layouts.Found(components, True), [])


def of_one_tensor(path):
    """Three tensors made of a source's one, in a file each."""
    path.touch()
    status = path.stat()
    listing = Listing(
        str(path), {"all": Stored((6,), torch.float32)}, {path: ["all"]}, {path: Stamp.of(status)}, {}
    )
    made = {part: Made(Stored((2,), torch.float32), ("all",), lambda found: found[0][:2]) for part in "qkv"}
    return Output(PurePosixPath("."), "m", listing, made, max_bytes=8)


def test_a_source_is_done_with_when_the_last_file_made_of_it_is(tmp_path):
    output = of_one_tensor(tmp_path / "source.pth")
    left = convert._Left(convert.Planned(layouts.Found([], True), [output]))
    finished = [left.finished_by(output, file) for file in output.files]
    assert finished == [[], [], [tmp_path / "source.pth"]]


def test_a_clip_is_removed_after_the_last_of_its_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "SHARD_BYTES", 2_000)  # query, key and value in files of their own
    model, _ = clip_folder(tmp_path / "clip")
    source = tmp_path / "clip" / f"{CLIP}.pth"
    unlink, there = Path.unlink, []

    def noting(path, **options):
        if path == source:
            there.extend(open_tensor_files(tmp_path / "target").tensors)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", noting)
    target = converted(tmp_path / "clip", tmp_path / "target", "diffusers", delete_source=True)
    assert not source.exists() and set(there) == {f"vision_model.{name}" for name in model.state_dict()}
    found = {name.removeprefix("vision_model."): tensor for name, tensor in tensors_at(target).items()}
    assert same(found, model.state_dict())


MORE = {
    "another state": (
        lambda state, folder: torch.save({"state_dict": state, "ema": state, "step": 7}, folder / "a.pth"),
        "also holds ema, step, for which the target has no place",
    ),
    "notes in the header": (
        lambda state, folder: save_file(
            state, folder / "a.safetensors", metadata={"format": "pt", "by": "me"}
        ),
        "also holds __metadata__.by, for which",
    ),
}


@pytest.mark.parametrize("what", MORE)
def test_a_file_that_holds_more_than_is_written_is_not_removed(what, tiny, tmp_path):
    make, words = MORE[what]
    source = tmp_path / "source"
    source.mkdir()
    make(tensors_at(tiny / "original"), source)
    shutil.copy(tiny / "original" / "config.json", source)
    before = files_of(source)
    with pytest.raises(ConfigError, match=rf"delete_source=true: \S+a\.\w+ {words}"):
        converted(source, tmp_path / "new", "diffusers", delete_source=True)
    assert files_of(source) == before and not (tmp_path / "new").exists()
    target = converted(source, tmp_path / "new", "diffusers")
    assert same(tensors_at(target), tensors_at(tiny / "diffusers"))


def test_a_tensor_that_no_file_of_the_target_takes_keeps_its_source(tmp_path):
    model = image_encoder()
    state = model.state_dict() | {"embeddings.position_ids": torch.arange(257)[None]}
    (tmp_path / "clip").mkdir()
    torch.save(state, tmp_path / "clip" / "pytorch_model.bin")
    (tmp_path / "clip" / "config.json").write_text(model.config.to_json_string())
    with pytest.raises(ConfigError, match="also holds embeddings.position_ids, for which"):
        converted(tmp_path / "clip", tmp_path / "new", "original", delete_source=True)


def _files(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return [root / name for name in names]


def test_files_in_a_linked_folder_or_listed_twice_are_not_removed(tmp_path):
    pipe = tmp_path / "pipe"
    own, _ = _files(tmp_path, "pipe/transformer/a.bin", "shared/vae/a.bin")
    (pipe / "vae").symlink_to(tmp_path / "shared" / "vae")
    (pipe / "transformer_2").symlink_to(pipe / "transformer")
    convert._refuse_shared(planned_of(own), pipe)
    for folder in ("vae", "transformer_2"):
        with pytest.raises(
            ConfigError, match=rf"{folder}/a.bin is a link, .* or in a folder that is one, to "
        ):
            convert._refuse_shared(planned_of(own, pipe / folder / "a.bin"), pipe)
    with pytest.raises(ConfigError, match=r"is a link, .* to \S+shared/vae/a.bin"):  # through an index
        convert._refuse_shared(planned_of(pipe / "transformer" / ".." / ".." / "shared/vae/a.bin"), pipe)
    os.link(own, pipe / "transformer" / "same.bin")
    with pytest.raises(ConfigError, match="a.bin and .*same.bin are one file"):
        convert._refuse_shared(planned_of(own, pipe / "transformer" / "same.bin"), pipe)
    (tmp_path / "name").symlink_to(pipe)  # the source as typed may be a link to a folder
    convert._refuse_shared(planned_of(tmp_path / "name" / "transformer" / "a.bin"), tmp_path / "name")


def test_a_pipeline_with_a_linked_part_loses_nothing(folders, tmp_path):
    source = shutil.copytree(folders("t2v") / "diffusers", tmp_path / "pipe")
    (source / "vae").rename(tmp_path / "shared")
    (source / "vae").symlink_to(tmp_path / "shared")
    with pytest.raises(ConfigError, match="vae/diffusion_pytorch_model.safetensors is a link"):
        converted(source, tmp_path / "new", "original", delete_source=True)
    assert (tmp_path / "shared" / "diffusion_pytorch_model.safetensors").is_file()


def test_what_is_removed_was_on_the_disk_by_content_and_name_and_read_from_there(tiny, tmp_path, monkeypatch):
    source = shutil.copytree(tiny / "original", tmp_path / "source")
    target = tmp_path / "new" / "target"
    weights, events = "diffusion_pytorch_model.safetensors", []
    fsync, replace, unlink, advise = os.fsync, os.replace, Path.unlink, os.posix_fadvise

    def place(descriptor):
        return os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)

    def noting(what, call, name):
        def called(*arguments, **options):
            events.append((what, name(*arguments)))
            return call(*arguments, **options)

        return called

    monkeypatch.setattr(os, "fsync", noting("sync", fsync, place))
    monkeypatch.setattr(os, "replace", noting("name", replace, lambda _, path: path.name))
    monkeypatch.setattr(Path, "unlink", noting("remove", unlink, lambda path: path.name))
    monkeypatch.setattr(os, "posix_fadvise", noting("forget", advise, lambda fd, *_: place(fd)))
    converted(source, target, "diffusers", delete_source=True)
    held = [event for event in events if "conversion" not in event[1] and "config" not in event[1]]
    first = held.index(("sync", f"new/target/{weights}.partial"))
    assert {("sync", "."), ("sync", "new")} <= set(held[:first])  # the names of the folders
    assert held[first + 1 : first + 3] == [("name", weights), ("sync", "new/target")]
    assert ("forget", f"new/target/{weights}") in held[first + 3 : held.index(("remove", weights))]
    assert os.POSIX_FADV_DONTNEED == 4  # of Linux, and what is asked for below
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: asked.append(arguments[1:]))
    shards.leave_memory(target / weights)
    assert asked == [(0, 0, os.POSIX_FADV_DONTNEED)]


def interrupted(sharded, tmp_path, monkeypatch, after=3, delete_source=False):
    """An unfinished conversion: source, target, and the files that are written."""
    source, _ = sharded
    with monkeypatch.context() as patch:
        filling_up(patch, after)
        with pytest.raises(CheckpointError, match="No space left"):
            converted(source, tmp_path / "target", "diffusers", delete_source=delete_source)
    return source, tmp_path / "target", sorted((tmp_path / "target").glob("*.safetensors"))


def test_a_file_that_was_never_compared_and_cannot_be_costs_no_source(sharded, tmp_path, monkeypatch):
    source, target, written = interrupted(sharded, tmp_path, monkeypatch)
    assert json.loads((target / convert.JOURNAL).read_text())["verified"] == []
    lost = sorted(source.glob("*.safetensors"))[0]
    lost.rename(tmp_path / "lost")
    before = files_of(source)
    with pytest.raises(CheckpointError, match=rf"{written[0].name} was never compared .*{lost.name} is gone"):
        converted(source, target, "diffusers", delete_source=True)
    assert files_of(source) == before
    (tmp_path / "lost").rename(lost)
    converted(source, target, "diffusers", delete_source=True)
    assert same(tensors_at(target), sharded[1])


def test_a_compared_file_is_known_as_such_to_the_next_start(sharded, tmp_path, monkeypatch):
    source, target, written = interrupted(sharded, tmp_path, monkeypatch, delete_source=True)
    journal = json.loads((target / convert.JOURNAL).read_text())
    assert journal["verified"] == [path.name for path in written]
    compared = []
    compare = Output.compare
    monkeypatch.setattr(Output, "compare", lambda *args: (compared.append(args[2]), compare(*args)))
    converted(source, target, "diffusers", delete_source=True)
    assert compared and not set(compared) & {path.name for path in written}


def test_a_conversion_that_removed_its_source_and_was_not_ended_is_ended(tiny, tmp_path, monkeypatch):
    source = tmp_path / "source.safetensors"
    state = tensors_at(tiny / "original")
    save_file({f"diffusion_model.{name}": tensor for name, tensor in state.items()}, source)
    shutil.copy(tiny / "original" / "config.json", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(convert, "JOURNAL", "another")  # the unlinking of which fails
        with pytest.raises(CheckpointError, match="No such file .*another"):
            converted(source, tmp_path / "target", "diffusers", delete_source=True)
    assert not source.exists() and (tmp_path / "target" / convert.JOURNAL).is_file()
    target = converted(source, tmp_path / "target", "diffusers", delete_source=True)
    assert not (target / convert.JOURNAL).exists()
    assert same(tensors_at(target), tensors_at(tiny / "diffusers"))


def test_a_source_that_is_needed_and_gone_is_named(sharded, tmp_path, monkeypatch):
    source, target, _ = interrupted(sharded, tmp_path, monkeypatch, after=0)
    lost = sorted(source.glob("*.safetensors"))[-1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=rf"{lost.name}: not there, and \S+ is still to be made of it"):
        converted(source, target, "diffusers")


def test_a_source_that_changed_meanwhile_is_not_gone_on_with(sharded, tmp_path, monkeypatch):
    source, target, _ = interrupted(sharded, tmp_path, monkeypatch)
    changed = sorted(source.glob("*.safetensors"))[-1]
    os.utime(changed, ns=(0, changed.stat().st_mtime_ns + 1))
    with pytest.raises(
        CheckpointError, match=rf"{changed.name} is not the file that the conversion began with"
    ):
        converted(source, target, "diffusers")


def test_a_finished_file_that_is_not_whole_is_not_gone_on_with(sharded, tmp_path, monkeypatch):
    source, target, written = interrupted(sharded, tmp_path, monkeypatch)
    whole = written[1].read_bytes()
    written[1].write_bytes(whole[:-9])
    with pytest.raises(CheckpointError, match=rf"{written[1].name} is truncated.* Remove it, and the same"):
        converted(source, target, "diffusers")
    written[1].write_bytes(whole)
    state = tensors_at(written[1])
    other = next(iter(state))
    for wrong in (
        {name: tensor for name, tensor in state.items() if name != other},
        state | {other: state[other].to(torch.float16)},
        state | {other: state[other].new_zeros(3)},
        state | {"more": torch.ones(1)},
    ):
        save_file(wrong, written[1])
        with pytest.raises(
            CheckpointError, match=rf"{written[1].name} is not what was written here: \S+ differ"
        ):
            converted(source, target, "diffusers")
    written[1].unlink()
    converted(source, target, "diffusers")
    assert same(tensors_at(target), sharded[1])


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interruption_before_the_weights_is_gone_on_from(failure, folders, tmp_path, monkeypatch):
    source, target = folders("t2v") / "original", tmp_path / "target"

    def fails(*arguments, **options):
        raise failure

    expected = CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(convert.shutil, "copytree", fails)
        with pytest.raises(expected) as error:
            converted(source, target, "diffusers")
    if expected is CheckpointError:
        assert f"target={target} cannot be written: [Errno 28]" in str(error.value)
        assert "The same command goes on from here" in str(error.value)
    assert [path.name for path in target.iterdir()] == [convert.JOURNAL]
    converted(source, target, "diffusers")
    whole = folders("t2v") / "back"
    files = [{path.relative_to(top) for path in top.rglob("*")} for top in (target, whole)]
    assert files[0] == files[1]
    assert all(
        (target / file).read_bytes() == (whole / file).read_bytes() for file in files[0] if file.suffix
    )


def test_a_half_written_journal_does_not_make_the_target_somebody_elses(tiny, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / f"{convert.JOURNAL}.partial").write_text("{")
    target = converted(tiny / "original", tmp_path / "new", "diffusers")
    assert {path.name for path in target.iterdir()} == {"config.json", "diffusion_pytorch_model.safetensors"}


BROKEN = {
    "nothing": lambda whole: "",
    "a list": lambda whole: "[1, 2]",
    "an empty object": lambda whole: "{}",
    "half of it": lambda whole: whole[: len(whole) // 2],
    "no components": lambda whole: json.dumps(json.loads(whole) | {"components": []}),
    "components of numbers": lambda whole: json.dumps(json.loads(whole) | {"components": [3]}),
    "a dtype that is none": lambda whole: whole.replace("bfloat16", "nn"),
    "a number of files": lambda whole: json.dumps(json.loads(whole) | {"verified": 3}),
}


def test_a_broken_journal_is_an_error_that_names_it(sharded, tmp_path, monkeypatch):
    source, target, _ = interrupted(sharded, tmp_path, monkeypatch, after=0)
    whole = (target / convert.JOURNAL).read_text()
    assert read_journal(target, source, "diffusers").found.components
    for what, change in BROKEN.items():
        (target / convert.JOURNAL).write_text(change(whole))
        with pytest.raises(CheckpointError, match=rf"target/{convert.JOURNAL} is no journal of a conversion"):
            read_journal(target, source, "diffusers")
            pytest.fail(what)


def test_an_unfinished_target_is_not_gone_on_with_by_another_command(sharded, tmp_path, monkeypatch):
    source, _ = sharded
    with monkeypatch.context() as patch:
        filling_up(patch, 2)
        with pytest.raises(CheckpointError, match="No space left"):
            converted(source, tmp_path / "target", "diffusers")
    other = shutil.copytree(source, tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"holds the unfinished conversion source=\S+original format=diffusers"
    ):
        converted(other, tmp_path / "target", "diffusers")


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A transformer in both layouts."""
    root = tmp_path_factory.mktemp("tiny")
    transformer("t2v").save_pretrained(root / "diffusers")
    converted(root / "diffusers", root / "original", "original")
    return root


@pytest.mark.parametrize(
    ("source", "target", "layout", "delete_source", "message"),
    [
        ("nothing", "new", "diffusers", False, r"source=\S+nothing: no such file or folder"),
        ("original", "original", "diffusers", False, r"target=\S+original: is the source"),
        ("original", "diffusers", "diffusers", False, r"target=\S+diffusers: is not empty"),
        ("original", "new/wan.safetensors", "diffusers", False, r"is a file's name; name a folder"),
        (
            "original",
            "original/new",
            "diffusers",
            True,
            r"delete_source=true: source=\S+ and target=\S+ overlap",
        ),
        (
            "original",
            "new",
            "original",
            False,
            r"already in Wan's original layout; format=diffusers converts",
        ),
        ("diffusers", "new", "diffusers", False, r"already in diffusers' layout; format=original converts"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(tiny, source, target, layout, delete_source, message):
    before = sorted(tiny.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        converted(tiny / source, tiny / target, layout, delete_source=delete_source)
    assert sorted(tiny.rglob("*")) == before


def test_a_target_that_cannot_be_made_is_named(tiny, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for target in (tmp_path / "file" / "new", tmp_path / "dangling", Path("/proc/new")):
        with pytest.raises(CheckpointError, match=rf"target={target} cannot be written: .*{target.name}"):
            converted(tiny / "original", target, "diffusers")


def test_a_target_inside_the_source_is_fine_while_nothing_is_removed(tiny, tmp_path):
    source = shutil.copytree(tiny / "original", tmp_path / "source")
    assert same(tensors_at(converted(source, source / "new", "diffusers")), tensors_at(tiny / "diffusers"))


def test_links_are_not_removed(tiny, tmp_path):
    (tmp_path / "cache").mkdir()
    for path in (tiny / "original").iterdir():
        (tmp_path / "cache" / path.name).symlink_to(path)
    with pytest.raises(ConfigError, match="delete_source=true: .* is a link, as those of a hub cache are"):
        converted(tmp_path / "cache", tmp_path / "new", "diffusers", delete_source=True)
    converted(tmp_path / "cache", tmp_path / "new", "diffusers")


def test_too_small_a_disk_is_refused_before_anything_is_written(tiny, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"bytes\) are needed and .*\(1000000 bytes\) are free"):
        converted(tiny / "original", tmp_path / "new", "diffusers")
    assert not (tmp_path / "new").exists()


def _change(folder, change):
    """The transformer at a folder with a changed state dict."""
    state = tensors_at(folder)
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    torch.save(change(state), folder / "diffusion_pytorch_model.bin")


CHANGES = {
    "1 names are not of Wan's original transformer: blocks.0.extra": lambda s: (
        s | {"blocks.0.extra": torch.ones(1)}
    ),
    "is not a whole transformer of Wan: missing: blocks.1.attn1.to_q.bias": lambda s: {
        name: tensor for name, tensor in s.items() if name != "blocks.1.self_attn.q.bias"
    },
    r"of another shape: blocks.1.attn1.to_q.bias \(\(47,\), not \(48,\)\)": lambda s: (
        s | {"blocks.1.self_attn.q.bias": torch.ones(47)}
    ),
    "there is no patch_embedding.weight; of several shards name the folder": lambda s: {
        name: tensor for name, tensor in s.items() if name.startswith("blocks.1.")
    },
    "unknown layout; looked for the names of a Wan transformer": lambda _: {"weight": torch.ones(1)},
    "looks like a LoRA adapter": lambda _: {"lora_unet_blocks_0.lora_down.weight": torch.ones(1)},
    "fp8 weights with scales": lambda s: s | {"blocks.0.self_attn.q.scale_weight": torch.ones(1)},
}


@pytest.mark.parametrize("message", CHANGES)
def test_tensors_that_are_no_wan_model_are_refused(tiny, tmp_path, message):
    source = shutil.copytree(tiny / "original", tmp_path / "source")
    _change(source, CHANGES[message])
    with pytest.raises(CheckpointError, match=message) as error:
        converted(source, tmp_path / "new", "diffusers")
    assert str(source) in str(error.value)
    assert not (tmp_path / "new").exists()


def test_heads_that_nothing_tells_are_asked_for(tiny, tmp_path):
    source = shutil.copytree(tiny / "original", tmp_path / "source")
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match="width of 48 is not a number of heads of 128.*num_heads"):
        converted(source, tmp_path / "new", "diffusers")
    (source / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is no readable JSON object"):
        converted(source, tmp_path / "new", "diffusers")
    clip_folder(tmp_path / "clip")
    (tmp_path / "clip" / f"{CLIP}.json").unlink()
    with pytest.raises(CheckpointError, match="width of 24 is not a number of heads of 80.*config.json"):
        converted(tmp_path / "clip", tmp_path / "new", "diffusers")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2]", r"config.json is no readable JSON object: it holds \[1, 2\]"),
        ('{"num_heads": "x"}', "says num_heads='x', which is no number of equal parts of .* 48"),
        ('{"num_heads": -2}', "says num_heads=-2, which is no number of equal parts"),
        ('{"num_heads": 48, "eps": "x"}', "says eps='x'; it is a number above 0, 1e-06"),
        ('{"num_heads": 48}', "no transformer can be built from the configuration"),  # of one number each
        ('{"num_heads": 4, "dim": 96}', "of another model: dim 96 in config.json and 48 in the tensors"),
        (
            '{"_class_name": "AutoencoderKLWan", "num_heads": 4}',
            "width of 48 is not a number of heads of 128",
        ),
        ('{"model_type": "umt5", "num_heads": 4}', "width of 48 is not a number of heads of 128"),
    ],
)
def test_a_configuration_beside_that_cannot_be_the_tensors_own_is_refused(content, words, tiny, tmp_path):
    shutil.copy(tiny / "original" / "diffusion_pytorch_model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words) as error:
        layouts.component_at(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_an_encoders_configuration_beside_is_believed_if_it_is_one(tmp_path):
    model, _ = clip_folder(tmp_path / "clip")
    note = tmp_path / "clip" / f"{CLIP}.json"
    assert layouts.component_at(tmp_path / "clip").config["num_attention_heads"] == 2
    ours = json.loads(note.read_text())
    for content, words in (
        (ours | {"model_type": "siglip_vision_model"}, "width of 24 is not a number of heads of 80"),
        (ours | {"num_attention_heads": 5}, "no image_encoder can be built from the configuration beside"),
        ({"config": [1], "prefix": ""}, r"the note beside is none that a conversion writes: .*config=\[1\]"),
        ({"config": ours, "prefix": 3}, "the note beside is none that a conversion writes: prefix=3"),
    ):
        note.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=words):
            layouts.component_at(tmp_path / "clip")


def test_latents_of_unknown_statistics_are_refused(tmp_path):
    two_levels = {"dim_mult": [1, 1], "temperal_downsample": [True]}
    randomised(AutoencoderKLWan(base_dim=3, z_dim=4, **two_levels)).save_pretrained(tmp_path / "diffusers")
    original = converted(tmp_path / "diffusers", tmp_path / "original", "original")
    (original / "Wan2.1_VAE.json").unlink()
    with pytest.raises(CheckpointError, match="latents of 4 channels, whose mean .* Wan 2.1 has 16"):
        converted(original, tmp_path / "new", "diffusers")


def test_half_a_model_is_refused(folders, tmp_path):
    source = shutil.copytree(folders("t2v-a14b") / "original", tmp_path / "source")
    (source / "low_noise_model").rename(tmp_path / "elsewhere")
    with pytest.raises(
        CheckpointError, match=r"has high_noise_model/ but no low_noise_model/.*source=\S+high"
    ):
        converted(source, tmp_path / "new", "diffusers")
    (tmp_path / "elsewhere").rename(source / "low_noise_model")
    shutil.copy(source / f"{T5}.pth", source / "models_t5_other.pth")
    shutil.copy(source / f"{T5}.pth", source / "models_t5_third.pth")
    (source / f"{T5}.pth").unlink()
    with pytest.raises(CheckpointError, match=r"several files for the text_encoder \(models_t5_other.pth, "):
        converted(source, tmp_path / "new", "diffusers")

    source = shutil.copytree(folders("t2v") / "diffusers", tmp_path / "diffusers")
    shutil.rmtree(source / "vae")
    shutil.copytree(source / "text_encoder", source / "vae")
    with pytest.raises(CheckpointError, match="vae: should be the vae, but holds a text_encoder"):
        converted(source, tmp_path / "new", "original")
    shutil.rmtree(source / "vae")
    (source / "vae").mkdir()
    shutil.copy(folders("t2v") / "original" / "Wan2.1_VAE.pth", source / "vae")
    with pytest.raises(CheckpointError, match="is in original layout, and .* in diffusers; convert them one"):
        converted(source, tmp_path / "new", "original")
    shutil.rmtree(source / "transformer")
    with pytest.raises(
        CheckpointError, match="laid out as diffusers' pipelines are, but has no transformer/"
    ):
        converted(source, tmp_path / "new", "original")


def architecture(variant, **changes):
    return dict(WanTransformer3DModel(**ARCHITECTURES[variant]).config) | changes


def test_parts_that_are_of_two_models_are_refused():
    t2v, i2v = ("one", architecture("t2v")), ("other", architecture("i2v-a14b"))
    fits = {"vae": ("vae", {"z_dim": 16}), "text_encoder": ("text", {"d_model": 32})}
    fitting.refuse_mixture(
        {"transformer": t2v, "transformer_2": ("other", t2v[1] | {"_class_name": "X"})} | fits
    )
    with pytest.raises(CheckpointError, match="one and other are no two experts .* in_channels 16 and 36"):
        fitting.refuse_mixture({"transformer": t2v, "transformer_2": i2v})
    with pytest.raises(CheckpointError, match=r"v is not the vae of one: channels .* 48 there .* and 16 in"):
        fitting.refuse_mixture({"transformer": t2v, "vae": ("v", {"z_dim": 48})})
    with pytest.raises(CheckpointError, match="t is not the text_encoder of one: .* 4096 there .* 32 in"):
        fitting.refuse_mixture({"transformer": t2v, "text_encoder": ("t", {"d_model": 4096})})
    with pytest.raises(CheckpointError, match="c is not the image_encoder of two: .* 1280 there .* 24 in"):
        fitting.refuse_mixture(
            {"transformer": ("two", architecture("i2v")), "image_encoder": ("c", {"hidden_size": 1280})}
        )
    with pytest.raises(CheckpointError, match="v is not the vae of two: .* 16 there .* 48 in"):  # by default
        fitting.refuse_mixture({"transformer": ("two", architecture("ti2v")), "vae": ("v", {})})


def test_a_folder_of_two_models_is_refused_in_both_layouts(folders, tmp_path):
    for layout in ("diffusers", "original"):
        source = shutil.copytree(folders("t2v") / layout, tmp_path / layout)
        for path in (folders("ti2v") / layout).glob("*VAE*"):
            shutil.copy(path, source)
        if layout == "diffusers":
            shutil.rmtree(source / "vae")
            shutil.copytree(folders("ti2v") / layout / "vae", source / "vae")
        else:
            (source / "Wan2.1_VAE.pth").unlink()
        with pytest.raises(CheckpointError, match="is not the vae of .*: channels of the latents, 48 there"):
            layouts.find(source)


def test_the_index_of_a_pipeline_and_its_folders_agree_on_the_experts(folders, tmp_path):
    source = shutil.copytree(folders("t2v-a14b") / "diffusers", tmp_path / "source")
    assert layouts.find(source).is_dual
    (source / "transformer_2").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"model_index.json names transformer_2, and there is no"):
        layouts.find(source)
    (tmp_path / "elsewhere").rename(source / "transformer_2")
    index = said(source, "model_index.json")
    (source / "model_index.json").write_text(json.dumps(index | {"transformer_2": [None, None]}))
    with pytest.raises(
        CheckpointError, match="has transformer_2/, and model_index.json names no transformer_2"
    ):
        layouts.find(source)
    (source / "model_index.json").write_text("[1, 2]")
    with pytest.raises(CheckpointError, match="model_index.json is no readable JSON object"):
        layouts.find(source)


# ---- how it is sampled -----------------------------------------------------------------------------------


def change(path, **settings):
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_models_own_sampling_goes_there_and_back_and_is_remarked_upon(folders, tmp_path):
    source = shutil.copytree(folders("t2v-a14b") / "diffusers", tmp_path / "source")
    assert layouts.find(source).remarks == []  # the official ones need no remark
    change(source / "scheduler" / "scheduler_config.json", flow_shift=7.5, solver_order=3)
    change(source / "model_index.json", boundary_ratio=0.8)
    found = layouts.find(source)
    assert [
        "samples with flow_shift 7.5, Wan's original code with its own 12.0" in found.remarks[0],
        "samples with boundary_ratio 0.8, Wan's original code with its own 0.875" in found.remarks[1],
    ] == [True, True]
    note = layouts.surroundings(found, source)[PurePosixPath("sampling.json")]

    original = shutil.copytree(folders("t2v-a14b") / "original", tmp_path / "original")
    (original / "sampling.json").write_text(json.dumps(note))
    files = layouts.surroundings(layouts.find(original), original)
    expected = json.loads((source / "scheduler" / "scheduler_config.json").read_text())
    assert files[PurePosixPath("scheduler/scheduler_config.json")] == expected
    assert files[PurePosixPath("model_index.json")]["boundary_ratio"] == 0.8


def test_a_scheduler_and_an_image_processor_of_another_kind_come_back_too(folders):
    source = folders("flf2v") / "original"
    found = layouts.find(source)
    assert found.sampling["image_processor"]["do_center_crop"] is True
    found.sampling["image_processor"] = {"do_center_crop": False}
    found.sampling["scheduler"] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 4.0}
    files = layouts.surroundings(found, source)
    assert files[PurePosixPath("image_processor/preprocessor_config.json")] == {"do_center_crop": False}
    assert files[PurePosixPath("scheduler/scheduler_config.json")]["shift"] == 4.0
    index = files[PurePosixPath("model_index.json")]
    assert index["scheduler"] == ["diffusers", "FlowMatchEulerDiscreteScheduler"]


@pytest.mark.parametrize(
    ("note", "words"),
    [
        ({"scheduler": {"flow_shift": -1}}, "sampling.json: flow_shift is -1; it is a number above 0"),
        ({"scheduler": {"flow_shift": "x"}}, "sampling.json: flow_shift is 'x'"),
        ({"boundary_ratio": 875}, "sampling.json: boundary_ratio is 875; it is a number between 0 and 1"),
        ({"scheduler": 3}, "sampling.json: scheduler is 3"),
        ([1], r"sampling.json is no readable JSON object: it holds \[1\]"),
    ],
)
def test_a_note_of_sampling_that_cannot_be_is_refused(note, words, tmp_path):
    (tmp_path / "sampling.json").write_text(json.dumps(note))
    with pytest.raises(CheckpointError, match=words):
        layouts.sampling_notes.of_original(tmp_path, True)


# ---- the command -----------------------------------------------------------------------------------------


def test_the_command_converts_and_says_what_it_wrote(tiny, tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "convert.py"), f"source={tiny / 'original'}"]
    command += [f"target={tmp_path / 'new'}", "format=diffusers"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    file = tmp_path / "new" / "diffusion_pytorch_model.safetensors"
    count = len(open_tensor_files(file).tensors)
    assert told.stdout == f"{file}: {count} tensors, 0.00 GB\n"
    assert "%|" not in told.stderr  # no progress bar where nobody watches
    assert same(tensors_at(tmp_path / "new"), tensors_at(tiny / "diffusers"))
