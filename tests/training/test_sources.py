"""Where weights come from: the layouts that people have, runs, and what DeepSpeed wrote."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from tests.models.variants import ARCHITECTURES, randomised
from tests.training import tiny
from wan_ds.errors import CheckpointError
from wan_ds.interop import tensor_files
from wan_ds.interop.names import original_transformer_names
from wan_ds.models.weights import Drawn, build_transformer, on_meta
from wan_ds.training import callbacks, checkpoint, run_folder
from wan_ds.training.checkpoint import checkpoint_source
from wan_ds.training.engine import partition_of
from wan_ds.training.sources import locate, transformer_source

ARCHITECTURE = ARCHITECTURES["t2v"]


def weights(seed: int, variant: str = "t2v") -> dict[str, torch.Tensor]:
    return randomised(WanTransformer3DModel(**ARCHITECTURES[variant]), seed).state_dict()


def original(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = original_transformer_names(tensors)
    return {names[name]: tensor for name, tensor in tensors.items()}


def put(path: Path, tensors: dict[str, torch.Tensor], **config) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (torch.save if path.suffix == ".pth" else save_file)(tensors, path)
    if config:
        (path.parent / "config.json").write_text(json.dumps(config))


def read(path, named, expert="all"):
    source = transformer_source(None if path is None else str(path), named, expert)
    return source.read(source.tensors)


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


SHARD = "diffusion_pytorch_model.safetensors"


def test_the_folder_of_a_component_is_named_alone_or_below_the_path(tmp_path):
    (tmp_path / "vae").mkdir()
    assert (
        locate(str(tmp_path), "vae", "vae") == locate(None, str(tmp_path / "vae"), "vae") == tmp_path / "vae"
    )
    assert locate("nowhere", str(tmp_path / "vae"), "vae") == tmp_path / "vae"
    assert locate("wan_ds/assets/quickstart", "tokenizer", "tokenizer").parts[-3:] == (
        "assets",
        "quickstart",
        "tokenizer",
    )
    with pytest.raises(CheckpointError, match=r"model\.vae\.weights=vea: no such folder under model\.path="):
        locate(str(tmp_path), "vea", "vae")


def test_a_null_is_drawn_from_the_seed():
    assert transformer_source("wan_ds/assets/quickstart", None, "high_noise") is None


def test_diffusers_and_wans_own_folders_of_one_expert(tmp_path):
    tensors = weights(1)
    put(
        tmp_path / "diffusers" / "transformer" / SHARD, tensors, _class_name="WanTransformer3DModel", eps=1e-6
    )
    put(tmp_path / "own" / SHARD, original(tensors), num_heads=4, dim=48, model_type="t2v")
    put(tmp_path / "pickled" / "model.pth", original(tensors))
    for encoder in ("Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth", "models_clip_open-clip.pth"):
        put(tmp_path / "pickled" / encoder, {"x": torch.ones(1)})
        put(tmp_path / "own" / encoder, {"x": torch.ones(1)})
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in original(tensors).items()}
    put(tmp_path / "comfy.safetensors", prefixed)
    for path in ("diffusers", "own", "pickled", "comfy.safetensors", "diffusers/transformer"):
        assert same(read(tmp_path / path, "transformer"), tensors), path
    assert same(read(None, str(tmp_path / "comfy.safetensors")), tensors)
    assert same(read(tmp_path, "comfy.safetensors"), tensors)
    assert same(read(tmp_path, "pickled/model.pth"), tensors)
    for path, stated in (("diffusers", {"eps": 1e-6}), ("own", {"num_attention_heads": 4})):
        source = transformer_source(str(tmp_path / path), "transformer", "all")
        assert source.architecture == stated
        build_transformer(ARCHITECTURE, source)


def test_both_experts_of_diffusers_and_wans_own_folders(tmp_path):
    high, low = weights(1), weights(2)
    for folder, tensors in (("transformer", high), ("transformer_2", low)):
        put(tmp_path / "diffusers" / folder / SHARD, tensors)
    for folder, tensors in (("high_noise_model", high), ("low_noise_model", low)):
        put(tmp_path / "own" / folder / SHARD, original(tensors))
    for path in ("diffusers", "own"):
        assert same(read(tmp_path / path, "transformer", "high_noise"), high)
        assert same(read(tmp_path / path, "transformer_2", "low_noise"), low)
        with pytest.raises(
            CheckpointError, match=r"holds two experts \(.*\) and the model declares one, all"
        ):
            read(tmp_path / path, "transformer")
    assert same(read("nowhere", str(tmp_path / "diffusers" / "transformer")), high)  # told apart by hand


def test_the_second_transformer_decides_not_a_boundary(tmp_path):
    """diffusers' own conversion gives models of one expert a boundary_ratio."""
    put(tmp_path / "transformer" / SHARD, weights(1))
    index = {"boundary_ratio": 0.875, "transformer_2": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    read(tmp_path, "transformer")
    words = "holds one transformer and the model declares two experts: there is no second transformer for "
    for expert, folder in (("high_noise", "transformer"), ("low_noise", "transformer_2")):
        with pytest.raises(CheckpointError, match=words + expert):
            read(tmp_path, folder, expert)
    index["transformer_2"] = ["diffusers", "WanTransformer3DModel"]  # which was not downloaded
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    read(tmp_path, "transformer", "high_noise")
    put(tmp_path / "own" / SHARD, original(weights(1)))
    with pytest.raises(CheckpointError, match=words + "low_noise"):
        read(tmp_path / "own", "transformer_2", "low_noise")


def test_what_is_no_transformer_is_told(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"model\.experts\.all\.weights=transformer: there is none under"
    ):
        read(tmp_path, "transformer")
    put(tmp_path / "vae" / SHARD, {"encoder.conv_in.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match="is a vae; name the transformer's file or folder"):
        read(tmp_path, "vae")
    put(tmp_path / "lora" / SHARD, {"blocks.0.lora_A.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match="unknown layout; it looks like a LoRA"):
        read(tmp_path, "lora")
    tensors = original(weights(1)) | {"blocks.0.self_attn.extra": torch.ones(1)}
    put(tmp_path / "extra" / SHARD, tensors)
    with pytest.raises(CheckpointError, match=r"extra: 1 names are not of Wan's original.*self_attn\.extra"):
        read(tmp_path, "extra")
    (tmp_path / "transformer").mkdir()
    put(tmp_path / "transformer" / SHARD, weights(1))
    (tmp_path / "transformer" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read(tmp_path, "transformer")


# Runs

ODD = tiny.ARCHITECTURE | {"ffn_dim": 63}  # tensors of odd size, which two ranks pad
tiny.ZERO["subgroups"] = tiny.ZERO[3] | {"sub_group_size": 5_000}  # several flat groups on each rank


class HalfAttention(Drawn):
    """The seed's weights, those of the attention in bfloat16."""

    def read(self, names):
        tensors = super().read(names)
        return {n: tensor.to(torch.bfloat16) if "attn" in n else tensor for n, tensor in tensors.items()}


def _trained(run, stage, frozen, tag="high_noise"):
    """A save, after a step where all computes in float32, and the weights by DeepSpeed's own gathers."""
    import deepspeed

    network = build_transformer(
        ODD,
        HalfAttention(on_meta(ODD), 1, tag),
        is_trainable=lambda name: not (frozen and "attn" in name),
        partition=partition_of(tiny.ZERO[stage]),
    )
    loop = tiny.loop(stage=stage, experts=[tag], network=network.train())
    if not frozen:
        loop.train_step()
    callbacks.Save(run, None, 2, lambda loop: loop.meters.flush()).save(loop)
    found = {}
    for name, parameter in loop.experts[tag].engine.parameters():
        if not parameter.requires_grad:
            continue  # frozen tensors are in no checkpoint
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone()
    return found


CHECKPOINT = Path("checkpoints", "step_00000001")


@pytest.mark.parametrize("frozen", [False, True], ids=["all trainable", "frozen attention"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "subgroups"])
def test_one_process_reads_what_two_ranks_wrote(world2, tmp_path, stage, frozen):
    held = world2.run(_trained, tmp_path, stage, frozen)[0]
    source = checkpoint_source(checkpoint.newest(tmp_path / "checkpoints"), "high_noise")
    stored = source.read(source.tensors)
    assert same(stored, held) and list(stored) == list(held)
    assert any("attn" in name for name in stored) != frozen
    for name, tensor in stored.items():
        assert tensor.dtype == torch.float32, name
        assert (source.tensors[name].shape, source.tensors[name].dtype) == (tensor.shape, tensor.dtype)


@pytest.fixture(scope="module")
def run(world2, tmp_path_factory):
    """A run of high_noise under ZeRO-3, written by two ranks, that began with a folder beside it."""
    base = tmp_path_factory.mktemp("base")
    for name in ("vae", "tokenizer"):
        (base / "model" / name).mkdir(parents=True)
    put(base / "model" / "transformer_2" / SHARD, weights(4))
    world2.run(_trained, base / "run", 3, frozen=False)
    experts = {"high_noise": {"weights": "transformer"}, "low_noise": {"weights": "transformer_2"}}
    model = {"path": str(base / "model"), "experts": experts, "vae": {"weights": "vae"}, "transformer": ODD}
    run_folder.write(base / "run", {"model": model, "train": {}})
    return base / "run"


def test_a_run_is_its_newest_checkpoint_expert_by_name(run):
    source = transformer_source(str(run), "transformer", "high_noise")
    stored = checkpoint_source(run / CHECKPOINT, "high_noise")
    assert same(source.read(source.tensors), stored.read(stored.tensors))
    assert source.where == str(run / CHECKPOINT / "high_noise")
    assert build_transformer(ODD, source).config.ffn_dim == 63
    with pytest.raises(CheckpointError, match="high_noise does not fit .*ffn_dim: 63 there, 64 here"):
        build_transformer(ARCHITECTURE, source)
    for path, named in ((str(run), None), (None, str(run))):  # a null of the model, and a run for one expert
        assert transformer_source(path, named, "high_noise").where == source.where


def test_an_expert_that_did_not_train_in_a_run_is_what_the_run_began_with(run):
    assert same(read(run, "transformer_2", "low_noise"), weights(4))
    with pytest.raises(CheckpointError, match="has high_noise, low_noise and the model declares all; choose"):
        read(run, "transformer")
    elsewhere = run.parent / "model" / "transformer_2"
    assert same(read(run, str(elsewhere), "high_noise"), weights(4))


def test_the_encoders_of_a_run_are_those_it_was_started_with(run):
    assert locate(str(run), "anything", "vae") == run.parent / "model" / "vae"
    assert locate(str(run), str(run.parent / "model" / "tokenizer"), "vae").name == "tokenizer"


def test_incomplete_checkpoints_of_a_run_are_passed_over(run, tmp_path, caplog):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    newer = copy / "checkpoints" / "step_00000002"
    shutil.copytree(copy / CHECKPOINT, newer)
    (newer / "high_noise" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert transformer_source(str(copy), None, "high_noise").where == str(copy / CHECKPOINT / "high_noise")
    assert "step_00000002" in caplog.text
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        transformer_source(str(copy), None, "high_noise")


def test_a_tensor_of_a_checkpoint_costs_its_own_bytes(run, monkeypatch):
    source, taken = checkpoint_source(run / CHECKPOINT, "high_noise"), []
    take = tensor_files._read

    def noting(file, span):
        tensor = take(file, span)
        taken.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(tensor_files, "_read", noting)
    names = ["blocks.0.ffn.net.0.proj.bias", "blocks.1.attn2.to_q.weight"]
    assert sum(tensor.nbytes for tensor in source.read(names).values()) == sum(taken) == 4 * (63 + 48 * 48)
    assert "_states.pt" not in Path("/proc/self/maps").read_text()


def _without(key):
    def damage(folder):
        path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        content = torch.load(path, weights_only=False)
        groups = content["optimizer_state_dict"]["fp32_flat_groups"]
        if key == "number":
            groups[0] = groups[0][:-1].clone()
        else:
            del content["optimizer_state_dict"][key]
        torch.save(content, path)

    return damage


def _cut(folder):
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-5000])


DAMAGE = {
    "a rank's optimizer file gone": (
        lambda folder: (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
        "was written by 2 ranks and has the files of 1; copy the others there",
    ),
    "a rank's model file gone": (
        lambda folder: (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(),
        "was written by 2 ranks and has the files of 1; copy the others there",
    ),
    "no model files": (
        lambda folder: [path.unlink() for path in folder.glob("*_model_states.pt")],
        "holds no model states of DeepSpeed's",
    ),
    "a cut file": (_cut, "rank_0_mp_rank_00_optim_states.pt cannot be read: it is truncated"),
    "a lost number": (
        _without("number"),
        r"shards do not add up to its parameters \(\d+ for \d+ in part 1\)",
    ),
    "a lost key": (_without("fp32_flat_groups"), "is not as DeepSpeed 0.19 writes it: KeyError"),
    "another file": (
        lambda folder: torch.save([1], folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        "rank_1_mp_rank_00_optim_states.pt is no file of a DeepSpeed engine",
    ),
    "code in a file": (
        lambda folder: torch.save(Path(), folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        "holds more than tensors and plain containers: pathlib",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_with_what_is_wrong(run, tmp_path, damage):
    change, words = DAMAGE[damage]
    shutil.copytree(run / CHECKPOINT / "high_noise", tmp_path / "high_noise")
    change(tmp_path / "high_noise")
    with pytest.raises(CheckpointError, match=words):
        checkpoint_source(tmp_path, "high_noise")


def test_a_missing_expert_is_named_with_those_that_there_are(run):
    with pytest.raises(CheckpointError, match="holds no expert low_noise; it holds high_noise"):
        checkpoint_source(run / CHECKPOINT, "low_noise")
