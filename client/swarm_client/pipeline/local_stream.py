"""A framed stream within this process: a trainer's edge to its own stage server.

py-libp2p does not dial itself, and there is no need to: the same protocol runs over two memory
channels, so a volunteer's own stage is reached, checked and bounded like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import trio

from swarm_shared.base.errors import LinkClosed, LinkTimeout
from swarm_shared.base.types import PeerId
from swarm_shared.network import AssemblyBudget, Frame, FrameLimits
from swarm_shared.protocol.framing import Buffer

FRAMES_BUFFERED = 16
"""More than the credits of one edge, so that a writer hardly ever waits."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalStream:
    """One end of a pair made by `local_pair`. It has the methods of a FramedStream that edges and
    stage servers use."""

    remote: PeerId
    put: trio.MemorySendChannel[Frame]
    take: trio.MemoryReceiveChannel[Frame]
    superseded: ClassVar[bool] = False
    """There is no better link than within one process."""

    async def send(
        self,
        header: bytes,
        payload: Buffer | Sequence[Buffer] = b"",
        *,
        stall_seconds: float | None = None,
    ) -> None:
        parts = (payload,) if isinstance(payload, Buffer) else payload
        # Copied, as over a network: the sender's buffer is free again when this returns.
        frame = Frame(header, bytearray().join(parts))
        try:
            with trio.fail_after(_limit(stall_seconds)):
                await self.put.send(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkClosed("the local link is closed") from error
        except trio.TooSlowError as error:
            raise LinkTimeout("this process did not take a frame in time") from error

    async def receive(self, timeout_seconds: float | None = None) -> Frame:
        try:
            with trio.fail_after(_limit(timeout_seconds)):
                return await self.take.receive()
        except (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkClosed("the local link is closed") from error
        except trio.TooSlowError as error:
            raise LinkTimeout("this process did not answer in time") from error

    def expect(self, limits: FrameLimits) -> None:
        """Does nothing: both ends are this process."""

    def assemble_within(self, budget: AssemblyBudget, most_bytes: int) -> None:
        """Does nothing: frames arrive whole."""

    async def close(self) -> None:
        self.put.close()

    async def reset(self) -> None:
        self.put.close()
        self.take.close()


def local_pair(peer: PeerId) -> tuple[LocalStream, LocalStream]:
    """Return two connected ends; the remote of each is `peer`, which is this process."""
    put_forth, take_forth = trio.open_memory_channel[Frame](FRAMES_BUFFERED)
    put_back, take_back = trio.open_memory_channel[Frame](FRAMES_BUFFERED)
    return LocalStream(peer, put_forth, take_back), LocalStream(peer, put_back, take_forth)


def _limit(timeout_seconds: float | None) -> float:
    return timeout_seconds if timeout_seconds is not None else float("inf")
