"""The all-reduce over real networks: p2pd in worker processes, and py-libp2p hosts.

Both carriers go through the same scenarios. Starting p2pd takes a second or more, so that one
start serves several scenarios.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import pytest
import trio

from kits.averaging.group import wait_available
from kits.loaded_modules import loaded
from kits.peer_names import named
from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.all_reduce.frames import StreamHello
from swarm_client.averaging.all_reduce.plan import RoundSpec, plan_digest, round_tag
from swarm_client.averaging.all_reduce.reduce import all_reduce
from swarm_client.averaging.all_reduce.routes import Route
from swarm_client.averaging.handle import supervisor
from swarm_client.averaging.handle.host_carrier import PROTOCOL, Libp2pAveraging
from swarm_client.averaging.handle.options import AveragingOptions
from swarm_client.averaging.handle.supervisor import AveragingWorker
from swarm_client.averaging.protocol.messages import Member, StartRound
from swarm_client.ipc import shared_memory
from swarm_shared.base.errors import LinkClosed
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity
from swarm_shared.network import Node, open_node
from swarm_shared.protocol.framing import FrameLimits
from swarm_shared.run.manifest import LimitsConfig

pytestmark = pytest.mark.process

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
SENTINEL = np.float32(-7)
# Far above the duration of any test here, even on a busy machine: beyond it something has hung.
STALL_SECONDS = 30.0
RUN_STALL_SECONDS = LimitsConfig().round_stall_seconds
"""A shorter one also finds workers that have no turn for seconds on a busy machine."""
_names = itertools.count()
_vectors: list[Vectors] = []


@pytest.fixture(autouse=True)
def no_shared_memory_stays() -> Iterator[None]:
    yield
    while _vectors:
        _vectors.pop().remove()


class Vectors:
    """A source and a result in shared memory."""

    def __init__(self, elements: int, seed: int) -> None:
        self.segments = [shared_memory.create(f"swarm-test-{os.getpid()}", 4 * elements)
                         for _ in range(2)]  # fmt: skip
        self.source, self.result = (
            each.array(np.float32, elements).view(np.float32) for each in self.segments
        )
        rng = np.random.default_rng(seed)
        self.source[:] = rng.standard_normal(elements, dtype=np.float32)
        self.result[:] = SENTINEL
        _vectors.append(self)

    def remove(self) -> None:
        for segment in self.segments:
            segment.unlink()
            segment.close()


class Swarm(Protocol):
    """Peers on one carrier."""

    peers: list[PeerId]

    async def reduce(self, spec: RoundSpec, vectors: Vectors, stall_seconds: float) -> int:
        """Carry out `spec.me`'s part; returns the bytes sent."""

    async def kill(self, peer: PeerId) -> None:
        """It ends without an ABORT."""


class HivemindSwarm:
    def __init__(self, workers: list[AveragingWorker]) -> None:
        self.workers = workers
        self.peers = [named(f"peer{index + 1}") for index in range(len(workers))]

    def worker(self, peer: PeerId) -> AveragingWorker:
        return self.workers[self.peers.index(peer)]

    def member(self, peer: PeerId) -> Member:
        started = self.worker(peer).started
        assert started is not None
        return Member(
            peer_id=peer,
            p2pd_peer_id=started.p2pd_peer_id,
            p2pd_addresses=started.addresses,
            routes=(Route.P2PD,),
        )

    async def reduce(self, spec: RoundSpec, vectors: Vectors, stall_seconds: float) -> int:
        source, result = vectors.segments
        done = await self.worker(spec.me).run_round(
            StartRound(
                spec=spec,
                members=tuple(self.member(peer) for peer in spec.members),
                source_shm_name=source.name,
                result_shm_name=result.name,
                stall_seconds=stall_seconds,
                join_seconds=STALL_SECONDS,
            )
        )
        assert {each.route for each in done.links} == {Route.P2PD}
        return sum(each.bytes_sent for each in done.links)

    async def kill(self, peer: PeerId) -> None:
        pid = self.worker(peer).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


class Libp2pSwarm:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = {node.peer_id: node for node in nodes}
        self.peers = list(self.nodes)
        self.averaging = {node.peer_id: Libp2pAveraging(node, self.addresses) for node in nodes}
        self.scopes: dict[PeerId, trio.CancelScope] = {}

    def addresses(self, peer: PeerId) -> Sequence[str]:
        return self.nodes[peer].addresses

    async def reduce(self, spec: RoundSpec, vectors: Vectors, stall_seconds: float) -> int:
        with trio.CancelScope() as self.scopes[spec.me]:
            links = await all_reduce(
                spec,
                self.averaging[spec.me],
                vectors.source,
                vectors.result,
                stall_seconds=stall_seconds,
                join_seconds=STALL_SECONDS,
            )
            return sum(each.bytes_sent for each in links)
        raise RoundFailed("killed", spec.me)

    async def kill(self, peer: PeerId) -> None:
        self.scopes[peer].cancel()
        for other in self.nodes[peer].connected_peers:
            await self.nodes[peer].disconnect(other)


@asynccontextmanager
async def hivemind_swarm(home: Path, count: int) -> AsyncIterator[HivemindSwarm]:
    async with trio.open_nursery() as nursery:
        workers = [
            AveragingWorker(AveragingOptions(home / str(index), LOOPBACK)) for index in range(count)
        ]
        for worker in workers:
            nursery.start_soon(worker.run)
        for worker in workers:
            assert await worker.settled(), worker.reason
        names = tuple(worker.started.p2pd_peer_id for worker in workers if worker.started)
        for worker in workers:
            worker.admit(names)
        yield HivemindSwarm(workers)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def libp2p_swarm(_home: Path, count: int) -> AsyncIterator[Libp2pSwarm]:
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(open_node(Identity.generate(), LOOPBACK))
            for _ in range(count)
        ]
        yield Libp2pSwarm(nodes)


Opener = Callable[[Path, int], Any]


@pytest.fixture(params=["hivemind", "libp2p"])
def opener(request: pytest.FixtureRequest) -> Opener:
    return {"hivemind": hivemind_swarm, "libp2p": libp2p_swarm}[request.param]


def in_order(vectors: Sequence[Vectors]) -> np.ndarray:
    total = vectors[0].source.copy()
    for other in vectors[1:]:
        total += other.source
    return total


class Round:
    """One round of some peers of a swarm on fresh vectors (or on those given)."""

    def __init__(
        self,
        swarm: Swarm,
        peers: Sequence[PeerId],
        elements: int,
        vectors: dict[PeerId, Vectors] | None = None,
        **changes: Any,
    ) -> None:
        self.swarm, self.peers = swarm, tuple(peers)
        self.name = f"round {next(_names)}"
        self.elements, self.changes = elements, changes
        self.vectors = vectors or {
            peer: Vectors(elements, seed) for seed, peer in enumerate(self.peers)
        }
        self.sent: dict[PeerId, int] = {}
        self.failures: dict[PeerId, RoundFailed] = {}

    def spec(self, me: PeerId) -> RoundSpec:
        return RoundSpec(self.name, self.peers, me, self.elements, **self.changes)

    async def member(self, peer: PeerId, stall_seconds: float = STALL_SECONDS) -> None:
        try:
            self.sent[peer] = await self.swarm.reduce(
                self.spec(peer), self.vectors[peer], stall_seconds
            )
        except RoundFailed as failure:
            self.failures[peer] = failure

    async def all(self) -> Round:
        async with trio.open_nursery() as nursery:
            for peer in self.peers:
                nursery.start_soon(self.member, peer)
        return self

    def check_exact(self) -> None:
        assert self.failures == {}
        expected = in_order([self.vectors[peer] for peer in self.peers])
        for peer in self.peers:
            assert self.vectors[peer].result.tobytes() == expected.tobytes()

    async def under_way(self, peer: PeerId) -> None:
        """Until the first sum has come to `peer`."""
        while (self.vectors[peer].result == SENTINEL).all():
            assert self.failures == {}
            await trio.sleep(0.001)


async def test_members_end_bitwise_equal_for_all_shares_codecs_and_late_members(
    opener: Opener, tmp_path: Path
) -> None:
    async with opener(tmp_path, 4) as swarm:
        for count, shares in ((2, None), (3, (0.0, 2.0, 1.0)), (4, None), (4, (1, 0, 0, 3))):
            plain = await Round(swarm, swarm.peers[:count], 300_001, shares=shares).all()
            plain.check_exact()
            floor = 2 * 4 * 300_001 * (count - 1)
            assert floor <= sum(plain.sent.values()) <= 1.01 * floor + 10_000
        small = await Round(swarm, swarm.peers[:3], 300_001, codec="float16").all()
        assert small.failures == {}
        results = [vectors.result for vectors in small.vectors.values()]
        assert len({result.tobytes() for result in results}) == 1
        exact = in_order(list(small.vectors.values()))
        np.testing.assert_allclose(results[0], exact, rtol=2e-3, atol=5e-3)
        # The vector of one member is not finite: all learn whose.
        bad = Round(swarm, swarm.peers[:3], 300_001)
        bad.vectors[swarm.peers[1]].source[200_000] = np.inf
        await bad.all()
        assert set(bad.failures) == set(bad.peers)
        for failure in bad.failures.values():
            assert failure.failure is RoundFailure.NON_FINITE
            assert failure.culprit == swarm.peers[1]
        # One comes when the others' streams are there already.
        late = Round(swarm, swarm.peers[:3], 100_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late.member, swarm.peers[0])
            nursery.start_soon(late.member, swarm.peers[1])
            await Round(swarm, swarm.peers[:2], 1000).all()
            nursery.start_soon(late.member, swarm.peers[2])
        late.check_exact()


async def test_a_killed_member_fails_the_others_long_before_the_stall_limit_and_a_retry_is_exact(
    opener: Opener, tmp_path: Path
) -> None:
    async with opener(tmp_path, 3) as swarm:
        first, second, victim = swarm.peers
        # Outlives the round: 16 MiB take a good part of a second.
        hurt = Round(swarm, swarm.peers, 2**22)
        async with trio.open_nursery() as nursery:
            for peer in swarm.peers:
                nursery.start_soon(hurt.member, peer)
            await hurt.under_way(first)
            await swarm.kill(victim)
            killed = time.monotonic()
        assert time.monotonic() - killed < STALL_SECONDS / 4
        assert {first, second} <= set(hurt.failures)
        for peer in (first, second):
            over_p2pd = isinstance(swarm, HivemindSwarm)
            lost = RoundFailure.CARRIER if over_p2pd else RoundFailure.LOST
            assert hurt.failures[peer].failure is lost
            assert hurt.failures[peer].culprit == victim
        again = Round(swarm, (first, second), 2**22, vectors=hurt.vectors)
        await again.all()
        again.check_exact()


def processes_of(parent: int) -> list[psutil.Process]:
    return psutil.Process(parent).children(recursive=True)


async def gone(processes: Sequence[psutil.Process]) -> None:
    while any(
        process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes
    ):
        await trio.sleep(0.01)


async def test_a_killed_worker_leaves_no_p2pd_comes_back_under_its_old_name_and_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_SECONDS", 0.05)

    async with hivemind_swarm(tmp_path, 2) as swarm:
        victim = swarm.peers[1]
        worker = swarm.worker(victim)
        assert worker.pid is not None
        before = worker.started
        assert before is not None
        (p2pd,) = processes_of(worker.pid)
        assert p2pd.name() == "p2pd"
        await swarm.kill(victim)
        await gone([p2pd])
        while worker.available:
            await trio.sleep(0.01)
        assert "ended" in worker.reason
        with pytest.raises(LinkClosed):
            await worker.lookup("anything")
        after = await wait_available(worker)
        assert after.p2pd_peer_id == before.p2pd_peer_id
        assert (tmp_path / "1/averaging/p2pd.key").stat().st_mode & 0o777 == 0o600
        whole = await Round(swarm, swarm.peers, 10_000).all()
        whole.check_exact()
        # p2pd alone dies: the worker follows it and both are started again.
        assert worker.pid is not None
        (p2pd,) = processes_of(worker.pid)
        p2pd.kill()
        while worker.available:
            await trio.sleep(0.01)
        await wait_available(worker)
        assert worker.restarts == 2


async def test_a_frozen_member_is_named_and_a_cancelled_round_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its own daemon would end it a little earlier.
    monkeypatch.setattr(supervisor, "HUNG_PINGS", 60)
    async with hivemind_swarm(tmp_path, 3) as swarm:
        first, second, victim = swarm.peers
        frozen_pid = swarm.worker(victim).pid
        assert frozen_pid is not None
        hurt = Round(swarm, swarm.peers, 2**22)
        async with trio.open_nursery() as nursery:
            for peer in swarm.peers:
                nursery.start_soon(hurt.member, peer, RUN_STALL_SECONDS)
            await hurt.under_way(first)
            os.kill(frozen_pid, signal.SIGSTOP)
            while not {first, second} <= set(hurt.failures):
                await trio.sleep(0.01)
            # A frozen worker takes no messages.
            os.kill(frozen_pid, signal.SIGCONT)
        for peer in (first, second):
            assert hurt.failures[peer].failure is RoundFailure.STALLED
            assert hurt.failures[peer].culprit == victim
        assert victim in hurt.failures
        waiting = Round(swarm, swarm.peers, 1000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiting.member, first)
            await Round(swarm, (first, second), 1000).all()
            running = swarm.worker(first)._state
            assert isinstance(running, supervisor._Running)
            assert running.has_rounds
            nursery.cancel_scope.cancel()
        while running.has_rounds:
            await trio.sleep(0.01)


async def test_a_non_member_that_claims_a_place_is_refused(tmp_path: Path) -> None:
    async with hivemind_swarm(tmp_path, 3) as swarm:
        first, second, stranger = swarm.peers
        real = Round(swarm, (first, second), 100_000)
        # The non-member runs the same round in the name of `second`, with its own p2pd.
        forged = StartRound(
            spec=RoundSpec(real.name, (first, second), second, 100_000),
            members=(
                swarm.member(first),
                swarm.member(stranger).model_copy(update={"peer_id": second}),
            ),
            source_shm_name=real.vectors[second].segments[0].name,
            result_shm_name=real.vectors[second].segments[0].name,
            stall_seconds=STALL_SECONDS,
            join_seconds=STALL_SECONDS,
        )
        intruding, refused = trio.CancelScope(), trio.Event()

        async def intrude() -> None:
            with intruding:
                with pytest.raises(RoundFailed):
                    await swarm.worker(stranger).run_round(forged)
                refused.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(real.member, first)
            nursery.start_soon(intrude)
            await Round(swarm, (first, stranger), 1000).all()
            nursery.start_soon(real.member, second)
            while set(real.sent) != {first, second}:
                assert real.failures == {}
                await trio.sleep(0.01)
            # The round is over; streams in its name are refused now.
            with trio.move_on_after(1):
                await refused.wait()
            intruding.cancel()
        real.check_exact()
        # Neither finished nor failed rounds keep the memory of their vectors.
        for worker in swarm.workers:
            while "swarm-test" in Path(f"/proc/{worker.pid}/maps").read_text():
                await trio.sleep(0.01)


async def test_a_non_member_on_libp2p_is_never_answered_and_does_not_disturb_the_round(
    tmp_path: Path,
) -> None:
    async with libp2p_swarm(tmp_path, 3) as swarm:
        first, second, stranger = swarm.peers
        real = Round(swarm, (first, second), 100_000)
        stream = await swarm.nodes[stranger].open_stream(
            first, PROTOCOL, FrameLimits(0, 1000), swarm.nodes[first].addresses
        )
        spec = real.spec(second)
        await stream.send(b"", StreamHello(1, round_tag(real.name), plan_digest(spec)).encode())
        await real.all()
        real.check_exact()
        with trio.move_on_after(0.2) as waited:
            await stream.receive()
        assert waited.cancelled_caught


PARENT = """
    import sys, trio
    from pathlib import Path
    from swarm_client.averaging.handle.options import AveragingOptions
    from swarm_client.averaging.handle.supervisor import AveragingWorker

    async def main():
        worker = AveragingWorker(AveragingOptions(Path(sys.argv[1]), ("/ip4/127.0.0.1/tcp/0",)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            assert await worker.settled(), worker.reason
            print("ready", flush=True)
            await trio.sleep_forever()

    trio.run(main)
"""


def test_a_killed_daemon_leaves_no_process_behind_and_nothing_on_the_terminal(
    tmp_path: Path,
) -> None:
    # A long folder with spaces: p2pd's sockets have to live somewhere else.
    home = tmp_path / ("a folder with spaces " * 4)
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        family = processes_of(parent.pid)
        assert [process.name() for process in family].count("p2pd") == 1
        # Frozen children die too.
        for process in family:
            process.suspend()
        parent.kill()
        trio.run(gone, family)
        assert parent.stdout.read() == b""
    assert "Peer ID" in (home / "averaging/worker.log").read_text()


def test_hivemind_is_loaded_without_torch() -> None:
    code = (
        "from swarm_client.averaging.worker.hivemind_imports import load_hivemind;"
        "door = load_hivemind(); assert door.p2pd_binary.is_file();"
        "assert door.DHTNode.__name__ == 'DHTNode'"
    )
    assert loaded(code, ["torch"]) == []


async def test_without_hivemind_the_worker_is_unavailable_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor.importlib.util, "find_spec", lambda _name: None)

    worker = AveragingWorker(AveragingOptions(tmp_path))
    await worker.run()
    assert not await worker.settled()
    assert "not installed" in worker.reason
    with pytest.raises(RoundFailed) as caught:
        await worker.run_round(
            StartRound(
                spec=RoundSpec("r", (named("a"),), named("a"), 1),
                members=(Member(peer_id=named("a"), p2pd_peer_id=named("x")),),
                source_shm_name="s",
                result_shm_name="s",
                stall_seconds=1,
                join_seconds=1,
            )
        )
    assert caught.value.failure is RoundFailure.CARRIER


async def test_a_p2pd_that_cannot_listen_is_reported_and_tried_again(tmp_path: Path) -> None:
    # An address for documentation, which no interface has (RFC 5737).
    options = AveragingOptions(tmp_path, ("/ip4/192.0.2.1/tcp/4001",))
    worker = AveragingWorker(options)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        assert not await worker.settled()
        assert "p2pd" in worker.reason
        assert worker.restarts == 1
        nursery.cancel_scope.cancel()
