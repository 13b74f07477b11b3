"""Audits of a run: settings, the draw, and the audits in progress.

Values and pure decisions; `swarm_coordinator.core.rules.auditing` sends the orders and carries out
verdicts (docs/decisions, number 0036).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from swarm_coordinator.core.events import VerdictRecord
from swarm_coordinator.core.trust.arithmetic_classes import ArithmeticClasses, Machine
from swarm_coordinator.core.trust.chains import Boundary
from swarm_coordinator.core.trust.majority import Decision, Statement, ValueT, decide
from swarm_coordinator.core.trust.samples import TrainingTokens
from swarm_coordinator.core.trust.standing import Standings
from swarm_coordinator.core.trust.whole_audits import WholeAudit
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.trust.evidence import Evidence, SignedStatement
from swarm_shared.trust.votes import Claim, Finding, Vote

SHOWN_VERDICTS = 100
"""Number of verdicts that the status shows; all are in the store."""


PROBATION_SHARE = 0.25
"""Probability that a cell of an owner on probation is audited: computing each one twice would halve
the rate of a new run, and a constant cheat is found after four cells on average."""

MOST_UNAUDITED = 2.8
"""Cells that an owner counts at most without a passed audit, as a multiple of the mean number from
one draw to the next: 140 at 2 %, which the draw alone would leave out one time in sixteen. Then
the next cell is audited, and a verdict comes before it has counted 150."""

ALIKE_FIRST_SHARE = 0.5
"""Share of the audits that go to machines which have agreed with the audited one to the bit, where
there are some: they give exact answers. If all did, two liars would only audit each other."""

MAX_IN_HAND = 4
"""Most audits that one auditor is asked for at a time; others wait until it has answered."""


CountedCell = tuple[MicrobatchIndex, StageIndex, PeerId]
"""A cell, and a peer that has counted it. One peer's result may be audited while another peer has
counted the cell again."""


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Settings of `[trust]` in run.toml."""

    audit_share: float = 0.02
    """Probability that a cell of an established owner is audited."""
    probation_cells: int = 50
    """Audited cells that must pass before an owner is established."""
    tolerance: float = 1e-4
    """Largest relative L2 distance between what was claimed and what an auditor computed."""
    trusted_owners: frozenset[PeerId] = frozenset()
    """Owners whose statements decide at once, as the organiser's own."""
    check_sums: bool = False
    """Whether the exact averages of every close are checked."""
    rolls_back: bool = False
    """Whether a lost audit takes the owner's unverified steps out of the model."""


@dataclass(slots=True)
class AuditOrder:
    """A request to one auditor."""

    audit: int
    auditor: PeerId
    owner: PeerId
    asked_at: float
    compares: bool
    """Whether the auditor compares the tensors themselves."""
    showing_seconds: float = 0.0
    """Seconds for which it waits for the audited peer to show what it claims, if it compares."""
    binding: str = ""
    """The signed binding of `auditor` to `owner`, in base64; empty if it is its own owner."""


@dataclass(frozen=True, slots=True)
class ExactFinding:
    """The finding of an auditor's statement without any tolerance: equal to the bit or not."""

    machine: Machine
    finding: Finding
    alike: bool
    """Whether the auditor's machine and the audited one were known to be alike before."""


@dataclass(slots=True)
class OpenAudit:
    """The audit of one cell, from the draw to its outcome."""

    machine: Machine
    """The audited peer's machine at the audited stage."""
    microbatch: MicrobatchIndex
    owner: PeerId
    claim: Claim
    opened_at: float
    binding: str = ""
    """The signed binding of `peer` to `owner`, in base64; empty if it is its own owner."""
    order: AuditOrder | None = None
    votes: list[Vote] = field(default_factory=list)
    asked: dict[PeerId, PeerId] = field(default_factory=dict)
    """The devices that have been asked, whether they voted or not, and the owners that they had
    then. A device may show another owner with each hello."""
    secret: str = ""
    """The secret of the digests that the auditor also states; empty outside of whole audits."""
    sample: str = ""
    """The seed of the blocks of the gradient that all auditors of this receipt compare: drawn when
    the first one does, so that the audited peer has signed before. Auditors that compared different
    blocks could contradict each other."""
    confirms: bool = False
    """Whether the audit repeats another one to confirm what its auditor has stated. Such an audit
    goes on when the cell no longer counts."""
    hidden: bool = False
    """Whether the audited peer is not to see the audit, so that auditors get the inputs from the
    peers of the neighbouring stages."""
    entitled: int = 0
    """Number of owners that could vote at the last count, the audited one included."""
    exact_findings: dict[PeerId, ExactFinding] = field(default_factory=dict)
    """The finding without a tolerance of each auditor that has voted."""
    within_class: bool = False
    """Whether a machine that was alike computed other bits, within the tolerance. Then only such
    machines vote, and without a tolerance. A majority is still one of all the stage's owners: any
    peer can appear to be alike by repeating what the audited one has signed."""

    @property
    def key(self) -> CountedCell:
        """The audited cell and peer, of which one audit is open at a time."""
        return self.microbatch, self.stage, self.peer

    @property
    def stage(self) -> StageIndex:
        return self.machine.stage

    @property
    def peer(self) -> PeerId:
        """The audited peer."""
        return self.machine.peer

    @property
    def owner_of_device(self) -> dict[PeerId, PeerId]:
        """The owners for which the audited device and those that were asked take part."""
        return {**self.asked, self.peer: self.owner}

    @property
    def disputed(self) -> bool:
        """Whether an auditor's result differs from what the receipt or the member's sum claims."""
        differs = any(vote.finding is not Finding.AGREES for vote in self.votes)
        return self.confirms or self.within_class or differs

    @property
    def ballot(self) -> list[Vote]:
        """The votes that decide: all, or within a class those of machines that were alike."""
        if not self.within_class:
            return self.votes
        return [
            replace(vote, finding=exact.finding)
            for vote in self.votes
            if (exact := self.exact_findings[vote.peer]).alike
        ]

    def evidence(self, settings: AuditSettings) -> Evidence:
        """The statements from which the outcome follows, without the receipt's signature."""
        return Evidence(
            receipt="",
            binding=self.binding,
            statements=tuple(
                SignedStatement(statement=vote.statement, binding=vote.binding)
                for vote in self.ballot
            ),
            tolerance=0.0 if self.within_class else settings.tolerance,
            trusted_owners=tuple(sorted(settings.trusted_owners)),
            entitled=self.entitled,
        )


@dataclass(slots=True)
class StepAudits:
    """The audits of one step in progress."""

    open: dict[CountedCell, OpenAudit] = field(default_factory=dict)
    broken: dict[MicrobatchIndex, set[Boundary]] = field(default_factory=dict)
    """Microbatches whose transcripts do not fit, each with the boundaries at which they do not; one
    is removed when the audits of both of its sides have ended."""
    dropping: set[CountedCell] = field(default_factory=set)
    """Cells that were cleared while their peers live, until the peers have dropped them. Receipts
    of such cells do not count meanwhile."""

    drawn: set[tuple[PeerId, StageIndex]] = field(default_factory=set)
    """Members for which the draw of a whole audit has been made, with either outcome."""
    whole: dict[tuple[PeerId, StageIndex], WholeAudit] = field(default_factory=dict)
    """The whole audits, by member."""

    def include_owner(self, owner: PeerId) -> bool:
        """Whether a cell of this owner is being audited."""
        return any(audit.owner == owner for audit in self.open.values())

    def stages(self) -> set[StageIndex]:
        """The stages in which a cell may still be cleared or dropped."""
        boundaries = (boundary for broken in self.broken.values() for boundary in broken)
        doubted = {stage for boundary in boundaries for stage in boundary}
        return doubted | {stage for cells in (self.open, self.dropping) for _, stage, _ in cells}

    def in_hand(self, peer: PeerId) -> int:
        """Number of audits whose answer is awaited from a peer."""
        return sum(
            audit.order is not None and audit.order.auditor == peer for audit in self.open.values()
        )


@dataclass(slots=True)
class AuditBook:
    """The audits of a run."""

    settings: AuditSettings
    draw: Callable[[], float]
    """Returns a random number of [0, 1) that no peer can predict."""
    tokens: TrainingTokens | None = None
    """Digests of the token ids that receipts of the first and the last stage must have; None: not
    checked."""
    standings: Standings = field(default_factory=Standings)
    classes: ArithmeticClasses = field(default_factory=ArithmeticClasses)
    verdicts: deque[VerdictRecord] = field(default_factory=lambda: deque(maxlen=SHOWN_VERDICTS))
    """The newest verdicts, oldest first, without their evidence, which may have megabytes."""
    last_audit: int = 0
    """Number of the latest order to audit; never reused in a generation."""
    unverified_since: Step | None = None
    """First applied step with unverified work of an owner that has lost an audit, if the run is to
    go back before it."""
    expelled: dict[PeerId, str] = field(default_factory=dict)
    """Attached peers to be removed, with the reason."""
    withholding: set[PeerId] = field(default_factory=set)
    """Peers that are to sit the step out, as they gave their auditors no inputs."""
    retracted: set[tuple[MicrobatchIndex, StageIndex]] = field(default_factory=set)
    """Cells of the current step that are to be cleared as soon as the rounds that average them are
    aborted."""
    proved_ratios: dict[StageIndex, float] = field(default_factory=dict)
    """By stage: how many times as much as others a member has put in that was proved to be right,
    at most, in this start of the coordinator."""
    passed: int = 0
    """Audits of this start of the coordinator that passed."""
    unanswered: int = 0
    """Audits that found no auditor in time, or got no answer."""

    def share(self, owner: PeerId) -> float:
        """Probability that a cell of this owner is audited."""
        settings = self.settings
        if owner in settings.trusted_owners or self.established(owner):
            return settings.audit_share
        return max(settings.audit_share, PROBATION_SHARE)

    def draws(self, owner: PeerId, open_audits: StepAudits) -> bool:
        """Draw whether a cell that this owner has just counted is audited.

        Each cell is audited with the same probability, whatever was audited before. Once the owner
        has counted too many since its last passed audit, one is audited in any case, unless one of
        its cells is being audited: slow auditors would otherwise get every further cell, too.
        """
        share = self.share(owner)
        standing = self.standings.note_counted(owner)
        # Drawn for every cell, so that one outcome reveals nothing about the others.
        if self.draw() < share:
            return True
        due = standing.unaudited * share >= MOST_UNAUDITED
        return due and not open_audits.include_owner(owner)

    def draw_secret(self) -> str:
        """A secret that no peer can predict."""
        return "".join(f"{int(self.draw() * 2**32):08x}" for _ in range(4))

    def matches_the_data(
        self, step: Step, microbatch: MicrobatchIndex, transcript: Transcript, *, first: bool,
        last: bool,
    ) -> bool:  # fmt: skip
        """Whether the first stage got the sampler's token ids, and the last one its targets."""
        if self.tokens is None or not (first or last):
            return True
        drawn = self.tokens(step, microbatch)
        return (not first or transcript.input == drawn.tokens) and (
            not last or transcript.output == drawn.targets
        )

    def established(self, owner: PeerId) -> bool:
        """Whether enough audits of the owner have passed since its last lost one."""
        return self.standings.get(owner).passed >= self.settings.probation_cells

    def entitled(self, owners: Collection[PeerId], audited: PeerId) -> frozenset[PeerId]:
        """The owners of a stage that may judge another one of it.

        Once two of them are established only those may: identities cost nothing, passed audits
        cost their work.
        """
        return self._established_first(frozenset(owners) - {audited})

    def voters(self, owners: Collection[PeerId]) -> frozenset[PeerId]:
        """The owners among those of a stage that decide which of several states is the right one.

        A trusted owner decides alone; otherwise as for audits.
        """
        trusted = self.settings.trusted_owners.intersection(owners)
        return trusted or self._established_first(frozenset(owners))

    def decide(self, statements: Iterable[Statement[ValueT]]) -> Decision[ValueT] | None:
        """Which of the values that devices of a stage state counts; None if there is none."""
        stated = list(statements)
        return decide(stated, self.voters({statement.owner for statement in stated}))

    def _established_first(self, owners: frozenset[PeerId]) -> frozenset[PeerId]:
        trusted = owners & self.settings.trusted_owners
        standings, probation_cells = self.standings.owners, self.settings.probation_cells
        passed = (
            o for o in owners if (s := standings.get(o)) is not None and s.passed >= probation_cells
        )
        established = owners if probation_cells == 0 else trusted.union(passed)
        return established if len(established) >= 2 or trusted else owners


def no_audits() -> AuditBook:
    """A book that draws no cell."""
    return AuditBook(AuditSettings(audit_share=0.0, probation_cells=0), lambda: 0.5)
