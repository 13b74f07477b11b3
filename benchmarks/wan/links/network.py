"""Builds an emulated network: machines on their own links, with one forwarder for all delays.

    with wide_area_network({"peer-1": link, ...}, folder) as network:
        network.hosts["peer-1"].start(...)

Every machine is a host of `network_lab` with its own network stack. Its interface has the link's
rates (tbf at both ends); traffic across the network is routed through the forwarder's device, which
delays it. The network is removed when the block ends; after a kill, when the next one is built.

    machine ── tbf up ──> core ──> tun0 ── forwarder ──> tun0 ──> core ── tbf down ──> machine
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.instruments.inside import own_command
from benchmarks.wan.links.forwarder import DEVICE, READY
from benchmarks.wan.mixes import Link
from kits.network_lab import Host, Lab, LabError, Namespace, Shape, why_not_here
from swarm_coordinator.demo.subprocesses import Subprocess, Subprocesses, last_lines

YARDSTICK = "yardstick"
"""Name of a machine without limits or delay, the remote end of the link checks."""

BURST_SECONDS = 0.004
"""Burst of the token buckets in seconds; timers overdue by up to this do not reduce the rate."""
SMALLEST_BURST_BYTES = 2 * 1514
QUEUE_SECONDS = 0.1
"""Length of a link's queue in seconds, like a modem's."""
START_SECONDS = 20.0
WAITING_PACKETS = 20_000
_DELAYED_TABLE = 100


@functools.cache
def why_no_network() -> str | None:
    """Return the reason why no network can be emulated here, or None."""
    if (reason := why_not_here()) is not None:
        return reason
    for tool in ("iperf3", "ping"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (tools/install_network_lab.sh installs it)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun: the kernel needs CONFIG_TUN"
    namespace = Namespace("probe")
    try:
        namespace.run(["tc", "qdisc", "add", "dev", "lo", "root", *Shape(1e6).words])
    except LabError as error:
        return f"this kernel has no tbf (CONFIG_NET_SCH_TBF): {error}"
    finally:
        namespace.delete()
    return None


def step_shape(bytes_per_second: float) -> Shape:
    burst = max(SMALLEST_BURST_BYTES, round(bytes_per_second * BURST_SECONDS))
    return Shape(bytes_per_second, burst, QUEUE_SECONDS)


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one moment.

    Bytes are those that passed each machine's interface since it was created. Headers of packets
    that the kernel carries in one piece are counted once.
    """

    at: float
    """Unix seconds."""
    sent: Mapping[str, int]
    received: Mapping[str, int]
    busy_seconds: float
    """Busy seconds of all cores of this computer together, by any process."""


class Network:
    def __init__(self, lab: Lab, links: Mapping[str, Link], folder: Path) -> None:
        self.children: Subprocesses = lab.children
        self.links = dict(links)
        self._core = lab.internet.namespace
        self.folder = folder
        self.yardstick = lab.public_host(YARDSTICK)
        self.hosts: dict[str, Host] = {name: lab.public_host(name) for name in links}
        self._forwarder = self._start_forwarder()
        self._route()
        # A lost packet must be one packet on the link, not a merged one of 64 KiB.
        lossy = any(link.loss_percent for link in links.values())
        for name, host in self.hosts.items():
            link = links[name]
            host.shape(step_shape(link.up_bytes_per_second), step_shape(link.down_bytes_per_second))
            if lossy:
                host.namespace.ip("link set eth0 gso_max_segs 1")

    def sample(self) -> Sample:
        # The forwarder runs in the core's namespace and uses its devices.
        text = Path(f"/proc/{self._forwarder.pid}/net/dev").read_text()
        now = time.time()
        fields = {
            name.strip(): figures.split()
            for name, _, figures in (line.partition(":") for line in text.splitlines()[2:])
        }
        ports = {name: fields[host.port] for name, host in self.hosts.items()}
        times = psutil.cpu_times()
        return Sample(
            now,
            {name: int(counts[0]) for name, counts in ports.items()},
            {name: int(counts[8]) for name, counts in ports.items()},
            sum(times) - times.idle - times.iowait - times.guest - times.guest_nice,
        )

    def end_programs(self) -> None:
        """End the programs of all machines, so that none disturbs the next contender."""
        for host in self.hosts.values():
            host.namespace.end_processes()

    def forwarder_counts(self) -> dict[str, Any]:
        """Return the forwarder's packet counts; available once the network is removed."""
        counts: dict[str, Any] = json.loads(self._forwarder.last_lines(1)[0])
        return counts

    def _start_forwarder(self) -> Subprocess:
        machines = {
            host.ipv4: (link.rtt_ms / 2000, link.jitter_ms / 1000, link.loss_percent / 100)
            for host, link in ((self.hosts[name], link) for name, link in self.links.items())
        }
        machines[self.yardstick.ipv4] = (0.0, 0.0, 0.0)
        words = json.dumps({"machines": machines, "seed": 1})
        command = own_command("benchmarks.wan.links.forwarder", words)
        log = self.folder / "forwarder.out"
        child = self.children.start("forwarder", (*self._core.prefix, *command), log)
        deadline = time.monotonic() + START_SECONDS
        while READY not in last_lines(log, 3):
            if child.exit_code() is not None or time.monotonic() > deadline:
                words = "\n".join(child.last_lines())
                raise LabError(f"the forwarder {child.describe_exit()} and is not ready: {words}")
            time.sleep(0.02)
        return child

    def _route(self) -> None:
        for host in (self.yardstick, *self.hosts.values()):
            host.route_through_gateway()
        self._core.ip(
            f"link set {DEVICE} up mtu 1500 txqueuelen {WAITING_PACKETS}",
            f"route add default dev {DEVICE} table {_DELAYED_TABLE}",
            # Packets from the device have been delayed; packets from a machine have not.
            f"rule add iif {DEVICE} lookup main priority 10",
            f"rule add not iif lo lookup {_DELAYED_TABLE} priority 20",
        )
        self._core.set(
            ipv4__conf__all__rp_filter=0,
            ipv4__conf__bridge0__rp_filter=0,
            ipv4__conf__bridge0__send_redirects=0,
            ipv4__conf__all__send_redirects=0,
            **{f"ipv4__conf__{DEVICE}__rp_filter": 0},
        )


@contextmanager
def wide_area_network(links: Mapping[str, Link], folder: Path) -> Iterator[Network]:
    """Build a network of machines by name with their links; raises LabError where impossible."""
    if (reason := why_no_network()) is not None:
        raise LabError(reason)
    with Lab() as lab:
        yield Network(lab, links, folder)
