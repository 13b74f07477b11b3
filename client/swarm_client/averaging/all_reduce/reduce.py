"""The exact all-reduce of one stage's gradients: reduce-scatter, then all-gather.

The vector is cut into one slice per member (`swarm_client.averaging.all_reduce.plan`). Member i
sends its part of slice r to reducer r; r adds the parts **in group order** and sends the sum back;
every member, r included, takes exactly the bytes that r sent. All members therefore end bitwise
equal, whatever the order of arrival. Slices are pipelined in pieces: sums flow back while later
pieces are still in flight.

Rules
-----
1. One stream per (member, reducer), opened by the member; frames and their order:
   `swarm_client.averaging.all_reduce.frames`.
2. Credit: a member is at most `window_pieces` ahead of the sums that came back. A reducer therefore
   reads every stream at all times (an ABORT is never stuck behind data) in bounded memory.
3. Exact or failed: any lost stream, silence, violated rule or non-finite element fails the round
   here at once, and this member sends ABORT to all others. `source` is never written; `result` is
   valid only after success. Members that finished before another one failed are the coordinator's
   task: it applies a round only when all members report it done.
4. Silence: every end of every stream sends something at least four times per `stall_seconds`; an
   end that has been silent for longer is frozen or disconnected, and is the culprit.
5. Waiting: a member that is alive and lets the round wait for longer than its data explains is the
   culprit too (`swarm_client.averaging.all_reduce.attendance`).

Written once, with anyio, for trio and asyncio alike. A fixed group with fail-fast rounds avoids the
behaviour of hivemind's averager under churn (docs: facts on hivemind).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np

from swarm_client.averaging.all_reduce.attendance import Attendance, enforce_timeouts
from swarm_client.averaging.all_reduce.carrier import Carrier, IncomingStreams
from swarm_client.averaging.all_reduce.codec import (
    EncodedPiece,
    NotFiniteError,
    Totals,
    check_finite,
    check_sum,
    decode_piece,
    dtype_of,
    encode_piece,
    exponent_is_valid,
    payload_is_valid,
    payload_sizes,
    reduce_piece,
)
from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.all_reduce.frames import HELLO_BYTES, FrameKind
from swarm_client.averaging.all_reduce.member_link import MemberLink, abort_frame
from swarm_client.averaging.all_reduce.plan import RoundSpec, partition, plan_digest
from swarm_client.averaging.all_reduce.received import ReceivedPieces
from swarm_client.averaging.all_reduce.routes import StreamTraffic
from swarm_client.fault_injection import faults
from swarm_shared.base.errors import NetworkError, ProtocolError
from swarm_shared.base.types import PeerId

logger = logging.getLogger(__name__)

T = TypeVar("T")

ABORT_GRACE_SECONDS = 0.5
"""Seconds for an ABORT frame to reach the others before the streams are dropped."""
STREAMS_PER_REDUCER = 3
"""Most streams that a member opens to a reducer until one is accepted. p2pd dials all addresses of
a peer and closes all connections but the first, while the peer may have opened a stream over
another one of them (docs/decisions, number 0011)."""
REOPENING_SECONDS = 2.5
"""Age in seconds up to which such a stream is opened again: as long as a dial with its handshakes
takes. One that ends later was refused by the reducer."""
INLINE_ELEMENTS = 16 * 1024
"""Largest piece, in elements, that is computed without a thread: on smaller ones the work takes
less time than handing it to a thread."""


async def all_reduce(
    spec: RoundSpec,
    carrier: Carrier,
    source: Totals,
    result: Totals,
    *,
    stall_seconds: float,
    join_seconds: float | None = None,
    received: ReceivedPieces | None = None,
) -> tuple[StreamTraffic, ...]:
    """Sum `source` over the members into `result`, both of `spec.elements` and the codec's type.
    Returns the traffic of each stream.

    A member that is silent for `stall_seconds` fails the round; `join_seconds` (default: the same)
    is the time that members have to begin. What the others put into this member's slice is kept in
    `received`, if there is one. A remote can cause no exception but RoundFailed.
    Cancelling the call drops the streams, which fails the round for the others too.
    """
    dtype = dtype_of(spec.codec)
    for name, array in (("source", source), ("result", result)):
        if array.shape != (spec.elements,) or array.dtype != dtype:
            raise ValueError(
                f"{name} must be {spec.elements} {dtype}, not {array.shape} {array.dtype}"
            )
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} must be contiguous")
    if len(spec.members) == 1:
        await anyio.to_thread.run_sync(partial(_copy_alone, spec, source, result))
        return ()
    limits = (stall_seconds, stall_seconds if join_seconds is None else join_seconds)
    round_ = _Round(spec, carrier, source, result, received, limits)
    try:
        await round_.run()
    except RoundFailed as failure:
        failure.links = round_.links_report()
        raise
    finally:
        round_.release_arrays()
    return round_.links_report()


def _inject_fault(spec: RoundSpec) -> None:
    if faults.active is not None:
        faults.inject(faults.FaultPoint.ALL_REDUCE, int(spec.round_id.split("/")[1]))


def _copy_alone(spec: RoundSpec, source: Totals, result: Totals) -> None:
    _inject_fault(spec)
    try:
        check_finite(source)
    except NotFiniteError as error:
        raise _not_finite(spec, spec.my_index) from error
    result[:] = source


def _not_finite(spec: RoundSpec, member: int | None) -> RoundFailed:
    culprit = None if member is None else spec.members[member]
    whose = "the sum of the gradients" if culprit is None else f"the gradient of member {culprit}"
    return RoundFailed(
        f"{whose} holds an infinity, a NaN or a count that is too large", culprit,
        failure=RoundFailure.NON_FINITE,
    )  # fmt: skip


class _Round:
    """This member's part in one attempt at a round: a member of every other reducer, and the
    reducer of its own slice."""

    def __init__(
        self,
        spec: RoundSpec,
        carrier: Carrier,
        source: Totals,
        result: Totals,
        received: ReceivedPieces | None,
        limits_seconds: tuple[float, float],
    ) -> None:
        self.spec = spec
        self._carrier = carrier
        self._source = source
        self._result = result
        self._received = received
        self._digest = plan_digest(spec)
        self._slices = partition(spec)
        self._me = spec.my_index
        self._attendance = Attendance()
        self._limits_seconds = limits_seconds
        """The longest silence of a member, and the time that members have to join, in seconds."""
        self._failure: RoundFailed | None = None
        self._work_scope = anyio.CancelScope()
        self._arrivals: IncomingStreams | None = None
        # Pieces that were received and are not summed yet, by the member's index in the group.
        window = spec.window_pieces
        self._inboxes = [
            anyio.create_memory_object_stream[EncodedPiece](window) for _ in spec.members
        ]
        self._sums_queued = [0] * len(spec.members)
        self._incoming_links: dict[int, MemberLink] = {}
        self._all_here = anyio.Event()

    # --------------------------------------------------------------------------- the round's life

    async def run(self) -> None:
        """Carry out the round; RoundFailed if it fails here or at another member."""
        async with anyio.create_task_group() as pumps:
            with self._work_scope:
                await self._guarded(self._work, pumps)
            if self._failure is not None:
                await self._send_aborts(self._failure)
            pumps.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    def links_report(self) -> tuple[StreamTraffic, ...]:
        """Return the traffic of every stream of the round."""
        return tuple(
            StreamTraffic(link.peer, link.route, link.bytes_sent, link.bytes_received)
            for link in self._attendance.links
        )

    def release_arrays(self) -> None:
        """Drop the arrays. A finished round is part of reference cycles, and the shared memory must
        not wait for the garbage collector."""
        self._source = self._result = np.empty(0, dtype_of(self.spec.codec))
        self._inboxes.clear()

    async def _work(self, pumps: anyio.abc.TaskGroup) -> None:
        """Exchange with all reducers and reduce the own slice; returns when both are complete."""
        others = [i for i in range(len(self.spec.members)) if i != self._me]
        reducers = [i for i in others if self._slices[i].pieces]
        senders = others if self._slices[self._me].pieces else []
        self._attendance.to_accept = {self.spec.members[i] for i in reducers}
        self._attendance.to_connect = {self.spec.members[i] for i in senders}
        with self._carrier.incoming(self.spec) as arrivals:
            self._arrivals = arrivals
            async with anyio.create_task_group() as watched:
                watched.start_soon(
                    enforce_timeouts,
                    self.spec,
                    self._attendance,
                    self._fail,
                    *self._limits_seconds,
                )
                async with anyio.create_task_group() as work:
                    for reducer in reducers:
                        work.start_soon(self._guarded, self._exchange_with_reducer, reducer, pumps)
                    if senders:
                        work.start_soon(self._guarded, self._reduce_own_slice)
                        await self._accept_members(arrivals, work, pumps)
                watched.cancel_scope.cancel()

    def _fail(self, failure: RoundFailed) -> None:
        """Fail the round; the first failure counts, and everything stops."""
        if self._failure is None:
            if failure.aborted_by is not None and self._confirms(failure):
                failure.aborted_by = None
            self._failure = failure
            if self._arrivals is not None:
                self._arrivals.late_abort_frame = abort_frame(self.spec, failure)
        self._work_scope.cancel()

    def _confirms(self, reported: RoundFailed) -> bool:
        """Whether this member was about to report the same failure itself."""
        return (
            reported.culprit is not None
            and reported.failure in (RoundFailure.STALLED, RoundFailure.UNREACHABLE)
            and self._attendance.is_silent(reported.culprit, *self._limits_seconds)
        )

    async def _guarded(self, function: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Run a task of the round; an error of it fails the round instead of the task group."""
        try:
            await function(*arguments)
        except RoundFailed as failure:
            self._fail(failure)
        except NotFiniteError as error:
            self._fail(_not_finite(self.spec, error.member))
        except (NetworkError, ProtocolError) as error:
            self._fail(RoundFailed(str(error), failure=RoundFailure.STOPPED))

    async def _send_aborts(self, failure: RoundFailed) -> None:
        """Send the failure to all members that have not reported one themselves."""
        with anyio.move_on_after(ABORT_GRACE_SECONDS):
            async with anyio.create_task_group() as ends:
                for link in self._attendance.links:
                    if link.peer_aborted:
                        ends.start_soon(link.channel.abort)
                    else:
                        link.abort(failure)
                        ends.start_soon(link.drain)

    def _add_link(self, link: MemberLink, pumps: anyio.abc.TaskGroup) -> MemberLink:
        self._attendance.links.append(link)
        pumps.start_soon(link.pump)
        return link

    # ------------------------------------------------------------------ as a member of a reducer

    async def _exchange_with_reducer(self, reducer: int, pumps: anyio.abc.TaskGroup) -> None:
        """Send this member's part of slice `reducer` and take its sums."""
        link = await self._join(self.spec.members[reducer], pumps)
        credit = anyio.Semaphore(self.spec.window_pieces)
        with link.awaited():
            async with anyio.create_task_group() as directions:
                directions.start_soon(self._guarded, self._send_parts, link, credit)
                directions.start_soon(self._guarded, self._take_sums, link, credit)
            await link.send(FrameKind.BYE)
            link.finished = True
            link.finish(closes_last=True)
            await link.pumped.wait()

    async def _join(self, peer: PeerId, pumps: anyio.abc.TaskGroup) -> MemberLink:
        """Open a stream to a reducer and wait until the reducer has accepted it.

        A stream that its carrier loses within REOPENING_SECONDS is opened again, up to
        STREAMS_PER_REDUCER streams in all.
        """
        for attempts_left in reversed(range(STREAMS_PER_REDUCER)):
            link = await self._open(peer, pumps)
            opened_at = anyio.current_time()
            await link.send_hello(self._digest)
            # Nothing but HELLO is sent before the other side has begun: an unread stream would fill
            # up, and some carriers reset such a stream.
            try:
                await link.receive(FrameKind.ACCEPT)
                break
            except RoundFailed as failure:
                lost = failure.failure is RoundFailure.CARRIER and failure.aborted_by is None
                is_old = anyio.current_time() - opened_at > REOPENING_SECONDS
                if not lost or is_old or not attempts_left:
                    raise
                logger.info("%s; it is opened again", failure)
                self._attendance.links.remove(link)
                link.finished = True
                link.finish()
        link.accepted = True
        self._attendance.to_accept.discard(peer)
        return link

    async def _open(self, peer: PeerId, pumps: anyio.abc.TaskGroup) -> MemberLink:
        try:
            channel = await self._carrier.open(peer)
        except (NetworkError, ProtocolError) as error:
            raise RoundFailed(
                f"member {peer} cannot be reached ({error})",
                peer,
                failure=RoundFailure.UNREACHABLE,
            ) from error
        link = MemberLink(channel, peer, self.spec, on_failure=self._fail, to_reducer=True)
        return self._add_link(link, pumps)

    async def _send_parts(self, link: MemberLink, credit: anyio.Semaphore) -> None:
        """Send this member's part of the reducer's slice, piece by piece, within the credit."""
        part = self._slices[link.peer_index]
        for piece in range(part.pieces):
            await credit.acquire()
            start, stop = part.piece(piece)
            encode = partial(self._encode_own, self._source[start:stop])
            encoded = await self._off_loop(encode, stop - start)
            await link.send(
                FrameKind.PIECE, piece=piece, exponent=encoded.exponent, payload=encoded.payload
            )

    def _encode_own(self, values_P: Totals) -> EncodedPiece:
        try:
            return encode_piece(values_P, self.spec.codec)
        except NotFiniteError as error:
            raise NotFiniteError(self._me) from error

    async def _take_sums(self, link: MemberLink, credit: anyio.Semaphore) -> None:
        """Write the reducer's sums into `result`; each one that arrives gives a credit back."""
        part = self._slices[link.peer_index]
        codec = self.spec.codec
        for piece in range(part.pieces):
            start, stop = part.piece(piece)
            target_P = self._result[start:stop]
            _inject_fault(self.spec)
            sizes = payload_sizes(stop - start, codec)
            header = await link.receive(FrameKind.SUM, piece=piece, sizes=sizes)
            if not exponent_is_valid(header.exponent, codec):
                raise link.violated(f"sent a sum scaled by 2**{header.exponent}")
            if codec == "none":
                await link.receive_into(target_P.data.cast("B"), stop - start)
                decode = partial(check_finite, target_P, link.peer_index)
            else:
                payload = np.empty(header.payload_bytes, np.uint8).data
                await link.receive_into(payload, stop - start)
                if not payload_is_valid(payload, stop - start, codec):
                    raise link.violated("sent a sum whose bytes are not what its codec writes")
                decode = partial(self._decode_sum, header.exponent, payload, target_P, link)
            credit.release()
            await self._off_loop(decode, stop - start)

    def _decode_sum(
        self, exponent: int, payload: memoryview, target_P: Totals, link: MemberLink
    ) -> None:
        target_P[:] = decode_piece(exponent, payload, self.spec.codec, len(target_P))
        check_sum(target_P, self.spec.codec, link.peer_index)

    # ---------------------------------------------------------------------------- as the reducer

    async def _accept_members(
        self,
        arrivals: IncomingStreams,
        work: anyio.abc.TaskGroup,
        pumps: anyio.abc.TaskGroup,
    ) -> None:
        """Take one stream from each other member; refuse repetitions."""
        while self._attendance.to_connect:
            arrival = await arrivals.receive()
            if arrival.sender not in self._attendance.to_connect:
                await arrival.channel.abort()
                continue
            sender = self.spec.members.index(arrival.sender)
            link = MemberLink(arrival.channel, arrival.sender, self.spec, on_failure=self._fail)
            link.bytes_received += HELLO_BYTES
            self._add_link(link, pumps)
            if arrival.hello.sender != sender or arrival.hello.digest != self._digest:
                self._fail(link.violated("was given another plan for this round"))
                return
            link.accepted = True
            self._attendance.to_connect.discard(link.peer)
            self._incoming_links[sender] = link
            work.start_soon(self._guarded, self._serve_member, link)
        self._all_here.set()

    async def _serve_member(self, link: MemberLink) -> None:
        """Read one member's parts of this member's slice, then its BYE."""
        await link.send(FrameKind.ACCEPT)
        member, codec = link.peer_index, self.spec.codec
        part = self._slices[self._me]
        for piece in range(part.pieces):
            start, stop = part.piece(piece)
            sizes = payload_sizes(stop - start, codec)
            header = await link.receive(FrameKind.PIECE, piece=piece, sizes=sizes)
            if piece - self._sums_queued[member] >= self.spec.window_pieces:
                raise link.violated("sent more than its credit")
            if not exponent_is_valid(header.exponent, codec):
                raise link.violated(f"sent a piece scaled by 2**{header.exponent}")
            payload = np.empty(header.payload_bytes, np.uint8).data
            await link.receive_into(payload, stop - start)
            if not payload_is_valid(payload, stop - start, codec):
                raise link.violated("sent a piece whose bytes are not what its codec writes")
            encoded = EncodedPiece(header.exponent, payload)
            if self._received is not None:
                self._received.keep(member, encoded)
            self._inboxes[member][0].send_nowait(encoded)
        await link.receive(FrameKind.BYE)
        if self._sums_queued[member] < part.pieces:
            raise link.violated("said goodbye before it had all sums")
        link.finished = True
        link.finish()
        await link.pumped.wait()
        link.end_wait()

    async def _reduce_own_slice(self) -> None:
        """Sum this member's slice piece by piece, in group order, and send the sums to all
        members."""
        await self._all_here.wait()
        part = self._slices[self._me]
        for piece in range(part.pieces):
            start, stop = part.piece(piece)
            inputs: list[EncodedPiece | None] = []
            for member, (_, inbox) in enumerate(self._inboxes):
                if member == self._me:
                    inputs.append(None)
                    continue
                with self._incoming_links[member].awaited():
                    inputs.append(await inbox.receive())
            reduce = partial(
                reduce_piece,
                self._source[start:stop],
                inputs,
                self.spec.codec,
                self._result[start:stop],
            )
            summed = await self._off_loop(reduce, stop - start)
            for member, link in self._incoming_links.items():
                self._sums_queued[member] += 1
                if piece == part.pieces - 1:
                    # Nothing more is due from here; the member's BYE is due from there.
                    link.sends_heartbeats = False
                # It has to make room for this sum, and after the last one to say goodbye.
                link.begin_wait()
                await link.send(
                    FrameKind.SUM, piece=piece, exponent=summed.exponent, payload=summed.payload
                )
                if piece < part.pieces - 1:
                    link.end_wait()

    async def _off_loop(self, function: Callable[[], T], elements: int) -> T:
        if elements <= INLINE_ELEMENTS:
            return function()
        return await anyio.to_thread.run_sync(function)
