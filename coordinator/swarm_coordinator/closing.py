"""Close, norm, apply: how a complete table becomes one optimizer step, or none at all.

Part of the pure core (design: the life of a step). Two phases: every member of every stage
averages and reports; only then is the decision made durable and everybody told to apply. A
failure before that aborts the attempt, and the accumulators are still there.
"""

from __future__ import annotations

import math
from collections import Counter

from swarm_coordinator import membership, progress, rebalancing, syncing
from swarm_coordinator.events import AppliedStep, Persist, StageShare
from swarm_coordinator.figures import Rejection
from swarm_coordinator.state import (
    Closing,
    PeerPhase,
    PeerState,
    RunPhase,
    RunState,
    StepState,
    short,
)
from swarm_shared.messages import AbortRound, Applied, Apply, Close, Reduction, RoundReport
from swarm_shared.schedule import learning_rate
from swarm_shared.types import PeerId, StageIndex, Version

ABORT_BACKOFF_SECONDS = 0.5
"""Pause after a failed attempt, doubled per attempt up to the maximum below."""
ABORT_BACKOFF_MAXIMUM_SECONDS = 5.0

MAXIMUM_BLAME = 3
"""Failed attempts of one step after which the step closes without the peer that is blamed."""

MAXIMUM_EXCUSES = 4
"""Attempts of one step that may fail through a carrier before somebody is blamed for the next."""

NORM_TOLERANCE = 1e-6
"""Members average to the same bits, but unlike devices add up the squares in another order."""

FINGERPRINT_NORM_TOLERANCE = 1e-5
"""Relative difference of parameter norms that unlike devices may show; like ones agree bitwise."""


def start_close(run: RunState, now: float) -> None:
    """Name each stage's group and tell each member exactly what it may count."""
    step = run.step
    assert step is not None
    run.attempt_counter += 1
    step.attempt = run.attempt_counter
    step.closes += 1
    groups = {
        StageIndex(s): tuple(sorted(p.peer for p in run.ready_peers(s))) for s in run.stage_indices
    }
    members = {peer: stage for stage, group in groups.items() for peer in group}
    switching = rebalancing.switching(run)
    for peer, stage in switching.items():
        groups[stage] = tuple(sorted((*groups[stage], peer)))
    reductions = {stage: _reductions(run, groups, stage) for stage in groups}
    run.phase = RunPhase.CLOSING
    step.closing = Closing(members, now, switching=switching)
    for stage in groups:
        _tell_to_close(run, step, stage, reductions)


def _tell_to_close(
    run: RunState, step: StepState, stage: StageIndex,
    reductions: dict[StageIndex, tuple[Reduction, ...]],
) -> None:  # fmt: skip
    """Each member hears what it holds, and those that hold nothing all hear the same."""
    assert step.closing is not None
    switching = step.closing.switching
    bare = Close(
        step=step.step, attempt=step.attempt, committed=(), reductions=reductions[stage]
    )  # fmt: skip
    idle: list[PeerId] = []
    for member in run.ready_peers(stage):
        peer = member.peer
        held, goes_to = step.table.held_by(peer), switching.get(peer)
        if not held and goes_to is None:
            idle.append(peer)
            continue
        run.send(
            peer,
            Close(
                step=step.step,
                attempt=step.attempt,
                committed=tuple(sorted(microbatch for microbatch, _ in held)),
                reductions=reductions[stage],
                moving=reductions[goes_to] if goes_to is not None else (),
            ),
        )
    run.broadcast(idle, bare)


def _reductions(
    run: RunState, groups: dict[StageIndex, tuple[PeerId, ...]], stage: StageIndex
) -> tuple[Reduction, ...]:
    own = Reduction(part="own", members=groups[stage])
    first, last = StageIndex(0), run.last_stage
    tied = run.manifest.model.tie_embeddings and first != last and stage in (first, last)
    if not tied:
        return (own,)
    both = tuple(sorted(groups[first] + groups[last]))
    return (own, Reduction(part="tied", members=both))


def report(run: RunState, peer: PeerState, message: RoundReport, now: float) -> None:
    step = run.step
    if step is None or message.step != step.step or message.attempt != step.attempt:
        return
    if not message.ok:
        _take_back(run, peer, message)
    if step.closing is None or peer.peer not in step.closing.members:
        return  # another member's failure ended this attempt already
    if run.phase is RunPhase.APPLYING and not message.ok:
        _cannot_apply(run, peer, message, now)
    elif run.phase is not RunPhase.CLOSING:
        return
    elif not message.ok:
        _attempt_failed(run, peer, message, now)
    else:
        _averaged(run, peer, message, now)


def _averaged(run: RunState, peer: PeerState, message: RoundReport, now: float) -> None:
    step = run.step
    assert step is not None
    assert step.closing is not None
    step.closing.reports[peer.peer] = (message.own_squared, message.tied_squared)
    if step.closing.reports.keys() == step.closing.members.keys():
        _decide(run, now)


def _cannot_apply(run: RunState, peer: PeerState, message: RoundReport, now: float) -> None:
    """The step is decided and this member cannot take it: the others go on, it is synced anew."""
    step = run.step
    assert step is not None
    assert step.closing is not None
    del step.closing.members[peer.peer]
    run.mark(peer, Rejection.NOT_APPLIED, f"it could not apply step {step.step}: {message.reason}")
    membership.resync(run, peer, f"it could not apply step {step.step}", now)
    finish_when_applied(run, now)


def _take_back(run: RunState, peer: PeerState, message: RoundReport) -> None:
    """What a failed member says about itself counts, whoever was the first to fail."""
    step, stage = run.step, peer.stage
    assert step is not None
    if message.reset:
        for held in step.table.held_by(peer.peer):
            del step.table[held]
            run.work.cleared += 1
    for microbatch in message.missing:
        if stage is not None:
            cell_key = (microbatch, stage)
            cell = step.table.get(cell_key)
            if cell is not None and cell.peer == peer.peer:
                del step.table[cell_key]


def _attempt_failed(run: RunState, peer: PeerState, message: RoundReport, now: float) -> None:
    step, stage = run.step, peer.stage
    assert step is not None
    culprit = f", it names {short(message.culprit)}" if message.culprit else ""
    # A carrier that fails is nobody's fault, and its members go around it in the next attempt. But
    # who cries so again and again keeps the step from closing, whatever the truth of it.
    excused = message.carrier_failed and step.excuses < MAXIMUM_EXCUSES
    step.excuses += excused
    if message.not_finite and message.reset:
        own = "the sum of its gradients was not finite"
        if membership.replace_state(run, peer, own, now):
            abort(run, f"{short(peer.peer)} of stage {stage}: {message.reason}", now)
            return
    elif message.not_finite:
        run.mark(peer, Rejection.NOT_FINITE, "what came of averaging was not finite at it")
    if not excused and not (message.culprit is not None and _blame(run, message.culprit, 1, now)):
        _blame(run, peer.peer, 1, now)
    abort(run, f"{short(peer.peer)} of stage {stage}: {message.reason}{culprit}", now)


def _blame(run: RunState, peer: PeerId, count: int, now: float) -> bool:
    """Who keeps failing the step, or is named for it, in the end sits it out.

    False when it cannot be the peer's fault, or nothing can be done about it.
    """
    step = run.step
    assert step is not None
    if step.closing is None or peer not in step.closing.members:
        return False
    step.blame[peer] = step.blame.get(peer, 0) + count
    return step.blame[peer] < MAXIMUM_BLAME or progress.exclude(run, peer, now)


def time_out(run: RunState, now: float) -> None:
    """End a close or an apply that does not come to its end; who is silent does not hold it up."""
    step = run.step
    assert step is not None
    closing = step.closing
    assert closing is not None
    limit = run.manifest.limits.lease_seconds
    if run.phase is RunPhase.CLOSING:
        # Large states over slow links take long: the next attempt is given more time.
        if now - closing.began_at > limit * 2 ** min(step.timeouts, 5):
            step.timeouts += 1
            # A whole stage that is silent is slow; one that is silent beside others is stuck.
            done = {closing.members[peer] for peer in closing.reports}
            for peer in sorted(closing.members.keys() - closing.reports.keys()):
                if closing.members[peer] in done:
                    _blame(run, peer, MAXIMUM_BLAME, now)
            abort(run, "it took too long", now)
    elif run.phase is RunPhase.APPLYING and now - closing.decided_at > limit:
        for peer in sorted(closing.members.keys() - closing.applied.keys()):
            run.note(f"{short(peer)} did not apply step {step.step} in time", peer)
            del closing.members[peer]
        finish_when_applied(run, now)


def abort(run: RunState, reason: str, now: float, *, of_death: bool = False) -> None:
    """End this attempt for everybody; nothing has been applied anywhere."""
    step = run.step
    assert step is not None
    assert step.closing is not None
    run.broadcast(
        [member for member in step.closing.members if member in run.peers],
        AbortRound(step=step.step, attempt=step.attempt, reason=reason[:500]),
    )
    if not of_death:
        rebalancing.not_switched(run, step.closing.switching)
    pause = min(ABORT_BACKOFF_MAXIMUM_SECONDS, ABORT_BACKOFF_SECONDS * 2 ** min(step.closes - 1, 5))
    step.close_not_before = max(step.close_not_before, now + pause)
    step.closing = None
    run.phase = RunPhase.COLLECT
    run.note(f"attempt {step.closes} to close step {step.step} failed: {reason}")


def member_lost(run: RunState, peer: PeerId, now: float) -> None:
    """A peer died: before the decision this aborts the attempt, after it the others go on."""
    step = run.step
    if step is None or step.closing is None or peer not in step.closing.members:
        return
    if run.phase is RunPhase.CLOSING:
        abort(run, f"{short(peer)} is gone", now, of_death=True)
    elif run.phase is RunPhase.APPLYING:
        del step.closing.members[peer]
        finish_when_applied(run, now)


def _decide(run: RunState, now: float) -> None:
    """All have averaged: make the step durable, then tell everybody to apply it."""
    step = run.step
    assert step is not None
    assert step.closing is not None
    total = 0.0
    reported: dict[StageIndex, set[tuple[float, float]]] = {}
    for peer, stage in step.closing.members.items():
        reported.setdefault(stage, set()).add(step.closing.reports[peer])
    for stage, squares in sorted(reported.items()):
        own, tied = max(squares)
        if not all(_close(own, other[0]) and _close(tied, other[1]) for other in squares):
            _mark_the_odd(run, stage)
            abort(run, f"replicas of stage {stage} averaged to different gradients", now)
            return
        total += own + (tied if stage == 0 else 0.0)
    if not math.isfinite(total):
        abort(run, "the norm of the whole gradient is not a finite number", now)
        return
    applied = _applied_step(run, math.sqrt(total), now)
    run.commands.append(Persist(applied))
    run.version = Version(step.step)
    run.last_applied = applied
    run.prints.clear()
    run.phase = RunPhase.APPLYING
    step.closing.decided_at = now
    rebalancing.switch(run, step.closing)
    run.broadcast(
        step.closing.members,
        Apply(
            step=step.step,
            attempt=step.attempt,
            global_norm=applied.global_norm,
            learning_rate=applied.learning_rate,
        ),
    )


def _mark_the_odd(run: RunState, stage: StageIndex) -> None:
    """Those that averaged to something else than most of their stage."""
    assert run.step is not None
    assert run.step.closing is not None
    closing = run.step.closing
    squares = {p: closing.reports[p] for p, of in closing.members.items() if of == stage}
    usual, count = Counter(squares.values()).most_common(1)[0]
    for peer_id, own in squares.items():
        peer = run.peers.get(peer_id)
        if peer is not None and own != usual and 2 * count > len(squares):
            reason = "it averaged to another gradient than the others of its stage"
            run.mark(peer, Rejection.OTHER_AVERAGE, reason)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=NORM_TOLERANCE, abs_tol=1e-30)


def _applied_step(run: RunState, norm: float, now: float) -> AppliedStep:
    step = run.step
    assert step is not None
    last = run.last_stage
    losses = [cell for (_, stage), cell in step.table.items() if stage == last]
    tokens = sum(cell.tokens for cell in losses)
    shares = Counter((cell.peer, stage) for (_, stage), cell in step.table.items())
    per_microbatch = run.manifest.tokens_per_microbatch
    return AppliedStep(
        step=step.step,
        attempt=step.attempt,
        # fsum: the mean must not depend on the order in which receipts arrived.
        loss=math.fsum(cell.loss_sum or 0.0 for cell in losses) / tokens,
        tokens=tokens,
        seconds=now - step.began_at,
        global_norm=norm,
        learning_rate=learning_rate(run.manifest.optimizer, run.manifest.training.steps, step.step),
        shares=tuple(
            StageShare(peer, stage, count, count * per_microbatch)
            for (peer, stage), count in sorted(shares.items())
        ),
    )


def applied(run: RunState, peer: PeerState, message: Applied, now: float) -> None:
    late, peer.catching_up = peer.catching_up == message.step, None
    if Version(message.step) != run.version:
        if late:
            peer.source_asked = False  # it caught up with a step that is already history
        return
    step = run.step
    closing = step.closing if step is not None else None
    if run.phase is RunPhase.APPLYING and closing and peer.peer in closing.members:
        peer.version = Version(message.step)
        closing.applied[peer.peer] = (message.digest, message.norm)
        finish_when_applied(run, now)
    elif late:
        # It had missed the word to apply while the coordinator was away.
        peer.version, peer.phase = Version(message.step), PeerPhase.READY
        progress.commit_early(run, peer)
        run.on_branch.add(peer.peer)
        run.roster_dirty = True


def finish_when_applied(run: RunState, now: float) -> None:
    """When every living member has applied, compare replicas and open the way to the next step."""
    step = run.step
    assert step is not None
    assert step.closing is not None
    closing = step.closing
    if not closing.members.keys() <= closing.applied.keys():
        return  # who applied and died since is in neither
    run.step = None
    run.phase = RunPhase.WAITING
    run.snapshots.clear()
    run.roster_dirty = True
    prints: dict[StageIndex, dict[PeerId, tuple[str, float]]] = {}
    for member, stage in closing.members.items():
        prints.setdefault(stage, {})[member] = closing.applied[member]
    run.prints.clear()
    for stage, of_stage in sorted(prints.items()):
        _compare_replicas(run, stage, of_stage, now)
    syncing.version_changed(run, now)
    for peer in list(run.peers.values()):
        if peer.phase is PeerPhase.READY and peer.version != run.version:
            # It attached in the middle of the close, sat it out, or did not apply in time.
            membership.resync(run, peer, f"it missed step {run.version}", now)


def _compare_replicas(
    run: RunState, stage: StageIndex, prints: dict[PeerId, tuple[str, float]], now: float
) -> None:
    """Replicas on like devices are equal to the bit, on unlike ones within rounding.

    Which devices are alike, nobody can tell from their names. Who has agreed with the majority
    before is like them, so that a later difference is a fault of its own.
    """
    digest_of_most, count = Counter(digest for digest, _ in prints.values()).most_common(1)[0]
    majority = digest_of_most if 2 * count > len(prints) and count > 1 else None
    (_, majority_norm), _ = Counter(prints.values()).most_common(1)[0]
    agreed: set[str] = set()
    for peer_id, (digest, norm) in prints.items():
        peer = run.peers.get(peer_id)
        if peer is None:
            continue
        near = math.isclose(norm, majority_norm, rel_tol=FINGERPRINT_NORM_TOLERANCE)
        if digest == majority:
            peer.like_the_majority = True
        elif not near or (majority is not None and peer.like_the_majority):
            reason = f"its parameters of stage {stage} differed from the majority's"
            run.mark(peer, Rejection.OTHER_PARAMETERS, reason)
            membership.resync(run, peer, "its parameters differed from the majority's", now)
            continue
        agreed.add(digest)
    run.prints[stage] = frozenset(agreed)
