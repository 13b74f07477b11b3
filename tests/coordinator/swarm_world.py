"""A swarm in one thread: virtual clock, seeded chance, the real `transition`, simulated peers.

Owns the clock, the network's delays, the coordinator's shell (outboxes, store, checkpoint
folder), faults, and what must hold at every durable record. Peers are in `swarm_peer`. A world
is a pure function of (options, seed, faults): the same three give the same run.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm_facts import (
    COORDINATOR,
    Fault,
    Options,
    Violation,
    checkpoint_item,
    heldout_loss,
    manifest_of,
    own_squared,
    tied_squared,
    train_loss,
)
from swarm_peer import REQUEST_SECONDS, Answer, Link, Parcel, Round, RoundFailure, SimPeer

from swarm_coordinator.events import (
    AppliedStep,
    CheckpointFailed,
    CheckpointRecord,
    CheckpointStored,
    CloseSession,
    Command,
    EvaluationRecord,
    Event,
    FetchSnapshot,
    Note,
    PeerAttached,
    Persist,
    Restored,
    RolledBack,
    RunFinished,
    Send,
    Session,
    SessionLost,
    Stopped,
    StopRequested,
    StoredStage,
    Tick,
)
from swarm_coordinator.state import PeerPhase, RunPhase, RunState
from swarm_coordinator.transition import begin, transition
from swarm_shared.messages import AbortRound, Apply, Lease, Roster
from swarm_shared.schedule import learning_rate
from swarm_shared.types import PeerId, StageIndex, Version

TICK_SECONDS = 0.25


@dataclass
class SimStore:
    """The durable records, and what a restart reads from them (as `records.read_restored`)."""

    records: list[object] = field(default_factory=list)
    applied: dict[int, AppliedStep] = field(default_factory=dict)
    checkpoints: dict[int, CheckpointRecord] = field(default_factory=dict)
    heldout_loss: float | None = None
    finished: int | None = None
    base: int = 0

    @property
    def version(self) -> int:
        return max([self.base, *self.applied])

    def write(self, record: object) -> None:
        self.records.append(record)
        if isinstance(record, AppliedStep):
            self.applied[record.step] = record
        elif isinstance(record, CheckpointRecord):
            self.checkpoints[record.version] = record
        elif isinstance(record, EvaluationRecord):
            self.heldout_loss = record.heldout_loss
        elif isinstance(record, RunFinished):
            self.finished = record.version
        elif isinstance(record, RolledBack):
            self.base = record.version
            for table in (self.applied, self.checkpoints):
                for number in [n for n in table if n > record.version]:
                    del table[number]
            self.heldout_loss, self.finished = None, None

    def restore(self, generation: int) -> Restored:
        newest = max(self.checkpoints, default=None)
        return Restored(
            generation=generation,
            version=Version(self.version),
            last_applied=self.applied[max(self.applied)] if self.applied else None,
            checkpoint=None if newest is None else self.checkpoints[newest],
            finished=self.finished is not None,
            heldout_loss=self.heldout_loss,
        )


class World:
    """Build it, `run` it; `violations` end it at once as an exception."""

    def __init__(self, options: Options, seed: int, faults: tuple[Fault, ...] = ()) -> None:
        self.options, self.rng, self.now = options, random.Random(seed), 0.0
        self.manifest = manifest_of(options)
        self.store = SimStore()
        self.disk: dict[int, dict[int, tuple[str, tuple[object, ...]]]] = {}
        self.run_state: RunState | None = None
        self.generation = 0
        self.peers: dict[PeerId, SimPeer] = {}
        self.current: dict[PeerId, Link] = {}
        self.rounds: dict[object, Round] = {}
        self.blocked: set[frozenset[PeerId]] = set()
        self.broken_carriers: set[PeerId] = set()
        self.aborted: set[int] = set()
        self.attempts: set[int] = set()
        self.stopped = False
        self.notes: list[str] = []
        self.sent: list[tuple[float, PeerId, object]] = []
        self.disk_full_until = -1.0
        self.crash_countdown: int | None = None
        self.fetched: dict[int, dict[int, tuple[str, tuple[object, ...]]]] = {}
        self.leaving_since: dict[tuple[PeerId, int], float] = {}
        self.aborts = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._sessions = itertools.count(1)
        self._names = itertools.count()
        self.start_coordinator()
        for _ in range(options.peers):
            self.join()
        at = 0.0
        for fault in faults:
            at += fault.wait
            self.later(at, lambda f=fault: self.inject(f))
        self.calm_at = at
        self._tick()

    # ---- clock

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def delay(self) -> float:
        """Seconds a message takes: mostly little, sometimes much."""
        chance = self.rng.random()
        return 0.3 * self.rng.random() if chance < 0.03 else 0.005 + 0.04 * chance

    def run(self, limit_seconds: float = 1500.0, until: Callable[[], bool] | None = None) -> None:
        """Until the coordinator has stopped (or `until`); a Violation when that takes too long."""
        end = self.now + limit_seconds
        while not (until() if until else self.stopped):
            if not self._queue or self._queue[0][0] > end:
                raise Violation(f"no end by {self.now:.0f} s: {self.describe()}")
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def _tick(self) -> None:
        self.deliver(Tick())
        self._check_state()
        self.later(TICK_SECONDS, self._tick)

    # ---- the coordinator and its shell

    def start_coordinator(self) -> None:
        if self.run_state is not None and not self.stopped:
            return
        self.generation += 1
        restored = self.store.restore(self.generation)
        self.run_state = begin(self.manifest, "manifest", COORDINATOR, restored, self.now)
        self.stopped = False

    def crash(self, back_after: float | None = 2.0) -> None:
        """The coordinator's memory is gone; what it had persisted is not."""
        self.run_state, self.crash_countdown = None, None
        links, self.current = self.current, {}
        self.fetched.clear()
        self.leaving_since.clear()
        for link in links.values():
            link.open = False
            link.peer.later(self.delay(), lambda link=link: link.peer.link_lost(link))
        if back_after is not None:
            self.later(back_after, self.start_coordinator)

    def deliver(self, event: Event) -> None:
        if self.run_state is None or self.stopped:
            return
        for command in transition(self.run_state, event, self.now):
            if self.crash_countdown is not None:
                self.crash_countdown -= 1
                if self.crash_countdown < 0:
                    self.crash()
                    return
            self._execute(command)

    def _execute(self, command: Command) -> None:
        if isinstance(command, Send):
            self._send(command)
        elif isinstance(command, Persist):
            self._check_record(command.record)
            self.store.write(command.record)
        elif isinstance(command, Note):
            self.notes.append(f"{self.now:8.2f} {command.text}")
        elif isinstance(command, CloseSession):
            link = self.current.pop(command.peer, None)
            if link is not None:
                self._to_client(link, lambda: self._close(link))
        elif isinstance(command, FetchSnapshot):
            generation = self.generation
            self.later(
                0.2 + self.rng.random(),
                lambda: generation == self.generation and self._fetch(command),
            )
        elif isinstance(command, Stopped):
            self.stopped = True

    def _close(self, link: Link) -> None:
        link.open = False
        link.peer.link_lost(link)
        # The shell tells the core of every stream's end; this one it knows already.
        self.later(0.01, lambda: self.deliver(SessionLost(Session(link.number), link.peer.id)))

    def _send(self, command: Send) -> None:
        message = command.message
        self.sent.append((self.now, command.peer, message))
        if isinstance(message, AbortRound):
            self.aborted.add(message.attempt)
            self.aborts += 1
        self._check_send(command)
        link = self.current.get(command.peer)
        if link is not None:
            self._to_client(link, lambda: link.peer.on_message(link, message))

    def _to_client(self, link: Link, action: Callable[[], None]) -> None:
        """In order, like a stream; nothing arrives on a broken one."""
        link.down_at = max(link.down_at + 1e-6, self.now + self.delay())
        link.peer.later(link.down_at - self.now, lambda: link.open and action())

    def to_coordinator(self, link: Link, event: Event) -> None:
        link.up_at = max(link.up_at + 1e-6, self.now + self.delay())
        generation = self.generation

        def arrive() -> None:
            if link.open and generation == self.generation:
                self.deliver(event)

        self.later(link.up_at - self.now, arrive)

    def attach(self, peer: SimPeer) -> None:
        """A peer says Hello on a new stream, or finds nobody there."""
        link = Link(next(self._sessions), peer)
        hello, receipts = peer.hello()
        generation = self.generation

        def arrive() -> None:
            if self.run_state is None or self.stopped or generation != self.generation:
                link.open = False
                peer.later(0.1, lambda: peer.link_lost(link))
                return
            older = self.current.get(peer.id)
            if older is not None:
                older.open = False
            self.current[peer.id] = link
            self.deliver(PeerAttached(Session(link.number), peer.id, hello, "cert", receipts))

        peer.link = link
        self.later(self.delay(), arrive)

    def cut(self, link: Link) -> None:
        """The connection breaks: both ends notice, each in its own time."""
        link.open = False
        if self.current.get(link.peer.id) is link:
            del self.current[link.peer.id]
        lost = SessionLost(Session(link.number), link.peer.id)
        generation = self.generation
        self.later(
            3 * self.rng.random() * self.delay(),
            lambda: generation == self.generation and self.deliver(lost),
        )
        link.peer.later(self.delay(), lambda: link.peer.link_lost(link))

    def _fetch(self, command: FetchSnapshot) -> None:
        """The shell fetches one stage of a checkpoint from its holder into the run folder."""
        snapshot, holder = command.snapshot, self.peers[command.holder.peer]
        found = holder.snapshots.get(snapshot.item) if holder.alive else None
        if found is None or found[0] != snapshot.sha256 or self.now < self.disk_full_until:
            self.fetched.pop(snapshot.version, None)
            self.deliver(CheckpointFailed(snapshot.version, "not to be had"))
            return
        files = self.fetched.setdefault(snapshot.version, {})
        files[snapshot.stage] = found
        if len(files) == self.options.stages:
            self.disk[snapshot.version] = self.fetched.pop(snapshot.version)
            stages = tuple(
                StoredStage(StageIndex(s), checkpoint_item(snapshot.version, s), 1, sha)
                for s, (sha, _) in sorted(files.items())
            )
            self.deliver(CheckpointStored(snapshot.version, stages))

    # ---- between peers

    def download(
        self, holder: PeerId, item: str, version: int, stage: int
    ) -> tuple[str, tuple[tuple[int, int], ...]] | None:
        """A stage's file by its name, from a peer or from the coordinator's folder."""
        if holder == COORDINATOR.peer:
            return self.disk[version].get(stage) if self.run_state is not None else None
        peer = self.peers[holder]
        return peer.snapshots.get(item) if peer.alive and not peer.hung else None

    def request(
        self,
        sender: SimPeer,
        target: PeerId,
        stage: int,
        parcel: Parcel,
        answered: Callable[[Answer], None],
    ) -> None:
        """One microbatch over one edge; exactly one answer, whatever happens to the target."""
        open_request = [True]

        def answer(value: Answer) -> None:
            if open_request[0]:
                open_request[0] = False
                answered(value)

        def reply(value: Answer) -> None:
            sender.later(self.delay(), lambda: answer(value))

        receiver = self.peers[target]
        if frozenset((sender.id, target)) in self.blocked or not receiver.alive:
            reply(Answer("dead"))
            return
        receiver.later(self.delay(), lambda: receiver.serve(sender, stage, parcel, reply))
        sender.later(REQUEST_SECONDS, lambda: answer(Answer("dead")))

    def join_round(
        self,
        peer: SimPeer,
        key: object,
        members: tuple[PeerId, ...],
        hivemind: bool,
        own: Counter[tuple[int, int]],
        done: Callable[[Counter[tuple[int, int]] | RoundFailure], None],
    ) -> Round:
        group = self.rounds.setdefault(key, Round(members))
        if group.failure is not None:
            peer.later(self.delay(), lambda: done(group.failure or RoundFailure(None)))
            return group
        group.arrived[peer.id] = (own, done)
        blocked = next(
            (m for m in members if frozenset((m, peer.id)) in self.blocked and m != peer.id), None
        )
        if hivemind and any(m in self.broken_carriers for m in members):
            self._fail_round(group, RoundFailure(None, carrier_failed=True))
        elif blocked is not None:
            self._fail_round(group, RoundFailure(blocked))
        elif len(group.arrived) == len(members):
            self.later(0.1 + 0.2 * self.rng.random(), lambda: self._end_round(group))
        else:
            stall = self.manifest.limits.round_stall_seconds
            peer.later(stall, lambda: self._stalled(group))
        return group

    def _stalled(self, group: Round) -> None:
        absent = [m for m in group.members if m not in group.arrived]
        if absent and not group.done:
            self._fail_round(group, RoundFailure(absent[0]))

    def _end_round(self, group: Round) -> None:
        if group.failure is not None:
            return
        group.done = True
        total: Counter[tuple[int, int]] = Counter()
        for own, _ in group.arrived.values():
            total.update(own)
        for member, (_, done) in group.arrived.items():
            self.peers[member].later(self.delay(), lambda done=done: done(Counter(total)))

    def _fail_round(self, group: Round, failure: RoundFailure) -> None:
        group.failure = failure
        for member, (_, done) in group.arrived.items():
            self.peers[member].later(self.delay(), lambda done=done: done(failure))

    def end_rounds_of(self, peer: SimPeer) -> None:
        """A member is lost: the rounds it was in fail for the others, at once."""
        for group in self.rounds.values():
            if peer.id in group.members and group.failure is None and not group.done:
                group.arrived.pop(peer.id, None)
                self._fail_round(group, RoundFailure(peer.id))

    # ---- people and faults

    def join(self) -> SimPeer:
        peer = SimPeer(self, PeerId(f"peer{next(self._names)}"))
        self.peers[peer.id] = peer
        peer.start()
        return peer

    def stop(self) -> None:
        self.deliver(StopRequested())

    def inject(self, fault: Fault) -> None:
        alive = [p for p in self.peers.values() if p.alive]
        if fault.kind == "join":
            self.join()
        elif fault.kind == "crash":
            self.crash(fault.seconds)
        elif fault.kind == "crash_between":
            self.crash_countdown = fault.target
        elif fault.kind == "disk":
            self.disk_full_until = self.now + fault.seconds
        elif fault.kind == "leave":
            staying = [p for p in alive if not p.leaving]
            if staying:
                staying[fault.target % len(staying)].leave()
        elif fault.kind == "block":
            if len(alive) < 2:
                return
            one, other = alive[fault.target % len(alive)], alive[(fault.target + 1) % len(alive)]
            pair = frozenset((one.id, other.id))
            self.blocked.add(pair)
            self.later(fault.seconds, lambda: self.blocked.discard(pair))
        elif fault.kind == "carrier":
            if alive:
                self.broken_carriers.add(alive[fault.target % len(alive)].id)
        elif alive:
            victim = alive[fault.target % len(alive)]
            getattr(victim, fault.kind)(fault.seconds)

    def calm(self) -> None:
        """Faults are over and as many volunteers as the run needs come and stay."""
        self.crash_countdown = None
        if self.run_state is None:
            self.later(0.1, self.start_coordinator)
        for _ in range(self.options.stages * self.options.starting):
            self.join()

    # ---- what must hold

    def _check_send(self, command: Send) -> None:
        message, run = command.message, self.run_state
        assert run is not None
        if isinstance(message, Apply):
            last = self.store.applied.get(message.step)
            if last is None or last.attempt != message.attempt:
                raise Violation(f"{message} is sent before it is durable")
        elif isinstance(message, Lease):
            trainer = run.peers.get(command.peer)
            others = [p for p in run.peers.values() if p.trainer and not p.leaving]
            if (
                trainer is not None
                and trainer.leaving
                and any(p.phase is PeerPhase.READY for p in others)
            ):
                raise Violation(f"{command.peer} is leaving and gets {message}")
        elif isinstance(message, Roster):
            for record in message.peers:
                peer = run.peers.get(record.peer)
                rest = [p for p in run.ready_peers(record.stage) if not p.leaving]
                if peer is not None and peer.leaving and record.accepts_work and rest:
                    raise Violation(f"{record.peer} is leaving and is offered as {record}")

    def _check_record(self, record: object) -> None:
        if isinstance(record, AppliedStep):
            self._check_applied(record)
        elif isinstance(record, RolledBack):
            newest = max(self.store.checkpoints, default=0)
            if record.version != newest or record.version >= self.store.version:
                raise Violation(f"{record} with checkpoint {newest} at {self.store.version}")
        elif isinstance(record, CheckpointRecord):
            if record.version > self.store.version:
                raise Violation(f"{record} is newer than the run at {self.store.version}")
            for stage, (_, params) in self.disk[record.version].items():
                if [step for step, _ in params] != list(range(1, record.version + 1)):
                    raise Violation(f"stage {stage} of checkpoint {record.version}: {params}")
        elif isinstance(record, EvaluationRecord):
            losses = [heldout_loss(record.version, m) for m in range(self.options.evaluation)]
            expected = math.fsum(losses) / (4 * len(losses))
            if not math.isclose(record.heldout_loss, expected, rel_tol=1e-12):
                raise Violation(f"{record}, expected {expected}")
        elif isinstance(record, RunFinished):
            version = self.store.version
            if record.version != self.options.steps or version not in self.store.checkpoints:
                raise Violation(f"{record} at {version}, checkpoints {[*self.store.checkpoints]}")

    def _check_applied(self, record: AppliedStep) -> None:
        options, step = self.options, record.step
        if step != self.store.version + 1:
            raise Violation(f"step {step} follows version {self.store.version}")
        if record.attempt in self.attempts or record.attempt in self.aborted:
            raise Violation(f"attempt {record.attempt} of step {step} was used or aborted")
        self.attempts.add(record.attempt)
        tokens = 4 * options.microbatches
        loss = math.fsum(train_loss(step, m) for m in range(options.microbatches)) / tokens
        if record.tokens != tokens or not math.isclose(record.loss, loss, rel_tol=1e-12):
            raise Violation(f"{record}: expected {tokens} tokens and loss {loss}")
        squared = sum(own_squared(step, s) for s in range(options.stages))
        squared += tied_squared(step) if options.tied and options.stages > 1 else 0.0
        if not math.isclose(record.global_norm, math.sqrt(squared), rel_tol=1e-12):
            raise Violation(f"norm {record.global_norm}, expected {math.sqrt(squared)}")
        if record.learning_rate != learning_rate(self.manifest.optimizer, options.steps, step):
            raise Violation(f"learning rate {record.learning_rate}")
        for stage in range(options.stages):
            counted = sum(s.microbatches for s in record.shares if s.stage == stage)
            if counted != options.microbatches:
                raise Violation(f"stage {stage} counts {counted} microbatches: {record.shares}")
        run = self.run_state
        assert run is not None
        assert run.step is not None
        assert run.step.closing is not None
        for member, stage in run.step.closing.members.items():
            if self.peers[member].alive:
                self.peers[member].check_averaged(step, record.attempt, stage)

    def check_replicas(self, peer: SimPeer) -> None:
        """All who reach a version hold the same: the same steps, by the same attempts."""
        holding = peer.holding
        assert holding is not None
        steps = [step for step, _ in holding.params]
        if steps != list(range(1, holding.version + 1)):
            raise Violation(f"{peer.id} applied the steps {steps}")
        attempts = [self.store.applied[step].attempt for step in steps]
        if [attempt for _, attempt in holding.params] != attempts:
            raise Violation(f"{peer.id} applied {holding.params}, the run {attempts}")

    def _check_state(self) -> None:
        run = self.run_state
        if run is None:
            return
        step = run.step
        if run.phase in (RunPhase.COLLECT, RunPhase.CLOSING) and step is not None:
            for (microbatch, stage), cell in step.table.items():
                held = run.peers.get(cell.peer)
                if held is None or held.stage != stage or held.version != run.version:
                    raise Violation(f"{cell} of {microbatch}, {stage} is held by {held}")
        if run.phase in (RunPhase.CLOSING, RunPhase.APPLYING) and (
            step is None or step.closing is None
        ):
            raise Violation(f"{run.phase} without a close")
        for peer in run.peers.values():
            if peer.leaving:
                since = self.leaving_since.setdefault((peer.peer, peer.session), self.now)
                if self.now - since > self.options.leave_bound_seconds:
                    raise Violation(f"{peer.peer} cannot leave: {self.describe()}")

    def check_end(self) -> None:
        """The run is finished, on disk, and whole."""
        steps = self.options.steps
        if self.store.finished != steps or sorted(self.store.applied)[-1] != steps:
            raise Violation(f"not finished: {self.describe()}")
        files = self.disk[steps]
        for stage in range(self.options.stages):
            if [step for step, _ in files[stage][1]] != list(range(1, steps + 1)):
                raise Violation(f"stage {stage} on disk: {files[stage]}")

    def describe(self) -> str:
        run = self.run_state
        tail = "\n".join(self.notes[-25:])
        if run is None:
            return f"no coordinator\n{tail}"
        peers = "\n".join(f"  {p}" for p in run.peers.values())
        return (
            f"version {run.version} {run.phase} waiting={run.waiting_reason!r} "
            f"checkpoint={run.checkpoint} step={run.step}\n{peers}\n{tail}"
        )
