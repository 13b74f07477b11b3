"""The roster: which peers may be used, which must not be served, and when members receive it.

Part of the pure core: changes a RunState and queues commands, does no I/O. Which peer takes part
with which stage is decided in `swarm_coordinator.core.rules.membership`; this module covers changes
of a staying member, and revocations (docs/decisions/0010-admission.md).
"""

from __future__ import annotations

import itertools

from swarm_coordinator.core.events import (
    Broadcast,
    CertificateIssued,
    CloseSession,
    Command,
    PeersRevoked,
    Send,
)
from swarm_coordinator.core.state.peers import PeerState, short
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import (
    AddressUpdate,
    CertificateRenewed,
    Close,
    PeerRecord,
    Refused,
    Roster,
    RosterChange,
)

ADDRESS_ROSTER_SECONDS = 1.0
"""Minimum seconds between rosters that only change addresses. Every member receives each roster, so
a peer whose network flickers would otherwise cost all members their bandwidth."""

CHANGE_SECONDS = 10.0
"""Seconds after which a change of a peer's part (it attached, paused or left) is forgotten."""

MAX_CHANGES_AT_ONCE = 10
"""Changes of one peer that are published at once. Further ones are published within
ADDRESS_ROSTER_SECONDS, all together: a member could have all others sent hundreds of rosters a
second."""

RENEWED_ROSTER_SECONDS = 60.0
"""Minimum seconds between rosters that only renew certificates, which are not needed before the
older ones expire."""

SMALL_RUN_PEERS = 256
"""Number of peers up to which every change is published at once, as a whole roster."""

SPACING_PER_PEER_SECONDS = 5e-4
"""Minimum seconds between rosters of a larger run, per peer: five seconds for 10,000. Every roster
goes to all members, and peers join or leave several times a second. A sender notices a lost peer by
itself."""

SLOW_HEARTBEAT_PEERS = 1000
"""Number of peers above which joining peers are assigned a longer heartbeat interval."""

HEARTBEATS_BEFORE_DEATH = 2.25
"""Heartbeat intervals of silence after which a peer counts as dead: two heartbeats and their
transit."""

MAXIMUM_REVOKED = 65_536
"""Largest number of revoked peers that a roster can carry."""


def update_addresses(run: RunState, peer: PeerState, message: AddressUpdate, now: float) -> None:
    """Update a peer's addresses and reachability."""
    if message != peer.contact:
        run.peers.set_contact(peer, message)
        _publish_within(run, peer, ADDRESS_ROSTER_SECONDS, now)


def changed(run: RunState, peer: PeerId, now: float) -> None:
    """Have the next roster show that a peer's part in the run has changed, or has ended."""
    calm_at = max(now, run.roster.calm_at.get(peer, now)) + CHANGE_SECONDS
    if calm_at - now > MAX_CHANGES_AT_ONCE * CHANGE_SECONDS:
        run.roster.repeated = True
        return
    run.roster.calm_at[peer] = calm_at
    run.roster.dirty = True


def forget_changes(run: RunState, now: float) -> None:
    """Forget the changes of long ago."""
    run.roster.calm_at = {peer: at for peer, at in run.roster.calm_at.items() if at > now}


def certificate_issued(run: RunState, event: CertificateIssued, now: float) -> None:
    """Send the member its renewed certificate at once, and the roster later.

    The older certificate is still valid.
    """
    if event.peer == run.start.record.peer:
        run.start.record = run.start.record.model_copy(update={"certificate": event.certificate})
        return
    peer = run.peers.get(event.peer)
    if peer is not None:
        run.peers.set_certificate(peer, event.certificate)
        run.send(peer.peer, CertificateRenewed(certificate=event.certificate))
        _publish_within(run, peer, RENEWED_ROSTER_SECONDS, now)


def revoke(run: RunState, event: PeersRevoked) -> None:
    """Revoke peers: no member may serve them from now on. The caller removes them from the run."""
    run.roster.revoked_dirty = True
    absent = [peer for peer in event.peers if peer not in run.peers]
    for peer in event.peers:
        run.roster.revoked.pop(peer, None)
        run.roster.revoked[peer] = event.until  # appended: a roster carries the newest if too many
        if peer in run.peers:
            run.send(peer, Refused(code="admission", reason=event.reason[:500]))
            run.commands.append(CloseSession(peer))
    if absent:
        who = short(absent[0]) if len(absent) == 1 else f"{len(absent)} peers"
        run.note(f"{who}, not attached now, may no longer take part: {event.reason}")


def attached(run: RunState, peer: PeerId) -> None:
    """Lift any revocation of a peer that the shell has admitted."""
    reinstate(run, peer)
    if run.roster.revoked and run.phase is RunPhase.APPLYING:
        # It may hold a stage already, and no other roster is sent before the step ends.
        run.roster.revoked_dirty = True


def reinstate(run: RunState, peer: PeerId) -> None:
    """Lift a peer's revocation."""
    if run.roster.revoked.pop(peer, None) is not None:
        run.roster.revoked_dirty = True


def drop_expired_revocations(run: RunState, now: float) -> None:
    """Drop revocations of expired certificates, which every member refuses by itself."""
    if run.roster.revoked:
        run.roster.revoked = {
            peer: until for peer, until in run.roster.revoked.items() if until > now
        }


def heartbeat_seconds(run: RunState) -> float:
    """Heartbeat interval of a joining peer: longer in a large run, but short enough to detect a
    death."""
    limits = run.manifest.limits
    if len(run.peers) <= SLOW_HEARTBEAT_PEERS:
        return limits.heartbeat_seconds
    return max(limits.heartbeat_seconds, limits.dead_after_seconds / HEARTBEATS_BEFORE_DEATH)


def _publish_within(run: RunState, peer: PeerState, seconds: float, now: float) -> None:
    """Schedule a roster for a change that can wait until `seconds` after the last one."""
    if not run.peers.holds_current(peer):
        return  # it is not in the roster yet
    run.roster.publish_by(max(now, run.roster.published_at + seconds))


def publish(run: RunState, now: float) -> list[Command]:
    """Return the roster for every member if it has changed, to be sent before any work that relies
    on it."""
    if run.phase is RunPhase.APPLYING:
        # Versions differ while a step is applied; the whole roster follows at its end.
        if not run.roster.revoked_dirty or run.roster.published is None:
            return []
        remaining = tuple(
            tuple(record for record in stage if record.peer not in run.roster.revoked)
            for stage in run.roster.stages
        )
        return _sent(run, remaining, now)
    dirty = run.roster.dirty or run.roster.repeated
    due = run.roster.due_at is not None and now >= run.roster.due_at
    if not ((dirty and not _can_wait(run, now)) or run.roster.revoked_dirty or due):
        return []
    run.roster.dirty, run.roster.repeated, run.roster.due_at = False, False, None
    return _sent(run, run.peers.roster(), now)


def _can_wait(run: RunState, now: float) -> bool:
    """Whether the next roster can wait.

    The last one was sent recently for a large run, or for peers that change again and again, and
    no close in this batch of commands needs a new one.
    """
    small = len(run.peers) <= SMALL_RUN_PEERS
    spacing = 0.0 if small else SPACING_PER_PEER_SECONDS * len(run.peers)
    if not run.roster.dirty:
        spacing = max(spacing, ADDRESS_ROSTER_SECONDS)
    return now - run.roster.published_at < spacing and not any(
        isinstance(command, Send | Broadcast) and isinstance(command.message, Close)
        for command in run.commands
    )


def _sent(run: RunState, stages: tuple[tuple[PeerRecord, ...], ...], now: float) -> list[Command]:
    previous, stages_before = run.roster.published, run.roster.stages
    run.roster.serial += 1
    # Not validated again: the records were when they were made, and there are thousands of them.
    roster = Roster.model_construct(
        serial=run.roster.serial,
        peers=tuple(itertools.chain.from_iterable(stages)),
        revoked=tuple(run.roster.revoked)[-MAXIMUM_REVOKED:],
    )
    run.roster.published, run.roster.stages = roster, stages
    run.roster.published_at, run.roster.revoked_dirty = now, False
    awaiting = dict(run.peers.awaiting_roster)
    run.peers.awaiting_roster.clear()
    if previous is None or len(run.peers) <= SMALL_RUN_PEERS:
        return [Broadcast(tuple(run.peers), roster)]
    up_to_date = tuple(peer for peer in run.peers if peer not in awaiting)
    changed, removed = _difference(stages_before, stages)
    change = RosterChange.model_construct(
        serial=roster.serial,
        since=previous.serial,
        changed=changed,
        removed=removed,
        revoked=None if roster.revoked == previous.revoked else roster.revoked,
    )
    return [Broadcast(up_to_date, change), *(Send(peer, roster) for peer in awaiting)]


def _difference(
    before: tuple[tuple[PeerRecord, ...], ...], after: tuple[tuple[PeerRecord, ...], ...]
) -> tuple[tuple[PeerRecord, ...], tuple[PeerId, ...]]:
    """Records that are new or changed, and peers that are no longer present."""
    gone: dict[PeerId, PeerRecord] = {}
    candidates: list[PeerRecord] = []
    for old, new in zip(before, after, strict=True):
        if old is not new:
            gone.update((record.peer, record) for record in old)
            candidates.extend(new)
    changed = tuple(record for record in candidates if gone.get(record.peer) is not record)
    for record in candidates:
        gone.pop(record.peer, None)
    return changed, tuple(gone)
