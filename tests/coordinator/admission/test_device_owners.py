"""Owners of member devices: which bindings the coordinator accepts, stores, and adds up.

Devices and their owners have real keys here, and send hellos over real connections.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kits.coordinator import run as run_kit
from kits.coordinator.shell_world import client, hello_for, make_run, served
from swarm_coordinator.admission import device_owners
from swarm_coordinator.admission.device_owners import DeviceOwners, named_owner
from swarm_coordinator.core.events import AppliedStep, StageShare
from swarm_coordinator.dashboard.database_reader import DatabaseReader
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.admission_rows import read_owners
from swarm_coordinator.storage.connection import DatabaseLocation
from swarm_coordinator.storage.contributions import read_contributions
from swarm_coordinator.storage.database import copy_database, open_for_reading
from swarm_coordinator.storage.records import PeerSeen
from swarm_coordinator.storage.store import open_store
from swarm_coordinator.tui.run_source import contributors
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import PeerId, StageIndex, Step
from swarm_shared.identity.credentials import OwnerBinding, sign_owner_binding
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.owners import effective_bindings
from swarm_shared.identity.signing import sign_message
from swarm_shared.protocol import Refused, Welcome

VICTIM, FIRST, SECOND, ATTACKER = (
    Identity.from_seed(name * 32) for name in (b"v", b"1", b"2", b"x")
)
WORK_SHARES = (0.25, 0.75)
NOW = 2e9


def bound(owner: Identity, device: Identity) -> str:
    return base64.b64encode(sign_owner_binding(owner, device.peer_id)).decode()


def forged(device: Identity) -> str:
    """A binding, signed by the attacker, that names the victim as its device's owner."""
    binding = OwnerBinding(owner=VICTIM.peer_id, device=device.peer_id)
    return base64.b64encode(sign_message(ATTACKER, binding, OwnerBinding.domain)).decode()


def step(number: int, *shares: tuple[Identity, int, int]) -> AppliedStep:
    """Shares as (peer, stage, tokens)."""
    parts = tuple(StageShare(w.peer_id, StageIndex(s), 1, tokens) for w, s, tokens in shares)
    return AppliedStep(Step(number), 1, 2.0, 8, 4.0, 1.0, 0.1, parts)


# ---------------------------------------------------------------- accepted bindings

A, B, C, D = (PeerId(name) for name in "ABCD")


def test_a_chain_of_owners_is_refused_at_either_end() -> None:
    book = DeviceOwners({B: C})
    with pytest.raises(ProtocolError, match="is itself bound to C"):
        book.enter(A, B)
    with pytest.raises(ProtocolError, match="is the owner of other devices"):
        book.enter(C, D)
    assert (book.of(A), book.of(C)) == (None, None)
    book.enter(B, None)
    book.enter(C, D)
    book.enter(A, B)
    assert (book.of(A), book.of(B), book.of(C)) == (B, None, D)


PEERS = st.sampled_from([A, B, C, D])


@given(st.lists(st.tuples(PEERS, st.none() | PEERS)))
def test_no_sequence_of_hellos_creates_a_chain_of_owners(
    hellos: list[tuple[PeerId, PeerId | None]],
) -> None:
    book, last = DeviceOwners(), dict[PeerId, PeerId]()
    for device, owner in hellos:
        if device == owner:
            continue  # refused with the signature
        try:
            book.enter(device, owner)
        except ProtocolError:
            continue
        last.pop(device, None)
        if owner is not None:
            last[device] = owner
    assert [book.of(one) for one in (A, B, C, D)] == [last.get(one) for one in (A, B, C, D)]
    assert effective_bindings(last) == last


@pytest.mark.parametrize("text", ["", "AAAA", "not base64!", "=" * 2000])
def test_an_invalid_binding_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ProtocolError):
        named_owner(FIRST.peer_id, text)


# ---------------------------------------------------------------- stored bindings


def test_both_kinds_of_database_keep_the_newest_binding_and_rows_are_owners(
    new_place: Callable[[], DatabaseLocation], tmp_path: Path
) -> None:
    at = new_place()
    store = open_store(at)
    store.next_generation()
    reader = DatabaseReader(at, WORK_SHARES)
    first, second = bound(VICTIM, FIRST), bound(VICTIM, SECOND)
    run_kit.write(
        store, PeerSeen(VICTIM.peer_id, "vera", "the Vs", ""),
        PeerSeen(FIRST.peer_id, "vera", "the Vs", first),
        step(1, (VICTIM, 0, 16), (FIRST, 1, 16), (SECOND, 1, 16)),
    )  # fmt: skip
    assert store.read(read_owners) == {FIRST.peer_id: VICTIM.peer_id}
    assert [row.devices for row in reader.refresh(NOW).contributions] == [2, 1]
    run_kit.write(store, PeerSeen(SECOND.peer_id, "second", None, second))
    run_kit.write(store, PeerSeen(SECOND.peer_id))  # its session ends
    [row] = reader.refresh(NOW).contributions
    assert (row.name, row.team, row.tokens, row.devices) == ("vera", "the Vs", 48, 2 + 1)
    assert (row.stages, row.steps, row.microbatches) == ((0, 1), 1, 3)
    assert row.credit == pytest.approx(16 * 0.25 + 32 * 0.75)
    assert row.id_end == VICTIM.peer_id[-8:]
    assert [team.members for team in reader.refresh(NOW).teams] == [1]
    with open_for_reading(at) as connection:
        [shown] = contributors(connection)
    assert (shown.peer, shown.name, shown.devices, shown.tokens) == (
        VICTIM.peer_id, "vera", 3, 48,
    )  # fmt: skip
    run_kit.write(store, PeerSeen(FIRST.peer_id, "alone", None, ""))
    assert {row.devices for row in reader.refresh(NOW).contributions} == {2, 1}
    assert (
        reader.refresh(NOW).contributions
        == DatabaseReader(at, WORK_SHARES).refresh(NOW).contributions
    )
    store.close()
    again = open_store(at)
    assert again.read(read_owners) == {SECOND.peer_id: VICTIM.peer_id}
    again.close()
    copy_database(at, tmp_path / "as a backup.sqlite3")
    with open_for_reading(at) as here, open_for_reading(tmp_path / "as a backup.sqlite3") as copy:
        assert read_contributions(here) == read_contributions(copy)
        assert read_owners(here) == read_owners(copy)


def test_a_record_with_a_binding_that_does_not_hold_is_not_written(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run.sqlite3")
    store.next_generation()
    with pytest.raises(ProtocolError):
        trio.run(store.write, PeerSeen(ATTACKER.peer_id, "x", None, forged(ATTACKER)))
    assert store.read(read_owners) == {}
    store.close()


# ---------------------------------------------------------------- over the network


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "a run")


async def hello(invite: Invite, who: Identity, **changes: object) -> str:
    """Attach and leave: "welcome", or the reason of the refusal."""
    async with client(invite, who) as one:
        await one.send(hello_for(invite, **changes))
        answer = await one.receive()
    assert isinstance(answer, Welcome | Refused)
    return answer.reason if isinstance(answer, Refused) else "welcome"


def owners(folder: RunFolder) -> dict[PeerId, PeerId]:
    with open_for_reading(folder.database) as connection:
        return read_owners(connection)


async def test_a_binding_is_kept_over_a_restart_and_a_hello_without_one_ends_it(
    folder: RunFolder,
) -> None:
    async with served(folder) as run:
        assert await hello(run.invite, FIRST, owner=bound(VICTIM, FIRST)) == "welcome"
    assert owners(folder) == {FIRST.peer_id: VICTIM.peer_id}
    async with served(folder) as run:
        # The owner's own hello, while its device is away, starts no chain.
        refused = await hello(run.invite, VICTIM, owner=bound(SECOND, VICTIM))
        assert "is the owner of other devices" in refused
        assert await hello(run.invite, FIRST) == "welcome"
        assert await hello(run.invite, VICTIM, owner=bound(SECOND, VICTIM)) == "welcome"
    assert owners(folder) == {VICTIM.peer_id: SECOND.peer_id}


async def test_a_forged_binding_adds_nothing_to_the_victims_row_and_does_not_hide_under_it(
    folder: RunFolder,
) -> None:
    """Signed by itself, copied from the victim's device, and for a device that it does not have."""
    stolen = bound(VICTIM, FIRST)
    async with served(folder) as run:
        assert await hello(run.invite, VICTIM, name="vera") == "welcome"
        assert await hello(run.invite, FIRST, name="vera", owner=stolen) == "welcome"
        for binding in (forged(ATTACKER), stolen, bound(ATTACKER, FIRST), "AAAA"):
            refused = await hello(run.invite, ATTACKER, name="vera", owner=binding)
            assert "owner binding" in refused or "signed message" in refused
        # It may still use the victim's name, and has a row of its own.
        assert await hello(run.invite, ATTACKER, name="vera") == "welcome"
    store = open_store(folder.database)
    store.next_generation()
    await store.write(step(1, (VICTIM, 0, 1), (FIRST, 0, 2), (ATTACKER, 0, 4)))
    store.close()
    rows = DatabaseReader(folder.database, WORK_SHARES).refresh(NOW).contributions
    assert [(row.id_end, row.name, row.tokens) for row in rows] == [
        (ATTACKER.peer_id[-8:], "vera", 4), (VICTIM.peer_id[-8:], "vera", 3),
    ]  # fmt: skip


def test_the_bindings_of_any_number_of_devices_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_owners, "MAX_DEVICES", 3)
    owners = DeviceOwners()
    for number in range(6):
        owners.enter(PeerId(f"device-{number}"), PeerId(f"owner-{number}"))
        owners.enter(PeerId("device-0"), PeerId("owner-0"))  # comes again and again
    known = [number for number in range(6) if owners.of(PeerId(f"device-{number}"))]
    assert known == [0, 4, 5]
    # Of a forgotten owner no trace is left: its key may be a device of another one.
    owners.enter(PeerId("owner-1"), PeerId("owner-9"))
