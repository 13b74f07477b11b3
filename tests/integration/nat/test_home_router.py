"""Port mapping against a real router: Debian's miniupnpd, asked by a machine of its LAN."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kits.network_lab import Host, Lab, Nat, why_no_port_mapping

pytestmark = [pytest.mark.lab, pytest.mark.nightly]

PORT = 4001
MAP = """
import json, sys, trio
from swarm_client.connectivity.port_mapping import PortMapper, nat_pmp, upnp

def show(mapper, seconds=0.0):
    print(json.dumps({"mapping": mapper.mapping and mapper.mapping.multiaddr,
        "protocol": mapper.mapping and mapper.mapping.protocol, "problem": mapper.problem,
        "seconds": seconds}), flush=True)

async def main(nat_pmp_port, keep):
    async with trio.open_nursery() as nursery:
        mapper = PortMapper(nat_pmp_port=nat_pmp_port)
        nursery.start_soon(mapper.run)
        begun = trio.current_time()
        await mapper.map(4001)
        show(mapper, trio.current_time() - begun)
        if keep:
            sys.stdin.read()
        nursery.cancel_scope.cancel()
    show(mapper)

trio.run(main, int(sys.argv[1]), sys.argv[2] == "keep")
"""
NAT_PMP = 5351
NO_NAT_PMP = 5352
"""A port at which the router does not answer, so that UPnP is what is left."""


@pytest.fixture
def home(lab: Lab, tmp_path: Path) -> tuple[Host, Host, str]:
    """A machine outside, one inside, and the router's outer address."""
    if (reason := why_no_port_mapping()) is not None:
        pytest.skip(reason)
    server = lab.public_host("server")
    router, host = lab.home("home", Nat.SYMMETRIC)
    router.offer_port_mapping(lab.children, tmp_path / "miniupnpd")
    return server, host, router.wan_ipv4


@pytest.mark.parametrize(("nat_pmp_port", "protocol"), [(NAT_PMP, "nat-pmp"), (NO_NAT_PMP, "upnp")])
def test_a_router_maps_a_port_for_us_and_takes_it_back(
    home: tuple[Host, Host, str], nat_pmp_port: int, protocol: str, tmp_path: Path
) -> None:
    server, host, wan = home
    with host.namespace.entered():
        listener = socket.create_server(("0.0.0.0", PORT))
    listener.settimeout(5)
    words = [sys.executable, "-c", MAP, str(nat_pmp_port), "keep"]
    with listener, subprocess.Popen(
        [*host.prefix, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as mapper:  # fmt: skip
        assert mapper.stdout is not None
        assert mapper.stdin is not None
        state = json.loads(mapper.stdout.readline())
        assert state["mapping"] == f"/ip4/{wan}/tcp/{PORT}", state["problem"]
        assert state["protocol"] == protocol
        with server.namespace.entered(), socket.create_connection((wan, PORT), 3):
            _, address = listener.accept()
        assert address[0] == server.ipv4
        mapper.stdin.close()
        assert json.loads(mapper.stdout.readline())["mapping"] is None
        with server.namespace.entered(), pytest.raises(TimeoutError):
            socket.create_connection((wan, PORT), 1)


def map_once(host: Host) -> dict[str, object]:
    """The mapper's state after it has tried."""
    lines = host.run([sys.executable, "-c", MAP, str(NAT_PMP), "end"]).splitlines()
    state: dict[str, object] = json.loads(lines[0])
    return state


def test_a_router_without_either_protocol_is_given_up_soon(lab: Lab) -> None:
    _, host = lab.home("home", Nat.PORT_PRESERVING)
    state = map_once(host)
    assert state["mapping"] is None
    assert "does not support NAT-PMP" in str(state["problem"])
    assert "does not answer UPnP" in str(state["problem"])
    assert float(str(state["seconds"])) < 3.0


def test_another_machine_of_the_lan_that_poses_as_router_is_not_asked(lab: Lab) -> None:
    router = lab.router("router", Nat.PORT_PRESERVING)
    host, liar = lab.lan_host("host", router), lab.lan_host("liar", router)
    gateway = router.lan.allocator(4).gateway
    with liar.namespace.entered():
        search = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        search.bind(("", 1900))
        group = struct.pack(
            "4s4s", socket.inet_aton("239.255.255.250"), socket.inet_aton(liar.ipv4)
        )
        search.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        pages = socket.create_server(("0.0.0.0", 5000))
    heard: list[bytes] = []

    def lie() -> None:
        while True:
            request, sender = search.recvfrom(4096)
            if request == b"stop":
                return
            heard.append(request)
            # Its own description, then one of the real router: neither comes from the router.
            for at in (liar.ipv4, gateway):
                location = f"http://{at}:5000/rootDesc.xml"
                search.sendto(f"HTTP/1.1 200 OK\r\nLOCATION: {location}\r\n\r\n".encode(), sender)

    thread = threading.Thread(target=lie)
    thread.start()
    with search, pages:
        try:
            state = map_once(host)
        finally:
            with host.namespace.entered(), socket.socket(type=socket.SOCK_DGRAM) as ending:
                ending.sendto(b"stop", (liar.ipv4, 1900))
            thread.join()
        assert state["mapping"] is None
        assert any(b"InternetGatewayDevice" in request for request in heard)
        pages.setblocking(False)
        with pytest.raises(BlockingIOError):
            pages.accept()
