"""Counting the bytes that pass a machine of the lab to and from one address."""

from __future__ import annotations

import ipaddress
import itertools
from dataclasses import dataclass

from kits.network_lab.commands import LabError, ip6tables_tool, iptables_tool
from kits.network_lab.namespace import Namespace

_serial = itertools.count(1)


@dataclass(frozen=True, slots=True)
class TrafficCounter:
    """Packets with their headers, counted where they enter and leave a namespace, since its start.

    On a router they are counted outside its translation: `remote` is an address on the public
    side, or one of its own LAN.
    """

    namespace: Namespace
    remote: str
    _tool: str
    _mark: str

    @property
    def received_bytes(self) -> int:
        """From the remote."""
        return self._read("PREROUTING")

    @property
    def sent_bytes(self) -> int:
        """To the remote."""
        return self._read("POSTROUTING")

    @property
    def total_bytes(self) -> int:
        return self.received_bytes + self.sent_bytes

    def _read(self, chain: str) -> int:
        table = self.namespace.run([self._tool, "-t", "mangle", "-nvxL", chain])
        for line in table.splitlines():
            if f"/* {self._mark} */" in line:
                return int(line.split()[1])
        raise LabError(f"the counter of {self.remote} in {self.namespace.name} is gone")


def count_traffic(namespace: Namespace, remote: str) -> TrafficCounter:
    """Begins to count, at both chains that every packet passes."""
    tool = iptables_tool() if ipaddress.ip_address(remote).version == 4 else ip6tables_tool()
    mark = f"lab-{next(_serial)}"
    comment = ["-m", "comment", "--comment", mark]
    for chain, side in (("PREROUTING", "-s"), ("POSTROUTING", "-d")):
        namespace.run([tool, "-w", "-t", "mangle", "-A", chain, side, remote, *comment])
    return TrafficCounter(namespace, remote, tool, mark)
