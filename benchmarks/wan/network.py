"""Builds the network: machines on lines of their own, all their packets through one delay.

    with wide_area_network({"peer-1": link, ...}, folder) as network:
        network.hosts["peer-1"].start(...)

Every machine is a host of `kits.network_lab`, with a network stack of its own. Its cable has the
line's
rates (tbf at both ends); what crosses the network is routed into the forwarder's device, waits
there, and goes on. All is gone when the block ends; after a kill without warning, when the next
network is built.

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

from benchmarks.wan.forwarder import DEVICE, READY
from benchmarks.wan.mixes import Link
from kits.network_lab import Host, Lab, LabError, Namespace, Shape, why_not_here
from swarm_coordinator.demo.subprocesses import Subprocess, Subprocesses, last_lines, module_command

YARDSTICK = "yardstick"
"""A machine without limits or delay, which the lines are measured against."""

BURST_SECONDS = 0.004
"""A timer that is late by no more than this loses none of the rate."""
SMALLEST_BURST_BYTES = 2 * 1514
QUEUE_SECONDS = 0.1
"""A modem's."""
START_SECONDS = 20.0
WAITING_PACKETS = 20_000
_DELAYED_TABLE = 100


@functools.cache
def why_no_network() -> str | None:
    """Why no wide-area network can be emulated here; None when one can."""
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

    Bytes are those that passed each machine's cable since it was plugged in. Headers of packets
    that the kernel carries in one piece are counted once.
    """

    at: float
    """Unix seconds."""
    sent: Mapping[str, int]
    received: Mapping[str, int]
    busy_seconds: float
    """Of all of this machine's cores together, whoever used them."""


class Network:
    def __init__(self, lab: Lab, links: Mapping[str, Link], folder: Path, seed: int) -> None:
        self.children: Subprocesses = lab.children
        self.links = dict(links)
        self._core = lab.internet.namespace
        self.folder = folder
        self.yardstick = lab.public_host(YARDSTICK)
        self.hosts: dict[str, Host] = {name: lab.public_host(name) for name in links}
        self._forwarder = self._start_forwarder(seed)
        self._route()
        # A lost packet must be one of the line's, not a piece of 64 KiB.
        lossy = any(link.loss_percent for link in links.values())
        for name, host in self.hosts.items():
            link = links[name]
            host.shape(step_shape(link.up_bytes_per_second), step_shape(link.down_bytes_per_second))
            if lossy:
                host.namespace.ip("link set eth0 gso_max_segs 1")

    def sample(self) -> Sample:
        # The forwarder lives in the core: its view of the devices is the core's.
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
        """Of all machines: what a contender left behind must not disturb the next one."""
        for host in self.hosts.values():
            host.namespace.end_processes()

    def forwarder_counts(self) -> dict[str, Any]:
        """How many packets it carried and how many left late; once the network is gone."""
        counts: dict[str, Any] = json.loads(self._forwarder.last_lines(1)[0])
        return counts

    def _start_forwarder(self, seed: int) -> Subprocess:
        machines = {
            host.ipv4: (link.rtt_ms / 2000, link.jitter_ms / 1000, link.loss_percent / 100)
            for host, link in ((self.hosts[name], link) for name, link in self.links.items())
        }
        machines[self.yardstick.ipv4] = (0.0, 0.0, 0.0)
        words = json.dumps({"machines": machines, "seed": seed})
        command = module_command("benchmarks.wan.forwarder", words)
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
            # What comes back out of the device has waited; what comes from a machine has not.
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
def wide_area_network(links: Mapping[str, Link], folder: Path, seed: int = 1) -> Iterator[Network]:
    """A machine of each name with that line. LabError when this machine cannot hold it."""
    if (reason := why_no_network()) is not None:
        raise LabError(reason)
    with Lab() as lab:
        yield Network(lab, links, folder, seed)
