"""The coordinator's core driven one event at a time, with its commands visible.

For tests of a single rule; `kits.swarm_world.world` simulates whole swarms.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from kits.memory import offers
from kits.swarm_world.checks import one_by_one
from kits.swarm_world.facts import COORDINATOR, TOKENS, Options, manifest_of, train_loss
from kits.swarm_world.world import SimStore
from swarm_coordinator.core import events
from swarm_coordinator.core.rules.microbatches import cells
from swarm_coordinator.core.state.peers import PeerState, StageTransfer
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.transition import begin, transition
from swarm_coordinator.core.trust.audits import AuditBook
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_coordinator.status.builder import document_without_peers, peer_row
from swarm_coordinator.status.document import StatusDocument, health_of
from swarm_shared import protocol
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import (
    Generation,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Step,
    Version,
)
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.work_statements import AuditStatement
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

MessageT = TypeVar("MessageT")
RecordT = TypeVar("RecordT")
Commands = list[events.Command]
SHA = "a" * 64
OTHER_DIGEST = "f" * 32
"""Of a tensor that no peer has computed."""


class Bench:
    """A run of two stages, two microbatches a step and no evaluation unless configured."""

    def __init__(
        self,
        restored: events.Restored | None = None,
        limits: dict[str, float] | None = None,
        audits: AuditBook | None = None,
        keep: int = 1,
        **options: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "microbatches": 2, "evaluation": 0, "checkpoint_steps": 100, "steps": 20,
        }  # fmt: skip
        manifest = manifest_of(Options(**{**defaults, **options}))
        changed = manifest.limits.model_copy(update=limits or {})
        self.manifest: Manifest = manifest.model_copy(update={"limits": changed})
        start = restored or events.Restored(1, Version(0), None, None, False, None)
        self.now = 100.0
        self.run = begin(
            self.manifest, "manifest", COORDINATOR, start, self.now, audits=audits,
            kept_checkpoints=keep,
        )  # fmt: skip
        if restored is None:
            self.now += 60.0  # special rules apply in the first minute after a start
        self.sessions: dict[str, int] = {}
        self.paused: set[str] = set()
        self.last: Commands = []
        self.log: Commands = []
        self.store = SimStore()
        """What the run has made durable, for `restart`."""

    # ---- events in

    def event(self, event: events.Event) -> Commands:
        self.last = one_by_one(transition(self.run, event, self.now))
        self.log.extend(self.last)
        for command in self.last:
            if isinstance(command, events.Persist):
                self.store.write(command.record)
            elif isinstance(command, events.Remember):
                self.store.remember(command.record, self.now)
        return self.last

    def event_tick(self) -> Commands:
        """A tick at the present time, without heartbeats."""
        return self.event(events.Tick())

    def tick(self, seconds: float = 0.0, silent: tuple[str, ...] = ()) -> Commands:
        """Let time pass, with heartbeats of all peers but the silent ones; returns its commands."""
        commands: Commands = []
        left = seconds
        while True:
            step = min(1.0, left)
            self.now += step
            left -= step
            for peer in [p for p in self.run.peers if p not in silent]:
                commands += self.beat(peer)
            commands += self.event(events.Tick())
            if left <= 0:
                self.last = commands
                return commands

    def beat(self, peer: str) -> Commands:
        paused = peer in self.paused
        return self.send(
            peer, protocol.Heartbeat(microbatches_per_second=1.0, queued=0, paused=paused)
        )

    def pause(self, *peers: str) -> Commands:
        self.paused.update(peers)
        return [command for peer in peers for command in self.beat(peer)]

    def resume(self, peer: str) -> Commands:
        self.paused.discard(peer)
        return self.beat(peer) + self.event(events.Tick())

    def attach(
        self, peer: str, receipts: tuple[Receipt, ...] = (), owner: PeerId | None = None,
        owner_binding: str | None = None, **hello: Any,
    ) -> Commands:  # fmt: skip
        self.sessions[peer] = 1 + max(self.sessions.values(), default=0)
        carrier = protocol.CarrierAddress(peer=f"p2pd-{peer}", addresses=("a",), binding="b")
        defaults: dict[str, Any] = {
            "run": RunId("run"), "software": "0", "addresses": (), "carrier": carrier,
            "device": "cpu", "memory": offers(1000), "name": peer, "digest": "d",
        }  # fmt: skip
        return self.event(
            events.PeerAttached(
                self.session(peer),
                PeerId(peer),
                protocol.Hello(**{**defaults, **hello}, owner=owner_binding),
                "cert",
                receipts,
                owner,
            )
        )

    def session(self, peer: str) -> events.SessionNumber:
        return events.SessionNumber(self.sessions[peer])

    def send(self, peer: str, message: protocol.ClientMessage) -> Commands:
        if isinstance(message, protocol.Heartbeat):
            return self.event(
                events.HeartbeatsReceived(
                    (events.PeerHeartbeat(self.session(peer), PeerId(peer), message),)
                )
            )
        return self.event(events.MessageReceived(self.session(peer), PeerId(peer), message))

    def lose(self, peer: str) -> Commands:
        return self.event(events.SessionLost(self.session(peer), PeerId(peer)))

    def request(self, peer: str, stage: int, **hello: Any) -> Commands:
        """Attach a new peer that requests `stage`; returns the commands that the request causes."""
        self.attach(peer, **hello)
        return self.send(peer, protocol.StageRequest(stage=StageIndex(stage)))

    def join(self, peer: str, stage: int, **hello: Any) -> None:
        """Attach a new peer that wants `stage`, and let it hold the stage once it has a source."""
        self.request(peer, stage, wanted_stage=stage, **hello)
        self.ready(peer)

    def prepare_move(self, peer: str, stage: int, partner: str | None = None) -> None:
        """The peer has the state of its next stage, beside the one that it serves."""
        state = self.peer(peer)
        transfer = StageTransfer(
            StageIndex(stage), self.now, partner=None if partner is None else PeerId(partner)
        )
        self.run.peers.begin_transfer(state, transfer)
        self.run.peers.assign_source(state, transfer, self.now)
        transfer.ready = True

    def ready(self, peer: str) -> Commands:
        state = self.peer(peer)
        assert state.transfer is not None
        version = state.transfer.version
        return self.send(
            peer, protocol.Ready(stage=state.transfer.stage, version=version, digest="d")
        )

    def join_all(self, *names: str) -> None:
        """Join peers with names like "a0", "b1": a letter and the stage."""
        for name in names:
            self.join(name, int(name[1:]))

    def receipt(self, peer: str, microbatch: int, /, **changes: Any) -> Receipt:
        state = self.run.peers.get(PeerId(peer))
        stage = changes.get("stage", state.stage if state is not None else None)
        last = stage == self.manifest.stage_count - 1
        step = self.run.history.version + 1
        values: dict[str, Any] = {
            "run": RunId("run"), "generation": Generation(self.run.start.generation),
            "step": Step(step), "microbatch": MicrobatchIndex(microbatch), "stage": stage,
            "peer": PeerId(peer), "samples": 2, "tokens": TOKENS,
            "loss_sum": train_loss(step, microbatch) if last else None,
        }  # fmt: skip
        values |= changes
        if "transcript" not in values:
            of_last = StageIndex(self.manifest.stage_count - 1)
            values["transcript"] = simulated_transcript(
                values["step"], values["microbatch"], stage, of_last
            )
        return Receipt(**values)

    def audited(
        self, peer: str, order: protocol.Audit, transcript: Transcript | None, **changes: Any
    ) -> Commands:
        """The peer answers an order to audit with a statement."""
        last = order.stage == self.manifest.stage_count - 1
        values: dict[str, Any] = {
            "run": RunId("run"), "generation": Generation(self.run.start.generation),
            "audit": order.audit, "step": order.step, "microbatch": order.microbatch,
            "stage": order.stage, "peer": order.peer, "auditor": PeerId(peer),
            "transcript": transcript,
            "loss_sum": train_loss(order.step, order.microbatch) if last else None,
        }  # fmt: skip
        statement = AuditStatement(**{**values, **changes})
        return self.event(
            events.AuditAnswered(
                self.session(peer), PeerId(peer), order.audit, statement, f"signed by {peer}"
            )
        )

    def report(self, peer: str, *microbatches: int) -> Commands:
        """The peer reports that it has accumulated these."""
        receipts = tuple(self.receipt(peer, m) for m in microbatches)
        return self.event(events.ReceiptsVerified(self.session(peer), PeerId(peer), receipts))

    def report_broken(
        self, peer: str, microbatch: int, end: Literal["input", "output"]
    ) -> Commands:
        """The peer reports a microbatch of which another tensor crossed that end of its stage than
        its neighbour says."""
        good = self.receipt(peer, microbatch).transcript
        receipt = self.receipt(
            peer, microbatch, transcript=good.model_copy(update={end: OTHER_DIGEST})
        )
        return self.event(events.ReceiptsVerified(self.session(peer), PeerId(peer), (receipt,)))

    def resolve(self, trainer: str, microbatch: int, lease: int, **changes: Any) -> Commands:
        values: dict[str, Any] = {
            "session": self.session(trainer), "peer": PeerId(trainer),
            "step": Step(self.run.history.version + 1), "microbatch": MicrobatchIndex(microbatch),
            "lease": lease, "ok": True, "reason": "", "receipts": (),
        }  # fmt: skip
        return self.event(events.LeaseResolved(**{**values, **changes}))

    # ---- sequences of events

    def resolve_all(self) -> None:
        """Every trainer has answered every lease."""
        for microbatch, lease in list(self.step().leases.items()):
            self.resolve(lease.trainer, microbatch, lease.lease)

    def fill(self) -> Commands:
        """Every microbatch is committed, by the first peer of each stage."""
        commands: Commands = []
        for stage in self.run.stage_indices:
            peer = min(p.peer for p in self.run.peers.ready(stage))
            commands += self.report(peer, *cells.indices_of_step(self.run))
        return commands

    def attempt_of(self, peer: str) -> int:
        """The latest attempt of the peer's stage; 0 without one."""
        of = self.run.peers.get(PeerId(peer))
        return (
            self.step().attempts.get(of.stage, 0) if of is not None and of.stage is not None else 0
        )

    def averaged(self, peer: str, own: float = 1.0, tied: float = 0.0, **changes: Any) -> Any:
        """The peer reports the current close as averaged, or as `changes` say."""
        values: dict[str, Any] = {
            "step": self.step().step, "attempt": self.attempt_of(peer), "ok": True,
            "own_squared": own, "tied_squared": tied,
        }  # fmt: skip
        return self.send(peer, protocol.RoundReport(**{**values, **changes}))

    def failed(self, peer: str, **changes: Any) -> Commands:
        values: dict[str, Any] = {"ok": False, "reason": "it failed"}
        commands: Commands = self.averaged(peer, 0.0, **{**values, **changes})
        return commands

    def average_all(self) -> Commands:
        assert self.run.phase is RunPhase.CLOSING, self.run.phase
        commands: Commands = []
        for peer in self.closing():
            commands += self.averaged(peer)
        return commands

    def apply(self, peer: str, digest: str = "d", norm: float = 1.0) -> Commands:
        return self.send(
            peer, protocol.Applied(step=Step(self.run.history.version), digest=digest, norm=norm)
        )

    def apply_all(self, but: str = "") -> Commands:
        """Every member of the close applies the step, but one."""
        return [c for peer in self.closing() if peer != but for c in self.apply(peer)]

    def one_step(self) -> Commands:
        """From COLLECT to the next COLLECT, or to wherever the run continues."""
        return self.fill() + self.average_all() + self.apply_all()

    def state_bytes(self, stage: int) -> int:
        return stage_sizes(self.manifest)[stage].state_bytes

    def save(self, peer: str, sha: str = SHA) -> Commands:
        """The peer has saved the snapshot of its stage at the run's version."""
        stage, version = self.run.peers[PeerId(peer)].stage, self.run.history.version
        assert stage is not None
        saved = protocol.SnapshotReady(
            version=version, stage=stage, item=f"item-{stage}", bytes=self.state_bytes(stage),
            sha256=sha,
        )  # fmt: skip
        return self.send(peer, saved)

    def stored(self, version: int, sha: str = SHA) -> Commands:
        stages = self.checkpoint_of(self.manifest.stage_count, version, sha).stages
        return self.event(events.CheckpointStored(Version(version), stages))

    def checkpoint(self) -> Commands:
        """Every requested holder saves; the shell fetches and stores."""
        pending = self.run.checkpoints.pending
        assert pending is not None
        for snapshots in pending.stages.values():
            for holder in list(snapshots.asked):
                self.save(holder)
        assert self.commands(events.FetchSnapshot)
        return self.stored(pending.version)

    # ---- commands, and the state after a restart

    def peer(self, name: str) -> PeerState:
        return self.run.peers[PeerId(name)]

    def step(self) -> StepState:
        assert self.run.steps.current is not None
        return self.run.steps.current

    def closing(self) -> list[PeerId]:
        closing = self.step().closing
        return sorted(closing.members, key=lambda peer: (closing.members[peer], peer))

    def commands(self, kind: type[RecordT], among: Commands | None = None) -> list[RecordT]:
        found = self.last if among is None else among
        return [c for c in found if isinstance(c, kind)]

    def sent(
        self, peer: str, kind: type[MessageT], among: Commands | None = None
    ) -> list[MessageT]:
        """Messages of a kind to a peer, by default among the last event's commands."""
        return [
            c.message
            for c in self.commands(events.Send, among)
            if c.peer == peer and isinstance(c.message, kind)
        ]

    def records(self, kind: type[RecordT], among: Commands | None = None) -> list[RecordT]:
        return [
            c.record
            for c in self.commands(events.Persist, self.log if among is None else among)
            if isinstance(c.record, kind)
        ]

    def leased(self, among: Commands | None = None) -> list[tuple[str, protocol.LeasedMicrobatch]]:
        """Leased microbatches with their trainers, by default of the last event's commands."""
        return [
            (str(peer), microbatch)
            for peer in sorted(self.run.peers)
            for lease in self.sent(peer, protocol.Lease, among)
            for microbatch in lease.microbatches
        ]

    def roll_backs(self, among: Commands | None = None) -> list[int]:
        """The versions to which the run has gone back, by default since its beginning."""
        return [record.version for record in self.records(events.RolledBack, among)]

    def close_of(self, peer: str) -> protocol.Close:
        return self.sent(peer, protocol.Close, self.log)[-1]

    @staticmethod
    def checkpoint_of(stages: int, version: int, sha: str = SHA) -> events.CheckpointRecord:
        return events.CheckpointRecord(
            Version(version),
            tuple(
                events.StoredStage(StageIndex(s), f"checkpoint/{version}/{s}", 5, sha)
                for s in range(stages)
            ),
        )

    @staticmethod
    def applied_step(step: int, attempt: int) -> events.AppliedStep:
        share = events.StageShare(PeerId("a0"), StageIndex(0), 2, 8)
        return events.AppliedStep(Step(step), attempt, 2.0, 8, 1.0, 3.0, 0.1, (share,))

    def savers(self, commands: Commands | None = None) -> list[str]:
        """Peers that were requested to save a snapshot, by default by the last event."""
        return [p for p in sorted(self.run.peers) if self.sent(p, protocol.SaveSnapshot, commands)]

    def status(self) -> StatusDocument:
        """What the coordinator would write now, as far as the core knows it."""
        peers = tuple(peer_row(self.run, peer, self.now) for peer in self.run.peers.values())
        document = document_without_peers(self.run, self.now).model_copy(update={"peers": peers})
        health = health_of(document, self.manifest.limits.dead_after_seconds)
        return document.model_copy(update={"health": health})

    @classmethod
    def trained(
        cls, steps_done: int, /, names: tuple[str, ...] = ("a0", "b0", "a1", "b1"), **options: Any
    ) -> Bench:
        """A run whose peers have joined and made some steps."""
        bench = cls(**options)
        bench.join_all(*names)
        for _ in range(steps_done):
            bench.one_step()
        return bench

    def restart(self, away_seconds: float = 1.0, audits: AuditBook | None = None) -> None:
        """The coordinator has ended, and starts again from its store."""
        self.now += away_seconds
        restored = self.store.restore(self.run.start.generation + 1, self.now)
        self.run = begin(self.manifest, "manifest", COORDINATOR, restored, self.now, audits=audits)

    @classmethod
    def restarted(
        cls, version: int, attempt: int = 7, checkpoint: int | None = None, **options: Any
    ) -> Bench:
        """A restarted coordinator, in its second generation, at `version`."""
        record = None
        if checkpoint is not None:
            record = cls.checkpoint_of(options.get("stages", 2), checkpoint)
        last = cls.applied_step(version, attempt) if version else None
        return cls(events.Restored(2, Version(version), last, record, False, None), **options)


def joined(*names: str, **options: Any) -> Bench:
    """A bench whose peers of these names (`Bench.join_all`) have joined."""
    bench = Bench(**options)
    bench.join_all(*names)
    return bench
