"""The indices of the peer table agree with a scan of all peers after any changes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kits.swarm_world.facts import Options, manifest_of
from swarm_coordinator.core.events import SessionNumber
from swarm_coordinator.core.state.history import RunHistory
from swarm_coordinator.core.state.peer_table import PeerTable
from swarm_coordinator.core.state.peers import (
    PeerPhase,
    PeerProfile,
    PeerState,
    StageTransfer,
)
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.protocol import AddressUpdate, CarrierAddress, Reachability

STAGES = 2
NAMES = ("a", "b", "c", "d")
CHANGES = (
    "join", "lose", "sync", "source", "unsource", "hold", "move", "cancel", "release", "apply",
    "pause", "resume", "leave", "exclude", "readmit", "address", "rate", "step",
)  # fmt: skip

changes = st.lists(
    st.tuples(
        st.sampled_from(CHANGES), st.sampled_from(NAMES), st.integers(0, STAGES - 1),
    ),
    min_size=20,
    max_size=60,
)  # fmt: skip


def contact(addresses: tuple[str, ...], carrier: CarrierAddress | None) -> AddressUpdate:
    return AddressUpdate(
        addresses=addresses, carrier=carrier, reachability=Reachability.UNKNOWN, offers_relay=False
    )


def peer(name: str, carrier: str) -> PeerState:
    address = CarrierAddress(peer=carrier, addresses=("a",), binding="b")
    return PeerState(
        peer=PeerId(name), session=SessionNumber(1),
        profile=PeerProfile(name, "cpu", 10, None, None),
        contact=contact((), address), certificate="", last_heard=0.0,
    )  # fmt: skip


def change(table: PeerTable, history: RunHistory, kind: str, name: str, stage: StageIndex) -> None:
    """Carry out a change, if the peer's state permits it."""
    found = table.get(PeerId(name))
    if kind == "join":
        table[PeerId(name)] = peer(name, f"p2pd-{stage}")
    elif kind == "step":
        history.version = Version(history.version + 1)
    elif found is None:
        return
    elif kind == "lose":
        del table[found.peer]
    elif kind == "sync" and found.phase is PeerPhase.ADMITTED:
        table.begin_transfer(found, StageTransfer(stage))
    elif kind == "source" and found.transfer is not None:
        table.assign_source(found, found.transfer, 1.0)
    elif kind == "unsource" and found.transfer is not None:
        table.lose_source(found, found.transfer)
    elif kind == "hold":
        table.hold(found, stage, history.version)
    elif kind == "move" and found.phase is PeerPhase.READY and found.stage != stage:
        table.begin_transfer(found, StageTransfer(stage))
    elif kind == "cancel" and found.moving is not None:
        table.cancel_move(found)
    elif kind == "release":
        table.release_stage(found)
    elif kind == "apply" and found.phase is PeerPhase.READY:
        table.set_version(found, history.version)
    elif kind in ("pause", "resume"):
        table.set_paused(found, kind == "pause")
    elif kind == "leave":
        table.set_leaving(found, 1.0)
    elif kind == "exclude":
        table.exclude(found)
    elif kind == "readmit":
        table.readmit(found)
    elif kind == "address":
        table.set_contact(found, contact((f"address-{stage}",), None))
    elif kind == "rate":
        # Smaller changes wait for the next step.
        table.record_rates(found, 1.0, 0, 4.0**stage, 2.0 + stage, math.inf, math.inf)


def check(table: PeerTable, history: RunHistory) -> None:
    peers = list(table.values())
    syncing = {p.peer: p.transfer for p in peers if p.phase is PeerPhase.SYNCING}
    assert table.syncing == syncing
    assert table.unsourced == {k: t for k, t in syncing.items() if t and not t.source_assigned}
    assert table.movers == {p.peer: p.moving for p in peers if p.moving is not None}
    assert set(table.leavers) == {p.peer for p in peers if p.leaving}
    carriers = {p.contact.carrier.peer for p in peers if p.contact.carrier is not None}
    assert {c for c in ("p2pd-0", "p2pd-1") if table.admits(PeerId(c))} == carriers
    assert table.excluded <= set(table)
    for each in (p for p in peers if p.stage is not None):
        assert table.record_of(each).accepts_work == (not each.leaving and not each.paused)
    unheld, idle = set(), set()
    for stage in map(StageIndex, range(STAGES)):
        ready = {
            p.peer
            for p in peers
            if p.stage == stage
            and p.phase is PeerPhase.READY
            and p.version == history.version
            and p.peer not in table.excluded
        }
        trainers = {p for p in ready if not table[p].paused and not table[p].leaving}
        working = trainers or {p for p in ready if not table[p].paused}
        assert {p.peer for p in table.ready(stage)} == ready
        assert {p.peer for p in table.working(stage)} == working
        assert {p.peer for p in table.trainers() if p.stage == stage} == trainers
        assert {p.peer for p in table.at(stage)} == {p.peer for p in peers if p.stage == stage}
        bound = [p for p in peers if p.goes_to == stage]
        assert {p.peer for p in table.bound_for(stage)} == {p.peer for p in bound}
        counted = [p for p in bound if not p.leaving and not p.paused]
        assert table.stage_rows()[stage].peers == len(counted)
        records = table.roster()[stage]
        assert {r.peer for r in records if r.accepts_work} == working
        for record in records:
            found = table[record.peer]
            assert record.stage == stage
            assert record.addresses == found.contact.addresses
            assert record.microbatches_per_second == found.rates.microbatches_per_second
        unheld |= set() if ready else {stage}
        idle |= set() if working else {stage}
    assert (table.unheld(), table.idle()) == (unheld, idle)
    assert table.has_complete_pipeline() is (not idle and bool(table.trainers()))


@given(changes)
def test_every_index_agrees_with_a_scan_of_the_peers(steps: list[tuple[str, str, int]]) -> None:
    history = RunHistory(Version(0), None, None, False, set())
    table = PeerTable(manifest_of(Options(stages=STAGES)), history)
    for place, name in enumerate(NAMES):
        table[PeerId(name)] = peer(name, f"p2pd-{place % STAGES}")
        table.hold(table[PeerId(name)], StageIndex(place % STAGES), history.version)
    check(table, history)
    for kind, name, stage in steps:
        change(table, history, kind, name, StageIndex(stage))
        check(table, history)
