"""Where the averaging worker lives, and how its p2pd is reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm_client.averaging.protocol.messages import ConfigureAveraging


@dataclass(frozen=True, slots=True)
class AveragingOptions:
    home: Path
    """The volunteer's folder: key, port, sockets and log go into `home/averaging`."""
    host_addresses: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    """Port 0 stands for the one that this home remembers."""
    announce_addresses: tuple[str, ...] = ()
    map_port_on_router: bool = False
    trusted_relays: tuple[str, ...] = ()
    """Full addresses (…/p2p/ID) of relays to hold a slot at: for peers that cannot be dialled."""

    @property
    def folder(self) -> Path:
        return self.home / "averaging"

    def configuration(self, port: int, sockets: Path) -> ConfigureAveraging:
        """For a worker whose p2pd listens on `port`."""
        return ConfigureAveraging(
            identity_path=str(self.folder / "p2pd.key"),
            socket_folder=str(sockets),
            host_addresses=tuple(
                f"{address.removesuffix('0')}{port}" if address.endswith("/tcp/0") else address
                for address in self.host_addresses
            ),
            announce_addresses=self.announce_addresses,
            map_port_on_router=self.map_port_on_router,
            trusted_relays=self.trusted_relays,
        )
