"""A coordinator that was away is found again soon after it is back, however long it was away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from kits.memory import offers
from swarm_client.volunteer import reconnect
from swarm_client.volunteer.reconnect import Attachment, heartbeat_seconds
from swarm_client.volunteer.session import RefusedForNow
from swarm_shared.base.errors import MachineError, NetworkError, SwarmError
from swarm_shared.base.types import Generation, RunId
from swarm_shared.identity.invite import Invite
from swarm_shared.network import Node
from swarm_shared.protocol import Hello, Welcome
from swarm_shared.run.manifest import LimitsConfig

FOUND_SECONDS = 10.0
"""After its return, as the project promises."""


def a_hello() -> Hello:
    return Hello(run=RunId("a" * 64), software="1", addresses=(), device="cpu", memory=offers(1))


class Nobody:
    """A volunteer that only wants to be attached."""

    async def wait_may_attach(self) -> bool:
        return True

    def hello(self) -> Hello:
        return a_hello()


@pytest.mark.parametrize("away_seconds", [0.1, 3.0, 60.0, 3600.0])
def test_a_waiting_volunteer_tries_again_within_ten_seconds_of_its_return(
    away_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, said = away(monkeypatch, away_seconds, lambda _: "nobody is there")
    assert seconds < FOUND_SECONDS - 1.0, "knocking itself takes a moment"
    assert said[0] == (
        "no connection to the coordinator (nobody is there); trying again every few seconds"
    )


def away(
    monkeypatch: pytest.MonkeyPatch, away_seconds: float, reason: Callable[[float], str]
) -> tuple[float, list[str]]:
    """Be away for some time; returns how long after that a volunteer has knocked, and what it said.
    `reason` tells at each second why the coordinator cannot be reached."""

    async def main() -> tuple[float, list[str]]:
        began = trio.current_time()
        back_at = began + away_seconds
        knocked = trio.Event()

        @asynccontextmanager
        async def attach(*_: object) -> AsyncIterator[None]:
            await trio.lowlevel.checkpoint()
            if trio.current_time() >= back_at:
                knocked.set()
                await trio.sleep_forever()
            raise NetworkError(reason(trio.current_time() - began))
            yield

        monkeypatch.setattr(reconnect, "attach", attach)
        said: list[str] = []
        waiting = Attachment(cast(Node, None), cast(Invite, FakeInvite()), said.append)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiting.run, Nobody())
            await knocked.wait()
            nursery.cancel_scope.cancel()
        return trio.current_time() - back_at, said

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_long_absence_is_reported_now_and_then_and_how_to_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, said = away(monkeypatch, 3599.0, lambda _: "nobody is there")
    assert 5 <= len(said) <= 6
    assert all("if the run has ended, `swarm-client leave` ends this" in line for line in said[1:])
    assert "for 10 min (nobody is there)" in said[1]


def test_another_reason_of_an_absence_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, said = away(monkeypatch, 60.0, lambda seconds: "refused" if seconds < 30.0 else "no answer")
    assert [line.split("; ")[0] for line in said] == [
        "no connection to the coordinator (refused)",
        "no connection to the coordinator (no answer)",
    ]


class FakeInvite:
    coordinator = "12D3KooWNobody"


@pytest.mark.parametrize(("asked", "seconds"), [(None, 0.5), (1e-6, 0.5), (0.4, 0.5), (3.0, 3.0)])
def test_a_welcome_lengthens_the_heartbeat_interval_and_never_shortens_it(
    asked: float | None, seconds: float
) -> None:
    welcome = Welcome(
        generation=Generation(1), certificate="", manifest="", stages=(), heartbeat_seconds=asked
    )
    assert heartbeat_seconds(welcome, LimitsConfig(heartbeat_seconds=0.5)) == seconds


# ---------------------------------------------------------------- refusals


class Refusable:
    """A volunteer whose self-test takes ten seconds and then ends in a given way."""

    def __init__(self, outcome: SwarmError | None = None) -> None:
        self._outcome = outcome
        self.gave_up: list[float] = []

    async def wait_may_attach(self) -> bool:
        return True

    async def give_up_stage(self) -> None:
        self.gave_up.append(trio.current_time())

    async def self_test(self) -> bool:
        await trio.sleep(10.0)
        if self._outcome is not None:
            raise self._outcome
        return True

    def hello(self) -> Hello:
        return a_hello()


def refused(
    volunteer: Refusable, monkeypatch: pytest.MonkeyPatch, *, self_test: bool, times: int = 2,
    leave_after_seconds: float | None = None, seconds: float = 3600.0,
) -> tuple[list[tuple[float, bool]], list[str]]:  # fmt: skip
    """Refuse a volunteer so many times, by default for an hour; a self-test ends the first.

    Returns when it came and whether it had tested itself, and what it said.
    """
    came: list[tuple[float, bool]] = []
    said: list[str] = []

    async def main() -> None:
        began = trio.current_time()
        enough = trio.Event()

        @asynccontextmanager
        async def attach(_: Node, __: Invite, hello: Hello) -> AsyncIterator[None]:
            await trio.lowlevel.checkpoint()
            came.append((trio.current_time() - began, hello.self_tested))
            if len(came) > times:
                enough.set()
                await trio.sleep_forever()
            raise RefusedForNow("it lies", seconds, self_test=self_test and len(came) == 1)
            yield

        monkeypatch.setattr(reconnect, "attach", attach)
        waiting = Attachment(cast(Node, None), cast(Invite, FakeInvite()), said.append)

        async def run() -> None:
            await waiting.run(volunteer)
            enough.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            if leave_after_seconds is not None:
                await trio.sleep(leave_after_seconds)
                waiting.leave()
            await enough.wait()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return came, said


def test_a_machine_that_passes_its_self_test_comes_back_at_once_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    volunteer = Refusable()
    came, said = refused(volunteer, monkeypatch, self_test=True)
    assert came == [(0.0, False), (10.0, True), (3610.0, False)]
    assert len(volunteer.gave_up) == 1, "its memory is needed for the test"
    assert said == [
        "the run refuses this volunteer: it lies",
        "the run refuses this volunteer: it lies; trying again in 60 min",
    ]


def test_refusals_of_no_length_are_not_asked_for_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came, _ = refused(Refusable(), monkeypatch, self_test=False, times=5, seconds=0.0)
    pauses = [after - before for (before, _), (after, _) in pairwise(came)]
    assert all(pause >= 0.4 for pause in pauses)
    assert pauses[-1] > 5.0


def test_a_refusal_that_no_self_test_ends_is_waited_out_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    volunteer = Refusable(MachineError("it is not tested"))
    came, _ = refused(volunteer, monkeypatch, self_test=False, times=1)
    assert came == [(0.0, False), (3600.0, False)]
    assert volunteer.gave_up == []


def test_a_self_test_that_cannot_be_carried_out_has_not_been_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    volunteer = Refusable(SwarmError("its process was killed"))
    came, said = refused(volunteer, monkeypatch, self_test=True, times=1)
    assert came == [(0.0, False), (3600.0, False)]
    assert said[-1] == (
        "the self-test of this machine could not be carried out: its process was killed; "
        "trying again in 59 min"
    )


def test_a_machine_that_fails_its_self_test_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(MachineError, match="in round 3")):
        refused(Refusable(MachineError("in round 3 it differed")), monkeypatch, self_test=True)


@pytest.mark.parametrize("self_test", [False, True])
def test_a_refused_volunteer_can_leave_at_once(
    self_test: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    volunteer = Refusable(SwarmError("its process was killed"))
    came, _ = refused(volunteer, monkeypatch, self_test=self_test, leave_after_seconds=20.0)
    assert came == [(0.0, False)]
