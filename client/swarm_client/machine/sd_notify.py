"""Status notifications to the service manager: systemd's protocol, sd_notify(3).

Owns the socket that NOTIFY_SOCKET names, and removes that variable from the environment: workers
are not the daemon and must not notify in its place. Outside a unit of `Type=notify` it does
nothing. A failing notification is no reason to stop.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import MutableMapping

VARIABLE = "NOTIFY_SOCKET"

MAX_STATUS_CHARACTERS = 500
"""A datagram is bounded, and `systemctl status` shows one line."""

log = logging.getLogger(__name__)


class Notifier:
    """Sends only, never waits. `address` None: there is no service manager."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Notifier:
        """Removes the variable, so that no child inherits it."""
        address = environment.pop(VARIABLE, "")
        # "@" stands for the zero byte of Linux's abstract addresses; other forms (vsock) are for
        # virtual machines.
        if address.startswith("@"):
            return cls("\0" + address[1:])
        return cls(address) if address.startswith("/") else cls()

    def ready(self) -> None:
        """Commands are answered from now on."""
        self._send("READY=1")

    def status(self, text: str) -> None:
        """One line for people, replacing the previous one."""
        self._send(f"STATUS={' '.join(text.split())[:MAX_STATUS_CHARACTERS]}")

    def stopping(self, within_seconds: float) -> None:
        """Shutting down in order, which may take this long: longer than the unit's own limit."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(within_seconds * 1e6)}")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_manager:
                to_manager.setblocking(False)
                to_manager.sendto(message.encode(), self._address)
        except OSError as error:
            log.warning("the service manager could not be notified of %r: %s", message, error)
