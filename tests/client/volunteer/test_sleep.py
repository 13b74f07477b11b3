"""A volunteer before and after a sleep of its machine, with a scripted coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from client.volunteer.test_volunteer_admission import scene
from swarm_client.control.status_document import SuspendReason
from swarm_client.volunteer.volunteer import Volunteer


async def test_the_coordinator_lets_it_go_and_has_it_again_when_the_machine_is_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("hand_back_work", "give_up_stage"):
        monkeypatch.setattr(Volunteer, name, lambda _, name=name: calls.append(name))
    async with scene(tmp_path) as s:
        await s.until(lambda: s.volunteer.attachment.session is not None)
        with trio.fail_after(20):
            await s.volunteer.fall_asleep(seconds=30.0)
        assert s.volunteer.suspended is not None
        assert s.volunteer.suspended.reason is SuspendReason.MACHINE_SLEEPS
        assert (s.script.leaving, s.script.paused[-1]) == (1, True)
        assert s.volunteer.attachment.session is None
        assert calls == ["hand_back_work"], "the stage is of use after a short sleep"
        waits = s.volunteer.attachment._awake.statistics
        await s.until(lambda: waits().tasks_waiting == 1)
        assert len(s.script.hellos) == 1
        s.volunteer.wake()
        await s.script.sessions(2)
        assert s.volunteer.suspended is None
        await s.until(lambda: s.script.paused[-1] is False)


async def test_a_session_ends_in_time_whatever_the_coordinator_does(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.until(lambda: s.volunteer.attachment.session is not None)
        s.script.lets_go = False
        began = trio.current_time()
        await s.volunteer.fall_asleep(seconds=0.2)
        assert 0.2 <= trio.current_time() - began < 5.0
        assert s.volunteer.attachment.session is None
        await s.until(lambda: s.script.ended == 1)
        s.volunteer.wake()
        await s.script.sessions(2)
        assert s.script.leaving == 1, "the new session does not leave"


async def test_a_pause_that_the_user_has_ordered_outlasts_a_sleep(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.until(lambda: s.volunteer.attachment.session is not None)
        s.volunteer.suspend(SuspendReason.PAUSED_BY_USER, until=17.0)
        await s.volunteer.fall_asleep(seconds=30.0)
        s.volunteer.wake()
        assert s.volunteer.suspended is not None
        assert s.volunteer.suspended.reason is SuspendReason.PAUSED_BY_USER
        s.volunteer.resume()
        await s.script.sessions(2)


async def test_a_volunteer_without_a_coordinator_sleeps_at_once(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.until(lambda: s.volunteer.attachment.session is not None)
        s.script.refuse = True
        await s.script.streams[-1].reset()
        await s.until(lambda: s.volunteer.attachment.problem is not None)
        began = trio.current_time()
        await s.volunteer.fall_asleep(seconds=2.0)
        assert trio.current_time() - began < 4.0
        s.script.refuse = False
        s.volunteer.wake()
        await s.script.sessions(2)


async def test_a_volunteer_can_leave_while_the_machine_falls_asleep(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.until(lambda: s.volunteer.attachment.session is not None)
        await s.volunteer.fall_asleep(seconds=30.0)
        s.volunteer.leave()
        await s.until(lambda: s.done)
