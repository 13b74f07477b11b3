"""Whole audits: whether what a member puts into an average is the sum of what it has counted.

Values and pure decisions (docs/decisions, number 0036). Auditors compute every counted cell of the
member again, and state linear digests of the gradients under a seed of a check of sums. Digests add
up as gradients do, so that their sum must be the digest that the member states of what it put in.
Each attempt to close has a seed of its own; auditors state digests for several ones, so that a
failed attempt costs no audits. The rules are in
`swarm_coordinator.core.rules.closing.whole_audits`.

Digests only show whether sums are equal, to the bit. Auditors on other machines than the member's
get other bits; the distance is estimated from sketches, which add up in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm_coordinator.core.trust.arithmetic_classes import Machine
from swarm_coordinator.core.trust.sums import SignedSums, part_sketch
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import CHECKS_PER_SECRET, MicrobatchIndex, NormSketch, PeerId
from swarm_shared.identity import norm_sketch
from swarm_shared.identity.linear_digest import check_seed, digest_sum, from_text
from swarm_shared.identity.norm_sketch import Sketch
from swarm_shared.identity.work_statements import AuditStatement, SumStatement
from swarm_shared.trust.votes import Claim

Sums = tuple[int, ...]
"""Linear digests of a stage's own gradient and, at the ends of a tied model, of the tied one."""


SKETCHED_SLACK = 2.0
"""Factor by which an estimated distance may exceed the tolerance: the estimate is some 10 % off,
hardly ever half (`swarm_shared.identity.norm_sketch`)."""


@dataclass(frozen=True, slots=True)
class CellSums:
    """What one auditor that agrees with a receipt states of the cell's gradient."""

    sums: Sums
    auditor: PeerId
    envelope: str
    """The signed statement, as evidence."""
    sketches: tuple[NormSketch, ...] = ()
    """Sketches of the same."""
    exact: bool = True
    """Whether its own result is equal to the receipt's to the bit."""


@dataclass(frozen=True, slots=True)
class Contest:
    """A member's statement that differs from the sum of its auditors' digests."""

    stated: SignedSums
    machine: Machine
    owner: PeerId
    binding: str
    """The signed binding of the peer to its owner, in base64; empty if it is its own owner."""
    claims: Mapping[MicrobatchIndex, Claim]
    """The claims of the cells that the member had counted. They are decided even if the member
    leaves or reports cells as lost."""
    since: float
    """When the contest began."""


@dataclass(slots=True)
class WholeAudit:
    """The whole audit of one member in one stage of a step."""

    secret: str
    """The secret from which the seeds of all checks follow; auditors know it."""
    cells: dict[tuple[MicrobatchIndex, Transcript], dict[PeerId, tuple[CellSums, ...]]] = field(
        default_factory=dict
    )
    """The digests that auditors have stated for each check, by receipt and by the auditor's owner.
    Digests of another receipt of the same microbatch replace none: a member could otherwise have
    its contest forgotten by counting a contested cell again."""
    asked: dict[MicrobatchIndex, dict[PeerId, PeerId]] = field(default_factory=dict)
    """The devices that have been asked for a contested cell, and their owners."""
    check: int = 0
    """Number of the check under whose seed digests are compared."""
    attempt: int | None = None
    """The attempt to close in which the seed of `check` was revealed; the seed proves nothing in
    later attempts. None before."""
    contest: Contest | None = None
    """The contest in progress."""
    ratio: float = 0.0
    """How many times as much as others of its stage the member had put in, if the audit began
    because of that (`swarm_coordinator.core.trust.part_norms`)."""

    @property
    def seed(self) -> str:
        """The seed under which digests are compared in the present or next attempt to close."""
        return check_seed(self.secret, self.check)

    @property
    def has_another_check(self) -> bool:
        """Whether the secret has a seed that was not revealed."""
        return self.attempt is None or self.check + 1 < CHECKS_PER_SECRET

    def begin_another_check(self) -> None:
        """Go on to the next seed of the secret, which has not been revealed."""
        self.attempt, self.check = None, self.check + 1

    def add(
        self, microbatch: MicrobatchIndex, transcript: Transcript, owner: PeerId,
        stated: tuple[CellSums, ...],
    ) -> None:  # fmt: skip
        """Enter the digests of one auditor for each check, in place of its earlier ones."""
        by_owner = self.cells.get((microbatch, transcript), {})
        auditor = stated[0].auditor
        # A device that has shown another owner since does not state digests for both owners.
        kept = {other: sums for other, sums in by_owner.items() if sums[0].auditor != auditor}
        self.cells[microbatch, transcript] = {**kept, owner: stated}

    def remove(self, microbatch: MicrobatchIndex, transcript: Transcript, owner: PeerId) -> None:
        """Remove what an owner has stated falsely."""
        del self.cells[microbatch, transcript][owner]

    def of_receipt(
        self, microbatch: MicrobatchIndex, transcript: Transcript
    ) -> dict[PeerId, CellSums]:
        """The digests for the present check of a cell with this receipt, by the auditor's owner."""
        by_owner = self.cells.get((microbatch, transcript), {})
        return {owner: stated[self.check] for owner, stated in by_owner.items()}


def cell_sums(
    statement: AuditStatement, envelope: str, parts: int, *, exact: bool
) -> tuple[CellSums, ...]:
    """What an auditor states for each check; empty unless it has that of all parts."""
    stated = (*statement.sums, *statement.sketches)
    if (len(statement.sums), len(statement.sketches)) != (parts, parts) or any(
        len(part) != CHECKS_PER_SECRET for part in stated
    ):
        return ()
    return tuple(
        CellSums(
            tuple(from_text(digests[check]) for digests in statement.sums),
            statement.auditor,
            envelope,
            tuple(sketches[check] for sketches in statement.sketches),
            exact,
        )
        for check in range(CHECKS_PER_SECRET)
    )


def put_in(statement: SumStatement, parts: int) -> Sums:
    """The digests that a member states of what it put into its stage's averages."""
    return tuple(from_text(digests.part) for digests in statement.checks[:parts])


def is_sum(cells: Sequence[CellSums], statement: SumStatement, tolerance: float) -> bool:
    """Whether what a member states that it put in is the sum of what auditors computed of its
    cells: to the bit if they all compute like it, otherwise within the tolerance."""
    parts = len(cells[0].sums)
    if all(cell.exact for cell in cells):
        return total(cell.sums for cell in cells) == put_in(statement, parts)
    return all(
        _is_near(
            part_sketch(stated),
            [norm_sketch.from_text(cell.sketches[part]) for cell in cells],
            tolerance,
        )
        for part, stated in enumerate(statement.checks[:parts])
    )


def are_alike(cells: Sequence[CellSums], tolerance: float) -> bool:
    """Whether several auditors state the same of one cell: to the bit if they all compute like the
    member, otherwise each within the tolerance of what the member computed."""
    first, *others = cells
    if all(cell.exact for cell in cells):
        return all(other.sums == first.sums for other in others)
    return all(
        _is_near(norm_sketch.from_text(one), [norm_sketch.from_text(its)], 2.0 * tolerance)
        for other in others
        for one, its in zip(first.sketches, other.sketches, strict=True)
    )


def _is_near(stated_B: Sketch, computed: Sequence[Sketch], tolerance: float) -> bool:
    """Whether a vector is the sum of others by their sketches: within the tolerance of the norms
    of these."""
    difference_B = stated_B - norm_sketch.sketch_sum(computed)
    allowed = tolerance * sum(map(norm_sketch.sketched_norm, computed))
    return norm_sketch.sketched_norm(difference_B) <= SKETCHED_SLACK * allowed


def total(cells: Iterable[Sums]) -> Sums:
    """The digests of the sum of several cells."""
    return tuple(map(digest_sum, zip(*cells, strict=True)))


Stated = Mapping[MicrobatchIndex, Mapping[PeerId, CellSums]]
"""The digests that owners state of each contested cell."""


def decided(
    stated: Stated, claimed: Sums, needed: int, trusted: Collection[PeerId]
) -> dict[MicrobatchIndex, Sums] | None:
    """Return the digests of all cells that are true; None while too few owners agree.

    `claimed` is what the member states, which counts as one owner's statement of digests that add
    up to it; `needed` owners are a majority. So the digests of each cell have an honest owner
    behind them as long as most are.
    """
    supported = {m: _support(by_owner, needed, trusted) for m, by_owner in stated.items()}
    owners = sorted({owner for by_owner in stated.values() for owner in by_owner})
    for owner in owners:
        # Of digests with the same support those of one owner: a liar gives false ones, the others
        # of the cell are true.
        chosen = _chosen(stated, supported, owner, needed - 1)
        if chosen is not None and total(chosen.values()) == claimed:
            return chosen
    return _chosen(stated, supported, None, needed)


def _support(
    by_owner: Mapping[PeerId, CellSums], needed: int, trusted: Collection[PeerId]
) -> dict[Sums, int]:
    """How many owners state each of a cell's digests; a trusted one is enough."""
    for owner, cell_sums in by_owner.items():
        if owner in trusted:
            return {cell_sums.sums: needed}
    return Counter(cell_sums.sums for cell_sums in by_owner.values())


def _chosen(
    stated: Stated, supported: Mapping[MicrobatchIndex, Mapping[Sums, int]],
    preferred: PeerId | None, minimum: int,
) -> dict[MicrobatchIndex, Sums] | None:  # fmt: skip
    """For every cell, digests that at least `minimum` owners state; None if a cell has none.

    Where `preferred` states such digests of a cell, these are taken.
    """
    chosen: dict[MicrobatchIndex, Sums] = {}
    for microbatch, support in supported.items():
        own = stated[microbatch].get(preferred) if preferred is not None else None
        most_supported = max(support, key=support.__getitem__, default=None)
        best = (
            own.sums if own is not None and support.get(own.sums, 0) >= minimum else most_supported
        )
        if best is None or support[best] < max(minimum, 1):
            return None
        chosen[microbatch] = best
    return chosen
