"""The averaging worker: `python -m swarm_client.averaging.worker.main --fd N`.

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
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from swarm_client.averaging.all_reduce import errors
from swarm_client.averaging.all_reduce.codec import dtype_of
from swarm_client.averaging.all_reduce.incoming import IncomingHub
from swarm_client.averaging.all_reduce.plan import RoundSpec, round_tag
from swarm_client.averaging.all_reduce.reduce import all_reduce
from swarm_client.averaging.all_reduce.routes import RouteFault, StreamTraffic
from swarm_client.averaging.protocol.messages import (
    AddressesChanged,
    Bootstrap,
    Bootstrapped,
    CancelRound,
    Carried,
    ConfigureAveraging,
    DirectoryRequestFailed,
    Fault,
    Found,
    Lookup,
    Ping,
    Pong,
    Publish,
    Published,
    Record,
    RoundDone,
    RoundFailureReport,
    RoundInDaemon,
    SetAdmittedPeers,
    SetMembership,
    Shutdown,
    Started,
    StartRound,
    Unavailable,
)
from swarm_client.averaging.worker.authorizer import RunAuthorizer
from swarm_client.averaging.worker.daemon_link import DaemonLink
from swarm_client.averaging.worker.dht import DhtDirectory
from swarm_client.averaging.worker.hivemind_imports import (
    Hivemind,
    HivemindMissingError,
    load_hivemind,
)
from swarm_client.averaging.worker.host_streams import HOST_PREFIX, HostStreams
from swarm_client.averaging.worker.location import P2pdLocation
from swarm_client.averaging.worker.p2pd import ensure_identity, running_p2pd
from swarm_client.averaging.worker.p2pd_carrier import GroupCarrier, P2pdStreams
from swarm_client.fault_injection import faults
from swarm_client.ipc import shared_memory
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import PeerId

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
P2PD_DIED_STATUS = 3


@dataclass(frozen=True, slots=True)
class Services:
    """What the messages of the daemon are carried out with."""

    hub: IncomingHub
    p2pd: P2pdStreams
    host: HostStreams
    directory: DhtDirectory
    authorizer: RunAuthorizer


class Worker:
    """Carries out the daemon's messages, each in its own task."""

    def __init__(self, link: DaemonLink, services: Services, tasks: anyio.abc.TaskGroup) -> None:
        self._link = link
        self._services = services
        self._tasks = tasks
        self._rounds: dict[str, anyio.CancelScope] = {}
        self._cancel_reasons: dict[str, str] = {}

    async def serve(self) -> None:
        """Until the daemon ends or says so."""
        while True:
            message = await self._link.receive()
            match message:
                case None | Shutdown():
                    return
                case StartRound():
                    self._tasks.start_soon(self._run_round, message)
                case CancelRound():
                    if message.round_id in self._rounds:
                        self._cancel_reasons[message.round_id] = message.reason
                        self._rounds[message.round_id].cancel()
                case RoundInDaemon():
                    members = {name: PeerId(name) for name in message.p2pd_peer_ids}
                    self._services.hub.finish(round_tag(message.round_id), members, b"")
                case SetAdmittedPeers():
                    admitted = frozenset(message.p2pd_peer_ids)
                    self._services.hub.admits = partial(_is_admitted, admitted)
                    self._services.hub.admission_changed()
                case SetMembership():
                    self._services.authorizer.set_membership(message)
                case Publish():
                    self._tasks.start_soon(self._answer, message.request, self._publish, message)
                case Lookup():
                    self._tasks.start_soon(self._answer, message.request, self._lookup, message)
                case Bootstrap():
                    self._tasks.start_soon(self._answer, message.request, self._bootstrap, message)
                case Ping():
                    self._link.send(Pong())
                case ConfigureAveraging():
                    raise AssertionError("a worker is configured once")

    async def _run_round(self, message: StartRound) -> None:
        done = False
        services = self._services
        carrier = GroupCarrier.of(message.members, services.p2pd, services.host, services.hub)
        with anyio.CancelScope() as scope:
            self._rounds[message.round_id] = scope
            try:
                self._link.send(await self._reduce(message, carrier))
                done = True
            except errors.RoundFailed as failure:
                self._link.send(_round_failure(message.round_id, failure, carrier.faults))
            except SwarmError as error:
                self._link.send(_stopped(message.round_id, str(error)))
            except Exception as error:  # a supervisor: one round's trouble stays its own
                logger.exception("round %s failed by a fault of this program", message.round_id)
                self._link.send(_stopped(message.round_id, f"internal error: {error!r}"))
            finally:
                del self._rounds[message.round_id]
        reason = self._cancel_reasons.pop(message.round_id, "the worker is ending")
        if scope.cancelled_caught:
            self._link.send(_stopped(message.round_id, reason))
        if not done:
            # The tracebacks of a failed round hold its arrays, which are shared memory.
            gc.collect()

    async def _reduce(self, message: StartRound, carrier: GroupCarrier) -> RoundDone:
        spec = RoundSpec(
            message.round_id,
            tuple(member.peer_id for member in message.members),
            message.me,
            message.elements,
            message.shares,
            message.piece_elements,
            message.codec,
        )
        dtype = dtype_of(spec.codec)
        offset_bytes = message.offset_elements * dtype.itemsize
        with (
            shared_memory.attach(message.source_shm_name) as source,
            shared_memory.attach(message.result_shm_name) as result,
        ):
            report = await all_reduce(
                spec,
                carrier,
                source.array(dtype, message.elements, offset_bytes).view(dtype),
                result.array(dtype, message.elements, offset_bytes).view(dtype),
                stall_seconds=message.stall_seconds,
                join_seconds=message.join_seconds,
            )
        return RoundDone(
            round_id=message.round_id,
            seconds=report.seconds,
            carried=_carried(report.links),
            faults=_faults(carrier.faults),
        )

    # ---------------------------------------------------------------------------- the directory

    async def _answer(
        self, request: int, work: Callable[[Any], Awaitable[FrozenModel]], message: FrozenModel
    ) -> None:
        try:
            self._link.send(await work(message))
        except Exception as error:  # a supervisor: hivemind's DHT raises whatever it likes
            logger.exception("a directory request failed")
            self._link.send(DirectoryRequestFailed(request=request, reason=f"{error!r}"[:500]))

    async def _publish(self, message: Publish) -> Published:
        stored = await self._services.directory.publish(
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
            for subkey, value, expires in await self._services.directory.lookup(message.key)
        )
        return Found(request=message.request, records=records)

    async def _bootstrap(self, message: Bootstrap) -> Bootstrapped:
        reached = await self._services.directory.bootstrap(message.initial_peers)
        return Bootstrapped(request=message.request, reached=reached)


def _is_admitted(p2pd_peer_ids: frozenset[str], remote: str) -> bool:
    """The daemon hands over streams of admitted members only."""
    return remote in p2pd_peer_ids or remote.startswith(HOST_PREFIX)


def _round_failure(
    round_id: str, failure: errors.RoundFailed, faults: Sequence[RouteFault]
) -> RoundFailureReport:
    return RoundFailureReport(
        round_id=round_id,
        reason=failure.reason,
        failure=failure.failure,
        culprit=failure.culprit,
        route=failure.route,
        carried=_carried(failure.links),
        faults=_faults(faults),
    )


def _carried(links: Sequence[StreamTraffic]) -> tuple[Carried, ...]:
    return tuple(
        Carried(
            peer=link.peer,
            route=link.route,
            bytes_sent=link.bytes_sent,
            bytes_received=link.bytes_received,
        )
        for link in links
    )


def _faults(faults: Sequence[RouteFault]) -> tuple[Fault, ...]:
    return tuple(Fault(peer=f.peer, route=f.route, reason=f.reason[:500]) for f in faults)


def _stopped(round_id: str, reason: str) -> RoundFailureReport:
    return RoundFailureReport(
        round_id=round_id, reason=reason[:500], failure=errors.RoundFailure.STOPPED
    )


async def _serve(link: DaemonLink, hivemind: Hivemind, settings: ConfigureAveraging) -> int:
    key = ensure_identity(Path(settings.identity_path))
    async with running_p2pd(hivemind, settings, sys.stderr) as (p2p, process):
        # Until the daemon says otherwise, nobody may wait here.
        hub = IncomingHub(admits=partial(_is_admitted, frozenset()))
        authorizer = RunAuthorizer(key)
        p2pd = P2pdStreams(hivemind, p2p, hub)
        host = HostStreams(Path(settings.socket_folder), hub)
        await host.serve()
        await p2pd.serve()
        directory = await DhtDirectory.start(hivemind, p2p, p2pd, authorizer)
        location = P2pdLocation(hivemind, p2p, p2pd, settings.trusted_relays)
        addresses = await location.now()
        link.send(
            Started(
                p2pd_peer_id=p2p.peer_id.to_base58(),
                addresses=addresses,
                hivemind_version=hivemind.version,
            )
        )
        gc.collect()
        gc.freeze()
        status = 0
        services = Services(hub, p2pd, host, directory, authorizer)
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
            tasks.start_soon(location.watch, addresses, moved)
            await Worker(link, services, tasks).serve()
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
    faults.activate(None, daemon_pid=os.getppid())
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    asyncio.run(_run(descriptor))


if __name__ == "__main__":
    main()
