"""No network: whoever opens a connection or looks a host up fails the test."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def no_network() -> Iterator[None]:
    """For this process; what it starts must ask for itself."""
    refused = mock.Mock(side_effect=AssertionError("something asked the network"))
    with (
        mock.patch.object(socket.socket, "connect", refused),
        mock.patch.object(socket, "getaddrinfo", refused),
        mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}),
    ):
        yield
