"""Verifies the emulated links with iperf3 and ping before a measurement."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.wan.links.network import Network
from benchmarks.wan.mixes import Link
from kits.network_lab import Host
from swarm_coordinator.demo.run_summary import table
from swarm_coordinator.demo.subprocesses import wait_until
from swarm_shared.base.errors import SwarmError

SECONDS = 3.0
WARM_UP_SECONDS = 2
"""Leading seconds not measured, while TCP ramps up."""
PINGS = 60
PING_SECONDS = 0.05
RATE_TOLERANCE = 0.10
RTT_TOLERANCE_MS = 1.5

TCP_SHARE = 1448 / 1514
"""Payload share of a full Ethernet frame, after the headers of Ethernet, IP and TCP with time
stamps."""
DATAGRAM_BYTES = 1448
UDP_SHARE = DATAGRAM_BYTES / (DATAGRAM_BYTES + 42)
UDP_EXCESS = 1.2
"""Rate of UDP datagrams over the link's rate, which saturates it."""


@dataclass(frozen=True, slots=True)
class LinkCheck:
    """Configured and measured properties of one machine's link."""

    machine: str
    asked: Link
    up_mbit: float
    """Measured rate on the wire, headers included, like the configured one."""
    down_mbit: float
    rtt_ms: float
    """Mean round trip to a machine in the middle of the network."""
    rtt_deviation_ms: float

    def complaints(self) -> list[str]:
        """Return a message for each property that deviates from the configuration."""
        found = []
        for what, asked, measured in (
            ("up", self.asked.up_mbit, self.up_mbit),
            ("down", self.asked.down_mbit, self.down_mbit),
        ):
            if abs(measured / asked - 1) > RATE_TOLERANCE:
                found.append(f"{self.machine}: {what} {measured:.1f} Mbit/s, not {asked:g}")
        # The mean over few draws of the jitter deviates by a share of it.
        tolerance = RTT_TOLERANCE_MS + self.asked.jitter_ms / 2
        if abs(self.rtt_ms - self.asked.rtt_ms) > tolerance:
            found.append(f"{self.machine}: RTT {self.rtt_ms:.1f} ms, not {self.asked.rtt_ms:g}")
        return found

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "asked": self.asked.model_dump()}


def check_links(network: Network, machines: Iterable[str] | None = None) -> list[LinkCheck]:
    """Measure one machine of each kind of link (or `machines`), one after the other."""
    chosen = one_of_each(network.links) if machines is None else list(machines)
    with _iperf_server(network):
        return [_check(network, name) for name in chosen]


def one_of_each(links: Mapping[str, Link]) -> list[str]:
    """Return the first machine with each distinct link."""
    first: dict[Link, str] = {}
    for name, link in links.items():
        first.setdefault(link, name)
    return list(first.values())


def render(checks: Iterable[LinkCheck]) -> str:
    rows = [
        (
            one.machine,
            f"{one.asked.up_mbit:g}", f"{one.up_mbit:.1f}",
            f"{one.asked.down_mbit:g}", f"{one.down_mbit:.1f}",
            f"{one.asked.rtt_ms:g}", f"{one.rtt_ms:.1f}", f"{one.rtt_deviation_ms:.1f}",
            f"{one.asked.jitter_ms:g}", f"{one.asked.loss_percent:g}",
        )
        for one in checks
    ]  # fmt: skip
    header = (
        "link of", "up Mbit/s", "found", "down Mbit/s", "found", "RTT ms", "found", "sd",
        "jitter set", "loss % set",
    )  # fmt: skip
    return table(header, rows, right=tuple(range(1, 10)))


def _check(network: Network, name: str) -> LinkCheck:
    host, link = network.hosts[name], network.links[name]
    mean, deviation = _ping(host, network.yardstick.ipv4)
    return LinkCheck(
        name, link,
        _rate(host, network.yardstick.ipv4, link.up_mbit, link, reverse=False),
        _rate(host, network.yardstick.ipv4, link.down_mbit, link, reverse=True),
        mean, deviation,
    )  # fmt: skip


def _rate(host: Host, server: str, mbit: float, link: Link, *, reverse: bool) -> float:
    """Measure Mbit/s on the wire: by TCP, or by UDP on links with loss, which limits TCP."""
    words = ["iperf3", "-c", server, "-J", "-t", f"{SECONDS:g}", "-O", str(WARM_UP_SECONDS)]
    share = TCP_SHARE
    if reverse:
        words.append("-R")
    if link.loss_percent:
        excess = f"{UDP_EXCESS * mbit * 1e6:.0f}"
        words += ["-u", "-b", excess, "-l", str(DATAGRAM_BYTES)]
        share = UDP_SHARE * (1 - link.loss_percent / 100)
    report = json.loads(host.run(words))
    if "error" in report:
        raise SwarmError(f"iperf3 on {host.name}: {report['error']}")
    return float(report["end"]["sum_received"]["bits_per_second"]) / 1e6 / share


def _ping(host: Host, target: str) -> tuple[float, float]:
    """Return mean and standard deviation of the round trip in ms."""
    words = ["ping", "-q", "-n", "-c", str(PINGS), "-i", str(PING_SECONDS), target]
    text = host.run(words)
    match = re.search(r"= [\d.]+/([\d.]+)/[\d.]+/([\d.]+) ms", text)
    if match is None:
        raise SwarmError(f"ping on {host.name} got no answer: {text.strip()}")
    return float(match[1]), float(match[2])


@contextmanager
def _iperf_server(network: Network) -> Iterator[None]:
    log = network.folder / "iperf3.out"
    server = network.yardstick.start("iperf3", ["iperf3", "-s", "--forceflush"], log)
    wait_until(
        lambda: log.exists() and "listening" in log.read_text(), network.children, 10.0, "iperf3"
    )
    try:
        yield
    finally:
        network.children.exit_expected.append(server)
        server.kill()
