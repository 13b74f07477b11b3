"""NAT-PMP (RFC 6886): two requests of a few bytes over UDP.

`external_address_request`, `map_request` and `parse_answer` do no I/O. `ask` sends a request and
waits for its answer.
"""

from __future__ import annotations

import ipaddress
import struct
from enum import IntEnum
from typing import Final

import trio

from swarm_shared.base.errors import FrameError, LinkTimeout, NetworkError

PORT = 5351
_VERSION = 0
_ANSWER_BIT = 128
_HEAD = struct.Struct(">BBHI")

RETRY_SECONDS = (0.25, 0.5, 1.0, 0.75)
"""Wait of each attempt (RFC 6886, 3.1: doubling from 250 ms), cut off at 2.5 s in total: a router
on the same network answers within milliseconds, or never."""


class Operation(IntEnum):
    EXTERNAL_ADDRESS = 0
    MAP_TCP = 2


_ANSWER_BYTES = {Operation.EXTERNAL_ADDRESS: 12, Operation.MAP_TCP: 16}

_REFUSALS = {
    1: "it uses another version of the protocol",
    2: "it is configured not to open ports",
    3: "it has no connection to the internet itself",
    4: "it has no port left to open",
    5: "it does not know the request",
}


class RefusedError(NetworkError):
    """The router refused the request."""


def external_address_request() -> bytes:
    return struct.pack(">BB", _VERSION, Operation.EXTERNAL_ADDRESS)


def map_request(internal_port: int, external_port: int, lifetime_seconds: int) -> bytes:
    """A request for a TCP mapping; `external_port` is a suggestion. A lifetime of 0 removes it."""
    return struct.pack(
        ">BBHHHI",
        _VERSION, Operation.MAP_TCP, 0, internal_port, external_port, lifetime_seconds,
    )  # fmt: skip


def parse_answer(datagram: bytes, operation: Operation) -> bytes:
    """The fields of the answer to `operation`, behind its head.

    RefusedError for a refusal, FrameError for an invalid answer.
    """
    if len(datagram) < _HEAD.size:
        raise FrameError(f"the router answered with {len(datagram)} bytes, too few for NAT-PMP")
    version, answered, result, _ = _HEAD.unpack_from(datagram)
    if version != _VERSION or answered != operation | _ANSWER_BIT:
        raise FrameError(
            f"the router answered with version {version}, operation {answered} to {operation}"
        )
    if result:
        raise RefusedError(
            f"the router refuses: {_REFUSALS.get(result, f'NAT-PMP result code {result}')}"
        )
    if len(datagram) != _ANSWER_BYTES[operation]:
        raise FrameError(f"the router answered {operation.name} with {len(datagram)} bytes")
    return datagram[_HEAD.size :]


async def ask(gateway: ipaddress.IPv4Address, request: bytes, port: int = PORT) -> bytes:
    """Send `request` until it is answered, and return the fields of the answer.

    LinkTimeout without an answer, RefusedError when the router refuses, NetworkError when the
    gateway has no NAT-PMP. Datagrams that do not answer the request are skipped: any host may send
    them.
    """
    operation = Operation(request[1])
    nonsense = ""
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
        try:
            # Connected: the kernel drops datagrams from other hosts and reports a closed port.
            await udp.connect((str(gateway), port))
            for seconds in RETRY_SECONDS:
                await udp.send(request)
                with trio.move_on_after(seconds):
                    while True:
                        datagram = await udp.recv(1100)  # RFC 6886, 1.1: never longer
                        try:
                            fields = parse_answer(datagram, operation)
                        except FrameError as error:
                            nonsense = f"; {error}"
                            continue
                        # Not a late answer to another request.
                        if operation is not Operation.MAP_TCP or fields[:2] == request[4:6]:
                            return fields
                        nonsense = "; the router answered for another port"
        except OSError as error:
            raise NetworkError(f"the router does not support NAT-PMP ({error.strerror})") from error
    raise LinkTimeout(f"the router does not answer to NAT-PMP{nonsense}")


class NatPmpRouter:
    """A gateway that answers NAT-PMP."""

    protocol: Final = "nat-pmp"

    def __init__(self, gateway: ipaddress.IPv4Address, udp_port: int) -> None:
        self.external_address = ipaddress.IPv4Address(0)
        self._gateway = gateway
        self._udp_port = udp_port

    async def refresh(self) -> None:
        """Read the external address again."""
        fields = await ask(self._gateway, external_address_request(), self._udp_port)
        self.external_address = ipaddress.IPv4Address(fields)

    async def map(self, port: int, external_port: int, lifetime_seconds: int) -> tuple[int, int]:
        """Forward a port, `external_port` if that is free; returns it and the lifetime."""
        request = map_request(port, external_port, lifetime_seconds)
        fields = await ask(self._gateway, request, self._udp_port)
        _, given, seconds = struct.unpack(">HHI", fields)
        if not given or not seconds:
            raise NetworkError(f"the router claims to forward port {given} for {seconds} s")
        return given, seconds

    async def unmap(self, port: int, external_port: int) -> None:
        await ask(self._gateway, map_request(port, 0, 0), self._udp_port)
