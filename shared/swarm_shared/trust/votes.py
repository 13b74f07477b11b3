"""The decision of an audit, from the statements of its auditors.

Pure functions. Each owner has one vote, however many devices it has; the audited peer's receipt is
the first one. A single statement that agrees with the receipt ends an audit. One that does not asks
for more, until one side has more than half of those that are entitled to vote: so any minority of
liars, auditors or audited, loses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import PeerId
from swarm_shared.identity.work_statements import AuditStatement

MAX_VOTERS = 9
"""Most owners that an audit asks, the audited one included."""


class Finding(StrEnum):
    """What an auditor's statement says of the audited receipt."""

    AGREES = "agrees"
    DIFFERS = "differs"
    WITHHELD = "withheld"
    """The audited peer did not give the tensors that its receipt has the digests of."""


class Outcome(StrEnum):
    """What an audit has found."""

    OPEN = "open"
    PASSED = "passed"
    LOST = "lost"
    WITHHELD = "withheld"


@dataclass(frozen=True, slots=True)
class Vote:
    """One auditor's finding, with its signed statement in base64."""

    owner: PeerId
    peer: PeerId
    finding: Finding
    statement: str
    distance: float | None = None
    binding: str = ""
    """The signed binding of `peer` to `owner`, in base64; empty if it is its own owner."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The part of the audited receipt that auditors check."""

    transcript: Transcript
    loss_sum: float | None


def finding(
    claim: Claim, statement: AuditStatement, tolerance: float, *, compared: bool
) -> Finding | None:
    """Return the finding of a statement about a claim; None if the auditor must compare the tensors
    first.

    `compared`: whether the auditor was asked for the distance; a statement without one then means
    that the audited peer has not given the tensors it claims.
    """
    if statement.transcript is None:
        return Finding.WITHHELD
    if not _losses_agree(claim.loss_sum, statement.loss_sum, tolerance):
        return Finding.DIFFERS
    if statement.transcript == claim.transcript:
        return Finding.AGREES
    if not compared:
        return None
    if statement.distance is None:
        return Finding.WITHHELD
    # Without a tolerance only equal digests agree: a distance of 0 may be that of a sample.
    return Finding.AGREES if statement.distance <= tolerance > 0.0 else Finding.DIFFERS


def _losses_agree(claimed: float | None, computed: float | None, tolerance: float) -> bool:
    if claimed is None or computed is None:
        return claimed is computed
    return abs(claimed - computed) <= tolerance * max(1.0, abs(computed))


def outcome(votes: Sequence[Vote], entitled: int, trusted: Collection[PeerId]) -> Outcome:
    """The state of an audit after these votes.

    `entitled`: number of owners that may vote, the audited one included. A vote of a `trusted`
    owner decides.
    """
    for vote in votes:
        if vote.owner in trusted:
            return _OUTCOMES[vote.finding]
    against = [vote for vote in votes if vote.finding is not Finding.AGREES]
    if votes and not against:
        return Outcome.PASSED
    majority = min(entitled, MAX_VOTERS) // 2 + 1
    if 1 + len(votes) - len(against) >= majority:
        return Outcome.PASSED
    if len(against) >= majority:
        differs = sum(vote.finding is Finding.DIFFERS for vote in against)
        return Outcome.LOST if 2 * differs >= len(against) else Outcome.WITHHELD
    return Outcome.OPEN


_OUTCOMES = {
    Finding.AGREES: Outcome.PASSED,
    Finding.DIFFERS: Outcome.LOST,
    Finding.WITHHELD: Outcome.WITHHELD,
}
