"""Groups that average by whatever route each pair has: real hosts, real p2pds, a real relay.

A start of several workers takes seconds, so that one group serves many rounds. What the peers
know of one another's whereabouts is what the tests give them as the roster.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import trio
import trio.testing

from kits.averaging.group import LOOPBACK, NOWHERE, Group, Peer, group, wait_available
from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.all_reduce.routes import Route
from swarm_client.averaging.handle import restart_policy, supervisor
from swarm_client.averaging.handle.options import AveragingOptions
from swarm_client.averaging.handle.supervisor import AveragingWorker
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import PeerId, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.linear_digest import digest_sum, from_text
from swarm_shared.identity.work_statements import SumDigests
from swarm_shared.network import Node, RelayLimits, open_node
from swarm_shared.protocol import PeerRecord, Reduction, Roster, SumCheck
from swarm_shared.run.codec_sizes import AverageCodec

pytestmark = pytest.mark.process

SMALL = 30_001
LARGE = 2**22


def routes_used(peers: Sequence[Peer]) -> set[str]:
    return {route for peer in peers for (_, route) in peer.carried()}


def used_between(one: Peer, other: Peer) -> set[str]:
    return {route for (remote, route) in one.carried() if remote == other.id}


@asynccontextmanager
async def relay_node(key: Identity | None = None, port: int | None = 0) -> AsyncIterator[Node]:
    """A relay for everybody."""
    where = [f"/ip4/127.0.0.1/tcp/{port}"]
    async with open_node(key or Identity.generate(), where) as relay:
        relay.serve_relay(RelayLimits(), lambda peer: True)
        yield relay


async def only_through(relay: Node, peers: Sequence[Peer]) -> list[PeerRecord]:
    """Records that lead to the peers through the relay alone, as behind NATs that nothing gets
    through: no holes can be punched either."""
    relays = {relay.peer_id: relay.addresses}
    records: list[PeerRecord] = []
    for peer in peers:
        peer.node.use_relays(relays, 1)
        peer.node._puncher.worth_trying = lambda remote: False  # type: ignore[method-assign]
    for peer in peers:
        while not (peer.node.relay_slots and (peer.carrier is None or is_relayed(peer))):
            await trio.sleep(0.01)
        record, carrier = peer.record(), peer.carrier
        if carrier is not None:
            circuits = tuple(a for a in carrier.addresses if "/p2p-circuit" in a)
            carrier = carrier.model_copy(update={"addresses": circuits})
        circuits = tuple(a for a in record.addresses if "/p2p-circuit" in a)
        assert circuits
        records.append(record.model_copy(update={"addresses": circuits, "carrier": carrier}))
    return records


def is_relayed(peer: Peer) -> bool:
    assert peer.carrier is not None
    return any("/p2p-circuit" in address for address in peer.carrier.addresses)


# ----------------------------------------------------------------------- whatever carries a round


async def test_those_with_hivemind_use_it_and_the_others_average_with_them(tmp_path: Path) -> None:
    async with group(tmp_path, [True, True, False], SMALL) as g:
        assert await g.round() == {}
        g.check_exact()
        first, second, without = g.peers
        assert used_between(first, second) == used_between(second, first) == {"p2pd"}
        for peer in (first, second):
            assert used_between(peer, without) == used_between(without, peer) == {"host"}
        # p2pd's bytes are distinct from those that the host counts.
        told = [link for peer in g.peers for link in peer.averager.links()]
        assert {link.protocol for link in told} == {"all-reduce over p2pd"}
        assert {link.remote for link in told} == {first.id, second.id}
        floor = 2 * 4 * (SMALL // 3)
        assert all(floor <= link.sent <= 1.1 * floor + 2000 for link in told)


@pytest.mark.parametrize("hivemind", [True, False], ids=["in the worker", "in the daemon"])
async def test_a_member_that_is_to_sum_nothing_sends_its_vector_and_no_sums(
    tmp_path: Path, hivemind: bool
) -> None:
    async with group(tmp_path, [hivemind] * 3, SMALL) as g:
        thin, *others = sorted(g.peers, key=lambda peer: peer.id)
        assert await g.round(weights=(0, 1000, 1000)) == {}
        g.check_exact()
        vector = 4 * SMALL
        for peer, vectors in ((thin, 1.0), (others[0], 1.5), (others[1], 1.5)):
            assert vectors <= sum(peer.carried().values()) / vector <= 1.1 * vectors


def added_up(digests: Iterable[str]) -> int:
    return digest_sum(map(from_text, digests))


@pytest.mark.parametrize(
    "hivemind", [[True] * 3, [False] * 3, [True, True, False]],
    ids=["in the worker", "in the daemon", "in both"],
)  # fmt: skip
async def test_the_digests_of_a_round_show_that_its_sums_are_right(
    tmp_path: Path, hivemind: list[bool]
) -> None:
    async with group(tmp_path, hivemind, SMALL) as g:
        for peer in g.peers:
            peer.use_codec("exact")
            peer.tie(SMALL - 1000, 1000)
        members = tuple(sorted(peer.id for peer in g.peers))
        for part, weights in (("own", (0, 1000, 700)), ("tied", ())):
            assert await g.round(weights=weights, part=part) == {}
            one = Reduction(part=part, members=members, weights=weights)
            check = SumCheck(step=1, attempt=g.attempts, seed="5eed" * 8)
            totals = {peer.id: await peer.digest(check, one) for peer in g.peers}
            expected = added_up(each.part for each in totals.values())
            assert {from_text(each.result) for each in totals.values()} == {expected}
            detailed = check.model_copy(update={"details": True})
            found = [totals[peer] for peer in members]
            details = {peer.id: await peer.digest(detailed, one) for peer in g.peers}
            for index, peer in enumerate(members):
                mine = details[peer]
                assert (mine.part, mine.result) == (found[index].part, found[index].result)
                assert added_up(mine.parts) == from_text(mine.part)
                assert added_up(mine.results) == from_text(mine.result)
                # What this peer has received is what the others put into its slice.
                if weights and not weights[index]:
                    assert mine.received == ()
                else:
                    assert mine.received == tuple(details[other].parts[index] for other in members)
                    assert added_up(mine.received) == from_text(mine.results[index])


@pytest.mark.parametrize("hivemind", [True, False], ids=["in the worker", "in the daemon"])
async def test_what_is_kept_of_a_round_is_dropped_with_its_attempt(
    tmp_path: Path, hivemind: bool
) -> None:
    async with group(tmp_path, [hivemind] * 2, SMALL) as g:
        for peer in g.peers:
            peer.use_codec("exact")
        members = tuple(sorted(peer.id for peer in g.peers))
        one = Reduction(part="own", members=members)

        async def details(attempt: int) -> SumDigests:
            check = SumCheck(step=1, attempt=attempt, seed="5eed" * 8, details=True)
            return await g.peers[0].digest(check, one)

        assert await g.round() == {}
        assert (await details(1)).received
        assert await g.round() == {}
        with pytest.raises(SwarmError):
            await details(1)  # the next round
        assert (await details(2)).received
        g.peers[0].averager.attempt_over(Step(1), 1)
        assert (await details(2)).received
        g.peers[0].averager.attempt_over(Step(1), 2)
        with pytest.raises(SwarmError):
            await details(2)


class RandomRoutes:
    """Stands in for the memory: any selection of routes in any order, for each stream anew."""

    def __init__(self, rng: random.Random, always: Route) -> None:
        self.rng, self.always = rng, always

    def order(
        self, peer: PeerId, routes: Sequence[Route], addresses: tuple[str, ...] = ()
    ) -> tuple[Route, ...]:
        others = [route for route in Route if route is not self.always]
        chosen = [route for route in others if self.rng.random() < 0.5]
        self.rng.shuffle(chosen)
        return (*chosen, self.always)

    def worked(self, peer: PeerId, route: Route) -> None: ...

    def failed(self, peer: PeerId, route: Route, addresses: tuple[str, ...] = ()) -> None: ...


@pytest.mark.parametrize("relayed", [False, True], ids=["all reachable", "all behind NATs"])
async def test_members_end_bitwise_equal_whatever_the_mix_of_carriers(
    tmp_path: Path, relayed: bool
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with relay_node() as relay:
        relays = relay.addresses[:1] if relayed else ()
        async with group(tmp_path, [True, True, True, False], SMALL, relays) as g:
            if relayed:
                g.publish(await only_through(relay, g.peers))
            for peer in g.peers:
                memory = RandomRoutes(rng, Route.HOST_RELAYED)
                peer.averager._routes._memory = memory  # type: ignore[union-attr, assignment]
            for _ in range(16):
                members = rng.sample(g.peers, rng.randint(2, len(g.peers)))
                failures = await g.round(members)
                assert failures == {}
                g.check_exact(members)
            if not relayed:
                assert routes_used(g.peers) == {"p2pd", "host"}
            else:
                # p2pds that have met through a relay may find out that they share a machine.
                used = routes_used(g.peers) - {"p2pd"}
                assert used == {"p2pd_relayed", "host_relayed"}
                assert relay.relay is not None
                assert relay.relay.forwarded_bytes > 4 * SMALL


async def test_with_and_without_hivemind_members_average_in_the_runs_codec(tmp_path: Path) -> None:
    async with group(tmp_path, [True, True, False], SMALL) as g:
        exact = sum(peer.source.astype(np.float64) for peer in g.peers)
        plain = await sent_in_a_round(g, "none")
        sent = await sent_in_a_round(g, "int8")
        assert len({peer.result.tobytes() for peer in g.peers}) == 1
        error = np.linalg.norm(g.peers[0].result - exact) / np.linalg.norm(exact)
        assert 0 < error < 0.02
        assert sent < plain * 0.3


async def test_whole_counts_are_summed_without_a_loss_over_both_carriers_in_fewer_bytes(
    tmp_path: Path,
) -> None:
    async with group(tmp_path, [True, True, False], SMALL) as g:
        plain = await sent_in_a_round(g, "none")
        sent = await sent_in_a_round(g, "exact")
        assert routes_used(g.peers) == {"p2pd", "host"}
        counts = [peer.source.astype(np.int64) for peer in g.peers]
        assert g.peers[0].result.dtype == np.float64
        for peer in g.peers:
            assert np.array_equal(peer.result.astype(np.int64), sum(counts))
        # Three bytes each, in float32 four.
        assert sent < plain * 0.77


async def test_a_member_with_another_codec_fails_the_round_before_any_data(tmp_path: Path) -> None:
    async with group(tmp_path, [False, False], SMALL) as g:
        g.peers[0].use_codec("int8")
        failures = await g.round()
        assert set(failures) == {peer.id for peer in g.peers}
        assert any("another plan" in str(failure) for failure in failures.values())


async def sent_in_a_round(g: Group, codec: AverageCodec) -> int:
    """Bytes that all members sent."""
    before = sum(sum(peer.carried().values()) for peer in g.peers)
    for peer in g.peers:
        peer.use_codec(codec)
    assert await g.round() == {}
    return sum(sum(peer.carried().values()) for peer in g.peers) - before


# ------------------------------------------------------------------------ routes that do not work


async def test_a_pair_whose_p2pd_is_out_of_reach_goes_by_its_hosts_in_the_same_attempt(
    tmp_path: Path,
) -> None:
    async with group(tmp_path, [True, True], SMALL) as g:
        records = []
        for peer in g.peers:
            carrier = peer.carrier
            assert carrier is not None
            lost = carrier.model_copy(update={"addresses": (NOWHERE,)})
            records.append(peer.record().model_copy(update={"carrier": lost}))
        g.publish(records)
        assert await g.round() == {}
        g.check_exact()
        assert routes_used(g.peers) == {"host"}
        # It is remembered: the next attempt begins with the route that works.
        for peer, other in itertools.permutations(g.peers):
            assert peer.averager._routes is not None
            (member,) = peer.averager._routes.members([other.id])
            assert member.routes == (Route.HOST_RELAYED, Route.P2PD)
        # And forgotten when the other's p2pd is found round_in_daemon.
        g.publish()
        assert await g.round() == {}
        assert routes_used(g.peers) == {"host", "p2pd"}


async def test_p2pd_killed_in_a_round_fails_that_attempt_and_the_next_one_does_without_it(
    tmp_path: Path,
) -> None:
    async with group(tmp_path, [True, True, True], LARGE) as g:
        first, second, victim = g.peers
        assert victim.worker.pid is not None
        (p2pd,) = psutil.Process(victim.worker.pid).children()
        assert p2pd.name() == "p2pd"
        failures = {}

        async def doomed() -> None:
            failures.update(await g.round())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(doomed)
            await g.under_way(first)
            os.kill(p2pd.pid, signal.SIGKILL)
        assert set(failures) == {first.id, second.id, victim.id}
        assert all(failure.failure is RoundFailure.CARRIER for failure in failures.values())
        assert failures[first.id].culprit == failures[second.id].culprit == victim.id
        while victim.worker.available:  # its end is noticed a moment later
            await trio.sleep(0.01)
        for peer in (first, second):
            assert peer.averager._routes is not None
            (member,) = peer.averager._routes.members([victim.id])
            assert member.routes == (Route.HOST_RELAYED, Route.P2PD)
        before = {peer.id: peer.carried() for peer in g.peers}
        assert await g.round() == {}
        g.check_exact()
        for peer in (first, second):
            new = {
                key for key, sent in peer.carried().items() if sent > before[peer.id].get(key, 0)
            }
            other = second if peer is first else first
            assert new == {(other.id, "p2pd"), (victim.id, "host")}


async def test_a_frozen_worker_is_ended_and_its_rounds_fail_instead_of_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_client.averaging.handle.supervisor.PING_SECONDS", 0.2)
    async with group(tmp_path, [True, True], SMALL) as g:
        _, victim = g.peers
        frozen = victim.worker.pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        failures = await g.round()
        assert failures[victim.id].failure is RoundFailure.CARRIER
        assert not psutil.pid_exists(frozen) or victim.worker.pid != frozen
        assert await g.round() == {}  # without the worker, which comes back later
        g.check_exact()


async def test_a_member_that_nothing_reaches_is_named_and_it_is_no_excuse(tmp_path: Path) -> None:
    async with group(tmp_path, [True, True], SMALL) as g:
        first, lost = g.peers
        carrier = lost.carrier
        assert carrier is not None
        nowhere = lost.record().model_copy(
            update={
                "addresses": (NOWHERE,),
                "carrier": carrier.model_copy(update={"addresses": (NOWHERE,)}),
            }
        )
        g.publish([first.record(), nowhere])
        # It does not join either, and the other members would wait for it.
        failures = await g.round([first, Gone(lost)])  # type: ignore[list-item]
        assert failures[first.id].culprit == lost.id
        assert failures[first.id].failure is not RoundFailure.CARRIER
        assert "cannot be reached" in str(failures[first.id])


class Gone:
    """A member that is named and does nothing."""

    def __init__(self, peer: Peer) -> None:
        self.id = peer.id

    async def reduce(
        self, members: Sequence[PeerId], attempt: int, weights: Sequence[int], part: int
    ) -> None:
        return


# --------------------------------------------------------------------------------- admission


async def test_who_is_not_of_this_stage_is_refused_by_host_and_p2pd_alike(tmp_path: Path) -> None:
    async with group(tmp_path, [True, True, True], SMALL) as g:
        first, second, outsider = g.peers
        known = [first.record(), second.record(), outsider.record(stage=1)]
        first.roster.replace(roster_of(known))
        second.roster.replace(roster_of(known))
        # To itself the outsider is one of them, and it tries every route in turn.
        outsider.roster.replace(roster_of([peer.record() for peer in g.peers]))
        await trio.testing.wait_all_tasks_blocked()
        for route in (Route.P2PD, Route.HOST_RELAYED):
            outsider.averager._routes._memory = OneRoute(route)  # type: ignore[union-attr, assignment]
            async with trio.open_nursery() as nursery:

                async def intrude() -> None:
                    failures = await one_sided(g, outsider, first)
                    assert failures, "it was let in"

                nursery.start_soon(intrude)
                assert await g.round([first, second]) == {}
                g.check_exact([first, second])


async def test_a_member_that_begins_before_the_other_has_heard_of_it_is_not_refused_for_that(
    tmp_path: Path,
) -> None:
    async with group(tmp_path, [True, True], SMALL) as g:
        first, newcomer = g.peers
        whole = roster_of([peer.record() for peer in g.peers])
        first.roster.replace(roster_of([first.record()]))
        newcomer.averager._routes._memory = OneRoute(Route.HOST)  # type: ignore[union-attr, assignment]
        failures: list[RoundFailed] = []

        async def one(peer: Peer) -> None:
            try:
                await peer.reduce(sorted((first.id, newcomer.id)), 1)
            except RoundFailed as failure:
                failures.append(failure)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, newcomer)
            assert first.averager._host is not None
            while newcomer.id not in first.averager._host.hub._unadmitted:
                await trio.sleep(0.01)
            first.roster.replace(whole)
            nursery.start_soon(one, first)
        assert failures == []
        g.check_exact()


class OneRoute(RandomRoutes):
    def __init__(self, route: Route) -> None:
        self.route = route

    def order(
        self, peer: PeerId, routes: Sequence[Route], addresses: tuple[str, ...] = ()
    ) -> tuple[Route, ...]:
        return (self.route,)


async def one_sided(g: Group, peer: Peer, other: Peer) -> bool:
    """`peer` begins a round with `other`, who was not told of one. Whether it was turned away."""
    try:
        with trio.fail_after(10):
            await peer.reduce(sorted((peer.id, other.id)), 1000 + g.attempts)
    except RoundFailed as failure:
        return "ended in the middle" in str(failure) or "broke" in str(failure)
    return False


def roster_of(records: Sequence[PeerRecord]) -> Roster:
    return Roster(serial=1, peers=tuple(records))


async def test_a_stream_to_a_p2pd_whose_round_runs_in_its_daemon_is_turned_away_at_once(
    tmp_path: Path,
) -> None:
    async with group(tmp_path, [True, False], SMALL) as g, trio.open_nursery() as nursery:
        first, late = g.peers
        failures: dict[PeerId, RoundFailed] = {}

        async def one(peer: Peer) -> None:
            try:
                await peer.reduce(sorted((first.id, late.id)), 7)
            except RoundFailed as failure:
                failures[peer.id] = failure

        # `late` has no worker yet when its round begins; then it has one, and the other hears so.
        async with trio.open_nursery() as rounds:
            rounds.start_soon(one, late)
            nursery.start_soon(late.worker.run)
            await wait_available(late.worker)
            g.publish()
            first.averager._routes._memory = OneRoute(Route.P2PD)  # type: ignore[union-attr, assignment]
            with trio.fail_after(first.averager.stall_seconds / 2):
                await one(first)
            rounds.cancel_scope.cancel()  # as the coordinator does when it hears of it
        assert failures[first.id].failure is RoundFailure.CARRIER
        # The next attempt finds both in their workers.
        assert await g.round() == {}
        g.check_exact()
        assert "p2pd" in used_between(late, first)
        nursery.cancel_scope.cancel()


# ------------------------------------------------------------------- p2pd restarts


@pytest.fixture
def hasty_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(restart_policy, "SETTLE_SECONDS", 0.2)
    monkeypatch.setattr(restart_policy, "INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(restart_policy, "LOST_RELAY_SECONDS", 3.0)


@pytest.mark.usefixtures("hasty_restarts")
async def test_p2pd_takes_a_relay_that_is_given_later_and_keeps_its_name_and_its_port(
    tmp_path: Path,
) -> None:
    async with group(tmp_path, [True, True], SMALL) as g, AsyncExitStack() as stack:
        key = Identity.generate()
        relay = await stack.enter_async_context(relay_node(key))
        relay_addresses, relay_port = relay.addresses, relay.listening_port
        first, _ = g.peers
        before = first.carrier
        assert before is not None
        assert not is_relayed(first)
        changes: list[tuple[str, ...]] = []

        def changed() -> None:
            started = first.worker.started
            changes.append(() if started is None else started.addresses)

        first.worker.on_change(changed)
        for _ in range(2):  # the same relays again are no change
            first.worker.reconfigure(trusted_relays=relay.addresses[:1])
            while not (first.worker.available and is_relayed(first)):
                # It goes on averaging, by whatever there is. An attempt whose stream comes to p2pd
                # just before its end fails, as the carrier's fault, and the next one goes round it.
                failures = await g.round()
                if failures:
                    assert all(
                        failure.failure is RoundFailure.CARRIER for failure in failures.values()
                    )
                    assert await g.round() == {}
                g.check_exact()
        assert first.worker.restarts == 0
        after = first.carrier
        assert after is not None
        assert after.peer == before.peer
        assert set(before.addresses) < set(after.addresses)
        assert () in changes
        assert changes[-1] == first.worker.started.addresses  # type: ignore[union-attr]
        # When the relay is gone, nobody is told any more to come that way. When it is back, p2pd
        # is too, which takes a restart: it would not come by itself.
        await stack.aclose()
        while first.carrier != before:
            await trio.sleep(0.05)
        async with relay_node(key, relay_port) as again:
            assert again.addresses == relay_addresses
            while not (first.worker.available and is_relayed(first)):
                await trio.sleep(0.05)
            assert first.worker.restarts == 0
            assert await g.round() == {}


@pytest.mark.usefixtures("hasty_restarts")
async def test_what_is_taken_back_at_once_restarts_nothing(tmp_path: Path) -> None:
    async with group(tmp_path, [True], SMALL) as g:
        (peer,) = g.peers
        pid = peer.worker.pid
        peer.worker.reconfigure(trusted_relays=(f"{NOWHERE}/p2p/{peer.id}",))
        peer.worker.reconfigure(trusted_relays=())
        await trio.sleep(0.5)
        assert peer.worker.available
        assert peer.worker.pid == pid


async def test_a_port_that_another_program_has_taken_is_given_up_for_a_free_one(
    tmp_path: Path,
) -> None:
    async def port_and_name() -> tuple[int, str]:
        worker = AveragingWorker(AveragingOptions(tmp_path, LOOPBACK))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            started = await wait_available(worker)
            (address,) = started.addresses
            nursery.cancel_scope.cancel()
        return int(address.removeprefix("/ip4/127.0.0.1/tcp/")), started.p2pd_peer_id

    first = await port_and_name()
    assert await port_and_name() == first
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", first[0]))
        other.listen()
        moved = await port_and_name()
        assert moved[0] != first[0]
        assert moved[1] == first[1]
    # The new one is remembered from now on.
    assert await port_and_name() == moved
