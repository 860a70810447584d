"""What a run says of its end, and of a folder that it cannot have."""

from types import SimpleNamespace

import pytest

from wan_ds.errors import ConfigError, TrainingError
from wan_ds.parallel.mesh import Mesh
from wan_ds.training import run


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TrainingError("the ranks do not do the same"), "TrainingError: the ranks do not do the same\n"),
        (
            RuntimeError("[pair.cc:537] Read error: Connection reset by peer\nmore of it"),
            "RuntimeError: [pair.cc:537] Read error: Connection reset by peer; another rank is gone or does "
            "not answer: see how it ended\n",
        ),
    ],
)
def test_what_ended_training_stands_in_the_log_of_the_run(tmp_path, capfd, error, words):
    config = SimpleNamespace(run_dir=str(tmp_path))
    with pytest.raises(type(error)), run.told(config, 1):
        raise error
    assert (tmp_path / "log.txt").read_text().endswith(f" rank 1 E training ends by {words}")
    assert capfd.readouterr() == ("", "")  # whoever catches it tells it there


def _held(folder: str) -> str:
    try:
        with run.held(SimpleNamespace(run_dir=folder), Mesh()):
            return "held"
    except ConfigError as error:
        return str(error)


def test_a_folder_that_cannot_be_written_is_refused_on_every_rank(world2, tmp_path):
    (tmp_path / "file").touch()
    first, second = world2.run(_held, str(tmp_path / "file" / "run"))
    assert first.startswith(f"run_dir={tmp_path}/file/run: ") and "Not a directory" in first
    assert second.endswith("rank 0 cannot write there; type another run_dir")
    assert world2.run(_held, str(tmp_path / "run")) == ["held", "held"]
