"""Whether other peers reach this volunteer: the conclusions, the check, and when it is repeated.

Observers are scripted, or are nodes of this process; real routers are in tests/integration/nat.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from kits.members import peer_record
from swarm_client.connectivity.port_mapping import Mapping, PortMapper
from swarm_client.connectivity.reachability import (
    PeerObserver,
    ReachabilityFinding,
    ReachabilityWatch,
    Sighting,
    examine,
    judge,
    member_observers,
)
from swarm_shared.base.endpoint import Endpoint, IpAddress
from swarm_shared.base.errors import AdmissionError, NetworkError
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.identity.keys import Identity
from swarm_shared.network import open_node
from swarm_shared.probe.client import ProbeBusy
from swarm_shared.probe.server import serve_probe
from swarm_shared.protocol import (
    SOFTWARE_VERSION,
    DoctorHello,
    DoctorWelcome,
    PeerRecord,
    Reachability,
)

PORT = 4001
OUTSIDE = ipaddress.ip_address("1.2.3.4")
HOME = frozenset({ipaddress.ip_address("192.168.1.7"), ipaddress.ip_address("127.0.0.1")})
FIRST, SECOND = PeerId("first-observer"), PeerId("second-observer")
MAPPING = Mapping(str(OUTSIDE), 4777, PORT, "nat-pmp")


def sighting(
    *reached: int,
    by: PeerId = FIRST,
    ip: IpAddress | None = OUTSIDE,
    mapped: int | None = None,
) -> Sighting:
    return Sighting(
        by,
        None if ip is None else Endpoint(ip, 50_000),
        None if mapped is None or ip is None else Endpoint(ip, mapped),
        frozenset(reached),
    )


# ---------------------------------------------------------------- conclusions


def test_who_is_reached_at_the_listening_port_is_public() -> None:
    found = judge(PORT, HOME, [sighting(PORT)], None)
    assert found.reachability is Reachability.PUBLIC
    assert found.addresses == ("/ip4/1.2.3.4/tcp/4001",)
    assert found.behind_router is True
    assert judge(PORT, frozenset({OUTSIDE}), [sighting(PORT)], None).behind_router is False


def test_who_is_reached_through_the_router_alone_is_mapped() -> None:
    found = judge(PORT, HOME, [sighting(4777)], MAPPING)
    assert found.reachability is Reachability.MAPPED
    assert found.addresses == ("/ip4/1.2.3.4/tcp/4777",)


def test_a_routers_promise_alone_is_worth_nothing() -> None:
    elsewhere = Mapping("5.6.7.8", 4777, PORT, "upnp")
    for seen, mapping in (([sighting()], MAPPING), ([sighting(4777)], elsewhere)):
        found = judge(PORT, HOME, seen, mapping)
        assert found.reachability is Reachability.BEHIND_NAT
        assert found.addresses == ()


def test_without_anybody_outside_nothing_is_known() -> None:
    local = ipaddress.ip_address("192.168.1.7")
    for seen in ([], [sighting(ip=None)], [sighting(PORT, ip=local)]):
        found = judge(PORT, HOME, seen, None)
        assert found.reachability is Reachability.UNKNOWN
        assert found.addresses == ()
        assert found.note
    assert "own network" in judge(PORT, HOME, [sighting(PORT, ip=local)], None).note


def test_an_observer_outside_counts_when_the_coordinator_is_in_the_same_network() -> None:
    local = sighting(PORT, ip=ipaddress.ip_address("192.168.1.7"))
    assert judge(PORT, HOME, [local, sighting(by=SECOND)], None).reachability is (
        Reachability.BEHIND_NAT
    )


def test_a_coordinators_sighting_overrules_a_volunteers() -> None:
    seen = [sighting(), sighting(PORT, by=SECOND)]
    assert judge(PORT, HOME, seen, None).reachability is Reachability.BEHIND_NAT


def test_two_observers_show_whether_a_hole_can_be_punched() -> None:
    def punching(*mapped: int | None) -> tuple[bool | None, bool | None, bool | None]:
        seen = [
            sighting(by=by, mapped=number)
            for by, number in zip((FIRST, SECOND), mapped, strict=False)
        ]
        found = judge(PORT, HOME, seen, None)
        return found.port_preserved, found.endpoint_independent, found.hole_punching

    assert punching(PORT, PORT) == (True, True, True)
    assert punching(6000, 6000) == (False, True, True)
    assert punching(6000, 6001) == (False, False, False)
    assert punching(PORT, 6001) == (False, False, False)
    assert punching(PORT) == (True, None, True)
    assert punching(6000) == (False, None, None)
    assert punching(None) == (None, None, None)


def test_a_firewall_without_a_router_is_named() -> None:
    found = judge(PORT, frozenset({OUTSIDE}), [sighting()], None)
    assert found.reachability is Reachability.BEHIND_NAT
    assert found.hole_punching is True
    assert "firewall" in found.note


def test_ipv6_alone_is_announced_and_does_not_make_public() -> None:
    six = ipaddress.ip_address("2620:4f:8000::7")
    found = judge(PORT, frozenset({six}), [sighting(PORT, ip=six)], None)
    assert found.reachability is Reachability.BEHIND_NAT
    assert found.addresses == ("/ip6/2620:4f:8000::7/tcp/4001",)


addresses = st.sampled_from([None, OUTSIDE, *sorted(HOME), ipaddress.ip_address("5.6.7.8")])
sightings = st.builds(
    lambda by, ip, mapped, ports: sighting(*ports, by=by, ip=ip, mapped=mapped),
    st.sampled_from([FIRST, SECOND]), addresses, st.none() | st.integers(1, 65_535),
    st.sets(st.sampled_from([PORT, 4777])),
)  # fmt: skip


@given(st.lists(sightings, max_size=3), st.sampled_from([None, MAPPING]))
def test_what_is_announced_was_reached_at_an_address_of_the_internet(
    seen: list[Sighting], mapping: Mapping | None
) -> None:
    found = judge(PORT, HOME, seen, mapping)
    proved = {
        Endpoint(one.observed.ip, port).multiaddr
        for one in seen
        if one.observed is not None and one.observed.ip not in HOME
        for port in one.reached
    }
    assert set(found.addresses) <= proved
    in_public = found.reachability in (Reachability.PUBLIC, Reachability.MAPPED)
    assert in_public == bool(found.addresses)


# ---------------------------------------------------------------- the check


@dataclass
class Scripted:
    """An observer with an answer for each look, the last one for good."""

    answers: list[Sighting | Exception]
    peer: PeerId = FIRST
    ports: list[tuple[int, ...]] = field(default_factory=list)
    looked: Callable[[], None] = lambda: None

    async def observe(self, ports: Sequence[int]) -> Sighting:
        self.ports.append(tuple(ports))
        self.looked()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Router(PortMapper):
    """A mapper whose router gives what it is told to give."""

    def __init__(self, gives: Mapping | None, problem: str = "") -> None:
        super().__init__(find_gateway=lambda: None)
        self.gives = gives
        self.why = problem
        self.released = 0

    async def map(self, port: int) -> Mapping | None:
        self.mapping, self.problem = self.gives, self.why
        return self.gives

    async def release(self) -> None:
        self.mapping = None
        self.released += 1


def no_observers() -> Sequence[PeerObserver]:
    return ()


async def test_a_router_is_asked_only_when_no_observer_connects_without_it() -> None:
    mapper = Router(MAPPING)
    found = await examine(PORT, Scripted([sighting(PORT)]), no_observers, mapper)
    assert found.reachability is Reachability.PUBLIC
    assert mapper.mapping is None

    observer = Scripted([sighting(), sighting(4777)])
    found = await examine(PORT, observer, no_observers, mapper)
    assert found.reachability is Reachability.MAPPED
    assert mapper.mapping is MAPPING
    assert observer.ports == [(PORT,), (4777,)]


async def test_a_mapping_that_is_there_is_checked_and_kept() -> None:
    mapper = Router(MAPPING)
    await mapper.map(PORT)
    observer = Scripted([sighting(4777)])
    found = await examine(PORT, observer, no_observers, mapper)
    assert found.reachability is Reachability.MAPPED
    assert observer.ports == [(PORT, 4777)]
    assert mapper.released == 0


async def test_a_mapping_that_leads_nowhere_is_given_back() -> None:
    mapper = Router(MAPPING)
    found = await examine(PORT, Scripted([sighting()]), no_observers, mapper)
    assert found.reachability is Reachability.BEHIND_NAT
    assert found.addresses == ()
    assert "no connection arrives" in found.note
    assert mapper.released == 1


async def test_another_address_at_the_router_than_outside_is_double_nat() -> None:
    mapper = Router(Mapping("5.6.7.8", 4777, PORT, "upnp"))
    found = await examine(PORT, Scripted([sighting()]), no_observers, mapper)
    assert "double NAT" in found.note
    assert "5.6.7.8" in found.note
    assert mapper.released == 1


async def test_a_mapping_that_no_observer_could_check_is_neither_announced_nor_given_back() -> None:
    mapper = Router(MAPPING)
    observer = Scripted([sighting(), NetworkError("gone")])
    found = await examine(PORT, observer, no_observers, mapper)
    assert found.reachability is Reachability.BEHIND_NAT
    assert found.addresses == ()
    assert (mapper.mapping, mapper.released) == (MAPPING, 0)


async def test_what_the_router_answers_is_passed_on() -> None:
    mapper = Router(None, "it is configured not to open ports")
    found = await examine(PORT, Scripted([sighting()]), no_observers, mapper)
    assert found.note == "it is configured not to open ports"


async def test_a_second_observer_is_asked_and_may_fail() -> None:
    second: Any = Scripted([sighting(by=SECOND, mapped=6001)], SECOND)
    broken: Any = Scripted([AdmissionError("not you")], PeerId("broken"))
    first = Scripted([sighting(mapped=6000)])
    found = await examine(PORT, first, lambda: [broken, second], Router(None))
    assert found.endpoint_independent is False
    found = await examine(PORT, first, lambda: [broken], Router(None))
    assert found.endpoint_independent is None
    assert found.note == ""


async def test_without_the_coordinator_a_volunteer_decides() -> None:
    first = Scripted([NetworkError("the coordinator is away")])
    second: Any = Scripted([sighting(by=SECOND), sighting(4777, by=SECOND)], SECOND)
    found = await examine(PORT, first, lambda: [second], Router(MAPPING))
    assert found.reachability is Reachability.MAPPED
    nothing = await examine(PORT, first, no_observers, Router(MAPPING))
    assert nothing.reachability is Reachability.UNKNOWN
    assert "the coordinator is away" in nothing.note


async def test_an_observer_without_time_is_asked_once_more() -> None:
    first = Scripted([ProbeBusy("busy", 0.01), sighting(PORT)])
    found = await examine(PORT, first, no_observers, Router(None))
    assert found.reachability is Reachability.PUBLIC
    first = Scripted([ProbeBusy("busy", 600.0)])
    found = await examine(PORT, first, no_observers, Router(None))
    assert found.reachability is Reachability.UNKNOWN
    assert first.ports == [(PORT,)]


async def test_two_nodes_of_one_machine_know_nothing_of_the_internet() -> None:
    run = RunId("ab" * 32)
    hello = DoctorHello(run=run, software=SOFTWARE_VERSION)
    async with (
        open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as coordinator,
        open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as node,
    ):
        serve_probe(coordinator, lambda remote, hello: DoctorWelcome())
        observer = PeerObserver(node, coordinator.peer_id, coordinator.addresses, lambda: hello)
        port = node.listening_port
        assert port is not None
        seen = await observer.observe([port, 1])
        assert seen.reached == {port}
        assert seen.observed is not None
        assert not seen.is_outside
        assert seen.mapped == Endpoint(ipaddress.ip_address("127.0.0.1"), port)
        found = await examine(port, observer, no_observers, Router(None))
    assert found.reachability is Reachability.UNKNOWN


async def test_only_members_that_can_be_dialled_are_asked() -> None:
    def record(peer: PeerId, reachability: Reachability) -> PeerRecord:
        return peer_record(peer, addresses=("/ip4/1.2.3.4/tcp/1",), reachability=reachability)

    async with open_node(Identity.generate()) as node:
        records = [
            record(PeerId("public"), Reachability.PUBLIC),
            record(PeerId("mapped"), Reachability.MAPPED),
            record(PeerId("hidden"), Reachability.BEHIND_NAT),
            record(PeerId("new"), Reachability.UNKNOWN),
            record(node.peer_id, Reachability.PUBLIC),
        ]
        hello = DoctorHello(run=RunId("ab" * 32), software=SOFTWARE_VERSION)
        found = member_observers(node, records, lambda: hello)
    assert sorted(observer.peer for observer in found) == ["mapped", "public"]


# ---------------------------------------------------------------- again and again


class Told:
    def __init__(self) -> None:
        self._put, self._found = trio.open_memory_channel[ReachabilityFinding](100)

    def __call__(self, finding: ReachabilityFinding) -> None:
        self._put.send_nowait(finding)

    async def next(self) -> ReachabilityFinding:
        with trio.fail_after(5):
            return await self._found.receive()


async def test_a_changed_network_is_looked_at_again_soon() -> None:
    observer, told = Scripted([sighting(PORT), sighting()]), Told()
    watch = ReachabilityWatch(PORT, observer, no_observers, Router(None), told, settle_seconds=0.01)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        assert (await told.next()).reachability is Reachability.PUBLIC
        watch.network_changed()
        assert (await told.next()).reachability is Reachability.BEHIND_NAT
        assert watch.finding.reachability is Reachability.BEHIND_NAT
        nursery.cancel_scope.cancel()
    assert len(observer.ports) == 2


async def test_the_check_is_repeated_and_only_changes_are_reported() -> None:
    looks = 0
    enough = trio.Event()

    def count() -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            enough.set()

    told = Told()
    observer = Scripted([sighting(PORT)], looked=count)
    watch = ReachabilityWatch(PORT, observer, no_observers, Router(None), told, check_seconds=0.02)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await enough.wait()
        nursery.cancel_scope.cancel()
    await told.next()
    with pytest.raises(trio.WouldBlock):
        told._found.receive_nowait()


async def test_a_mapping_taken_away_is_a_reason_to_look_and_its_own_making_is_not() -> None:
    told = Told()
    watch: ReachabilityWatch

    class TellingRouter(Router):
        async def map(self, port: int) -> Mapping | None:
            found = await super().map(port)
            watch.mapping_changed(found)
            return found

    observer = Scripted([sighting(), sighting(4777), sighting()])
    mapper = TellingRouter(MAPPING)
    watch = ReachabilityWatch(PORT, observer, no_observers, mapper, told, settle_seconds=0.01)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        assert (await told.next()).reachability is Reachability.MAPPED
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert len(observer.ports) == 2
        mapper.gives = mapper.mapping = None
        watch.mapping_changed(None)
        assert (await told.next()).reachability is Reachability.BEHIND_NAT
        nursery.cancel_scope.cancel()
