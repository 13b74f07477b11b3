"""Throughput, CPU cost and hole-punching time of links between machines of a lab.

There are eight pairs of nodes per kind of path, all started first, so that repetitions can be
interleaved. The rate of a pair is that of one stream of frames; eight at once are eight pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.net.p2pd import P2pdProcess
from kits.network_lab import Host, Lab, Nat
from kits.network_lab.commanded_process import ToldProcess
from kits.network_lab.node_process import NodeProcess
from swarm_shared.base.errors import SwarmError

PAIRS = 8
SIZE_BYTES = 256 * 10**6
"""Bytes sent over a single link; each of several concurrent links sends an eighth, so that all
transfers take about as long."""
FRAME_BYTES = 10**6
PUNCH_LIMIT_SECONDS = 10.0
UNLIMITED = 2**40

T = TypeVar("T")

Measure = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One measurement of one or several links at once."""

    links: int
    bytes: int
    seconds: float
    """Seconds from the first byte sent until the last receiver has answered."""
    senders_cpu_seconds: float
    receivers_cpu_seconds: float
    relay_cpu_seconds: float

    def row(self) -> dict[str, Any]:
        per_gb = 1e9 / self.bytes
        return {
            **asdict(self),
            "megabytes_per_second": self.bytes / self.seconds / 1e6,
            "senders_cpu_seconds_per_gb": self.senders_cpu_seconds * per_gb,
            "receivers_cpu_seconds_per_gb": self.receivers_cpu_seconds * per_gb,
            "relay_cpu_seconds_per_gb": self.relay_cpu_seconds * per_gb,
        }


Pair = tuple[ToldProcess, ToldProcess]


class LinkLab:
    """The lab's machines with their nodes and connections."""

    def __init__(self, lab: Lab, folder: Path, pairs: int) -> None:
        self._folder = folder
        self.relay = NodeProcess(lab.public_host("relay"), folder)
        # Its own limit, 4 MiB/s for each address, would be measured otherwise.
        self.relay.ask("serve_relay", address_bytes_per_second=UNLIMITED)
        hosts: dict[str, list[tuple[Host, Host]]] = {"direct": [], "punched": [], "relayed": []}
        for index in range(pairs):
            ends = [f"{end}{index}" for end in ("from", "to")]
            hosts["direct"].append(_two(lab.public_host(f"direct-{end}") for end in ends))
            for kind, nat in (("punched", Nat.PORT_PRESERVING), ("relayed", Nat.SYMMETRIC)):
                hosts[kind].append(_two(lab.home(f"{kind}-{end}", nat)[1] for end in ends))
        self.pairs: dict[str, list[tuple[NodeProcess, NodeProcess]]] = {
            kind: [_two(NodeProcess(host, folder) for host in two) for two in rows]
            for kind, rows in hosts.items()
        }
        self._p2pd_hosts = hosts["relayed"]
        self.p2pd_pairs: list[tuple[P2pdProcess, P2pdProcess]] = []

    def connect(self) -> list[float]:
        """Connect every pair; return the seconds of each hole punch, from the dial on."""
        punched: list[float] = []
        for kind, rows in self.pairs.items():
            for sender, receiver in rows:
                if kind != "direct":
                    sender.reserve(self.relay)
                    receiver.reserve(self.relay)
                began = time.monotonic()
                sender.ask("connect", peer=receiver.peer, addresses=receiver.addresses)
                reached = sender.ask(
                    "wait_for_path", peer=receiver.peer, kind=kind, seconds=PUNCH_LIMIT_SECONDS
                )
                if reached["seconds"] is None:
                    raise SwarmError(
                        f"not a {kind} link but {reached['kind']}; logs: {self._folder}"
                    )
                if kind == "punched":
                    punched.append(time.monotonic() - began)
        return punched

    def start_p2pd(self) -> None:
        """Start hivemind's daemon behind symmetric routers, with the lab's relay."""
        relays = [f"{a.split('/p2p/')[0]}/p2p/{self.relay.peer}" for a in self.relay.addresses]
        public = [relay for relay in relays if "/127." not in relay]
        self.p2pd_pairs = [
            _two(P2pdProcess(host, self._folder, public) for host in two)
            for two in self._p2pd_hosts
        ]
        for sender, receiver in self.p2pd_pairs:
            sender.ask("connect", peer=receiver.peer, addresses=receiver.relayed_addresses())

    def transfer(self, pairs: Sequence[Pair], size_bytes: int) -> Transfer:
        senders, receivers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        before = [_cpu(group) for group in (senders, receivers, [self.relay])]
        began = time.monotonic()
        for sender, receiver in pairs:
            peer = receiver.greeting["peer"]
            sender.send("send", peer=peer, size_bytes=size_bytes, frame_bytes=FRAME_BYTES)
        for sender in senders:
            sender.take()
        seconds = time.monotonic() - began
        after = [_cpu(group) for group in (senders, receivers, [self.relay])]
        used = [a - b for a, b in zip(after, before, strict=True)]
        return Transfer(len(pairs), len(pairs) * size_bytes, seconds, *used)

    def measurements(self) -> dict[str, Measure]:
        """Return the measurements by name; each call of one measures once."""
        kinds: dict[str, Sequence[Pair]] = {**self.pairs}
        if self.p2pd_pairs:
            kinds["p2pd through the relay"] = self.p2pd_pairs
        found: dict[str, Measure] = {}
        for kind, pairs in kinds.items():
            for count in dict.fromkeys((1, len(pairs))):
                size = SIZE_BYTES if count == 1 else SIZE_BYTES // 8

                def measure(some: Sequence[Pair] = pairs[:count], size: int = size) -> Any:
                    return self.transfer(some, size).row()

                found[f"{kind} x {count}"] = measure
        return found


@contextmanager
def link_lab(folder: Path, pairs: int, *, with_p2pd: bool) -> Iterator[tuple[LinkLab, list[float]]]:
    """Build and connect the lab; yield it with the seconds of each hole punch."""
    with Lab() as lab:
        links = LinkLab(lab, folder, pairs)
        punched = links.connect()
        if with_p2pd:
            links.start_p2pd()
        yield links, punched


def _cpu(processes: Sequence[ToldProcess]) -> float:
    return sum(process.cpu_seconds() for process in processes)


def _two(some: Iterable[T]) -> tuple[T, T]:
    first, second = some
    return first, second
