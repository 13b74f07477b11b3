"""Options of the averaging worker, and its files: port and socket folder."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarm_client.averaging.protocol.messages import ConfigureAveraging
from swarm_client.machine.home import read_port, write_port
from swarm_shared.base.errors import StorageError
from swarm_shared.host.ports import lasting_port

logger = logging.getLogger(__name__)

_MAX_FOLDER_CHARACTERS = 70
"""Longest path of the socket folder. The path of a unix socket has at most 107 bytes on Linux;
hivemind's names take 34 of them."""


@dataclass(frozen=True, slots=True)
class AveragingOptions:
    """Where the averaging worker keeps its files, and how its p2pd is reached."""

    home: Path
    """The volunteer's folder: key, port, sockets and log go into `home/averaging`."""
    host_addresses: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    """Listen addresses of p2pd. Port 0 stands for the persistent port of this home."""
    trusted_relays: tuple[str, ...] = ()
    """Full addresses (…/p2p/ID) of relays to hold a slot at, for peers that cannot be dialled."""
    memory_bytes: int | None = None
    """Memory that the worker may take beyond its start; None for no limit of the system's."""

    @property
    def folder(self) -> Path:
        return self.home / "averaging"

    def configuration(self, port: int, sockets: Path) -> ConfigureAveraging:
        """The first message to a worker whose p2pd listens on `port`."""
        return ConfigureAveraging(
            identity_path=str(self.folder / "p2pd.key"),
            socket_folder=str(sockets),
            host_addresses=tuple(
                f"{address.removesuffix('0')}{port}" if address.endswith("/tcp/0") else address
                for address in self.host_addresses
            ),
            trusted_relays=self.trusted_relays,
        )


@contextlib.contextmanager
def socket_folder(home: Path) -> Iterator[Path]:
    """A private folder for the sockets of p2pd and the bridge, whose paths must be short."""
    folder = home.absolute() / "s"
    if len(str(folder)) <= _MAX_FOLDER_CHARACTERS and re.fullmatch(
        r"[A-Za-z0-9_./-]+", str(folder)
    ):
        # A killed daemon may have left sockets in it.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    else:
        folder = Path(tempfile.mkdtemp(prefix="swarm-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def persistent_port(path: Path) -> int:
    """The port of p2pd, kept in the file at `path`; a new one if that is missing or taken.

    The port is fixed per home, so that addresses known to other peers and a router's mapping
    survive a restart.
    """
    stored = read_port(path)
    if stored is not None and _is_free(stored):
        return stored
    port = lasting_port("0.0.0.0")
    if stored is not None:
        logger.info("port %s is taken by another program; p2pd listens on %s", stored, port)
    try:
        write_port(path, port)
    except StorageError as error:
        logger.warning("the port of p2pd cannot be stored: %s", error)
    return port


def _is_free(port: int) -> bool:
    """Whether the port is free. p2pd (SO_REUSEPORT) would silently share one that another program
    uses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Ended connections may linger on the port; they do no harm.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
