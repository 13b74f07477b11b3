"""A coordinator that was away is found again soon after it is back, however long it was away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from swarm_client import attachment
from swarm_client.attachment import Attachment, Party
from swarm_shared.errors import NetworkError
from swarm_shared.invite import Invite
from swarm_shared.network import Node

FOUND_SECONDS = 10.0
"""After its return, as the project promises."""


class Nobody:
    """A volunteer that only wants to be attached."""

    async def may_attach(self) -> bool:
        return True

    def hello(self) -> Any:
        return None


@pytest.mark.parametrize("away_seconds", [0.1, 3.0, 60.0, 3600.0])
async def test_who_waits_for_a_coordinator_knocks_again_within_ten_seconds_of_its_return(
    away_seconds: float, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_at = trio.current_time() + away_seconds
    found: list[float] = []

    @asynccontextmanager
    async def attach(*_: object) -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        if trio.current_time() >= back_at:
            found.append(trio.current_time())
            scope.cancel()
        raise NetworkError("nobody is there")
        yield

    monkeypatch.setattr(attachment, "attach", attach)
    said: list[str] = []
    waiting = Attachment(
        cast(Party, Nobody()), cast(Node, None), cast(Invite, FakeInvite()), said.append
    )
    with trio.CancelScope() as scope:
        await waiting.stay()
    assert found[0] - back_at < FOUND_SECONDS - 1.0, "knocking itself takes a moment"
    assert any("trying again" in text for text in said)


class FakeInvite:
    coordinator = "12D3KooWNobody"
