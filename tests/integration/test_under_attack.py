"""A run that is attacked from outside and from inside equals its reference."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest
import trio

from kits.attack.insider import Insider, attached
from kits.attack.raw import Tally, Target, connect, got_through, multistream, muxed
from kits.attack.strangers import counted
from kits.memory import offers
from kits.runs.fault_run import TINY
from kits.runs.real_run import Run
from swarm_coordinator.demo.subprocesses import Subprocess
from swarm_shared.base.types import PeerId
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import (
    CONTROL_PROTOCOL,
    Applied,
    Heartbeat,
    Hello,
    LeaseResult,
    Ready,
    Receipts,
    RoundReport,
    SnapshotReady,
    encode,
)
from swarm_shared.transfer.transfer import MAX_STREAMS_PER_PEER

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STEPS = 5000
"""More than the attacks take on any machine: the run is stopped after them."""
FLOOD_SECONDS = 3.0
"""Minimum length of a flood; it continues until `LEAST` of it has got through, and the run has made
two steps meanwhile."""
PATIENCE_SECONDS = 120.0
MEGABYTE = 2**20
LEAST = Tally(connections=200, handshakes=1, bytes=MEGABYTE)
"""Of a flood, what has to reach its victim. Bytes count after a handshake only."""
COORDINATORS_MEGABYTES, VOLUNTEERS_MEGABYTES = 250.0, 250.0
"""Megabytes by which a process may grow during the attacks."""


class Memory:
    """The largest growth in memory of each process, sampled ten times a second."""

    def __init__(self, children: list[Subprocess]) -> None:
        self._children = children
        self._before = [self._of(child) for child in children]
        self.grown = [0.0 for _ in children]

    def look(self) -> None:
        for index, child in enumerate(self._children):
            grown = self._of(child) - self._before[index]
            self.grown[index] = max(self.grown[index], grown)

    @staticmethod
    def _of(child: Subprocess) -> float:
        try:
            process = psutil.Process(child.pid)
            return process.memory_info().rss / MEGABYTE
        except psutil.NoSuchProcess:
            return 0.0


@contextmanager
def watched(children: list[Subprocess]) -> Iterator[Memory]:
    memory, over = Memory(children), threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            memory.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield memory
    finally:
        over.set()
        thread.join()


# ---------------------------------------------------------------- from outside


async def flood(target: Target) -> None:
    """Open many connections; the first ones shake hands and send half a hello, repeatedly."""
    half = struct.pack(">IQ", 200_000, 0) + bytes(190_000)

    async def silent() -> None:
        with suppress(Exception):
            async with await connect(target) as socket:
                await socket.send_all(multistream("/multistream/1.0.0", "/plaintext/2.0.0"))
                while await socket.receive_some():
                    pass

    async def half_hellos(tried: trio.Event) -> None:
        with suppress(Exception):
            async with muxed(target) as connection, trio.open_nursery() as nursery:
                tried.set()
                nursery.start_soon(connection.drain)
                while not connection.closed.is_set():
                    await connection.open(CONTROL_PROTOCOL, more=half)
        tried.set()

    while True:
        with trio.move_on_after(FLOOD_SECONDS):
            async with trio.open_nursery() as nursery:
                tried = trio.Event()
                for _ in range(20):
                    nursery.start_soon(half_hellos, tried)
                # Otherwise silent connections may take every place for a handshake.
                await tried.wait()
                for _ in range(200):
                    nursery.start_soon(silent)


async def speak_plaintext(target: Target) -> bytes:
    """Return the victim's answer to a client that offers plaintext only."""
    async with await connect(target) as socket:
        await socket.send_all(multistream("/multistream/1.0.0", "/plaintext/2.0.0"))
        answer = b""
        with trio.move_on_after(12):
            while some := await socket.receive_some():
                answer += some
        return answer


# ---------------------------------------------------------------- from inside

WELL_FORMED_LIES = ("no input", "endless input", "all target", "a byte less", "no payload")
MALFORMED_LIES = (
    "an empty message", "a deep message", "no text", "half a message", "an endless header",
    "an endless payload", "half a prefix", "half a payload",
)  # fmt: skip


def outcomes_of_lies(stage: int) -> dict[str, str]:
    """Lies in a valid message are refused before their sizes are compared, because the sender
    holds no preceding stage; the other ones end the link."""
    refused = dict.fromkeys(WELL_FORMED_LIES, "stage_refused")
    closed = dict.fromkeys(MALFORMED_LIES, "closed")
    # Activations are the largest payload that a frame may have; token ids are smaller.
    return {**refused, **closed, "a byte more": "closed" if stage else "stage_refused"}


async def attack_volunteers(insider: Insider, version: int) -> None:
    await insider.knows.wait()
    for stage in (0, 1):
        victim = insider.victim(stage)
        for what, certificate in insider.forged().items():
            assert await insider.is_turned_away(victim, certificate), what
        # Its certificate is valid, but it holds no stage: nothing of it is counted.
        answers = await insider.push_work(stage, range(version, version + 5))
        assert answers == ["stage_hello_answer", *["stage_refused"] * 5]
        assert await insider.lie_about_sizes(stage) == outcomes_of_lies(stage)


async def attack_coordinator(insider: Insider) -> None:
    other, peer = Identity.generate(), insider.roster[0].peer
    mine = insider.identity
    refused: dict[str, bytes] = {
        "nonsense": b'{"kind": "nonsense"}',
        "not JSON": b"\xff" * 1000,
        "very deep": b"[" * 100_000,
        "hello again": encode(
            Hello(
                run=insider.invite.run_id, software="0", addresses=(), device="", memory=offers(0)
            )
        ),
        "a receipt of another run": encode(
            Receipts(receipts=(insider.receipt(mine, run="cd" * 32),))
        ),
        "a receipt that is none": encode(Receipts(receipts=("AAAA",))),
        "a rate beyond all measure": b'{"kind":"heartbeat","microbatches_per_second":1.7e308,'
        b'"queued":0}',
    }
    ignored: dict[str, bytes] = {
        "a receipt of somebody": encode(Receipts(receipts=(insider.receipt(other),))),
        "a stage it does not hold": encode(Ready(stage=0, version=0, digest="d")),
        "a snapshot it has not": encode(
            SnapshotReady(version=1, stage=0, item="../x", bytes=2**50, sha256="a" * 64)
        ),
        "a round it is not in": encode(
            RoundReport(step=1, attempt=2**24 + 1, ok=False, culprit=peer)
        ),
        "a step it has not applied": encode(Applied(step=1, digest="d", norm=1e99)),
        "a lease it has not": encode(
            LeaseResult(step=1, microbatch=0, lease=2**24 + 1, ok=True, receipts=())
        ),
        "a fast heart": encode(Heartbeat(microbatches_per_second=1e15, queued=2**52)),
    }
    outcomes: dict[str, str] = {}

    async def say(name: str, content: bytes, payload: bytes = b"") -> None:
        outcomes[name] = await insider.babble(content, payload)

    async with trio.open_nursery() as nursery:
        for name, content in (refused | ignored).items():
            nursery.start_soon(say, name, content)
        nursery.start_soon(say, "a payload", b"{}", bytes(1))
    assert outcomes == {
        **dict.fromkeys(refused, "refused: protocol"),
        **dict.fromkeys(ignored, "ignored"),
        "a payload": "closed",  # before it is read
    }
    for item in ("../organiser.key", "/etc/passwd", "data/../organiser.key", "", "organiser.key"):
        assert await insider.fetch(item) is None, item
    assert 0 < await insider.ask_and_never_read(5.0) <= MAX_STREAMS_PER_PEER


# ---------------------------------------------------------------- the run


def test_a_run_under_attack_equals_its_reference(make_run) -> None:
    run = make_run(2, steps=STEPS, limits__starting_peers_per_stage=1)
    swarm = run.swarm
    invite = Invite.decode(text := swarm.start_coordinator())
    for stage in (0, 1):
        swarm.start_volunteer(text, stage=stage)
    run.wait_for_version(2)
    assert swarm.coordinator is not None
    host, port = invite.addresses[0].split("/")[2], int(invite.addresses[0].split("/")[4])
    coordinator = Target(invite.coordinator, port, host)

    async def attack() -> None:
        async with attached(invite) as insider, trio.open_nursery() as nursery:
            nursery.start_soon(insider.beat)
            await insider.knows.wait()
            volunteers = [
                Target.of(next(a for a in record.local if "/127.0.0.1/" in a))
                for record in insider.roster
            ]
            for target in (coordinator, *volunteers):
                answer = await speak_plaintext(target)
                assert answer.endswith(b"\x03na\n"), answer
                async with trio.open_nursery() as flooding:
                    flooding.start_soon(flood, target)
                    before = run.version()
                    sent = await got_through(LEAST, FLOOD_SECONDS)
                    with trio.fail_after(PATIENCE_SECONDS):
                        while run.version() < before + 2:
                            await trio.sleep(0.2)
                    flooding.cancel_scope.cancel()
                assert sent.reaches(LEAST), sent
            await attack_volunteers(insider, run.version())
            await attack_coordinator(insider)
            nursery.cancel_scope.cancel()

    processes = [swarm.coordinator, *swarm.volunteers]
    with watched(processes) as memory:
        began, before = time.monotonic(), run.version()
        trio.run(attack)
        after = run.version()
    print(
        f"{after - before} steps in {time.monotonic() - began:.0f} s of attacks; the processes "
        f"grew by {[round(grown) for grown in memory.grown]} MB"
    )
    assert memory.grown[0] < COORDINATORS_MEGABYTES
    assert max(memory.grown[1:]) < VOLUNTEERS_MEGABYTES
    assert [child.exit_code() for child in processes] == [None] * 3

    run.assert_equals_reference(run.stop())
    # An error of a remote raises in no handler here.
    logs = [swarm.folder.path / "log" / "coordinator.log"]
    logs += [swarm.home(child.name) / "log" / "client.log" for child in swarm.volunteers]
    for log in (one for one in logs if one.exists()):
        assert "Traceback" not in log.read_text(), log


# ---------------------------------------------------------------- without a model

CLAIMED_STEPS = 3
"""Steps that each ghost signs receipts for."""


async def haunt(run: Run, invite: Invite, stage: int) -> PeerId:
    """Claim a stage at the run's version, and every microbatch of the steps to come."""
    began = run.version()
    claims = {"stage": stage, "version": began, "digest": "0" * 32, "memory": offers(2**40)}
    async with attached(invite, **claims) as ghost, trio.open_nursery() as nursery:
        nursery.start_soon(ghost.beat)
        with trio.fail_after(PATIENCE_SECONDS):
            while (version := run.version()) < began + CLAIMED_STEPS:
                await ghost.claim(stage, version)
                peers = run.swarm.status()["peers"]
                phases = {one["phase"] for one in peers if one["peer"] == ghost.identity.peer_id}
                assert "ready" not in phases
                await trio.sleep(0.2)
        nursery.cancel_scope.cancel()
    return ghost.identity.peer_id


def test_a_member_without_a_model_counts_nothing(make_run) -> None:
    """It is first with every receipt, as it computes nothing."""
    run = make_run(2, STEPS, **TINY, limits__starting_peers_per_stage=1)
    invite = Invite.decode(text := run.swarm.start_coordinator())
    for stage in (0, 1):
        run.swarm.start_volunteer(text, stage=stage)
    run.wait_for_version(2)
    ghosts = {trio.run(haunt, run, invite, stage) for stage in (0, 1)}
    run.assert_equals_reference(run.stop())
    assert len(ghosts) == 2
    assert ghosts.isdisjoint(counted(run))
