"""The evidence of a verdict, and the verdict that follows from it.

Pure functions of signed values. A coordinator decides an audit by `votes.outcome`; anyone who has
the audited receipt and the auditors' statements computes the same outcome again with `judge`. The
signatures prove what each peer has claimed, and the bindings whose devices the peers are.
Tolerance, trusted owners and the number of entitled owners are the organiser's statement, which it
seals with the ledger (`swarm_shared.credit.ledger`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from swarm_shared.base.errors import FrameError, ProtocolError, SignatureError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import (
    MAX_REDUCTION_MEMBERS,
    Envelope,
    Finite,
    MicrobatchIndex,
    OwnerEnvelope,
    PeerId,
    RunId,
    StageIndex,
    Step,
    SumEnvelope,
)
from swarm_shared.identity.credentials import Receipt, open_owner_binding
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.identity.work_statements import AuditStatement, SumStatement
from swarm_shared.trust.votes import MAX_VOTERS, Claim, Finding, Outcome, Vote, finding, outcome

MAX_TRUSTED_OWNERS = 100
"""Most owners whose statements decide at once."""

MAX_ENTITLED = 1_000_000
"""Most owners of a stage."""

MAX_SUM_STATEMENTS = 2 * MAX_REDUCTION_MEMBERS
"""Most statements of a lie about an average."""
MAX_SUM_CHARACTERS = 8 * 2**20
"""Most characters of the statements of a lie about an average, half of what a line of the ledger
takes: with details the statements of a thousand members have ten times as many."""


class SignedStatement(FrozenModel):
    """An auditor's statement, and whose device the auditor is; both in base64."""

    statement: Envelope
    binding: OwnerEnvelope = ""
    """The auditor's owner binding; empty: it is its own owner."""


class Evidence(FrozenModel):
    """The signed statements and settings from which the outcome of an audit follows."""

    receipt: Envelope
    """The signed receipt of the audited cell, in base64."""
    binding: OwnerEnvelope = ""
    """The owner binding of the audited peer; empty: it is its own owner."""
    statements: Annotated[tuple[SignedStatement, ...], Field(max_length=MAX_VOTERS)]
    """The auditors' statements, in the order in which the auditors were asked."""
    tolerance: Finite = Field(ge=0, le=1)
    """Largest relative L2 distance that counts as rounding."""
    trusted_owners: Annotated[tuple[PeerId, ...], Field(max_length=MAX_TRUSTED_OWNERS)] = ()
    """Owners whose statements decide at once."""
    entitled: Annotated[int, Field(ge=2, le=MAX_ENTITLED)]
    """Number of owners of the stage that could vote, the audited one included."""


class Verdict(FrozenModel):
    """A lost audit with its evidence, as the ledger carries it."""

    step: Annotated[Step, Field(ge=1)]
    microbatch: MicrobatchIndex
    stage: StageIndex
    peer: PeerId
    """The peer that lost: the audited one, or an auditor whose statement was wrong."""
    owner: PeerId
    void_after: Step
    """The owner's credit of later steps is void, up to and with `step`."""
    evidence: Evidence


class SumVerdict(FrozenModel):
    """A lie about an average, with the statements that show it, as the ledger carries it.

    The signatures are checked and not the finding, which depends on who had counted what.
    """

    step: Annotated[Step, Field(ge=1)]
    stage: StageIndex
    peer: PeerId
    """The peer that lied: a member of the average, or an auditor."""
    owner: PeerId
    void_after: Step
    """The owner's credit of later steps is void, up to and with `step`."""
    statements: Annotated[
        tuple[SumEnvelope, ...], Field(min_length=1, max_length=MAX_SUM_STATEMENTS)
    ]
    """Statements signed by members (`SumStatement`) and auditors (`AuditStatement`), in base64."""


def sum_evidence(own: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return the statements that a verdict keeps: the loser's own first, then as many of the others
    as the ledger takes."""
    kept: list[str] = []
    room = MAX_SUM_CHARACTERS
    for statement in itertools.chain(own, others):
        room -= len(statement)
        if kept and (room < 0 or len(kept) == MAX_SUM_STATEMENTS):
            break
        kept.append(statement)
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from evidence."""

    receipt: Receipt
    owner: PeerId
    """The owner of the audited peer."""
    votes: tuple[Vote, ...]
    outcome: Outcome

    @property
    def losers(self) -> tuple[tuple[PeerId, PeerId], ...]:
        """The peers that have lost, with their owners: the audited one, or the auditors that
        contradict what passed."""
        if self.outcome is Outcome.LOST:
            return ((self.receipt.peer, self.owner),)
        if self.outcome is Outcome.PASSED:
            return tuple((v.peer, v.owner) for v in self.votes if v.finding is Finding.DIFFERS)
        return ()


def judge(run: RunId, evidence: Evidence) -> Judgement:
    """Open all signed parts and compute the outcome; ProtocolError names a part that does not
    hold."""
    receipt = Receipt.open(decode_envelope(evidence.receipt, "the audited receipt"))
    if receipt.run != run:
        raise ProtocolError("the audited receipt is of another run")
    owner = _owner_of(receipt.peer, evidence.binding)
    claim = Claim(receipt.transcript, receipt.loss_sum)
    votes = tuple(
        _vote(receipt, claim, statement, evidence.tolerance) for statement in evidence.statements
    )
    voters = [owner, *(vote.owner for vote in votes)]
    twice = next((voter for voter in voters if voters.count(voter) > 1), None)
    if twice is not None:
        raise ProtocolError(f"the owner {twice} has more than one vote")
    devices = [receipt.peer, *(vote.peer for vote in votes)]
    again = next((device for device in devices if devices.count(device) > 1), None)
    if again is not None:
        raise ProtocolError(f"the device {again} has more than one vote, for several owners")
    if evidence.entitled < len(voters):
        raise ProtocolError(
            f"{len(voters)} owners have voted, and {evidence.entitled} were entitled to"
        )
    return Judgement(
        receipt, owner, votes, outcome(votes, evidence.entitled, evidence.trusted_owners)
    )


def check_verdict(run: RunId, verdict: Verdict) -> Judgement:
    """Return what the evidence shows; ProtocolError if the verdict does not follow from it."""
    judgement = judge(run, verdict.evidence)
    receipt = judgement.receipt
    cell = (verdict.step, verdict.microbatch, verdict.stage)
    if (receipt.step, receipt.microbatch, receipt.stage) != cell:
        raise ProtocolError("the audited receipt is of another microbatch than the verdict")
    if (verdict.peer, verdict.owner) not in judgement.losers:
        raise ProtocolError(
            f"the evidence shows that the audit is {judgement.outcome.value}, and not that "
            f"{verdict.peer} of the owner {verdict.owner} has lost it"
        )
    if verdict.void_after > verdict.step:
        raise ProtocolError(f"it voids the credit after step {verdict.void_after}, which is late")
    return judgement


def check_sum_verdict(run: RunId, verdict: SumVerdict) -> None:
    """ProtocolError unless all statements are signed, of this run and step, and one is the
    loser's."""
    signers: set[PeerId] = set()
    for text in verdict.statements:
        statement = _sum_or_audit(decode_envelope(text, "a statement about sums"))
        if (statement.run, statement.step) != (run, verdict.step):
            raise ProtocolError("a statement about sums is of another step than the verdict")
        signers.add(statement.peer if isinstance(statement, SumStatement) else statement.auditor)
    if verdict.peer not in signers:
        raise ProtocolError(f"{verdict.peer} has signed none of the statements against it")
    if verdict.void_after > verdict.step:
        raise ProtocolError(f"it voids the credit after step {verdict.void_after}, which is late")


def _sum_or_audit(envelope: bytes) -> SumStatement | AuditStatement:
    try:
        return SumStatement.open(envelope)
    except (FrameError, SignatureError):
        return AuditStatement.open(envelope)


def _vote(receipt: Receipt, claim: Claim, signed: SignedStatement, tolerance: float) -> Vote:
    statement = AuditStatement.open(decode_envelope(signed.statement, "an auditor's statement"))
    audited = (receipt.run, receipt.step, receipt.microbatch, receipt.stage, receipt.peer)
    stated = (statement.run, statement.step, statement.microbatch, statement.stage, statement.peer)
    if stated != audited:
        raise ProtocolError(f"the statement of {statement.auditor} is of another receipt")
    # A statement that was entered without a comparison gives the same finding here.
    statement_finding = finding(claim, statement, tolerance, compared=True)
    assert statement_finding is not None
    owner = _owner_of(statement.auditor, signed.binding)
    return Vote(
        owner, statement.auditor, statement_finding, signed.statement, statement.distance,
        signed.binding,
    )  # fmt: skip


def _owner_of(peer: PeerId, binding: str) -> PeerId:
    if not binding:
        return peer
    return open_owner_binding(decode_envelope(binding, f"the owner binding of {peer}"), peer).owner
