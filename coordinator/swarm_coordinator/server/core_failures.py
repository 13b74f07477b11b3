"""Peers on whose events the core has failed, which are refused for some time (decision 0016)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from swarm_shared.base.backoff import backoff_seconds
from swarm_shared.base.errors import ProtocolError, SwarmError
from swarm_shared.base.types import PeerId

FIRST_REFUSAL_SECONDS: Final = 60.0
MAX_REFUSAL_SECONDS: Final = 86_400.0
"""Seconds of the first and of the longest refusal of one peer; each is twice the one before."""


class CoreFailure(SwarmError):
    """The core failed on an event of one peer, which is refused for some time."""


class RefusedForNow(ProtocolError):
    """The peer may come back after `retry_seconds`."""

    def __init__(self, reason: str, retry_seconds: float) -> None:
        super().__init__(reason)
        self.retry_seconds = retry_seconds


@dataclass(slots=True)
class _Author:
    failures: int = 0
    refused_until: float = 0.0


@dataclass(slots=True)
class CoreFailures:
    """Those of one process, over all starts of the run in it. Times are monotonic seconds."""

    _authors: dict[PeerId, _Author] = field(default_factory=dict)

    def failed_on(self, peer: PeerId, now: float) -> float:
        """Refuse the author of an event from now on; return for how many seconds."""
        author = self._authors.setdefault(peer, _Author())
        seconds = backoff_seconds(author.failures, FIRST_REFUSAL_SECONDS, MAX_REFUSAL_SECONDS)
        author.failures += 1
        author.refused_until = now + seconds
        return seconds

    def check(self, peer: PeerId, now: float) -> None:
        """Raise RefusedForNow for a peer that is refused now."""
        author = self._authors.get(peer)
        if author is not None and now < author.refused_until:
            raise RefusedForNow(
                "the coordinator failed on an event of this peer", author.refused_until - now
            )
