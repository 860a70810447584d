"""What one rank could not do, all refuse together, in that rank's words."""

import pytest
import torch.distributed as dist

from wan_ds.errors import CheckpointError, ConfigError, DataError
from wan_ds.training.agreement import agreed


def _told(error):
    def part():
        if dist.get_rank() == 1:
            raise error
        return "done"

    with pytest.raises(CheckpointError) as caught:
        agreed(part)
    return str(caught.value), agreed(lambda: "done")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("type something else"), "type something else"),
        (DataError("cat.mp4 is empty"), "cat.mp4 is empty"),
        (CheckpointError("weights are gone"), "weights are gone"),
        (OSError("no room"), "no room"),
        (KeyError("blocks.0"), "KeyError('blocks.0')"),  # nobody's sentence: the kind says more
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_any_kind_on_one_rank_ends_no_other_in_waiting(world2, error, told):
    assert world2.run(_told, error) == [(told, "done")] * 2
