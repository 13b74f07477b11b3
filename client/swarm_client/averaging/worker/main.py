"""The averaging worker: `python -m swarm_client.averaging.worker.main --fd N`.

A child of the daemon and the only process that imports hivemind. It runs p2pd, answers the
daemon's messages (`swarm_client.averaging.protocol.messages`) on the inherited socket N, runs
rounds on shared memory and keeps a node of the directory. It uses asyncio because hivemind does.

The worker ends when the daemon's socket does, when p2pd dies and on Shutdown. The kernel ends p2pd
with it in every case, so that no orphan is left. The output of hivemind goes to stderr, which is
the log file that the daemon has opened.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.abc

from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.all_reduce.in_memory import all_reduce_in_memory
from swarm_client.averaging.all_reduce.incoming import IncomingHub
from swarm_client.averaging.all_reduce.plan import round_tag
from swarm_client.averaging.all_reduce.received import ReceivedPieces
from swarm_client.averaging.protocol.messages import (
    AddressesChanged,
    Bootstrap,
    CancelRound,
    ConfigureAveraging,
    DaemonMessage,
    DigestReceived,
    DirectoryRequestFailed,
    ForgetRounds,
    Lookup,
    Ping,
    Pong,
    Publish,
    ReceivedDigested,
    RoundDone,
    RoundFailureReport,
    RoundInDaemon,
    SetAdmittedPeers,
    SetMembership,
    Shutdown,
    Started,
    StartRound,
    Unavailable,
    daemon_messages,
)
from swarm_client.averaging.worker.authorizer import RunAuthorizer
from swarm_client.averaging.worker.dht import DhtDirectory
from swarm_client.averaging.worker.hivemind_imports import (
    Hivemind,
    HivemindMissingError,
    load_hivemind,
)
from swarm_client.averaging.worker.host_streams import HOST_PREFIX, HostStreams
from swarm_client.averaging.worker.p2pd import ensure_identity, running_p2pd
from swarm_client.averaging.worker.p2pd_carrier import (
    GroupCarrier,
    P2pdStreams,
    current_addresses,
    watch_addresses,
)
from swarm_client.fault_injection import faults
from swarm_client.ipc.numbered import Numbered
from swarm_client.ipc.parent_death import end_with_parent
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import LENGTH_BYTES, decode_length, encode_prefixed, parse
from swarm_shared.base.text import LogFormatter
from swarm_shared.base.types import MAX_SENTENCE_CHARACTERS, PeerId
from swarm_shared.identity.norm_sketch import vector_key

logger = logging.getLogger(__name__)

P2PD_DIED_STATUS = 3
"""Exit status of this process when p2pd has ended."""

RequestT = TypeVar("RequestT", bound=Numbered)


class DaemonLink:
    """This process's end of the link to the daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def inherit(cls, descriptor: int) -> DaemonLink:
        """Open the link over the socket that the daemon passed as `--fd`."""
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
        return cls(reader, writer)

    async def receive(self) -> DaemonMessage | None:
        """Wait for the next message; None when the daemon has ended."""
        try:
            length = decode_length(await self._reader.readexactly(LENGTH_BYTES))
            return parse(daemon_messages, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def send(self, message: FrozenModel) -> None:
        self._writer.write(encode_prefixed(message))

    async def flush(self) -> None:
        """Send what is queued and close the link."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


@dataclass(slots=True, eq=False)
class Worker:
    """Carries out the daemon's messages; each round and directory request in a task of its own."""

    link: DaemonLink
    hub: IncomingHub
    p2pd: P2pdStreams
    host: HostStreams
    directory: DhtDirectory
    authorizer: RunAuthorizer
    tasks: anyio.abc.TaskGroup
    rounds: dict[int, anyio.CancelScope] = field(default_factory=dict)
    """Rounds under way, by request number."""
    received: dict[str, ReceivedPieces] = field(default_factory=dict)
    """The pieces of the rounds that are done and not forgotten, by the name of the round."""

    async def serve(self) -> None:
        """Carry out messages until the daemon ends or sends Shutdown."""
        while True:
            message = await self.link.receive()
            match message:
                case None | Shutdown():
                    return
                case StartRound():
                    scope = self.rounds[message.request] = anyio.CancelScope()
                    self.tasks.start_soon(self._run_round, message, scope)
                case CancelRound():
                    if message.request in self.rounds:
                        self.rounds[message.request].cancel()
                case DigestReceived():
                    self.tasks.start_soon(self._digest_received, message)
                case ForgetRounds():
                    self.received.clear()
                case RoundInDaemon():
                    members = {name: PeerId(name) for name in message.p2pd_peer_ids}
                    self.hub.finish(round_tag(message.round_id), members, b"")
                case SetAdmittedPeers():
                    admitted = frozenset(message.p2pd_peer_ids)
                    self.hub.admits = partial(_is_admitted, admitted)
                    self.hub.notify()
                case SetMembership():
                    self.authorizer.set_membership(message)
                case Publish():
                    self.tasks.start_soon(self._answer, message, self.directory.publish)
                case Lookup():
                    self.tasks.start_soon(self._answer, message, self.directory.lookup)
                case Bootstrap():
                    self.tasks.start_soon(self._answer, message, self.directory.bootstrap)
                case Ping():
                    self.link.send(Pong(request=message.request))
                case ConfigureAveraging():
                    raise AssertionError("the worker is configured already")

    async def _run_round(self, message: StartRound, scope: anyio.CancelScope) -> None:
        carrier = GroupCarrier(message.members, self.p2pd, self.host, self.hub)
        answer: RoundDone | RoundFailureReport = _stopped("the round was cancelled")
        with scope:
            try:
                answer = await self._reduce(message, carrier)
            except RoundFailed as failure:
                failure.faults = tuple(carrier.faults)
                answer = RoundFailureReport.from_failure(failure)
            except SwarmError as error:
                answer = _stopped(str(error))
            except Exception as error:  # a supervisor: one round's failure must not end the others
                logger.exception(
                    "round %s failed by a fault of this program", message.spec.round_id
                )
                answer = _stopped(f"internal error: {error!r}")
            finally:
                del self.rounds[message.request]
        self.link.send(answer.numbered(message.request))
        if not isinstance(answer, RoundDone):
            # The tracebacks of a failed round keep its arrays alive, which are shared memory.
            gc.collect()

    async def _reduce(self, message: StartRound, carrier: GroupCarrier) -> RoundDone:
        links = await all_reduce_in_memory(
            message.spec, carrier, message.source_shm_name, message.result_shm_name,
            message.offset_elements, self.received, stall_seconds=message.stall_seconds,
            join_seconds=message.join_seconds,
        )  # fmt: skip
        return RoundDone(links=links, faults=tuple(carrier.faults))

    async def _digest_received(self, message: DigestReceived) -> None:
        received = self.received.get(message.round_id)
        answer: ReceivedDigested | RoundFailureReport
        if received is None:
            answer = _stopped(f"round {message.round_id} is not kept here")
        else:
            key = vector_key(message.seed, message.part, message.weights)
            digests = await anyio.to_thread.run_sync(partial(received.digests, key))
            answer = ReceivedDigested(digests=digests)
        self.link.send(answer.numbered(message.request))

    # ---------------------------------------------------------------------------- the directory

    async def _answer(
        self, message: RequestT, work: Callable[[RequestT], Awaitable[Numbered]]
    ) -> None:
        answer: Numbered
        try:
            answer = await work(message)
        except Exception as error:  # a supervisor: hivemind's DHT raises any kind of exception
            logger.exception("a directory request failed")
            answer = DirectoryRequestFailed(reason=f"{error!r}"[:MAX_SENTENCE_CHARACTERS])
        self.link.send(answer.numbered(message.request))


def _is_admitted(p2pd_peer_ids: frozenset[str], remote: str) -> bool:
    """Whether a remote may wait for a round; the daemon hands over admitted members only."""
    return remote in p2pd_peer_ids or remote.startswith(HOST_PREFIX)


def _stopped(reason: str) -> RoundFailureReport:
    return RoundFailureReport(reason=reason[:MAX_SENTENCE_CHARACTERS], failure=RoundFailure.STOPPED)


async def _serve(link: DaemonLink, hivemind: Hivemind, settings: ConfigureAveraging) -> int:
    key = ensure_identity(Path(settings.identity_path))
    async with running_p2pd(hivemind, settings, sys.stderr) as (p2p, process):
        # No remote is admitted until the daemon sends SetAdmittedPeers.
        hub = IncomingHub(admits=partial(_is_admitted, frozenset()))
        authorizer = RunAuthorizer(key)
        p2pd = P2pdStreams(hivemind, p2p, hub)
        host = HostStreams(Path(settings.socket_folder), hub)
        await host.serve()
        await p2pd.serve()
        node = await hivemind.DHTNode.create(
            p2p=p2p, ensure_bootstrap_success=False, strict=False, authorizer=authorizer
        )
        directory = DhtDirectory(hivemind, node, p2pd, authorizer)
        addresses = await current_addresses(p2pd, settings.trusted_relays)
        link.send(Started(p2pd_peer_id=p2p.peer_id.to_base58(), addresses=addresses))
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

            def moved(now: tuple[str, ...]) -> None:
                link.send(AddressesChanged(addresses=now))

            tasks.start_soon(end_with_p2pd)
            tasks.start_soon(watch_addresses, p2pd, settings.trusted_relays, addresses, moved)
            await Worker(link, hub, p2pd, host, directory, authorizer, tasks).serve()
            tasks.cancel_scope.cancel()
        return status


async def _main(link: DaemonLink) -> int:
    settings = await link.receive()
    if not isinstance(settings, ConfigureAveraging):
        return 0
    try:
        return await _serve(link, load_hivemind(), settings)
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
    # Ends the process without waiting for the event loop: hivemind's tasks wait for a p2pd that has
    # ended, and the threads of a cancelled round would delay the end too.
    os._exit(status)


def _become_child() -> None:
    """Ignore Ctrl-C, and make the kernel end this process with the daemon even when frozen."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    end_with_parent(signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    descriptor: int = parser.parse_args().fd
    _become_child()
    faults.activate(None, daemon_pid=os.getppid())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(logging.BASIC_FORMAT))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    asyncio.run(_run(descriptor))


if __name__ == "__main__":
    main()
