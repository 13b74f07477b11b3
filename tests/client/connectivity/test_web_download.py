"""Downloads from addresses that an organiser chose, against one that means harm.

A server on this machine stands for what a volunteer must not be sent to: it counts connections. A
second one, with a certificate, stands for a web server on the internet: the resolver and the
connector, which are parameters, lead a public address to it.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpcore
import pytest

from kits.certificate import write_certificate
from kits.range_server import RangeServer, range_server
from swarm_client.connectivity import web_download
from swarm_client.connectivity.web_download import WebClient, WebRefused, is_public

CONTENT = bytes(range(256)) * 40
PUBLIC = "93.184.215.14"
HOST = "data.example.org"


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[RangeServer]:
    """A server with one file, whatever the path."""
    with range_server(lambda _, start, count: CONTENT[start : start + count], tls) as server:
        yield server


@pytest.fixture
def inside() -> Iterator[RangeServer]:
    """What a home network has behind its router."""
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server of HOST and of a client that trusts it."""
    pem, secret = write_certificate(tmp_path_factory.mktemp("tls"), HOST)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem, secret)
    return server, ssl.create_default_context(cafile=str(pem))


@dataclass
class Internet(httpcore.NetworkBackend):
    """A public web server, and the way to it."""

    server: RangeServer
    tls: ssl.SSLContext
    answers: list[list[str]] = field(default_factory=list)
    """What the name server answers, one after another; PUBLIC at the end of the list."""
    asked: list[str] = field(default_factory=list)
    dialled: list[str] = field(default_factory=list)

    def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host != HOST:
            return [host]
        return self.answers.pop(0) if self.answers else [PUBLIC]

    def connect_tcp(self, host: str, port: int, *rest: Any) -> httpcore.NetworkStream:
        self.dialled.append(host)
        at = ("127.0.0.1", self.server.port) if host == PUBLIC else (host, port)
        return httpcore.SyncBackend().connect_tcp(*at, *rest)

    @property
    def client(self) -> WebClient:
        return WebClient(resolve=self.resolve, network=self, tls=self.tls)


@pytest.fixture
def internet(certificates: tuple[ssl.SSLContext, ssl.SSLContext]) -> Iterator[Internet]:
    with serving(certificates[0]) as server:
        yield Internet(server, certificates[1])


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:{port}/", "https://127.0.0.1:{port}/", "https://localhost:{port}/",
        "https://[::ffff:127.0.0.1]:{port}/", "https://2130706433:{port}/", "https://0:{port}/",
        "https://user@127.0.0.1:{port}/", "ftp://127.0.0.1:{port}/", "file:///etc/passwd",
        "//127.0.0.1:{port}/", "https:///",
    ],
)  # fmt: skip
def test_no_connection_is_made_into_the_volunteer_s_own_network(inside: RangeServer, address: str):
    with pytest.raises((WebRefused, OSError)):
        WebClient().read_range(address.format(port=inside.port), 0, len(CONTENT))
    assert inside.connections == 0


def test_a_range_of_a_public_server_arrives(internet: Internet):
    internet.server.redirects = {"/old": f"https://{HOST}/deep/a?b=c"}
    found = internet.client.read_range(f"https://{HOST}/old", 300, 500)
    assert found == CONTENT[300:800]
    assert internet.server.requests == ["/old", "/deep/a?b=c"]
    assert internet.dialled == [PUBLIC], "the redirect led back, and the connection was kept"


def test_connections_are_kept_for_the_next_range_and_opened_again_when_closed(
    internet: Internet,
):
    connections = internet.client
    url = f"https://{HOST}/a"
    assert [connections.read_range(url, start, 10) for start in (0, 10, 20)] == [
        CONTENT[start : start + 10] for start in (0, 10, 20)
    ]
    assert internet.server.connections == 1
    for kept in connections._pool.connections:
        stream = kept._connection._network_stream  # type: ignore[attr-defined]
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # as a server does after a while
    assert connections.read_range(url, 30, 10) == CONTENT[30:40]
    assert internet.dialled == [PUBLIC, PUBLIC]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_redirect_does_not_lead_into_the_volunteer_s_network(
    internet: Internet, inside: RangeServer, scheme: str
):
    internet.server.redirects = {"/a": f"{scheme}://127.0.0.1:{inside.port}/latest/meta-data/"}
    with pytest.raises(WebRefused):
        internet.client.read_range(f"https://{HOST}/a", 0, len(CONTENT))
    assert internet.server.requests == ["/a"]
    assert inside.connections == 0


def test_a_name_that_turns_private_between_two_answers_leads_nowhere(
    internet: Internet, inside: RangeServer
):
    """Rebinding: the first answer is checked, so the connection must not ask for a second one."""
    internet.answers = [[PUBLIC], ["127.0.0.1"]]
    internet.server.redirects = {"/a": f"https://{HOST}:{inside.port}/b"}
    with pytest.raises(WebRefused, match="not a public address"):
        internet.client.read_range(f"https://{HOST}/a", 0, len(CONTENT))
    assert internet.asked == [HOST, HOST], "once for each hop"
    assert internet.dialled == [PUBLIC]
    assert inside.connections == 0


def test_one_private_address_among_public_ones_is_enough_to_refuse(internet: Internet):
    internet.answers = [[PUBLIC, "192.168.1.1"]]
    with pytest.raises(WebRefused, match="not a public address"):
        internet.client.read_range(f"https://{HOST}/a", 0, len(CONTENT))
    assert internet.dialled == []


def test_endless_redirects_end(internet: Internet):
    internet.server.redirects = {"/a": "/a"}
    with pytest.raises(WebRefused, match="more than 5 redirects"):
        internet.client.read_range(f"https://{HOST}/a", 0, len(CONTENT))
    assert len(internet.server.requests) == 6


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"ranges": False}, "does not answer Range requests"),
        ({"status": 404}, "the server answers 404"),
        ({"status": 200}, "does not answer Range requests"),
        ({"status": 206}, "sends another range"),
        ({"shift": 1}, "sends another range: 'bytes 101-150/"),
    ],
    ids=str,
)
def test_what_is_not_the_range_is_refused(internet: Internet, trouble: dict[str, Any], reason: str):
    for name, value in trouble.items():
        setattr(internet.server, name, value)
    with pytest.raises(WebRefused, match=reason):
        internet.client.read_range(f"https://{HOST}/a", 100, 50)


def test_a_file_that_ends_within_the_range_is_refused(internet: Internet):
    start = len(CONTENT) - 10
    with pytest.raises(WebRefused, match="the range has 10 bytes instead of 11"):
        internet.client.read_range(f"https://{HOST}/a", start, 11)


def test_a_server_without_the_certificate_of_its_name_is_refused(internet: Internet):
    client = WebClient(resolve=internet.resolve, network=internet)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        client.read_range(f"https://{HOST}/a", 0, len(CONTENT))
    assert internet.server.requests == []


@contextmanager
def sending(first: bytes, again: bytes, pause_seconds: float) -> Iterator[str]:
    """The address of a server that answers `first`, and then `again` until the client has gone."""
    gone = threading.Event()

    def serve() -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            connection.recv(2**16)
            connection.sendall(first)
            while not gone.wait(pause_seconds):
                connection.sendall(again)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/a"
        gone.set()
        thread.join()


PARTIAL = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9999/10000\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "again"),
    [(PARTIAL + b"Content-Length: 10000\r\n\r\n", b"x"), (PARTIAL, b"y"), (b"", HINTS)],
    ids=["body", "header", "interim answers"],
)
def test_a_server_that_sends_a_little_now_and_then_has_a_limit_of_time(
    monkeypatch: pytest.MonkeyPatch, first: bytes, again: bytes
):
    monkeypatch.setattr(web_download, "RANGE_SECONDS", 0.3)
    client = WebClient(allow_private=True)
    with (
        sending(first, again, pause_seconds=0.05) as url,
        pytest.raises(OSError, match=r"took more than 0\.3 s|timed out"),
    ):
        client.read_range(url, 0, 10_000)


def test_a_server_that_sends_interim_answers_without_end_has_a_limit_of_bytes():
    with (
        sending(b"", 2000 * HINTS, pause_seconds=0) as url,
        pytest.raises(WebRefused, match="far more than the range"),
    ):
        WebClient(allow_private=True).read_range(url, 0, 10_000)


def test_a_volunteer_can_allow_its_own_network(inside: RangeServer):
    client = WebClient(allow_private=True)
    found = client.read_range(f"{inside.url}/a", 0, len(CONTENT))
    assert found == CONTENT
    with pytest.raises(WebRefused, match="only https and http"):
        client.read_range("file:///etc/passwd", 0, len(CONTENT))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("64:ff9b::808:808", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.0.1", False),
        ("100.64.0.1", False), ("169.254.169.254", False), ("0.0.0.0", False), ("224.0.0.1", False),
        ("240.0.0.1", False), ("255.255.255.255", False), ("198.18.0.1", False), ("::", False),
        ("::1", False), ("fe80::1", False), ("fe80::1%eth0", False), ("fc00::1", False),
        ("fec0::1", False), ("ff02::1", False), ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False), ("2002:a00:1::", False), ("2001:0:a00:1::1", False),
        ("metadata", False),
    ],
)  # fmt: skip
def test_only_addresses_of_the_internet_are_public(address: str, public: bool):
    assert is_public(address) == public
