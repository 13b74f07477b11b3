"""Live events for browsers: server-sent events, with a bounded queue for each reader.

A reader that is slower than the events is disconnected and may reconnect; its queue never grows,
and no other reader waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from fastapi.sse import ServerSentEvent
from pydantic import BaseModel

QUEUE_EVENTS = 64
"""Capacity of a reader's queue: half a minute of a busy run."""
MAX_READERS = 200


def encode_event(event: str, document: BaseModel) -> ServerSentEvent:
    """Encode an event, once for all readers."""
    return ServerSentEvent(event=event, raw_data=document.model_dump_json())


class EventHub:
    """Publishes events to all readers."""

    def __init__(self, max_readers: int = MAX_READERS, queue: int = QUEUE_EVENTS) -> None:
        self._max_readers = max_readers
        self._queue = queue
        self._readers: set[MemoryObjectSendStream[ServerSentEvent]] = set()
        self.dropped = 0
        """Readers disconnected because they were too slow, since the start."""

    def __len__(self) -> int:
        return len(self._readers)

    @property
    def full(self) -> bool:
        return len(self._readers) >= self._max_readers

    @contextmanager
    def reader(self) -> Iterator[MemoryObjectReceiveStream[ServerSentEvent]]:
        """A stream of the events published from now on; it ends when the reader is too slow."""
        put, take = anyio.create_memory_object_stream[ServerSentEvent](self._queue)
        self._readers.add(put)
        try:
            with take:
                yield take
        finally:
            self._readers.discard(put)
            put.close()

    def publish(self, event: ServerSentEvent) -> None:
        for reader in list(self._readers):
            try:
                reader.send_nowait(event)
            except anyio.WouldBlock:
                self._readers.discard(reader)
                reader.close()
                self.dropped += 1
