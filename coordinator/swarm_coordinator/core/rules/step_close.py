"""Close, norm, apply: how a complete table becomes one optimizer step.

Part of the pure core (design: the life of a step). Two phases: every member of every stage averages
and reports, and the sums are checked (`swarm_coordinator.core.rules.closing.sum_checks`); then the
decision is made durable and every member is instructed to apply it. Stages that share nothing
average in rounds of their own (`swarm_coordinator.core.state.close`), each as soon as its own part
of the table is complete: when one round fails, its accumulators still exist and the other rounds
stand. Removing a member from a round is the matter of
`swarm_coordinator.core.rules.round_membership`.
"""

from __future__ import annotations

import math
from collections import Counter

from swarm_coordinator.core.events import (
    AgreementsRecord,
    AppliedStep,
    Persist,
    Remember,
    StageShare,
    StateDigestsRecord,
    SumsStated,
)
from swarm_coordinator.core.rules import (
    held_up,
    membership,
    not_finite,
    rebalancing,
    round_membership,
    state_transfer,
)
from swarm_coordinator.core.rules.closing import exclusions, step_times, sum_checks, time_limits
from swarm_coordinator.core.rules.microbatches import cells
from swarm_coordinator.core.rules.release import Release, release
from swarm_coordinator.core.state.close import Round, SquaredNorms
from swarm_coordinator.core.state.peers import PeerPhase, PeerState, owner_of, short
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState, enter_phase
from swarm_coordinator.core.state.steps import RelayedFailure, StepState
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_coordinator.core.trust.majority import Statement
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.protocol import Applied, Apply, Close, Reduction, RoundReport
from swarm_shared.run.schedule import learning_rate
from swarm_shared.scheduling.placement import reduce_weights

MAX_CARRIER_FAILURES = 4
"""Attempts of one step that may fail through a carrier before a failure is attributed to a peer."""

FINGERPRINT_NORM_TOLERANCE = 1e-5
"""Relative difference of parameter norms allowed between unlike devices; like devices agree
bitwise."""

_OTHER_STATE = "it does not hold the state that it claims"


def close_complete_stages(run: RunState, step: StepState, now: float) -> None:
    """Open the rounds of stages that have counted all microbatches, while other stages compute.

    After a round of the step has failed, further rounds wait for the whole table (`start_close`),
    since the failure may have to be settled first.
    """
    size = len(cells.indices_of_step(run))
    if len(step.table) < size or step.failed_rounds or now < step.close_not_before:
        return
    settled = _settled_stages(run, step, size, now)
    if settled:
        switching = rebalancing.switching(run)
        rounds = [stages for stages in _unopened_rounds(run, switching) if stages <= settled]
        _open_rounds(run, step, rounds, switching, now)


def _settled_stages(run: RunState, step: StepState, size: int, now: float) -> set[StageIndex]:
    """Return the stages without a round that have counted all of a step's microbatches, `size`, and
    that no audit, chain of transcripts, removal or download delays."""
    complete = {
        stage
        for stage in run.stage_indices
        if step.table.filled_of_stage(stage) == size and run.steps.round_of(stage) is None
    }
    if complete:
        complete -= step.audits.stages() | state_transfer.delayed_stages(run, now)
    return complete


def start_close(run: RunState, step: StepState, now: float) -> None:
    """Open the rounds of all stages without one; the table is complete."""
    switching = rebalancing.switching(run)
    _open_rounds(run, step, _unopened_rounds(run, switching), switching, now)
    enter_phase(run, RunPhase.CLOSING)
    advance_close(run, now)


def _unopened_rounds(
    run: RunState, switching: dict[PeerId, StageIndex]
) -> list[frozenset[StageIndex]]:
    """Group the stages without a round into rounds."""
    stages = [stage for stage in run.stage_indices if run.steps.round_of(stage) is None]
    pairs = [
        (stage, to) for p, to in switching.items() if (stage := run.peers[p].stage) is not None
    ]
    if run.tied_stages().intersection(stages):
        pairs.append((StageIndex(0), run.last_stage))
    return _connected_stages(stages, pairs)


def _open_rounds(
    run: RunState, step: StepState, rounds: list[frozenset[StageIndex]],
    switching: dict[PeerId, StageIndex], now: float,
) -> None:  # fmt: skip
    """Open rounds, and send each member its group and commit set."""
    if not rounds:
        return
    opened = sorted(stage for stages in rounds for stage in stages)
    run.steps.last_attempt += 1
    step.attempt = run.steps.last_attempt
    # The rounds that open one after another until one fails are the first attempt.
    step.closes += not step.closing.rounds or bool(step.failed_rounds)
    members = {stage: [p.peer for p in run.peers.ready(stage)] for stage in opened}
    groups = {
        stage: tuple(sorted(members[stage] + [p for p, to in switching.items() if to == stage]))
        for stage in opened
    }
    reductions = {stage: _reductions(run, groups, stage) for stage in opened}
    owners = {p: owner_of(run.peers[p]) for stage in opened for p in members[stage]}
    for stages in rounds:
        step.attempts.update(dict.fromkeys(stages, step.attempt))
        round_reductions = {stage: reductions[stage] for stage in sorted(stages)}
        step.closing.open(
            Round(
                attempt=step.attempt,
                stages=stages,
                members={peer: stage for stage in sorted(stages) for peer in members[stage]},
                owners={p: owners[p] for stage in stages for p in members[stage]},
                voters={s: run.audits.voters({owners[p] for p in members[s]}) for s in stages},
                began_at=now,
                switching={p: to for p, to in switching.items() if to in stages},
                sums=sum_checks.planned(run, round_reductions),
            )
        )
    for stage in opened:
        _send_close(run, step, stage, reductions, switching)


def _connected_stages(
    stages: list[StageIndex], pairs: list[tuple[StageIndex, StageIndex]]
) -> list[frozenset[StageIndex]]:
    """Group the stages into rounds: stages connected by pairs, directly or not, share a round."""
    groups = {stage: frozenset((stage,)) for stage in stages}
    for first, second in pairs:
        merged = groups[first] | groups[second]
        groups.update(dict.fromkeys(merged, merged))
    return list(dict.fromkeys(groups.values()))


def _send_close(
    run: RunState, step: StepState, stage: StageIndex,
    reductions: dict[StageIndex, tuple[Reduction, ...]], switching: dict[PeerId, StageIndex],
) -> None:  # fmt: skip
    """Send Close to the members of a stage; members with an empty commit set share one message."""
    bare = Close(
        step=step.step, attempt=step.attempt, committed=(), reductions=reductions[stage]
    )  # fmt: skip
    idle: list[PeerId] = []
    sums = step.closing.rounds[stage].sums
    for member in run.peers.ready(stage):
        peer = member.peer
        # A peer that has changed stage in this step may have cells in the old stage's average.
        held = sorted(m for m, of_stage in step.table.held_by(peer) if of_stage == stage)
        goes_to = switching.get(peer)
        if sums is not None:
            sums.add_member(peer, stage, goes_to, contributes=bool(held))
        if not held and goes_to is None:
            idle.append(peer)
            continue
        run.send(
            peer,
            Close(
                step=step.step,
                attempt=step.attempt,
                committed=tuple(held),
                reductions=reductions[stage],
                moving=reductions[goes_to] if goes_to is not None else (),
            ),
        )
    run.broadcast(idle, bare)


def _reductions(
    run: RunState, groups: dict[StageIndex, tuple[PeerId, ...]], stage: StageIndex
) -> tuple[Reduction, ...]:
    own = Reduction(part="own", members=groups[stage], weights=_weights(run, groups[stage]))
    if stage not in run.tied_stages():
        return (own,)
    both = tuple(sorted(groups[StageIndex(0)] + groups[run.last_stage]))
    return (own, Reduction(part="tied", members=both, weights=_weights(run, both)))


def _weights(run: RunState, members: tuple[PeerId, ...]) -> tuple[int, ...]:
    """Reduce-scatter weights by uplink: a member sends what it sums to all other members."""
    return reduce_weights([run.peers[peer].rates.up_bytes_per_second for peer in members])


def report(run: RunState, peer: PeerState, message: RoundReport, now: float) -> None:
    """Handle a member's report of its averaging round."""
    step = run.steps.current
    transfer = peer.transfer
    if transfer is not None and transfer.missed_apply == message.step and not message.ok:
        _cannot_apply(run, peer, message, now)
        return
    if step is None or peer.stage is None or message.step != step.step:
        return
    if message.attempt != step.attempts.get(peer.stage):
        return
    round_ = step.closing.round_of(peer.peer)
    if round_ is None:
        # Another member's failure has ended this attempt already. A failure report still counts
        # against its own sender, unless the sender's gradient is in an average that stands.
        if not message.ok and run.steps.round_of(peer.stage) is None:
            _clear_unaccumulated(run, step, peer, peer.stage, message)
            _record_late_observation(run, step, peer, message, now)
    elif run.phase is RunPhase.APPLYING:
        if not message.ok:
            _cannot_apply(run, peer, message, now)
    elif not message.ok:
        _clear_unaccumulated(run, step, peer, peer.stage, message)
        _attempt_failed(run, step, round_, peer, message, now)
    elif peer.peer not in round_.reports:
        time_limits.charge_late_report(run, step, round_, peer, now)
        round_.record(peer.peer, SquaredNorms(message.own_squared, message.tied_squared), now)
        if not round_.awaited:
            advance_close(run, now)


def sums_stated(run: RunState, peer: PeerState, event: SumsStated, now: float) -> None:
    """Handle a member's answer to a check of sums; an answer to another check is ignored."""
    step = run.steps.current
    round_ = None if step is None else step.closing.round_of(peer.peer)
    if step is None or round_ is None or not sum_checks.awaits(round_, peer, event):
        return
    time_limits.charge_late_report(run, step, round_, peer, now)
    error = sum_checks.record(run, step, round_, peer, event, now)
    if error is not None:
        failure = RoundReport(step=step.step, attempt=round_.attempt, ok=False, reason=error)
        _attempt_failed(run, step, round_, peer, failure, now)
    elif not round_.awaited:
        advance_close(run, now)


def advance_close(run: RunState, now: float) -> None:
    """Continue the close once the last awaited answer has arrived or its sender has left."""
    step = run.steps.current
    if step is None or not step.closing.rounds:
        return
    if run.phase is RunPhase.APPLYING:
        _finish_when_applied(run, step, now)
        return
    closing = step.closing
    for round_ in closing.each_round():
        if round_.awaited or round_.averaged:
            continue
        if sum_checks.advance(run, step, round_, now):
            _check_agreement(run, step, round_, now)
    if run.phase is RunPhase.CLOSING and all(r.averaged for r in closing.each_round()):
        _decide(run, step, now)


def _cannot_apply(run: RunState, peer: PeerState, message: RoundReport, now: float) -> None:
    """Sync a member anew that cannot apply the decided step; the other members go on."""
    reason = f"it could not apply step {message.step}"
    run.flag(peer, Rejection.NOT_APPLIED, f"{reason}: {message.reason}")
    membership.resync(run, peer, reason, now)


def _clear_unaccumulated(
    run: RunState, step: StepState, peer: PeerState, stage: StageIndex, message: RoundReport
) -> None:
    """Clear the cells that a failed member reports as lost, also after its attempt has ended."""
    if message.reset:
        step.lost_all(peer.peer)
    elif message.missing:
        step.lost(peer.peer, message.missing)
    if message.reset:
        cells.clear_counted(run, step, peer.peer, (stage,))
    for microbatch in message.missing:
        cell_key = (microbatch, stage)
        cell = step.table.get(cell_key)
        if cell is not None and cell.peer == peer.peer:
            del step.table[cell_key]


def _attempt_failed(
    run: RunState, step: StepState, failed: Round, peer: PeerState, message: RoundReport, now: float
) -> None:
    """Abort the round of a failed member, and attribute the failure."""
    culprit = f", it names {short(message.culprit)}" if message.culprit else ""
    # Abort first: no member is to be removed from a sum that will never be complete.
    round_membership.abort(
        run, failed, f"{short(peer.peer)} of stage {peer.stage}: {message.reason}{culprit}", now
    )
    # A carrier failure excludes no member, and the members avoid that carrier in the next
    # attempt. A peer that keeps reporting carrier failures would block the close forever, so the
    # number of excused failures is limited per step.
    excused = message.carrier_failed and step.carrier_failures < MAX_CARRIER_FAILURES
    step.carrier_failures += excused
    # The run has lost the attempt and the pause after it.
    since, until = failed.began_at, max(now, step.close_not_before)
    aborter = message.aborted_by if message.aborted_by in failed.members else None
    if aborter not in (None, peer.peer) and not (message.carrier_failed or message.not_finite):
        step.relayed_failures[failed.attempt] = RelayedFailure(peer.peer, aborter, since, until)
        return
    accused = run.peers.get(message.culprit) if message.culprit in failed.members else None
    parties = _charge_failure(run, peer, accused, since, until, now)
    if message.not_finite and message.reset:
        not_finite.replace_state(run, peer, "the sum of its gradients was not finite", now)
        return
    if message.not_finite:
        run.flag(peer, Rejection.NOT_FINITE, "its averaged gradient was not finite")
    if not excused:
        exclusions.count_failure(run, step, parties, now, at_once=accused is peer)


def _charge_failure(
    run: RunState, peer: PeerState, accused: PeerState | None, since: float, until: float,
    now: float,
) -> list[PeerState]:  # fmt: skip
    """Charge a failed attempt to all that may have caused it; return them."""
    if accused is None or accused is peer:
        held_up.charge(run, peer, since, until, now)
        return [peer]
    held_up.dispute(run, peer, accused, since, until, now)
    return [peer, accused]


def _record_late_observation(
    run: RunState, step: StepState, peer: PeerState, message: RoundReport, now: float
) -> None:
    """Handle a failure report of an ended attempt, if the member itself has observed the
    failure."""
    accused = run.peers.get(message.culprit) if message.culprit is not None else None
    if message.aborted_by is not None or message.carrier_failed:
        return
    relayed = step.relayed_failures.pop(message.attempt, None)
    if relayed is not None:
        parties = _charge_failure(run, peer, accused, relayed.since, relayed.until, now)
        exclusions.count_failure(run, step, parties, now, at_once=accused is peer)
    elif accused is not None and accused is not peer:
        exclusions.record_failed_average(run, step, peer, accused, now)


def attribute_relayed(run: RunState, step: StepState, now: float) -> None:
    """Attribute the failures that no member has reported as its own observation.

    Each one is charged to the member that reported it and to the member whose ABORT it received.
    """
    failures, step.relayed_failures = step.relayed_failures, {}
    for failure in failures.values():
        reporter, aborter = run.peers.get(failure.reporter), run.peers.get(failure.aborted_by)
        if reporter is None:
            continue
        parties = _charge_failure(run, reporter, aborter, failure.since, failure.until, now)
        exclusions.count_failure(run, step, parties, now)


def _check_agreement(run: RunState, step: StepState, round_: Round, now: float) -> None:
    """Accept a round whose members have all averaged to the same norms.

    A member that differs from the owners that decide is excluded from the step. Where no norms have
    a majority the round is averaged once more, since most accidents do not recur; after that the
    members decide that agree with the one that has been attached longest. Equal sums give equal
    norms to the bit on any device: the squares are added in a fixed order.
    """
    norms_by_stage: dict[StageIndex, dict[PeerId, SquaredNorms]] = {}
    for member, squares in round_.reports.items():
        stage = round_.members.get(member, round_.kept.get(member))
        if stage is not None:
            norms_by_stage.setdefault(stage, {})[member] = squares
    agreed = {
        stage: run.audits.decide(
            Statement(p, round_.owners[p], _attached_since(run, p), squares)
            for p, squares in reported.items()
        )
        for stage, reported in sorted(norms_by_stage.items())
    }
    split = [
        stage for stage, own_norms in agreed.items() if own_norms and not own_norms.has_majority
    ]
    if split and not step.has_disagreed:
        step.has_disagreed = True
        reason = f"replicas of stage {split[0]} averaged to different gradients"
        round_membership.abort(run, round_, reason, now)
        return
    round_.averaged_at = now
    for stage, reported in norms_by_stage.items():
        if (decision := agreed[stage]) is None:
            continue  # not without a report of the stage
        decided = round_.squares[stage] = decision.value
        for peer_id, own_norms in reported.items():
            peer = run.peers.get(peer_id)
            if own_norms != decided and peer is not None and peer_id in round_.members:
                reason = "it averaged to a different gradient than the rest of its stage"
                run.flag(peer, Rejection.OTHER_AVERAGE, reason)
                release(run, peer, Release.STEP, now)


def _attached_since(run: RunState, peer_id: PeerId) -> float:
    """The number of a peer's session; infinite for a peer that has left, which counts as the
    last."""
    peer = run.peers.get(peer_id)
    return math.inf if peer is None else peer.session


def _decide(run: RunState, step: StepState, now: float) -> None:
    """Make the step durable, then instruct every member to apply it."""
    closing, total = step.closing, 0.0
    for stage, round_ in sorted(closing.rounds.items()):
        own, tied = round_.squares[stage]
        total += own + (tied if stage == 0 else 0.0)
    if not math.isfinite(total):
        round_membership.abort_all(
            run, "the norm of the whole gradient is not a finite number", now
        )
        return
    applied = _applied_step(run, step, math.sqrt(total), now)
    run.commands.append(Persist(applied))
    if run.audits.settings.rolls_back:
        counted = (run.peers.get(share.peer) for share in applied.shares)
        run.audits.standings.applied({owner_of(peer) for peer in counted if peer}, applied.step)
    run.persist_standings()
    if agreements := run.audits.classes.take_changed():
        run.commands.append(Remember(AgreementsRecord(agreements)))
    run.history.apply(applied)
    run.peers.record_counted(applied.shares)
    run.history.averaging_seconds = max(r.averaged_at - r.began_at for r in closing.each_round())
    enter_phase(run, RunPhase.APPLYING)
    closing.decided_at = now
    rebalancing.apply_switches(run, closing)
    for round_ in closing.each_round():
        run.broadcast(
            round_.members,
            Apply(
                step=step.step,
                attempt=round_.attempt,
                global_norm=applied.global_norm,
                learning_rate=applied.learning_rate,
            ),
        )


def _applied_step(run: RunState, step: StepState, norm: float, now: float) -> AppliedStep:
    last = run.last_stage
    last_cells = [cell for (_, stage), cell in step.table.items() if stage == last]
    tokens = sum(cell.tokens for cell in last_cells)
    shares = Counter((cell.peer, stage) for (_, stage), cell in step.table.items())
    per_microbatch = run.manifest.tokens_per_microbatch
    attempts = tuple(step.closing.rounds[stage].attempt for stage in run.stage_indices)
    return AppliedStep(
        step=step.step,
        attempt=step.attempt,
        # fsum: the mean must not depend on the order in which receipts arrive.
        loss=math.fsum(cell.loss_sum or 0.0 for cell in last_cells) / tokens,
        tokens=tokens,
        seconds=now - step.previous_applied_at,
        global_norm=norm,
        learning_rate=learning_rate(run.manifest.optimizer, run.manifest.training.steps, step.step),
        shares=tuple(
            StageShare(peer, stage, count, count * per_microbatch)
            for (peer, stage), count in sorted(shares.items())
        ),
        attempts=attempts if set(attempts) != {step.attempt} else (),
    )


def applied(run: RunState, peer: PeerState, message: Applied, now: float) -> None:
    """Handle a member's confirmation that it has applied a step."""
    transfer, step, version = peer.transfer, run.steps.current, Version(message.step)
    late = transfer if transfer is not None and transfer.missed_apply == message.step else None
    if late is not None:
        late.missed_apply = None
    if version != run.history.version:
        if late is not None:
            # It has caught up with a step that is not the last one.
            run.peers.lose_source(peer, late)
        return
    if step is not None and run.phase is RunPhase.APPLYING and peer.peer in step.closing.members:
        run.peers.set_version(peer, version)
        if step.closing.most_applied_at and peer.peer not in step.closing.applied:
            time_limits.charge_late_apply(run, step, peer, now)
        step.closing.record_applied(peer.peer, (message.digest, message.norm), now)
        _finish_when_applied(run, step, now)
    elif late is not None and not run.history.may_be(late.stage, message.digest):
        membership.resync(run, peer, _OTHER_STATE, now)
    elif late is not None:
        # It missed the Apply while the coordinator was unavailable.
        run.hold(peer, late.stage, version)
        run.peers.claim(peer, message.digest)
        cells.commit_early_receipts(run, peer, now)
        run.history.members.add(peer.peer)
        run.roster.dirty = True


def _finish_when_applied(run: RunState, step: StepState, now: float) -> None:
    """Once every remaining member has applied, compare replicas and end the step."""
    closing = step.closing
    if not closing.members.keys() <= closing.applied.keys():
        return  # a member that applied and was lost since is in neither
    run.commands.append(Remember(step_times.of_applied_step(step, now)))
    enter_phase(run, RunPhase.WAITING)
    run.checkpoints.snapshots.clear()
    run.roster.dirty = True
    fingerprints: dict[StageIndex, dict[PeerId, tuple[str, float]]] = {}
    for member, stage in closing.members.items():
        fingerprints.setdefault(stage, {})[member] = closing.applied[member]
    run.history.fingerprints.clear()
    for stage, members in sorted(fingerprints.items()):
        _compare_replicas(run, stage, members, now)
    run.commands.append(Remember(StateDigestsRecord(run.history.version, run.history.digests())))
    state_transfer.version_changed(run, now)
    for peer in list(run.peers.values()):
        claimed, peer.claimed_digest = peer.claimed_digest, None
        if peer.phase is not PeerPhase.READY or peer.stage is None:
            continue
        if peer.version != run.history.version:
            # It attached during the close, was excluded, or did not apply in time.
            membership.resync(run, peer, f"it missed step {run.history.version}", now)
        elif claimed is None or peer.peer in closing.members:
            continue
        elif not run.history.may_be(peer.stage, claimed):
            run.flag(peer, Rejection.OTHER_PARAMETERS, _OTHER_STATE)
            membership.resync(run, peer, _OTHER_STATE, now)


def _compare_replicas(
    run: RunState, stage: StageIndex, fingerprints: dict[PeerId, tuple[str, float]], now: float
) -> None:
    """Flag and resync replicas with a different fingerprint: bitwise on like devices, else by norm.

    Device names do not show which devices are alike. A peer that has agreed with the majority
    before is like it, so that a later mismatch is attributed to this peer alone.
    """
    decision = run.audits.decide(
        Statement(p, owner_of(peer), peer.session, fingerprint)
        for p, fingerprint in fingerprints.items()
        if (peer := run.peers.get(p)) is not None
    )
    if decision is None:
        return
    decided, majority_norm = decision.value
    count = sum(digest == decided for digest, _ in fingerprints.values())
    majority = decided if decision.has_majority and count > 1 else None
    agreed: set[str] = set()
    for peer_id, (digest, norm) in fingerprints.items():
        peer = run.peers.get(peer_id)
        if peer is None:
            continue
        near = math.isclose(norm, majority_norm, rel_tol=FINGERPRINT_NORM_TOLERANCE)
        if digest == majority:
            peer.matched_majority = True
        elif not near or (majority is not None and peer.matched_majority):
            reason = f"its parameters of stage {stage} differed from the majority's"
            run.flag(peer, Rejection.OTHER_PARAMETERS, reason)
            membership.resync(run, peer, "its parameters differed from the majority's", now)
            continue
        if owner_of(peer) in decision.voters:
            agreed.add(digest)
    run.history.fingerprints[stage] = frozenset(agreed)
