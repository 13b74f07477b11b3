"""A stage's group on one machine: only the gradients and the coordinator are not real."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import trio

from kits.averaging.membership import RUN
from kits.members import peer_record
from swarm_client.averaging.all_reduce.codec import dtype_of
from swarm_client.averaging.all_reduce.errors import RoundFailed
from swarm_client.averaging.handle.options import AveragingOptions
from swarm_client.averaging.handle.supervisor import AveragingWorker
from swarm_client.averaging.protocol.messages import Started
from swarm_client.ipc import shared_memory
from swarm_client.membership.roster import RosterView
from swarm_client.stage.protocol.messages import SumsDigested
from swarm_client.stage.worker.accumulation.digests import slice_digests
from swarm_client.volunteer.gradient_averager import GroupAverager
from swarm_shared.base.clock import wall
from swarm_shared.base.types import PeerId, StageIndex, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.norm_sketch import vector_key
from swarm_shared.identity.work_statements import SumDigests
from swarm_shared.network import Node, open_node
from swarm_shared.protocol import CarrierAddress, PeerRecord, Reduction, Roster, SumCheck
from swarm_shared.run.codec_sizes import AverageCodec

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
SENTINEL = np.float32(-7)
NOWHERE = "/ip4/127.0.0.1/tcp/1"
"""An address without a listener."""


class Peer:
    """The averaging part of a volunteer."""

    def __init__(
        self, identity: Identity, node: Node, worker: AveragingWorker, elements: int, seed: int
    ) -> None:
        self.identity, self.node, self.worker = identity, node, worker
        self.elements = elements
        self.own_elements, self.tied_elements = elements, 0
        self.roster = RosterView()
        node.admit_only(lambda peer, protocol: self.roster.knows(peer))
        self.averager = GroupAverager(
            worker, node, self.roster, identity, RUN, identity.peer_id, wall
        )
        self.averager.stall_seconds = 20.0
        hint = f"swarm-test-{os.getpid()}"
        self.segments = [shared_memory.create(hint, 8 * elements) for _ in range(2)]
        self.gradient = np.random.default_rng(seed).standard_normal(elements, dtype=np.float32)
        self.use_codec("none")

    def use_codec(self, codec: AverageCodec) -> None:
        """Average the same gradient with this codec; `exact` counts it in millionths."""
        self.averager.codec = codec
        dtype = dtype_of(codec)
        self.source, self.result = (
            each.array(dtype, self.elements).view(dtype) for each in self.segments
        )
        self.source[:] = np.rint(self.gradient * 1e6) if codec == "exact" else self.gradient
        self.result[:] = SENTINEL

    @property
    def id(self) -> PeerId:
        return self.identity.peer_id

    def record(self, stage: int = 0) -> PeerRecord:
        return peer_record(self.id, stage, addresses=self.node.addresses, carrier=self.carrier)

    @property
    def carrier(self) -> CarrierAddress | None:
        return self.averager.carrier_address()

    def tie(self, own_elements: int, tied_elements: int) -> None:
        """Let the vector begin with so many elements of its own, followed by tied ones."""
        assert own_elements + tied_elements <= self.elements
        self.own_elements, self.tied_elements = own_elements, tied_elements

    async def reduce(
        self,
        members: Sequence[PeerId],
        attempt: int,
        weights: Sequence[int] = (),
        part: Literal["own", "tied"] = "own",
    ) -> None:
        self.result[:] = SENTINEL
        reduction = Reduction(part=part, members=tuple(members), weights=tuple(weights))
        await self.averager.reduce(self._stage_worker(), Step(1), attempt, reduction)

    async def digest(self, check: SumCheck, reduction: Reduction) -> SumDigests:
        return await self.averager.digest(self._stage_worker(), check, reduction)

    def _stage_worker(self) -> Any:
        return SimpleNamespace(
            stage=StageIndex(0),
            configured=SimpleNamespace(
                own_elements=self.own_elements,
                tied_elements=self.tied_elements,
                gradients_name=self.segments[0].name,
                result_name=self.segments[1].name,
            ),
            digest_sums=self._digest_sums,
        )

    async def _digest_sums(
        self, check: SumCheck, part: Literal["own", "tied"], stops: Sequence[int]
    ) -> SumsDigested:
        cut = slice(0, self.own_elements)
        if part == "tied":
            cut = slice(self.own_elements, self.own_elements + self.tied_elements)
        vectors = [self.source[cut], self.result[cut]]
        key = vector_key(check.seed, part, check.weights)
        parts, results = slice_digests(key, vectors, stops)
        return SumsDigested(parts=parts, results=results)

    def carried(self) -> dict[tuple[PeerId, str], int]:
        """Bytes sent so far, per remote and route."""
        return {
            (peer, route.value): sent
            for (peer, route), (sent, _) in self.averager._carried_bytes.items()
        }

    def remove(self) -> None:
        for segment in self.segments:
            segment.unlink()
            segment.close()


class Group:
    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        self.attempts = 0
        self.failures: dict[PeerId, RoundFailed] = {}

    def publish(self, records: Sequence[PeerRecord] | None = None) -> None:
        """Give every peer the roster of all, as the coordinator would."""
        known = tuple(records if records is not None else (peer.record() for peer in self.peers))
        for peer in self.peers:
            peer.roster.replace(Roster(serial=1, peers=known))

    async def round(
        self,
        members: Sequence[Peer] | None = None,
        weights: Sequence[int] = (),
        part: Literal["own", "tied"] = "own",
    ) -> dict[PeerId, RoundFailed]:
        """Run one attempt; returns the failures by peer. `weights` are in the order of the members'
        IDs."""
        taking_part = list(members or self.peers)
        self.attempts += 1
        attempt = self.attempts
        ids = tuple(sorted(peer.id for peer in taking_part))
        failures: dict[PeerId, RoundFailed] = {}

        async def one(peer: Peer) -> None:
            try:
                await peer.reduce(ids, attempt, weights, part)
            except RoundFailed as failure:
                failures[peer.id] = failure

        async with trio.open_nursery() as nursery:
            for peer in taking_part:
                nursery.start_soon(one, peer)
        return failures

    def check_exact(self, members: Sequence[Peer] | None = None) -> None:
        """Check that all members hold the float32 sum in group order, to the bit."""
        ordered = sorted(members or self.peers, key=lambda peer: peer.id)
        total = ordered[0].source.copy()
        for peer in ordered[1:]:
            total += peer.source
        for peer in ordered:
            assert peer.result.tobytes() == total.tobytes(), peer.id

    async def under_way(self, peer: Peer) -> None:
        """Wait until `peer` has the first sum."""
        while (peer.result == SENTINEL).all():
            await trio.sleep(0.001)


async def wait_available(worker: AveragingWorker) -> Started:
    """Wait until the worker serves."""
    changed = trio.Event()
    worker.on_change(lambda: changed.set())
    while worker.started is None:
        await changed.wait()
        changed = trio.Event()
    return worker.started


@asynccontextmanager
async def group(
    home: Path, hivemind: Sequence[bool], elements: int, relays: Sequence[str] = ()
) -> AsyncIterator[Group]:
    """One peer per entry of `hivemind` (with or without it), each with the others in its roster."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        peers: list[Peer] = []
        for index, has_hivemind in enumerate(hivemind):
            identity = Identity.generate()
            node = await stack.enter_async_context(open_node(identity, LOOPBACK))
            options = AveragingOptions(home / str(index), LOOPBACK, trusted_relays=tuple(relays))
            worker = AveragingWorker(options)
            if has_hivemind:
                nursery.start_soon(worker.run)
            peer = Peer(identity, node, worker, elements, index)
            stack.callback(peer.remove)
            nursery.start_soon(peer.averager.run)
            peers.append(peer)
        for peer, has_hivemind in zip(peers, hivemind, strict=True):
            if has_hivemind:
                assert await peer.worker.settled(), peer.worker.reason
        made = Group(peers)
        made.publish()
        yield made
        nursery.cancel_scope.cancel()
