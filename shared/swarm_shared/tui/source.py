"""What a view follows: documents, lines of a log, and the word that nobody answers.

Owns the form of that; where it comes from (a socket, a file, a recording, a test's script) is the
implementations' part. A source never ends because the other side went away: it says so and tries
again, for the view stays open and comes back by itself.
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
    """Grows; tells two entries with the same words apart."""


@dataclass(frozen=True, slots=True)
class DocumentReceived(Generic[D]):
    """How things stand, whole."""

    at: float
    """Unix seconds at which the view heard it."""
    document: D
    away: str = ""
    """Why there will be no newer one for now; what was said last is at hand all the same."""


@dataclass(frozen=True, slots=True)
class LogReceived:
    at: float
    entries: tuple[LogEntry, ...]


@dataclass(frozen=True, slots=True)
class SourceLost:
    """Nobody answers; the last document stands, and gets old."""

    at: float
    sentence: str
    """What is wrong and what mends it."""


Event = DocumentReceived[D] | LogReceived | SourceLost


class ReplayControls:
    """What a source is besides that tells of the past: it can be made faster, slower and held."""

    speed: float
    held: bool

    def faster(self, steps: int) -> float:
        """So many steps up or down; the pace that it has then."""
        raise NotImplementedError

    def hold(self, held: bool) -> None:
        raise NotImplementedError


class Source(Protocol[D]):
    def events(self) -> AsyncIterator[Event[D]]:
        """Without an end where the other side may come back. SwarmError when it cannot go on."""
        ...

    async def act(self, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask the other side to do something; SwarmError says why it did not."""
        ...

    def now(self) -> float:
        """Unix seconds by the clock of what is shown: the wall's, or a recording's."""
        ...
