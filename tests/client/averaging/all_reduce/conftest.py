"""The two event loops of rounds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Runs an async test on each event loop; no test may take longer than 20 s."""

    def runner(body: Callable[[], Awaitable[None]]) -> None:
        async def limited() -> None:
            with anyio.fail_after(20):
                await body()

        anyio.run(limited, backend=request.param)

    return runner
