"""Records in hivemind's DHT are believed for their signature and certificate alone."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kits.members import certificate, peer_record
from swarm_client.averaging.protocol.directory_record import sign_record
from swarm_client.volunteer.peer_directory import PeerDirectory
from swarm_shared.base.clock import wall
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import PeerRecord

RUN = "ab" * 32


class Shelf:
    """What a DHT would hold: anything that anybody has put there."""

    def __init__(self) -> None:
        self.available = True
        self.values: dict[str, bytes] = {}
        self.entered: list[tuple[str, ...]] = []

    async def lookup(self, _key: str) -> dict[str, bytes]:
        return dict(self.values)

    async def publish(self, _key: str, subkey: str, value: bytes, _expires: float) -> bool:
        self.values[subkey] = value
        return True

    async def bootstrap(self, addresses: tuple[str, ...]) -> int:
        self.entered.append(addresses)
        return len(addresses)


@pytest.fixture
def scene() -> SimpleNamespace:
    organiser, peer, shelf = Identity.generate(), Identity.generate(), Shelf()
    return SimpleNamespace(
        organiser=organiser,
        peer=peer,
        shelf=shelf,
        directory=PeerDirectory(peer, shelf, RUN, organiser.peer_id, wall),  # type: ignore[arg-type]
    )


def record(scene: SimpleNamespace, peer: Identity, signer: Identity | None = None) -> PeerRecord:
    shown = certificate(peer.peer_id, RUN, signer or scene.organiser)
    return peer_record(peer.peer_id, addresses=("/ip4/192.0.2.1/tcp/1",), certificate=shown)


async def test_what_a_member_publishes_is_found_as_it_was(scene: SimpleNamespace) -> None:
    entry = record(scene, scene.peer)
    scene.directory.bootstrap_from(("/ip4/192.0.2.9/tcp/1/p2p/x",))
    await scene.directory.publish(entry)
    await scene.directory.publish(entry)
    assert await scene.directory.lookup() == [entry]
    assert scene.shelf.entered == [("/ip4/192.0.2.9/tcp/1/p2p/x",)]  # once is enough


async def test_forged_foreign_expired_and_damaged_records_are_left_out(
    scene: SimpleNamespace,
) -> None:
    soon = time.time() + 60
    thief, stranger = Identity.generate(), Identity.generate()
    victim = record(scene, scene.peer)
    good = sign_record(scene.peer, victim, soon)
    scene.shelf.values = {
        "good": good,
        "signed by another": sign_record(thief, victim, soon),
        "no member": sign_record(stranger, record(scene, stranger, signer=thief), soon),
        "expired": sign_record(scene.peer, victim, time.time() - 1),
        "damaged": good[:-3] + b"\0\0\0",
        "empty": b"",
    }
    assert await scene.directory.lookup() == [victim]


async def test_without_hivemind_the_directory_is_silent(scene: SimpleNamespace) -> None:
    scene.shelf.available = False
    await scene.directory.publish(record(scene, scene.peer))
    assert scene.shelf.values == {}
    assert await scene.directory.lookup() == []


async def test_the_directory_is_not_entered_at_names_other_transports_or_foreign_networks(
    scene: SimpleNamespace,
) -> None:
    good = "/ip4/192.0.2.9/tcp/1/p2p/x"
    scene.directory.bootstrap_from(
        (
            "/dns4/localhost/tcp/22/p2p/x", "/ip4/192.0.2.9/udp/1/quic-v1/p2p/x", good,
            "/ip4/10.99.98.97/tcp/80/p2p/x",
        )
    )  # fmt: skip
    await scene.directory.publish(record(scene, scene.peer))
    assert scene.shelf.entered == [(good,)]
