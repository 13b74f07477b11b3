"""The averaging worker as the daemon sees it. trio.

Owns the child's life: started, awaited, restarted with back-off when it dies, or anew when p2pd
must be run in another way, ended with the daemon. While it is away `available` is False and says
why, and rounds run in the daemon (libp2p_carrier), which needs no other process.

What a worker has to know is kept here and told to each new one: who may open streams to it, what
it shows in the directory, and through whom it enters that.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import trio

from swarm_client.averaging.all_reduce.carrier import IncomingStream
from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.handle.bridge import Bridge, OpenChannel
from swarm_client.averaging.handle.directory_requests import DirectoryRequests
from swarm_client.averaging.handle.listen_port import persistent_port
from swarm_client.averaging.handle.options import AveragingOptions
from swarm_client.averaging.handle.requests import Requests, round_failed
from swarm_client.averaging.handle.restart_policy import RestartPolicy
from swarm_client.averaging.handle.worker_folder import rotate_log, socket_folder
from swarm_client.averaging.protocol.addresses import relayed_addresses
from swarm_client.averaging.protocol.messages import (
    AddressesChanged,
    Bootstrap,
    Bootstrapped,
    CancelRound,
    DirectoryRequestFailed,
    Found,
    Ping,
    Pong,
    Published,
    RoundDone,
    RoundFailureReport,
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
from swarm_shared.base.backoff import Backoff
from swarm_shared.base.errors import LinkClosed, NetworkError, SwarmError
from swarm_shared.base.frozen_model import FrozenModel

logger = logging.getLogger(__name__)

MODULE = "swarm_client.averaging.worker.main"
FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0
DIED_IN_ROUND_BACKOFF_SECONDS = 20.0
"""The next attempt at the step should find it away, and not just back to die again."""
DEATH_SECONDS = 2.0
"""A worker that ends so soon after a failed round has probably ended through it."""
HEALTHY_SECONDS = 60.0
"""A worker that lived this long starts the back-off anew."""
START_SECONDS = 60.0
"""Importing on a machine whose cores are all busy takes its time."""
RESTART_CHECK_SECONDS = 0.5
PING_SECONDS = 1.0
HUNG_PINGS = 8
"""So many pings without any word from a worker, and it has hung. Pings are counted, not seconds: a
daemon that was frozen with it holds that time against nobody."""


class AveragingWorker:
    """Run `run` in a nursery for as long as the daemon lives."""

    def __init__(self, options: AveragingOptions) -> None:
        self._options = options
        self._port: int | None = None
        self._bridge = Bridge()
        self._requests = Requests()
        self.directory = DirectoryRequests(self._requests, self._ask, lambda: self.available)
        self._child: ChildProcess[WorkerMessage] | None = None
        self._started: Started | None = None
        self._listens = False
        """It can be told things. Only what has been told all that it must know is `available`."""
        self._reason = "the averaging worker has not been started yet"
        self._changed = trio.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._restart_policy = RestartPolicy()
        self._planned_end = False
        self._died_in_round = False
        self._round_failed_at = -math.inf
        self._pings = 0
        """Sent since the last word of the worker."""
        self._permanent = False
        self._admitted = SetAdmittedPeers(p2pd_peer_ids=())
        self._membership: SetMembership | None = None
        self._held_back = ""
        self._rounds_in_daemon: dict[str, RoundInDaemon] = {}
        self.restarts = 0
        """How often the worker had to be started again, for the status display."""

    # ----------------------------------------------------------------------------------- status

    @property
    def available(self) -> bool:
        return self._started is not None

    @property
    def reason(self) -> str:
        """Why it is not available; empty when it is."""
        return "" if self._started else self._reason

    @property
    def started(self) -> Started | None:
        """p2pd's peer ID and its addresses as they are now, while available."""
        return self._started

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def listening_port(self) -> int | None:
        """The TCP port of p2pd, which a router may be asked to map; None before the first start."""
        return self._port

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back, synchronously, when the worker came, went, or p2pd is found
        round_in_daemon."""
        self._callbacks.append(callback)

    async def settled(self) -> bool:
        """Wait until it is known whether the worker serves: True, or False for good reason."""
        while not (self.available or self._permanent or self.restarts or self._held_back):
            await self._changed.wait()
        return self.available

    async def wait_until_available(self) -> Started:
        """Wait for the worker. NetworkError when it can never serve on this machine."""
        while self._started is None:
            if self._permanent:
                raise NetworkError(self._reason)
            await self._changed.wait()
        return self._started

    # ---------------------------------------------------------------------------- what it is told

    def reconfigure(
        self, *, trusted_relays: Sequence[str], announce_addresses: Sequence[str] = ()
    ) -> None:
        """Run p2pd with these from now on. A change costs a restart of the worker (restart_policy);
        the rounds meanwhile run in the daemon."""
        # Sorted: the same relays in another order are no reason to restart anything.
        self._options = replace(
            self._options,
            trusted_relays=tuple(sorted(trusted_relays)),
            announce_addresses=tuple(sorted(announce_addresses)),
        )

    def hold_back(self, reason: str) -> None:
        """Run no worker and no p2pd, for this reason, until it is called without one. Rounds that
        are under way end first; the next ones run in the daemon."""
        if reason == self._held_back:
            return
        self._held_back = reason
        if reason and not self._started:
            self._reason = reason
        self._notify()

    def set_stream_opener(self, open_channel: OpenChannel) -> None:
        """How streams of the daemon's host are opened for the worker."""
        self._bridge.open_channel = open_channel

    async def admit(self, p2pd_peer_ids: tuple[str, ...]) -> None:
        """Whose p2pd may open streams to this one; nobody's until this is called."""
        if p2pd_peer_ids != self._admitted.p2pd_peer_ids:
            self._admitted = SetAdmittedPeers(p2pd_peer_ids=p2pd_peer_ids)
            await self._send_if_running(self._admitted)

    async def set_membership(self, membership: SetMembership) -> None:
        """What proves to others in the directory that this peer belongs to the run."""
        if membership != self._membership:
            self._membership = membership
            await self._send_if_running(membership)

    @asynccontextmanager
    async def round_in_daemon(
        self, round_id: str, p2pd_peer_ids: tuple[str, ...]
    ) -> AsyncIterator[None]:
        """While this round runs in the daemon, its members' streams to p2pd are turned away."""
        message = self._rounds_in_daemon[round_id] = RoundInDaemon(
            round_id=round_id, p2pd_peer_ids=p2pd_peer_ids
        )
        try:
            await self._send_if_running(message)
            yield
        finally:
            del self._rounds_in_daemon[round_id]

    async def _send_if_running(self, message: FrozenModel) -> None:
        """Tell the worker, if there is one; the next one is told at its start."""
        if self._child is not None and self._listens:
            with contextlib.suppress(LinkClosed):
                await self._requests.send(self._child, message)

    # ----------------------------------------------------------------------------------- rounds

    async def run_round(self, request: StartRound) -> RoundDone:
        """Carry out one attempt. RoundFailed when it fails, also when the worker dies.

        Cancelling it calls the round off.
        """
        finished = False
        try:
            answer = await self._ask(request.round_id, request)
            finished = True
        except LinkClosed as error:
            raise RoundFailed(
                f"the averaging worker of this peer is away: {error}",
                request.me,
                failure=RoundFailure.CARRIER,
            ) from error
        finally:
            if not finished:
                with trio.CancelScope(shield=True):
                    await self.abort(request.round_id)
        match answer:
            case RoundDone():
                return answer
            case RoundFailureReport():
                self._round_failed_at = trio.current_time()
                raise round_failed(answer)
        raise AssertionError(f"a round was answered by {answer.kind}")

    def hand_over(self, incoming: IncomingStream) -> None:
        """Give a round in the worker a stream that has come to the daemon's host."""
        self._bridge.hand_over(incoming)

    async def abort(self, round_id: str, reason: str = "the round was called off") -> None:
        """Cut a round short: run_round then raises RoundFailed. Harmless if it has ended."""
        await self._send_if_running(CancelRound(round_id=round_id, reason=reason))

    async def _ask(self, key: str | int, message: FrozenModel) -> WorkerMessage:
        child = self._child
        if child is None or self._started is None:
            raise LinkClosed(self._reason)
        return await self._requests.ask(child, key, message)

    # ------------------------------------------------------------------------- the child's life

    async def run(self) -> None:
        """Keep a worker alive until cancelled; returns when there can be none."""
        if importlib.util.find_spec("hivemind") is None:
            self._give_up("hivemind is not installed here; all-reduce goes over libp2p")
            return
        async with self._bridge.running():
            await self._keep_alive()

    async def _keep_alive(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        while True:
            while self._held_back:
                self._reason = self._held_back
                await self._changed.wait()
            begun = trio.current_time()
            self._planned_end = self._died_in_round = False
            await self._run_once()
            if self._permanent:
                return
            if self._planned_end:
                continue
            if trio.current_time() - begun > HEALTHY_SECONDS:
                backoff.reset()
            if self._died_in_round:
                backoff.seconds = max(backoff.seconds, DIED_IN_ROUND_BACKOFF_SECONDS)
            self.restarts += 1
            self._notify()
            logger.warning("%s; starting it again in %g s", self._reason, backoff.seconds)
            await trio.sleep(backoff.next())

    async def _run_once(self) -> None:
        """One worker from its start to its end. Its troubles end in `reason`."""
        folder = self._options.folder
        log_path = folder / "worker.log"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            rotate_log(log_path)
            port = self._port = persistent_port(folder / "p2pd.port")
            with socket_folder(folder) as sockets:
                async with (
                    self._bridge.listening(sockets),
                    start_child(
                        MODULE,
                        (),
                        incoming=worker_messages,
                        log_path=log_path,
                        # Its arrays are summed by memory speed; more threads only take cores away.
                        environment={"OMP_NUM_THREADS": "1", "HIVEMIND_COLORS": "0"},
                    ) as child,
                ):
                    try:
                        await self._serve_child(child, port, sockets)
                        with contextlib.suppress(LinkClosed):
                            await child.link.send(Shutdown())
                    finally:
                        self._child_ended()
        except (SwarmError, OSError) as error:
            self._reason = f"the averaging worker cannot be run: {error}"

    async def _serve_child(
        self, child: ChildProcess[WorkerMessage], port: int, sockets: Path
    ) -> None:
        self._child = child
        self._reason = "the averaging worker is starting"
        options = self._options
        try:
            with trio.fail_after(START_SECONDS):
                await child.link.send(options.configuration(port, sockets))
                first = await child.link.receive()
        except trio.TooSlowError:
            self._reason = f"the averaging worker did not start within {START_SECONDS:g} s"
            return
        match first:
            case Started():
                self._listens = True
                await self._send_initial_state()
                self._started = first
            case Unavailable():
                self._reason = first.reason
                if first.permanent:
                    self._give_up(first.reason)
                return
            case _:
                self._reason = f"the averaging worker ended at its start; see {child.log_path}"
                return
        self._notify()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._restart_when_needed, child, options)
            nursery.start_soon(self._end_when_hung, child)
            while (message := await child.link.receive()) is not None:
                self._pings = 0
                self._deliver(message)
            nursery.cancel_scope.cancel()
        if not self._planned_end:
            self._reason = f"the averaging worker has ended; see {child.log_path}"

    async def _send_initial_state(self) -> None:
        """What is told to a worker before anything is asked of it."""
        for message in (self._admitted, self._membership, *self._rounds_in_daemon.values()):
            if message is not None:
                await self._send_if_running(message)
        bootstrap_peers = self.directory.bootstrap_peers
        if bootstrap_peers:
            # Nobody waits for the answer: the directory is a convenience.
            number = self._requests.new_number()
            await self._send_if_running(Bootstrap(request=number, initial_peers=bootstrap_peers))

    async def _restart_when_needed(
        self, child: ChildProcess[WorkerMessage], running: AveragingOptions
    ) -> None:
        """Ask this worker to end when p2pd is worth starting again."""
        reason = ""
        while not reason:
            await trio.sleep(RESTART_CHECK_SECONDS)
            if self._held_back and not self._requests.has_rounds:
                reason = self._held_back
                break
            reason = self._restart_policy.restart_reason(
                trio.current_time(),
                differs=self._options != running,
                misses_relay=self._misses_relay(running),
                busy=self._requests.has_rounds,
            )
        then = "stays away" if self._held_back else "is started again"
        logger.info("%s; the averaging worker %s", reason, then)
        # From here on rounds begin in the daemon.
        self._started, self._listens = None, False
        self._planned_end, self._reason = True, reason
        with contextlib.suppress(LinkClosed):
            await self._requests.send(child, Shutdown())

    async def _end_when_hung(self, child: ChildProcess[WorkerMessage]) -> None:
        """A worker that is frozen would let every round that it is asked for run out of time."""
        self._pings = 0
        with contextlib.suppress(LinkClosed):
            while self._pings < HUNG_PINGS:
                self._pings += 1
                await self._requests.send(child, Ping())
                await trio.sleep(PING_SECONDS)
        if self._pings >= HUNG_PINGS:
            logger.warning("the averaging worker answers nothing and is ended")
            child.kill()

    def _misses_relay(self, running: AveragingOptions) -> bool:
        known = self._started.addresses if self._started is not None else ()
        return any(address not in known for address in relayed_addresses(running.trusted_relays))

    def _deliver(self, message: WorkerMessage) -> None:
        match message:
            case RoundDone() | RoundFailureReport():
                self._requests.answered(message.round_id, message)
            case Published() | Found() | Bootstrapped() | DirectoryRequestFailed():
                self._requests.answered(message.request, message)
            case AddressesChanged():
                if self._started is not None:
                    moved = {"addresses": message.addresses}
                    self._started = self._started.model_copy(update=moved)
                    self._notify()
            case Pong():
                pass
            case _:
                raise AssertionError(f"the worker said {message.kind} in the middle of its life")

    def _child_ended(self) -> None:
        self._child = None
        self._started, self._listens = None, False
        # Streams break before their p2pd is found dead, and the worker ends after that.
        just_failed = trio.current_time() - self._round_failed_at < DEATH_SECONDS
        self._died_in_round = self._requests.has_rounds or just_failed
        self._requests.worker_gone()
        self._notify()

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._permanent = True
        logger.info("%s", reason)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        for callback in self._callbacks:
            callback()
