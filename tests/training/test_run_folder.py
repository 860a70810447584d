"""A run's folder says what it was started with, composes again, and refuses what would be another run."""

import copy
import json

import pytest
import yaml

from wan_ds.config import check, to_dict
from wan_ds.config.command_line import parse
from wan_ds.config.composition import configure
from wan_ds.errors import ConfigError
from wan_ds.training import run_folder


@pytest.fixture(scope="module")
def composed() -> dict:
    return to_dict(configure(parse(["recipe=quickstart"])))


@pytest.fixture
def settings(composed) -> dict:
    """The quickstart with numbers of its own, so that another tuning changes nothing here."""
    settings = copy.deepcopy(composed)
    settings["optimizer"] = {"_target_": "torch.optim.AdamW", "lr": 1e-3, "eps": 1e-8}
    settings["train"] |= {"steps": 1500, "lr_scale": {}}
    settings["seed"] = 0
    return settings


def again(folder, *arguments):
    return configure(parse(["--config-dir", str(folder), "--config-name", "config", *arguments]))


@pytest.mark.parametrize(
    "typed",
    [
        [],
        ["optimizer.lr=1e-4", "timesteps=logit_normal", "train.experts=[low_noise]", "seed=3"],
        [
            "run_name=1e-4",
            "tracker.project=007",
            "tracker.group=null",
            "tracker.entity=true",
            "model.vae.weights=",
        ],
        [
            "data.path=a: b, ${HOME} \\${x} # 日本 🎬",
            "evaluation.path=- 'a' \"b\"",
            "tracker.group=1_000",
            "tracker.entity=.5",
        ],
        [
            "sampling.guidance.low_noise=3",
            "train.lr_scale.low_noise=0.5",
            "sampling.prompts=['a, b', 'c: d', '1e3']",
        ],
    ],
)
def test_a_runs_config_composes_to_the_same_run(tmp_path, typed):
    config = configure(parse(["recipe=quickstart", *typed]))
    folder = tmp_path / "runs, (1)"
    run_folder.write(folder, to_dict(config))
    assert again(folder) == config
    check(again(folder), 1)
    run_folder.refuse_changes(folder, to_dict(again(folder)))


def test_a_runs_config_takes_further_settings(tmp_path, settings):
    run_folder.write(tmp_path, settings)
    longer = again(tmp_path, "train.steps=2000")
    assert (longer.train.steps, longer.run_name, longer.run_dir) == (2000, "quickstart", "runs/quickstart")
    elsewhere = again(tmp_path, "run_name=other", "optimizer.lr=2e-3")
    assert (elsewhere.run_name, elsewhere.run_dir, elsewhere.optimizer["lr"]) == ("other", "runs/other", 2e-3)
    with pytest.raises(ConfigError, match=r"did you mean train\.steps"):
        again(tmp_path, "train.stesp=1")


def test_a_runs_config_tells_its_command_and_is_resolved(tmp_path, settings):
    folder = tmp_path / "my run"
    run_folder.write(folder, settings)
    text = (folder / "config.yaml").read_text()
    assert text.startswith("# The same run again: python scripts/train.py --config-dir '")
    assert "${" not in text
    loaded = yaml.safe_load(text)
    assert loaded["run_dir"] == "runs/quickstart"
    assert loaded["optimizer"]["lr"] == 1e-3


def test_the_environment_is_told(tmp_path, settings):
    run_folder.write(tmp_path, settings)
    told = json.loads((tmp_path / "environment.json").read_text())
    assert {"packages", "python", "platform", "world_size", "devices", "git_commit"} <= told.keys()
    assert told["packages"]["torch"]


def test_nothing_half_written_stays_beside(tmp_path, settings):
    run_folder.write(tmp_path, settings)
    run_folder.write(tmp_path, settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "environment.json"]


def test_changes_are_what_changes_numbers(settings):
    new = copy.deepcopy(settings)
    new["optimizer"]["lr"] = 5e-4
    new["optimizer"]["amsgrad"] = True
    del new["optimizer"]["eps"]
    new["train"]["steps"] = 9000
    new["train"]["lr_scale"] = {"low_noise": 0.5}
    for group in ("checkpoint", "evaluation", "sampling", "tracker"):
        new[group] = {"anything": 1}
    new["data"]["workers"], new["run_name"], new["run_dir"], new["resume"] = 3, "x", "y", "never"
    assert run_folder.changes(settings, new) == [
        ("optimizer.amsgrad", "not set", True),
        ("optimizer.eps", 1e-8, "not set"),
        ("optimizer.lr", 1e-3, 5e-4),
        ("train.lr_scale", {}, "not set"),
        ("train.lr_scale.low_noise", "not set", 0.5),
    ]


def test_a_folder_refuses_other_numbers_and_says_which(tmp_path, settings):
    run_folder.write(tmp_path, settings)
    before = (tmp_path / "config.yaml").read_bytes()
    settings["optimizer"]["lr"], settings["seed"] = 1e-4, 1
    with pytest.raises(ConfigError) as refused:
        run_folder.refuse_changes(tmp_path, settings)
    message = str(refused.value)
    assert "optimizer.lr: 0.001 -> 0.0001; seed: 0 -> 1" in message
    for way_on in ("another run_name", "remove the folder", "the old values"):
        assert way_on in message
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_a_run_may_grow_and_not_shrink(tmp_path, settings):
    run_folder.write(tmp_path, settings)
    run_folder.refuse_changes(tmp_path, settings)
    settings["train"]["steps"] = 1600
    run_folder.refuse_changes(tmp_path, settings)
    settings["train"]["steps"] = 10
    with pytest.raises(ConfigError, match=r"train.steps=10: .* 1500"):
        run_folder.refuse_changes(tmp_path, settings)


def test_resume_never_deletes_nothing(tmp_path, settings):
    run_folder.write(tmp_path, settings)
    settings["resume"] = "never"
    run_folder.refuse_changes(tmp_path, settings)
    checkpoint = tmp_path / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"resume=never: .* nothing is deleted"):
        run_folder.refuse_changes(tmp_path, settings)
    assert checkpoint.is_dir()
    settings["resume"] = "auto"
    run_folder.refuse_changes(tmp_path, settings)


def test_a_new_folder_is_free(tmp_path, settings):
    run_folder.refuse_changes(tmp_path / "none", settings)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("text", ["a: [", "just text", "3"])
def test_a_broken_config_is_told_and_not_overwritten(tmp_path, settings, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        run_folder.refuse_changes(tmp_path, settings)
