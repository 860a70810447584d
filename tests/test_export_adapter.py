"""What a run of adapters exports: files of every dialect, full weights with it folded in, averages."""

import json
import re

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from tests.training import adapted
from tests.training.test_resume import SMALL, runs
from wan_ds import evaluate, export, sample
from wan_ds.errors import ConfigError
from wan_ds.evaluate import EvaluateOptions
from wan_ds.export import ExportOptions, Format
from wan_ds.interop import lora
from wan_ds.training import adapters, checkpoint
from wan_ds.training.ema import EmaFiles
from wan_ds.training.runs import Kind, load_experts, opened
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
    options = ExportOptions(
        run=str(run), format=Format.diffusers, merge=True, weights=kind, target=str(tmp_path / "merged")
    )
    export.main(options)
    config, folder = opened(run, "latest")
    experts = load_experts(config, folder, torch.device("cpu"), kind)
    for expert, place in zip(EXPERTS, ("transformer", "transformer_2"), strict=True):
        merged = load_file(tmp_path / "merged" / place / "diffusion_pytorch_model.safetensors")
        tensors = ready(run, expert).tensors
        if kind is Kind.ema:
            source = EmaFiles(folder / expert)
            averages = source.read(source.tensors)
            tensors = {key.replace(".default", ""): value for key, value in averages.items()}
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
        options = ExportOptions(run=str(run), format=Format.kohya, weights=Kind.base, target="never")
        export.main(options)


def test_another_run_starts_from_the_folded_weights(run):
    source = transformer_source(str(run), None, "high_noise")
    read, expected = source.read(source.tensors), folded(run, "high_noise", ready(run, "high_noise").tensors)
    assert read.keys() == expected.keys()
    for name, tensor in read.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": Format.original}, "is for full weights, and this run trained adapters; type merge=true"),
        ({"format": Format.kohya, "merge": True}, "is for adapters; with merge=true type one of diffusers"),
        ({"format": Format.diffusers, "dtype": export.Dtype.bf16}, "adapters are written in fp32"),
    ],
)
def test_a_format_that_cannot_hold_it_is_refused(run, tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        export.main(ExportOptions(run=str(run), target=str(tmp_path / "new"), **options))
    assert not (tmp_path / "new").exists()
