"""The binary form of addresses that p2pd reads.

hivemind's multiaddr library writes an Ed25519 peer ID inside an address as a CID, which p2pd does
not read ("length greater than remaining number of bytes in buffer"); addresses through a relay are
therefore encoded here.
"""

from __future__ import annotations

import base58

from swarm_client.averaging.worker.hivemind_imports import Hivemind

_CIRCUIT = "/p2p-circuit"
# Varints of the protocol codes 421 and 290 (multiformats' table of multiaddr protocols).
_P2P_CODE = b"\xa5\x03"
_CIRCUIT_CODE = b"\xa2\x02"
_MAX_ID_BYTES = 64


class AddressBytes:
    """An address for p2pd's client, which needs only `to_bytes`. ValueError if it is invalid."""

    def __init__(self, hivemind: Hivemind, address: str) -> None:
        way, circuit, rest = address.partition(_CIRCUIT)
        if rest:
            raise ValueError(f"{address!r} names a peer behind the relay's other end")
        transport, named, relay = way.partition("/p2p/")
        self._bytes: bytes = hivemind.Multiaddr(transport).to_bytes()
        if named:
            relay_id = base58.b58decode(relay)
            if not 0 < len(relay_id) <= _MAX_ID_BYTES:
                raise ValueError(f"{relay!r} is not a peer ID")
            self._bytes += _P2P_CODE + bytes([len(relay_id)]) + relay_id
        if circuit:
            self._bytes += _CIRCUIT_CODE

    def to_bytes(self) -> bytes:
        return self._bytes
