"""A swarm in one thread: virtual clock, seeded chance, the real `transition`, simulated peers.

Owns the clock, the network's delays and the coordinator's shell (outboxes, store, checkpoint
folder). Peers are in `kits.swarm_world.peer`, faults in `kits.swarm_world.faults`, and the
invariants, checked at every event, in `kits.swarm_world.checks`. A world is a pure function of
(options, seed, faults): the same three give the same run.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kits.swarm_world import audits
from kits.swarm_world.checks import (
    check_batch,
    check_event,
    check_late,
    check_progress,
    check_record,
    check_reported,
    check_send,
    check_state,
    one_by_one,
)
from kits.swarm_world.facts import (
    CERTIFICATE_SECONDS,
    COORDINATOR,
    Fault,
    Moves,
    Options,
    Params,
    Violation,
    checkpoint_item,
    manifest_of,
    rebalancing_settings,
)
from kits.swarm_world.faults import inject
from kits.swarm_world.network import AllReduces, Link
from kits.swarm_world.peer import SimPeer
from swarm_coordinator.core import events
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.transition import begin, transition
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.work_statements import SumStatement
from swarm_shared.protocol import AbortRound, Refused, Roster, RosterChange

TICK_SECONDS = 0.25

TRACED = 40
"""Newest messages that a violation shows."""

LONGEST_EFFECT = 4
"""Multiple of a fault's seconds that its effect lasts."""


def aged(account: events.HeldAccountRecord, seconds: float) -> events.HeldAccountRecord:
    """What is left of an account after a time."""
    return replace(
        account,
        leaks_for_seconds=max(0.0, account.leaks_for_seconds - seconds),
        refused_for_seconds=max(0.0, account.refused_for_seconds - seconds),
        disputes=tuple((other, left - seconds) for other, left in account.disputes),
    )


@dataclass
class SimStore:
    """The durable records, and what a restart reads from them (`storage.records.read_restored`)."""

    records: list[object] = field(default_factory=list)
    applied: dict[int, events.AppliedStep] = field(default_factory=dict)
    checkpoints: dict[int, events.CheckpointRecord] = field(default_factory=dict)
    heldout_loss: float | None = None
    finished: int | None = None
    base: int = 0
    standings: dict[PeerId, events.StandingRecord] = field(default_factory=dict)
    digests: events.StateDigestsRecord | None = None
    agreements: dict[tuple[object, ...], events.AgreementRecord] = field(default_factory=dict)
    held_time: dict[PeerId, tuple[float, events.HeldAccountRecord]] = field(default_factory=dict)
    """By account: when it was written, and what."""
    rolled_back: bool = False
    given_up: list[dict[int, events.AppliedStep]] = field(default_factory=list)
    """Histories that the run has rolled back from."""

    @property
    def version(self) -> int:
        return max([self.base, *self.applied])

    def write(self, record: object) -> None:
        self.records.append(record)
        if isinstance(record, events.AppliedStep):
            self.applied[record.step] = record
        elif isinstance(record, events.CheckpointRecord):
            self.checkpoints[record.version] = record
        elif isinstance(record, events.EvaluationRecord):
            self.heldout_loss = record.heldout_loss
        elif isinstance(record, events.StandingsRecord):
            self.standings |= {standing.owner: standing for standing in record.standings}
        elif isinstance(record, events.RunFinished):
            self.finished = record.version
        elif isinstance(record, events.RolledBack):
            self.base, self.rolled_back = record.version, True
            self.given_up.append(dict(self.applied))
            for table in (self.applied, self.checkpoints):
                for number in [n for n in table if n > record.version]:
                    del table[number]
            self.heldout_loss, self.finished = None, None
            self.digests = None

    def remember(
        self,
        record: (
            events.AgreementsRecord | events.HeldTimeRecord | events.StateDigestsRecord
            | events.StepTimesRecord
        ),
        now: float,
    ) -> None:  # fmt: skip
        if isinstance(record, events.StateDigestsRecord):
            self.digests = record
        elif isinstance(record, events.AgreementsRecord):
            for one in record.agreements:
                pair = (one.stage, one.peer, one.device, one.other, one.other_device)
                if one.cells:
                    self.agreements[pair] = one
                else:
                    self.agreements.pop(pair, None)
        elif isinstance(record, events.HeldTimeRecord):
            self.held_time |= {one.account: (now, one) for one in record.accounts}

    def restore(self, generation: int, now: float) -> events.Restored:
        newest = max(self.checkpoints, default=None)
        since = [step for number, step in self.applied.items() if number > self.base]
        return events.Restored(
            generation=generation,
            version=Version(self.version),
            last_applied=self.applied[max(self.applied)] if self.applied else None,
            checkpoint=None if newest is None else self.checkpoints[newest],
            finished=self.finished is not None,
            heldout_loss=self.heldout_loss,
            rolled_back=self.rolled_back,
            recomputed=Version(max((n for gone in self.given_up for n in gone), default=0)),
            standings=tuple(self.standings.values()),
            agreements=tuple(self.agreements.values()),
            state_digests=self.digests.digests
            if self.digests is not None and self.digests.version == self.version else (),
            held_time=tuple(aged(one, now - at) for at, one in self.held_time.values()),
            on_current_history=frozenset(share.peer for step in since for share in step.shares)
            if self.rolled_back else frozenset(),
        )  # fmt: skip


class World:
    """A simulated run: construct it and call `run`; a violated invariant raises an exception."""

    def __init__(self, options: Options, seed: int, faults: tuple[Fault, ...] = ()) -> None:
        self.options, self.rng, self.now = options, random.Random(seed), 0.0
        self.manifest = manifest_of(options)
        self.store = SimStore()
        self.disk: dict[int, dict[int, tuple[str, Params]]] = {}
        self.run_state: RunState | None = None
        self.generation = 0
        self.peers: dict[PeerId, SimPeer] = {}
        self.current: dict[PeerId, Link] = {}
        self.all_reduces = AllReduces(self)
        self.blocked: set[frozenset[PeerId]] = set()
        self.silent: set[frozenset[PeerId]] = set()
        """Pairs of peers whose links lose everything."""
        self.broken_carriers: set[PeerId] = set()
        self.aborted: set[tuple[PeerId, int]] = set()
        """(peer, attempt) of every AbortRound sent."""
        self.attempts: set[int] = set()
        self.has_applied: set[tuple[PeerId, int]] = set()
        """(peer, step) of every step that a peer has applied."""
        self.trace: deque[tuple[float, str, str, str, object]] = deque(maxlen=TRACED)
        """The newest messages: when, from, to, kind, content."""
        self.progressed_at = 0.0
        """When the newest record was written."""
        self.undisturbed_from = 0.0
        """When the effects of all faults are over."""
        self.stopped = False
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter()
        """How often it came to what a test has to have seen."""
        self.reported: dict[PeerId, tuple[Receipt, ...]] = {}
        """Receipts of each peer's newest hello that the coordinator has not counted yet."""
        self.statements: dict[str, SumStatement] = {}
        """Statements of sums, by what stands for their signed form."""
        self.whole_rosters: dict[int, Roster] = {}
        """The whole roster that each roster change must lead to, by its serial number."""
        self.banned: dict[PeerId, float] = {}
        """Banned peers and since when; durable, as in the run's database."""
        self.disk_full_until = -1.0
        self.crash_countdown: int | None = None
        self.fetched: dict[int, dict[int, tuple[str, Params]]] = {}
        self.leaving_since: dict[tuple[PeerId, int], float] = {}
        self._queue: list[tuple[float, int, Callable[[], object], SimPeer | None, int]] = []
        """When, in which order, what; and in which life of which peer."""
        self._order = itertools.count()
        self._sessions = itertools.count(1)
        self._names = itertools.count()
        self.start_coordinator()
        for _ in range(options.peers):
            self.join()
        at = 0.0
        for fault in faults:
            at += fault.wait
            self.later(at, lambda fault=fault: inject(self, fault))
            self.undisturbed_from = max(self.undisturbed_from, at + LONGEST_EFFECT * fault.seconds)
        self.calm_at = at
        self._tick()

    # ---- clock

    def later(
        self, seconds: float, action: Callable[[], object], peer: SimPeer | None = None
    ) -> None:
        """Schedule; with a peer, within its present life."""
        # What a hung peer had planned for a time that has passed is due at once.
        at = self.now + seconds if seconds > 0.0 else self.now
        life = peer.life if peer is not None else 0
        heapq.heappush(self._queue, (at, next(self._order), action, peer, life))

    def delay(self) -> float:
        """Seconds that a message takes: mostly few, sometimes many."""
        chance = self.rng.random()
        return 0.3 * self.rng.random() if chance < 0.03 else 0.005 + 0.04 * chance

    def run(self, limit_seconds: float = 1500.0, until: Callable[[], bool] | None = None) -> None:
        """Run until the coordinator has stopped (or `until`); a Violation if it takes too long."""
        end = self.now + limit_seconds
        try:
            while not (until() if until else self.stopped):
                self.now, _, action, peer, life = heapq.heappop(self._queue)
                if self.now > end:
                    raise Violation(f"no end by {end:.0f} s: {self.describe()}")
                if peer is None:
                    action()
                else:
                    peer.act(life, action)
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error

    def _tick(self) -> None:
        self.deliver(events.Tick())
        check_state(self)
        check_progress(self)
        self.later(TICK_SECONDS, self._tick)

    # ---- the coordinator and its shell

    def start_coordinator(self) -> None:
        if self.run_state is not None and not self.stopped:
            return
        self.generation += 1
        restored = self.store.restore(self.generation, self.now)
        revoked = {peer: since + CERTIFICATE_SECONDS for peer, since in self.banned.items()}
        self.run_state = begin(
            self.manifest, "manifest", COORDINATOR, restored, self.now, revoked,
            rebalancing_settings(self.options), audits.book(self),
            kept_checkpoints=self.options.steps + 1 if self.options.rolls_back else 1,
        )  # fmt: skip
        # The coordinator of a finished run answers clients until it is stopped: the run is over.
        self.stopped = restored.finished
        self.progressed_at = self.now

    def crash(self, back_after: float | None = 2.0) -> None:
        """The coordinator's memory is lost; what it had persisted is not."""
        self.run_state, self.crash_countdown = None, None
        links, self.current = self.current, {}
        for known in (self.fetched, self.leaving_since, self.reported):
            known.clear()
        for link in links.values():
            link.open = False
            link.peer.later(self.delay(), lambda link=link: link.peer.link_lost(link))
        if back_after is not None:
            self.later(back_after, self.start_coordinator)

    def deliver(self, event: events.Event) -> None:
        if self.run_state is None or self.stopped:
            return
        run, version = self.run_state, self.run_state.history.version
        if isinstance(event, events.Tick | events.HeartbeatsReceived):
            commands = transition(run, event, self.now)
        else:
            sender = getattr(event, "peer", "")
            self.trace.append((self.now, sender, "coordinator", type(event).__name__, event))
            check = check_event(self, run, event)
            commands = transition(run, event, self.now)
            check()
        if self.reported or isinstance(event, events.PeerAttached):
            check_reported(self, run, event)
        if commands or version != run.history.version:
            commands = one_by_one(commands)
            check_batch(run, version, commands)
        for command in commands:
            if self.crash_countdown is not None:
                self.crash_countdown -= 1
                if self.crash_countdown < 0:
                    self.crash()
                    return
            self._execute(command)

    def _execute(self, command: events.Command) -> None:
        if isinstance(command, events.Send):
            self._send(command)
        elif isinstance(command, events.Broadcast):
            assert self.run_state is not None
            roster = self.run_state.roster
            assert roster.published is not None
            self.counts["roster change"] += 1
            whole = self.whole_rosters[roster.serial] = roster.published
            for peer in command.peers:
                check_send(self, events.Send(peer, whole))
                self._send(events.Send(peer, command.message))
        elif isinstance(command, events.Persist):
            check_record(self, command.record)
            self.store.write(command.record)
            self.progressed_at = self.now
        elif isinstance(command, events.Remember):
            self.store.remember(command.record, self.now)
        elif isinstance(command, events.Note):
            self.notes.append(f"{self.now:8.2f} {command.text}")
        elif isinstance(command, events.CloseSession):
            link = self.current.pop(command.peer, None)
            if link is not None:
                self._to_client(link, lambda: self._close(link))
        elif isinstance(command, events.FetchSnapshot):
            generation = self.generation
            self.later(
                0.2 + self.rng.random(),
                lambda: generation == self.generation and self._fetch(command),
            )
        elif isinstance(command, events.Ban):
            self.ban(self.peers[command.owner], 1e9)
        elif isinstance(command, events.ShutDown):
            self.stopped = True

    def _close(self, link: Link) -> None:
        link.open = False
        link.peer.link_lost(link)
        # The shell reports the end of every stream, also of one that the core has closed.
        self.later(0.01, lambda: self.deliver(events.SessionLost(link.number, link.peer.id)))

    def _send(self, command: events.Send) -> None:
        message = command.message
        if isinstance(message, AbortRound):
            self.aborted.add((command.peer, message.attempt))
            self.counts["abort"] += 1
        check_send(self, command)
        link = self.current.get(command.peer)
        if link is not None:
            self._to_client(link, lambda: self._receive(link, message))

    def _receive(self, link: Link, message: object) -> None:
        self.trace.append(
            (self.now, "coordinator", link.peer.id, type(message).__name__, message)
        )  # fmt: skip
        link.peer.on_message(link, message)

    def _to_client(self, link: Link, action: Callable[[], None]) -> None:
        """Deliver in order, like a stream; nothing arrives on a broken one."""
        if not link.deaf:
            link.down_at = max(link.down_at + 1e-6, self.now + self.delay() + link.lag_seconds)
            link.peer.later(
                link.down_at - self.now, lambda: link.open and not link.deaf and action()
            )

    def to_coordinator(self, link: Link, event: events.Event) -> None:
        link.sent.append(event)
        if link.deaf:
            return
        link.up_at = max(link.up_at + 1e-6, self.now + self.delay() + link.lag_seconds)
        generation = self.generation

        def arrive() -> None:
            if link.open and not link.deaf and generation == self.generation:
                self.deliver(event)

        self.later(link.up_at - self.now, arrive)
        if link.peer.echoes:
            self.later(2.0 * self.rng.random(), lambda: self.deliver_late(link, event))

    def deliver_late(self, link: Link, event: events.Event) -> None:
        """A message arrives again, perhaps in a later session of the peer."""
        check_late(self, link, event)

    def attach(self, peer: SimPeer) -> None:
        """A peer sends Hello on a new stream, or finds no coordinator."""
        link = Link(events.SessionNumber(next(self._sessions)), peer)
        hello, receipts = peer.hello()
        generation = self.generation

        def arrive() -> None:
            if self.run_state is None or self.stopped or generation != self.generation:
                link.open = False
                peer.later(0.1, lambda: peer.link_lost(link))
                return
            if peer.id in self.banned:
                refused = Refused(code="admission", reason="banned")
                self._to_client(link, lambda: peer.on_message(link, refused))
                self._to_client(link, lambda: self._close(link))
                return
            older = self.current.get(peer.id)
            if older is not None:
                older.open = False
            self.current[peer.id] = link
            attached = events.PeerAttached(link.number, peer.id, hello, "cert", receipts, None)
            self.deliver(attached)

        peer.link = link
        self.later(self.delay(), arrive)

    def cut(self, link: Link) -> None:
        """The connection breaks: both ends notice, each after its own delay."""
        if not link.open:
            return
        link.open = False
        if self.current.get(link.peer.id) is link:
            del self.current[link.peer.id]
        lost = events.SessionLost(link.number, link.peer.id)
        generation = self.generation
        self.later(
            3 * self.rng.random() * self.delay(),
            lambda: generation == self.generation and self.deliver(lost),
        )
        link.peer.later(self.delay(), lambda: link.peer.link_lost(link))

    def _fetch(self, command: events.FetchSnapshot) -> None:
        """The shell fetches one stage of a checkpoint from its holders into the run folder."""
        version = command.version
        holders = [self.peers[record.peer] for record in command.holders]
        served = [
            p.snapshots[command.item] for p in holders if p.alive and command.item in p.snapshots
        ]
        found = next((file for file in served if file[0] == command.sha256), None)
        if found is None or self.now < self.disk_full_until:
            self.fetched.pop(version, None)
            self.deliver(events.CheckpointFailed(version, "not to be had"))
            return
        files = self.fetched.setdefault(version, {})
        files[command.stage] = found
        if len(files) == self.options.stages:
            self.disk[version] = self.fetched.pop(version)
            stages = tuple(
                events.StoredStage(StageIndex(s), checkpoint_item(version, s), 1, sha)
                for s, (sha, _) in sorted(files.items())
            )
            self.deliver(events.CheckpointStored(version, stages))

    # ---- between peers

    def download(
        self, holder: PeerId, item: str, version: int, stage: int
    ) -> tuple[str, Params] | None:
        """A stage's file by its name, from a peer or from the coordinator's folder."""
        if holder == COORDINATOR.peer:
            return self.disk[version].get(stage) if self.run_state is not None else None
        peer = self.peers[holder]
        return peer.snapshots.get(item) if peer.alive and not peer.hung else None

    def roster_after(self, peer: SimPeer, change: RosterChange) -> Roster:
        """The roster that the change must lead to, if it does."""
        known, whole = peer.roster, self.whole_rosters[change.serial]
        if known is None or known.serial != change.since:
            raise Violation(f"{peer.id} has {known} and receives a change to {change.since}")
        peers = {r.peer: r for r in known.peers if r.peer not in change.removed}
        peers |= {record.peer: record for record in change.changed}
        revoked = known.revoked if change.revoked is None else change.revoked
        if peers != {record.peer: record for record in whole.peers} or revoked != whole.revoked:
            raise Violation(f"{peer.id} receives {change}, which does not give {whole}")
        return whole

    # ---- volunteers and faults

    @property
    def _differ(self) -> bool:
        return self.options.audit_share > 0.0 and not self.options.alike

    def join(self, memory_bytes: int = 1000) -> SimPeer:
        speed = 1.0
        if self.options.moves is not Moves.NONE:
            speed = self.rng.choice([0.5, 1.0, 1.0, 3.0])
            if self.rng.random() < 0.3:
                memory_bytes = 150  # one stage fits, two do not
        peer = SimPeer(self, PeerId(f"peer{next(self._names)}"), memory_bytes, speed)
        peer.machine = self.rng.choice([0, 0, 1]) if self._differ else 0
        peer.lies = len(self.peers) < self.options.liars
        if len(self.peers) < len(self.options.sum_lies):
            peer.sum_lie = self.options.sum_lies[len(self.peers)]
        self.peers[peer.id] = peer
        peer.start()
        return peer

    def stop(self) -> None:
        self.deliver(events.StopRequested())

    def ban(self, peer: SimPeer, seconds: float) -> None:
        """Ban by the organiser, also without a coordinator; after `seconds` the peer may return."""
        if peer.id in self.banned:
            return
        self.banned[peer.id] = self.now
        until = self.now + CERTIFICATE_SECONDS
        self.deliver(events.PeersRevoked((peer.id,), "banned", until))
        self.later(seconds, lambda: self._unban(peer))

    def _unban(self, peer: SimPeer) -> None:
        del self.banned[peer.id]
        self.deliver(events.PeersReinstated((peer.id,)))
        self.start_again(peer)

    def start_again(self, peer: SimPeer) -> None:
        """Restart a refused peer that may take part now, as its user would."""
        if peer.alive and peer.gone and not peer.leaving:
            peer.kill()
        if not peer.alive and not peer.leaving:
            peer.gone = False
            peer.start()

    def calm(self) -> None:
        """End the faults, and keep just as many volunteers as the run needs: one per stage once it
        has trained, and the organiser's starting number before."""
        self.crash_countdown = None
        if self.run_state is None:
            self.later(0.1, self.start_coordinator)
        staying = [p for p in self.peers.values() if self.stays(p)]
        for _ in range(self.peers_needed() - len(staying)):
            self.join()

    def peers_needed(self) -> int:
        each = 1 if self.store.version > 0 else self.options.starting
        return each * self.options.stages

    def stays(self, peer: SimPeer) -> bool:
        """Whether the run can count on the peer, now that there are no more faults."""
        fits = all(peer.memory.holds(stage.memory) for stage in self.manifest.stages)
        return (
            peer.alive
            and not peer.leaving
            and not peer.gone
            and fits
            and (peer.id not in self.banned)
        )

    def newest_messages(self) -> str:
        """The last ones that arrived, one a line."""
        return "\n".join(
            f"{at:9.3f}  {source} -> {target}  {kind}  {str(content)[:140]}"
            for at, source, target, kind, content in self.trace
        )

    def describe(self) -> str:
        run = self.run_state
        tail = "\n".join(self.notes[-25:])
        if run is None:
            return f"no coordinator\n{tail}"
        peers = "\n".join(f"  {p}" for p in run.peers.values())
        return (
            f"version {run.history.version} {run.phase} waiting={run.waiting_reason!r} "
            f"checkpoint={run.checkpoints.stored} step={run.steps.current}\n{peers}\n{tail}"
        )
