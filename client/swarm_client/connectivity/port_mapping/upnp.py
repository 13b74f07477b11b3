"""UPnP Internet Gateway Device: found by SSDP here, called through miniupnpc.

The search is implemented here because miniupnpc accepts the first host that answers. An answer
counts when it comes from the default gateway and points to the default gateway; miniupnpc then
reads that router's description and calls its functions, each in a process of its own (`upnp_call`);
py-libp2p depends on it.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import random
import subprocess
import sys
from typing import Final

import trio

from swarm_client.connectivity.port_mapping import upnp_call
from swarm_client.connectivity.port_mapping.gateway import Gateway
from swarm_shared.base.errors import LinkTimeout, NetworkError

logger = logging.getLogger(__name__)

DESCRIPTION: Final = "swarmtrain"
"""Shown beside the mapping on the router's own pages."""

SEARCH_SECONDS = 2.5
_SEARCH_AGAIN_SECONDS = 0.8
_MAX_DATAGRAM_BYTES = 4096
_GROUP = ("239.255.255.250", 1900)
_TARGETS = (
    "urn:schemas-upnp-org:device:InternetGatewayDevice:1",
    "urn:schemas-upnp-org:device:InternetGatewayDevice:2",
)
CALL_SECONDS = 5.0
"""Timeout of a call. Home routers are slow; miniupnpc itself waits three seconds for each
answer."""

_PORTS_TRIED = 3
_OWN_PORTS = range(49_152, 65_536)
"""For private use (RFC 6335)."""

NO_LEASES: Final = "OnlyPermanentLeasesSupported"
CONFLICT: Final = "ConflictInMappingEntry"


class RouterError(NetworkError):
    """The router answered with an error; `code` is miniupnpc's name for it."""

    def __init__(self, code: str) -> None:
        super().__init__(f"the router refuses by UPnP: {code}")
        self.code = code


def search_request(target: str) -> bytes:
    lines = (
        "M-SEARCH * HTTP/1.1",
        f"HOST: {_GROUP[0]}:{_GROUP[1]}",
        'MAN: "ssdp:discover"',
        "MX: 1",
        f"ST: {target}",
        "",
        "",
    )
    return "\r\n".join(lines).encode("ascii")


def description_url(datagram: bytes, gateway: ipaddress.IPv4Address) -> str | None:
    """The URL of the router's description in the answer; None when it is not at the gateway."""
    lines = datagram[:_MAX_DATAGRAM_BYTES].decode("latin-1").splitlines()
    if not lines or not lines[0].startswith("HTTP/1.1 200"):
        return None
    for line in lines[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "location":
            url = value.strip()
            return url if is_at(url, gateway) else None
    return None


def is_at(url: str, gateway: ipaddress.IPv4Address) -> bool:
    """Whether `url` is plain HTTP to the gateway's own address, under any reading."""
    return upnp_call.is_at(url, str(gateway))


async def _search(gateway: Gateway) -> str:
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
        try:
            # Send from the interface towards the gateway, not from a virtual machine's network.
            await udp.bind((str(gateway.own_address), 0))
            udp.setsockopt(
                trio.socket.IPPROTO_IP, trio.socket.IP_MULTICAST_IF, gateway.own_address.packed
            )
            udp.setsockopt(trio.socket.IPPROTO_IP, trio.socket.IP_MULTICAST_TTL, 2)
            with trio.move_on_after(SEARCH_SECONDS):
                while True:
                    for target in _TARGETS:
                        await udp.sendto(search_request(target), _GROUP)
                    with trio.move_on_after(_SEARCH_AGAIN_SECONDS):
                        return await _first_answer(udp, gateway)
        except OSError as error:
            raise NetworkError(f"the search for the router failed ({error.strerror})") from error
    raise LinkTimeout("the router does not answer UPnP requests")


async def _first_answer(udp: trio.socket.SocketType, gateway: Gateway) -> str:
    while True:
        datagram, sender = await udp.recvfrom(_MAX_DATAGRAM_BYTES)
        url = description_url(datagram, gateway.address)
        if url is not None and sender[0] == str(gateway.address):
            return url
        logger.info("ignored an answer to the router search from %s", sender[0])


class UpnpRouter:
    """The router, through miniupnpc."""

    protocol: Final = "upnp"

    def __init__(self, gateway: Gateway, url: str = "") -> None:
        """`url`: where the router's description is; searched if empty."""
        self.external_address = ipaddress.IPv4Address(0)
        self._gateway = gateway
        self._url = url

    async def refresh(self) -> None:
        """Read the external address. NetworkError when there is no such router, LinkTimeout without
        an answer."""
        if not self._url:
            self._url = await _search(self._gateway)
        text = await self._call("externalipaddress")
        try:
            self.external_address = ipaddress.IPv4Address(text)
        except ValueError as error:
            raise NetworkError(
                f"the router does not know its external address ({text!r})"
            ) from error

    async def map(self, port: int, external_port: int, lifetime_seconds: int) -> tuple[int, int]:
        """Forward `external_port`, or another one that is free; returns it and the lifetime."""
        for attempt in range(_PORTS_TRIED):
            if attempt:
                external_port = random.choice(_OWN_PORTS)
            try:
                await self._map(port, external_port, lifetime_seconds)
            except RouterError as error:
                if error.code != CONFLICT:
                    raise
                continue
            return external_port, lifetime_seconds
        raise NetworkError(f"all {_PORTS_TRIED} ports tried are in use at the router")

    async def _map(self, port: int, external_port: int, lifetime_seconds: int) -> None:
        try:
            await self._call("addportmapping", external_port, port, DESCRIPTION, lifetime_seconds)
        except RouterError as error:
            if error.code != NO_LEASES or not lifetime_seconds:
                raise
            # A permanent mapping survives a killed client; its next start asks for the same port
            # again.
            await self._map(port, external_port, 0)

    async def unmap(self, port: int, external_port: int) -> None:
        await self._call("deleteportmapping", external_port)

    async def _call(self, function: str, *arguments: str | int) -> str:
        """Call a function of the router. RouterError when it refuses, LinkTimeout without an
        answer."""
        request = json.dumps([self._url, str(self._gateway.address), function, *arguments])
        with trio.move_on_after(CALL_SECONDS):
            try:
                done = await trio.run_process(
                    [sys.executable, "-I", upnp_call.__file__, request],
                    capture_stdout=True, stderr=subprocess.DEVNULL, check=False,
                )  # fmt: skip
                answer: dict[str, str] = json.loads(done.stdout)
            except (OSError, ValueError) as error:
                # Without an answer it has reached a limit of the system's, or could not start.
                raise RouterError("its answer could not be read") from error
            if "result" in answer:
                return answer["result"]
            raise RouterError(answer["error"])
        raise LinkTimeout(f"the router took more than {CALL_SECONDS:g} s for an answer by UPnP")
