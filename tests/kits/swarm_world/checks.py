"""Invariants of the simulated world, checked at every record, message and tick."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from kits.swarm_world.facts import (
    CERTIFICATE_SECONDS,
    Violation,
    own_squared,
    tied_squared,
    train_loss,
)
from swarm_coordinator.core import events
from swarm_coordinator.core.rules.microbatches.cells import applies_current
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_shared.base.types import PeerId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import (
    Applied,
    Apply,
    AssignStage,
    Lease,
    Roster,
    RosterChange,
    StageRequest,
)
from swarm_shared.run.schedule import learning_rate

if TYPE_CHECKING:
    from kits.swarm_world.network import Link
    from kits.swarm_world.peer import SimPeer
    from kits.swarm_world.stage import Stage
    from kits.swarm_world.worker import SimWorker
    from kits.swarm_world.world import World

REVOCATION_SECONDS = 5.0
"""Seconds within which a revocation reaches every attached peer."""

MOST_MASK_SECONDS = 20.0
"""Seconds within which a mask request is answered, or its session ends; both ends of a dead link
take up to 15 to notice."""

MOST_LEAVING_SECONDS = 400.0
"""Seconds within which a peer that leaves is released."""

PROGRESS_SECONDS = 200.0
"""Seconds within which an undisturbed run with enough peers writes a record: several times the
longest lease, and a few bans of the dispatchers."""


def one_by_one(commands: list[events.Command]) -> list[events.Command]:
    """Expand each Broadcast into one Send per peer."""
    found: list[events.Command] = []
    for command in commands:
        if isinstance(command, events.Broadcast) and not isinstance(command.message, RosterChange):
            found += [events.Send(peer, command.message) for peer in command.peers]
        else:
            found.append(command)
    return found


def check_batch(run: RunState, version: int, commands: list[events.Command]) -> None:
    """No peer is assigned two stages in one batch of commands; it would download twice. The run's
    version grows by one, but for a roll-back."""
    records = [c.record for c in commands if isinstance(c, events.Persist)]
    applied = sum(isinstance(record, events.AppliedStep) for record in records)
    back = any(isinstance(record, events.RolledBack) for record in records)
    if run.history.version != version + applied and not back:
        raise Violation(f"version {version} became {run.history.version} by {records}")
    assigned = [
        (c.peer, c.message.version)
        for c in commands
        if isinstance(c, events.Send) and isinstance(c.message, AssignStage)
    ]
    if len(assigned) != len(set(assigned)):
        raise Violation(f"two assignments at once: {commands}")


def check_send(world: World, command: events.Send) -> None:
    message, run = command.message, world.run_state
    assert run is not None
    if isinstance(message, Apply):
        last = world.store.applied.get(message.step)
        peer = run.peers.get(command.peer)
        stage = peer.stage if peer is not None else None
        holding = world.peers[command.peer].holding
        if run.phase is RunPhase.FINISHED and holding is not None:
            stage = holding.index  # the same event has ended the run
        # The event that has sent it may have removed a silent peer after that.
        stages = run.stage_indices if stage is None else [stage]
        if last is None or message.attempt not in map(last.attempt_of, stages):
            raise Violation(f"{message} is sent before it is durable")
    elif isinstance(message, Lease):
        version = run.history.version
        if not version < message.step <= version + 1 + world.options.staleness:
            raise Violation(f"{message} at version {version}")
        world.counts["lease of a later step"] += message.step > version + 1
        trainer = run.peers.get(command.peer)
        others = [p for p in run.peers.values() if not p.leaving]
        if (
            trainer is not None
            and trainer.leaving
            and any(p.phase is PeerPhase.READY for p in others)
        ):
            raise Violation(f"{command.peer} is leaving and gets {message}")
        if trainer is not None and trainer.paused:
            raise Violation(f"{command.peer} pauses and gets {message}")
    elif isinstance(message, Roster):
        check_revoked(world, message)
        for record in message.peers:
            peer = run.peers.get(record.peer)
            rest = [p for p in run.peers.ready(record.stage) if not p.leaving and not p.paused]
            # While a step is applied the last roster stands, with revoked peers removed.
            stands = run.phase is RunPhase.APPLYING
            if peer is not None and peer.leaving and record.accepts_work and rest and not stands:
                raise Violation(f"{record.peer} is leaving and is offered as {record}")
            if peer is not None and peer.paused and record.accepts_work and not stands:
                raise Violation(f"{record.peer} pauses and is offered as {record}")


def check_revoked(world: World, roster: Roster) -> None:
    """A revoked peer is in no roster, and is listed as revoked while its certificate is valid."""
    now = world.now
    banned = {p for p, since in world.banned.items() if now - since < CERTIFICATE_SECONDS}
    if not banned <= set(roster.revoked):
        raise Violation(f"{banned} are banned but the roster revokes {roster.revoked}")
    if offered := [r.peer for r in roster.peers if r.peer in world.banned]:
        raise Violation(f"{offered} are banned but in the roster")


def check_served(peer: SimPeer, sender: PeerId) -> None:
    """No attached peer serves a revoked peer for more than a few seconds."""
    world, link = peer.world, peer.link
    since = world.banned.get(sender)
    if since is None or world.run_state is None or not peer.attached or link is None:
        return
    # A peer that has hung, or whose link loses or delays everything, may not know yet.
    if link.deaf or link.lag_seconds or not link.open:
        return
    if world.now - max(since, peer.attached_at, peer.woke_at) > REVOCATION_SECONDS:
        raise Violation(f"{peer.id} serves {sender}, banned at {since}: {world.describe()}")


def check_record(world: World, record: object) -> None:
    if isinstance(record, events.AppliedStep):
        check_applied(world, record)
    elif isinstance(record, events.RolledBack):
        newest = max(world.store.checkpoints, default=0)
        stored = world.store.checkpoints if world.options.rolls_back else (newest,)
        if record.version not in (stored or (0,)) or record.version >= world.store.version:
            raise Violation(f"{record} with checkpoint {newest} at {world.store.version}")
    elif isinstance(record, events.CheckpointRecord):
        if record.version > world.store.version:
            raise Violation(f"{record} is newer than the run at {world.store.version}")
        for stage, (_, params) in world.disk[record.version].items():
            if [step for step, _ in params] != list(range(1, record.version + 1)):
                raise Violation(f"stage {stage} of checkpoint {record.version}: {params}")
    elif isinstance(record, events.EvaluationRecord):
        step = record.version + 1 + world.options.staleness
        heldout = world.manifest.training.heldout_microbatches
        losses = [train_loss(step, m) for m in heldout]
        expected = math.fsum(losses) / (4 * len(losses))
        if not math.isclose(record.heldout_loss, expected, rel_tol=1e-12):
            raise Violation(f"{record}, expected {expected}")
    elif isinstance(record, events.RunFinished):
        version = world.store.version
        if record.version != world.options.steps or version not in world.store.checkpoints:
            raise Violation(f"{record} at {version}, checkpoints {[*world.store.checkpoints]}")


def check_applied(world: World, record: events.AppliedStep) -> None:
    options, step = world.options, record.step
    if step != world.store.version + 1:
        raise Violation(f"step {step} follows version {world.store.version}")
    used = {record.attempt_of(StageIndex(stage)) for stage in range(options.stages)}
    if used & world.attempts:
        raise Violation(f"an attempt of {used} of step {step} was used already")
    world.attempts |= used
    tokens = 4 * options.microbatches
    loss = math.fsum(train_loss(step, m) for m in range(options.microbatches)) / tokens
    if record.tokens != tokens or not math.isclose(record.loss, loss, rel_tol=1e-12):
        raise Violation(f"{record}: expected {tokens} tokens and loss {loss}")
    squared = sum(own_squared(step, s) for s in range(options.stages))
    squared += tied_squared(step) if options.tied and options.stages > 1 else 0.0
    if not math.isclose(record.global_norm, math.sqrt(squared), rel_tol=1e-12):
        raise Violation(f"norm {record.global_norm}, expected {math.sqrt(squared)}")
    if record.learning_rate != learning_rate(world.manifest.optimizer, options.steps, step):
        raise Violation(f"learning rate {record.learning_rate}")
    for stage in range(options.stages):
        counted = sum(s.microbatches for s in record.shares if s.stage == stage)
        if counted != options.microbatches:
            raise Violation(f"stage {stage} counts {counted} microbatches: {record.shares}")
    run = world.run_state
    assert run is not None
    assert run.steps.current is not None
    for member, stage in run.steps.current.closing.members.items():
        peer, attempt = world.peers[member], record.attempt_of(stage)
        # A peer that has just died, or lost its worker, is not detected yet and applies nothing.
        if peer.alive and peer.link is not None and peer.link.open:
            for held in (peer.holding, peer.prepared):
                if held is not None and held.index == stage:
                    held.worker.check_averaged(step, attempt)
        if (member, attempt) in world.aborted:
            raise Violation(f"{member} was sent an abort of {attempt}")


def check_replicas(world: World, worker: SimWorker) -> None:
    """All peers that reach a version hold the same: the same steps, by the same attempts.

    A peer that the run does not count on may still apply a step of an abandoned history: it was
    sent the Apply before the roll-back, and hung.
    """
    peer, params, stage = worker.peer, worker.params, worker.stage
    steps = [step for step, _ in params]
    if steps != list(range(1, worker.version + 1)):
        raise Violation(f"{peer.id} applied the steps {steps}")
    histories = [world.store.applied]
    member = world.run_state.peers.get(peer.id) if world.run_state is not None else None
    if member is None or member.phase is not PeerPhase.READY:
        histories += world.store.given_up
    applied = [
        tuple((s, history[s].attempt_of(stage)) for s in steps if s in history)
        for history in histories
    ]
    if params not in applied:
        raise Violation(f"{peer.id} applied {params}, the run {applied}")


def check_receipt(stage: Stage, receipt: Receipt) -> None:
    """No receipt without its gradient in the sum, unless a fault has taken it out."""
    worker, step, microbatch = stage.worker, receipt.step, receipt.microbatch
    if step <= worker.version or (step, microbatch) in worker.lost:
        return  # the worker has applied the step, and its result is on the way
    if microbatch not in worker.sum_of(step).contents:
        raise Violation(f"{stage.peer.id} has signed {receipt}, which is not in its sum")


def check_account(stage: Stage) -> None:
    """The receipts of a held stage, after every event of its peer that took something out of a sum;
    what is added to the receipts is checked when it is signed."""
    stage.worker.shrunk = False
    for receipt in stage.account.receipts():
        check_receipt(stage, receipt)


def check_hello(stage: Stage, receipts: tuple[Receipt, ...]) -> None:
    """A new session reports every receipt."""
    account = stage.account
    signed = sum(account.count(Step(account.step + ahead)) for ahead in (0, 1))
    if len(receipts) != signed:
        raise Violation(f"{stage.peer.id} has {signed} receipts and reports {receipts}")


def check_reported(world: World, run: RunState, event: events.Event) -> None:
    """A receipt that a hello reports fills its cell once the step is open and its peer holds the
    stage, or another peer's receipt has."""
    if isinstance(event, events.PeerAttached):
        world.reported[event.peer] = event.receipts
    for peer, receipts in list(world.reported.items()):
        member, version = run.peers.get(peer), run.history.version
        transfer = member.transfer if member is not None else None
        if member is not None and transfer is not None and transfer.missed_apply is not None:
            continue  # it holds the stage once it has applied that
        if member is None or not run.peers.holds_current(member):
            del world.reported[peer]
            continue
        later: list[Receipt] = []
        for receipt in receipts:
            step = run.steps.numbered(receipt.step)
            if step is None and receipt.step > version:
                later.append(receipt)
            elif (
                step is not None
                and run.phase in (RunPhase.COLLECT, RunPhase.CLOSING)
                and (receipt.microbatch, member.stage) not in step.table
                and (receipt.microbatch, member.stage, peer) not in step.audits.dropping
            ):
                raise Violation(f"{receipt} was reported anew and does not count")
        world.reported[peer] = tuple(later)
        if not later:
            del world.reported[peer]


def check_choice(run: RunState, event: events.MessageReceived) -> Callable[[], None]:
    """A peer that asks for a stage gets one that no peer stays at, if it can hold one."""
    asking = run.peers.get(event.peer)
    deserted = {
        stage
        for stage in run.stage_indices
        if asking is not None
        and asking.stage is None
        and asking.profile.memory.holds(run.manifest.stages[stage].memory)
        and all(peer.leaving for peer in run.peers.at(StageIndex(stage)))
    }

    def check() -> None:
        if asking is not None and deserted and asking.stage not in {None, *deserted}:
            raise Violation(f"{asking} gets no stage of {deserted}, which no peer holds")

    return check


def check_event(world: World, run: RunState, event: events.Event) -> Callable[[], None]:
    """An answer counts for what it answers: a lease ends by an answer to itself and not to an older
    one, and a member counts as having applied a step when it has. Call what is returned after the
    event."""
    step, message = None, event.message if isinstance(event, events.MessageReceived) else None
    if isinstance(event, events.MessageReceived) and isinstance(message, StageRequest):
        return check_choice(run, event)
    if isinstance(event, events.LeaseResolved):
        step = run.steps.numbered(event.step)
        before = None if step is None else step.leases.get(event.microbatch)
    current, version = run.steps.current, int(run.history.version)

    def check() -> None:
        if isinstance(message, Applied) and current is not None:
            for member in current.closing.applied:
                if (member, version) not in world.has_applied:
                    raise Violation(f"{member} counts as having applied step {version}")
        if step is None or not isinstance(event, events.LeaseResolved) or before is None:
            return
        after = step.leases.get(event.microbatch)
        if (
            after is not None and after.resolved_at is not None and before.resolved_at is None
            and (after.lease, after.trainer) == (before.lease, before.trainer)
            and (after.lease, after.trainer) != (event.lease, event.peer)
        ):  # fmt: skip
            raise Violation(f"{before} of {event.microbatch} was ended by {event}")

    return check


def check_late(world: World, link: Link, event: events.Event) -> None:
    """Deliver a message of an ended session: it does not count in a later one of the same peer."""
    run = world.run_state
    member = run.peers.get(link.peer.id) if run is not None else None
    before = member.last_heard if member is not None else 0.0
    world.deliver(event)
    if member is not None and member.session != link.number and member.last_heard != before:
        raise Violation(f"{event} of an ended session counts in session {member.session}")


def check_progress(world: World) -> None:
    """While enough peers are there and nothing disturbs them, the run goes on; every question of a
    peer is answered, and everything of a step that is over has ended."""
    for peer in world.peers.values():
        if not peer.alive or peer.hung:
            continue
        if peer.link is None:
            for stage in peer.stages.values():
                if stage.load.assignment.prepare and stage is not peer.holding:
                    raise Violation(f"{peer.id} prepares a stage, and its session is lost")
        for sender in peer.senders():
            for asked_at in sender.questions.values():
                if world.now - max(asked_at, peer.woke_at) > MOST_MASK_SECONDS:
                    raise Violation(f"{peer.id} asked for a mask at {asked_at}, without an answer")
        step, trainer = peer.current_step(), peer.trainer
        for started in trainer.driving:
            if step is None or started.lease.step < step:
                raise Violation(f"{peer.id} at step {step} still drives {trainer.driving}")
        if trainer.accepted and not trainer.driving and not trainer.stalled:
            waiting = [key for key, of in trainer.accepted.items() if step is None or of >= step]
            if waiting:
                raise Violation(f"{peer.id} at step {step} drives nothing while {waiting} wait")
    last = max(world.progressed_at, world.undisturbed_from)
    if world.run_state is None or world.stopped or world.now - last < PROGRESS_SECONDS:
        return
    there = [
        p for p in world.peers.values() if world.stays(p) and p.attached and not p.hung
        and not p.paused and p.attached_at < world.now - PROGRESS_SECONDS
    ]  # fmt: skip
    if len(there) >= world.peers_needed():
        raise Violation(f"no step in {world.now - last:.0f} s: {world.describe()}")


def check_state(world: World) -> None:
    run = world.run_state
    if run is None:
        return
    for of_step in run.steps.open():
        for microbatch, lease in of_step.leases.items():
            if lease.trainer not in run.peers:
                raise Violation(f"{microbatch} is leased to {lease.trainer}, which is gone")
    step = run.steps.current
    if run.phase in (RunPhase.COLLECT, RunPhase.CLOSING) and step is not None:
        for (microbatch, stage), cell in step.table.items():
            held, averaged = run.peers.get(cell.peer), run.steps.round_of(stage)
            if averaged is not None and averaged.kept.get(cell.peer) == stage:
                continue  # its part is in the average already
            if held is None or held.stage != stage or held.version != run.history.version:
                raise Violation(f"{cell} of {microbatch}, {stage} is held by {held}")
    ahead = run.steps.ahead
    for (microbatch, stage), cell in ahead.table.items() if ahead is not None else ():
        held = run.peers.get(cell.peer)
        if (
            held is None
            or held.stage != stage
            or not (run.peers.holds_current(held) or applies_current(run, held))
        ):
            raise Violation(f"{cell} of {microbatch}, {stage} of the next step is held by {held}")
    if run.phase in (RunPhase.CLOSING, RunPhase.APPLYING) and (
        step is None or not step.closing.rounds
    ):
        raise Violation(f"{run.phase} without a close")
    for peer in run.peers.values():
        if peer.leaving:
            since = world.leaving_since.setdefault((peer.peer, peer.session), world.now)
            if world.now - since > MOST_LEAVING_SECONDS:
                raise Violation(f"{peer.peer} cannot leave: {world.describe()}")


def check_end(world: World) -> None:
    """The run is finished, on disk, and complete."""
    steps = world.options.steps
    if world.store.finished != steps or sorted(world.store.applied)[-1] != steps:
        raise Violation(f"not finished: {world.describe()}")
    files = world.disk[steps]
    for stage in range(world.options.stages):
        if [step for step, _ in files[stage][1]] != list(range(1, steps + 1)):
            raise Violation(f"stage {stage} on disk: {files[stage]}")
