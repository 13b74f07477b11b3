"""Rounds of stages that are complete while other stages still compute."""

from __future__ import annotations

from typing import Any

from kits.swarm_world.event_bench import OTHER_DIGEST, Bench, joined
from swarm_coordinator.core.events import AppliedStep, Send, VerdictRecord
from swarm_coordinator.core.rules.held_up import PACE_SHARE
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex
from swarm_shared.protocol import AbortRound, Apply, Audit, Close, Drop, Lease

ALL = ("a0", "b0", "a1", "b1")


def collecting(*names: str, **options: Any) -> Bench:
    return joined(*(names or ALL), **options)


def audited(*names: str, share: float = 0.0) -> Bench:
    settings = AuditSettings(share, 0)
    return collecting(*names, audits=AuditBook(settings, lambda: 0.5 if share == 0.0 else 0.0))


def sent_to(bench: Bench, kind: type[Any]) -> set[str]:
    """The peers to which the last event has sent a message of this kind."""
    return {peer for peer in bench.sessions if bench.sent(peer, kind)}


def members(bench: Bench) -> set[str]:
    return set(bench.step().closing.members)


def orders(bench: Bench) -> list[tuple[str, Audit]]:
    return [(str(p), one) for p in bench.run.peers for one in bench.sent(p, Audit, bench.log)]


def agree(bench: Bench, auditor: str, order: Audit) -> None:
    held = bench.step().table[order.microbatch, order.stage].transcript
    bench.audited(auditor, order, held)


# ---- when a round opens


def test_a_stage_averages_as_soon_as_it_is_complete() -> None:
    bench = collecting()
    bench.report("a1", 0)
    assert not members(bench)
    bench.report("b1", 1)
    assert sent_to(bench, Close) == {"a1", "b1"}
    assert bench.close_of("b1").committed == (1,)
    assert bench.run.phase is RunPhase.COLLECT
    bench.averaged("a1")
    bench.averaged("b1")
    assert bench.run.phase is RunPhase.COLLECT
    bench.report("a0", 0, 1)
    assert sent_to(bench, Close) == {"a0", "b0"}
    bench.averaged("a0")
    bench.averaged("b0")
    assert sent_to(bench, Apply) == set(ALL)
    (record,) = bench.records(AppliedStep)
    assert record.attempt_of(StageIndex(0)) != record.attempt_of(StageIndex(1))


def test_both_ends_of_a_tied_model_wait_for_each_other() -> None:
    bench = collecting("a0", "a1", "a2", stages=3, tied=True)
    bench.report("a2", 0, 1)
    assert not members(bench)
    bench.report("a1", 0, 1)
    assert members(bench) == {"a1"}
    bench.report("a0", 0, 1)
    assert members(bench) == {"a0", "a1", "a2"}


def test_a_stage_waits_for_the_audits_of_its_own_cells_alone() -> None:
    bench = audited("a0", "b0", "a1", "b1", share=1.0)
    bench.report("a1", 0, 1)
    assert not members(bench)
    for auditor, order in orders(bench):
        agree(bench, auditor, order)
    assert bench.run.audits.passed == 2
    bench.event_tick()
    assert members(bench) == {"a1", "b1"}
    bench.report("a0", 0, 1)
    assert members(bench) == {"a1", "b1"}, "stage 0 is complete and being audited"


def test_a_stage_whose_audits_have_ended_does_not_wait_for_those_of_another() -> None:
    bench = audited("a0", "b0", "a1", "b1", share=1.0)
    bench.report("a1", 0, 1)
    bench.report("a0", 0, 1)
    for auditor, order in orders(bench):
        if order.stage == 1:
            agree(bench, auditor, order)
    bench.event_tick()
    assert members(bench) == {"a1", "b1"}


def test_a_stage_that_a_peer_joins_waits_for_its_download_and_the_others_do_not() -> None:
    bench = collecting(limits={"join_hold_seconds": 60.0})
    bench.request("c1", 1, wanted_stage=1)
    bench.report("a1", 0, 1)
    assert not members(bench)
    bench.ready("c1")
    bench.event_tick()
    assert members(bench) == {"a1", "b1", "c1"}


def test_a_peer_that_joins_a_stage_which_averages_takes_part_from_the_next_step_on() -> None:
    bench = collecting()
    bench.report("a1", 0, 1)
    bench.request("c1", 1, wanted_stage=1)
    bench.report("a0", 0, 1)
    bench.tick(1.0)
    assert bench.run.phase is RunPhase.CLOSING
    assert "c1" not in members(bench)


# ---- what a round that has opened survives


def test_a_member_that_averages_still_passes_on_what_other_stages_compute_again() -> None:
    bench = collecting()
    bench.report("a1", 0, 1)
    bench.averaged("a1")
    bench.averaged("b1")
    bench.report("a0", 0)
    bench.lose("a0")
    commands = bench.tick(2.0)
    leased = [
        (m.microbatch, m.accumulate)
        for peer in ALL
        for lease in bench.sent(peer, Lease, commands)
        for m in lease.microbatches
    ]
    assert leased == [(0, (0,))], "stage 1 has counted it"
    bench.report("b0", 0, 1)
    bench.tick(2.0)
    bench.averaged("b0")
    assert sent_to(bench, Apply) == {"b0", "a1", "b1"}


def test_a_member_that_dies_once_its_stage_has_averaged_costs_nothing() -> None:
    bench = collecting()
    bench.report("a1", 0)
    bench.report("b1", 1)
    bench.averaged("a1")
    bench.averaged("b1")
    bench.lose("b1")
    assert bench.step().table.filled_of_stage(StageIndex(1)) == 2
    assert members(bench) == {"a1"}


def test_a_stage_whose_round_has_failed_waits_for_the_whole_table() -> None:
    bench = collecting()
    bench.report("a1", 0)
    bench.report("b1", 1)
    bench.lose("b1")
    assert sent_to(bench, AbortRound) == {"a1"}
    bench.report("a1", 1)
    bench.tick(10.0)
    assert not members(bench)
    bench.report("a0", 0, 1)
    bench.tick(10.0)
    assert members(bench) == {"a0", "b0", "a1"}


def test_a_slow_member_has_as_long_as_half_of_the_work_of_the_step_took() -> None:
    bench = collecting("a0", "a1", "b1", "c1")
    bench.tick(30.0)
    bench.report("a1", 0, 1)
    bench.averaged("a1")
    bench.averaged("b1")
    bench.tick(0.9 * PACE_SHARE * 30.0)
    assert members(bench) == {"a1", "b1", "c1"}
    bench.tick(0.2 * PACE_SHARE * 30.0)
    assert members(bench) == {"a1", "b1"}


# ---- what an audit finds afterwards


def test_a_cell_that_contradicts_what_comes_later_is_taken_out_of_an_average_that_stands() -> None:
    bench = audited()
    bench.report("a1", 0, 1)
    bench.averaged("a1")
    bench.averaged("b1")
    bench.report_broken("a0", 0, "output")
    for auditor, order in orders(bench):
        agree(bench, auditor, order)
    sent = [type(one.message) for one in bench.commands(Send, bench.log) if one.peer == "a1"]
    assert sent.index(AbortRound) < sent.index(Drop), "the average ends before a part is taken out"
    assert not members(bench)
    cell = (MicrobatchIndex(0), StageIndex(1))
    assert cell not in bench.step().table
    assert bench.step().table.filled_of_stage(StageIndex(1)) == 1


def test_what_an_expelled_peer_has_counted_does_not_stay_in_an_average() -> None:
    bench = audited("a0", "b0", "a1", "b1", "c1")
    bench.report("a1", 0)
    bench.report("b1", 1)
    for peer in ("a1", "b1", "c1"):
        bench.averaged(peer)
    bench.report_broken("a0", 1, "output")
    done = 0
    while done < len(orders(bench)):
        auditor, order = orders(bench)[done]
        done += 1
        held = bench.step().table.get((order.microbatch, order.stage))
        if held is None:
            continue
        if order.stage == 1:
            false = held.transcript.model_copy(update={"gradient": OTHER_DIGEST})
            distance = 1.0 if order.comparison else None
            bench.audited(auditor, order, false, distance=distance)
        else:
            bench.audited(auditor, order, held.transcript)
    assert {record.peer for record in bench.records(VerdictRecord)} == {"b1"}
    assert "b1" not in bench.run.peers
    assert not members(bench), "the round of stage 1 is aborted, although all had averaged"
    assert not bench.step().table.holds_any(PeerId("b1"))


def test_what_is_found_of_a_step_that_is_decided_does_not_concern_the_next_one() -> None:
    bench = collecting()
    bench.fill()
    bench.average_all()
    bench.run.audits.retracted.add((MicrobatchIndex(0), StageIndex(1)))
    bench.apply("a0")
    assert bench.run.phase is RunPhase.APPLYING
    assert not bench.run.audits.retracted
