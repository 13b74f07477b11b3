"""The send queue of a connection: many writers, one task that sends.

Frames leave in the order they came, with two exceptions: credits and pings overtake, because they
unblock the remote. Writers of data wait, in turn, while the queue is full; control frames never
wait, so the task that reads a connection never waits for the one that writes it, which is how two
ends would block each other permanently. The answers that a remote can request without reading them
are bounded instead.
"""

from __future__ import annotations

from collections import deque

import trio

from swarm_shared.network.libp2p.noise_channel import MAX_PLAINTEXT_BYTES
from swarm_shared.network.libp2p.yamux_frames import HEADER_BYTES, Flag, FrameType, control_frame

MESSAGES_PER_WRITE = 4
"""Messages encrypted and passed to the socket at once: four cost a third less CPU time per byte
than one, and many more would only lengthen the queue."""
CAPACITY_BYTES = MESSAGES_PER_WRITE * MAX_PLAINTEXT_BYTES
"""Size of the queue: enough to keep the socket busy; at 20 Mbit/s a frame waits 0.1 s behind it."""
MAX_CONTROL_FRAMES = 4096


class SendQueue:
    """Queued frames of one connection."""

    def __init__(self) -> None:
        self._ordinary: deque[bytes] = deque()
        self._urgent: deque[bytes] = deque()
        self._control_frames = 0
        self.queued_bytes = 0
        self._filled = trio.Event()
        self._turns_given = 0
        self._waiting = trio.lowlevel.ParkingLot()

    def put(self, frame: bytes) -> None:
        self._ordinary.append(frame)
        self.queued_bytes += len(frame)
        self._filled.set()

    def put_control(self, kind: FrameType, flags: Flag, stream_id: int, value: int) -> bool:
        """Queue a control frame. False, with nothing queued, when too many are waiting."""
        if self._control_frames >= MAX_CONTROL_FRAMES:
            return False
        self._control_frames += 1
        overtakes = kind == FrameType.PING or (kind == FrameType.WINDOW_UPDATE and not flags)
        (self._urgent if overtakes else self._ordinary).append(
            control_frame(kind, flags, stream_id, value)
        )
        self.queued_bytes += HEADER_BYTES
        self._filled.set()
        return True

    async def take_turn(self) -> None:
        """Wait behind other writers while the queue is full.

        The caller then puts one frame at once, or calls `give_turns`.
        """
        if self._waiting or self._free_places() <= 0:
            await self._waiting.park()
            self._turns_given -= 1

    async def wait_for_frames(self) -> None:
        """Wait until a frame is queued; called when `next_messages` returned none."""
        self._filled = trio.Event()
        await self._filled.wait()

    def next_messages(self) -> list[bytes]:
        """Return the next few messages' plaintext, each of whole frames."""
        messages: list[bytes] = []
        while (self._urgent or self._ordinary) and len(messages) < MESSAGES_PER_WRITE:
            messages.append(self._next_message())
        return messages

    def give_turns(self) -> None:
        """Wake the writers that wait for what is free now."""
        turns = min(self._free_places(), len(self._waiting))
        if turns > 0:
            self._turns_given += turns
            self._waiting.unpark(count=turns)

    def release_writers(self) -> None:
        """Wake all waiting writers, at the end of the connection."""
        self._turns_given += len(self._waiting)
        self._waiting.unpark_all()

    def _next_message(self) -> bytes:
        size = 0
        frames: list[bytes] = []
        while queue := self._urgent or self._ordinary:
            if frames and size + len(queue[0]) > MAX_PLAINTEXT_BYTES:
                break
            frame = queue.popleft()
            size += len(frame)
            frames.append(frame)
            if len(frame) == HEADER_BYTES:
                self._control_frames -= 1
        self.queued_bytes -= size
        self.give_turns()
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _free_places(self) -> int:
        """Return how many of the largest frames fit, besides those of admitted writers."""
        return (CAPACITY_BYTES - self.queued_bytes) // MAX_PLAINTEXT_BYTES - self._turns_given
