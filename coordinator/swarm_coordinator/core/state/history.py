"""The history of a run: its version, how it was reached, and what is known of its holders.

Part of the pure core. The durable part is in the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm_coordinator.core.events import INITIALISATION, AppliedStep, StateDigest
from swarm_shared.base.types import PeerId, StageIndex, Version


@dataclass(slots=True)
class RunHistory:
    """The steps that the run has applied, as far as the rules need them."""

    version: Version
    last_applied: AppliedStep | None
    """The step that led to the version; None at the start and after a roll-back."""
    heldout_loss: float | None
    """The loss at the end of the run, once it is evaluated."""
    rolled_back: bool
    """Whether a version number may also denote a state of an abandoned history."""
    members: set[PeerId]
    """Peers whose state is known to belong to the history since a roll-back."""
    fingerprints: dict[StageIndex, frozenset[str]] = field(default_factory=dict)
    """Digests of the stage's state at the version that holders have reported, by stage."""
    recomputed: Version = INITIALISATION
    """The last version that a roll-back has left."""
    averaging_seconds: float = 0.0
    """Seconds that the slowest round of the last applied step took, from its Close to its sums."""
    lost_since: dict[StageIndex, float] = field(default_factory=dict)
    """When each stage without a holder lost its last one."""

    def may_be(self, stage: StageIndex, digest: str) -> bool:
        """Whether the stage's state at the version can have this digest, as far as digests are
        known."""
        fingerprints = self.fingerprints.get(stage)
        return fingerprints is None or digest in fingerprints

    def digests(self) -> tuple[StateDigest, ...]:
        """The digests of the version, to be stored."""
        return tuple(
            StateDigest(stage, digest)
            for stage, digests in sorted(self.fingerprints.items())
            for digest in sorted(digests)
        )

    def apply(self, step: AppliedStep) -> None:
        """Advance to the version that a durable step leads to."""
        self.version, self.last_applied = Version(step.step), step
        self.fingerprints.clear()

    def roll_back(self, version: Version) -> None:
        """Return to an earlier version. The steps since are abandoned."""
        self.recomputed = max(self.recomputed, self.version)
        self.version, self.last_applied, self.heldout_loss = version, None, None
        self.rolled_back = True
        self.members.clear()
        self.fingerprints.clear()
        self.lost_since.clear()


def restored_digests(digests: Iterable[StateDigest]) -> dict[StageIndex, frozenset[str]]:
    """The digests of each stage from before a restart of the coordinator."""
    by_stage: dict[StageIndex, frozenset[str]] = {}
    for stage, digest in digests:
        by_stage[stage] = by_stage.get(stage, frozenset()) | {digest}
    return by_stage
