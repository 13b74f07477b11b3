"""Opens a stream to a member by the first of several routes that works.

Each route gets a head start over the next one and continues beside it, so that a silent route costs
a moment and not its whole time limit. A round waits for its slowest stream: trying the routes one
after another would take longer than its members wait for one another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from swarm_client.averaging.all_reduce.carrier import Channel
from swarm_client.averaging.all_reduce.errors import RouteAbsentError
from swarm_client.averaging.all_reduce.routes import Route, RouteFault
from swarm_shared.base.errors import NetworkError, ProtocolError
from swarm_shared.base.types import PeerId

HEAD_START_SECONDS = 2.5
"""Head start of a route in seconds: six round trips of 400 ms for a dial, its handshakes and the
opening of a stream."""
ROUTE_SECONDS = 8.0
MAX_OPENING_SECONDS = 3 * HEAD_START_SECONDS + ROUTE_SECONDS

Opener = Callable[[], Awaitable[Channel]]


class StreamRace:
    """The race of routes for one stream."""

    def __init__(self, peer: PeerId, fault: Callable[[RouteFault], None]) -> None:
        """`fault` is called for each route that failed or was too slow."""
        self._peer = peer
        self._fault = fault
        self._reasons: list[str] = []
        self._channel: Channel | None = None

    async def open(self, openers: Sequence[tuple[Route, Opener]]) -> Channel:
        """Open the stream. NetworkError if no route works."""
        try:
            async with anyio.create_task_group() as tasks:
                for route, opener in openers:
                    over = anyio.Event()
                    tasks.start_soon(self._try, route, opener, over, tasks.cancel_scope)
                    with anyio.move_on_after(HEAD_START_SECONDS):
                        await over.wait()
        except BaseException:
            # Cancelled at the moment of success: no caller has the stream.
            if self._channel is not None:
                with anyio.CancelScope(shield=True):
                    await self._channel.abort()
            raise
        if self._channel is None:
            raise NetworkError("; ".join(self._reasons) or "there is no route to it")
        return self._channel

    async def _try(
        self, route: Route, opener: Opener, over: anyio.Event, everything: anyio.CancelScope
    ) -> None:
        began_at = anyio.current_time()
        try:
            with anyio.fail_after(ROUTE_SECONDS):
                channel = await opener()
        except RouteAbsentError as error:
            self._reasons.append(f"{route}: {error}")
        except TimeoutError:
            self._failed(route, f"no answer within {ROUTE_SECONDS:g} s")
        except (NetworkError, ProtocolError) as error:
            self._failed(route, str(error))
        except anyio.get_cancelled_exc_class():
            if self._channel is not None and anyio.current_time() - began_at >= HEAD_START_SECONDS:
                self._failed(route, "it was too slow")
            raise
        else:
            if self._channel is None:
                self._channel = channel
                everything.cancel()
            else:
                with anyio.CancelScope(shield=True):
                    await channel.abort()
        finally:
            over.set()

    def _failed(self, route: Route, reason: str) -> None:
        self._reasons.append(f"{route}: {reason}")
        self._fault(RouteFault(self._peer, route, reason))
