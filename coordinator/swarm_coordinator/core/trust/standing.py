"""The standing of owners: what their audits have shown.

Values and pure functions. An owner is the key that its devices are bound to; a device without a
binding is its own owner (`swarm_shared.identity.credentials.OwnerBinding`). An identity costs
nothing, so whatever weighs more than one microbatch is a matter of owners with passed audits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm_coordinator.core.events import NO_STEP, StandingRecord
from swarm_shared.base.types import PeerId, Step, Version

MAX_OWNERS = 100_000
"""Number of owners with a standing; those without a lost audit and with the fewest passed ones are
dropped first, several at a time. A device may show a new owner's binding with each hello."""


@dataclass(slots=True)
class Standing:
    """The audits of one owner."""

    passed: int = 0
    """Audited cells that passed since the last lost audit."""
    lost: int = 0
    """Lost audits, ever."""
    vested_step: Step = NO_STEP
    """Last step of a passed audit: credit up to here is the owner's for good."""
    audited_work: int = 0
    """Cells of others that this owner has audited."""
    unvested_since: Step = NO_STEP
    """First applied step since the last passed audit that has work of the owner; 0 without one."""
    withheld: int = 0
    """Number of steps since the last passed audit in which the owner gave no tensors that fit an
    audited receipt."""
    withheld_step: Step = NO_STEP
    """The latest step that `withheld` counts."""
    unaudited: int = 0
    """Cells counted since the last passed audit; not stored."""
    lets_wait: bool = False
    """Whether an audit of it got no answer while it was to give the inputs. Its auditors or a line
    may have been slow, or it has let them wait: all further audits are hidden. Not stored."""
    silent: bool = False
    """Whether it has stated other digests as an auditor and no distance then: it is asked last, and
    no close of a step waits for it. Not stored."""
    expelled: bool = False
    """Whether the owner has lost an audit and not taken part since; not stored."""

    def record(self, owner: PeerId) -> StandingRecord:
        """What is stored of the standing."""
        return StandingRecord(
            owner, self.passed, self.lost, self.vested_step, self.audited_work, self.unvested_since
        )


@dataclass(slots=True)
class Standings:
    """All owners with a standing, and which of them have changed since they were stored."""

    owners: dict[PeerId, Standing] = field(default_factory=dict)
    changed: set[PeerId] = field(default_factory=set)

    def get(self, owner: PeerId) -> Standing:
        """The owner's standing; an unknown owner's is new and not remembered."""
        return self.owners.get(owner) or Standing()

    def change(self, owner: PeerId) -> Standing:
        """The owner's standing, to be changed: it is stored with the next step."""
        self.changed.add(owner)
        return self.kept(owner)

    def takes_part(self, owner: PeerId) -> None:
        """Note that a device of the owner is attached: its next lost audit is another verdict."""
        if (standing := self.owners.get(owner)) is not None:
            standing.expelled = False

    def note_counted(self, owner: PeerId) -> Standing:
        """Note that one more cell of the owner has been counted; return the owner's standing."""
        standing = self.kept(owner)
        standing.unaudited += 1
        return standing

    def kept(self, owner: PeerId) -> Standing:
        """The owner's standing, to be changed in what is not stored."""
        standing = self.owners.get(owner)
        if standing is None:
            if len(self.owners) >= MAX_OWNERS:
                self._drop_least(max(1, MAX_OWNERS // 8))
            standing = self.owners[owner] = Standing()
        return standing

    def _drop_least(self, number: int) -> None:
        by_worth = sorted(self.owners, key=lambda o: (self.owners[o].lost, self.owners[o].passed))
        for owner in by_worth[:number]:
            del self.owners[owner]
            self.changed.discard(owner)

    def applied(self, owners: Iterable[PeerId], step: Step) -> None:
        """Note that the applied step has work of these owners; without a passed audit in that step
        the work is unvested."""
        for owner in owners:
            standing = self.get(owner)
            if not standing.unvested_since and standing.vested_step < step:
                self.change(owner).unvested_since = step

    def roll_back(self, version: Version) -> None:
        """Forget what was vested and unvested in steps after the version, which the run repeats."""
        for owner, standing in self.owners.items():
            if max(standing.vested_step, standing.unvested_since) > version:
                self.changed.add(owner)
                standing.vested_step = min(standing.vested_step, Step(version))
                if standing.unvested_since > version:
                    standing.unvested_since = NO_STEP

    def take_changed(self) -> tuple[StandingRecord, ...]:
        """The standings to be stored, in the order of owners."""
        changed, self.changed = sorted(self.changed), set()
        return tuple(self.owners[owner].record(owner) for owner in changed)


def restored_standings(records: Iterable[StandingRecord]) -> Standings:
    """The standings of an earlier start of the coordinator."""
    return Standings(
        {
            r.owner: Standing(r.passed, r.lost, r.vested_step, r.audited_work, r.unvested_since)
            for r in records
        }
    )
