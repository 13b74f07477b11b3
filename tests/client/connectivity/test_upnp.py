"""UPnP against a small router of our own over HTTP: what it answers, and answers that never end."""

from __future__ import annotations

import ipaddress
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import pytest
import trio

from swarm_client.connectivity.port_mapping import Gateway, upnp
from swarm_shared.base.errors import NetworkError

LOOPBACK = ipaddress.IPv4Address("127.0.0.1")
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><serviceList><service>
<serviceType>{SERVICE}</serviceType><controlURL>CONTROL</controlURL><SCPDURL>/s</SCPDURL>
<eventSubURL>/e</eventSubURL></service></serviceList></device></deviceList></device></deviceList>
</device></root>"""


@dataclass
class HttpRouter:
    """Answers POST requests with `answers`, by what the request contains."""

    control: str = "/ctl"
    answers: dict[str, str] = field(default_factory=dict)
    endless: str = ""
    """What the body of an answer to this method never ends with."""
    asked: list[str] = field(default_factory=list)

    async def serve(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            request = b""
            while b"\r\n\r\n" not in request or (
                request.startswith(b"POST") and b"</s:Envelope>" not in request
            ):
                if not (part := await stream.receive_some(4096)):
                    return
                request += part
            text = request.decode()
            self.asked.append(text)
            if text.startswith(self.endless or "no method"):
                await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    await stream.send_all(b"<" + b"a" * 2**20)
            await stream.send_all(self._answer(text).encode())
        await stream.aclose()

    def _answer(self, text: str) -> str:
        status, body = 200, DESCRIPTION.replace("CONTROL", self.control)
        if text.startswith("POST"):
            found = next((a for name, a in self.answers.items() if name in text), None)
            status, body = (200, found or "") if found is not None else (500, "")
            if "errorCode" in body:
                status = 500
        return f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n{body}"


def soap(inner: str) -> str:
    return f'<s:Envelope xmlns:s="e"><s:Body>{inner}</s:Body></s:Envelope>'


@asynccontextmanager
async def asking(router: HttpRouter) -> AsyncIterator[upnp.UpnpRouter]:
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(
            partial(trio.serve_tcp, router.serve, 0, host=str(LOOPBACK))
        )
        port = listener.socket.getsockname()[1]
        yield upnp.UpnpRouter(Gateway(LOOPBACK, LOOPBACK), f"http://{LOOPBACK}:{port}/d.xml")
        nursery.cancel_scope.cancel()


async def test_a_port_is_forwarded_and_given_back() -> None:
    address = soap("<NewExternalIPAddress>192.175.48.7</NewExternalIPAddress>")
    done = soap("")
    answers = {"GetExternalIPAddress": address, "AddPort": done, "DeletePort": done}
    router = HttpRouter(answers=answers)
    async with asking(router) as asked:
        await asked.refresh()
        assert str(asked.external_address) == "192.175.48.7"
        assert await asked.map(4001, 4002, 7200) == (4002, 7200)
        (request,) = [text for text in router.asked if "AddPortMapping" in text]
        for part in ("4001", "4002", "7200", "swarmtrain", "127.0.0.1"):
            assert part in request
        await asked.unmap(4001, 4002)


async def test_a_port_that_is_taken_is_replaced_by_another_one() -> None:
    taken = soap("<UPnPError><errorCode>718</errorCode></UPnPError>")
    router = HttpRouter(answers={"AddPort": taken})
    async with asking(router) as asked:
        with pytest.raises(NetworkError, match="all 3 ports tried are in use"):
            await asked.map(4001, 4001, 7200)


async def test_a_description_that_points_to_another_host_is_not_followed() -> None:
    router = HttpRouter(control="http://192.0.2.1/ctl")
    async with asking(router) as asked:
        with pytest.raises(NetworkError, match="points to another host"):
            await asked.refresh()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_answer_without_end_takes_no_memory(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upnp, "CALL_SECONDS", 3.0)
    router = HttpRouter(endless=method)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with asking(router) as asked:
        with pytest.raises(NetworkError):
            await asked.refresh()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 64 * 1024
