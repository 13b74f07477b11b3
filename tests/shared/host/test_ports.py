"""Ports that a program keeps: no other program gets one of them by asking for any."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from swarm_shared.base.errors import NetworkError
from swarm_shared.host.ports import LASTING_PORTS, lasting_port

SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_lasting_port_is_free_and_none_that_the_system_gives_away(host: str) -> None:
    port = lasting_port(host)
    assert port in LASTING_PORTS
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.bind((host, port))
    if SYSTEM.exists():
        assert port < int(SYSTEM.read_text().split()[0])


def test_ports_that_are_taken_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        free = lasting_port("127.0.0.1")
        monkeypatch.setattr(random, "sample", lambda ports, count: [taken, free])
        assert lasting_port("127.0.0.1") == free
        monkeypatch.setattr(random, "sample", lambda ports, count: [taken])
        with pytest.raises(NetworkError, match="already in use"):
            lasting_port("127.0.0.1")


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(NetworkError, match=r"no free port on 192\.0\.2\.77"):
        lasting_port("192.0.2.77")
