"""Links between bare nodes through real routers: which path they take, and that they come back.

What a whole run makes of such links is in `test_nat_runs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kits.network_lab import Host, Lab, LabError, Nat, Router
from kits.network_lab.node_process import NodeProcess

pytestmark = pytest.mark.lab

PUNCH_SECONDS = 5.0
SENT_BYTES = 10_000_000
FRAME_BYTES = 500_000
COME_BACK_SECONDS = 30.0

Start = Callable[..., NodeProcess]
Home = tuple[Router, Host]


def relayed_pair(
    lab: Lab, start_node: Start, one: Home, other: Home
) -> tuple[NodeProcess, NodeProcess, NodeProcess]:
    """A relay, and two nodes that hold slots there."""
    relay = start_node(lab.public_host("relay"))
    relay.ask("serve_relay")
    pair = start_node(one[1]), start_node(other[1])
    for node in pair:
        node.reserve(relay)
    return relay, *pair


def connect(node: NodeProcess, other: NodeProcess) -> Any:
    return node.ask("connect", peer=other.peer, addresses=other.addresses)


def send(node: NodeProcess, other: NodeProcess, size_bytes: int = SENT_BYTES) -> str:
    """The kind of path that the bytes took."""
    kind: str = node.ask(
        "send", peer=other.peer, size_bytes=size_bytes, frame_bytes=FRAME_BYTES
    )["kind"]  # fmt: skip
    return kind


def send_when_back(node: NodeProcess, other: NodeProcess) -> float:
    """Connect and send until it works; how long it took."""
    begun = time.monotonic()
    while True:
        try:
            connect(node, other)
            send(node, other, FRAME_BYTES)
        except LabError:
            if time.monotonic() > begun + COME_BACK_SECONDS:
                raise
            time.sleep(0.1)
        else:
            return time.monotonic() - begun


def test_a_hole_is_punched_through_two_port_preserving_routers(lab: Lab, start_node: Start) -> None:
    home_a, home_b = lab.home("a", Nat.PORT_PRESERVING), lab.home("b", Nat.PORT_PRESERVING)
    relay, a, b = relayed_pair(lab, start_node, home_a, home_b)
    connect(a, b)
    took = a.ask("wait_for_path", peer=b.peer, kind="punched", seconds=PUNCH_SECONDS)["seconds"]
    assert took is not None
    at_relay = [relay.host.count_traffic(router.wan_ipv4) for router, _ in (home_a, home_b)]
    between = home_a[0].count_traffic(home_b[0].wan_ipv4)
    assert send(a, b) == "punched"
    assert send(b, a) == "punched"
    assert between.sent_bytes > SENT_BYTES
    assert between.received_bytes > SENT_BYTES
    assert sum(counter.total_bytes for counter in at_relay) < 0.01 * SENT_BYTES


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("one", "other"),
    [(Nat.PORT_PRESERVING, Nat.SYMMETRIC), (Nat.SYMMETRIC, Nat.SYMMETRIC)],
    ids=["one side", "both sides"],
)
def test_behind_a_symmetric_router_the_relay_carries_everything(
    lab: Lab, start_node: Start, one: Nat, other: Nat
) -> None:
    home_a, home_b = lab.home("a", one), lab.home("b", other)
    relay, a, b = relayed_pair(lab, start_node, home_a, home_b)
    connect(a, b)
    at_relay = [relay.host.count_traffic(router.wan_ipv4) for router, _ in (home_a, home_b)]
    assert send(a, b) == send(b, a) == "relayed"
    assert min(counter.total_bytes for counter in at_relay) > 2 * SENT_BYTES
    assert relay.ask("tell")["forwarded_bytes"] > 2 * SENT_BYTES


@pytest.mark.nightly
def test_two_machines_behind_one_router_find_the_local_path(lab: Lab, start_node: Start) -> None:
    router = lab.router("router", Nat.SYMMETRIC)
    home_a, home_b = (router, lab.lan_host("a", router)), (router, lab.lan_host("b", router))
    relay, a, b = relayed_pair(lab, start_node, home_a, home_b)
    at_relay = relay.host.count_traffic(router.wan_ipv4)
    between = home_a[1].count_traffic(home_b[1].ipv4)
    assert connect(a, b)["kind"] == "direct"
    assert send(a, b) == "direct"
    assert between.sent_bytes > SENT_BYTES
    assert at_relay.total_bytes < 0.01 * SENT_BYTES


@pytest.mark.nightly
def test_an_ipv6_home_is_reached_through_its_firewall(lab: Lab, start_node: Start) -> None:
    """No translation there, but a firewall that wants to be punched just the same."""
    relay = start_node(lab.public_host("relay", versions=(6,)), 6)
    relay.ask("serve_relay")
    homes = [lab.home(name, Nat.PORT_PRESERVING, versions=(6,)) for name in ("a", "b")]
    a, b = (start_node(host, 6) for _, host in homes)
    for node in (a, b):
        node.reserve(relay)
    connect(a, b)
    took = a.ask("wait_for_path", peer=b.peer, kind="punched", seconds=PUNCH_SECONDS)["seconds"]
    assert took is not None
    assert send(a, b) == "punched"


def test_a_node_whose_relay_dies_is_reached_through_its_other_one(
    lab: Lab, start_node: Start
) -> None:
    relays = [start_node(lab.public_host(f"relay-{number}")) for number in (1, 2)]
    for relay in relays:
        relay.ask("serve_relay")
    _, host_a = lab.home("a", Nat.SYMMETRIC)
    _, host_b = lab.home("b", Nat.SYMMETRIC)
    a, b = start_node(host_a), start_node(host_b)
    for node in (a, b):
        node.reserve(*relays)
    connect(a, b)
    assert send(a, b) == "relayed"
    (path,) = [path for path in a.ask("tell")["paths"] if path["remote"] == b.peer]
    first = next(relay for relay in relays if relay.peer == path["relay"])
    first.end()
    assert send_when_back(a, b) < 10
    told = b.ask("tell")
    assert told["slots"] == [relay.peer for relay in relays if relay is not first]


@pytest.mark.nightly
def test_links_come_back_after_the_provider_gave_another_address(
    lab: Lab, start_node: Start
) -> None:
    home_a, home_b = lab.home("a", Nat.PORT_PRESERVING), lab.home("b", Nat.PORT_PRESERVING)
    _, a, b = relayed_pair(lab, start_node, home_a, home_b)
    connect(a, b)
    lab.change_wan_address(home_a[0])
    send_when_back(a, b)
    took = a.ask("wait_for_path", peer=b.peer, kind="punched", seconds=COME_BACK_SECONDS)
    assert took["seconds"] is not None


@pytest.mark.nightly
def test_links_come_back_after_the_machine_got_another_address(lab: Lab, start_node: Start) -> None:
    home_a, home_b = lab.home("a", Nat.PORT_PRESERVING), lab.home("b", Nat.PORT_PRESERVING)
    _, a, b = relayed_pair(lab, start_node, home_a, home_b)
    connect(a, b)
    home_a[1].change_address()
    send_when_back(a, b)
    took = a.ask("wait_for_path", peer=b.peer, kind="punched", seconds=COME_BACK_SECONDS)
    assert took["seconds"] is not None


@pytest.mark.nightly
def test_links_come_back_after_a_pulled_cable(lab: Lab, start_node: Start) -> None:
    home_a, home_b = lab.home("a", Nat.PORT_PRESERVING), lab.home("b", Nat.SYMMETRIC)
    _, a, b = relayed_pair(lab, start_node, home_a, home_b)
    connect(a, b)
    home_a[1].cut()
    with pytest.raises(LabError):
        send(a, b)
    home_a[1].heal()
    send_when_back(a, b)
