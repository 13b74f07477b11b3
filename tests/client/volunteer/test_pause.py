"""A pause at a volunteer's engine: nothing new is taken, nothing that was counted is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from client.pipeline.test_downstream import OneSample, RecordingCoordinator, lease
from client.pipeline.test_pipeline import parcel, world
from client.volunteer.test_volunteer_admission import scene
from kits.waiting import until
from swarm_client.control.status_document import SuspendReason
from swarm_client.control.status_sentence import Suspension
from swarm_client.pipeline.trainer import Trainer
from swarm_client.volunteer import reconnect
from swarm_client.volunteer.pause import GRACE_SECONDS
from swarm_client.volunteer.volunteer import Volunteer
from swarm_shared.base.types import MicrobatchIndex, Step


async def test_what_is_in_flight_may_be_finished_and_is_signed() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as pausing, trio.open_nursery() as n:
        hold = pausing.worker.hold = trio.Event()
        n.start_soon(w.downstream(sender, 1).send, parcel(3))
        await pausing.worker.entered.wait()
        pausing.server.paused = True
        hold.set()
    assert pausing.worker.accumulated == [3]
    assert pausing.holding.account.receipt(Step(1), MicrobatchIndex(3)) is not None


async def test_what_is_not_finished_in_time_is_handed_back_and_another_gets_it_with_a_mask() -> (
    None
):
    async with world() as w, w.peer(0) as sender, w.peer(1) as pausing:
        w.missing = (1,)
        pausing.worker.hold = trio.Event()
        answers = []

        async def send() -> None:
            answers.append(await downstream.send(parcel(5)))

        async with trio.open_nursery() as nursery:
            downstream = w.downstream(sender, 1)
            nursery.start_soon(send)
            await pausing.worker.entered.wait()
            async with w.peer(1) as other:
                pausing.server.paused = True
                pausing.server.hand_back()
                await until(lambda: answers)
    assert w.masks == [(1, 5)]
    assert other.worker.accumulated == [5]
    assert pausing.worker.accumulated == []
    assert pausing.holding.in_flight == 0


async def test_nothing_is_handed_back_once_the_pause_is_over() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as peer, trio.open_nursery() as n:
        hold = peer.worker.hold = trio.Event()
        n.start_soon(w.downstream(sender, 1).send, parcel(5))
        await peer.worker.entered.wait()
        peer.server.paused = True
        peer.server.paused = False
        peer.server.hand_back()
        hold.set()
    assert peer.worker.accumulated == [5]
    assert w.masks == []


async def test_a_trainer_that_stops_hands_back_what_it_has_not_begun_and_what_comes_later() -> None:
    coordinator = RecordingCoordinator()
    said = coordinator.results
    async with world() as w, w.peer(0), w.peer(0) as own, trio.open_nursery() as nursery:
        w.publish(own)
        trainer = Trainer(coordinator, nursery)
        trainer.oldest_step_is(Step(1))
        trainer.begin(OneSample(), w.downstream(own, 0))
        trainer.take(lease(0, 1, 2))  # one is begun
        trainer.pause()
        assert [(r.microbatch, r.ok, r.reason) for r in said] == [
            (1, False, ""),
            (2, False, ""),
        ]
        trainer.take(lease(3))
        assert said[-1].microbatch == 3
        trainer.resume()
        trainer.take(lease(4))
        assert len(said) == 3
        nursery.cancel_scope.cancel()


async def test_a_trainer_drives_two_steps_and_what_the_older_one_lacks_first() -> None:
    coordinator = RecordingCoordinator()
    said = coordinator.results
    async with world() as w, w.peer(0) as first, w.peer(1) as last, w.peer(0) as own:
        w.publish(own)
        for peer in (first, last):
            peer.holding.account.staleness = 1
        hold = first.worker.hold = trio.Event()
        async with trio.open_nursery() as nursery:
            to_first = w.downstream(own, 0)
            trainer = Trainer(coordinator, nursery)
            trainer.oldest_step_is(Step(1))
            trainer.begin(OneSample(), to_first)
            trainer.take(lease(0))
            await first.worker.entered.wait()
            trainer.take(lease(1, 2, step=2))
            trainer.take(lease(3))  # leased again
            hold.set()
    assert [(r.step, r.microbatch, r.ok) for r in said] == [
        (1, 0, True),
        (1, 3, True),
        (2, 1, True),
        (2, 2, True),
    ]


async def test_the_coordinator_receives_a_pause_and_of_its_end_at_once(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.until(lambda: s.script.beats >= 1)
        s.volunteer.suspend(SuspendReason.USER_ACTIVE, until=17.0)
        assert s.volunteer.suspended == Suspension(SuspendReason.USER_ACTIVE, 17.0)
        await s.until(lambda: s.script.paused[-1:] == [True])
        s.volunteer.suspend(SuspendReason.TOO_HOT)
        assert s.volunteer.suspended == Suspension(SuspendReason.TOO_HOT)
        s.volunteer.resume()
        assert s.volunteer.suspended is None
        await s.until(lambda: s.script.paused[-1:] == [False])


async def test_a_volunteer_that_leaves_during_a_pause_leaves_when_it_ends(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.volunteer.suspend(SuspendReason.PAUSED_BY_USER)
        s.volunteer.leave()
        s.volunteer.resume()
        await s.until(lambda: s.volunteer.attachment.finished)


async def test_a_long_pause_ends_the_session_in_order_and_its_end_begins_another_one(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, long_pause_seconds=GRACE_SECONDS + 0.1) as s:
        await s.until(lambda: s.volunteer.attachment.session is not None)
        s.volunteer.suspend(SuspendReason.ON_BATTERIES)
        await s.until(lambda: s.volunteer.attachment.session is None)
        await s.until(lambda: s.volunteer.pause.over.statistics().tasks_waiting)
        assert len(s.script.hellos) == 1
        assert not s.volunteer.attachment.finished
        s.volunteer.resume()
        await s.script.sessions(2)
        assert s.script.hellos[1].stage is None
        await s.until(lambda: s.volunteer.attachment.session is not None)


async def test_a_long_pause_gives_the_stage_up_whether_the_coordinator_agrees_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep the memory of a paused machine, and have it close steps."""
    monkeypatch.setattr(reconnect, "GOODBYE_SECONDS", 0.1)
    given_up = trio.Event()

    async def give_up_stage(_: Volunteer) -> None:
        given_up.set()

    monkeypatch.setattr(Volunteer, "give_up_stage", give_up_stage)
    async with scene(tmp_path, long_pause_seconds=GRACE_SECONDS + 0.1) as s:
        await s.until(lambda: s.volunteer.attachment.session is not None)
        s.script.lets_go = False
        s.volunteer.suspend(SuspendReason.ON_BATTERIES)
        await s.until(lambda: s.script.leaving == 1)
        await s.until(lambda: s.volunteer.attachment.session is None)
        await s.until(given_up.is_set)
        s.script.lets_go = True
        s.volunteer.resume()
        await s.script.sessions(2)
        await s.until(lambda: s.volunteer.attachment.session is not None)


async def test_a_volunteer_can_leave_in_the_middle_of_a_long_pause(tmp_path: Path) -> None:
    async with scene(tmp_path, long_pause_seconds=GRACE_SECONDS + 0.1) as s:
        await s.until(lambda: s.volunteer.attachment.session is not None)
        s.volunteer.suspend(SuspendReason.ON_BATTERIES)
        await s.until(lambda: s.volunteer.attachment.session is None)
        s.volunteer.leave()
        await s.until(lambda: s.done)
        assert len(s.script.hellos) == 1
