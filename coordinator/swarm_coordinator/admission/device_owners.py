"""The owners of member devices, as bound by the members' hellos and stored in the database.

Owns which bindings the coordinator accepts. The connection proves the device and the signature the
owner, so both have agreed; an owner must not itself be bound to another owner (decision 0019). Only
the leaderboard and the ledger depend on bindings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.credentials import open_owner_binding
from swarm_shared.identity.signing import decode_envelope

MAX_DEVICES = 100_000
"""Devices whose bindings are kept; those whose hello is the oldest are forgotten first. In mode
`open` one machine makes any number, and a device shows its binding with each hello."""


class DeviceOwners:
    """The bindings in effect. A member's latest hello decides, as for its name."""

    def __init__(self, bound: Mapping[PeerId, PeerId] | None = None) -> None:
        self._bound = dict(bound or {})
        self._devices = Counter(self._bound.values())

    def of(self, peer: PeerId) -> PeerId | None:
        return self._bound.get(peer)

    def enter(self, device: PeerId, owner: PeerId | None) -> None:
        """Bind a device to an owner, or unbind it.

        ProtocolError, without a change, if a chain of owners would result.
        """
        if owner is not None and owner in self._bound:
            raise ProtocolError(
                f"{device} names {owner} as its owner, which is itself bound to "
                f"{self._bound[owner]}; bind every device to one key that is bound to none"
            )
        if owner is not None and self._devices[device]:
            raise ProtocolError(
                f"{device} names an owner and is the owner of other devices; "
                f"bind every device to one key that is bound to none"
            )
        self._unbind(device)
        if owner is not None:
            self._bound[device] = owner
            self._devices[owner] += 1
            if len(self._bound) > MAX_DEVICES:
                self._unbind(next(iter(self._bound)))

    def _unbind(self, device: PeerId) -> None:
        before = self._bound.pop(device, None)
        if before is not None:
            self._devices[before] -= 1
            if not self._devices[before]:
                del self._devices[before]


def named_owner(device: PeerId, binding: str | None) -> PeerId | None:
    """The owner named by a hello's binding; ProtocolError if it is invalid for the device."""
    if binding is None:
        return None
    return open_owner_binding(decode_envelope(binding, "an owner binding"), device).owner
