"""hivemind's daemon p2pd: its key, its command line and its life.

hivemind's own `P2P.create` starts p2pd too, but cannot pass every option, prints p2pd's output
through its logger, and leaves an orphan when its process is killed. Therefore p2pd is started here
(the kernel kills it with its parent) and hivemind's P2P client is attached to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TextIO

from swarm_client.averaging.protocol.messages import ConfigureAveraging
from swarm_client.averaging.worker.hivemind_imports import Hivemind
from swarm_client.ipc.parent_death import end_with_parent
from swarm_shared.base.atomic_file import PRIVATE_MODE, write_atomically
from swarm_shared.base.errors import NetworkError
from swarm_shared.identity.keys import Identity

logger = logging.getLogger(__name__)

START_SECONDS = 15.0
STOP_SECONDS = 2.0

# Protobuf of libp2p's PrivateKey{Type=Ed25519, Data=64 bytes}; Go wants the seed and the public
# key, py-libp2p the seed alone.
_PRIVATE_KEY_PREFIX = b"\x08\x01\x12\x40"
_SEED_BYTES = 32
_PRIVATE_KEY_BYTES = len(_PRIVATE_KEY_PREFIX) + 2 * _SEED_BYTES


def ensure_identity(path: Path) -> Identity:
    """Load p2pd's own Ed25519 key, or create it on first use, mode 0600.

    It is not the volunteer's main key: the same peer ID on two hosts confuses relays and routing.
    The daemon certifies this key with the main one.
    """
    with contextlib.suppress(FileNotFoundError):
        data = path.read_bytes()
        if len(data) == _PRIVATE_KEY_BYTES and data.startswith(_PRIVATE_KEY_PREFIX):
            path.chmod(PRIVATE_MODE)
            seed = data[len(_PRIVATE_KEY_PREFIX) :][:_SEED_BYTES]
            return Identity.from_seed(seed)
        # The key may change: the certificate that binds it is renewed at each start.
        logger.warning("%s is damaged and is replaced by a new key", path)
    identity = Identity.generate()
    key = _PRIVATE_KEY_PREFIX + identity.private_seed + identity.public_key_bytes
    write_atomically(path, key, PRIVATE_MODE)
    return identity


def command_line(binary: Path, socket: Path, settings: ConfigureAveraging) -> list[str]:
    """The arguments of p2pd. TCP only: replies get lost over its QUIC."""
    arguments = {
        "listen": f"/unix{socket}",
        "id": settings.identity_path,
        "hostAddrs": ",".join(settings.host_addresses),
        "dhtServer": 1,
        "autonat": 1,
        "connManager": 1,
        "noise": 1,
        "tls": 1,
        "natPortMap": 0,
        "relay": 1,
        # A volunteer does not relay for other peers; the coordinator does.
        "relayService": 0,
        "idleTimeout": "30s",
    }
    if settings.trusted_relays:
        # Without relayDiscovery=0 p2pd searches for minutes before it asks for a slot.
        arguments |= {
            "autoRelay": 1,
            "relayDiscovery": 0,
            "trustedRelays": ",".join(settings.trusted_relays),
            "forceReachabilityPrivate": 1,
        }
    return [str(binary), *(f"-{name}={value}" for name, value in arguments.items() if value != "")]


@asynccontextmanager
async def running_p2pd(
    hivemind: Hivemind, settings: ConfigureAveraging, log: TextIO
) -> AsyncIterator[tuple[Any, asyncio.subprocess.Process]]:
    """Run p2pd and hivemind's P2P client to it; both have ended afterwards. NetworkError if it
    fails."""
    folder = Path(settings.socket_folder)
    socket = folder / "p2pd.sock"
    socket.unlink(missing_ok=True)
    command = command_line(hivemind.p2pd_binary, socket, settings)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "GOLOG_LOG_LEVEL": "error", "GOLOG_LOG_FMT": "json"},
            preexec_fn=_die_with_parent(),
        )
    except OSError as error:
        raise NetworkError(f"hivemind's daemon p2pd cannot be started: {error}") from error
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    reader = asyncio.create_task(_follow_output(process, ready, log))
    p2p: Any = None
    try:
        try:
            await asyncio.wait_for(ready, START_SECONDS)
            p2p = await _attach(hivemind, folder, socket)
        except TimeoutError as error:
            raise NetworkError(f"p2pd did not start within {START_SECONDS:g} s") from error
        except hivemind.daemon_errors as error:
            raise NetworkError(f"p2pd does not answer: {error}") from error
        yield p2p, process
    finally:
        if p2p is not None:
            await p2p.shutdown()
        await _stop(process)
        reader.cancel()
        socket.unlink(missing_ok=True)


async def _attach(hivemind: Hivemind, folder: Path, socket: Path) -> Any:
    class FolderP2P(hivemind.P2P):  # type: ignore[misc,name-defined]
        """A P2P client with sockets in `folder`. hivemind keeps them in /tmp, where they outlive a
        killed process."""

        _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

    return await FolderP2P.replicate(hivemind.Multiaddr(f"/unix{socket}"))


async def _follow_output(
    process: asyncio.subprocess.Process, ready: asyncio.Future[None], log: TextIO
) -> None:
    assert process.stdout is not None
    last = "without any output"
    while line := await process.stdout.readline():
        last = line.decode(errors="replace").rstrip()
        print(f"p2pd: {last}", file=log, flush=True)
        if last.startswith("Peer ID:") and not ready.done():
            ready.set_result(None)
    if not ready.done():
        ready.set_exception(NetworkError(f"hivemind's daemon p2pd ended at its start: {last}"))


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _die_with_parent() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    parent = os.getpid()

    def in_child() -> None:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return in_child
