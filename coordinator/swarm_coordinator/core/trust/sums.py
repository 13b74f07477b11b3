"""Checked sums: whether what the members of a round took out is the sum of what they put in.

Values and pure decisions (docs/decisions, number 0036); `swarm_coordinator.core.rules.closing`
sends the checks and carries out what follows. Every member signs linear digests
(`swarm_shared.identity.linear_digest`), which add up as the vectors do, and sketches, from which
norms are estimated (`swarm_shared.identity.norm_sketch`). First of whole vectors; where the digests
or the sketches do not agree, digests of every slice, which one member sums for all. Where it is the
sketches, these are digests of the slices' sketches: so a false sketch is found as a false digest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from swarm_shared.base.types import LinearDigests, PeerId, StageIndex
from swarm_shared.identity import norm_sketch
from swarm_shared.identity.linear_digest import digest_sum, from_text, to_text
from swarm_shared.identity.norm_sketch import Sketch, sketch_digest, sketch_sum
from swarm_shared.identity.work_statements import SumDigests, SumStatement


@dataclass(frozen=True, slots=True)
class SumGroup:
    """One all-reduce; the member at place i sums slice i."""

    name: str
    members: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """A member's part in one all-reduce."""

    group: int
    """Index of the group."""
    contributes: bool
    """Whether the member puts in anything that counts; otherwise what it puts in must be zero."""


@dataclass(frozen=True, slots=True)
class SignedSums:
    """A member's statement with its signature."""

    statement: SumStatement
    envelope: str
    """The signed message in base64, as evidence."""


@dataclass(slots=True)
class RoundSums:
    """The check of one round: what is asked for, and what the members have stated."""

    groups: tuple[SumGroup, ...]
    of_stage: Mapping[StageIndex, tuple[int, ...]]
    """Indices of a stage's groups, in the order of its Close."""
    shares: dict[PeerId, tuple[Share, ...]] = field(default_factory=dict)
    """Each member's shares, in the order of its Close."""
    secret: str = ""
    """That of the first seed (`swarm_shared.identity.linear_digest.check_seed`), from which further
    ones follow."""
    seeds: tuple[str, ...] = ()
    """The seeds of the checks, which are made one after another; chosen once all members have
    averaged."""
    seed_index: int = 0
    """Index in `seeds` of the present check's seed."""
    details: bool = False
    """Whether the members are asked for digests of every slice."""
    weights: str = ""
    """The seed of the weights of sketches, if the digests of every slice are of sketches."""
    agreed: bool = False
    """Whether the sums agreed under all seeds."""
    totals: dict[PeerId, SignedSums] = field(default_factory=dict)
    """The members' statements of whole vectors under the present seed."""
    slices: dict[PeerId, SignedSums] = field(default_factory=dict)
    """The members' statements of every slice under the present seed."""

    def add_member(
        self, peer: PeerId, stage: StageIndex, goes_to: StageIndex | None, *, contributes: bool
    ) -> None:
        """Add a member of a stage, which may also average the stage that it goes to."""
        shares = [Share(index, contributes) for index in self.of_stage[stage]]
        if goes_to is not None:
            shares += [Share(index, contributes=False) for index in self.of_stage[goes_to]]
        self.shares[peer] = tuple(shares)

    @property
    def seed(self) -> str:
        """The seed of the present check; empty before the first check."""
        return self.seeds[self.seed_index] if self.seeds else ""

    def begin_next(self) -> bool:
        """Go on to the next seed; False if there is none."""
        if self.seed_index + 1 == len(self.seeds):
            return False
        self.seed_index += 1
        self.totals.clear()
        return True

    def record(self, peer: PeerId, stated: SignedSums) -> None:
        """Enter a member's answer to the present question, for whole vectors or for slices."""
        (self.slices if self.details else self.totals)[peer] = stated

    def evidence(self, peer: PeerId) -> tuple[str, ...]:
        """The signed statements of a member under the present seed."""
        signed = (self.totals.get(peer), self.slices.get(peer))
        return tuple(signed_sums.envelope for signed_sums in signed if signed_sums is not None)


@dataclass(frozen=True, slots=True)
class Findings:
    """What the members' digests of every slice show."""

    lied: Mapping[PeerId, str]
    """Members that are shown to have lied, each with what shows it, as part of a sentence."""
    contradictions: frozenset[tuple[PeerId, PeerId]]
    """Pairs of a reducer and a member of which one has lied, with neither in `lied`."""


def lie_in(check: RoundSums, peer: PeerId, statement: SumStatement) -> str | None:
    """Return what is wrong with a member's statement, whatever the others state; None if nothing
    is."""
    for share, stated in zip(check.shares[peer], statement.checks, strict=True):
        name = check.groups[share.group].name
        if not share.contributes and from_text(stated.part):
            return f"it put something into {name}, for which nothing of it counts"
        if check.details and (wrong := _wrong_slices(check.groups[share.group], stated)):
            return f"its digests of the slices of {name} {wrong}"
    if check.details:
        before = [_of_totals(check, digests) for digests in check.totals[peer].statement.checks]
        if before != [(digests.part, digests.result) for digests in statement.checks]:
            return "it signed different digests of the same sums"
    return None


def _of_totals(check: RoundSums, stated: SumDigests) -> tuple[str, str]:
    """The digests of whole vectors that follow from what a member has stated of them before."""
    if not check.weights:
        return stated.part, stated.result
    part, result = (
        sketch_digest(sketch_B, check.weights)
        for sketch_B in (part_sketch(stated), _result_sketch(stated))
    )
    return to_text(part), to_text(result)


def part_sketch(stated: SumDigests) -> Sketch:
    """The sketch of what a member put in, from its statement of whole vectors."""
    assert stated.part_sketch is not None, "a statement of whole vectors has sketches"
    return norm_sketch.from_text(stated.part_sketch)


def _result_sketch(stated: SumDigests) -> Sketch:
    assert stated.result_sketch is not None, "a statement of whole vectors has sketches"
    return norm_sketch.from_text(stated.result_sketch)


def _wrong_slices(group: SumGroup, stated: SumDigests) -> str:
    size = len(group.members)
    if (len(stated.parts), len(stated.results)) != (size, size):
        return f"are {len(stated.parts)} and {len(stated.results)}, not {size} each"
    if len(stated.received) not in (0, size):
        return f"that it received are {len(stated.received)}, not {size}"
    if _added(stated.parts) != from_text(stated.part):
        return "do not add up to what it put in"
    if _added(stated.results) != from_text(stated.result):
        return "do not add up to what it took out"
    return ""


def _added(digests: Iterable[str]) -> int:
    return digest_sum(map(from_text, digests))


def agree(check: RoundSums) -> bool:
    """Whether every member of every group took out the sum of what all its members put in."""
    parts: dict[int, list[int]] = {}
    results: dict[int, set[int]] = {}
    for peer, shares in check.shares.items():
        for share, stated in zip(shares, check.totals[peer].statement.checks, strict=True):
            parts.setdefault(share.group, []).append(from_text(stated.part))
            results.setdefault(share.group, set()).add(from_text(stated.result))
    return all(results[group] == {digest_sum(parts[group])} for group in parts)


def sketches_agree(check: RoundSums) -> bool:
    """Whether every member of every group stated the sketch of the sum of what all its members
    stated that they put in."""
    parts: dict[int, list[Sketch]] = {}
    results: dict[int, set[str]] = {}
    for peer, shares in check.shares.items():
        for share, stated in zip(shares, check.totals[peer].statement.checks, strict=True):
            parts.setdefault(share.group, []).append(part_sketch(stated))
            results.setdefault(share.group, set()).add(norm_sketch.to_text(_result_sketch(stated)))
    return all(results[group] == {norm_sketch.to_text(sketch_sum(parts[group]))} for group in parts)


Entitled = Callable[[Collection[PeerId], PeerId], Collection[PeerId]]
"""Returns which of some owners may judge another one."""


def findings(check: RoundSums, owners: Mapping[PeerId, PeerId], entitled: Entitled) -> Findings:
    """Compare what the members have stated of every slice; every statement is in order by itself.

    `owners`: the owner of each member; a peer without one is its own.
    """
    lied: dict[PeerId, str] = {}
    contradictions: set[tuple[PeerId, PeerId]] = set()
    for index, group in enumerate(check.groups):
        stated = {
            peer: signed
            for peer in group.members
            for share, signed in zip(
                check.shares[peer], check.slices[peer].statement.checks, strict=True
            )
            if share.group == index
        }
        group_findings = _findings_of(group, stated, owners, entitled)
        lied |= group_findings.lied
        contradictions |= group_findings.contradictions
    unresolved = {pair for pair in contradictions if not lied.keys() & set(pair)}
    return Findings(lied, frozenset(unresolved))


def _findings_of(
    group: SumGroup, stated: Mapping[PeerId, SumDigests], owners: Mapping[PeerId, PeerId],
    entitled: Entitled,
) -> Findings:  # fmt: skip
    lied: dict[PeerId, str] = {}
    pairs: set[tuple[PeerId, PeerId]] = set()
    for place, reducer in enumerate(group.members):
        parts = {peer: from_text(stated[peer].parts[place]) for peer in group.members}
        received = _received(group, stated[reducer].received)
        others = {peer for peer in group.members if received[peer] != parts[peer]}
        if not others:
            expected = digest_sum(parts.values())
            others = {
                peer for peer in group.members if from_text(stated[peer].results[place]) != expected
            }
        if reducer in others:
            lied[reducer] = f"its slice of {group.name} is not the sum of what it received"
        else:
            pairs |= {(reducer, peer) for peer in others}
    all_owners = {owners.get(peer, peer) for peer in group.members}
    for peer in group.members:
        own = owners.get(peer, peer)
        judges = set(entitled(all_owners, own))
        against = {owners.get(other, other) for pair in pairs if peer in pair for other in pair}
        # With a majority of honest owners, one of these is among those that contradict it.
        if 2 * len(against & judges - {own}) > len(judges) + 1:
            lied[peer] = f"most others contradict its digests of {group.name}"
    return Findings(lied, frozenset(pairs))


def _received(group: SumGroup, digests: LinearDigests) -> dict[PeerId, int]:
    """What a reducer received from each member; nothing where it sums no slice."""
    stated = map(from_text, digests) if digests else [0] * len(group.members)
    return dict(zip(group.members, stated, strict=True))
