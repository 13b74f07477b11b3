"""The lab does what it claims: plain sockets meet the routers that a home has."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from kits.network_lab import Host, Lab, LabError, Nat, Router, own_namespaces, sweep
from kits.network_lab.namespace import FOLDER

pytestmark = [pytest.mark.lab, pytest.mark.nightly]

PORT = 4001
PATIENCE_SECONDS = 3.0
"""On a lab's cables an answer takes less than a millisecond."""
SILENCE_SECONDS = 0.5


def listen(host: Host, port: int = PORT, address: str = "0.0.0.0") -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with host.namespace.entered():
        listener = socket.create_server((address, port), family=family, reuse_port=True, backlog=16)
    listener.settimeout(PATIENCE_SECONDS)
    return listener


def dial(
    host: Host, address: str, port: int = PORT, from_port: int = 0,
    timeout_seconds: float = PATIENCE_SECONDS,
) -> socket.socket:  # fmt: skip
    """A connection out of `host`; OSError when there is none."""
    with host.namespace.entered():
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        connection.bind(("", from_port))
        connection.settimeout(timeout_seconds)
        connection.connect((address, port))
    except BaseException:
        connection.close()
        raise
    return connection


def carries(one: socket.socket, other: socket.socket, size_bytes: int = 1000) -> None:
    """What goes in at one end comes out at the other, both ways."""
    for sender, receiver in ((one, other), (other, one)):
        receiver.settimeout(PATIENCE_SECONDS)
        sender.sendall(b"x" * size_bytes)
        left = size_bytes
        while left:
            got = len(receiver.recv(left))
            assert got > 0
            left -= got


def seen_address(host: Host, server: Host, listener: socket.socket) -> tuple[str, int]:
    """How `server` sees a connection that leaves `host` from PORT."""
    port = listener.getsockname()[1]
    with dial(host, server.ipv4, port, from_port=PORT):
        accepted, (ip, outer_port) = listener.accept()
        accepted.close()
    return ip, outer_port


def punch(one: Host, other: Host, mappings: dict[Host, tuple[str, int]]) -> list[socket.socket]:
    """Both dial each other's mapping from PORT at once, a few times; what came of it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        attempts: list[socket.socket] = []
        for host, target in ((one, other), (other, one)):
            with host.namespace.entered():
                attempt = socket.socket()
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            attempt.bind(("", PORT))
            attempt.setblocking(False)
            attempt.connect_ex(mappings[target])
            attempts.append(attempt)
        time.sleep(0.2)
        if all(_is_connected(attempt) for attempt in attempts):
            return attempts
        for attempt in attempts:
            attempt.close()
    return []


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def two_homes(
    lab: Lab, one: Nat, other: Nat
) -> tuple[Host, tuple[Router, Host], tuple[Router, Host]]:
    return lab.public_host("server"), lab.home("a", one), lab.home("b", other)


def test_public_machines_reach_each_other_and_nobody_reaches_into_a_home(lab: Lab) -> None:
    server, (router, host), (_, stranger) = two_homes(lab, Nat.PORT_PRESERVING, Nat.SYMMETRIC)
    other = lab.public_host("other")
    with listen(server) as listener, dial(other, server.ipv4) as connection:
        accepted, address = listener.accept()
        assert address[0] == other.ipv4
        with accepted:
            carries(connection, accepted)
    with listen(host), listen(stranger):
        for outside in (server, stranger):
            with pytest.raises(TimeoutError):
                dial(outside, router.wan_ipv4, timeout_seconds=SILENCE_SECONDS)


def test_a_mapping_of_one_remote_lets_no_other_in(lab: Lab) -> None:
    """Filtering by address: what makes hole punching necessary."""
    server, (router, host), _ = two_homes(lab, Nat.PORT_PRESERVING, Nat.PORT_PRESERVING)
    stranger = lab.public_host("stranger")
    with (
        listen(server) as listener,
        listen(host),
        dial(host, server.ipv4, from_port=PORT),
        listener.accept()[0],
        pytest.raises(TimeoutError),
    ):
        dial(stranger, router.wan_ipv4, timeout_seconds=SILENCE_SECONDS)


def test_a_port_preserving_router_shows_the_same_port_to_everybody(lab: Lab) -> None:
    server, (router, host), _ = two_homes(lab, Nat.PORT_PRESERVING, Nat.SYMMETRIC)
    with listen(server, 5000) as first, listen(server, 5001) as second:
        for listener in (first, second):
            assert seen_address(host, server, listener) == (router.wan_ipv4, PORT)


def test_a_symmetric_router_shows_another_port_to_each_remote(lab: Lab) -> None:
    server, _, (router, host) = two_homes(lab, Nat.PORT_PRESERVING, Nat.SYMMETRIC)
    ports: set[int] = set()
    for port in range(5000, 5004):
        with listen(server, port) as listener:
            address = seen_address(host, server, listener)
        assert address[0] == router.wan_ipv4
        ports.add(address[1])
    assert len(ports) == 4
    assert PORT not in ports


@pytest.mark.parametrize(
    ("one", "other", "succeeds"),
    [
        (Nat.PORT_PRESERVING, Nat.PORT_PRESERVING, True),
        (Nat.PORT_PRESERVING, Nat.SYMMETRIC, False),
        (Nat.SYMMETRIC, Nat.SYMMETRIC, False),
    ],
    ids=lambda value: value.value if isinstance(value, Nat) else "",
)
def test_a_simultaneous_open_gets_through_port_preserving_routers_only(
    lab: Lab, one: Nat, other: Nat, succeeds: bool
) -> None:
    server, (router_a, a), (router_b, b) = two_homes(lab, one, other)
    with ExitStack() as stack:
        listener = stack.enter_context(closing(listen(server)))
        mappings = {host: seen_address(host, server, listener) for host in (a, b)}
        at_server = server.count_traffic(router_a.wan_ipv4)
        on_the_way = router_b.count_traffic(router_a.wan_ipv4)
        ends = [stack.enter_context(closing(end)) for end in punch(a, b, mappings)]
        assert bool(ends) is succeeds
        if succeeds:
            carries(ends[0], ends[1], 100_000)
            assert on_the_way.received_bytes > 100_000
            assert on_the_way.sent_bytes > 100_000
        assert at_server.total_bytes == 0


def test_machines_behind_one_router_reach_each_other_without_it(lab: Lab) -> None:
    router = lab.router("router", Nat.SYMMETRIC)
    one, other = lab.lan_host("one", router), lab.lan_host("other", router)
    at_router = router.count_traffic(one.ipv4)
    with listen(one) as listener, dial(other, one.ipv4) as connection:
        accepted, address = listener.accept()
        assert address[0] == other.ipv4
        with accepted:
            carries(connection, accepted, 100_000)
    assert at_router.total_bytes < 1000


def test_a_home_with_ipv6_only_reaches_out_and_drops_what_comes_unasked(lab: Lab) -> None:
    server = lab.public_host("server", versions=(6,))
    _, host = lab.home("home", Nat.PORT_PRESERVING, versions=(6,))
    with listen(server, address="::") as listener, dial(host, server.ipv6) as connection:
        accepted, address = listener.accept()
        assert address[0] == host.ipv6
        with accepted:
            carries(connection, accepted)
    with listen(host, address="::"), pytest.raises(TimeoutError):
        dial(server, host.ipv6, timeout_seconds=SILENCE_SECONDS)
    with pytest.raises(LabError, match="no IPv4"):
        _ = host.ipv4


def test_a_pulled_cable_stops_a_connection_and_plugging_it_in_lets_it_go_on(lab: Lab) -> None:
    server, (router, host), _ = two_homes(lab, Nat.PORT_PRESERVING, Nat.PORT_PRESERVING)
    with listen(server) as listener, dial(host, server.ipv4) as connection:
        accepted, _ = listener.accept()
        with accepted:
            for machine in (host, router):
                carries(connection, accepted)
                machine.cut()
                connection.sendall(b"late")
                accepted.settimeout(SILENCE_SECONDS)
                with pytest.raises(TimeoutError):
                    accepted.recv(4)
                machine.heal()
                accepted.settimeout(PATIENCE_SECONDS)
                assert accepted.recv(4) == b"late"


def test_a_change_of_the_outer_address_ends_connections_and_new_ones_show_it(lab: Lab) -> None:
    server, (router, host), _ = two_homes(lab, Nat.PORT_PRESERVING, Nat.PORT_PRESERVING)
    before = router.wan_ipv4
    with listen(server) as listener:
        with dial(host, server.ipv4) as connection, listener.accept()[0] as accepted:
            after = lab.change_wan_address(router)
            assert after == router.wan_ipv4 != before
            connection.sendall(b"lost")
            accepted.settimeout(SILENCE_SECONDS)
            with pytest.raises(TimeoutError):
                accepted.recv(4)
        assert seen_address(host, server, listener) == (after, PORT)


def test_a_host_with_a_new_address_can_dial_and_be_dialled_there(lab: Lab) -> None:
    server, (_, host), _ = two_homes(lab, Nat.PORT_PRESERVING, Nat.PORT_PRESERVING)
    before = host.ipv4
    after = host.change_address()
    assert after == host.ipv4 != before
    with listen(server) as listener, dial(host, server.ipv4) as connection, listener.accept()[0]:
        assert connection.getsockname()[0] == after


def test_a_limited_cable_carries_no_more_than_its_rate(lab: Lab) -> None:
    one, other = lab.public_host("one"), lab.public_host("other")
    one.limit_rate(2e6)
    with listen(one) as listener, dial(other, one.ipv4) as connection:
        accepted, _ = listener.accept()
        with accepted:
            for sender, receiver in ((connection, accepted), (accepted, connection)):
                assert 1e6 < _rate(sender, receiver, 1_000_000) < 2.6e6


def _rate(sender: socket.socket, receiver: socket.socket, size_bytes: int) -> float:
    sender.setblocking(False)
    begun, left, sent = time.monotonic(), size_bytes, 0
    while left:
        if sent < size_bytes:
            with suppress(BlockingIOError):
                sent += sender.send(bytes(min(65_536, size_bytes - sent)))
        receiver.settimeout(0.01)
        try:
            left -= len(receiver.recv(65_536))
        except TimeoutError:
            continue
    return size_bytes / (time.monotonic() - begun)


# ---------------------------------------------------------------- life


@pytest.mark.usefixtures("namespaces")
def test_programs_run_on_their_host_and_end_with_the_lab(tmp_path: Path) -> None:
    with Lab() as lab:
        host = lab.public_host("host")
        assert host.ipv4 in host.run(["ip", "address"])
        words = [sys.executable, "-c", "import os, time; print(os.getcwd(), os.environ['WORD'], "
                 "flush=True); time.sleep(600)"]  # fmt: skip
        program = host.start("sleeper", words, tmp_path / "out", {"WORD": "hello"}, tmp_path)
        # Beside it one that nobody registered, in a session of its own.
        stray = subprocess.Popen([*host.prefix, "sleep", "600"], start_new_session=True)
        deadline = time.monotonic() + 10
        while not program.last_lines() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert program.last_lines() == [f"{tmp_path} hello"]
    assert program.exit_code() is not None
    assert stray.wait(5) < 0
    assert own_namespaces() == []


@pytest.mark.usefixtures("namespaces")
def test_a_failure_inside_leaves_nothing_behind() -> None:
    made: list[str] = []

    def fail_in_a_lab() -> None:
        with Lab() as lab:
            lab.home("home", Nat.SYMMETRIC)
            made.extend(own_namespaces())
            raise ValueError("a test fails")

    with pytest.raises(ValueError, match="a test fails"):
        fail_in_a_lab()
    assert len(made) == 3
    assert own_namespaces() == []


def test_what_a_killed_test_leaves_behind_is_swept_and_what_is_in_use_is_not(lab: Lab) -> None:
    script = (
        "import os, signal, subprocess\n"
        "from kits.network_lab import Lab, Nat, own_namespaces\n"
        "lab = Lab().__enter__()\n"
        "_, host = lab.home('home', Nat.SYMMETRIC)\n"
        "subprocess.Popen([*host.prefix, 'sleep', '600'], stdout=subprocess.DEVNULL,\n"
        "    stderr=subprocess.DEVNULL, start_new_session=True)\n"
        "print(*own_namespaces(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    left = killed.stdout.split()
    assert len(left) == 3, killed.stderr
    assert all((FOLDER / name).exists() for name in left)
    mine = own_namespaces()
    sweep()
    assert not any((FOLDER / name).exists() for name in left)
    assert mine == own_namespaces() != []
