"""scripts/convert.py on tiny models of every variant: opened by the libraries, the same there and back."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

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
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.models.variants import ARCHITECTURES, randomised
from wan_ds import convert
from wan_ds.convert import ConvertOptions, Format, main
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.interop import configs, conversion, names, shards
from wan_ds.interop.tensor_files import open_tensor_files

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
    expected |= {f"{vae}.pth", f"{vae}.json", f"{T5}.pth", f"{T5}.json"}
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
    planned = convert._planned(source, Format.diffusers)
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
    """The disk is full once so many files are written."""
    to_disk, written = shards._to_disk, []

    def full(file):
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
