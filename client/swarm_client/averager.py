"""Carries out the reductions of a close over the carrier that the coordinator named.

hivemind's p2pd in its own process where both ends have it, the py-libp2p host of this daemon
otherwise. The algorithm is the same (`averaging.reduce`); only the byte streams differ.
"""

from __future__ import annotations

import base64
import binascii
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import trio

from swarm_client import shared_memory
from swarm_client.averaging.errors import RoundFailed, RoundFailure
from swarm_client.averaging.libp2p_carrier import Libp2pAveraging
from swarm_client.averaging.plan import RoundSpec
from swarm_client.averaging.protocol import Member, StartRound
from swarm_client.averaging.reduce import all_reduce
from swarm_client.averaging.supervisor import AveragingWorker
from swarm_client.engine.holding import Holding
from swarm_client.engine.roster import RosterView
from swarm_client.engine.rounds import AveragingFailed
from swarm_shared.credentials import CarrierBinding, open_carrier_binding, sign_carrier_binding
from swarm_shared.errors import FrameError, SignatureError
from swarm_shared.identity import Identity
from swarm_shared.messages import Carrier, CarrierAddress, LinkBytes, Reduction
from swarm_shared.network import Node
from swarm_shared.types import PeerId, RunId, Step

log = logging.getLogger(__name__)

FLOAT_BYTES = 4
BINDING_SECONDS = 7 * 24 * 3600.0
"""A binding is made anew at every start; a week outlives any session."""

T = TypeVar("T")


class GroupAverager:
    """Satisfies `engine.rounds.Averager`."""

    def __init__(self, worker: AveragingWorker) -> None:
        self.worker = worker
        self.stall_seconds = 10.0
        """Set from the manifest once that is known."""
        self._libp2p: Libp2pAveraging | None = None
        self._roster: RosterView | None = None
        self._run: RunId | None = None
        self._me: PeerId | None = None
        self._carried: dict[PeerId, list[int]] = {}
        self._own_address: CarrierAddress | None = None

    def bind(self, node: Node, roster: RosterView, run: RunId) -> None:
        self._libp2p = Libp2pAveraging(node)
        self._roster, self._run, self._me = roster, run, node.peer_id

    def carrier_address(self, identity: Identity) -> CarrierAddress | None:
        """How others reach this peer's p2pd, bound to its main key; None without one."""
        started = self.worker.started
        if started is None:
            return None
        binding = CarrierBinding(
            peer=identity.peer_id,
            carrier_peer_id=started.p2pd_peer_id,
            expires=time.time() + BINDING_SECONDS,
        )
        envelope = base64.b64encode(sign_carrier_binding(identity, binding)).decode()
        self._own_address = CarrierAddress(
            peer=started.p2pd_peer_id, addresses=started.addresses[:32], binding=envelope
        )
        return self._own_address

    def links(self) -> tuple[LinkBytes, ...]:
        """Bytes that hivemind carried, per member of this peer's groups."""
        return tuple(
            LinkBytes(remote=peer, protocol="all-reduce over p2pd", sent=sent, received=received)
            for peer, (sent, received) in self._carried.items()
        )

    async def reduce(
        self, holding: Holding, step: Step, attempt: int, reduction: Reduction
    ) -> None:
        """Sum this part of the gradient over the group into the result segment."""
        assert self._me is not None
        assert self._run is not None
        worker = holding.worker
        own = reduction.part == "own"
        elements = worker.own_elements if own else worker.tied_elements
        offset = 0 if own else worker.own_elements
        where = "tied" if not own else str(holding.stage)
        spec = RoundSpec(
            f"{self._run[:16]}/{step}/{attempt}/{where}", reduction.members, self._me, elements
        )
        try:
            if reduction.carrier is Carrier.HIVEMIND and len(reduction.members) > 1:
                await self._over_hivemind(holding, spec, offset)
            else:
                await self._over_libp2p(holding, spec, offset)
        except RoundFailed as error:
            unreachable = (
                reduction.carrier is Carrier.HIVEMIND and error.failure is RoundFailure.UNREACHABLE
            )
            raise AveragingFailed(
                f"all-reduce over {reduction.carrier.value}: {error}", error.culprit, unreachable
            ) from error

    async def _over_hivemind(self, holding: Holding, spec: RoundSpec, offset: int) -> None:
        assert self._roster is not None
        members: list[Member] = []
        for peer in spec.members:
            record = self._roster.get(peer)
            address = self._own_address if peer == spec.me else None
            if record is not None and record.carrier is not None:
                address = record.carrier
            if address is None:
                raise RoundFailed(f"{peer} has no p2pd", peer, failure=RoundFailure.UNREACHABLE)
            members.append(
                Member(
                    peer_id=peer,
                    p2pd_peer_id=_checked_carrier(peer, address),
                    p2pd_addresses=address.addresses,
                )
            )
        done = await self.worker.run_round(
            StartRound(
                round_id=spec.round_id,
                members=tuple(members),
                me=spec.me,
                elements=spec.elements,
                source_shm_name=holding.worker.gradients_name,
                result_shm_name=holding.worker.result_name,
                offset_elements=offset,
                stall_seconds=self.stall_seconds,
                join_seconds=self.stall_seconds,
            )
        )
        # Every pair exchanges the same amount when shares are equal, as they are here.
        others = [peer for peer in spec.members if peer != spec.me]
        for peer in others:
            totals = self._carried.setdefault(peer, [0, 0])
            totals[0] += done.bytes_sent // len(others)
            totals[1] += done.bytes_received // len(others)

    async def _over_libp2p(self, holding: Holding, spec: RoundSpec, offset: int) -> None:
        assert self._libp2p is not None
        assert self._roster is not None
        addresses: dict[PeerId, Sequence[str]] = {}
        for member in spec.members:
            record = self._roster.get(member)
            addresses[member] = record.addresses if record is not None else ()
        source = shared_memory.attach(holding.worker.gradients_name)
        result = shared_memory.attach(holding.worker.result_name)
        try:
            await all_reduce(
                spec,
                self._libp2p.carrier(addresses),
                _floats(source, spec.elements, offset),
                _floats(result, spec.elements, offset),
                stall_seconds=self.stall_seconds,
                to_thread=_to_thread,
            )
        finally:
            source.close()
            result.close()


def _floats(segment: shared_memory.Segment, elements: int, offset: int) -> Any:
    return segment.array(np.float32, elements, offset * FLOAT_BYTES)


async def _to_thread(work: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(work)


def _checked_carrier(record_peer: PeerId, address: CarrierAddress) -> str:
    """The p2pd peer ID that `record_peer` vouches for. SignatureError when it does not."""
    try:
        envelope = base64.b64decode(address.binding, validate=True)
        binding = open_carrier_binding(envelope, record_peer, time.time())
    except (binascii.Error, FrameError) as error:
        raise SignatureError(f"the carrier binding of {record_peer} is damaged") from error
    if binding.carrier_peer_id != address.peer:
        raise SignatureError(f"{record_peer} names a p2pd that it has not vouched for")
    return address.peer
