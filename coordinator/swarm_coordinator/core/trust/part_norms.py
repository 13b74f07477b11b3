"""Outsized parts: members that put much more into an average than the others of their stage.

Values and pure decisions (docs/decisions, number 0058). Norms are estimated from sketches
(`swarm_shared.identity.norm_sketch`). A large norm is no lie: a microbatch may have a gradient that
is much larger than most. So nothing follows but an audit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from swarm_coordinator.core.trust.sums import Entitled
from swarm_shared.base.types import PeerId

MAX_RATIO: Final = 4.0
"""How many times as large as those of the others a part may be. Of honest members with 4
microbatches each, some 0.03 % have more in a step, and 0.6 % in the first 30 steps of a run
(docs/decisions, number 0058)."""

KNOWN_SHARE: Final = 0.25
"""Share of the parts that are audited although as large ones were proved before. Where some of the
data has gradients far from all others, every step could be delayed otherwise."""


@dataclass(frozen=True, slots=True)
class PutIn:
    """What one member has put into an average."""

    owner: PeerId
    microbatches: int
    """Number of microbatches whose gradients it sums; at least 1."""
    norm: float

    def expected_from(self, other: PutIn) -> float:
        """The largest norm that this part would have if its gradients were like another one's.

        A sum of n gradients grows with n where they point the same way, and with its root where
        they are independent.
        """
        share = self.microbatches / other.microbatches
        return other.norm * max(share, math.sqrt(share))


def outsized(parts: Mapping[PeerId, PutIn], entitled: Entitled) -> dict[PeerId, float]:
    """The members whose part is more than MAX_RATIO times what the parts of others suggest, and how
    many times as large it is.

    Each other owner that may judge a member suggests one norm, by its largest part; the upper
    median of these decides, so that a minority neither hides a part nor makes one seem large.
    """
    owners = {part.owner for part in parts.values()}
    found: dict[PeerId, float] = {}
    for peer, part in parts.items():
        judges = entitled(owners, part.owner)
        by_owner: dict[PeerId, float] = {}
        for other in parts.values():
            if other.owner in judges:
                expected = part.expected_from(other)
                by_owner[other.owner] = max(expected, by_owner.get(other.owner, 0.0))
        ranked = sorted(by_owner.values())
        suggested = ranked[len(ranked) // 2] if ranked else math.inf
        if part.norm > MAX_RATIO * suggested:
            found[peer] = part.norm / suggested if suggested else math.inf
    return found
