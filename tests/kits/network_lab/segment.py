"""A switch inside a namespace: one link-layer segment, and the addresses given out on it.

The public segment is one, and so is every router's LAN.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kits.network_lab.addressing import Allocator
from kits.network_lab.namespace import Namespace

EVERYWHERE = {4: "0.0.0.0/0", 6: "::/0"}

_mac_serial = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Shape:
    """What one direction of a cable carries."""

    bytes_per_second: float
    """Headers included."""
    burst_bytes: int = 128_000
    """Sent at once after a pause. Packets larger than this are cut up, so at least one packet."""
    queue_seconds: float = 0.05
    """How much may wait, in time at the full rate; more is dropped."""

    @property
    def words(self) -> list[str]:
        """For `tc qdisc`."""
        rate = f"{8 * self.bytes_per_second:.0f}bit"
        latency = f"{1000 * self.queue_seconds:.0f}ms"
        return f"tbf rate {rate} burst {self.burst_bytes} latency {latency}".split()


class Segment:
    """A bridge called `device`, with the gateway's addresses on it."""

    def __init__(self, namespace: Namespace, device: str, *allocators: Allocator) -> None:
        self.namespace = namespace
        self.device = device
        self._allocators: dict[int, Allocator] = {a.network.version: a for a in allocators}
        self.ports = itertools.count(1)
        # A fixed hardware address: by default a bridge changes it whenever a port is added.
        serial = next(_mac_serial)
        mac = f"02:ab:00:00:{serial >> 8 & 255:02x}:{serial & 255:02x}"
        namespace.ip(
            f"link add {device} address {mac} type bridge stp_state 0 forward_delay 0 "
            "mcast_snooping 0",
            *(
                f"address add {allocator.with_length(allocator.gateway)} dev {device}"
                + (" nodad" if allocator.network.version == 6 else "")
                for allocator in allocators
            ),
            f"link set {device} up",
        )

    def allocator(self, version: int) -> Allocator:
        return self._allocators[version]

    def plug(self, machine: Namespace, device: str) -> str:
        """A cable from a new port to `device`, which it makes in `machine`; the port's name."""
        port = f"port{next(self.ports)}"
        self.namespace.ip(
            f"link add {port} type veth peer name {device} netns {machine.name}",
            f"link set {port} master {self.device}",
            f"link set {port} up",
        )
        return port


class Attachment:
    """A machine's end of a cable to a segment: its device, its addresses, its default route."""

    def __init__(
        self, machine: Namespace, segment: Segment, device: str, versions: tuple[int, ...]
    ) -> None:
        self.machine = machine
        self.segment = segment
        self.device = device
        self.port = segment.plug(machine, device)
        machine.ip(f"link set {device} up")
        self._held: dict[int, str] = {}
        for version in versions:
            self.give_address(segment.allocator(version))

    def address(self, version: int) -> str | None:
        held = self._held.get(version)
        return held.partition("/")[0] if held is not None else None

    def give_address(self, allocator: Allocator) -> str:
        """A new address of the allocator's network, instead of the one of that IP version."""
        version = allocator.network.version
        address = allocator.take()
        held = allocator.with_length(address)
        nodad = " nodad" if version == 6 else ""
        lines = [
            f"address add {held} dev {self.device}{nodad}",
            f"route replace {EVERYWHERE[version]} via {allocator.gateway} dev {self.device}",
        ]
        if (old := self._held.get(version)) is not None:
            lines.insert(0, f"address delete {old} dev {self.device}")
        self.machine.ip(*lines)
        self._held[version] = held
        return address

    def cut(self) -> None:
        """As when the cable is pulled: no carrier, while addresses and routes stay."""
        self.segment.namespace.ip(f"link set {self.port} down")

    def heal(self) -> None:
        self.segment.namespace.ip(f"link set {self.port} up")

    def shape(self, up: Shape, down: Shape) -> None:
        """`up` is from the machine to the segment."""
        for namespace, device, shape in (
            (self.machine, self.device, up),
            (self.segment.namespace, self.port, down),
        ):
            namespace.run(["tc", "qdisc", "replace", "dev", device, "root", *shape.words])

    def route_through_gateway(self) -> None:
        """Everything goes to the gateway, as with a provider: also what is for neighbours."""
        gateway = self.segment.allocator(4).gateway
        network = self.segment.allocator(4).network
        self.machine.ip(
            f"route replace {gateway} dev {self.device}",
            f"route replace default via {gateway} dev {self.device}",
            f"route delete {network} dev {self.device}",
        )
