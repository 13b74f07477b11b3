"""The roster: whom everybody may use, whom nobody may serve, and when all of them are told.

Part of the pure core: changes a RunState and queues commands, does no I/O. Who takes part with
which stage is `membership`'s; here is what changes about a member that stays, and the word that
somebody may not be served any more (docs/decisions/0010-admission.md).
"""

from __future__ import annotations

import itertools

from swarm_coordinator.core.events import (
    Broadcast,
    CertificateIssued,
    CloseSession,
    PeersRevoked,
    Send,
)
from swarm_coordinator.core.state.run import PeerState, RunPhase, RunState, short
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
"""Rosters that only follow somebody's addresses are so far apart at least: everybody gets them,
so that a peer whose network flickers would cost all the others their line."""

RENEWED_ROSTER_SECONDS = 60.0
"""The same for newer certificates, which nobody needs before the older ones expire."""

SMALL_RUN_PEERS = 256
"""Up to so many peers everybody is told of every change at once."""

SPACING_PER_PEER_SECONDS = 5e-4
"""In larger runs rosters are so far apart at least, times the peers: five seconds for 10,000. Each
of them goes to everybody, and somebody comes or goes several times a second. Who sends to a peer
that is gone notices by itself."""

SLOW_HEARTBEAT_PEERS = 1000
"""Who comes to a run of more is asked to beat more slowly."""

HEARTBEATS_BEFORE_DEATH = 2.25
"""Of silence: two beats, and some time on the way."""

MAXIMUM_REVOKED = 65_536
"""What a roster can carry."""


def update_addresses(run: RunState, peer: PeerState, message: AddressUpdate, now: float) -> None:
    """It is found elsewhere now, or says something else about how it can be reached."""
    told = (message.addresses, message.carrier, message.reachability, message.offers_relay)
    if told == (peer.addresses, peer.carrier, peer.reachability, peer.offers_relay):
        return
    peer.addresses, peer.carrier, peer.reachability, peer.offers_relay = told
    _publish_within(run, peer, ADDRESS_ROSTER_SECONDS, now)


def certificate_issued(run: RunState, event: CertificateIssued, now: float) -> None:
    """Tell the member at once and the others within a while: the older one still holds."""
    if event.peer == run.coordinator.peer:
        run.coordinator = run.coordinator.model_copy(update={"certificate": event.certificate})
        return
    peer = run.peers.get(event.peer)
    if peer is not None:
        peer.certificate = event.certificate
        run.send(peer.peer, CertificateRenewed(certificate=event.certificate))
        _publish_within(run, peer, RENEWED_ROSTER_SECONDS, now)


def revoke(run: RunState, event: PeersRevoked) -> None:
    """Nobody may serve these from now on; that they are gone is the caller's part."""
    run.revoked_dirty = True
    absent = [peer for peer in event.peers if peer not in run.peers]
    for peer in event.peers:
        run.revoked.pop(peer, None)
        run.revoked[peer] = event.until  # at the end: the newest are told if they are too many
        if peer in run.peers:
            run.send(peer, Refused(code="admission", reason=event.reason[:500]))
            run.commands.append(CloseSession(peer, event.reason))
    if absent:
        who = short(absent[0]) if len(absent) == 1 else f"{len(absent)} peers"
        run.note(f"{who}, not attached now, may not take part any more: {event.reason}")


def attached(run: RunState, peer: PeerId) -> None:
    """The shell has let it in, whatever was said of it before."""
    reinstate(run, peer)
    if run.revoked and run.phase is RunPhase.APPLYING:
        # It may hold a stage already, and no roster goes out otherwise before the step ends.
        run.revoked_dirty = True


def reinstate(run: RunState, peer: PeerId) -> None:
    if run.revoked.pop(peer, None) is not None:
        run.revoked_dirty = True


def drop_expired_revocations(run: RunState, now: float) -> None:
    """Certificates that have expired are refused by everybody without being told."""
    if run.revoked:
        run.revoked = {peer: until for peer, until in run.revoked.items() if until > now}


def heartbeat_seconds(run: RunState) -> float:
    """Of a newcomer: in a large run as slowly as still tells a dead peer in time."""
    limits = run.manifest.limits
    if len(run.peers) <= SLOW_HEARTBEAT_PEERS:
        return limits.heartbeat_seconds
    return max(limits.heartbeat_seconds, limits.dead_after_seconds / HEARTBEATS_BEFORE_DEATH)


def _publish_within(run: RunState, peer: PeerState, seconds: float, now: float) -> None:
    """A change that can wait: not sooner than so long after the last roster."""
    if not run.holds_current(peer):
        return  # nobody is told of it yet
    due = max(now, run.published_at + seconds)
    run.roster_due_at = due if run.roster_due_at is None else min(run.roster_due_at, due)


def publish(run: RunState, now: float) -> bool:
    """Send the roster to everybody when it has changed, before any work that relies on it."""
    if run.phase is RunPhase.APPLYING:
        # Versions differ while a step is applied; the whole roster follows at its end.
        if not run.revoked_dirty or run.published is None:
            return False
        kept = tuple(
            tuple(record for record in stage if record.peer not in run.revoked)
            for stage in run.published_stages
        )
        _send(run, kept, now)
        return True
    due = run.roster_due_at is not None and now >= run.roster_due_at
    if not ((run.roster_dirty and not _can_wait(run, now)) or run.revoked_dirty or due):
        return False
    run.roster_dirty, run.roster_due_at = False, None
    _send(run, run.roster(), now)
    return True


def _can_wait(run: RunState, now: float) -> bool:
    """Whether a large run's roster was sent just now, and nobody is told to average by this one."""
    if len(run.peers) <= SMALL_RUN_PEERS:
        return False
    return now - run.published_at < SPACING_PER_PEER_SECONDS * len(run.peers) and not any(
        isinstance(command, Send | Broadcast) and isinstance(command.message, Close)
        for command in run.commands
    )


def _send(run: RunState, stages: tuple[tuple[PeerRecord, ...], ...], now: float) -> None:
    before, stages_before = run.published, run.published_stages
    run.roster_serial += 1
    # Not checked again: its parts were when they were made, and there are thousands of them.
    whole = Roster.model_construct(
        serial=run.roster_serial,
        peers=tuple(itertools.chain.from_iterable(stages)),
        revoked=tuple(run.revoked)[-MAXIMUM_REVOKED:],
    )
    run.published, run.published_stages = whole, stages
    run.published_at, run.revoked_dirty = now, False
    if before is None or len(run.peers) <= SMALL_RUN_PEERS:
        for peer in run.peers:
            run.send(peer, whole)
    else:
        told = tuple(peer for peer in run.peers if peer not in run.peers.awaiting_roster)
        changed, removed = _difference(stages_before, stages)
        revoked = None if whole.revoked == before.revoked else whole.revoked
        change = RosterChange.model_construct(
            serial=whole.serial,
            since=before.serial,
            changed=changed,
            removed=removed,
            revoked=revoked,
        )
        run.commands.append(Broadcast(told, change))
        for peer in run.peers.awaiting_roster:
            run.send(peer, whole)
    run.peers.awaiting_roster.clear()


def _difference(
    before: tuple[tuple[PeerRecord, ...], ...], after: tuple[tuple[PeerRecord, ...], ...]
) -> tuple[tuple[PeerRecord, ...], tuple[PeerId, ...]]:
    """Records that are new or other than before, and who is not there any more."""
    known: dict[PeerId, PeerRecord] = {}
    other: list[PeerRecord] = []
    for was, now in zip(before, after, strict=True):
        if was is not now:
            known.update((record.peer, record) for record in was)
            other.extend(now)
    changed = tuple(record for record in other if known.get(record.peer) is not record)
    for record in other:
        known.pop(record.peer, None)
    return changed, tuple(known)
