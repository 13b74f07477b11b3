"""Which route is tried when, what is remembered of those that failed, and how one is opened."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from kits.averaging.memory_carrier import MemoryChannel
from kits.clock import Clock
from swarm_client.averaging.all_reduce.errors import RouteAbsentError
from swarm_client.averaging.all_reduce.routes import (
    FIRST_ROUTE_BACKOFF_SECONDS,
    MAX_ROUTE_BACKOFF_SECONDS,
    Route,
    RouteFault,
    RouteMemory,
    possible_routes,
)
from swarm_client.averaging.all_reduce.stream_race import (
    HEAD_START_SECONDS,
    MAX_OPENING_SECONDS,
    ROUTE_SECONDS,
    StreamRace,
)
from swarm_client.averaging.protocol.addresses import relayed_addresses, without_peer_id
from swarm_client.averaging.worker.p2pd_carrier import dial_target
from swarm_shared.base.errors import LinkClosed, NetworkError
from swarm_shared.base.types import PeerId

A, B = PeerId("A"), PeerId("B")
ALL = list(Route)


# ---------------------------------------------------------------------------- what can be tried


def test_p2pd_direct_comes_first_then_the_hosts_link_then_the_relays() -> None:
    routes = possible_routes(both_have_p2pd=True, p2pd_relays=True, host_is_relayed=False)
    assert routes == [Route.P2PD, Route.HOST, Route.P2PD_RELAYED, Route.HOST_RELAYED]


@given(st.booleans(), st.booleans(), st.booleans())
def test_a_pair_always_has_the_hosts_connection_and_nothing_that_cannot_be(
    both_have_p2pd: bool, p2pd_relays: bool, host_is_relayed: bool
) -> None:
    routes = possible_routes(
        both_have_p2pd=both_have_p2pd, p2pd_relays=p2pd_relays, host_is_relayed=host_is_relayed
    )
    assert routes[-1] is Route.HOST_RELAYED
    assert routes == sorted(routes, key=ALL.index)
    assert len(set(routes)) == len(routes)
    if not both_have_p2pd:
        assert routes == [Route.HOST_RELAYED]
    if host_is_relayed:
        assert Route.HOST not in routes


# ------------------------------------------------------------------------------- what is learnt


def test_a_route_that_failed_comes_last_until_it_has_rested() -> None:
    clock = Clock()
    memory = RouteMemory(clock)
    memory.failed(A, Route.P2PD)
    assert memory.order(A, ALL) == (*ALL[1:], Route.P2PD)
    assert memory.order(B, ALL) == tuple(ALL)
    clock.now += FIRST_ROUTE_BACKOFF_SECONDS - 0.1
    assert memory.order(A, ALL)[-1] is Route.P2PD
    clock.now += 0.2
    assert memory.order(A, ALL) == tuple(ALL)


def test_when_all_have_failed_all_are_tried_and_the_one_that_rested_longest_first() -> None:
    clock = Clock()
    memory = RouteMemory(clock)
    for route in (Route.HOST_RELAYED, Route.HOST, Route.P2PD_RELAYED, Route.P2PD):
        memory.failed(A, route)
        clock.now += 1.0
    assert memory.order(A, ALL) == (
        Route.HOST_RELAYED, Route.HOST, Route.P2PD_RELAYED, Route.P2PD,
    )  # fmt: skip


def test_rests_grow_with_every_fault_up_to_a_limit_and_end_when_the_route_works() -> None:
    clock = Clock()
    memory = RouteMemory(clock)
    rests = []
    for _ in range(8):
        memory.failed(A, Route.P2PD)
        begun = clock.now
        while memory.order(A, ALL)[0] is not Route.P2PD:
            clock.now += 1.0
        rests.append(clock.now - begun)
    assert rests[:3] == [
        FIRST_ROUTE_BACKOFF_SECONDS,
        2 * FIRST_ROUTE_BACKOFF_SECONDS,
        4 * FIRST_ROUTE_BACKOFF_SECONDS,
    ]
    assert rests[-1] == rests[-2] == MAX_ROUTE_BACKOFF_SECONDS
    memory.failed(A, Route.P2PD)
    memory.worked(A, Route.P2PD)
    assert memory.order(A, ALL)[0] is Route.P2PD
    memory.failed(A, Route.P2PD)
    clock.now += FIRST_ROUTE_BACKOFF_SECONDS
    assert memory.order(A, ALL)[0] is Route.P2PD


def test_a_fault_of_p2pd_at_other_addresses_does_not_count_and_one_of_the_host_does() -> None:
    memory = RouteMemory(Clock())
    memory.failed(A, Route.P2PD, ("/ip4/192.0.2.1/tcp/1",))
    memory.failed(A, Route.HOST, ("/ip4/192.0.2.1/tcp/1",))
    moved = ("/ip4/192.0.2.2/tcp/1",)
    assert memory.order(A, ALL, moved) == (
        Route.P2PD, Route.P2PD_RELAYED, Route.HOST_RELAYED, Route.HOST,
    )  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(["A", "B"]), st.sampled_from(ALL), st.booleans())))
def test_whatever_happened_no_route_is_ever_lost(events: list[tuple[str, Route, bool]]) -> None:
    clock = Clock()
    memory = RouteMemory(clock)
    for (name, route, works), step in zip(events, itertools.count()):
        clock.now += step
        (memory.worked if works else memory.failed)(PeerId(name), route)
        assert sorted(memory.order(PeerId(name), ALL)) == sorted(ALL)


# ---------------------------------------------------------------------------------- opening one


def after(seconds: float, outcome: Exception | None = None) -> Callable[[], Awaitable[Any]]:
    """A route that is open, or fails, so many seconds after it was tried."""

    async def opener() -> MemoryChannel:
        await anyio.sleep(seconds)
        if outcome is not None:
            raise outcome
        return Probe.made()

    return opener


class Probe(MemoryChannel):
    """Remembers whether it was dropped."""

    all: list[Probe]
    dropped = False

    @classmethod
    def made(cls) -> Probe:
        probe = cls.pair()[0]
        assert isinstance(probe, Probe)
        cls.all.append(probe)
        return probe

    async def abort(self) -> None:
        self.dropped = True
        await super().abort()


class StreamOpened:
    def __init__(self, *tried: tuple[Route, Callable[[], Awaitable[Any]]]) -> None:
        self.faults: list[RouteFault] = []
        self.seconds = 0.0
        self.error: NetworkError | None = None
        Probe.all = []

        async def body() -> None:
            begun = anyio.current_time()
            try:
                self.channel = await StreamRace(A, self.faults.append).open(tried)
            except NetworkError as error:
                self.error = error
            self.seconds = anyio.current_time() - begun

        clock = trio.testing.MockClock(autojump_threshold=0)
        anyio.run(body, backend="trio", backend_options={"clock": clock})

    @property
    def failed(self) -> list[Route]:
        return [fault.route for fault in self.faults]


def test_a_route_that_fails_at_once_costs_nothing() -> None:
    opened = StreamOpened(
        (Route.P2PD, after(0.0, LinkClosed("refused"))), (Route.HOST_RELAYED, after(0.1))
    )
    assert opened.seconds == pytest.approx(0.1)
    assert opened.failed == [Route.P2PD]


def test_a_silent_route_costs_its_head_start_and_is_backed_off() -> None:
    opened = StreamOpened((Route.P2PD, after(1000)), (Route.HOST_RELAYED, after(0.1)))
    assert opened.seconds == pytest.approx(HEAD_START_SECONDS + 0.1)
    assert opened.failed == [Route.P2PD]


def test_a_slow_route_still_wins_when_it_is_the_first_to_be_open() -> None:
    slow = HEAD_START_SECONDS + 0.5
    opened = StreamOpened((Route.P2PD, after(slow)), (Route.HOST_RELAYED, after(1.0)))
    assert opened.seconds == pytest.approx(slow)
    assert opened.failed == []
    assert len(Probe.all) == 1


def test_a_route_that_is_not_there_now_is_no_fault() -> None:
    opened = StreamOpened(
        (Route.P2PD, after(0, RouteAbsentError("no address"))), (Route.HOST, after(0.0))
    )
    assert opened.error is None
    assert opened.failed == []


def test_when_no_route_works_the_error_has_all_reasons_in_bounded_time() -> None:
    opened = StreamOpened(*((route, after(1000)) for route in ALL))
    assert opened.error is not None
    assert opened.seconds <= MAX_OPENING_SECONDS
    assert all(f"{route}: no answer within {ROUTE_SECONDS:g} s" in str(opened.error)
               for route in ALL)  # fmt: skip
    assert opened.failed == ALL


def test_of_two_that_open_at_the_same_moment_one_is_kept_and_the_other_dropped() -> None:
    opened = StreamOpened(
        (Route.P2PD, after(HEAD_START_SECONDS + 1)), (Route.HOST_RELAYED, after(1.0))
    )
    assert [probe.dropped for probe in Probe.all].count(False) == 1
    assert opened.channel in Probe.all


def test_an_opening_that_is_called_off_leaves_no_stream_behind() -> None:
    Probe.all = []

    async def body() -> None:
        async with anyio.create_task_group() as tasks:

            async def opener() -> MemoryChannel:
                probe = Probe.made()
                # The round fails at the very moment of success.
                tasks.cancel_scope.cancel()
                return probe

            await StreamRace(A, lambda fault: None).open([(Route.P2PD, opener)])

    anyio.run(body, backend="trio")
    assert [probe.dropped for probe in Probe.all] == [True]


# ------------------------------------------------------------------------------------ addresses


RELAY = "12D3KooWA13V6usryXw7tB2W5PsjH8gjc1NvWdDTBvBvkmW4zfPC"


def test_a_relayed_address_has_the_bytes_that_p2pd_reads() -> None:
    relayed = dial_target(f"/ip4/127.0.0.1/tcp/44123/p2p/{RELAY}/p2p-circuit")
    expected = (
        "047f00000106ac5b"
        "a5032600240801122002bc436fc51220b6161c9faff7648641086d59432f2d9fd32da79a6f555a3917a202"
    )
    assert relayed.to_bytes().hex() == expected


@pytest.mark.parametrize("relay", ["", "0OIl", "1" * 200])
def test_an_address_whose_relay_is_none_is_refused(relay: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (multiaddr has words of its own)
        dial_target(f"/ip4/127.0.0.1/tcp/1/p2p/{relay}/p2p-circuit")


def test_an_address_of_a_peer_behind_the_relays_other_end_is_refused() -> None:
    with pytest.raises(ValueError, match="behind the relay"):
        dial_target(f"/ip4/127.0.0.1/tcp/1/p2p/{RELAY}/p2p-circuit/p2p/{A}")


def test_the_owner_at_the_end_of_an_address_is_left_out_and_the_relay_stays() -> None:
    (address,) = relayed_addresses([f"/ip4/192.0.2.1/tcp/1/p2p/{RELAY}"])
    assert without_peer_id(f"{address}/p2p/{A}", A) == address
    assert without_peer_id(f"/ip4/192.0.2.1/tcp/1/p2p/{RELAY}", RELAY) == "/ip4/192.0.2.1/tcp/1"
