"""Outsized parts: members that put much more into an average than the others of their stage.

Values and pure decisions (docs/decisions, number 0058). The norms are told by sketches
(`swarm_shared.identity.norm_sketch`). A large norm is no lie: a microbatch may have a gradient that
is much larger than most. So nothing follows but an audit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from swarm_shared.base.types import PeerId

MAX_RATIO: Final = 4.0
"""How many times as large as those of the others a part may be."""

Entitled = Callable[[Collection[PeerId], PeerId], Collection[PeerId]]
"""Returns which of some owners may judge another one."""


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


def outsized(parts: Mapping[PeerId, PutIn], entitled: Entitled) -> list[PeerId]:
    """The members whose part is more than MAX_RATIO times what the parts of others suggest.

    Each other owner that may judge a member has one voice, its largest part's; the upper median
    counts, so that a minority neither hides a part nor makes one seem large.
    """
    owners = {part.owner for part in parts.values()}
    found: list[PeerId] = []
    for peer, part in parts.items():
        judges = entitled(owners, part.owner)
        voices: dict[PeerId, float] = {}
        for other in parts.values():
            if other.owner in judges and other.owner != part.owner:
                expected = part.expected_from(other)
                voices[other.owner] = max(expected, voices.get(other.owner, 0.0))
        ranked = sorted(voices.values())
        if ranked and part.norm > MAX_RATIO * ranked[len(ranked) // 2]:
            found.append(peer)
    return found
