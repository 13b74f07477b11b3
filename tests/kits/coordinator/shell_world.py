"""A run folder and scripted volunteers for tests of the coordinator's shell.

The volunteers speak the control protocol over real nodes on loopback and sign real receipts; only
their mathematics is made up. The coordinator under test is the real one.
"""

from __future__ import annotations

import atexit
import base64
import functools
import hashlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from kits.memory import offers
from swarm_coordinator.core.trust.samples import SampledTokens
from swarm_coordinator.durability.run_files import load_identity, load_manifest, load_settings
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.server.coordinator import serve
from swarm_coordinator.server.startup import CoordinatorContext
from swarm_coordinator.simulator.transcripts import simulated_sums, simulated_transcript
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.errors import LinkClosed
from swarm_shared.base.types import Generation, MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.identity.work_statements import LeaseTicket, SumStatement
from swarm_shared.network import FramedStream, FrameLimits, Node, open_node
from swarm_shared.protocol import (
    CONTROL_PROTOCOL,
    SOFTWARE_VERSION,
    Applied,
    Apply,
    AssignStage,
    ClientMessage,
    Close,
    CoordinatorMessage,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    LeaseResult,
    LinkBytes,
    Ready,
    Refused,
    RoundReport,
    RunNews,
    SaveSnapshot,
    SnapshotReady,
    StageRequest,
    SumCheck,
    SumsChecked,
    Welcome,
    coordinator_messages,
    encode,
    parse,
)
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes
from swarm_shared.transfer.transfer import certificate_check, serve_transfers

LIMITS = FrameLimits(max_header_bytes=2**24)
LINK = "/test/link/1"
MessageT = TypeVar("MessageT")
VolunteerT = TypeVar("VolunteerT", bound="Volunteer")


def make_run(path: Path, steps: int = 4, **changes: object) -> RunFolder:
    """A small run of two stages that listens on loopback and checkpoints every two steps.

    Of several with the same name and settings each is a copy of one that was made.
    """
    shutil.copytree(_made_run(path.name, steps, **changes), path)
    return RunFolder.open(path)


@functools.cache
def _made_run(name: str, steps: int, **changes: object) -> Path:
    """A run to copy, which takes much less time than making one; it goes with the process."""
    place = Path(tempfile.mkdtemp(prefix="swarmtrain-run-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    text = place / "text"
    text.mkdir()
    for index in range(40):
        (text / f"{index}.txt").write_text(f"document {index}: " + "some words of text. " * 40)
    overrides: dict[str, object] = {
        "training.steps": steps, "training.microbatches_per_step": 2,
        "training.sequences_per_microbatch": 1, "training.evaluation_microbatches": 1,
        "checkpoint.every_steps": 2, "network.listen_host": "127.0.0.1",
        "limits.receipt_interval_seconds": 0.05, "data.heldout_share": 0.2,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }  # fmt: skip
    initialise_run(place / name, "tiny", str(text), 2, overrides)
    return place / name


@dataclass
class Served:
    """A coordinator that runs in the test's own event loop."""

    folder: RunFolder
    manifest: Manifest
    invite: Invite
    store: SqliteStore
    lines: list[str]
    ended: trio.Event
    scope: trio.CancelScope

    async def train(self, *volunteers: Volunteer) -> None:
        """To the end of the run, by these or by one volunteer per stage."""
        await train_to_the_end(
            list(volunteers) or crew_of(self.invite, self.manifest, self.folder.path)
        )
        await self.ended.wait()


@asynccontextmanager
async def served(
    folder: RunFolder, port: int | None = None, renew_after_seconds: float = 3600.0
) -> AsyncIterator[Served]:
    """Runs the real server until the block ends (or it ends by itself)."""
    store = SqliteStore.open(folder.database)
    manifest = load_manifest(folder)
    lines: list[str] = []
    invites: list[Invite] = []
    ready, ended = trio.Event(), trio.Event()

    def on_serving(invite: Invite) -> None:
        invites.append(invite)
        ready.set()

    context = CoordinatorContext(
        folder=folder, settings=load_settings(folder), manifest=manifest,
        identity=load_identity(folder), store=store, report=lines.append, port=port,
        on_serving=on_serving, renew_after_seconds=renew_after_seconds,
    )  # fmt: skip
    failure: list[BaseException] = []

    async def run(scope: trio.CancelScope) -> None:
        try:
            with scope:
                await serve(context)
        except Exception as error:  # noqa: BLE001 (raised again below)
            failure.append(error)
        ended.set()
        ready.set()

    scope = trio.CancelScope()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, scope)
            await ready.wait()
            if not failure:
                yield Served(folder, manifest, invites[0], store, lines, ended, scope)
            scope.cancel()
    finally:
        store.close()
    if failure:
        raise failure[0]


@dataclass
class Volunteer:
    """One scripted client. `crew` holds the identities of all, so that a trainer can sign for
    each."""

    invite: Invite
    manifest: Manifest
    folder: Path
    stage: StageIndex
    crew: dict[StageIndex, Identity]
    version: Version | None = None
    """None: holds no state yet."""
    averaged_attempt: int | None = None
    closing: Close | None = None
    """The latest order to close."""
    seen: list[str] = field(default_factory=list)
    before_closing: Callable[[Step], Awaitable[None]] | None = None
    """Awaited before the close of a step is answered, for tests that act at that point."""
    welcomes: list[Welcome] = field(default_factory=list)
    goodbyes: list[Goodbye] = field(default_factory=list)

    @property
    def identity(self) -> Identity:
        return self.crew[self.stage]

    def hello(self) -> Hello:
        return hello_for(
            self.invite, wanted_stage=self.stage,
            stage=None if self.version is None else self.stage,
            version=self.version or Version(0), averaged_attempt=self.averaged_attempt, digest="d",
            name=f"volunteer-{self.stage}",
        )  # fmt: skip

    async def take_part(self) -> None:
        """From hello to goodbye, or to the loss of the coordinator."""
        async with open_node(self.identity, ["/ip4/127.0.0.1/tcp/0"]) as node:
            serve_transfers(
                node,
                lambda item, _: self.folder / item.replace("/", "-"),
                certificate_check(run_id_of(self.manifest), self.manifest.organiser),
            )
            stream = await node.open_stream(
                self.invite.coordinator, CONTROL_PROTOCOL, LIMITS, self.invite.addresses
            )
            hello = self.hello().model_copy(update={"addresses": node.addresses})
            await stream.send(encode(hello))
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._beat, stream)
                    while not self.goodbyes:
                        frame = await stream.receive()
                        message = parse(coordinator_messages, frame.header)
                        if isinstance(message, Close) and self.before_closing is not None:
                            await self.before_closing(message.step)
                        for answer in self._answers(message):
                            await stream.send(encode(answer))
                    nursery.cancel_scope.cancel()
            except* LinkClosed:
                pass  # the coordinator has stopped; a test may start this volunteer again

    async def _beat(self, stream: FramedStream) -> None:
        link = LinkBytes(remote=self.invite.coordinator, protocol=LINK, sent=10, received=20)
        while True:
            await stream.send(
                encode(Heartbeat(microbatches_per_second=1.0, queued=0, changed_links=(link,)))
            )
            await trio.sleep(0.2)

    def _answers(self, message: CoordinatorMessage) -> list[ClientMessage]:
        self.seen.append(message.kind)
        match message:
            case Welcome():
                self.welcomes.append(message)
                return [] if message.keep else [StageRequest(stage=self.stage)]
            case AssignStage():
                self.version = message.version
                return [Ready(stage=message.stage, version=message.version, digest="d")]
            case Lease():
                return self._leased(message)
            case Close():
                self.closing, self.averaged_attempt = message, message.attempt
                return [
                    RoundReport(
                        step=message.step, attempt=message.attempt, ok=True, own_squared=4.0
                    )
                ]
            case SumCheck():
                return [self._sums(message)]
            case Apply():
                self.version, self.averaged_attempt = Version(message.step), None
                return [Applied(step=message.step, digest="d", norm=1.0)]
            case SaveSnapshot():
                return [self._snapshot(message)]
            case Goodbye():
                self.goodbyes.append(message)
        return []

    def _sums(self, order: SumCheck) -> SumsChecked:
        assert self.closing is not None
        statement = SumStatement(
            run=run_id_of(self.manifest), generation=self.welcomes[-1].generation,
            step=order.step, attempt=order.attempt, stage=self.stage,
            peer=self.identity.peer_id, seed=order.seed,
            checks=simulated_sums(
                order, self.closing, self.manifest.training.microbatches_per_step
            ),
        )  # fmt: skip
        return SumsChecked(
            step=order.step, attempt=order.attempt, details=order.details,
            statement=base64.b64encode(statement.sign(self.identity)).decode(),
        )  # fmt: skip

    def _snapshot(self, message: SaveSnapshot) -> SnapshotReady:
        item = f"state/{message.version}/{message.stage}"
        content = snapshot_content(self.manifest, message.version, message.stage)
        (self.folder / item.replace("/", "-")).write_bytes(content)
        return SnapshotReady(
            version=message.version, stage=message.stage, item=item, bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
        )  # fmt: skip

    def _leased(self, lease: Lease) -> list[ClientMessage]:
        return [
            LeaseResult(
                step=lease.step, microbatch=leased.microbatch, lease=lease.lease, ok=True,
                receipts=tuple(
                    self.receipt(lease.step, leased.microbatch, stage, leased.ticket)
                    for stage in leased.accumulate
                ),
            )
            for leased in lease.microbatches
        ]  # fmt: skip

    def receipt(
        self, step: Step, microbatch: MicrobatchIndex, stage: StageIndex, leased: str
    ) -> str:
        """The receipt of a stage; `leased` is the microbatch's ticket."""
        ticket = LeaseTicket.open(decode_envelope(leased, "a ticket"), self.manifest.organiser)
        last = stage == self.manifest.stage_count - 1
        tokens = self.manifest.tokens_per_microbatch
        return receipt_for(
            self.crew[stage],
            Receipt(
                run=run_id_of(self.manifest), generation=Generation(1), step=step,
                microbatch=microbatch, stage=stage, peer=self.crew[stage].peer_id, samples=1,
                tokens=tokens, loss_sum=loss_of(step) * tokens if last else None,
                transcript=simulated_transcript(
                    step, microbatch, stage, StageIndex(self.manifest.stage_count - 1),
                    drawn=SampledTokens(ticket.tokens, ticket.targets),
                ),
            ),
        )  # fmt: skip


def loss_of(step: int) -> float:
    return 5.0 - step / 8


def snapshot_content(manifest: Manifest, version: int, stage: int) -> bytes:
    """A file as large as the stage's state."""
    size = stage_sizes(manifest)[stage].state_bytes
    text = f"state of stage {stage} at {version} ".encode()
    return (text * (size // len(text) + 1))[:size]


def receipt_for(identity: Identity, receipt: Receipt) -> str:
    return base64.b64encode(receipt.sign(identity)).decode()


def hello_for(invite: Invite, **changes: object) -> Hello:
    values: dict[str, object] = {
        "run": invite.run_id, "software": SOFTWARE_VERSION, "token": invite.token,
        "addresses": (), "device": "test", "memory": offers(2**33),
    }  # fmt: skip
    return Hello.model_validate({**values, **changes})


def crew_of(
    invite: Invite, manifest: Manifest, folder: Path, kind: type[VolunteerT] = Volunteer
) -> list[VolunteerT]:
    """One volunteer per stage."""
    crew = {StageIndex(stage): Identity.generate() for stage in range(manifest.stage_count)}
    volunteers = []
    for stage in crew:
        home = folder / f"volunteer-{stage}"
        home.mkdir(exist_ok=True)
        volunteers.append(kind(invite, manifest, home, stage, crew))
    return volunteers


@asynccontextmanager
async def client(invite: Invite, identity: Identity | None = None) -> AsyncIterator[Client]:
    """A node with a control stream on which nothing has been sent yet."""
    async with open_node(identity or Identity.generate()) as node:
        stream = await node.open_stream(
            invite.coordinator, CONTROL_PROTOCOL, LIMITS, invite.addresses
        )
        yield Client(node, stream, invite)


@dataclass
class Client:
    node: Node
    stream: FramedStream
    invite: Invite

    async def send(self, message: ClientMessage) -> None:
        await self.stream.send(encode(message))

    async def receive(self) -> CoordinatorMessage:
        """The next message, except run news, which may arrive at any time."""
        while True:
            frame = await self.stream.receive(timeout_seconds=10)
            message = parse(coordinator_messages, frame.header)
            if not isinstance(message, RunNews):
                return message

    async def hello(self, **changes: object) -> Welcome | Refused:
        """Say hello; the answer."""
        await self.send(hello_for(self.invite, **changes))
        answer = await self.receive()
        assert isinstance(answer, Welcome | Refused)
        return answer

    async def join(self, **changes: object) -> Welcome:
        answer = await self.hello(**changes)
        assert isinstance(answer, Welcome), answer
        return answer

    async def hold(self, stage: int, **changes: object) -> Welcome:
        """Join, and hold a stage whose state is the fresh one."""
        welcome = await self.join(wanted_stage=stage, **changes)
        await self.send(StageRequest(stage=StageIndex(stage)))
        await self.until(AssignStage)
        await self.send(Ready(stage=StageIndex(stage), version=Version(0), digest="d"))
        return welcome

    async def until(
        self, kind: type[MessageT], found: Callable[[MessageT], bool] = lambda _: True
    ) -> MessageT:
        """The next message of a kind that is such a one; others are passed over."""
        with trio.fail_after(10):
            while True:
                message = await self.receive()
                if isinstance(message, kind) and found(message):
                    return message

    async def until_closed(self) -> None:
        while True:
            try:
                await self.stream.receive(timeout_seconds=10)
            except LinkClosed:
                return


async def checkpoint_of(folder: RunFolder, version: int) -> None:
    """Wait until the database has a checkpoint of at least this version."""
    while True:
        record = history(folder.database).restored.checkpoint
        if record is not None and record.version >= version:
            return
        await trio.sleep(0.02)


async def train_to_the_end(volunteers: list[Volunteer]) -> None:
    async with trio.open_nursery() as nursery:
        for volunteer in volunteers:
            nursery.start_soon(partial(volunteer.take_part))
