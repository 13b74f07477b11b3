"""The table of a step and its leases: what counts, what is leased again, and with which mask."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.events import AppliedStep, Command, Note, ReceiptsVerified
from swarm_coordinator.core.rules.microbatches.cells import may_count
from swarm_coordinator.core.rules.microbatches.leases import inflight_windows, pipeline_windows
from swarm_coordinator.core.rules.release import Release, release
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import Lease, Leaving, Mask, MaskRequest, NotCounted, NotFinite
from swarm_shared.scheduling.claimed_rates import MAX_RATE_OVER_MEDIAN


def collecting(**options: Any) -> Bench:
    return joined("a0", "b0", "a1", "b1", **options)


def leased(
    bench: Bench, commands: list[Command] | None = None
) -> list[tuple[str, int, int, tuple[int, ...]]]:
    """(trainer, lease, microbatch, mask) of all leases, in the order of the microbatches."""
    found = [
        (str(peer), lease.lease, m.microbatch, m.accumulate)
        for peer in sorted(bench.run.peers)
        for lease in bench.sent(peer, Lease, commands)
        for m in lease.microbatches
    ]
    return sorted(found, key=lambda entry: entry[2])


def test_all_microbatches_of_a_step_are_leased_to_the_trainers_in_equal_parts() -> None:
    bench = collecting(microbatches=8, starting=2)
    leases = leased(bench)
    assert [m for _, _, m, _ in leases] == list(range(8))
    assert {mask for *_, mask in leases} == {(0, 1)}
    assert sorted(peer for peer, *_ in leases) == sorted(["a0", "a1", "b0", "b1"] * 2)


def test_a_run_whose_peers_all_leave_begins_no_step_and_reports_it() -> None:
    bench = joined("a0", "a1")
    bench.fill()
    for peer in ("a0", "a1"):
        bench.send(peer, Leaving())
    bench.average_all()
    for peer in ("a0", "a1"):
        bench.apply(peer)
    assert bench.run.phase is RunPhase.WAITING
    assert bench.run.waiting_reason == "a peer that stays"


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 2},
        {"generation": 2},
        {"microbatch": 2},
        {"tokens": 3},
        {"stage": 0, "loss_sum": None},
        {"loss_sum": None},
        {"loss_sum": 1.7e308},
        {"peer": "stranger"},
    ],
)
def test_a_receipt_that_cannot_be_right_does_not_count(changes: dict[str, Any]) -> None:
    bench = collecting()
    # Past the parser's check, which refuses some of these already.
    bad = bench.receipt("a1", 0).model_copy(update=changes)
    bench.resolve("a0", 0, lease=0, receipts=(bad,))
    assert not bench.step().table
    bench.resolve("a0", 0, lease=0, receipts=(bench.receipt("a1", 0),))
    assert list(bench.step().table) == [(0, 1)]


def test_only_a_receipt_that_could_count_is_worth_a_check_of_its_signature() -> None:
    bench = joined("a0", "b0", "a1", "b1")

    def worth(sender: str, of: str = "a0", **changes: Any) -> bool:
        return may_count(bench.run, PeerId(sender), bench.receipt(of, 0, **changes))

    assert worth("a0")
    assert worth("a1")
    assert not worth("a0", step=Step(2))
    assert not worth("a0", microbatch=MicrobatchIndex(1000))
    assert not worth("a1", stage=StageIndex(1))  # a0 holds another stage
    assert not worth("a1", peer=PeerId("x"))
    assert worth("x", peer=PeerId("x"))  # of a hello, before its peer is attached


def test_receipts_of_a_peer_that_is_fetching_its_stage_anew_do_not_count() -> None:
    bench = joined("a0", "b0", "c0", "a1", microbatches=2)
    bench.fill()
    bench.average_all()
    for peer in ("a0", "b0", "a1"):
        bench.apply(peer)
    bench.apply("c0", digest="odd", norm=2.0)
    assert bench.run.phase is RunPhase.COLLECT
    bench.resolve("a0", 0, lease=0, receipts=(bench.receipt("c0", 0),))
    assert not bench.step().table


def test_a_peer_reports_its_own_receipts_only() -> None:
    bench = collecting()
    others = bench.receipt("b0", 0)
    bench.event(_reported(bench, "a0", others))
    assert not bench.step().table
    bench.event(_reported(bench, "b0", others))
    assert list(bench.step().table) == [(0, 0)]


def _reported(bench: Bench, peer: str, receipt: Receipt) -> ReceiptsVerified:
    return ReceiptsVerified(bench.session(peer), PeerId(peer), (receipt,))


def relay(bench: Bench, trainer: str, *receipts: Receipt) -> None:
    """A trainer answers a lease with receipts of other peers."""
    (microbatch, lease), *_ = (
        (m, lease) for m, lease in bench.step().leases.items() if lease.trainer == trainer
    )
    bench.resolve(trainer, microbatch, lease.lease, receipts=receipts)


def lost_in_between(bench: Bench, peer: str, how: str) -> None:
    """The peer loses what it had counted."""
    if how == "restart":
        bench.lose(peer)
        bench.join(peer, 0)
        return
    if how == "resync":
        bench.send(
            peer, NotFinite(step=Step(1), microbatch=MicrobatchIndex(0), sender=PeerId(peer))
        )
        bench.ready(peer)
        return
    bench.report(peer, 5)
    bench.fill()
    assert bench.run.phase is RunPhase.CLOSING
    bench.failed(peer, **{how: {"reset": True, "missing": (5,)}[how]})


@pytest.mark.parametrize("how", ["restart", "resync", "reset", "missing"])
def test_a_receipt_of_a_lost_gradient_counts_from_its_signer_alone(how: str) -> None:
    bench = collecting(microbatches=8)
    kept = bench.receipt("b0", 5)
    lost_in_between(bench, "b0", how)
    relay(bench, "a0", kept)
    assert (5, 0) not in bench.step().table
    bench.report("b0", 5)
    assert bench.step().table[5, 0].peer == "b0"


def test_what_an_excluded_peer_has_reported_counts_again_when_it_is_readmitted() -> None:
    """It still has the gradient and reports it once; only its trainers repeat the receipt."""
    bench = collecting(microbatches=8)
    bench.lose("b0")
    bench.join("b0", 0)
    bench.report("b0", 5)
    state = bench.peer("b0")
    release(bench.run, state, Release.STEP, bench.now)
    bench.lose("a0")
    assert (5, 0) not in bench.step().table
    bench.tick(1.0)
    relay(bench, "a1", bench.receipt("b0", 5), bench.receipt("b0", 6))
    assert bench.step().table[5, 0].peer == "b0"
    assert (6, 0) not in bench.step().table


def test_each_further_peer_that_counts_a_cell_has_done_its_work_twice() -> None:
    bench = joined("a0", "b0", "c0", "a1")
    for peer in ("a0", "b0", "b0", "a0", "c0"):
        bench.report(peer, 0)
    assert bench.step().table[0, 0].peer == "a0"
    work = bench.run.statistics.work
    assert (work.counted, work.duplicated) == (1, 2)


def test_absurd_losses_that_add_up_to_infinity_do_not_end_the_coordinator() -> None:
    bench = Bench(stages=1, microbatches=4)
    bench.join("a0", 0)
    for microbatch in range(4):
        huge = bench.receipt("a0", microbatch, stage=0).model_copy(update={"loss_sum": 1e308})
        bench.resolve("a0", microbatch, lease=0, receipts=(huge,))
    assert bench.run.phase is RunPhase.COLLECT


def test_a_failed_microbatch_is_leased_again_after_a_pause_for_the_stages_that_lack_it() -> None:
    bench = collecting(starting=2)
    trainer, lease, microbatch, _ = leased(bench)[0]
    bench.report("a1", microbatch)
    commands = bench.resolve(trainer, microbatch, lease, ok=False, reason="gone")
    assert any("leased again" in n.text for n in bench.commands(Note, commands))
    assert not leased(bench, commands)
    assert not leased(bench, bench.tick(0.9))
    assert not any(one.is_copy for _, one in bench.leased())
    commands = bench.tick(0.2)
    [(_, again, same, mask)] = leased(bench, commands)
    assert [one.is_copy for _, one in bench.leased(commands)] == [True]
    assert (same, mask) == (microbatch, (0,))
    assert again > lease


def test_a_microbatch_that_a_leaving_trainer_gives_back_is_no_failure_to_report() -> None:
    bench = collecting(starting=2)
    trainer, lease, microbatch, _ = leased(bench)[0]
    commands = bench.resolve(trainer, microbatch, lease, ok=False, reason="")
    assert bench.commands(Note, commands) == []
    again = [
        m for commands in (bench.tick(0.9), bench.tick(0.2)) for *_, m, _ in leased(bench, commands)
    ]
    assert again == [microbatch]


@pytest.mark.parametrize("ok", [False, True], ids=["fails", "claims to have delivered"])
def test_a_microbatch_goes_to_every_trainer_before_one_that_did_not_bring_it_gets_it_again(
    ok: bool,
) -> None:
    """A trainer that fails at once has the fewest leases, and would keep it for ever."""
    bench = collecting(microbatches=8, starting=2)
    trainer, lease, microbatch, _ = leased(bench)[0]
    order = [trainer]
    for _ in range(11):
        bench.resolve(trainer, microbatch, lease, ok=ok)
        again = [one for one in leased(bench, bench.tick(1.1)) if one[2] == microbatch]
        [(trainer, lease, _, _)] = again
        order.append(trainer)
    for tried in (order[:4], order[4:8], order[8:]):
        assert sorted(tried) == ["a0", "a1", "b0", "b1"]


def test_a_lease_that_is_not_answered_runs_out() -> None:
    bench = collecting(starting=2, limits={"lease_seconds": 20.0})
    assert len(leased(bench)) == 2
    assert not leased(bench, bench.tick(19.0))
    assert len(leased(bench, bench.tick(1.5))) == 2


def test_a_trainer_that_delivers_keeps_its_leases_however_long_its_step_takes() -> None:
    bench = collecting(microbatches=8, starting=2, limits={"lease_seconds": 20.0})
    driven = {
        trainer: [
            (lease, microbatch) for one, lease, microbatch, _ in leased(bench) if one == trainer
        ]
        for trainer in ("a0", "b0", "a1", "b1")
    }
    assert not leased(bench, bench.tick(15.0))
    for trainer in ("a0", "b0", "a1"):
        lease, first = driven[trainer][0]
        bench.report("a0", first)
        bench.report("a1", first)
        bench.resolve(trainer, first, lease)
    expired = leased(bench, bench.tick(10.0))
    assert [microbatch for *_, microbatch, _ in expired] == [m for _, m in driven["b1"]]


def test_a_trainer_that_falsely_reports_delivery_loses_its_leases() -> None:
    bench = collecting(microbatches=8, starting=2, limits={"lease_seconds": 20.0})
    (trainer, lease, first, _), (*_, second, _) = [x for x in leased(bench) if x[0] == "a0"]
    bench.tick(15.0)
    bench.resolve(trainer, first, lease)
    assert second in [microbatch for _, _, microbatch, _ in leased(bench, bench.tick(5.5))]


def test_the_leases_of_a_trainer_that_died_go_to_others() -> None:
    bench = collecting(starting=2)
    trainer, _, microbatch, _ = leased(bench)[0]
    bench.lose(trainer)
    [(other, _, same, _)] = leased(bench, bench.tick(1.0))
    assert (same, other != trainer) == (microbatch, True)


def test_an_answer_to_a_lease_that_was_granted_anew_to_its_trainer_changes_nothing() -> None:
    bench = Bench(starting=1, limits={"lease_seconds": 20.0})
    bench.join("a0", 0)
    bench.join("a1", 1)
    trainer, lease, microbatch, _ = leased(bench)[0]
    bench.tick(21.0)  # the other trainer's turn
    bench.tick(21.0)
    granted = bench.step().leases[MicrobatchIndex(microbatch)]
    assert (granted.trainer, granted.lease != lease) == (trainer, True)
    bench.resolve(trainer, microbatch, lease, ok=False, reason="late")
    assert bench.step().leases[MicrobatchIndex(microbatch)] == granted


def test_an_answer_of_another_peer_than_the_trainer_of_a_lease_changes_nothing() -> None:
    bench = collecting(starting=2)
    trainer, lease, microbatch, _ = leased(bench)[0]
    granted = bench.step().leases[MicrobatchIndex(microbatch)]
    other = next(peer for peer in ("a0", "b0") if peer != trainer)
    bench.resolve(other, microbatch, lease, ok=False, reason="not its own")
    assert bench.step().leases[MicrobatchIndex(microbatch)] == granted


def test_lease_numbers_of_another_generation_are_never_used_again() -> None:
    first, second = Bench(), Bench.restarted(0)
    for bench in (first, second):
        bench.join_all("a0", "a1")
    assert {n for _, n, *_ in leased(first, first.log)}.isdisjoint(
        {n for _, n, *_ in leased(second, second.log)}
    )


def test_nothing_is_leased_while_a_stage_has_no_peer() -> None:
    bench = collecting()
    bench.resolve_all()
    bench.lose("a1")
    bench.lose("b1")
    assert not leased(bench, bench.tick(9.0))
    bench.join("c1", 1)
    assert [m for _, _, m, _ in leased(bench)] == [0, 1]


def test_survivors_report_before_what_a_dead_peer_held_is_leased_again() -> None:
    bench = collecting(microbatches=1)
    bench.report("a0", 0)
    for microbatch in list(bench.step().leases):
        del bench.step().leases[microbatch]
    bench.lose("a0")
    assert not leased(bench, bench.tick(0.4))
    bench.report("a1", 0)
    assert [mask for *_, mask in leased(bench, bench.tick(0.2))] == [(0,)]


def test_a_leaving_trainer_gets_no_new_lease() -> None:
    bench = collecting(starting=2, limits={"lease_seconds": 20.0})
    bench.report("a0", 0)
    bench.send("a0", Leaving())
    commands = bench.tick(25.0)
    assert leased(bench, commands)
    assert "a0" not in {peer for peer, *_ in leased(bench, commands)}


# ---- masks


def ask(bench: Bench, peer: str, microbatch: int, step: int = 1) -> list[Command]:
    return bench.send(
        peer,
        MaskRequest(request=5, step=Step(step), microbatch=MicrobatchIndex(microbatch)),
    )


def test_a_mask_waits_out_one_reporting_interval_and_knows_what_came_in_meanwhile() -> None:
    bench = collecting()
    assert not bench.sent("a0", Mask, ask(bench, "a0", 1))
    assert not bench.sent("a0", Mask, bench.tick(0.5))
    bench.report("b1", 1)
    [mask] = bench.sent("a0", Mask, bench.tick(0.2))
    assert (mask.request, mask.accumulate) == (5, (0,))


def test_a_mask_is_answered_once_and_when_it_is_due() -> None:
    bench = collecting()
    ask(bench, "a0", 1)
    bench.now += 1.2 * bench.manifest.limits.receipt_interval_seconds
    assert len(bench.sent("a0", Mask, bench.event_tick())) == 1
    assert not bench.sent("a0", Mask, bench.event_tick())


def test_a_mask_of_the_following_step_is_answered_while_this_one_closes() -> None:
    bench = joined("a0", "a1", staleness=1)
    bench.fill()
    bench.event(_reported(bench, "a1", bench.receipt("a1", 1, step=Step(2))))
    assert bench.run.phase is RunPhase.CLOSING
    ask(bench, "a0", 1, step=2)
    [mask] = bench.sent("a0", Mask, bench.tick(1.0))
    assert mask.accumulate == (0,)


def test_a_mask_for_a_step_that_is_over_is_empty() -> None:
    bench = collecting()
    ask(bench, "a0", 1)
    bench.one_step()
    [mask] = bench.sent("a0", Mask, bench.tick(1.0))
    assert mask.accumulate == ()


def test_no_mask_is_answered_to_a_peer_that_is_gone() -> None:
    bench = collecting()
    ask(bench, "a0", 1)
    bench.lose("a0")
    assert not bench.sent("a0", Mask, bench.tick(1.0))


def test_the_loss_does_not_depend_on_the_order_of_the_receipts() -> None:
    losses = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        bench = joined("a0", "a1", microbatches=4)
        for microbatch in order:
            bench.report("a1", microbatch)
        bench.report("a0", *order)
        bench.average_all()
        losses.append(bench.records(AppliedStep)[0].loss)
    assert losses[0] == losses[1]


# ---------------------------------------------------------------- delivered and not yet counted


def delivered(bench: Bench, *owing: str, **changes: Any) -> tuple[str, int]:
    """Microbatch 0 is delivered, and these peers owe their cells; the trainer and its lease."""
    lease = bench.step().leases[MicrobatchIndex(0)]
    peers = tuple(map(PeerId, owing))
    bench.resolve(lease.trainer, 0, lease.lease, owing=peers, **changes)
    return str(lease.trainer), lease.lease


def leased_again(bench: Bench, commands: list[Command]) -> list[tuple[int, tuple[int, ...]]]:
    return [(m, mask) for _, _, m, mask in leased(bench, commands) if m == 0]


def test_a_microbatch_that_peers_owe_is_not_leased_again_while_they_count_it() -> None:
    bench = collecting()
    delivered(bench, "a1", "a0")
    assert leased_again(bench, bench.tick(10)) == []
    assert leased_again(bench, bench.report("a1", 0)) == []
    bench.report("a0", 0)
    assert leased_again(bench, bench.tick(10)) == []
    assert bench.step().owing == {}


def test_a_microbatch_without_its_cells_that_no_peer_owes_is_leased_again_soon() -> None:
    bench = collecting()
    delivered(bench)
    assert leased_again(bench, bench.tick(2)) == [(0, (0, 1))]


def test_what_a_peer_owes_is_leased_again_when_it_gives_it_up() -> None:
    bench = collecting()
    delivered(bench, "a1", "a0")
    bench.report("a0", 0)
    bench.tick(5)
    given_up = bench.send("a1", NotCounted(step=Step(1), microbatches=(MicrobatchIndex(0),)))
    assert leased_again(bench, given_up) == [(0, (1,))]


def test_what_a_peer_owes_is_leased_again_when_it_is_lost() -> None:
    bench = collecting()
    trainer, _ = delivered(bench, "b1", "b0")
    bench.report("b0", 0)
    bench.tick(5)
    bench.lose("b1")
    assert leased_again(bench, bench.tick(2)) == [(0, (1,))]
    assert trainer in bench.run.peers


def test_a_peer_that_owes_for_as_long_as_a_lease_lasts_is_not_waited_for() -> None:
    bench = collecting()
    delivered(bench, "a1")
    bench.report("a0", 0)
    seconds = bench.manifest.limits.lease_seconds
    assert leased_again(bench, bench.tick(seconds - 2)) == []
    assert leased_again(bench, bench.tick(4)) == [(0, (1,))]


def test_only_peers_whose_cells_are_missing_are_waited_for() -> None:
    bench = collecting()
    bench.report("a1", 0)
    delivered(bench, "a1", "stranger")
    assert bench.step().owing == {}


def test_a_failed_delivery_is_owed_by_no_peer() -> None:
    bench = collecting()
    delivered(bench, "a1", ok=False, reason="none")
    assert bench.step().owing == {}


def test_a_trainer_whose_microbatch_is_counted_late_keeps_its_other_leases() -> None:
    bench = collecting()
    trainer, _ = delivered(bench, "a1", "a0")
    bench.tick(5)
    bench.report("a1", 0)
    assert bench.peer(trainer).delivered_at < bench.now
    bench.report("a0", 0)
    assert bench.peer(trainer).delivered_at == bench.now


@given(stages=st.integers(1, 64), queue=st.integers(1, 1024), pipelines=st.integers(2, 1000))
def test_the_fastest_peer_that_counts_has_room_for_its_share_of_what_is_in_flight(
    stages: int, queue: int, pipelines: int
) -> None:
    least, most = pipeline_windows(stages, queue, pipelines)
    assert 1 <= least <= most <= queue
    assert most * MAX_RATE_OVER_MEDIAN <= queue or most == least


def test_a_receipt_of_the_following_step_counts_before_its_signer_has_applied_this_one() -> None:
    bench = joined("a0", "a1", staleness=1)
    bench.fill()
    bench.average_all()
    assert bench.run.phase is RunPhase.APPLYING
    bench.report("a0", 1)
    bench.apply_all()
    assert bench.step().step == 2
    assert bench.step().table.held_by(PeerId("a0")) == ((1, 0),)


@pytest.mark.parametrize("pipelines", [1, 2, 3])
def test_one_trainer_keeps_as_much_in_flight_as_all_pipelines_need(pipelines: int) -> None:
    bench = joined("a0", "b0", "c0", "a1")
    for peer in ("b0", "c0")[pipelines - 1 :]:
        bench.lose(peer)
    queue = bench.manifest.limits.stage_queue
    windows = pipeline_windows(2, queue, pipelines)
    assert inflight_windows(bench.run, 1) == tuple(pipelines * each for each in windows)
