"""Carries out the all-reduces of a step close, each stream over the best route of its pair.

With hivemind a round runs in the averaging worker: p2pd connects the members that have it, and the
daemon's host (through the bridge) connects the remaining pairs. Without hivemind, or while the
worker is down, the round runs in the daemon over the host alone. The algorithm
(`swarm_client.averaging.all_reduce.reduce`) and the bytes on the wire are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import trio

from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.all_reduce.in_memory import all_reduce_in_memory
from swarm_client.averaging.all_reduce.member_link import abort_frame
from swarm_client.averaging.all_reduce.plan import RoundSpec, partition
from swarm_client.averaging.all_reduce.received import ReceivedPieces
from swarm_client.averaging.all_reduce.routes import Route, RouteFault, StreamTraffic
from swarm_client.averaging.all_reduce.stream_race import MAX_OPENING_SECONDS
from swarm_client.averaging.handle.host_carrier import Libp2pAveraging
from swarm_client.averaging.handle.supervisor import AveragingWorker
from swarm_client.averaging.protocol.messages import DigestReceived, SetMembership, StartRound
from swarm_client.membership.roster import RosterView
from swarm_client.stage.handle.worker_handle import StageWorker
from swarm_client.volunteer.averaging_routes import AveragingRoutes
from swarm_shared.base.clock import Clock
from swarm_shared.base.types import LinearDigests, PeerId, RunId, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.linear_digest import digest_sum, from_text, to_text
from swarm_shared.identity.norm_sketch import vector_key
from swarm_shared.identity.work_statements import SumDigests
from swarm_shared.network import Node
from swarm_shared.protocol import CarrierAddress, LinkBytes, Reduction, SumCheck
from swarm_shared.run.codec_sizes import AverageCodec
from swarm_shared.run.manifest import Manifest

log = logging.getLogger(__name__)

P2PD_LINKS = {
    Route.P2PD: "all-reduce over p2pd",
    Route.P2PD_RELAYED: "all-reduce over p2pd through a relay",
}
"""Protocol names under which p2pd's bytes are reported. The host counts its own streams."""


class GroupAverager:
    """Satisfies `swarm_client.pipeline.step_close.Averager` and
    `swarm_client.auditing.sum_statements.Digester`. Run `run` beside it."""

    def __init__(
        self,
        worker: AveragingWorker,
        node: Node,
        roster: RosterView,
        identity: Identity,
        run: RunId,
        organiser: PeerId,
        clock: Clock,
    ) -> None:
        self.averaging_worker = worker
        self.stall_seconds = 10.0
        self.codec: AverageCodec = "none"
        self._roster = roster
        self._identity = identity
        self._run = run
        self._organiser = organiser
        self._clock = clock
        self._routes = routes = AveragingRoutes(node, roster, clock)
        self._host = host = Libp2pAveraging(node, routes.host_addresses)
        host.hub.admits = lambda remote: routes.may_average(PeerId(remote))
        self._carried_bytes: dict[tuple[PeerId, Route], list[int]] = {}
        self._attempt: tuple[Step, int] | None = None
        """The attempt of which received pieces may be kept, here or in the worker."""
        self._received: dict[str, ReceivedPieces] = {}
        """The pieces of rounds that ran in the daemon, by the name of the round."""
        self._certificate: str | None = None
        """This peer's certificate; None before admission."""
        self._wake = trio.Event()
        worker.set_stream_opener(lambda peer, relayed: host.open(peer, relayed=relayed))
        worker.on_change(lambda: self._wake.set())

    def admitted(self, manifest: Manifest, certificate: str) -> None:
        """Average as the manifest says, and show this peer's certificate to hivemind's DHT."""
        self.stall_seconds = manifest.limits.round_stall_seconds
        self.codec = manifest.codecs.average
        self._routes.use_manifest(manifest)
        self._certificate = certificate
        self._wake.set()

    async def run(self) -> None:
        """Keep the queue of incoming streams and the worker up to date with the roster."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_roster)
            while True:
                self._wake = trio.Event()
                await self._update_worker()
                await self._wake.wait()

    async def _follow_roster(self) -> None:
        while True:
            await self._roster.wait_changed()
            self._wake.set()

    async def _update_worker(self) -> None:
        self._host.hub.notify()
        self.averaging_worker.admit(self._routes.admitted_p2pds())
        own_address = self.carrier_address()
        if self._certificate is not None and own_address is not None:
            self.averaging_worker.set_membership(
                SetMembership(
                    run=self._run,
                    organiser=self._organiser,
                    certificate=self._certificate.encode(),
                    binding=own_address.binding.encode(),
                    revoked=tuple(self._roster.revoked),
                    unix_seconds=self._clock(),
                )
            )

    def carrier_address(self) -> CarrierAddress | None:
        """Addresses of this peer's p2pd, bound to its main key; None without p2pd."""
        started = self.averaging_worker.started
        if started is None:
            return None
        return self._routes.own_address(self._identity, started.p2pd_peer_id, started.addresses)

    def use_relays(self, addresses: Sequence[str]) -> None:
        """Let p2pd be reachable through these relays."""
        self.averaging_worker.reconfigure(trusted_relays=addresses)

    def links(self) -> tuple[LinkBytes, ...]:
        """Bytes carried by p2pd, per member of this peer's groups and kind of route."""
        return tuple(
            LinkBytes(remote=peer, protocol=P2PD_LINKS[route], sent=sent, received=received)
            for (peer, route), (sent, received) in self._carried_bytes.items()
            if route in P2PD_LINKS
        )

    def sent_bytes(self) -> int:
        """Bytes sent in all-reduces, over either carrier."""
        return sum(sent for sent, _ in self._carried_bytes.values())

    async def reduce(
        self, stage_worker: StageWorker, step: Step, attempt: int, reduction: Reduction
    ) -> None:
        """Sum this part of the gradient over the group into the result segment, or raise
        RoundFailed."""
        if self._attempt != (step, attempt):
            self._forget()
            self._attempt = step, attempt
        spec = self._spec(stage_worker, step, attempt, reduction)
        offset = 0 if reduction.part == "own" else stage_worker.configured.own_elements
        try:
            if self.averaging_worker.available and len(reduction.members) > 1:
                await self._in_worker(stage_worker, spec, offset)
            else:
                await self._in_daemon(stage_worker, spec, offset)
        except RoundFailed as error:
            self._record_outcome(spec, error.links, self._route_faults(error), done=False)
            raise

    def _spec(
        self, stage_worker: StageWorker, step: Step, attempt: int, reduction: Reduction
    ) -> RoundSpec:
        is_own_part, configured = reduction.part == "own", stage_worker.configured
        part_name = "tied" if not is_own_part else str(stage_worker.stage)
        return RoundSpec(
            f"{self._run[:16]}/{step}/{attempt}/{part_name}",
            reduction.members,
            self._identity.peer_id,
            configured.own_elements if is_own_part else configured.tied_elements,
            tuple(map(float, reduction.weights)) or None,
            codec=self.codec,
        )

    async def digest(
        self, stage_worker: StageWorker, check: SumCheck, reduction: Reduction
    ) -> SumDigests:
        """The digests of a reduction that is done, until its attempt is over. SwarmError where its
        data is lost."""
        spec = self._spec(stage_worker, check.step, check.attempt, reduction)
        stops = tuple(part.stop for part in partition(spec))
        if not check.details:
            stops = stops[-1:]
        digests = await stage_worker.digest_sums(check, reduction.part, stops)
        part, result = (
            to_text(digest_sum(map(from_text, per_slice)))
            for per_slice in (digests.parts, digests.results)
        )
        if not check.details:
            return SumDigests(
                part=part, result=result, part_sketch=digests.part_sketch,
                result_sketch=digests.result_sketch,
            )  # fmt: skip
        received: LinearDigests = ()
        if partition(spec)[spec.my_index].pieces:
            from_others = await self._digest_received(spec, check, reduction.part)
            me = spec.my_index
            received = (*from_others[:me], digests.parts[me], *from_others[me:])
        return SumDigests(
            part=part,
            result=result,
            parts=digests.parts,
            results=digests.results,
            received=received,
        )

    async def _digest_received(
        self, spec: RoundSpec, check: SumCheck, part: Literal["own", "tied"]
    ) -> LinearDigests:
        """The digests of what the others put into this member's slice."""
        if len(spec.members) == 1:
            return ()
        kept = self._received.get(spec.round_id)
        if kept is not None:
            key = vector_key(check.seed, part, check.weights)
            return await trio.to_thread.run_sync(kept.digests, key)
        request = DigestReceived(
            round_id=spec.round_id, seed=check.seed, part=part, weights=check.weights
        )
        return await self.averaging_worker.digest_received(request)

    def attempt_over(self, step: Step, attempt: int) -> None:
        """Drop what is kept of an attempt: there will be no check of its sums."""
        if self._attempt == (step, attempt):
            self._forget()

    def _forget(self) -> None:
        self._attempt = None
        self._received.clear()
        self.averaging_worker.forget_rounds()

    async def _in_worker(self, stage_worker: StageWorker, spec: RoundSpec, offset: int) -> None:
        """Run the round in the averaging worker. Streams that arrive at the host meanwhile are
        handed to it."""
        request = StartRound(
            spec=spec,
            members=self._routes.members(spec.members),
            source_shm_name=stage_worker.configured.gradients_name,
            result_shm_name=stage_worker.configured.result_name,
            offset_elements=offset,
            stall_seconds=self.stall_seconds,
            join_seconds=self.stall_seconds + MAX_OPENING_SECONDS,
        )
        failure: RoundFailed | None = None
        # The group may come from a newer roster than the one applied here.
        self.averaging_worker.admit(self._routes.admitted_p2pds())
        with self._host.incoming(spec) as arrivals:
            async with trio.open_nursery() as nursery:

                async def hand_over() -> None:
                    while True:
                        self.averaging_worker.hand_over(await arrivals.receive())

                nursery.start_soon(hand_over)
                try:
                    done = await self.averaging_worker.run_round(request)
                except RoundFailed as error:
                    failure = error
                    arrivals.late_abort_frame = abort_frame(spec, error)
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        self._record_outcome(spec, done.links, done.faults, done=True)

    async def _in_daemon(self, stage_worker: StageWorker, spec: RoundSpec, offset: int) -> None:
        with self.averaging_worker.round_in_daemon(spec.round_id, self._routes.p2pds(spec.members)):
            links = await all_reduce_in_memory(
                spec, self._host, stage_worker.configured.gradients_name,
                stage_worker.configured.result_name, offset, self._received,
                stall_seconds=self.stall_seconds,
                join_seconds=self.stall_seconds + MAX_OPENING_SECONDS,
            )  # fmt: skip
        self._record_outcome(spec, links, (), done=True)

    def _record_outcome(
        self,
        spec: RoundSpec,
        carried: Sequence[StreamTraffic],
        faults: Sequence[RouteFault],
        *,
        done: bool,
    ) -> None:
        for link in carried:
            totals = self._carried_bytes.setdefault((link.peer, link.route), [0, 0])
            totals[0] += link.bytes_sent
            totals[1] += link.bytes_received
            if done:  # a stream that only opened proves nothing
                self._routes.worked(link.peer, link.route)
        for fault in faults:
            log.info(
                "%s: %s does not reach %s: %s", spec.round_id, fault.route, fault.peer, fault.reason
            )
            self._routes.failed(fault.peer, fault.route)

    def _route_faults(self, error: RoundFailed) -> list[RouteFault]:
        """Routes that this failure is evidence against, observed here or by the member that
        reported it."""
        faults = list(error.faults)
        culprit = error.culprit
        if culprit is None or culprit == self._identity.peer_id:
            return faults
        if error.route is not None and error.failure is not RoundFailure.PROTOCOL:
            faults.append(RouteFault(culprit, error.route, error.reason))
        elif error.failure is RoundFailure.CARRIER:
            # Another member lost the culprit's p2pd; do not wait for the same timeout here.
            used = {link.route for link in error.links if link.peer == culprit}
            faults += [RouteFault(culprit, r, error.reason) for r in used if r.over_p2pd]
        return faults
