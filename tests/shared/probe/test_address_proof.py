"""The coordinator dials back what a session does not prove, a bounded number of times."""

from __future__ import annotations

import ipaddress

import trio
from trio.testing import MockClock

from swarm_shared.addresses.dial_order import Interfaces
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity
from swarm_shared.probe.address_proof import MAX_DIALS, AddressProof
from swarm_shared.protocol import AddressUpdate, CarrierAddress, Reachability

PEER = Identity.from_seed(b"p" * 32).peer_id
SIX = "/ip6/2001:db8::5/tcp/4001"


class World:
    """Dials that are recorded; peers answer at `answering`."""

    def __init__(self, *answering: str, seconds: float = 0.0) -> None:
        self.answering = answering
        self.seconds = seconds
        self.dialled: list[str] = []
        self.most = self.now = 0

    async def dial(self, address: str, peer: PeerId, timeout_seconds: float) -> None:
        self.dialled.append(address)
        self.now += 1
        self.most = max(self.most, self.now)
        await trio.sleep(self.seconds)
        self.now -= 1
        if address not in self.answering:
            raise NetworkError("another peer answers there")

    def proof(self) -> AddressProof:
        return AddressProof(lambda _: (), Interfaces, self.dial, clock=trio.current_time)


def announced(*addresses: str, p2pd: tuple[str, ...] = ()) -> AddressUpdate:
    carrier = CarrierAddress(peer="p2pd", addresses=p2pd, binding="")
    return AddressUpdate(
        addresses=addresses, carrier=carrier, reachability=Reachability.UNKNOWN,
        offers_relay=False,
    )  # fmt: skip


async def test_a_peer_that_answers_at_its_other_address_is_announced_there_with_its_p2pd() -> None:
    world = World(SIX)
    proof = world.proof()
    place = proof.place("/ip4/203.0.113.5/tcp/50000")
    message = announced(SIX, p2pd=("/ip6/2001:db8::5/tcp/5001", "/ip6/2001:db8::6/tcp/5001"))
    found = await proof.dialled_back(PEER, message, place)
    assert found == {ipaddress.ip_address("2001:db8::5")}
    assert proof.checked(message, place).addresses == ()
    proved = proof.place("/ip4/203.0.113.5/tcp/50000")
    checked = proof.checked(message, type(proved)(proved.observed, proved.coordinator, found))
    assert checked.addresses == (SIX,)
    assert checked.carrier is not None
    assert checked.carrier.addresses == ("/ip6/2001:db8::5/tcp/5001",)


async def test_what_is_proved_already_or_private_is_not_dialled() -> None:
    world = World()
    proof = world.proof()
    place = proof.place("/ip4/203.0.113.5/tcp/50000")
    message = announced("/ip4/203.0.113.5/tcp/1", "/ip4/10.0.0.1/tcp/1", "/dns4/a/tcp/1")
    assert await proof.dialled_back(PEER, message, place) == frozenset()
    assert world.dialled == []


def test_a_peer_cannot_turn_the_coordinator_into_a_scanner() -> None:
    """Two addresses an announcement, a burst of four a household, and one a minute after that."""
    world = World()

    async def main() -> None:
        proof = world.proof()
        place = proof.place("/ip4/203.0.113.5/tcp/50000")
        for round in range(60):
            targets = [f"/ip4/198.51.100.{n}/tcp/{22 + round}" for n in range(1, 33)]
            before = len(world.dialled)
            assert not await proof.dialled_back(PEER, announced(*targets), place)
            assert len(world.dialled) - before <= 2
            await trio.sleep(1)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert 4 <= len(world.dialled) <= 5


def test_many_households_together_are_bounded() -> None:
    world = World(seconds=3.0)

    async def main() -> None:
        proof = world.proof()
        async with trio.open_nursery() as nursery:
            for number in range(100):
                place = proof.place(f"/ip4/203.0.113.{number}/tcp/50000")
                message = announced(f"/ip4/198.51.100.{number}/tcp/22")
                nursery.start_soon(proof.dialled_back, PEER, message, place)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert world.most == MAX_DIALS
    assert len(world.dialled) == 100
