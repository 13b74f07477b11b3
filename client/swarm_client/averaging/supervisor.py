"""The averaging worker as the daemon sees it. trio.

Owns the child's life: started, awaited, restarted with back-off when it dies, ended with the
daemon. While it is away `available` is False and says why, and the daemon uses the second carrier
(libp2p_carrier), which needs no other process.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trio

from swarm_client.averaging.errors import RoundFailed, RoundFailure
from swarm_client.averaging.protocol import (
    AbortRound,
    Bootstrap,
    Bootstrapped,
    Configure,
    Found,
    Lookup,
    Publish,
    Published,
    Record,
    RequestFailed,
    RoundDone,
    Shutdown,
    Started,
    StartRound,
    Unavailable,
    WorkerMessage,
    worker_messages,
)
from swarm_client.averaging.protocol import RoundFailure as RoundFailureMessage
from swarm_client.child import Child, start_child
from swarm_shared.errors import LinkClosed, LinkTimeout, NetworkError, SwarmError
from swarm_shared.model_config import FrozenModel

logger = logging.getLogger(__name__)

MODULE = "swarm_client.averaging.hivemind_worker"
FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 60.0
HEALTHY_SECONDS = 60.0
"""A worker that lived this long starts the back-off anew."""
START_SECONDS = 60.0
"""Importing on a machine whose cores are all busy takes its time."""
SEND_SECONDS = 5.0
"""The socket takes many messages before it is full; a worker that long behind is frozen."""
DIRECTORY_SECONDS = 20.0
MAX_LOG_BYTES = 4 * 2**20
# A unix socket's path has at most 107 bytes on Linux; hivemind's names take 34 of them.
_MAX_FOLDER_CHARACTERS = 70

MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True)
class AveragingOptions:
    """Where the worker lives and how its p2pd is reached."""

    home: Path
    """The volunteer's folder: key, sockets and log go into `home/averaging`."""
    host_addresses: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce_addresses: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    map_port_on_router: bool = False
    trusted_relays: tuple[str, ...] = ()


class _Waiter:
    """One answer that somebody waits for."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._answer: WorkerMessage | None = None

    def answer(self, message: WorkerMessage | None) -> None:
        """None: the worker is gone."""
        self._answer = message
        self._event.set()

    async def wait(self) -> WorkerMessage | None:
        await self._event.wait()
        return self._answer


class AveragingWorker:
    """Run `run` in a nursery for as long as the daemon lives."""

    def __init__(self, options: AveragingOptions) -> None:
        self._options = options
        self._folder = options.home / "averaging"
        self._child: Child[WorkerMessage] | None = None
        self._started: Started | None = None
        self._reason = "the averaging worker has not been started yet"
        self._changed = trio.Event()
        self._sending = trio.Lock()
        self._waiting: dict[str | int, _Waiter] = {}
        self._next_request = 0
        self._permanent = False
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
        """p2pd's peer ID and addresses, while available."""
        return self._started

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def settled(self) -> bool:
        """Wait until it is known whether the worker serves: True, or False for good reason."""
        while not self.available and not self._permanent and not self.restarts:
            await self._changed.wait()
        return self.available

    async def wait_until_available(self) -> Started:
        """Wait for the worker. NetworkError when it can never serve on this machine."""
        while self._started is None:
            if self._permanent:
                raise NetworkError(self._reason)
            await self._changed.wait()
        return self._started

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
                failure=RoundFailure.UNREACHABLE,
            ) from error
        finally:
            if not finished:
                with trio.CancelScope(shield=True):
                    await self.abort(request.round_id)
        match answer:
            case RoundDone():
                return answer
            case RoundFailureMessage():
                raise RoundFailed(
                    answer.reason,
                    answer.culprit,
                    failure=answer.failure,
                    told_by=answer.told_by,
                )
        raise AssertionError(f"a round was answered by {answer.kind}")

    async def abort(self, round_id: str, reason: str = "the round was called off") -> None:
        """Cut a round short: run_round then raises RoundFailed. Harmless if it has ended."""
        child = self._child
        if child is not None:
            with contextlib.suppress(LinkClosed):
                await self._send(child, AbortRound(round_id=round_id, reason=reason))

    # -------------------------------------------------------------------------------- directory

    async def publish(
        self, key: str, subkey: str, value: bytes, expires_unix_seconds: float
    ) -> bool:
        """Store a signed record in the directory. NetworkError when it cannot be asked."""
        request = self._new_request()
        encoded = base64.b64encode(value).decode()
        message = Publish(
            request=request,
            key=key,
            subkey=subkey,
            value_base64=encoded,
            expires_unix_seconds=expires_unix_seconds,
        )
        return (await self._ask_directory(request, message, Published)).stored

    async def lookup(self, key: str) -> dict[str, bytes]:
        """Records by subkey, as strangers may have stored them: check their signatures."""
        request = self._new_request()
        found = await self._ask_directory(request, Lookup(request=request, key=key), Found)
        return {record.subkey: _value(record) for record in found.records}

    async def bootstrap(self, initial_peers: tuple[str, ...]) -> int:
        """Enter the directory through these (…/p2p/ID) too; how many of them answered."""
        request = self._new_request()
        message = Bootstrap(request=request, initial_peers=initial_peers)
        return (await self._ask_directory(request, message, Bootstrapped)).reached

    def _new_request(self) -> int:
        self._next_request += 1
        return self._next_request

    async def _ask_directory(
        self, request: int, message: Publish | Lookup | Bootstrap, expected: type[MessageT]
    ) -> MessageT:
        with trio.move_on_after(DIRECTORY_SECONDS):
            answer = await self._ask(request, message)
            if isinstance(answer, expected):
                return answer
            assert isinstance(answer, RequestFailed)
            raise NetworkError(f"the directory did not answer: {answer.reason}")
        raise LinkTimeout(f"the directory did not answer within {DIRECTORY_SECONDS:g} s")

    async def _ask(
        self, key: str | int, message: StartRound | Publish | Lookup | Bootstrap
    ) -> WorkerMessage:
        child = self._child
        if child is None or self._started is None:
            raise LinkClosed(self._reason)
        if key in self._waiting:
            raise RoundFailed(
                f"round {key} was started twice; each attempt needs its own name",
                failure=RoundFailure.STOPPED,
            )
        waiter = self._waiting[key] = _Waiter()
        try:
            await self._send(child, message)
            answer = await waiter.wait()
        finally:
            del self._waiting[key]
        if answer is None:
            raise LinkClosed(self._reason)
        return answer

    async def _send(self, child: Child[WorkerMessage], message: FrozenModel) -> None:
        """One message at a time, and whole: half a message would be the last one understood."""
        async with self._sending:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + SEND_SECONDS):
                await child.link.send(message)
                return
        child.kill()
        raise LinkClosed("the averaging worker takes no messages any more")

    # ------------------------------------------------------------------------- the child's life

    async def run(self) -> None:
        """Keep a worker alive until cancelled; returns when there can be none."""
        if importlib.util.find_spec("hivemind") is None:
            self._give_up("hivemind is not installed here; all-reduce goes over libp2p")
            return
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while True:
            begun = trio.current_time()
            await self._run_once()
            if self._permanent:
                return
            if trio.current_time() - begun > HEALTHY_SECONDS:
                backoff_seconds = FIRST_BACKOFF_SECONDS
            self.restarts += 1
            self._notify()
            logger.warning("%s; starting it again in %g s", self._reason, backoff_seconds)
            await trio.sleep(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, LONGEST_BACKOFF_SECONDS)

    async def _run_once(self) -> None:
        """One worker from its start to its end. Its troubles end in `reason`."""
        log_path = self._folder / "worker.log"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _shorten(log_path)
            with _socket_folder(self._folder) as sockets:
                async with start_child(
                    MODULE,
                    (),
                    incoming=worker_messages,
                    log_path=log_path,
                    # Its arrays are summed by memory speed; more threads only take cores away.
                    environment={"OMP_NUM_THREADS": "1", "HIVEMIND_COLORS": "0"},
                ) as child:
                    try:
                        await self._converse(child, sockets)
                        with contextlib.suppress(LinkClosed):
                            await child.link.send(Shutdown())
                    finally:
                        self._gone()
        except (SwarmError, OSError) as error:
            self._reason = f"the averaging worker cannot be run: {error}"

    async def _converse(self, child: Child[WorkerMessage], sockets: Path) -> None:
        self._child = child
        self._reason = "the averaging worker is starting"
        try:
            with trio.fail_after(START_SECONDS):
                await child.link.send(self._configuration(sockets))
                first = await child.link.receive()
        except trio.TooSlowError:
            self._reason = f"the averaging worker did not start within {START_SECONDS:g} s"
            return
        match first:
            case Started():
                self._started = first
                self._notify()
            case Unavailable():
                self._reason = first.reason
                if first.permanent:
                    self._give_up(first.reason)
                return
            case _:
                self._reason = f"the averaging worker ended at its start; see {child.log_path}"
                return
        while (message := await child.link.receive()) is not None:
            self._deliver(message)
        self._reason = f"the averaging worker has ended; see {child.log_path}"

    def _configuration(self, sockets: Path) -> Configure:
        options = self._options
        return Configure(
            identity_path=str(self._folder / "p2pd.key"),
            socket_folder=str(sockets),
            host_addresses=options.host_addresses,
            announce_addresses=options.announce_addresses,
            initial_peers=options.initial_peers,
            map_port_on_router=options.map_port_on_router,
            trusted_relays=options.trusted_relays,
        )

    def _deliver(self, message: WorkerMessage) -> None:
        key: str | int
        match message:
            case RoundDone() | RoundFailureMessage():
                key = message.round_id
            case Published() | Found() | Bootstrapped() | RequestFailed():
                key = message.request
            case _:
                raise AssertionError(f"the worker said {message.kind} in the middle of its life")
        waiter = self._waiting.get(key)
        if waiter is not None:  # nobody waits any more for what was called off
            waiter.answer(message)

    def _gone(self) -> None:
        self._child = None
        self._started = None
        for waiter in self._waiting.values():
            waiter.answer(None)
        self._notify()

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._permanent = True
        logger.info("%s", reason)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _value(record: Record) -> bytes:
    return base64.b64decode(record.value_base64)


def _shorten(log_path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if log_path.stat().st_size > MAX_LOG_BYTES:
            log_path.replace(log_path.with_suffix(".log.1"))


@contextlib.contextmanager
def _socket_folder(home: Path) -> Iterator[Path]:
    """A private folder for p2pd's sockets, whose paths must be short and plain."""
    own = home.absolute() / "s"
    if len(str(own)) <= _MAX_FOLDER_CHARACTERS and re.fullmatch(r"[A-Za-z0-9_./-]+", str(own)):
        # What a killed daemon left in it goes first.
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(mode=0o700)
    else:
        own = Path(tempfile.mkdtemp(prefix="swarm-"))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
