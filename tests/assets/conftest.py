"""The quickstart's clips, decoded once."""

import pytest
import torch

from wan_ds.data.clips import decode
from wan_ds.data.demo import DemoClips


@pytest.fixture(scope="session")
def clips() -> torch.Tensor:
    """The three clips `[3, 3, 9, 64, 96]` in [-1, 1]."""
    size = {"num_frames": 9, "fps": 16, "height": 64, "width": 96}
    return torch.stack([decode(c.path, start_seconds=c.start_seconds, **size) for c in DemoClips()(None)])
