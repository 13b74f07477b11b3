"""The emulated network, with real stacks. What is asserted holds however busy this machine is:
nothing is faster than its line, nothing is lost or reordered that should not be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.wan.links.check import check_links
from benchmarks.wan.links.network import Network, why_no_network, wide_area_network
from benchmarks.wan.mixes import Link
from kits.network_lab import Host, own_namespaces

pytestmark = [pytest.mark.lab, pytest.mark.nightly]

FIBRE = Link(up_mbit=100, down_mbit=100, rtt_ms=10)
CABLE = Link(up_mbit=4, down_mbit=40, rtt_ms=40)
LOSSY = Link(up_mbit=20, down_mbit=20, rtt_ms=4, loss_percent=10)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    if (reason := why_no_network()) is not None:
        pytest.skip(reason)
    with wide_area_network({"fibre": FIBRE, "cable": CABLE, "lossy": LOSSY}, tmp_path) as made:
        yield made


def send(source: Host, target: Host, size_bytes: int) -> float:
    """Seconds until the last of so many bytes has arrived, over one connection."""
    with target.namespace.entered():
        listener = socket.create_server((target.ipv4, 5000))
    with source.namespace.entered():
        sender = socket.create_connection((target.ipv4, 5000), 10)
    with listener, sender:
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(60)
            payload = bytes(range(256)) * (size_bytes // 256)
            pid = os.fork()
            if pid == 0:
                sender.sendall(payload)
                os._exit(0)
            began = time.monotonic()
            got = bytearray()
            while len(got) < len(payload):
                got += accepted.recv(2**20)
            took = time.monotonic() - began
            os.waitpid(pid, 0)
            assert got == payload
    return took


def connect_seconds(source: Host, target: Host) -> float:
    """The quickest of some handshakes: a round trip each."""
    with target.namespace.entered():
        listener = socket.create_server((target.ipv4, 5001))
    found = []
    with listener:
        for _ in range(5):
            began = time.monotonic()
            with source.namespace.entered(), socket.create_connection((target.ipv4, 5001), 10):
                found.append(time.monotonic() - began)
    return min(found)


def test_two_machines_are_their_round_trips_apart(network: Network) -> None:
    fibre, cable = network.hosts["fibre"], network.hosts["cable"]
    assert connect_seconds(fibre, cable) >= 0.050
    assert connect_seconds(network.yardstick, fibre) >= 0.010


def test_no_line_carries_more_than_its_rate_and_nothing_is_lost(network: Network) -> None:
    fibre, cable = network.hosts["fibre"], network.hosts["cable"]
    before = network.sample()
    size = 1_000_000
    assert send(cable, fibre, size) >= 0.9 * size / CABLE.up_bytes_per_second
    assert send(fibre, cable, 4 * size) >= 0.9 * 4 * size / CABLE.down_bytes_per_second
    after = network.sample()
    assert after.sent["cable"] - before.sent["cable"] >= size
    assert after.received["cable"] - before.received["cable"] >= 4 * size
    assert after.sent["fibre"] - before.sent["fibre"] < 1.2 * 4 * size


def test_a_lossy_line_loses_about_what_it_should(network: Network) -> None:
    lossy = network.hosts["lossy"]
    words = ["ping", "-q", "-c", "400", "-i", "0.002", network.yardstick.ipv4]
    process = subprocess.run(
        [*lossy.prefix, *words], capture_output=True, text=True, check=False, timeout=60
    )
    # Each way a tenth: 81 of 100 come back. Five standard deviations of 400.
    received = int(process.stdout.split(" received")[0].rsplit(" ", 1)[-1])
    assert 284 < received < 364, process.stdout


def test_the_harness_finds_what_it_asked_for(network: Network) -> None:
    (check,) = check_links(network, ["cable"])
    assert 0 < check.up_mbit < 1.1 * CABLE.up_mbit
    assert check.rtt_ms >= CABLE.rtt_ms


def test_after_an_interrupt_nothing_is_left(tmp_path: Path) -> None:
    if (reason := why_no_network()) is not None:
        pytest.skip(reason)
    program = (
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        "from benchmarks.wan.mixes import Link\n"
        "from benchmarks.wan.links.network import wide_area_network\n"
        "from kits.network_lab import own_namespaces\n"
        # A shell starts what it puts behind itself deaf to Ctrl-C, and so everything below it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with wide_area_network({'a': Link(up_mbit=1, down_mbit=1)}, Path(sys.argv[1])) as made:\n"
        "    print(*own_namespaces(), *[c.pid for c in made.children.started], flush=True)\n"
        "    time.sleep(100)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert child.stdout is not None
    *names, forwarder = child.stdout.readline().split()
    assert len(names) == 3
    child.send_signal(signal.SIGINT)
    child.wait(30)
    assert not [name for name in names if (Path("/run/netns") / name).exists()]
    assert not Path(f"/proc/{forwarder}").exists()
    assert own_namespaces() == []
