"""The dashboard's process ends at once, whatever its readers do."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kits.coordinator.http_server import run_with_pages
from swarm_coordinator.configuration.http_address import HttpAddress, address_of, listen

pytestmark = pytest.mark.process

END_SECONDS = 10.0
"""Less than the time for a head, and than the time between comments on a quiet stream."""


def end_of_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.parametrize(
    ("end", "code"),
    [(end_of_input, 0), (lambda process: process.terminate(), -signal.SIGTERM)],
    ids=["end-of-input", "sigterm"],
)
def test_open_streams_and_half_requests_do_not_delay_the_end(
    tmp_path: Path, end: Callable[[subprocess.Popen[bytes]], None], code: int
) -> None:
    folder = run_with_pages(tmp_path / "run")
    with closing(listen(HttpAddress("127.0.0.1", 0))) as bound:
        process = subprocess.Popen(
            [sys.executable, "-m", "swarm_coordinator.dashboard", str(folder.path),
             str(bound.fileno())],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(bound.fileno(),),
        )  # fmt: skip
        at = address_of(bound)
    with process, socket.create_connection((at.host, at.port)) as stream:
        stream.sendall(b"GET /api/v1/events/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert stream.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
        with socket.create_connection((at.host, at.port)) as half:
            half.sendall(b"GET / HTTP/1.1\r\n")
            end(process)
            assert process.wait(END_SECONDS) == code
            while stream.recv(1 << 16):
                pass
        assert process.stderr is not None
        assert process.stderr.read() == b""
    log = (folder.log / "http.log").read_text()
    assert " ERROR " not in log
    assert "/api/v1" not in log, "requests are not logged"
