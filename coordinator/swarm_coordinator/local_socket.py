"""One question, one answer, over a Unix socket in the run folder: how commands reach a coordinator.

Owns the socket's file, its permissions and the form of a message (one line of JSON each way,
bounded). Whoever can open the file may do everything the organiser may: it is private to the
user, as the folder is. What questions mean is the callers' part.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import trio

from swarm_shared.atomic_file import PRIVATE_MODE, storage_error
from swarm_shared.errors import NetworkError, StorageError

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024
ANSWER_SECONDS = 30.0
"""A ban is durable and told within milliseconds; on a machine that swaps it may take a while."""
_LISTENING = 16
_PATH_BYTES = 100
"""What a socket's address holds is 108 bytes on Linux and 104 on macOS, the final zero included."""

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def serve(path: Path, answer: Answer) -> None:
    """Answer questions at `path` until cancelled. StorageError when there can be no socket.

    The caller holds the folder's lock: a socket that is there already was left by a coordinator
    that was killed.
    """
    listener = _listen(path)
    try:

        async def handle(stream: trio.SocketStream) -> None:
            await _converse(stream, answer)

        await trio.serve_listeners(handle, [trio.SocketListener(listener)])
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            path.unlink()


def _listen(path: Path) -> trio.socket.SocketType:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        with _short(path) as address:
            made.bind(address)
        # Before listen: until then nobody can connect, so that nobody slips in.
        path.chmod(PRIVATE_MODE)
        made.listen(_LISTENING)
    except OSError as error:
        made.close()
        raise storage_error(path, error) from error
    except BaseException:
        made.close()
        raise
    made.setblocking(False)
    return trio.socket.from_stdlib_socket(made)


async def _converse(stream: trio.SocketStream, answer: Answer) -> None:
    async with stream:
        try:
            with trio.fail_after(ANSWER_SECONDS):
                question = _parse(await _read_line(stream))
            # Without a limit: what is half done must not be left so.
            reply = await answer(question)
            with trio.fail_after(ANSWER_SECONDS):
                await stream.send_all(_line(reply))
        except (ValueError, trio.TooSlowError, trio.BrokenResourceError) as error:
            log.info("a question at the local socket was not answered: %s", error)
        except Exception:  # a supervisor: one command's trouble must not end the run
            log.exception("a question at the local socket could not be answered")


async def _read_line(stream: trio.SocketStream) -> bytes:
    content = bytearray()
    while not content.endswith(b"\n"):
        part = await stream.receive_some(MAX_MESSAGE_BYTES)
        content += part
        if not part or len(content) > MAX_MESSAGE_BYTES:
            raise ValueError(f"{len(content)} bytes and no end of line")
    return bytes(content)


def ask(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """The answer of the coordinator that serves at `path`.

    ConnectionRefusedError or FileNotFoundError when nobody serves there (now); NetworkError when
    it does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_SECONDS)
        with _short(path) as address:
            connection.connect(address)
        try:
            connection.sendall(_line(question))
            content = bytearray()
            while part := connection.recv(MAX_MESSAGE_BYTES):
                content += part
            return _parse(bytes(content))
        except (OSError, ValueError) as error:
            raise NetworkError(
                f"the running coordinator did not answer ({error or 'it hung up'}); whether it "
                "did what was asked is not known, so look at `swarm-coordinator status` and try "
                "again"
            ) from error


def _line(message: dict[str, Any]) -> bytes:
    content = json.dumps(message).encode() + b"\n"
    if len(content) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(content)} bytes is too long")
    return content


def _parse(line: bytes) -> dict[str, Any]:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of `path` that fits a socket's address, however deep the run folder lies."""
    if len(os.fsencode(path)) <= _PATH_BYTES:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise StorageError(
            f"{path.parent} has too long a path for a socket; move the run to a folder whose path "
            f"has at most {_PATH_BYTES - len(path.name) - 1} bytes"
        )
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
