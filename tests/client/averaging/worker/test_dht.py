"""hivemind's DHT among real p2pds: members find one another's records, non-members find none."""

from __future__ import annotations

import base64
import functools
import importlib
import importlib.util
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import trio

from kits.averaging.membership import Organiser
from kits.members import peer_record
from kits.peer_names import named
from swarm_client.averaging.handle.options import AveragingOptions
from swarm_client.averaging.handle.supervisor import AveragingWorker
from swarm_client.averaging.protocol.directory_record import sign_record
from swarm_client.averaging.protocol.messages import Lookup
from swarm_client.averaging.worker import dht
from swarm_client.averaging.worker.authorizer import RunAuthorizer
from swarm_client.averaging.worker.dht import DhtDirectory
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.identity.credentials import CLOCK_SKEW_SECONDS
from swarm_shared.identity.keys import Identity

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@dataclass
class Volunteer:
    key: Identity
    worker: AveragingWorker

    @property
    def p2pd(self) -> str:
        assert self.worker.started is not None
        return self.worker.started.p2pd_peer_id

    @property
    def entrance(self) -> str:
        assert self.worker.started is not None
        return f"{self.worker.started.addresses[0]}/p2p/{self.p2pd}"


@asynccontextmanager
async def volunteers(home: Path, count: int) -> AsyncIterator[list[Volunteer]]:
    async with trio.open_nursery() as nursery:
        made = [
            Volunteer(
                Identity.generate(), AveragingWorker(AveragingOptions(home / str(index), LOOPBACK))
            )
            for index in range(count)
        ]
        for each in made:
            nursery.start_soon(each.worker.run)
        for each in made:
            assert await each.worker.settled(), each.worker.reason
        yield made
        nursery.cancel_scope.cancel()


def signed_record(organiser: Organiser, member: Identity, expires: float, stage: int = 0) -> bytes:
    """A record as a daemon signs it."""
    certificate = organiser.membership(member, "").certificate
    record = peer_record(
        member.peer_id, stage, addresses=("/ip4/192.0.2.1/tcp/1",),
        certificate=base64.b64encode(certificate).decode(),
    )  # fmt: skip
    return sign_record(member, record, expires)


class Shelf:
    """A DHT node that has these entries under every key."""

    def __init__(self, entries: dict[object, object]) -> None:
        self._entries = {key: SimpleNamespace(value=value) for key, value in entries.items()}

    async def get(self, key: str, latest: bool) -> SimpleNamespace:
        return SimpleNamespace(value=self._entries)


async def test_a_member_cannot_crowd_the_others_out_of_the_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stores more entries than a look-up returns, each cheap to make."""
    monkeypatch.setattr(dht, "MAX_RECORDS", 20)
    organiser, soon = Organiser(), time.time() + 60
    attacker, honest = Identity.generate(), [Identity.generate() for _ in range(3)]
    own = signed_record(organiser, attacker, soon)
    foreign = signed_record(Organiser(), attacker, soon)
    entries: dict[object, object] = {}
    for number in range(100):
        peer = named(f"x{number + 1111}".replace("0", "a"))
        entries[peer] = (own, b"", foreign, own[:-1], 7)[number % 5]
    entries |= {7: own, str(attacker.peer_id): own}
    right = {str(key.peer_id): signed_record(organiser, key, soon) for key in honest}
    authorizer = RunAuthorizer(Identity.generate())
    authorizer.set_membership(organiser.membership(honest[0], ""))
    node = DhtDirectory(None, Shelf({**entries, **right}), None, authorizer)  # type: ignore[arg-type]
    found = await node.lookup(Lookup(key="swarm/run"))
    assert {one.subkey: one.value for one in found.records} == {str(attacker.peer_id): own, **right}


@pytest.mark.process
async def test_members_find_each_others_records_and_the_newest_of_them(tmp_path: Path) -> None:
    organiser = Organiser()
    async with volunteers(tmp_path, 3) as all_three:
        first, *others = all_three
        for each in all_three:
            each.worker.set_membership(organiser.membership(each.key, each.p2pd))
        for each in others:
            assert await each.worker.bootstrap((first.entrance,)) == 1
        expires = time.time() + 60
        records = {
            str(each.key.peer_id): signed_record(organiser, each.key, expires) for each in all_three
        }
        for each in all_three:
            subkey = str(each.key.peer_id)
            assert await each.worker.publish("stage 0", subkey, records[subkey], expires)
        for each in all_three:
            assert await each.worker.lookup("stage 0") == records
            assert await each.worker.lookup("stage 1") == {}
        newest = str(first.key.peer_id)
        second = signed_record(organiser, first.key, expires + 1, stage=1)
        assert await first.worker.publish("stage 0", newest, second, expires + 1)
        assert await others[1].worker.lookup("stage 0") == {**records, newest: second}
        nowhere = "/ip4/127.0.0.1/tcp/1/p2p/" + first.p2pd[:-1] + "x"
        assert await first.worker.bootstrap((nowhere, "nonsense")) == 0


@pytest.mark.process
async def test_non_members_and_members_of_other_runs_can_neither_store_nor_find(
    tmp_path: Path,
) -> None:
    organiser = Organiser()
    other_run = Organiser(RunId("cd" * 32))
    async with volunteers(tmp_path, 4) as (first, second, stranger, foreigner):
        first.worker.set_membership(organiser.membership(first.key, first.p2pd))
        second.worker.set_membership(organiser.membership(second.key, second.p2pd))
        foreigner.worker.set_membership(other_run.membership(foreigner.key, foreigner.p2pd))
        # The non-member has copied a certificate and its binding, but not the key of that p2pd.
        stranger.worker.set_membership(organiser.membership(second.key, second.p2pd))
        expires = time.time() + 60
        assert await second.worker.bootstrap((first.entrance,)) == 1
        subkey, true = str(second.key.peer_id), signed_record(organiser, second.key, expires)
        false = signed_record(organiser, second.key, expires + 1)
        assert await second.worker.publish("stage 0", subkey, true, expires)
        for outsider in (stranger, foreigner):
            assert await outsider.worker.bootstrap((first.entrance,)) == 0
            assert await outsider.worker.lookup("stage 0") == {}
            await outsider.worker.publish("stage 0", subkey, false, expires + 1)
        assert await first.worker.lookup("stage 0") == {subkey: true}
        # A revoked member finds no other member either.
        first.worker.set_membership(
            organiser.membership(first.key, first.p2pd, revoked=(second.key.peer_id,))
        )
        assert await second.worker.bootstrap((first.entrance,)) == 0


@pytest.mark.process
async def test_a_peer_without_admission_neither_asks_nor_answers(tmp_path: Path) -> None:
    organiser = Organiser()
    async with volunteers(tmp_path, 2) as (member, newcomer):
        member.worker.set_membership(organiser.membership(member.key, member.p2pd))
        assert await member.worker.bootstrap((newcomer.entrance,)) == 0
        assert await newcomer.worker.bootstrap((member.entrance,)) == 0
        newcomer.worker.set_membership(organiser.membership(newcomer.key, newcomer.p2pd))
        assert await newcomer.worker.bootstrap((member.entrance,)) == 1


# ------------------------------------------------------- the authorizer alone, on real messages


@functools.cache
def messages() -> Any:
    """hivemind's own messages without the rest of it, which py-libp2p does not bear beside itself:
    both bring a `crypto.proto`."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("hivemind is not installed")
    root = Path(spec.submodule_search_locations[0])
    hollow = {"hivemind": root, "hivemind.proto": root / "proto"}
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in hollow.items():
            package = ModuleType(name)
            package.__path__ = [str(folder)]
            patch.setitem(sys.modules, name, package)
        for name in ("auth_pb2", "dht_pb2"):
            patch.delitem(sys.modules, f"hivemind.proto.{name}", raising=False)
        found = importlib.import_module("hivemind.proto.dht_pb2")
        for name in ("auth_pb2", "dht_pb2"):
            sys.modules.pop(f"hivemind.proto.{name}", None)
    return found


def ping(**changes: Any) -> Any:
    return messages().PingRequest(**changes)


class Scene:
    """One member's authorizer, and another's that checks it."""

    def __init__(self, **changes: Any) -> None:
        self.now = time.time()
        self.organiser = Organiser()
        self.member, self.p2pd = Identity.generate(), Identity.generate()
        self.sender = RunAuthorizer(self.p2pd, lambda: self.now)
        self.sender.set_membership(
            self.organiser.membership(self.member, self.p2pd.peer_id, **changes)
        )
        checker, checker_p2pd = Identity.generate(), Identity.generate()
        self.checker = RunAuthorizer(checker_p2pd, lambda: self.now)
        self.checker.set_membership(self.organiser.membership(checker, checker_p2pd.peer_id))

    async def signed(self) -> Any:
        request = ping()
        await self.sender.sign_request(request, None)
        return request

    async def is_taken(self) -> bool:
        """Whether the other believes a call that the member signs now."""
        return bool(await self.checker.validate_request(await self.signed()))


async def test_a_members_call_is_taken_once_and_its_answer_too() -> None:
    scene = Scene()
    request = await scene.signed()
    copy = ping()
    copy.CopyFrom(request)
    assert await scene.checker.validate_request(request)
    assert not await scene.checker.validate_request(copy), "it was heard before"
    dht_pb2 = messages()
    response = dht_pb2.PingResponse(available=True)
    await scene.checker.sign_response(response, request)
    forged = dht_pb2.PingResponse()
    forged.CopyFrom(response)
    forged.available = False
    assert not await scene.sender.validate_response(forged, request)
    other = await scene.signed()
    again = dht_pb2.PingResponse()
    again.CopyFrom(response)
    assert not await scene.sender.validate_response(again, other), "it answers another call"
    assert await scene.sender.validate_response(response, request)


async def test_a_call_that_was_changed_on_its_way_is_refused() -> None:
    scene = Scene()
    request = await scene.signed()
    request.validate = True
    assert not await scene.checker.validate_request(request)


async def test_a_call_is_never_taken_for_one_of_another_kind() -> None:
    scene = Scene()
    dht_pb2 = messages()
    request = await scene.signed()
    # Both have `auth` as field 1 and nothing else set: their bytes are the same.
    disguised = dht_pb2.FindRequest.FromString(request.SerializeToString())
    assert not await scene.checker.validate_request(disguised)


@pytest.mark.parametrize("late_by", [-1, 1])
async def test_an_old_call_is_refused_and_so_is_one_from_the_future(late_by: int) -> None:
    scene = Scene()
    request = await scene.signed()
    scene.now += late_by * (CLOCK_SKEW_SECONDS + 1)
    assert not await scene.checker.validate_request(request)


async def test_a_certificate_that_lapses_is_not_believed_for_having_been_seen_before() -> None:
    scene = Scene(expires=time.time() + 1000)
    assert await scene.is_taken()
    scene.now += 1000 + CLOCK_SKEW_SECONDS + 1
    assert not await scene.is_taken()


async def test_a_membership_of_another_run_is_refused() -> None:
    assert not await Scene(run=RunId("cd" * 32)).is_taken()


async def test_a_binding_to_another_p2pd_or_by_another_key_does_not_let_this_one_sign() -> None:
    scene = Scene()
    stolen = scene.organiser.membership(scene.member, scene.p2pd.peer_id)
    of_thief = scene.organiser.membership(Identity.generate(), scene.p2pd.peer_id)
    for membership in (
        scene.organiser.membership(scene.member, Identity.generate().peer_id),
        stolen.model_copy(update={"binding": of_thief.binding}),
    ):
        scene.sender.set_membership(membership)
        assert not await scene.is_taken()


async def test_a_revoked_member_is_refused() -> None:
    scene = Scene()
    assert await scene.is_taken()
    checker = Identity.generate()
    revoked: tuple[PeerId, ...] = (scene.member.peer_id,)
    scene.checker.set_membership(
        scene.organiser.membership(checker, Identity.generate().peer_id, revoked=revoked)
    )
    assert not await scene.is_taken()


async def test_rubbish_in_place_of_a_token_is_refused_and_not_an_error() -> None:
    scene = Scene()
    for certificate, binding in ((b"", b""), (b"x", b"y"), (b"\x00" * 100_000, b"")):
        request = await scene.signed()
        request.auth.client_access_token.signature = certificate
        request.auth.client_access_token.public_key = binding
        assert not await scene.checker.validate_request(request)


async def test_a_peer_without_certificate_signs_nothing() -> None:
    with pytest.raises(NetworkError, match="not admitted"):
        await RunAuthorizer(Identity.generate()).sign_request(ping(), None)
