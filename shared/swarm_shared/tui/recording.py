"""Recordings of a view in a file, and their replay.

The file has a line of JSON for each event, after a first one that describes it:

    {"recording": "swarm-client top", "format": 1, "started_at": 1790000000.0}
    {"seconds": 0.0, "status": {...}}
    {"seconds": 0.4, "log": [...]}
    {"seconds": 9.1, "away": "the daemon has stopped"}

`seconds` count from the start and never decrease. A status holds only the parts that differ from
the one before: most of a long run's history stays the same. `away` beside a status explains why no
newer one will come for now. Both ends are bounded: the recorder stops at `MAX_RECORDING_BYTES`, and
the replay reads no line longer than `MAX_LINE_BYTES`. A malformed line ends the replay with its
number. A recording holds names, peer IDs and the log, so only its owner may read the file.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Generic, NoReturn

from pydantic import Field, FiniteFloat, ValidationError

from swarm_shared.base.clock import Clock
from swarm_shared.base.errors import DataError, StorageError, UsageError, VersionError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import first_error
from swarm_shared.tui.source import (
    D,
    DocumentReceived,
    Event,
    LogEntry,
    LogReceived,
    SourceLost,
)

FORMAT = 1
MAX_RECORDING_BYTES = 256 * 2**20
"""Largest recording: some hours of a large run."""
MAX_LINE_BYTES = 16 * 2**20
"""Longest line; a run of ten thousand peers takes 5 MiB."""
LONGEST_WAIT_SECONDS = 5.0
"""Longest pause of a replay; longer silence is skipped, as of a view that was suspended
overnight."""
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

Sleep = Callable[[float], Awaitable[None]]


class _Head(FrozenModel):
    recording: str
    format: int
    started_at: FiniteFloat


class _Body(FrozenModel):
    seconds: FiniteFloat = Field(ge=0)
    status: dict[str, Any] | None = None
    log: tuple[LogEntry, ...] | None = None
    away: str | None = None


class Recorder:
    """Writes a new file. A full disk ends the recording, never the view; `trouble` gives the
    reason."""

    def __init__(self, path: Path, program: str, clock: Clock) -> None:
        self.path = path
        self.trouble = ""
        self._clock = clock
        self._started_at = clock()
        self._bytes = 0
        self._seconds = 0.0
        self._told: dict[str, Any] = {}
        self._file = _create(path)
        head = _Head(recording=program, format=FORMAT, started_at=self._started_at)
        self._write(head.model_dump_json().encode())

    def note(self, event: Event[Any]) -> None:
        if self.trouble:
            return
        # The wall clock may be set back; a recording's time never decreases.

        self._seconds = max(self._seconds, event.at - self._started_at, 0.0)
        self._write(json.dumps({"seconds": round(self._seconds, 3), **self._form(event)}).encode())

    def _form(self, event: Event[Any]) -> dict[str, Any]:
        if isinstance(event, DocumentReceived):
            before, self._told = self._told, event.document.model_dump(mode="json")
            news = {
                key: value for key, value in self._told.items()
                if key not in before or before[key] != value
            }  # fmt: skip
            return {"status": news, **({"away": event.away} if event.away else {})}
        if isinstance(event, LogReceived):
            return {"log": [asdict(entry) for entry in event.entries]}
        return {"away": event.sentence}

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self.trouble = self.trouble or f"{self.path} is not whole ({error.strerror})"

    def _write(self, content: bytes) -> None:
        if self._bytes + len(content) + 1 > MAX_RECORDING_BYTES or len(content) > MAX_LINE_BYTES:
            self.trouble = f"the recording in {self.path} is full and ends here"
            return
        try:
            self._file.write(content + b"\n")
            self._file.flush()
        except OSError as error:
            self.trouble = f"the recording in {self.path} ends here ({error.strerror})"
        self._bytes += len(content) + 1


def _create(path: Path) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already; name a new file for the recording") from error
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written ({error.strerror}); name another file for the recording"
        ) from error
    return os.fdopen(descriptor, "wb")


class Replay(Generic[D]):
    """A source that replays a recording, at the pace at which it was recorded, or another."""

    def __init__(
        self, path: Path, program: str, model: type[D], sleep: Sleep = asyncio.sleep
    ) -> None:
        """Read the first line. DataError or VersionError when it is no recording of `program`."""
        self._path = path
        self._model = model
        self._sleep = sleep
        self.speed = 1.0
        self.held = False
        self._go_on = asyncio.Event()
        self._known: dict[str, Any] = {}
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise StorageError(
                f"{path} cannot be read ({error.strerror}); name a file that --record wrote"
            ) from error
        self._head = self._read_head(program)
        self._now = self._head.started_at

    def now(self) -> float:
        return self._now

    async def act(self, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        raise UsageError("this is a recording: nothing can be changed in it")

    def hold(self, held: bool) -> None:
        self.held = held
        if not held:
            self._go_on.set()

    def faster(self, steps: int) -> float:
        """Change the pace by so many steps and return the new one."""
        place = min(len(SPEEDS) - 1, max(0, SPEEDS.index(self.speed) + steps))
        self.speed = SPEEDS[place]
        return self.speed

    async def events(self) -> AsyncIterator[Event[D]]:
        seconds = 0.0
        number = 1
        with self._file:
            while content := self._file.readline(MAX_LINE_BYTES + 1):
                number += 1
                body = self._parse(content, number)
                if body.seconds < seconds:
                    self._refuse(number, "its time goes back")
                await self._sleep(min(LONGEST_WAIT_SECONDS, body.seconds - seconds) / self.speed)
                while self.held:
                    self._go_on.clear()
                    await self._go_on.wait()
                seconds = body.seconds
                self._now = self._head.started_at + seconds
                yield self._event(body, number)
        yield SourceLost(self._now, "the recording ends here; q closes the view")

    def _read_head(self, program: str) -> _Head:
        content = self._file.readline(MAX_LINE_BYTES + 1)
        try:
            head = _Head.model_validate_json(content)
        except ValidationError as error:
            raise DataError(
                f"{self._path} is no recording; name a file that `{program} --record` wrote"
            ) from error
        if head.recording != program:
            raise DataError(
                f"{self._path} was recorded by `{head.recording[:60]}`; replay it with that"
            )
        if head.format != FORMAT:
            raise VersionError(
                f"{self._path} has format {head.format}, this program reads {FORMAT}; "
                "replay it with the version that recorded it"
            )
        return head

    def _parse(self, content: bytes, number: int) -> _Body:
        if len(content) > MAX_LINE_BYTES:
            self._refuse(number, f"it is longer than {MAX_LINE_BYTES} bytes")
        try:
            body = _Body.model_validate_json(content)
        except ValidationError as error:
            self._refuse(number, first_error(error))
        what = {name for name in ("status", "log", "away") if getattr(body, name) is not None}
        if len(what) != 1 and what != {"status", "away"}:
            self._refuse(number, "it must hold one of status, log and away")
        return body

    def _event(self, body: _Body, number: int) -> Event[D]:
        if body.log is not None:
            return LogReceived(self._now, body.log)
        if body.status is None:
            return SourceLost(self._now, body.away or "")
        self._known |= body.status
        try:
            return DocumentReceived(
                self._now, self._model.model_validate(self._known), body.away or ""
            )
        except ValidationError as error:
            self._refuse(number, first_error(error))

    def _refuse(self, number: int, why: str) -> NoReturn:
        raise DataError(
            f"line {number} of {self._path} is not what a recording holds ({why}); the file is "
            "damaged or was edited"
        )
