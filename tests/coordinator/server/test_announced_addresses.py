"""A member that announces somebody else's address, against a real coordinator and real nodes.

Connections are counted at the foreign port: 127.0.0.2 is not this machine's own address to the
coordinator, as any host of the internet is not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from kits.coordinator.shell_world import Client, client, make_run, served
from kits.peer_names import named
from swarm_client.membership.roster import RosterView
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.credentials import CarrierBinding
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.protocol import (
    AddressUpdate,
    CarrierAddress,
    PeerRecord,
    Reachability,
    Roster,
    RosterChange,
)


@dataclass
class Foreign:
    """A machine with no part in the run."""

    port: int = 0
    connections: int = 0

    @property
    def address(self) -> str:
        return f"/ip4/127.0.0.2/tcp/{self.port}"

    def announced(self) -> tuple[str, ...]:
        relay = Identity.from_seed(b"r" * 32).peer_id
        return (
            self.address, f"/dns4/localhost/tcp/{self.port}",
            f"/ip4/127.0.0.2/udp/{self.port}/quic-v1",
            f"{self.address}/p2p/{relay}/p2p-circuit",
        )  # fmt: skip


@asynccontextmanager
async def foreign_machine() -> AsyncIterator[Foreign]:
    foreign = Foreign()

    async def count(stream: trio.SocketStream) -> None:
        foreign.connections += 1
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.2")
        foreign.port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, count, [listener])
        yield foreign
        nursery.cancel_scope.cancel()


async def record_of(one: Client, view: RosterView, peer: PeerId) -> PeerRecord:
    """The peer's record in the rosters that the coordinator sends."""
    while (record := view.get(peer)) is None:
        message = await one.receive()
        if isinstance(message, Roster):
            view.replace(message)
        elif isinstance(message, RosterChange):
            view.change(message)
    return record


def bound_carrier(signer: Identity, **changes: object) -> CarrierAddress:
    """A p2pd with the signer's binding."""
    peer, expires = named("carrier"), time.time() + 3600.0
    binding = CarrierBinding(peer=signer.peer_id, carrier_peer_id=peer, expires=expires)
    values = {"peer": peer, "addresses": (), "binding": encode_envelope(binding.sign(signer))}
    return CarrierAddress.model_validate({**values, **changes})


async def test_a_p2pd_counts_only_with_its_members_signature(tmp_path: Path) -> None:
    """The coordinator and relays serve a p2pd as a member: no member can have them serve anyone."""
    folder, own, other = make_run(tmp_path / "run"), Identity.generate(), Identity.generate()
    banned = Identity.generate().peer_id
    async with served(folder) as run, client(run.invite, own) as one, client(run.invite) as second:
        await one.hold(0, carrier=bound_carrier(own))
        await second.hold(1)
        view = RosterView()
        assert (await record_of(second, view, own.peer_id)).carrier is not None
        false = (
            bound_carrier(own, binding=""), bound_carrier(own, peer=banned), bound_carrier(other),
            bound_carrier(own),
        )  # fmt: skip
        for carrier, counts in zip(false, (False, False, False, True), strict=True):
            update = AddressUpdate(
                addresses=(), carrier=carrier, reachability=Reachability.PUBLIC, offers_relay=False
            )
            await one.send(update)
            with trio.fail_after(10):
                while (view.get(own.peer_id).carrier is not None) is not counts:  # type: ignore[union-attr]
                    message = await second.receive()
                    if isinstance(message, Roster):
                        view.replace(message)
                    elif isinstance(message, RosterChange):
                        view.change(message)
            assert view.knows(banned) is False


async def test_no_member_is_sent_to_a_machine_that_another_one_names(tmp_path: Path) -> None:
    folder, liar = make_run(tmp_path / "run"), Identity.generate()
    async with (
        served(folder) as run,
        foreign_machine() as foreign,
        client(run.invite, liar) as attacker,
        client(run.invite) as honest,
    ):
        lies = foreign.announced()
        carrier = bound_carrier(liar, addresses=lies, local=lies)
        await attacker.hold(0, addresses=lies, carrier=carrier, local=lies, site="x")
        await attacker.send(
            AddressUpdate(
                addresses=lies, carrier=carrier, reachability=Reachability.PUBLIC,
                offers_relay=True, local=lies,
            )
        )  # fmt: skip
        welcome = await honest.hold(1)
        assert not [address for address in welcome.directory if "127.0.0.2" in address]
        view = RosterView()
        view.site = welcome.site
        record = await record_of(honest, view, attacker.node.peer_id)
        with contextlib.suppress(NetworkError):
            await honest.node.connect(attacker.node.peer_id, record.addresses)
        assert foreign.connections == 0
        assert record.addresses == ()
        assert record.carrier is not None
        assert record.carrier.addresses == ()


async def test_members_of_one_machine_find_each_other(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    async with (
        served(folder) as run,
        client(run.invite) as first,
        client(run.invite) as second,
    ):
        await first.node.listen(["/ip4/127.0.0.1/tcp/0"])
        await first.hold(0, addresses=first.node.addresses)
        welcome = await second.hold(1)
        view = RosterView()
        view.site = welcome.site
        record = await record_of(second, view, first.node.peer_id)
        assert record.addresses == tuple(first.node.addresses)
        await second.node.connect(first.node.peer_id, record.addresses)
        assert second.node.is_connected(first.node.peer_id)


async def test_a_member_of_another_site_gets_no_private_address(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    async with (
        served(folder) as run,
        client(run.invite) as first,
        client(run.invite) as second,
    ):
        await first.node.listen(["/ip4/127.0.0.1/tcp/0"])
        await first.hold(0, addresses=first.node.addresses)
        await second.hold(1)
        view = RosterView()
        view.site = "another household"
        record = await record_of(second, view, first.node.peer_id)
        assert record.addresses == ()
