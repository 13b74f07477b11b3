"""Requests to the daemon of a home, as every command and view sends them. Blocking; no trio.

Owns the timeouts, and the error messages for a daemon that is not running, does not answer, or is
of another version.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarm_client.control.messages import (
    MAX_ANSWER_BYTES,
    ControlRequest,
    Refusal,
    error_from_report,
)
from swarm_shared.base.errors import DaemonError, VersionError
from swarm_shared.base.local_socket import LocalConnection, connect

ANSWER_SECONDS = 15.0
"""Timeout of an answer. Answers take milliseconds; a machine that swaps may need seconds."""


class NoDaemon(DaemonError):
    """No process serves the home's socket."""


def ask(socket_path: Path, method: str, **arguments: Any) -> dict[str, Any]:
    """The daemon's answer. NoDaemon when none runs; the daemon's own error when it refuses."""
    for answer in _converse(socket_path, method, arguments, ANSWER_SECONDS):
        return answer
    raise DaemonError(_silent(socket_path, "it closed the connection"))


def stream(socket_path: Path, method: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield answers until the daemon ends."""
    return _converse(socket_path, method, arguments, None)


def log_lines(socket_path: Path, after: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the lines of the daemon's log that have a higher number than `after`."""
    while lines := ask(socket_path, "log", after=after)["lines"]:
        yield from lines
        after = lines[-1]["number"]


def is_running(socket_path: Path) -> bool:
    """Whether a daemon of any version accepts connections there."""
    try:
        with connect(socket_path, ANSWER_SECONDS):
            return True
    except OSError:
        return False


def _converse(
    socket_path: Path, method: str, arguments: dict[str, Any], timeout_seconds: float | None
) -> Iterator[dict[str, Any]]:
    request = ControlRequest(method=method, arguments=arguments)
    try:
        with connect(socket_path, ANSWER_SECONDS, MAX_ANSWER_BYTES) as connection:
            connection.send(request.model_dump(mode="json"))
            while (answer := _answer(connection, timeout_seconds)) is not None:
                yield answer
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        raise NoDaemon(
            f"no daemon is running in {socket_path.parent}; start one with "
            "`swarm-client join INVITE`, or give the folder of another one with --home"
        ) from None
    except PermissionError:
        raise DaemonError(
            f"you may not use {socket_path}, with which the daemon of that folder is asked; run "
            "this as the user whose daemon it is, or give a folder of your own with --home"
        ) from None
    except (ConnectionResetError, BrokenPipeError):
        return  # it ended during an answer
    except (OSError, ValueError) as error:
        raise DaemonError(_silent(socket_path, str(error) or type(error).__name__)) from error


def _answer(connection: LocalConnection, timeout_seconds: float | None) -> dict[str, Any] | None:
    line = connection.receive(timeout_seconds)
    if line is None:
        return None
    if isinstance(answer := line.get("ok"), dict):
        return answer
    try:
        refusal = Refusal.model_validate(line)
    except ValidationError as error:
        raise VersionError(
            "the running daemon and this command are of different versions; both must come from "
            "the same installation; end the daemon with its own `swarm-client shutdown` and start "
            "it again"
        ) from error
    raise error_from_report(refusal.error)


def _silent(socket_path: Path, reason: str) -> str:
    log_file = socket_path.parent / "log" / "client.log"
    return (
        f"the daemon in {socket_path.parent} did not answer ({reason}); the request may have been "
        f"carried out, so check `swarm-client status`; the daemon's log is {log_file}"
    )
