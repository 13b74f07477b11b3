"""A router of the lab that maps ports on request: its daemon is asked in its own protocols."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from kits.network_lab import Host, Lab, Nat, why_no_port_mapping

pytestmark = [pytest.mark.lab, pytest.mark.nightly]

PATIENCE_SECONDS = 5.0
SSDP = ("239.255.255.250", 1900)


@pytest.fixture
def home(lab: Lab, tmp_path: Path) -> tuple[Host, Host, str, str]:
    """A machine outside, one inside, the router's outer and inner address."""
    if (reason := why_no_port_mapping()) is not None:
        pytest.skip(reason)
    server = lab.public_host("server")
    router, host = lab.home("home", Nat.SYMMETRIC)
    router.offer_port_mapping(lab.children, tmp_path / "miniupnpd")
    return server, host, router.wan_ipv4, router.lan.allocator(4).gateway


def ask(host: Host, address: tuple[str, int], request: bytes) -> bytes:
    with host.namespace.entered(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(PATIENCE_SECONDS)
        asking.sendto(request, address)
        return asking.recv(4096)


def test_a_port_mapped_by_nat_pmp_lets_strangers_in(home: tuple[Host, Host, str, str]) -> None:
    server, host, wan, gateway = home
    outer = ask(host, (gateway, 5351), struct.pack("!BB", 0, 0))
    assert socket.inet_ntoa(outer[8:12]) == wan

    with host.namespace.entered():
        listener = socket.create_server(("0.0.0.0", 4001))
    listener.settimeout(PATIENCE_SECONDS)
    request = struct.pack("!BBHHHI", 0, 2, 0, 4001, 4001, 600)
    answer = ask(host, (gateway, 5351), request)
    _, code, result, _, inner_port, outer_port, _ = struct.unpack("!BBHIHHI", answer[:16])
    assert (code, result, inner_port) == (130, 0, 4001)
    with listener, server.namespace.entered(), socket.create_connection((wan, outer_port), 3):
        _, address = listener.accept()
    assert address[0] == server.ipv4


def test_the_router_answers_a_search_for_a_gateway(home: tuple[Host, Host, str, str]) -> None:
    _, host, _, gateway = home
    search = (
        'M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: "ssdp:discover"\r\nMX: 1\r\n'
        "ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n\r\n"
    )
    answer = ask(host, SSDP, search.encode()).decode()
    assert answer.startswith("HTTP/1.1 200 OK")
    assert f"http://{gateway}:" in answer
