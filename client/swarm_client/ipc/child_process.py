"""Child processes of the daemon and the message link to them.

Owns how a child is started (inherited socketpair, log file, process group of its own), how it ends
with its parent, and links that carry `swarm_shared.base.json_messages` over the socket: `SyncLink`
for a blocking child, `TrioLink` for the daemon. Does not own requests and answers
(`swarm_client.ipc.child_rpc`) nor tensors, which cross in shared memory
(`swarm_client.ipc.shared_memory`).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, NoReturn

import anyio.to_thread
import trio
from pydantic import TypeAdapter

from swarm_client.ipc.parent_death import end_with_parent
from swarm_shared.base.errors import LinkClosed
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import MessageT, PrefixedDecoder, encode_prefixed
from swarm_shared.host.python_modules import module_command

RECEIVE_BYTES = 64 * 2**10
"""Largest read from the socket, in bytes."""

MAX_POLL_SECONDS = 24 * 3600.0
"""Longest wait given to poll, which counts milliseconds in 32 bits."""
MAX_LOG_BYTES = 4 * 2**20
"""Size of a child's log, in bytes, above which the next child begins another one."""
CLOSE_GRACE_SECONDS = 3.0
"""Seconds that a child has to end once its socket is closed. A computing worker notices the closing
only after its computation."""


class SyncLink(Generic[MessageT]):
    """The child's side of the link; every call blocks."""

    def __init__(self, endpoint: socket.socket, incoming: TypeAdapter[MessageT]) -> None:
        endpoint.setblocking(True)
        self._socket = endpoint
        self._decoder = PrefixedDecoder(incoming)
        self._ready: MessageT | None = None
        self._poll = select.poll()
        self._poll.register(endpoint, select.POLLIN)

    def send(self, message: FrozenModel) -> None:
        """Send a message, blocking while the socket is full. LinkClosed after the daemon's end."""
        try:
            self._socket.sendall(encode_prefixed(message))
        except (BrokenPipeError, ConnectionError) as error:
            raise LinkClosed("the daemon that started this process has ended") from error

    def has_message(self, wait_seconds: float = 0.0) -> bool:
        """Wait at most `wait_seconds` and return whether `receive` would return at once, with a
        message or at the end of the link."""
        if self._ready is None:
            self._ready = self._decoder.next_message()
        # A readable socket may hold half a message; the other half is on its way.
        if self._ready is not None:
            return True
        return bool(self._poll.poll(math.ceil(1000 * min(wait_seconds, MAX_POLL_SECONDS))))

    def receive(self) -> MessageT | None:
        """Wait for the next message; None when the daemon has closed the link or died."""
        while self._ready is None:
            self._ready = self._decoder.next_message()
            if self._ready is not None:
                break
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except ConnectionError:
                return None
            if not data:
                self._decoder.finish()
                return None
            self._decoder.feed(data)
        message, self._ready = self._ready, None
        return message

    def close(self) -> None:
        self._socket.close()


class TrioLink(Generic[MessageT]):
    """The daemon's side of the link. One task may send and one receive at a time."""

    def __init__(self, endpoint: socket.socket, incoming: TypeAdapter[MessageT]) -> None:
        endpoint.setblocking(False)
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(endpoint))
        self._decoder = PrefixedDecoder(incoming)

    async def send(self, message: FrozenModel) -> None:
        """Send a message. LinkClosed when the child has ended."""
        try:
            await self._stream.send_all(encode_prefixed(message))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkClosed("the child process has closed its link") from error

    async def receive(self) -> MessageT | None:
        """Wait for the next message; None when the child has closed the link or died."""
        while True:
            message = self._decoder.next_message()
            if message is not None:
                await trio.lowlevel.checkpoint()
                return message
            try:
                data = await self._stream.receive_some(RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not data:
                self._decoder.finish()
                return None
            self._decoder.feed(data)

    async def aclose(self) -> None:
        await self._stream.aclose()


# ------------------------------------------------------------------------------ in the child


def _exit_on_signal(number: int, _frame: object) -> NoReturn:
    # SystemExit lets `finally` clauses unlink shared memory. Further signals are ignored, because
    # they would cut these clauses short.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def prepare_child_process() -> None:
    """Make this process end with its parent and ignore Ctrl-C. The first call of a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    # On other systems, and if the parent died before this line, the end of the socket does it.
    end_with_parent(signal.SIGTERM)


def inherited_link(descriptor: int, incoming: TypeAdapter[MessageT]) -> SyncLink[MessageT]:
    """Return the link over the socket that the parent passed as `--fd`."""
    return SyncLink(socket.socket(fileno=descriptor), incoming)


# ----------------------------------------------------------------------------- in the daemon


@dataclass(frozen=True, slots=True, eq=False)
class ChildProcess(Generic[MessageT]):
    """A running child process and the link to it."""

    link: TrioLink[MessageT]
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait(self) -> int:
        """Wait for the child's end; returns its exit status, negative for a fatal signal."""
        return await anyio.to_thread.run_sync(
            self.process.wait, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
        )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


def _opened_log(path: Path) -> BinaryIO:
    """A long log is renamed to `.log.1`, in place of the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


@asynccontextmanager
async def start_child(
    module: str,
    *,
    incoming: TypeAdapter[MessageT],
    log_path: Path,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[ChildProcess[MessageT]]:
    """Run `python -m module --fd N`; on leaving, the child is dead and reaped.

    Leaving closes the socket, which ends a child that listens, and kills it after
    CLOSE_GRACE_SECONDS. Its output is appended to `log_path`; `environment` is added to ours.
    """
    own_end, child_end = socket.socketpair()
    try:
        with child_end, _opened_log(log_path) as log:
            # Popen runs here and not in a helper thread (as trio.open_process does): the death
            # signal of prctl fires when the *thread* that started the child ends.
            process = subprocess.Popen(
                module_command(module, "--fd", str(child_end.fileno())),
                pass_fds=(child_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=None if environment is None else {**os.environ, **environment},
                # Its own process group: a terminal's Ctrl-C reaches the daemon only.
                process_group=0,
            )
    except BaseException:
        own_end.close()
        raise
    child = ChildProcess(TrioLink(own_end, incoming), process, log_path)
    try:
        yield child
    finally:
        with trio.CancelScope(shield=True):
            await child.link.aclose()
            with trio.move_on_after(CLOSE_GRACE_SECONDS):
                await child.wait()
            child.kill()
            await child.wait()
