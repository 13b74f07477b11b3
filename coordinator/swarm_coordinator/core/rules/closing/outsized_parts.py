"""Outsized parts in a close: a member that puts in much more than others is audited whole.

Part of the pure core (docs/decisions, number 0058). A member that is not drawn for a whole audit
could otherwise put in any vector, and decide the step. What it has put in is exchanged and stated
by then: so the audit needs not be hidden from it. The round is aborted, and the step waits for the
auditors. If they agree, the next round proves that the member puts in the same
(`swarm_coordinator.core.rules.closing.whole_audits`); if not, more of them decide.
"""

from __future__ import annotations

from collections import defaultdict

from swarm_coordinator.core.rules.closing import whole_audits
from swarm_coordinator.core.rules.closing.whole_audits import Member
from swarm_coordinator.core.state.close import Round
from swarm_coordinator.core.state.peers import owner_of
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.trust.part_norms import KNOWN_SHARE, PutIn, outsized
from swarm_coordinator.core.trust.sums import RoundSums, part_sketch
from swarm_coordinator.core.trust.whole_audits import WholeAudit
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.identity.norm_sketch import sketched_norm


def begin_contests(
    run: RunState, step: StepState, round_: Round, check: RoundSums, now: float
) -> list[PeerId]:
    """The members that have put in much more than the others of their stage, by the sums under the
    first seed; what they have counted is audited. As many as one attempt compares, the largest
    parts first."""
    if check.seed_index:
        return []
    ratios = {
        member: ratio
        for member, ratio in _ratios(run, step, round_, check).items()
        if not (_is_settled(step, check, member) or _is_known(run, member[1], ratio))
    }
    contested = sorted(ratios, key=ratios.__getitem__, reverse=True)[: whole_audits.MAX_CHECKED]
    for member in contested:
        contest = whole_audits.contest_of(run, step, member, check.totals[member[0]], now)
        step.audits.whole[member] = WholeAudit(
            check.secret, attempt=round_.attempt, contest=contest, ratio=ratios[member]
        )
    return [peer for peer, _ in contested]


def _is_known(run: RunState, stage: StageIndex, ratio: float) -> bool:
    """Whether as large a part of this stage was proved before, and this one is not drawn."""
    known = run.audits.proved_ratios.get(stage, 0.0)
    return ratio <= known and run.audits.draw() >= KNOWN_SHARE


def _is_settled(step: StepState, check: RoundSums, member: Member) -> bool:
    """Whether a member's part is compared with audits in this round, as far as there are any."""
    whole_audit = step.audits.whole.get(member)
    return whole_audit is not None and whole_audit.seed in check.seeds


def _ratios(run: RunState, step: StepState, round_: Round, check: RoundSums) -> dict[Member, float]:
    """The members with outsized parts, each with the largest ratio."""
    ratios: dict[Member, float] = {}
    for (stage, _), parts in _parts(run, step, round_, check).items():
        for peer, ratio in outsized(parts, run.audits.entitled).items():
            ratios[peer, stage] = max(ratio, ratios.get((peer, stage), 0.0))
    return ratios


def _parts(
    run: RunState, step: StepState, round_: Round, check: RoundSums
) -> dict[tuple[StageIndex, int], dict[PeerId, PutIn]]:
    """What the members of each stage have put in, by stage and part of the gradient."""
    parts: dict[tuple[StageIndex, int], dict[PeerId, PutIn]] = defaultdict(dict)
    for peer, stage in round_.members.items():
        counted = len(whole_audits.cells_of(step.table, (peer, stage)))
        if counted:
            checks = check.totals[peer].statement.checks[: run.averaged_parts(stage)]
            for part, stated in enumerate(checks):
                norm = sketched_norm(part_sketch(stated))
                parts[stage, part][peer] = PutIn(owner_of(run.peers[peer]), counted, norm)
    return parts
