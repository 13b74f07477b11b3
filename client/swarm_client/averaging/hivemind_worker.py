"""The averaging worker: `python -m swarm_client.averaging.hivemind_worker --fd N`.

A child of the daemon and the only process that imports hivemind. It runs p2pd, answers the
daemon's messages (protocol.py) on the inherited socket N, carries out rounds on shared memory and
keeps a node of the directory. asyncio, because hivemind is.

It ends when the daemon's socket does, when p2pd dies and when it is told to; p2pd ends with it,
however it ends (the kernel sees to that), so that no orphan stays. Whatever hivemind prints goes
where stderr goes, which is the log file that the daemon chose.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from pydantic import BaseModel

from swarm_client import shared_memory
from swarm_client.averaging import errors
from swarm_client.averaging.directory import Directory
from swarm_client.averaging.hivemind_carrier import HivemindAveraging
from swarm_client.averaging.hivemind_door import Hivemind, HivemindMissingError, open_door
from swarm_client.averaging.p2pd import ensure_identity, running_p2pd
from swarm_client.averaging.plan import RoundSpec
from swarm_client.averaging.protocol import (
    AbortRound,
    Bootstrap,
    Bootstrapped,
    Configure,
    DaemonMessage,
    Found,
    Lookup,
    Publish,
    Published,
    Record,
    RequestFailed,
    RoundDone,
    RoundFailure,
    Shutdown,
    Started,
    StartRound,
    Unavailable,
    daemon_messages,
)
from swarm_client.averaging.reduce import all_reduce
from swarm_shared.errors import SwarmError

logger = logging.getLogger(__name__)

# swarm_client.child has the same framing, but imports trio: 0.2 s of CPU for each volunteer.
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 16 * 2**20
_PR_SET_PDEATHSIG = 1
P2PD_DIED_STATUS = 3


class DaemonLink:
    """Messages from and to the daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def inherit(cls, descriptor: int) -> DaemonLink:
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
        return cls(reader, writer)

    async def receive(self) -> DaemonMessage | None:
        """None when the daemon has ended."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            assert length <= _MAX_MESSAGE_BYTES, "the daemon never sends that much"
            return daemon_messages.validate_json(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def send(self, message: BaseModel) -> None:
        body = message.model_dump_json().encode()
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def flush(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Worker:
    """Carries out the daemon's messages, each in its own task."""

    def __init__(
        self,
        link: DaemonLink,
        averaging: HivemindAveraging,
        directory: Directory,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self._link = link
        self._averaging = averaging
        self._directory = directory
        self._tasks = tasks
        self._rounds: dict[str, anyio.CancelScope] = {}
        self._called_off: dict[str, str] = {}

    async def serve(self) -> None:
        """Until the daemon ends or says so."""
        while True:
            message = await self._link.receive()
            match message:
                case None | Shutdown():
                    return
                case StartRound():
                    self._tasks.start_soon(self._run_round, message)
                case AbortRound():
                    if message.round_id in self._rounds:
                        self._called_off[message.round_id] = message.reason
                        self._rounds[message.round_id].cancel()
                case Publish():
                    self._tasks.start_soon(self._answer, message.request, self._publish, message)
                case Lookup():
                    self._tasks.start_soon(self._answer, message.request, self._lookup, message)
                case Bootstrap():
                    self._tasks.start_soon(self._answer, message.request, self._bootstrap, message)
                case Configure():
                    raise AssertionError("a worker is configured once")

    async def _run_round(self, message: StartRound) -> None:
        done = False
        with anyio.CancelScope() as scope:
            self._rounds[message.round_id] = scope
            try:
                self._link.send(await self._reduce(message))
                done = True
            except errors.RoundFailed as failure:
                self._link.send(_round_failure(message.round_id, failure))
            except SwarmError as error:
                self._link.send(_stopped(message.round_id, str(error)))
            except Exception as error:  # a supervisor: one round's trouble stays its own
                logger.exception("round %s failed by a fault of this program", message.round_id)
                self._link.send(_stopped(message.round_id, f"internal error: {error!r}"))
            finally:
                del self._rounds[message.round_id]
        reason = self._called_off.pop(message.round_id, "the worker is ending")
        if scope.cancelled_caught:
            self._link.send(_stopped(message.round_id, reason))
        if not done:
            # The tracebacks of a failed round hold its arrays, which are shared memory.
            gc.collect()

    async def _reduce(self, message: StartRound) -> RoundDone:
        spec = RoundSpec(
            message.round_id,
            tuple(member.peer_id for member in message.members),
            message.me,
            message.elements,
            message.shares,
            message.piece_elements,
            message.codec,
        )
        offset_bytes = message.offset_elements * 4
        with (
            shared_memory.attach(message.source_shm_name) as source,
            shared_memory.attach(message.result_shm_name) as result,
        ):
            report = await all_reduce(
                spec,
                self._averaging.carrier(message.members),
                source.float32(message.elements, offset_bytes),
                result.float32(message.elements, offset_bytes),
                stall_seconds=message.stall_seconds,
                join_seconds=message.join_seconds,
            )
        return RoundDone(
            round_id=message.round_id,
            seconds=report.seconds,
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
        )

    # ---------------------------------------------------------------------------- the directory

    async def _answer(
        self, request: int, work: Callable[[Any], Awaitable[BaseModel]], message: BaseModel
    ) -> None:
        try:
            self._link.send(await work(message))
        except Exception as error:  # a supervisor: hivemind's DHT raises whatever it likes
            logger.exception("a directory request failed")
            self._link.send(RequestFailed(request=request, reason=f"{error!r}"[:500]))

    async def _publish(self, message: Publish) -> Published:
        stored = await self._directory.publish(
            message.key,
            message.subkey,
            base64.b64decode(message.value_base64),
            message.expires_unix_seconds,
        )
        return Published(request=message.request, stored=stored)

    async def _lookup(self, message: Lookup) -> Found:
        records = tuple(
            Record(
                subkey=subkey,
                value_base64=base64.b64encode(value).decode(),
                expires_unix_seconds=expires,
            )
            for subkey, value, expires in await self._directory.lookup(message.key)
        )
        return Found(request=message.request, records=records)

    async def _bootstrap(self, message: Bootstrap) -> Bootstrapped:
        reached = await self._directory.bootstrap(message.initial_peers)
        return Bootstrapped(request=message.request, reached=reached)


def _round_failure(round_id: str, failure: errors.RoundFailed) -> RoundFailure:
    return RoundFailure(
        round_id=round_id,
        reason=failure.reason,
        failure=failure.failure,
        culprit=failure.culprit,
        told_by=failure.told_by,
    )


def _stopped(round_id: str, reason: str) -> RoundFailure:
    return RoundFailure(round_id=round_id, reason=reason[:500], failure=errors.RoundFailure.STOPPED)


async def _serve(link: DaemonLink, hivemind: Hivemind, settings: Configure) -> int:
    ensure_identity(Path(settings.identity_path))
    async with running_p2pd(hivemind, settings, sys.stderr) as (p2p, process):
        averaging = HivemindAveraging(hivemind, p2p)
        await averaging.serve()
        directory = await Directory.start(hivemind, p2p, averaging)
        link.send(
            Started(
                p2pd_peer_id=p2p.peer_id.to_base58(),
                addresses=tuple(str(address) for address in p2p._visible_maddrs),
                hivemind_version=hivemind.version,
            )
        )
        gc.collect()
        gc.freeze()
        status = 0
        async with anyio.create_task_group() as tasks:

            async def end_with_p2pd() -> None:
                nonlocal status
                await process.wait()
                logger.error("p2pd has ended with status %s", process.returncode)
                status = P2PD_DIED_STATUS
                tasks.cancel_scope.cancel()

            tasks.start_soon(end_with_p2pd)
            tasks.start_soon(_enter_directory, directory, settings)
            await Worker(link, averaging, directory, tasks).serve()
            tasks.cancel_scope.cancel()
        return status


async def _enter_directory(directory: Directory, settings: Configure) -> None:
    try:
        await directory.bootstrap(settings.initial_peers)
    except Exception:  # a supervisor: rounds are carried without a directory too
        logger.exception("the directory could not be entered")


async def _main(link: DaemonLink) -> int:
    settings = await link.receive()
    if not isinstance(settings, Configure):
        return 0
    try:
        return await _serve(link, open_door(), settings)
    except HivemindMissingError as error:
        link.send(Unavailable(reason=str(error), permanent=True))
    except ImportError as error:
        link.send(Unavailable(reason=f"hivemind cannot be imported: {error}", permanent=True))
    except SwarmError as error:
        link.send(Unavailable(reason=str(error), permanent=False))
    return 1


async def _run(descriptor: int) -> None:
    link = await DaemonLink.inherit(descriptor)
    status = await _main(link)
    with anyio.move_on_after(1):
        await link.flush()
    sys.stderr.flush()
    # Here and not after the loop's own end: hivemind's tasks wait for a p2pd that is gone, and
    # threads of a round that was cut short would delay it too.
    os._exit(status)


def _become_child() -> None:
    """Leave Ctrl-C to the daemon, and die with it even when frozen or stuck."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    descriptor: int = parser.parse_args().fd
    _become_child()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    asyncio.run(_run(descriptor))


if __name__ == "__main__":
    main()
