"""Downloads from addresses that an organiser chose, against one that means harm.

A server on this machine stands for what a volunteer must not be sent to: it counts connections. A
second one, with a certificate, stands for a web server on the internet: the resolver and the
connector, which are parameters, lead a public address to it.
"""

from __future__ import annotations

import datetime
import http.server
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarm_client.connectivity.web_download import WebClient, WebRefused, is_public

CONTENT = bytes(range(256)) * 40
PUBLIC = "93.184.215.14"
HOST = "data.example.org"


@dataclass
class Server:
    """A web server on this machine, and what has arrived at it."""

    port: int
    connections: int = 0
    requests: list[str] = field(default_factory=list)
    redirects: dict[str, str] = field(default_factory=dict)
    content: bytes = CONTENT


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_GET(self) -> None:
            server.requests.append(self.path)
            location = server.redirects.get(self.path)
            self.send_response(200 if location is None else 302)
            if location is not None:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(server.content if location is None else b"")

    class Listener(http.server.ThreadingHTTPServer):
        def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
            connected, remote = self.socket.accept()
            server.connections += 1
            if tls is not None:
                connected = tls.wrap_socket(connected, server_side=True)
            return connected, remote

    with Listener(("127.0.0.1", 0), Handler) as listener:
        server = Server(listener.server_address[1])
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()


@pytest.fixture
def inside() -> Iterator[Server]:
    """What a home network has behind its router."""
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server of HOST and of a client that trusts it."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, secret = folder / "server.pem", folder / "server.key"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem, secret)
    return server, ssl.create_default_context(cafile=str(pem))


@dataclass
class Internet:
    """A public web server, and the way to it."""

    server: Server
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

    def connect(self, ip: str, port: int) -> socket.socket:
        self.dialled.append(ip)
        at = ("127.0.0.1", self.server.port) if ip == PUBLIC else (ip, port)
        return socket.create_connection(at, timeout=10)

    @property
    def client(self) -> WebClient:
        return WebClient(resolve=self.resolve, connect=self.connect, tls=self.tls)


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
def test_no_connection_is_made_into_the_volunteer_s_own_network(
    inside: Server, tmp_path: Path, address: str
):
    with pytest.raises((WebRefused, OSError)):
        WebClient().download(address.format(port=inside.port), tmp_path / "a", len(CONTENT))
    assert inside.connections == 0
    assert not (tmp_path / "a").exists()


def test_a_file_of_a_public_server_arrives(internet: Internet, tmp_path: Path):
    internet.server.redirects = {"/old": f"https://{HOST}/deep/a?b=c"}
    internet.client.download(f"https://{HOST}/old", tmp_path / "a", len(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert internet.server.requests == ["/old", "/deep/a?b=c"]
    assert internet.dialled == [PUBLIC, PUBLIC]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_redirect_does_not_lead_into_the_volunteer_s_network(
    internet: Internet, inside: Server, tmp_path: Path, scheme: str
):
    internet.server.redirects = {"/a": f"{scheme}://127.0.0.1:{inside.port}/latest/meta-data/"}
    with pytest.raises(WebRefused):
        internet.client.download(f"https://{HOST}/a", tmp_path / "a", len(CONTENT))
    assert internet.server.requests == ["/a"]
    assert inside.connections == 0


def test_a_name_that_turns_private_between_two_answers_leads_nowhere(
    internet: Internet, inside: Server, tmp_path: Path
):
    """Rebinding: the first answer is checked, so the connection must not ask for a second one."""
    internet.answers = [[PUBLIC], ["127.0.0.1"]]
    internet.server.redirects = {"/a": f"https://{HOST}:{inside.port}/b"}
    with pytest.raises(WebRefused, match="not a public address"):
        internet.client.download(f"https://{HOST}/a", tmp_path / "a", len(CONTENT))
    assert internet.asked == [HOST, HOST], "once for each hop"
    assert internet.dialled == [PUBLIC]
    assert inside.connections == 0


def test_one_private_address_among_public_ones_is_enough_to_refuse(
    internet: Internet, tmp_path: Path
):
    internet.answers = [[PUBLIC, "192.168.1.1"]]
    with pytest.raises(WebRefused, match="not a public address"):
        internet.client.download(f"https://{HOST}/a", tmp_path / "a", len(CONTENT))
    assert internet.dialled == []


def test_endless_redirects_end(internet: Internet, tmp_path: Path):
    internet.server.redirects = {"/a": "/a"}
    with pytest.raises(WebRefused, match="more than 5 redirects"):
        internet.client.download(f"https://{HOST}/a", tmp_path / "a", len(CONTENT))
    assert len(internet.server.requests) == 6


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_file_of_another_size_is_refused(internet: Internet, tmp_path: Path, size: int):
    with pytest.raises(WebRefused, match="size differs"):
        internet.client.download(f"https://{HOST}/a", tmp_path / "a", size)


def test_a_server_without_the_certificate_of_its_name_is_refused(
    internet: Internet, tmp_path: Path
):
    client = WebClient(resolve=internet.resolve, connect=internet.connect)
    with pytest.raises(ssl.SSLCertVerificationError):
        client.download(f"https://{HOST}/a", tmp_path / "a", len(CONTENT))
    assert internet.server.requests == []


def test_a_volunteer_can_allow_its_own_network(inside: Server, tmp_path: Path):
    client = WebClient(allow_private=True)
    client.download(f"http://127.0.0.1:{inside.port}/a", tmp_path / "a", len(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT
    with pytest.raises(WebRefused, match="only https and http"):
        client.download("file:///etc/passwd", tmp_path / "a", len(CONTENT))


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


def test_the_public_address_of_these_tests_is_one():
    assert ipaddress.ip_address(PUBLIC).is_global
