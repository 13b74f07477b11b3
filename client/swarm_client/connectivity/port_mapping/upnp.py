"""UPnP Internet Gateway Device: found by SSDP here, called through miniupnpc.

The search is implemented here because miniupnpc accepts the first host that answers. An answer
counts when it comes from the default gateway and points to the default gateway; miniupnpc then
reads that router's description and calls its functions. It blocks, so it runs in a thread with a
timeout (`UpnpDevice.call`); py-libp2p depends on it.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
import trio

from swarm_client.connectivity.port_mapping.gateway import Gateway
from swarm_shared.base.errors import LinkTimeout, NetworkError

try:
    import miniupnpc
except ImportError:  # no wheel for this machine: NAT-PMP only
    miniupnpc = None

logger = logging.getLogger(__name__)

AVAILABLE: Final = miniupnpc is not None
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

NO_LEASES: Final = "OnlyPermanentLeasesSupported"
CONFLICT: Final = "ConflictInMappingEntry"

T = TypeVar("T")


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
    host = re.escape(str(gateway))
    return re.fullmatch(rf"http://{host}(:[0-9]{{1,5}})?(/[!-~]*)?", url) is not None


async def find(gateway: Gateway) -> UpnpDevice:
    """The gateway's UPnP device. NetworkError when it has none, LinkTimeout without an answer."""
    if not AVAILABLE:
        raise NetworkError("UPnP is not available: miniupnpc is not installed")
    url = await _search(gateway)
    device = UpnpDevice(gateway.address, url)
    await device.open()
    return device


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


class UpnpDevice:
    """The router, through miniupnpc. One call at a time."""

    def __init__(self, gateway: ipaddress.IPv4Address, url: str) -> None:
        self._gateway = gateway
        self._url = url
        self._upnp: Any = None
        # A limiter of its own: threads blocked by a silent router must not use up the daemon's.
        self._threads = anyio.CapacityLimiter(2)

    async def open(self) -> None:
        """Read the router's description."""
        self._upnp = miniupnpc.UPnP()
        control_url = await self.call(lambda upnp: upnp.selectigd(self._url))
        if not isinstance(control_url, str) or not is_at(control_url, self._gateway):
            self._upnp = None
            raise NetworkError("the router's description points to another host")

    async def external_address(self) -> str:
        """As the router reports it, unchecked."""
        return str(await self.call(lambda upnp: upnp.externalipaddress()))

    async def map(self, external_port: int, port: int, lifetime_seconds: int) -> None:
        """Forward `external_port` to this machine. RouterError when the router refuses."""
        await self.call(
            lambda upnp: upnp.addportmapping(
                external_port, "TCP", upnp.lanaddr, port, DESCRIPTION, "", lifetime_seconds
            )
        )

    async def unmap(self, external_port: int) -> None:
        await self.call(lambda upnp: upnp.deleteportmapping(external_port, "TCP", ""))

    async def call(self, function: Callable[[Any], T]) -> T:
        if self._upnp is None:
            await self.open()
        upnp = self._upnp

        def in_thread() -> T:
            try:
                return function(upnp)
            except Exception as error:  # miniupnpc raises nothing narrower
                raise RouterError(str(error)[:100] or "no reason given") from error

        # Unset during the call: a call that times out continues in its thread with this object.
        self._upnp = None
        with trio.move_on_after(CALL_SECONDS):
            try:
                result = await anyio.to_thread.run_sync(
                    in_thread, abandon_on_cancel=True, limiter=self._threads
                )
            except RouterError:
                self._upnp = upnp
                raise
            self._upnp = upnp
            return result
        raise LinkTimeout(f"the router took more than {CALL_SECONDS:g} s for an answer by UPnP")
