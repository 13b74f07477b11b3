"""The published roster, the changes that it lacks, and the revocations that it carries.

Values only; the rules are in `swarm_coordinator.core.rules.roster`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from swarm_shared.base.types import PeerId
from swarm_shared.protocol import PeerRecord, Roster


@dataclass(slots=True)
class RosterState:
    """What the members have been sent, and what they have not been sent yet."""

    revoked: dict[PeerId, float] = field(default_factory=dict)
    """Peers that must not be served, and until when each could present a valid certificate."""
    revoked_dirty: bool = False
    """Whether a peer was revoked or reinstated since the last roster."""
    serial: int = 0
    dirty: bool = False
    """Whether the peers that take part have changed since the last roster."""
    repeated: bool = False
    """Whether peers that change again and again what they do have changed it since the last
    roster."""
    calm_at: dict[PeerId, float] = field(default_factory=dict)
    """When the changes of a peer are forgotten."""
    due_at: float | None = None
    """When changes that can wait are published at the latest."""
    published: Roster | None = None
    """The roster that was sent last."""
    stages: tuple[tuple[PeerRecord, ...], ...] = ()
    """The records of `published` by stage, for removals during an apply and for the next change."""
    published_at: float = -math.inf

    def publish_by(self, due: float) -> None:
        """Schedule the next roster for `due` at the latest."""
        self.due_at = due if self.due_at is None else min(self.due_at, due)
