"""What a run of adapters exports: files of every dialect, full weights with it folded in, averages."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.training import adapted
from tests.training.test_resume import SMALL, runs
from wan_ds import evaluate, export, sample
from wan_ds.config.command_line import options, parse
from wan_ds.config.composition import configure
from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.evaluate import EvaluateOptions
from wan_ds.export import ExportOptions, Format
from wan_ds.interop import lora
from wan_ds.training import adapters, checkpoint, networks
from wan_ds.training.ema import EmaFiles
from wan_ds.training.runs import Kind, expert_lora, kind_of, load_experts, opened
from wan_ds.training.sources import transformer_source

TYPED = [
    *SMALL,
    "train.steps=6",
    "adapter=lora",
    "adapter.rank=4",
    "adapter.alpha=6",
    "adapter.rank_pattern={attn2.to_q: 3}",
    "ema.decay=0.5",
    "evaluation.every_steps=null",
    "evaluation.at_start=false",
]
EXPERTS = ("high_noise", "low_noise")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run by two ranks that ended, on bases with a head."""
    folder = tmp_path_factory.mktemp("adapter")
    typed = [*TYPED, *adapted.write_base(folder / "base", SMALL), "run_dir=run"]
    assert runs(folder, [{"arguments": typed, "moment": None}]) == [[0, 0]], (folder / "log").read_text()[
        -3000:
    ]
    return folder / "run"


def ready(run, expert):
    return adapters.read(checkpoint.find(run, "latest") / expert)


@pytest.mark.parametrize("dialect", lora.DIALECTS)
def test_every_dialect_has_the_live_adapter_and_says_how_to_load_it(run, dialect):
    export.main(ExportOptions(run=str(run), format=Format[dialect], weights=Kind.live))
    target = run / "export" / dialect
    assert sorted(path.name for path in target.iterdir()) == [
        "README.md",
        "run-high_noise.safetensors",
        "run-low_noise.safetensors",
    ]
    for expert in EXPERTS:
        exported, live = lora.read(target / f"run-{expert}.safetensors"), ready(run, expert)
        for module in live.modules:
            torch.testing.assert_close(exported.delta(module), live.delta(module), rtol=1e-6, atol=1e-8)
        assert exported.metadata["expert"] == expert and exported.metadata["step"] == live.metadata["step"]
    text = (target / "README.md").read_text()
    assert "| high_noise | 3, 4 | 6 " in text and "# LoRA for quickstart" in text


def averages(run, expert) -> dict[str, torch.Tensor]:
    source = EmaFiles(checkpoint.find(run, "latest") / expert)
    return {name.replace(".default", ""): tensor for name, tensor in source.read(source.tensors).items()}


@pytest.mark.parametrize("dialect", ["diffusers", "kohya"])
def test_averages_are_exported_unless_told_and_the_file_says_so(run, tmp_path, dialect):
    export.main(ExportOptions(run=str(run), format=Format[dialect], target=str(tmp_path / "new")))
    for expert in EXPERTS:
        exported, tensors = lora.read(tmp_path / "new" / f"run-{expert}.safetensors"), averages(run, expert)
        assert exported.metadata["weights"] == "ema"
        for module in exported.modules:
            a, b = (tensors[f"{module}.lora_{letter}.weight"].double() for letter in "AB")
            torch.testing.assert_close(
                exported.delta(module).double(), 6 / len(a) * (b @ a), rtol=1e-5, atol=1e-8
            )
    assert "averages over the steps" in (tmp_path / "new" / "README.md").read_text()


def test_averages_of_other_tensors_are_refused(run, tmp_path):
    shutil.copytree(checkpoint.find(run, "latest") / "high_noise", tmp_path / "high_noise")
    shutil.copy(tmp_path / "high_noise" / adapters.FILE, tmp_path / "one")
    half = {key: value for key, value in load_file(tmp_path / "one").items() if ".blocks.0.attn1." in key}
    save_file(half, tmp_path / "high_noise" / adapters.FILE)
    with pytest.raises(CheckpointError, match="its averages are of other tensors than"):
        expert_lora(tmp_path, "high_noise", Kind.ema)


def test_a_base_that_changed_is_refused_wherever_it_is_used(run, tmp_path):
    """The adapter of a run that says where its base was, and something else is there now."""
    moved = tmp_path / "run"
    shutil.copytree(run, moved, ignore=shutil.ignore_patterns("export", "samples"))
    shutil.copytree(run.parent / "base", tmp_path / "base")
    text = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(text.replace(str(run.parent / "base"), str(tmp_path / "base")))
    path = tmp_path / "base" / "low_noise" / "diffusion_pytorch_model.safetensors"
    base = load_file(path)
    base["blocks.0.attn1.to_q.weight"][0, 0] += 1
    save_file(base, path)
    config, folder = opened(moved, "latest")
    for attempt in (
        lambda: load_experts(config, folder, torch.device("cpu"), Kind.live),
        lambda: load_experts(config, folder, torch.device("cpu"), Kind.base),
        lambda: evaluate.main(EvaluateOptions(run=str(moved))),
        lambda: sample.main(sample.SampleOptions(run=str(moved), prompt="a rabbit", steps=1)),
        lambda: export.main(ExportOptions(run=str(moved), format=Format.diffusers, merge=True)),
    ):
        with pytest.raises(CheckpointError, match="low_noise holds other weights than the adapter"):
            attempt()


def test_an_adapter_on_a_run_names_the_command_that_makes_its_base(run, tmp_path, monkeypatch):
    """That run keeps averages and has adapters of its own; what it is folded into is what the adapter saw."""
    base = f"{run.parent.name}/{run.name}"
    monkeypatch.chdir(run.parent.parent)
    config = configure(parse([*TYPED, f"model.path={base}", "run_dir=x"]))
    given = ready(run, "high_noise")
    said = networks.adapter_of(config, "high_noise", base).metadata
    assert said["base_checkpoint"] == "step_00000006"
    told, making = export.base_in_diffusers({"high_noise": replace(given, metadata=said)})
    assert "weights=live" in making and "merge=true" in making and "checkpoint=step_00000006" in making
    words = shlex.split(making)
    monkeypatch.chdir(tmp_path)  # from anywhere
    export.main(options(ExportOptions, words[2:]))
    source = transformer_source(str(run), None, "low_noise")
    made = load_file(Path(told) / "transformer_2" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(made[name], tensor) for name, tensor in source.read(source.tensors).items())


def test_a_local_base_is_named_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a model").mkdir()
    sizes = {"A": (1, 4), "B": (4, 1)}
    one = lora.lora_of(
        {f"blocks.0.attn1.to_q.lora_{letter}.weight": torch.ones(size) for letter, size in sizes.items()},
        {"blocks.0.attn1.to_q": 1.0},
        metadata={"base": "a model"},
    )  # fmt: skip
    told, making = export.base_in_diffusers({"all": one})
    assert told == str(tmp_path / "a model-diffusers")
    assert making == f"python scripts/convert.py 'source={tmp_path}/a model' 'target={told}' format=diffusers"
    (tmp_path / "a model" / "model_index.json").write_text("{}")
    assert export.base_in_diffusers({"all": one}) == (str(tmp_path / "a model"), None)
    hub = replace(one, metadata={"base": "Wan-AI/Wan2.2-T2V-A14B-Diffusers"})
    assert export.base_in_diffusers({"all": hub}) == ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", None)


def test_kinds_that_a_run_has_not_are_refused():
    full = configure(parse([*SMALL, "run_dir=x"]))
    for typed, words in ((Kind.ema, "keeps no averaged weights"), (Kind.base, "trains all weights")):
        with pytest.raises(ConfigError, match=f"weights={typed.name}: this run {words}"):
            kind_of(full, typed)


def folded(run, expert, tensors) -> dict[str, torch.Tensor]:
    """float64 W + alpha / rank B A of the run's bases."""
    base = load_file(run.parent / "base" / expert / "diffusion_pytorch_model.safetensors")
    whole = {name: tensor.double() for name, tensor in base.items()}
    for module in {name.rpartition(".lora_")[0] for name in tensors}:
        a, b = (tensors[f"{module}.lora_{letter}.weight"].double() for letter in "AB")
        update = 6 / len(a) * (b @ a)
        assert update.abs().max() > 0
        whole[f"{module}.weight"] += update
    return whole


@pytest.mark.parametrize("kind", [Kind.live, Kind.ema])
def test_merged_weights_are_the_base_and_the_scaled_product(run, kind, tmp_path):
    """And diffusers computes with them what we compute with the adapter beside its base."""
    target = str(tmp_path / "merged")
    export.main(ExportOptions(run=str(run), format=Format.diffusers, merge=True, weights=kind, target=target))
    config, folder = opened(run, "latest")
    experts = load_experts(config, folder, torch.device("cpu"), kind)
    for expert, place in zip(EXPERTS, ("transformer", "transformer_2"), strict=True):
        merged = load_file(tmp_path / "merged" / place / "diffusion_pytorch_model.safetensors")
        tensors = ready(run, expert).tensors
        if kind is Kind.ema:
            tensors = averages(run, expert)
        expected = folded(run, expert, tensors)
        assert merged.keys() == expected.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)
        stock = WanTransformer3DModel.from_pretrained(tmp_path / "merged" / place)
        inputs = torch.randn(1, 16, 3, 8, 12), torch.tensor([700.0]), torch.randn(1, 512, 64)
        with torch.no_grad():
            found, wanted = (model(*inputs, return_dict=False)[0] for model in (experts[expert], stock))
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert "rank 4, alpha 6" in (tmp_path / "merged" / "README.md").read_text()


def test_averages_are_what_is_evaluated_and_sampled_unless_told(run, capsys):
    numbers = {}
    for kind in (None, Kind.live, Kind.ema, Kind.base):
        evaluate.main(EvaluateOptions(run=str(run), weights=kind))
        numbers[kind] = float(re.search(r"all +\d+ +([\d.]+)", capsys.readouterr().out)[1])
        sample.main(sample.SampleOptions(run=str(run), prompt="a rabbit", steps=2, weights=kind))
    assert numbers[None] == numbers[Kind.ema]
    written = sorted(path.name for path in (run / "evaluation").iterdir())
    assert written == ["step_00000006-base.json", "step_00000006-live.json", "step_00000006.json"]
    losses = {json.loads((run / "evaluation" / name).read_text())["eval/loss"] for name in written}
    assert len(losses) == 3
    assert len(list((run / "samples").iterdir())) == 3


def test_without_the_adapter_the_base_is_used(run):
    config, folder = opened(run, "latest")
    for expert, model in load_experts(config, folder, torch.device("cpu"), Kind.base).items():
        base = load_file(run.parent / "base" / expert / "diffusion_pytorch_model.safetensors")
        found = dict(model.named_parameters())
        assert found.keys() == base.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in base.items())
    with pytest.raises(ConfigError, match="weights=base: is what the run started from"):
        export.main(ExportOptions(run=str(run), format=Format.kohya, weights=Kind.base, target="never"))


def test_another_run_starts_from_the_folded_weights(run):
    source = transformer_source(str(run), None, "high_noise")
    read, expected = source.read(source.tensors), folded(run, "high_noise", ready(run, "high_noise").tensors)
    assert read.keys() == expected.keys()
    for name, tensor in read.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ({"format": Format.original}, "is for full weights, and this run trained adapters; type merge=true"),
        ({"format": Format.kohya, "merge": True}, "is for adapters; with merge=true type one of diffusers"),
        ({"format": Format.diffusers, "dtype": export.Dtype.bf16}, "adapters are written in fp32"),
    ],
)
def test_a_format_that_cannot_hold_it_is_refused(run, tmp_path, typed, words):
    with pytest.raises(ConfigError, match=words):
        export.main(ExportOptions(run=str(run), target=str(tmp_path / "new"), **typed))
    assert not (tmp_path / "new").exists()
