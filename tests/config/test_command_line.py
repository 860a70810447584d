"""What is typed arrives, or dies with a sentence; mostly in this process, a few times in one of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from wan_ds.config import Config, check, command_line, to_dict
from wan_ds.config.command_line import command, options, parse, simple_command
from wan_ds.config.composition import conf_dir, configure
from wan_ds.errors import CheckpointError, ConfigError, DataError
from wan_ds.training.run_folder import flatten

ROOT = Path(__file__).parents[2]

NASTY = [
    "a cat, running",
    'a cat, "hi" = 50% #1 🎬',
    "/my set (1)",
    "a \"b\" 'c'",
    "x=y#z",
    "runs/step=100",
    "{a}",
    "{a: 1, b: [2}",
    "[1]",
    "日本",
    "C:\\clips\\",
    "\\",
    "\\\\'",
    "$HOME",
    "${HOME}",
    "\\${HOME}",
    "a${b",
    "${oc.nonsense:x}",
    "100%",
    "",
    "  two  spaces ",
    "1e-4",
    "007",
    "1_000",
    "true",
    "~x~",
    "choice(1,2)",
    "a,b",
    "two\nlines\t",
    "@|?*;&!`",
    "--flag",
]


@pytest.fixture(autouse=True)
def _one_rank_outside_any_sweep(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "WANDB_SWEEP_ID", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


WITHOUT_RECIPE = ["model=quickstart", "data=quickstart", "train.steps=1", "train.global_batch_size=1"]


def typed(*arguments: str) -> Config:
    config = configure(parse(["recipe=quickstart", *arguments]))
    check(config, 1)
    return config


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as refused:
        typed(*arguments)
    message = str(refused.value)
    assert "\n" not in message
    return message


# --- text arrives as typed


@pytest.mark.parametrize("text", NASTY)
def test_text_arrives_as_typed(text):
    keys = ("tracker.project", "tracker.group", "model.experts.low_noise.weights")
    config = configure(parse(["recipe=quickstart", *(f"{key}={text}" for key in keys)]))
    assert [flatten(to_dict(config))[key] for key in keys] == [text, text, text]


@pytest.mark.parametrize(
    "key", ["data.path", "run_name", "tracker.project", "model.vae.weights", "evaluation.path"]
)
def test_every_text_setting_is_read_this_way(key):
    config = configure(parse(["recipe=quickstart", f'{key}=a cat, "hi" = [50%] #1 🎬\\']))
    assert flatten(to_dict(config))[key] == 'a cat, "hi" = [50%] #1 🎬\\'


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_plus_before_a_setting_that_exists_changes_nothing(prefix):
    assert typed(f"{prefix}data.path=a, b").data.path == "a, b"


def test_home_is_expanded_in_paths_and_only_there(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = typed(
        "data.path=~/clips (1)", "evaluation.path=~/e", "model.path=~/m", "run_dir=~/r", "tracker.project=~/p"
    )
    assert config.data.path == "/home/ada/clips (1)"
    assert (config.evaluation.path, config.model.path) == ("/home/ada/e", "/home/ada/m")
    assert (config.run_dir, config.tracker.project) == ("/home/ada/r", "~/p")


def test_null_is_nothing_for_optional_text_and_a_word_for_other_text():
    config = typed("data.path=null", "tracker.project=null")
    assert config.data.path is None
    assert config.tracker.project == "null"


def test_interpolations_of_settings_and_resolvers_work_in_text(monkeypatch):
    monkeypatch.setenv("CLIPS", "/c l, i/ps")
    assert typed("run_dir=/out, a\\${run_name}", "run_name=x").run_dir == "/out, a\\x"
    assert typed("data.path=${oc.env:CLIPS}/$a").data.path == "/c l, i/ps/$a"


def test_text_that_cannot_be_carried_is_told():
    assert "three question marks" in refusal("data.path=???")
    assert "not UTF-8" in refusal("data.path=/caf\udce9")


def test_lists_of_text_take_quotes():
    assert typed("sampling.prompts=['a cat, running', \"日本\"]").sampling.prompts == [
        "a cat, running",
        "日本",
    ]
    assert "['" in refusal("sampling.prompts=[日本]")
    assert "must be a list such as" in refusal("sampling.prompts=a cat")


# --- numbers


@pytest.mark.parametrize("text", ["1e-4", "1E-4", ".0001", "0.0001", "'1e-4'", "1_0e-5"])
def test_a_learning_rate_is_the_same_number_however_it_is_written(text):
    assert typed(f"optimizer.lr={text}").optimizer["lr"] == 1e-4


@pytest.mark.parametrize("text", ["1e-4", '"1e-4"', "1E-4", ".0001"])
def test_a_learning_rate_in_a_file_is_the_same_number(text, tmp_path):
    (tmp_path / "recipe").mkdir()
    lines = ["# @package _global_", "defaults: [quickstart]", f"optimizer: {{lr: {text}}}"]
    (tmp_path / "recipe" / "mine.yaml").write_text("\n".join(lines))
    assert typed("recipe=mine", f"--config-dir={tmp_path}").optimizer["lr"] == 1e-4


def test_lists_groups_and_arguments_outside_the_yaml_can_be_set():
    config = typed("optimizer.betas=[0.8,0.9]", "optimizer.amsgrad=true", "+optimizer.maximize=false")
    assert config.optimizer["betas"] == [0.8, 0.9]
    assert config.optimizer["amsgrad"] is True
    assert config.optimizer["maximize"] is False
    both = typed("train.lr_scale={high_noise: 2, low_noise: 3}", "train.lr_scale.low_noise=0.5")
    assert both.train.lr_scale == {"high_noise": 2.0, "low_noise": 0.5}
    assert "eps" not in typed("~optimizer.eps").optimizer


def test_one_number_of_a_group_leaves_the_others():
    both = "model.guidance={high_noise: 1.5, low_noise: 2.5}"
    assert typed(both, "model.guidance={high_noise: 4}").model.guidance == {"high_noise": 4, "low_noise": 2.5}
    one = typed(both, "sampling.guidance=${model.guidance}", "sampling.guidance.low_noise=3")
    assert one.sampling.guidance == {"high_noise": 1.5, "low_noise": 3}
    assert one.model.guidance == {"high_noise": 1.5, "low_noise": 2.5}


def test_a_reader_can_be_typed_where_none_is_set():
    reader = [
        "data.reader=null",
        "data.path=x",
        "data.reader._target_=wan_ds.data.demo.DemoClips",
        "data.reader.names=[a]",
    ]
    assert typed(*reader).data.reader == {"_target_": "wan_ds.data.demo.DemoClips", "names": ["a"]}


def test_one_shift_serves_training_and_sampling_unless_it_is_split():
    config = configure(parse([*WITHOUT_RECIPE, "model.shift=4.5"]))
    assert (config.timesteps["shift"], config.sampling.shift) == (4.5, 4.5)
    split = configure(parse([*WITHOUT_RECIPE, "model.shift=4.5", "timesteps.shift=2"]))
    assert (split.model.shift, split.timesteps["shift"], split.sampling.shift) == (4.5, 2.0, 4.5)


# --- what is wrong dies with a sentence


@pytest.mark.parametrize(
    ("argument", "fragments"),
    [
        ("train.lerning_rate=1e-4", ["train.lerning_rate", "optimizer.lr"]),
        ("train.lr=1", ["train.lr: no such setting", "did you mean optimizer.lr?"]),
        ("train.stesp=1", ["did you mean train.steps?"]),
        ("stepps=1", ["train.steps"]),
        ("optimizer.betas_=1", ["optimizer.betas_", "torch.optim.AdamW", "did you mean optimizer.betas?"]),
        ("+optimizer.betas_=1", ["did you mean optimizer.betas?"]),
        ("optimizer.learning_rate=1", ["did you mean optimizer.lr?"]),
        ("optimizer.params=1", ["optimizer.params"]),
        ("optimizer.lr.x=1", ["optimizer.lr.x: no such setting"]),
        ("timesteps.shfit=1", ["did you mean timesteps.shift?"]),
        ("+new.key=1", ["new.key: no such setting"]),
        ("++new=1", ["new: no such setting"]),
        ("model.experts.low_noise.wieghts=x", ["model.experts.low_noise.weights"]),
        ("parallelism.zero_optimization.overlap_com=true", ["overlap_comm"]),
        ("model.transformer.num_layer=1", ["model.transformer.num_layers"]),
        ("model.experts.low.weights=x", ["did you mean model.experts.low_noise.weights"]),
        ("data.reader.nams=[a]", ["did you mean data.reader.names?"]),
        ("train.steps=abc", ["train.steps=abc", "a whole number"]),
        ("train.global_batch_size=2.5", ["train.global_batch_size=2.5", "a whole number"]),
        ("tracker.mode=sometimes", ["tracker.mode=sometimes", "auto, online, offline, disabled"]),
        ("train.deterministic=maybe", ["train.deterministic=maybe", "true or false"]),
        ("train.steps=null", ["train.steps=null", "a whole number"]),
        ("train.steps=", ["train.steps=", "a whole number"]),
        ("train.max_grad_norm=x", ["a number"]),
        ("train=3", ["train=3", "group of settings"]),
        ("optimizer=3", ["optimizer=3", "there are adamw"]),
        ("optimizer.lr=abc", ["optimizer.lr=abc", "a number"]),
        ("optimizer.lr=null", ["optimizer.lr=null", "a number"]),
        ("optimizer.betas=0.9", ["optimizer.betas=0.9", "a list such as [0.9, 0.999]"]),
        ("optimizer.lr=1e-4,2e-4", ["several values", "launch/sweeps"]),
        ("train.steps=range(1,5)", ["several values"]),
        ("train.steps=[1", ["train.steps=[1", "cannot be read"]),
        ("train.steps=${nothing}", ["train.steps", "nothing"]),
        ("recipe=quikstart", ["did you mean quickstart?", "wan2.2-t2v-a14b-low-noise"]),
        ("+recipe=quickstart", ["without the +"]),
        ("recipe=quickstart,wan2.2-t2v-a14b", ["one option"]),
        ("model=wan3", ["model=wan3", "there are quickstart, tiny-wan2.1-flf2v-14b"]),
        ("parallelism=zero5", ["parallelism=zero5", "ddp, zero2, zero3, zero3_hpz, zero3_offload"]),
        ("hydra.run.dir=x", ["hydra.run.dir", "Hydra only composes"]),
        ("hydra/launcher=x", ["Hydra only composes"]),
        ("~train.steps", ["~train.steps", "open group"]),
        ("steps", ["steps", "key=value"]),
        ("=3", ["key=value"]),
        ("--optimizer.lr=1e-4", ["optimizer.lr=...", "args_no_hyphens"]),
        ("--nonsense", ["--nonsense: no such flag"]),
        ("-m", ["one job"]),
        ("--multirun", ["one job"]),
        ("--config-dir=/nowhere/at/all", ["no such folder"]),
        ("--cfg=hydra", ["--cfg job"]),
        ("--config-name", ["needs a value"]),
        ("--config-name=nothing_like_it", ["nothing_like_it"]),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(argument, fragments):
    message = refusal(argument)
    for fragment in fragments:
        assert fragment in message


def test_settings_that_nobody_gave_are_listed():
    with pytest.raises(ConfigError, match=r"train.steps: not set.*train.global_batch_size: not set"):
        configure(parse([]))


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        (
            "train: {lerning_rate: 1}",
            ["train.lerning_rate: in recipe/mine.yaml: no such setting", "optimizer.lr?"],
        ),
        ("train: {steps: abc}", ["train.steps", "abc"]),
        ("train: [", ["mine.yaml"]),
        ("defaults: [override /model: wan7]", ["wan7"]),
        ("tracker: {mode: sometimes}", ["tracker.mode", "sometimes"]),
        (
            "defaults: [quickstart]\noptimizer: {betas_: 1}",
            ["optimizer.betas_", "did you mean optimizer.betas?"],
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence_that_names_it(text, fragments, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    numbers = ["train.global_batch_size=3", "train.micro_batch_size=1"]
    message = refusal("recipe=mine", *numbers, "--config-dir", str(tmp_path))
    for fragment in fragments:
        assert fragment in message


# --- launchers


@pytest.mark.parametrize(
    "spelling", [["--local_rank=3"], ["--local-rank=3"], ["--local_rank", "3"], ["--local-rank", "3"]]
)
def test_what_launchers_append_is_ignored(spelling):
    assert (
        parse([*spelling, "recipe=quickstart"])
        == parse(["recipe=quickstart", *spelling])
        == parse(["recipe=quickstart"])
    )


# --- which run it is


def test_a_run_is_named_after_its_recipe_and_what_changes_its_numbers():
    plain = typed()
    assert (plain.run_name, plain.run_dir) == ("quickstart", "runs/quickstart")
    lr, seed = 2 * plain.optimizer["lr"], plain.seed + 1
    other = typed(f"optimizer.lr={lr}")
    name, _, digits = other.run_name.rpartition("-")
    assert name == "quickstart"
    assert len(digits) == 8
    assert int(digits, 16) >= 0
    assert other.run_dir == f"runs/{other.run_name}"
    assert typed(f"optimizer.lr={lr:.17e}").run_name == other.run_name
    assert typed(f"optimizer.lr={2 * lr}").run_name != other.run_name
    both = typed(f"optimizer.lr={lr}", f"seed={seed}").run_name
    assert both == typed(f"seed={seed}", f"optimizer.lr={lr}").run_name != other.run_name


@pytest.mark.parametrize(
    "argument",
    [
        "train.steps=7",
        "checkpoint.save_every_steps=5",
        "evaluation.clips=3",
        "sampling.every_steps=5",
        "tracker.tags=[a]",
        "data.workers=1",
        "resume=never",
        "model=quickstart",
        "sampling.guidance=2",
    ],
)
def test_what_changes_no_number_changes_no_name(argument):
    assert typed(argument).run_name == "quickstart"


@pytest.mark.parametrize(
    ("key", "spelling"),
    [
        ("optimizer.lr", "{:.17e}"),
        ("optimizer.lr", "'{:.17e}'"),
        ("optimizer.weight_decay", "{:.17e}"),
        ("model.shift", "{:.17g}"),  # 3.0 is typed as 3
    ],
)
def test_the_number_that_stands_there_changes_no_name_however_it_is_written(key, spelling):
    number = flatten(to_dict(typed()))[key]
    assert typed(f"{key}={spelling.format(number)}").run_name == "quickstart"


def another(config: Config, group: str) -> str:
    """A choice of `group` that is not the one of `config`."""
    files = sorted((conf_dir() / group).glob("*.yaml"))
    here = getattr(config, group)["_target_"]
    return next(f"{group}={path.stem}" for path in files if OmegaConf.load(path)["_target_"] != here)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: another(config, "timesteps"),
        lambda config: another(config, "weighting"),
        lambda config: f"seed={config.seed + 1}",
        lambda config: f"optimizer.amsgrad={not config.optimizer.get('amsgrad', False)}",
        lambda config: f"data.limit={(config.data.limit or 1) + 1}",
    ],
    ids=["timesteps", "weighting", "seed", "optimizer.amsgrad", "data.limit"],
)
def test_what_changes_numbers_changes_the_name(change):
    argument = change(typed())
    # unchecked: what a recipe sets of the option that it chose may not fit another option
    assert configure(parse(["recipe=quickstart", argument])).run_name.startswith("quickstart-"), argument


def test_an_explicit_name_or_folder_wins(monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    assert (typed("run_name=mine", "seed=1").run_name, typed("run_name=mine").run_dir) == (
        "mine",
        "runs/mine",
    )
    assert typed("run_dir=/out").run_dir == "/out"


def test_a_sweep_names_its_runs(monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "r2")
    assert typed("seed=1").run_dir == "runs/sweeps/s1/r2"


def test_without_a_recipe_the_name_is_run():
    assert configure(parse(WITHOUT_RECIPE)).run_name.startswith("run-")


@pytest.mark.parametrize("name", ["", "/abs", "a/../../b"])
def test_a_run_name_stays_inside_runs(name):
    assert "run_name=" in refusal(f"run_name={name}")


# --- folders of one's own


def test_a_folder_adds_groups_and_recipes(tmp_path):
    folder = tmp_path / "my conf, (2) 日本"
    (folder / "recipe").mkdir(parents=True)
    (folder / "timesteps").mkdir()
    (folder / "timesteps" / "flat.yaml").write_text("_target_: mine.Flat\n")
    lines = ["# @package _global_", "defaults: [quickstart, override /timesteps: flat]", "seed: 5"]
    (folder / "recipe" / "mine.yaml").write_text("\n".join(lines))
    config = configure(parse(["--config-dir", str(folder), "recipe=mine"]))
    assert (config.seed, config.run_name, config.timesteps["_target_"]) == (5, "mine", "mine.Flat")
    assert "mine, quickstart" in refusal("--config-dir", str(folder), "recipe=mein")


def test_the_configuration_is_plain_python():
    def walk(value):
        yield value
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from walk(part)

    config = typed("sampling.guidance.low_noise=3", "optimizer.betas=[0.9,0.9]")
    assert type(config) is Config
    assert {type(value) for value in walk(to_dict(config))} <= {dict, list, str, int, float, bool, type(None)}
    for group in (
        config.optimizer,
        config.model.transformer,
        config.parallelism.zero_optimization,
        config.sampling.guidance,
    ):
        assert type(group) is dict
    assert type(config.optimizer["betas"]) is type(config.model.transformer["patch_size"]) is list


# --- the process


def run_in_this_process(monkeypatch, argv, run, rank="0"):
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        command(run)
    return ended.value.code


def test_the_exit_code_is_what_the_run_returns(monkeypatch):
    assert run_in_this_process(monkeypatch, ["recipe=quickstart"], lambda config: None) == 0
    assert run_in_this_process(monkeypatch, ["recipe=quickstart"], lambda config: 7) == 7


@pytest.mark.parametrize("family", [ConfigError, DataError, CheckpointError])
def test_an_error_of_ours_in_the_run_is_one_message_and_code_2(monkeypatch, capfd, family):
    def run(config):
        raise family("clip.mp4: too short")

    assert run_in_this_process(monkeypatch, ["recipe=quickstart"], run) == 2
    assert capfd.readouterr().err == "wan_ds: error: clip.mp4: too short\n"


def test_a_config_error_is_told_by_rank_0_alone_and_a_broken_file_by_whoever_finds_it(monkeypatch, capfd):
    def run(config):
        raise DataError("clip.mp4: too short")

    monkeypatch.setattr(command_line, "SECONDS_FOR_RANK_0_TO_TELL", 0)
    monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)
    assert run_in_this_process(monkeypatch, ["recipe=quickstart", "seed=x"], run, rank="1") == 2
    assert capfd.readouterr().err == ""
    assert run_in_this_process(monkeypatch, ["recipe=quickstart"], run, rank="1") == 2
    assert capfd.readouterr().err == "wan_ds: error on rank 1: clip.mp4: too short\n"


def test_any_other_error_in_the_run_keeps_its_traceback(monkeypatch):
    def run(config):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sys, "argv", ["train.py", "recipe=quickstart"])
    with pytest.raises(RuntimeError, match="out of memory"):
        command(run)


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (["--cfg", "job", "train.steps=7"], ["  steps: 7\n", "run_name: quickstart\n", "${model.shift}"]),
        (["--cfg=job", "--resolve"], ["run_dir: runs/quickstart\n"]),
        (["-c", "job", "seed=4"], ["seed: 4"]),
        (["--help", "train.steps=7"], ["recipe: quickstart, quickstart-lora, wan2.1", "  train.steps=7\n"]),
        (["--info"], [str(conf_dir()), "parallelism: ddp, zero2"]),
    ],
)
def test_what_can_be_shown_is_shown_on_rank_0_without_a_run(monkeypatch, capfd, flags, fragments):
    arguments = ["recipe=quickstart", *flags]
    assert run_in_this_process(monkeypatch, arguments, pytest.fail) == 0
    shown = capfd.readouterr().out
    for fragment in fragments:
        assert fragment in shown
    assert run_in_this_process(monkeypatch, arguments, pytest.fail, rank="1") == 0
    assert capfd.readouterr().out == ""


SCRIPT = """
import sys
from wan_ds.config import command_line
from wan_ds.config.command_line import command

command_line.SECONDS_FOR_RANK_0_TO_TELL = 0.1

def main(config):
    sys.stdout.write(f"{config.data.path}|{config.run_name}|{'deepspeed' in sys.modules}")

if __name__ == "__main__":
    command(main)
"""


PATH = "a cat, 日本 🎬 \\"


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of a sound command and of two mistaken ranks; all three at a time."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "train.py").write_text(SCRIPT)
    before = sorted(folder.rglob("*"))
    mistaken = ["train.lerning_rate=1", "--local-rank", "0"]
    cases = [
        ([f"data.path={PATH}", "--local_rank=0"], {}),
        (mistaken, {"RANK": "0", "WORLD_SIZE": "2"}),
        (mistaken, {"RANK": "1", "WORLD_SIZE": "2"}),
    ]
    set_by_launchers = ("RANK", "WORLD_SIZE", "WANDB_SWEEP_ID", "WANDB_RUN_ID")
    common = {name: value for name, value in os.environ.items() if name not in set_by_launchers}
    common |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen(
            [sys.executable, "train.py", "recipe=quickstart", *arguments],
            cwd=folder,
            env=common | more,
            **pipes,
        )
        for arguments, more in cases
    ]
    texts = [process.communicate(timeout=120) for process in started]
    assert sorted(folder.rglob("*")) == before, "a process that only composes left a file"
    return [(process.returncode, *text) for process, text in zip(started, texts, strict=True)]


def test_a_process_composes_without_deepspeed_and_writes_nothing(told):
    code, out, err = told[0]
    assert (code, err) == (0, "")
    path, name, deepspeed = out.split("|")
    assert (path, deepspeed) == (PATH, "False")
    assert name.startswith("quickstart-")


def test_two_ranks_that_are_mistaken_give_one_message(told):
    first, second = told[1:]
    assert first == (
        2,
        "",
        "wan_ds: error: train.lerning_rate: no such setting; did you mean optimizer.lr?\n",
    )
    assert second == (2, "", "")


def test_the_number_of_ranks_comes_from_the_launcher(monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments = ["recipe=quickstart", "train.global_batch_size=6", "train.micro_batch_size=1"]
    assert run_in_this_process(monkeypatch, arguments, pytest.fail) == 2
    assert "choose 4 or 8, or start 1, 2, 3 or 6 ranks" in capfd.readouterr().err


# --- small entry points


class Kind(Enum):
    mp4 = "mp4"
    gif = "gif"


@dataclass
class Request:
    run: str = field(metadata={"help": "the run's folder", "path": True})
    prompt: str | None = None
    seed: int = 0
    kind: Kind = Kind.mp4


def test_a_small_entry_point_takes_the_same_text_and_types(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    request = options(
        Request, ["run=~/r, 1", 'prompt=a "cat", running', "seed=3", "kind=gif", "--local_rank=0"]
    )
    assert request == Request("/home/ada/r, 1", 'a "cat", running', 3, Kind.gif)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["seed=1"], "run: not set; type run=..."),
        (["run=x", "promt=y"], "promt: no such setting; did you mean prompt?"),
        (["run=x", "seed=y"], "seed=y: must be a whole number"),
        (["run=x", "kind=avi"], "kind=avi: must be mp4, gif"),
        (["run=x", "--cfg=job"], "--help"),
    ],
)
def test_a_small_entry_point_refuses_with_a_sentence(arguments, fragment):
    with pytest.raises(ConfigError) as refused:
        options(Request, arguments)
    assert fragment in str(refused.value)


def test_a_small_entry_point_tells_its_settings(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["sample.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        simple_command(Request, lambda request: None)
    assert ended.value.code == 0
    assert "run  (text; required)  the run's folder" in capfd.readouterr().out
