"""A coordinator that was away is found again soon after it is back, however long it was away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from swarm_client.volunteer import reconnect
from swarm_client.volunteer.reconnect import Attachment, AttachmentHandler, heartbeat_seconds
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.types import Generation
from swarm_shared.identity.invite import Invite
from swarm_shared.network import Node
from swarm_shared.protocol import Welcome
from swarm_shared.run.manifest import LimitsConfig

FOUND_SECONDS = 10.0
"""After its return, as the project promises."""


class Nobody:
    """A volunteer that only wants to be attached."""

    async def wait_may_attach(self) -> bool:
        return True

    def hello(self) -> Any:
        return None


@pytest.mark.parametrize("away_seconds", [0.1, 3.0, 60.0, 3600.0])
def test_a_waiting_volunteer_tries_again_within_ten_seconds_of_its_return(
    away_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> tuple[float, list[str]]:
        back_at = trio.current_time() + away_seconds
        knocked = trio.Event()

        @asynccontextmanager
        async def attach(*_: object) -> AsyncIterator[None]:
            await trio.lowlevel.checkpoint()
            if trio.current_time() >= back_at:
                knocked.set()
                await trio.sleep_forever()
            raise NetworkError("nobody is there")
            yield

        monkeypatch.setattr(reconnect, "attach", attach)
        said: list[str] = []
        waiting = Attachment(cast(Node, None), cast(Invite, FakeInvite()), said.append)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiting.run, cast(AttachmentHandler, Nobody()))
            await knocked.wait()
            nursery.cancel_scope.cancel()
        return trio.current_time() - back_at, said

    seconds, said = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert seconds < FOUND_SECONDS - 1.0, "knocking itself takes a moment"
    assert any("trying again" in text for text in said)


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
