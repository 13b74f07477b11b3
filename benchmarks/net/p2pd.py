"""hivemind's daemon p2pd on a machine of a lab: the controlling side of `p2pd_program`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kits.network_lab import Host
from kits.network_lab.commanded_process import ToldProcess
from swarm_shared.base.errors import SwarmError

SLOT_SECONDS = 30.0


class P2pdProcess(ToldProcess):
    def __init__(self, host: Host, folder: Path, relays: Sequence[str]) -> None:
        name = f"{host.name}-p2pd"
        words = [str(folder / name), *relays]
        super().__init__(host, "benchmarks.net.p2pd_program", words, folder / f"{name}.out")

    @property
    def peer(self) -> str:
        return str(self.greeting["peer"])

    def relayed_addresses(self) -> list[str]:
        """Wait until p2pd has a reservation at its relay; return its relayed addresses."""
        deadline = time.monotonic() + SLOT_SECONDS
        while time.monotonic() < deadline:
            addresses: list[str] = self.ask("tell")["addresses"]
            relayed = [address for address in addresses if "/p2p-circuit" in address]
            if relayed:
                return relayed
            time.sleep(0.1)
        raise SwarmError(
            f"p2pd on {self.host.name} has no reservation at the relay; see {self.log}"
        )
