"""The all-reduce over an in-process network, under both event loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import trio.testing
from anyio.abc import TaskGroup

from client.averaging.all_reduce.conftest import Body
from kits.averaging.memory_carrier import MemoryCarrier, MemoryChannel
from kits.averaging.memory_group import A, B, C, D, Group, run_on_virtual_time, with_network
from swarm_client.averaging.all_reduce.errors import RoundFailure
from swarm_client.averaging.all_reduce.frames import (
    StreamHello,
)
from swarm_client.averaging.all_reduce.incoming import (
    MAX_PARKED,
    MAX_PARKED_PER_REMOTE,
    MAX_UNADMITTED,
    UNADMITTED_SECONDS,
    IncomingHub,
)
from swarm_client.averaging.all_reduce.plan import RoundSpec, plan_digest, round_tag
from swarm_client.averaging.all_reduce.reduce import STREAMS_PER_REDUCER
from swarm_client.averaging.all_reduce.routes import Route
from swarm_shared.base.errors import LinkClosed
from swarm_shared.base.types import PeerId
from swarm_shared.run.codec_sizes import AVERAGE_CODECS, AverageCodec

SHARES = {1: None, 2: (1.0, 3.0), 3: (0.0, 1.0, 0.7), 4: (0.25, 0.0, 0.0, 2.0)}


def on_virtual_time(group: Group, body: Body) -> None:
    run_on_virtual_time(lambda: with_network(group.names, body))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("elements", [1, 17, 40_003])
@pytest.mark.parametrize("equal", [True, False], ids=["equal shares", "unequal shares"])
@pytest.mark.parametrize("codec", ["exact", "none"])
def test_all_members_end_with_the_same_bits_which_are_the_sum_in_group_order(
    run: Any, count: int, elements: int, equal: bool, codec: AverageCodec
) -> None:
    group = Group((A, B, C, D)[:count], elements, codec=codec)
    before = {name: vector.copy() for name, vector in group.vectors.items()}

    run(group, shares=None if equal else SHARES[count])
    assert group.failures == {}
    for name in group.names:
        assert group.results[name].tobytes() == group.in_order().tobytes()
        assert group.vectors[name].tobytes() == before[name].tobytes()
    np.testing.assert_allclose(group.results[A], group.exact(), rtol=1e-5, atol=1e-5)
    if count > 1:
        sent = sum(link.bytes_sent for links in group.links.values() for link in links)
        received = sum(link.bytes_received for links in group.links.values() for link in links)
        assert sent == received
        # Under `exact` these take six bytes each.
        assert sent >= 2 * (count - 1) * elements * 4


def test_pieces_large_enough_for_threads_give_the_same_sum(run: Any) -> None:
    group = Group((A, B, C), 150_000)
    run(group, piece_elements=20_000)
    for name in group.names:
        assert group.results[name].tobytes() == group.in_order().tobytes()


@pytest.mark.parametrize(
    ("codec", "element_bytes", "off_by"), [("float16", 2, 5e-3), ("int8", 1 + 4 / 256, 0.1)]
)
@pytest.mark.parametrize("shares", [None, (0.0, 1.0, 0.7)], ids=str)
def test_what_is_narrow_on_the_wire_is_near_and_still_bitwise_equal(
    run: Any, codec: str, element_bytes: float, off_by: float, shares: Any
) -> None:
    group = Group((A, B, C), 30_000)
    run(group, codec=codec, shares=shares)
    assert group.failures == {}
    assert len({group.results[name].tobytes() for name in group.names}) == 1
    np.testing.assert_allclose(group.results[A], group.exact(), rtol=2e-3, atol=off_by)
    assert group.results[A].tobytes() != group.in_order().tobytes()
    sent = sum(link.bytes_sent for links in group.links.values() for link in links)
    assert sent < 1.1 * 2 * 2 * group.elements * element_bytes


@pytest.mark.parametrize("codec", AVERAGE_CODECS)
@pytest.mark.parametrize("place", [0, 15_000, 29_999])
def test_a_vector_that_is_not_finite_fails_the_round_and_names_its_owner(
    run: Any, codec: AverageCodec, place: int
) -> None:
    group = Group((A, B, C), 30_000, codec=codec)
    group.vectors[B][place] = np.nan

    run(group)
    assert set(group.failures) == {A, B, C}
    for failure in group.failures.values():
        assert (failure.failure, failure.culprit) == (RoundFailure.NON_FINITE, B)
        assert "NaN" in failure.reason
    # A vector is looked at by the reducer of each slice: one of them sees it first.
    heard = {name: failure.aborted_by for name, failure in group.failures.items()}
    assert None in heard.values()
    assert all(heard[one] is None for one in heard.values() if one is not None)


def test_a_lone_member_whose_vector_is_not_finite_is_refused_too(run: Any) -> None:
    group = Group((A,), 10)
    group.vectors[A][3] = np.inf
    run(group)
    assert group.failures[A].culprit == A


def test_a_sum_that_overflows_fails_for_all_without_a_culprit(run: Any) -> None:
    group = Group((A, B), 100)
    for vector in group.vectors.values():
        vector[:] = 3e38
    run(group)
    assert {failure.culprit for failure in group.failures.values()} == {None}
    assert set(group.failures) == {A, B}


class Tripwire:
    """A carrier that calls `trip` when its member has received so many bytes."""

    def __init__(self, inner: MemoryCarrier, after_bytes: int, trip: Callable[[], None]) -> None:
        self._inner, self._left, self._trip = inner, after_bytes, trip

    async def open(self, peer: PeerId) -> Any:
        return Watched(await self._inner.open(peer), self)

    def incoming(self, spec: RoundSpec) -> Any:
        return self._inner.incoming(spec)

    def count(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left <= 0:
            self._trip()


class Watched:
    def __init__(self, channel: MemoryChannel, wire: Tripwire) -> None:
        self.send, self.aclose, self.abort = channel.send, channel.aclose, channel.abort
        self.route = channel.route
        self._channel, self._wire = channel, wire

    async def receive(self, max_bytes: int) -> memoryview:
        chunk = await self._channel.receive(max_bytes)
        self._wire.count(len(chunk))
        return chunk


@pytest.mark.parametrize("shares", [None, (1.0, 1.0, 0.0), (0.0, 1.0, 1.0)], ids=str)
def test_a_member_lost_in_the_middle_fails_the_others_at_once_and_a_retry_is_exact(
    run: Any, shares: Any
) -> None:
    group = Group((A, B, C), 60_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            for name in (A, B):
                tasks.start_soon(group.member, group.spec(name, shares=shares), carriers[name])
            wired = Tripwire(carriers[C], 20_000, lambda: group.scopes[C].cancel())
            tasks.start_soon(group.member, group.spec(C, shares=shares), wired)
        assert set(group.failures) == {A, B}
        async with anyio.create_task_group() as tasks:
            for name in (A, B):
                again = group.spec(name, round_id="round 2", members=(A, B))
                tasks.start_soon(group.member, again, carriers[name])

    run(group, body)
    for name in (A, B):
        assert group.failures[name].culprit == C
        # Lost, not stalled: they did not wait for a limit to pass.
        assert group.failures[name].failure is RoundFailure.LOST
        assert group.results[name].tobytes() == group.in_order((A, B)).tobytes()


def test_a_member_that_freezes_is_named_after_the_stall_limit() -> None:
    group = Group((A, B, C), 60_000)
    ended: dict[PeerId, float] = {}

    class Frozen(Watched):
        """Its member's process hangs: nothing more is read or written, nothing is closed."""

        frozen = False

        async def receive(self, max_bytes: int) -> memoryview:
            if Frozen.frozen:
                await anyio.sleep_forever()
            return await super().receive(max_bytes)

    class FreezingCarrier(Tripwire):
        async def open(self, peer: PeerId) -> Any:
            watched = Frozen(await self._inner.open(peer), self)
            plain_send = watched.send

            async def send(data: bytes | memoryview) -> None:
                if Frozen.frozen:
                    await anyio.sleep_forever()
                await plain_send(data)

            watched.send = send
            return watched

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        def freeze() -> None:
            Frozen.frozen = True

        async def survivor(name: PeerId) -> None:
            await group.member(group.spec(name, shares=shares), carriers[name], stall_seconds=3)
            ended[name] = anyio.current_time() - begun

        shares = (1.0, 1.0, 0.0)
        begun = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(survivor, A)
            tasks.start_soon(survivor, B)
            carrier = FreezingCarrier(carriers[C], 20_000, freeze)
            # C keeps its own watch from ending it: a frozen process does not run one.
            spec = group.spec(C, shares=shares)
            tasks.start_soon(lambda: group.member(spec, carrier, stall_seconds=1e6))
            while len(ended) < 2:
                await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()

    on_virtual_time(group, body)
    for name in (A, B):
        assert (group.failures[name].failure, group.failures[name].culprit) == (
            RoundFailure.STALLED,
            C,
        )
        assert 3 <= ended[name] < 4


def test_a_member_that_comes_late_but_in_time_is_waited_for() -> None:
    group = Group((A, B, C), 5_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            for name, delay_seconds in ((A, 0), (B, 4), (C, 8)):

                async def later(name: PeerId = name, delay_seconds: int = delay_seconds) -> None:
                    await anyio.sleep(delay_seconds)
                    await group.member(
                        group.spec(name), carriers[name], stall_seconds=1, join_seconds=10
                    )

                tasks.start_soon(later)

    on_virtual_time(group, body)
    assert group.failures == {}
    for name in group.names:
        assert group.results[name].tobytes() == group.in_order().tobytes()


def test_a_member_that_never_comes_is_named_after_the_join_limit() -> None:
    group = Group((A, B, C), 5_000)
    took: list[float] = []

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        begun = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for name in (A, B):
                tasks.start_soon(
                    lambda name=name: group.member(
                        group.spec(name), carriers[name], stall_seconds=1, join_seconds=10
                    )
                )
        took.append(anyio.current_time() - begun)

    on_virtual_time(group, body)
    assert {failure.culprit for failure in group.failures.values()} == {C}
    assert 10 <= took[0] < 11


@pytest.mark.parametrize(("late_seconds", "heard_from"), [(4, None), (6, A)])
def test_a_member_that_was_about_to_report_the_same_reports_it_as_seen(
    late_seconds: int, heard_from: PeerId | None
) -> None:
    """B has waited for C as well when A ends the round: for more than half of the limit or not."""
    group = Group((A, B, C), 5_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async def member(name: PeerId, delay_seconds: int) -> None:
            await anyio.sleep(delay_seconds)
            await group.member(group.spec(name), carriers[name], stall_seconds=1, join_seconds=10)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member, A, 0)
            tasks.start_soon(member, B, late_seconds)

    on_virtual_time(group, body)
    assert {failure.culprit for failure in group.failures.values()} == {C}
    assert group.failures[A].aborted_by is None
    assert group.failures[B].aborted_by == heard_from


def test_a_member_that_cannot_be_reached_fails_the_round_at_once(run: Any) -> None:
    group = Group((A, B), 5_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        await group.member(group.spec(A), carriers[A])

    run(group, body, names=(A,))
    assert group.failures[A].culprit == B
    assert "cannot be reached" in group.failures[A].reason


class DoomedStreams:
    """A carrier over p2pd, of whose streams to each peer the first ones end by themselves."""

    def __init__(
        self, inner: MemoryCarrier, doomed: int, tasks: TaskGroup, after_seconds: float = 0.0
    ) -> None:
        self._inner, self._doomed = inner, doomed
        self._tasks, self._after_seconds = tasks, after_seconds
        self.opened = Counter[PeerId]()

    async def open(self, peer: PeerId) -> MemoryChannel:
        self.opened[peer] += 1
        channel, far_end = MemoryChannel.pair()
        if self.opened[peer] <= self._doomed:

            async def end() -> None:
                await anyio.sleep(self._after_seconds)
                await far_end.aclose()

            self._tasks.start_soon(end)
        else:
            channel = await self._inner.open(peer)
        channel.route = Route.P2PD
        return channel

    def incoming(self, spec: RoundSpec) -> Any:
        return self._inner.incoming(spec)


@pytest.mark.parametrize("doomed", range(STREAMS_PER_REDUCER + 1))
def test_a_stream_over_p2pd_that_ends_before_it_is_accepted_is_opened_again(
    run: Any, doomed: int
) -> None:
    group = Group((A, B, C), 5_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            for name, carrier in carriers.items():
                ours = DoomedStreams(carrier, doomed, tasks) if name == A else carrier
                tasks.start_soon(group.member, group.spec(name), ours)

    run(group, body)
    if doomed == STREAMS_PER_REDUCER:
        assert group.failures[A].failure is RoundFailure.CARRIER
    else:
        assert group.failures == {}
        assert group.results[A].tobytes() == group.in_order().tobytes()


def test_a_stream_over_p2pd_that_ends_late_was_refused_and_is_not_opened_again() -> None:
    group = Group((A, B), 5_000)
    opened: list[int] = []

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            refused = DoomedStreams(carriers[A], 1, tasks, UNADMITTED_SECONDS)
            await group.member(group.spec(A), refused)
            opened.append(refused.opened[B])

    on_virtual_time(group, body)
    assert group.failures[A].failure is RoundFailure.CARRIER
    assert opened == [1]


def test_a_member_with_another_plan_is_refused_before_any_data(run: Any) -> None:
    group = Group((A, B), 5_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.member, group.spec(A), carriers[A])
            tasks.start_soon(group.member, group.spec(B, shares=(1.0, 9.0)), carriers[B])

    run(group, body)
    assert set(group.failures) == {A, B}
    assert "another plan" in group.failures[A].reason


class WatchedChannel(MemoryChannel):
    """Remembers what was asked of it."""

    def __init__(self, *ends: Any) -> None:
        super().__init__(*ends)
        self.reads: list[int] = []

    async def receive(self, max_bytes: int) -> memoryview:
        self.reads.append(max_bytes)
        return await super().receive(max_bytes)


def test_an_unadmitted_stream_is_never_read_and_does_not_disturb_the_round(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is turned away after that, and the test waits for it in real time.
    monkeypatch.setattr("swarm_client.averaging.all_reduce.incoming.UNADMITTED_SECONDS", 0.2)
    group = Group((A, B), 5_000)
    mallory = PeerId("mallory")

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        hub: IncomingHub = carriers[A].hub
        hub.admits = lambda remote: remote in (A, B)
        ours, theirs = WatchedChannel.pair()
        assert isinstance(theirs, WatchedChannel)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hub.accept, mallory, theirs)
            await ours.send(
                StreamHello(1, round_tag("round 1"), plan_digest(group.spec(A))).encode()
            )
            await group.all(carriers)
        assert theirs.reads == []
        assert hub.refused == 1
        with pytest.raises(LinkClosed):
            await ours.receive(1)

    run(group, body)
    assert group.failures == {}
    assert group.results[A].tobytes() == group.in_order().tobytes()


def test_few_unadmitted_streams_are_held_and_only_briefly() -> None:
    async def body() -> None:
        hub = IncomingHub(admits=lambda remote: False)
        async with anyio.create_task_group() as tasks:
            for index in range(MAX_UNADMITTED):
                tasks.start_soon(hub.accept, f"stranger {index}", MemoryChannel.pair()[0])
            await trio.testing.wait_all_tasks_blocked()
            assert hub.refused == 0
            # One too many, and a second stream of one that stands there.
            await hub.accept("stranger too many", MemoryChannel.pair()[0])
            await hub.accept("stranger 1", MemoryChannel.pair()[0])
            assert hub.refused == 2
            begun = anyio.current_time()
        assert hub.refused == 2 + MAX_UNADMITTED
        assert anyio.current_time() - begun <= UNADMITTED_SECONDS

    run_on_virtual_time(body)


def test_a_member_that_the_roster_names_a_moment_later_is_let_in_at_once() -> None:
    admitted: set[str] = set()
    group = Group((A, B), 5_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        hub = carriers[A].hub
        hub.admits = admitted.__contains__
        async with anyio.create_task_group() as tasks:
            # B's round begins before A has the roster with B, or the round.
            tasks.start_soon(partial(group.member, stall_seconds=100), group.spec(B), carriers[B])
            await anyio.sleep(UNADMITTED_SECONDS / 2)
            admitted.add(B)
            hub.notify()
            await anyio.sleep(UNADMITTED_SECONDS)
            assert hub.refused == 0
            tasks.start_soon(group.member, group.spec(A), carriers[A])

    on_virtual_time(group, body)
    assert group.failures == {}


def test_a_stream_whose_admission_ends_stops_waiting() -> None:
    admitted = {"B"}

    async def body() -> None:
        hub = IncomingHub(admits=admitted.__contains__)
        ours, theirs = MemoryChannel.pair()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hub.accept, "B", theirs)
            await ours.send(StreamHello(1, round_tag("some round"), bytes(32)).encode())
            await trio.testing.wait_all_tasks_blocked()
            assert hub.refused == 0
            admitted.clear()
            hub.notify()
        assert hub.refused == 1

    run_on_virtual_time(body)


def test_others_that_fill_the_waiting_room_do_not_keep_members_of_a_round_out(run: Any) -> None:
    group = Group((A, B), 5_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        hub = carriers[A].hub
        async with anyio.create_task_group() as tasks:
            for index in range(MAX_PARKED + 10):
                tasks.start_soon(hub.accept, f"other {index // 4}", MemoryChannel.pair()[0])
            for _ in range(MAX_PARKED_PER_REMOTE + 3):
                tasks.start_soon(hub.accept, "one more", MemoryChannel.pair()[0])
            while hub.refused < 10 + MAX_PARKED_PER_REMOTE + 3:
                await anyio.lowlevel.checkpoint()
            await group.all(carriers)
            tasks.cancel_scope.cancel()

    run(group, body)
    assert group.failures == {}


def test_a_member_that_repeats_its_stream_takes_no_room_from_another_one(run: Any) -> None:
    """More often than the round has members, before any of these streams is taken."""
    group = Group((A, B, C), 5_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        hub, spec = carriers[A].hub, group.spec(A)
        with carriers[A].incoming(spec) as arrivals:
            async with anyio.create_task_group() as tasks:
                for name in (B, *[B] * MAX_PARKED_PER_REMOTE * 2, C):
                    ours, theirs = MemoryChannel.pair()
                    tasks.start_soon(hub.accept, name, theirs)
                    hello = StreamHello(spec.members.index(name), spec.tag, plan_digest(spec))
                    await ours.send(hello.encode())
                    await anyio.wait_all_tasks_blocked()
                senders = [(await arrivals.receive()).sender for _ in range(2)]
                tasks.cancel_scope.cancel()
        assert senders == [B, C]
        assert hub.refused >= MAX_PARKED_PER_REMOTE * 2

    run(group, body)


def test_a_member_that_comes_after_the_end_is_turned_away_at_once(run: Any) -> None:
    group = Group((A, B), 5_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        with carriers[A].hub.round(round_tag("round 1"), {B: B}):
            pass
        with anyio.fail_after(5):
            await group.member(group.spec(B), carriers[B], stall_seconds=1000)

    run(group, body)
    assert group.failures[B].culprit == A
    assert group.failures[B].failure is RoundFailure.LOST


def test_a_member_that_joins_after_the_failure_gets_its_reason(run: Any) -> None:
    group = Group((A, B, C), 5_000)
    group.vectors[A][2000] = np.nan  # in the slice of B, which A sends before C is there

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.member, group.spec(A), carriers[A])
            tasks.start_soon(group.member, group.spec(B), carriers[B])
            while not {A, B} <= set(group.failures):
                await anyio.lowlevel.checkpoint()
        with anyio.fail_after(5):
            await group.member(group.spec(C), carriers[C], stall_seconds=1000)

    run(group, body)
    failure = group.failures[C]
    assert (failure.failure, failure.culprit) == (RoundFailure.NON_FINITE, A)


class ResettingChannel(MemoryChannel):
    """As a stream of p2pd: it is reset when its near end closes, and the reset overtakes what is
    still on its way to the far end."""

    async def receive(self, max_bytes: int) -> memoryview:
        chunk = await super().receive(max_bytes)
        await anyio.sleep(0.002)
        if self._broken.is_set():
            raise LinkClosed("the stream was reset")
        return chunk

    async def aclose(self) -> None:
        await self.abort()


def test_a_stream_that_is_reset_when_its_near_end_closes_loses_no_goodbye(run: Any) -> None:
    group = Group((A, B, C), 5_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        for carrier in carriers.values():
            carrier.channel_type = ResettingChannel
        await group.all(carriers)

    run(group, body)
    assert group.failures == {}
    assert group.results[A].tobytes() == group.in_order().tobytes()


def test_a_round_cannot_be_started_twice(run: Any) -> None:
    group = Group((A, B), 5_000)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        with carriers[A].hub.round(round_tag("round 1"), {B: B}):
            await group.member(group.spec(A), carriers[A])

    run(group, body)
    assert "twice" in group.failures[A].reason


@pytest.mark.parametrize("wrong", ["short", "float64", "strided"])
def test_arrays_that_do_not_fit_the_plan_are_our_own_mistake(run: Any, wrong: str) -> None:
    group = Group((A,), 100)
    group.vectors[A] = {
        "short": np.zeros(99, np.float32),
        "float64": np.zeros(100),
        "strided": np.zeros(200, np.float32)[::2],
    }[wrong]

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        with pytest.raises(ValueError, match="source must be"):
            await group.member(group.spec(A), carriers[A])

    run(group, body)
