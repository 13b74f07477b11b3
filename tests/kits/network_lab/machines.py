"""The machines of a lab: hosts, on the public segment or on a LAN, and routers between the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from kits.network_lab import port_mapping
from kits.network_lab.addressing import Allocator, Network, lan_ipv4, lan_ipv6
from kits.network_lab.commands import LabError, ip6tables_tool, iptables_tool
from kits.network_lab.counting import TrafficCounter, count_traffic
from kits.network_lab.namespace import Namespace
from kits.network_lab.segment import Attachment, Segment, Shape
from swarm_coordinator.demo.subprocesses import Subprocess, Subprocesses, run_to_end

WAN = "wan0"
LAN = "lan0"


class Nat(Enum):
    """How a router translates. All drop what comes in unasked, as home routers do."""

    PORT_PRESERVING = "port-preserving"
    """A connection keeps its port outside: whoever is told it can be found there."""
    SYMMETRIC = "symmetric"
    """A random port for each connection: nobody can foretell it."""


class Machine:
    """What hosts and routers have in common."""

    def __init__(self, name: str, namespace: Namespace) -> None:
        self.name = name
        self.namespace = namespace
        self.namespace.ip("link set lo up")
        # Addresses must be usable at once; routers announce nothing in a lab.
        self.namespace.set(
            ipv6__conf__all__accept_dad=0, ipv6__conf__default__accept_dad=0,
            ipv6__conf__all__accept_ra=0, ipv6__conf__default__accept_ra=0,
        )  # fmt: skip

    def count_traffic(self, remote: str) -> TrafficCounter:
        """Bytes that pass this machine to and from an address, from now on."""
        return count_traffic(self.namespace, remote)


class Host(Machine):
    """A computer with one network cable."""

    def __init__(
        self, name: str, namespace: Namespace, segment: Segment, versions: tuple[int, ...],
        children: Subprocesses,
    ) -> None:  # fmt: skip
        super().__init__(name, namespace)
        self._children = children
        self._cable = Attachment(namespace, segment, "eth0", versions)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command, it runs on this host."""
        return self.namespace.prefix

    @property
    def ipv4(self) -> str:
        return _required(self._cable.address(4), self.name, 4)

    @property
    def ipv6(self) -> str:
        return _required(self._cable.address(6), self.name, 6)

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Subprocess:
        """A program on this host, ended with the lab at the latest."""
        where = ("env", f"--chdir={folder}") if folder is not None else ()
        return self._children.start(name, (*self.prefix, *where, *command), log, environment)

    def adopt(self, child: Subprocess) -> None:
        """A program that somebody else has started here; it ends with the lab, too."""
        self._children.started.append(child)

    def run(self, command: Sequence[str], timeout_seconds: float = 30.0) -> str:
        """A program that ends by itself; what it printed. SwarmError when it fails."""
        return run_to_end(f"{command[0]} on {self.name}", [*self.prefix, *command], timeout_seconds)

    def cut(self) -> None:
        """Pull the cable: nothing arrives any more, and no program is told."""
        self._cable.cut()

    def heal(self) -> None:
        self._cable.heal()

    def change_address(self) -> str:
        """Another IPv4 address of the same network, the old one is gone; the new one."""
        return self._cable.give_address(self._cable.segment.allocator(4))

    def limit_rate(self, bytes_per_second: float) -> None:
        """Of the cable, each direction."""
        self.shape(Shape(bytes_per_second), Shape(bytes_per_second))

    def shape(self, up: Shape, down: Shape) -> None:
        self._cable.shape(up, down)

    def route_through_gateway(self) -> None:
        """Neighbours on its network are not reached directly, either."""
        self._cable.route_through_gateway()

    @property
    def port(self) -> str:
        """The other end of its cable, a device of the segment's namespace."""
        return self._cable.port


class Router(Machine):
    """A home router: one address outside, a LAN inside, translation and a firewall between."""

    def __init__(
        self, name: str, namespace: Namespace, public: Segment, nat: Nat, lan_index: int,
        versions: tuple[int, ...],
    ) -> None:  # fmt: skip
        super().__init__(name, namespace)
        self.nat = nat
        self.versions = versions
        forwarding = {"ipv4__ip_forward": 1, "ipv6__conf__all__forwarding": 1}
        # Machines of one LAN reach each other through the switch, not through the firewall.
        bridged = {"bridge__bridge-nf-call-iptables": 0, "bridge__bridge-nf-call-ip6tables": 0}
        namespace.set(**forwarding, **bridged)
        self._cable = Attachment(namespace, public, WAN, versions)
        networks: dict[int, Network] = {4: lan_ipv4(lan_index), 6: lan_ipv6(lan_index)}
        self.lan = Segment(namespace, LAN, *(Allocator(networks[v]) for v in versions))
        if 6 in versions:
            public.namespace.ip(f"route add {networks[6]} via {self.wan_ipv6}")
        self._guard()

    @property
    def wan_ipv4(self) -> str:
        return _required(self._cable.address(4), self.name, 4)

    @property
    def wan_ipv6(self) -> str:
        return _required(self._cable.address(6), self.name, 6)

    def change_wan_address(self, address_pool: Allocator) -> str:
        """As when the provider gives another one: all its connections are gone."""
        return self._cable.give_address(address_pool)

    def cut(self) -> None:
        """Pull the cable to the provider; the LAN goes on."""
        self._cable.cut()

    def heal(self) -> None:
        self._cable.heal()

    def limit_rate(self, bytes_per_second: float) -> None:
        """Of the line to the provider, each direction."""
        self._cable.shape(Shape(bytes_per_second), Shape(bytes_per_second))

    def offer_port_mapping(self, children: Subprocesses, folder: Path) -> Subprocess:
        """Run a UPnP and NAT-PMP daemon for the LAN."""
        gateway = self.lan.allocator(4).gateway
        return port_mapping.start(self.namespace, WAN, LAN, gateway, children, folder)

    def _guard(self) -> None:
        established = "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
        guard = [
            "*filter", ":INPUT DROP", ":FORWARD DROP",
            "-A INPUT -i lo -j ACCEPT", f"-A INPUT -i {LAN} -j ACCEPT", f"-A INPUT {established}",
            f"-A FORWARD {established}", f"-A FORWARD -i {LAN} -o {WAN} -j ACCEPT",
        ]  # fmt: skip
        if 4 in self.versions:
            random_ports = " --random-fully" if self.nat is Nat.SYMMETRIC else ""
            translate = ["*nat", f"-A POSTROUTING -o {WAN} -j MASQUERADE{random_ports}", "COMMIT"]
            rules = "\n".join([*guard, "COMMIT", *translate, ""])
            self.namespace.run([f"{iptables_tool()}-restore", "-w"], rules)
        if 6 in self.versions:
            # IPv6 homes have addresses of their own and a firewall in front of them.
            neighbours = ["-A INPUT -p icmpv6 -j ACCEPT", "COMMIT", ""]
            rules = "\n".join([*guard, *neighbours])
            self.namespace.run([f"{ip6tables_tool()}-restore", "-w"], rules)


def _required(address: str | None, name: str, version: int) -> str:
    if address is None:
        raise LabError(f"{name} has no IPv{version} address in this lab")
    return address
