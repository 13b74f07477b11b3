"""Rounds of an all-reduce over an in-process network, on the two event loops of rounds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from kits.averaging.memory_carrier import MemoryCarrier
from kits.averaging.memory_group import Group, with_network
from swarm_shared.base.types import PeerId

Body = Callable[[dict[PeerId, MemoryCarrier]], Awaitable[None]]


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs `body` with the carriers of a group, by default one round of all members, for at most
    20 s. The network has only `names` if they are given."""

    def runner(
        group: Group,
        body: Body | None = None,
        *,
        names: tuple[PeerId, ...] | None = None,
        **changes: Any,
    ) -> None:
        async def limited() -> None:
            with anyio.fail_after(20):
                await with_network(names or group.names, body or partial(group.all, **changes))

        anyio.run(limited, backend=request.param)

    return runner
