"""What a failed dial says: the innermost cause, in the system's words where there are some."""

from __future__ import annotations

import errno
import socket

import pytest

from swarm_shared.base.errors import NetworkError
from swarm_shared.network.libp2p.errors import dial_errors, summary


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ECONNREFUSED, "Error connecting to it: refused"), "connection refused"),
        (OSError("all attempts to connect failed"), "all attempts to connect failed"),
        (socket.gaierror(socket.EAI_NONAME, "Name not known"), "[Errno -2] Name not known"),
        (ValueError(), "ValueError"),
    ],
)  # fmt: skip
def test_a_cause_is_said_in_a_few_words(error: Exception, text: str) -> None:
    assert summary(error) == text
    assert summary(ExceptionGroup("dials", [error])) == text
    with pytest.raises(NetworkError) as failure, dial_errors("/ip4/127.0.0.1/tcp/9"):
        raise RuntimeError("a layer") from error
    assert str(failure.value) == f"/ip4/127.0.0.1/tcp/9: {text}"
