"""The daemon's handle on the averaging worker (trio).

Owns the life of the child: its start, restarts with back-off after a death, planned restarts when
p2pd must run with other options, and its end with the daemon. While there is no worker,
`available` is False, `reason` states the cause, and rounds run in the daemon
(`swarm_client.averaging.handle.host_carrier`), which needs no other process.

Also owns what every new worker has to be sent: the admitted peers, this peer's proof of membership,
the rounds that run in the daemon, and the entrances to the directory. Does not own requests and
answers in general (`swarm_client.ipc.child_rpc`) nor the content of directory records.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import TypeVar

import trio

from swarm_client.averaging.all_reduce.carrier import IncomingStream
from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.handle.bridge import Bridge, OpenChannel
from swarm_client.averaging.handle.options import (
    AveragingOptions,
    persistent_port,
    socket_folder,
)
from swarm_client.averaging.handle.restart_policy import RestartPolicy
from swarm_client.averaging.protocol.addresses import relayed_addresses
from swarm_client.averaging.protocol.messages import (
    AddressesChanged,
    Bootstrap,
    Bootstrapped,
    CancelRound,
    DigestReceived,
    ForgetRounds,
    Found,
    Lookup,
    Ping,
    Publish,
    Published,
    ReceivedDigested,
    RoundDone,
    RoundInDaemon,
    SetAdmittedPeers,
    SetMembership,
    Shutdown,
    Started,
    StartRound,
    Unavailable,
    WorkerMessage,
    worker_messages,
)
from swarm_client.ipc.child_process import ChildProcess, start_child
from swarm_client.ipc.child_rpc import ChildRpc
from swarm_client.ipc.numbered import Numbered, WorkerDied
from swarm_client.machine.memory_limit import OVERHEAD_BYTES, limit_memory
from swarm_shared.base.backoff import Backoff
from swarm_shared.base.errors import LinkClosed, LinkTimeout, SwarmError
from swarm_shared.base.types import LinearDigests

logger = logging.getLogger(__name__)

MODULE = "swarm_client.averaging.worker.main"
FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0
DIED_IN_ROUND_BACKOFF_SECONDS = 20.0
"""Shortest back-off after a death in a round, in seconds. The next attempt at the step should not
find a worker that has just come back and dies again."""
DEATH_SECONDS = 2.0
"""A worker that ends within this many seconds of a failed round is taken to have died in it."""
HEALTHY_SECONDS = 60.0
"""Lifetime of a worker, in seconds, that resets the back-off."""
START_SECONDS = 60.0
"""Time limit of a start, in seconds. Imports are slow on a machine whose cores are all busy."""
RESTART_CHECK_SECONDS = 0.5
"""Seconds between two questions to the restart policy."""
SEND_SECONDS = 5.0
"""Time limit of sending one message, in seconds. The socket holds many messages, so that a worker
that far behind is frozen."""
PING_SECONDS = 1.0
"""Seconds between two pings."""
HUNG_PINGS = 8
"""Pings without any message from a worker after which it has hung. Pings are counted and not
seconds, because time in which the daemon was frozen too does not count."""

DIRECTORY_SECONDS = 20.0
"""Time limit of one directory request, in seconds."""

AnswerT = TypeVar("AnswerT", bound=Numbered)


@dataclass(slots=True, eq=False)
class _Running:
    """The state while a worker serves."""

    rpc: ChildRpc[WorkerMessage]
    started: Started

    @property
    def has_rounds(self) -> bool:
        """Whether a round is in progress in the worker."""
        return any(isinstance(call.message, StartRound) for call in self.rpc.pending)


class _End(Enum):
    """The way in which the last worker ended."""

    PLANNED = auto()
    FAILED = auto()
    IN_ROUND = auto()
    """It died in a round, or just after one that failed."""
    UNUSABLE = auto()
    """No worker can run on this machine."""


@dataclass(frozen=True, slots=True)
class _Absent:
    """The state while no worker serves."""

    reason: str
    end: _End | None = None
    """The end of the last worker; None before the first has ended and while one starts."""


class AveragingWorker:
    """The handle of the averaging worker. Run `run` in a nursery for the life of the daemon."""

    def __init__(self, options: AveragingOptions) -> None:
        self._options = options
        self._bridge = Bridge()
        self._child: ChildProcess[WorkerMessage] | None = None
        self._state: _Running | _Absent = _Absent("the averaging worker has not been started yet")
        self._changed = trio.lowlevel.ParkingLot()
        self._callbacks: list[Callable[[], None]] = []
        self._restart_policy = RestartPolicy()
        self._round_failed_at = -math.inf
        self._held_back = ""
        self._kept: dict[str, Numbered] = {}
        """The latest messages, by name, that every new worker is sent before the first request."""
        self.restarts = 0
        """Number of restarts after a death."""

    # ----------------------------------------------------------------------------------- status

    @property
    def available(self) -> bool:
        """Whether a worker serves; while none does, rounds run in the daemon."""
        return self.started is not None

    @property
    def reason(self) -> str:
        """The cause why no worker is available; empty while one is."""
        return self._held_back or self._state.reason if isinstance(self._state, _Absent) else ""

    @property
    def started(self) -> Started | None:
        """The peer ID and current addresses of p2pd; None while not available."""
        return self._state.started if isinstance(self._state, _Running) else None

    @property
    def pid(self) -> int | None:
        """The process ID of the worker; None without a process."""
        return None if self._child is None else self._child.pid

    def on_change(self, callback: Callable[[], None]) -> None:
        """Register a synchronous callback for changes of `available` and of p2pd's addresses."""
        self._callbacks.append(callback)

    async def settled(self) -> bool:
        """Wait until it is known whether the worker serves, and return that."""
        while (
            isinstance(self._state, _Absent)
            and self._state.end in (None, _End.PLANNED)
            and not self._held_back
        ):
            await self._changed.park()
        return self.available

    # ---------------------------------------------------------------------- state sent to workers

    def reconfigure(self, *, trusted_relays: Sequence[str]) -> None:
        """Run p2pd with these relays from now on.

        A change costs a restart of the worker (`swarm_client.averaging.handle.restart_policy`); the
        rounds meanwhile run in the daemon.
        """
        # Sorted: the same relays in another order are no reason for a restart.
        self._options = replace(self._options, trusted_relays=tuple(sorted(trusted_relays)))

    def hold_back(self, reason: str) -> None:
        """Run no worker and no p2pd while `reason` is not empty. Rounds that are under way end
        first; later ones run in the daemon."""
        if reason != self._held_back:
            self._held_back = reason
            self._notify()

    def set_stream_opener(self, open_channel: OpenChannel) -> None:
        """Set the function that opens streams of the daemon's host for the worker."""
        self._bridge.open_channel = open_channel

    def admit(self, p2pd_peer_ids: tuple[str, ...]) -> None:
        """Set the p2pds that may open streams to this one; none before the first call."""
        self._keep("admitted", SetAdmittedPeers(p2pd_peer_ids=p2pd_peer_ids))

    def set_membership(self, membership: SetMembership) -> None:
        """Set the proof of this peer's membership that the directory requires."""
        self._keep("membership", membership)

    @contextmanager
    def round_in_daemon(self, round_id: str, p2pd_peer_ids: tuple[str, ...]) -> Iterator[None]:
        """Refuse its members' streams to p2pd while this round runs in the daemon."""
        name = f"round {round_id}"
        try:
            self._keep(name, RoundInDaemon(round_id=round_id, p2pd_peer_ids=p2pd_peer_ids))
            yield
        finally:
            del self._kept[name]

    def _keep(self, name: str, message: Numbered) -> None:
        """Send what this and every later worker has to know, unless they know it."""
        if self._kept.get(name) != message:
            self._kept[name] = message
            self._send_if_running(message)

    def _send_if_running(self, message: Numbered) -> None:
        """Send to the worker, if there is one; a later one is sent it at its start."""
        if isinstance(self._state, _Running):
            self._state.rpc.post(message)

    # ----------------------------------------------------------------------------------- requests

    async def run_round(self, request: StartRound) -> RoundDone:
        """Run one attempt at a round. RoundFailed when it fails, also when the worker dies.

        Cancelling the call cancels the round.
        """
        try:
            return await self.call(request, RoundDone, on_cancel=CancelRound)
        except LinkClosed as error:
            raise RoundFailed(
                f"the averaging worker of this peer is away: {error}",
                request.spec.me,
                failure=RoundFailure.CARRIER,
            ) from error
        except RoundFailed:
            self._round_failed_at = trio.current_time()
            raise

    async def digest_received(self, request: DigestReceived) -> LinearDigests:
        """The digests of what the other members put into this member's slice of a round that is
        done. LinkClosed or RoundFailed when the worker does not have it any more."""
        return (await self.call(request, ReceivedDigested)).digests

    def forget_rounds(self) -> None:
        """Drop what the worker keeps of rounds that are done."""
        self._send_if_running(ForgetRounds())

    def hand_over(self, incoming: IncomingStream) -> None:
        """Hand a stream that has come to the daemon's host to its round in the worker."""
        self._bridge.hand_over(incoming)

    async def call(
        self,
        request: Numbered,
        expected: type[AnswerT],
        *,
        on_cancel: type[Numbered] | None = None,
    ) -> AnswerT:
        """Send a request and return its answer. LinkClosed without a worker, or when it dies."""
        if isinstance(self._state, _Absent):
            raise LinkClosed(self.reason)
        try:
            return await self._state.rpc.call(request, expected, on_cancel=on_cancel)
        except WorkerDied as error:
            raise LinkClosed(str(error)) from error

    # ------------------------------------- the directory: NetworkError when it cannot be asked

    async def publish(
        self, key: str, subkey: str, value: bytes, expires_unix_seconds: float
    ) -> bool:
        """Store a signed record; False if no node took it."""
        request = Publish(
            key=key, subkey=subkey, value=value, expires_unix_seconds=expires_unix_seconds
        )
        return (await self._ask_directory(request, Published)).stored

    async def lookup(self, key: str) -> dict[str, bytes]:
        """Find records by subkey. Any member may have stored them: check their signatures."""
        answer = await self._ask_directory(Lookup(key=key), Found)
        return {record.subkey: record.value for record in answer.records}

    async def bootstrap(self, initial_peers: tuple[str, ...]) -> int:
        """Enter the directory through these (…/p2p/ID) too; returns how many of them answered."""
        # A later worker is sent it too; its answer is not awaited: the directory is a convenience.
        request = self._kept["bootstrap"] = Bootstrap(initial_peers=initial_peers)
        return (await self._ask_directory(request, Bootstrapped)).reached

    async def _ask_directory(self, request: Numbered, expected: type[AnswerT]) -> AnswerT:
        with trio.move_on_after(DIRECTORY_SECONDS):
            return await self.call(request, expected)
        raise LinkTimeout(f"the directory did not answer within {DIRECTORY_SECONDS:g} s")

    # ------------------------------------------------------------------------- the child's life

    async def run(self) -> None:
        """Keep a worker alive until cancelled; returns if none can run on this machine."""
        if importlib.util.find_spec("hivemind") is None:
            self._give_up("hivemind is not installed here; all-reduce goes over libp2p")
            return
        async with self._bridge.running():
            await self._keep_alive()

    async def _keep_alive(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        while True:
            while self._held_back:
                await self._changed.park()
            began_at = trio.current_time()
            ended = await self._run_once()
            if ended.end is _End.UNUSABLE:
                self._give_up(ended.reason)
                return
            if ended.end is _End.PLANNED:
                continue
            if trio.current_time() - began_at > HEALTHY_SECONDS:
                backoff.reset()
            if ended.end is _End.IN_ROUND:
                backoff.seconds = max(backoff.seconds, DIED_IN_ROUND_BACKOFF_SECONDS)
            self.restarts += 1
            self._enter(ended)
            logger.warning("%s; starting it again in %g s", ended.reason, backoff.seconds)
            await trio.sleep(backoff.next())

    async def _run_once(self) -> _Absent:
        """Run one worker from its start to its end; return how that ended."""
        folder = self._options.folder
        log_path = folder / "worker.log"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            port = persistent_port(folder / "p2pd.port")
            with socket_folder(folder) as sockets:
                async with (
                    self._bridge.listening(sockets),
                    start_child(
                        MODULE,
                        incoming=worker_messages,
                        log_path=log_path,
                        # Memory speed bounds its sums; more threads would only take cores away.
                        environment={"OMP_NUM_THREADS": "1", "HIVEMIND_COLORS": "0"},
                    ) as child,
                ):
                    self._child = child
                    try:
                        return await self._serve_child(child, port, sockets)
                    finally:
                        self._child = None
        except (SwarmError, OSError) as error:
            return _Absent(f"the averaging worker cannot be run: {error}", _End.FAILED)

    async def _serve_child(
        self, child: ChildProcess[WorkerMessage], port: int, sockets: Path
    ) -> _Absent:
        self._state = _Absent("the averaging worker is starting")
        options = self._options
        try:
            with trio.fail_after(START_SECONDS):
                await child.link.send(options.configuration(port, sockets))
                first = await child.link.receive()
        except trio.TooSlowError:
            return _Absent(
                f"the averaging worker did not start within {START_SECONDS:g} s", _End.FAILED
            )
        if isinstance(first, Unavailable):
            return _Absent(first.reason, _End.UNUSABLE if first.permanent else _End.FAILED)
        if not isinstance(first, Started):
            return _Absent(
                f"the averaging worker ended at its start; see {child.log_path}", _End.FAILED
            )
        if options.memory_bytes is not None:
            # p2pd is a process of its own and has started: it is not limited.
            limit_memory(child.pid, options.memory_bytes + OVERHEAD_BYTES)
        rpc = ChildRpc(child, "the averaging worker", send_seconds=SEND_SECONDS)
        running = _Running(rpc, first)
        for kept in self._kept.values():
            rpc.post(kept)
        self._enter(running)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rpc.send_all)
                nursery.start_soon(self._restart_when_needed, running, options)
                nursery.start_soon(self._kill_when_hung, rpc)
                while (message := await rpc.receive()) is not None:
                    if isinstance(message, AddressesChanged):
                        running.started = first.model_copy(update={"addresses": message.addresses})
                        self._notify()
                nursery.cancel_scope.cancel()
        finally:
            rpc.close()
            ended = self._end_of(running)
            self._enter(ended)
        return ended

    def _end_of(self, running: _Running) -> _Absent:
        if isinstance(self._state, _Absent):
            return self._state  # it was shut down
        # Streams break before the death of their p2pd is noticed, and the worker ends after that.
        just_failed = trio.current_time() - self._round_failed_at < DEATH_SECONDS
        in_round = running.has_rounds or just_failed
        return _Absent(str(running.rpc.died()), _End.IN_ROUND if in_round else _End.FAILED)

    async def _restart_when_needed(self, running: _Running, options: AveragingOptions) -> None:
        """Shut this worker down when p2pd, which runs with `options`, should be restarted."""
        reason = ""
        while not reason:
            await trio.sleep(RESTART_CHECK_SECONDS)
            if self._held_back and not running.has_rounds:
                reason = self._held_back
                break
            current_addresses = running.started.addresses
            reason = self._restart_policy.restart_reason(
                trio.current_time(),
                differs=self._options != options,
                misses_relay=any(
                    address not in current_addresses
                    for address in relayed_addresses(options.trusted_relays)
                ),
                busy=running.has_rounds,
            )
        what_follows = "stays away" if self._held_back else "is started again"
        logger.info("%s; the averaging worker %s", reason, what_follows)
        # From here on rounds begin in the daemon.
        self._state = _Absent(reason, _End.PLANNED)
        running.rpc.post(Shutdown())

    async def _kill_when_hung(self, rpc: ChildRpc[WorkerMessage]) -> None:
        """Kill a frozen worker, in which every round would run into its time limit."""
        unanswered = 0
        while unanswered < HUNG_PINGS:
            received = rpc.received
            rpc.post(Ping())
            await trio.sleep(PING_SECONDS)
            unanswered = unanswered + 1 if rpc.received == received else 0
        logger.warning("the averaging worker answers nothing and is ended")
        rpc.kill("it answered nothing")

    def _give_up(self, reason: str) -> None:
        logger.info("%s", reason)
        self._enter(_Absent(reason, _End.UNUSABLE))

    def _enter(self, state: _Running | _Absent) -> None:
        self._state = state
        self._notify()

    def _notify(self) -> None:
        self._changed.unpark_all()
        for callback in self._callbacks:
            callback()
