"""Checking that what the members of a round took out is the sum of what they put in.

Part of the pure core (docs/decisions, number 0036). The check follows the last report: everything
is exchanged by then, so that no member knows the seed of the digests before. What the digests show
is the matter of `swarm_coordinator.core.trust.sums`. It is made under a seed that no peer knew, and
then under that of each member that is audited whole, which the auditors know
(`swarm_coordinator.core.rules.closing.whole_audits`).
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm_coordinator.core.events import SumsStated, VerdictRecord
from swarm_coordinator.core.rules import held_up, round_membership
from swarm_coordinator.core.rules.auditing import verdicts
from swarm_coordinator.core.rules.closing import exclusions, outsized_parts, whole_audits
from swarm_coordinator.core.state.close import Round
from swarm_coordinator.core.state.peers import PeerState, owner_of, short
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.state.waiting import stage_names
from swarm_coordinator.core.trust import sums
from swarm_coordinator.core.trust.sums import RoundSums, SignedSums, SumGroup
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import Reduction, SumCheck
from swarm_shared.trust.evidence import sum_evidence


def planned(
    run: RunState, reductions: Mapping[StageIndex, tuple[Reduction, ...]]
) -> RoundSums | None:
    """The check of a round's reductions; None where sums are rounded, or nothing is exchanged."""
    if not run.checks_sums:
        return None
    groups: dict[str, SumGroup] = {}
    groups_of_stage: dict[StageIndex, tuple[int, ...]] = {}
    for stage, reductions_of_stage in reductions.items():
        names: list[str] = []
        for reduction in reductions_of_stage:
            tied = reduction.part == "tied"
            name = "the average of the tied parameters" if tied else f"stage {stage}'s average"
            groups.setdefault(name, SumGroup(name, reduction.members))
            names.append(name)
        groups_of_stage[stage] = tuple(list(groups).index(name) for name in names)
    if all(len(group.members) == 1 for group in groups.values()):
        return None
    return RoundSums(tuple(groups.values()), groups_of_stage)


def awaits(round_: Round, peer: PeerState, event: SumsStated) -> bool:
    """Whether a statement answers the check that its sender was sent last."""
    check = round_.sums
    return (
        check is not None
        and bool(check.seed)
        and peer.peer in round_.awaited
        and (event.attempt, event.details) == (round_.attempt, check.details)
    )


def record(
    run: RunState, step: StepState, round_: Round, peer: PeerState, event: SumsStated, now: float
) -> str | None:
    """Enter a member's statement; return the error, as a sentence, that makes it no answer to the
    check, or None."""
    check, statement = round_.sums, event.statement
    assert check is not None, "a statement was awaited"
    expected = (
        run.start.generation,
        step.step,
        round_.attempt,
        round_.members[peer.peer],
        check.seed,
        check.weights or None,
    )
    stated = (
        statement.generation, statement.step, statement.attempt, statement.stage, statement.seed,
        statement.weights,
    )  # fmt: skip
    if stated != expected:
        return "it signed sums of another attempt, or under another seed"
    if len(statement.checks) != len(check.shares[peer.peer]):
        return f"it signed {len(statement.checks)} sums of {len(check.shares[peer.peer])}"
    if not check.details and any(
        digests.parts or digests.results or digests.received for digests in statement.checks
    ):
        return "it signed digests of slices without being asked for them"
    if not check.details and any(
        digests.part_sketch is None or digests.result_sketch is None for digests in statement.checks
    ):
        return "it signed sums without their sketches"
    lie = sums.lie_in(check, peer.peer, statement)
    check.record(peer.peer, SignedSums(statement, event.envelope))
    round_.answer(peer.peer, now)
    if lie is not None:
        _abort(run, round_, now)
        _convict(run, step, round_, peer.peer, lie, now)
    return None


def advance(run: RunState, step: StepState, round_: Round, now: float) -> bool:
    """Return whether the sums of a round, whose members have all answered, have passed all checks;
    otherwise send the next check or abort the round."""
    check = round_.sums
    if check is None or check.agreed:
        return True
    if not check.seeds:
        whole_audits.begin_checks(run, step, round_, check)
    elif check.details:
        _conclude(run, step, round_, check, now)
        return False
    elif not sums.agree(check):
        check.details = True
    elif not sums.sketches_agree(check):
        check.details, check.weights = True, run.audits.draw_secret()
    else:
        reason = _contested(run, step, round_, check, now)
        if reason:
            round_membership.abort(run, round_, reason, now)
            return False
        check.agreed = not check.begin_next()
        if check.agreed:
            return True
    whole_audits.reveal(step, round_, check.seed)
    round_.ask_again(now)
    order = SumCheck(
        step=step.step, attempt=round_.attempt, seed=check.seed, details=check.details,
        weights=check.weights or None,
    )  # fmt: skip
    run.broadcast(sorted(round_.members), order)
    return False


def _contested(run: RunState, step: StepState, round_: Round, check: RoundSums, now: float) -> str:
    """Begin the contests that follow from sums which agree; return why the round is aborted, or
    nothing."""
    if wrong := whole_audits.begin_contests(run, step, round_, check, now):
        return f"{short(wrong[0])} put something else into its average than it counted"
    if outsized := outsized_parts.begin_contests(run, step, round_, check, now):
        return (
            f"{short(outsized[0])} put much more into its average than the others of its stage: "
            "what it counted is audited first"
        )
    return ""


def _conclude(run: RunState, step: StepState, round_: Round, check: RoundSums, now: float) -> None:
    """Abort a round whose sums do not agree, with consequences for those that made it so."""
    owners = {peer: owner_of(run.peers[peer]) for peer in round_.members}
    shown = sums.findings(check, owners, run.audits.entitled)
    since = round_.began_at
    _abort(run, round_, now)
    for peer, reason in shown.lied.items():
        _convict(run, step, round_, peer, reason, now)
    for pair in sorted(shown.contradictions):
        reducer, member = (run.peers[peer] for peer in pair)
        run.note(
            f"{short(reducer.peer)} and {short(member.peer)} contradict each other in what one has "
            f"sent to the other for the average of step {step.step}"
        )
        held_up.dispute(run, reducer, member, since, now, now)
        exclusions.count_failure(run, step, [reducer, member], now, at_once=True)


def _abort(run: RunState, round_: Round, now: float) -> None:
    names = stage_names(round_.stages)
    round_membership.abort(run, round_, f"the sums of {names} are not those of its members", now)


def _convict(
    run: RunState, step: StepState, round_: Round, peer: PeerId, lie: str, now: float
) -> None:
    """Expel the owner of a member whose signed statements show that it lied."""
    check, state = round_.sums, run.peers[peer]
    assert check is not None
    others = (
        envelope
        for other in sorted(check.shares.keys() - {peer})
        for envelope in check.evidence(other)
    )
    record = VerdictRecord(
        step=step.step, microbatch=None, stage=round_.members[peer], peer=peer,
        owner=owner_of(state), audited=peer, reason=lie,
        statements=sum_evidence(check.evidence(peer), others),
    )  # fmt: skip
    verdicts.convict(run, record, now)
