"""The interface of a view's source: documents, log lines, and the loss of the connection.

The implementations (a socket, a file, a recording, a test's script) own where these come from. A
source does not end when the connection is lost: it reports that and retries, because the view stays
open and recovers by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    # A view draws its first frame without it.
    from pydantic import BaseModel

D = TypeVar("D", bound="BaseModel")


@dataclass(frozen=True, slots=True)
class LogEntry:
    time: float
    level: str
    text: str
    number: int
    """Increases; distinguishes two entries with the same text."""


@dataclass(frozen=True, slots=True)
class DocumentReceived(Generic[D]):
    """A complete document."""

    at: float
    """Unix seconds at which the view received it."""
    document: D
    away: str = ""
    """Why there will be no newer document for now; the last one is available all the same."""


@dataclass(frozen=True, slots=True)
class LogReceived:
    """Lines of the log."""

    at: float
    entries: tuple[LogEntry, ...]


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The source does not answer; the last document stays on the screen and ages."""

    at: float
    sentence: str
    """What is wrong and how to fix it."""


Event = DocumentReceived[D] | LogReceived | SourceLost


class Source(Protocol[D]):
    """A source of documents of one type."""

    def events(self) -> AsyncIterator[Event[D]]:
        """Yield events without an end where the source may recover. SwarmError when it cannot
        continue."""
        ...

    async def act(self, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request to the other side; SwarmError explains a refusal."""
        ...

    def now(self) -> float:
        """Return Unix seconds by the clock of what is shown: the wall's, or a recording's."""
        ...
