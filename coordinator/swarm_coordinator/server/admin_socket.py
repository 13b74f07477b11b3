"""Requests of commands to a running coordinator, over a Unix socket in the run folder.

Owns one request and its reply: the timeouts of both ends, and the error texts. Not here: the socket
and the framing (`swarm_shared.base.local_socket`), and the content of requests
(`admission.requests`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from swarm_shared.base.errors import NetworkError
from swarm_shared.base.local_server import LocalServerConnection, serve_lines
from swarm_shared.base.local_socket import connect

log = logging.getLogger(__name__)


ANSWER_SECONDS = 30.0
"""Seconds for a reply. A ban takes milliseconds; a machine that swaps may take far longer."""

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def serve(path: Path, answer: Answer) -> None:
    """Answer requests at `path` until cancelled. StorageError when the socket cannot be made."""

    async def handle(lines: LocalServerConnection) -> None:
        try:
            with trio.fail_after(ANSWER_SECONDS):
                question = await lines.receive()
            if question is None:
                return
            # Without a timeout: a change must not be left half done.
            reply = await answer(question)
            with trio.fail_after(ANSWER_SECONDS):
                await lines.send(reply)
        except (ValueError, trio.TooSlowError, trio.BrokenResourceError) as error:
            log.info("a question at the local socket was not answered: %s", error)
        except Exception:  # a supervisor: one command's trouble must not end the run
            log.exception("a question at the local socket could not be answered")

    await serve_lines(path, handle)


def send_request(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the coordinator that serves at `path` and return its reply.

    ConnectionRefusedError or FileNotFoundError when no coordinator serves there; NetworkError when
    it does not reply.
    """
    with connect(path, ANSWER_SECONDS) as connection:
        try:
            connection.send(question)
            reply = connection.receive(ANSWER_SECONDS)
            if reply is None:
                raise ValueError("it hung up")
            return reply
        except (OSError, ValueError) as error:
            raise NetworkError(
                f"the running coordinator did not answer ({error}); whether it "
                "did what was asked is not known, so look at `swarm-coordinator status` and try "
                "again"
            ) from error
