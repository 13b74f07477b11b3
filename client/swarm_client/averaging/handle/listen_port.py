"""The port that p2pd listens on: one per home for good, so that what others know of it, and what
a router has learnt of it, survives a restart."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import StorageError

logger = logging.getLogger(__name__)


def persistent_port(path: Path) -> int:
    """The port in the file at `path`; another one, written there, when that one is taken."""
    known = _read(path)
    if known is not None and _is_free(known):
        return known
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    if known is not None:
        logger.info("port %s is taken by another program; p2pd listens on %s", known, port)
    try:
        write_atomically(path, f"{port}\n".encode())
    except StorageError as error:
        logger.warning("the port of p2pd cannot be remembered: %s", error)
    return port


def _read(path: Path) -> int | None:
    try:
        port = int(path.read_text())
    except (OSError, ValueError):
        return None
    return port if 0 < port < 65_536 else None


def _is_free(port: int) -> bool:
    """p2pd sets SO_REUSEPORT and would share the port with another one without a word."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Connections that have ended may linger on the port; they do no harm.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
