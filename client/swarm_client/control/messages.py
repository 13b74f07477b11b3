"""The control API: one JSON object per line in each direction over `control.sock`
(docs/control-api.md).

Owns the form of requests, answers and refusals. Free of trio, torch and libp2p. A request of
another API version is refused with both versions named; the form of that refusal, `Refusal`, is the
same in every version, so that an old command can print a new daemon's refusal.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from swarm_client.control.status_document import API_VERSION
from swarm_client.machine.device_names import split_names
from swarm_shared.base import errors
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import MAX_EXACT_INTEGER

MAX_ANSWER_BYTES = 4 * 2**20
"""Maximum size of an answer: a status with a large run's peers. A request has at most 64 KiB."""

MAX_LOG_LINES = 1000
"""Maximum number of log lines in one answer. A reader that wants more requests those after the last
one."""


class ControlRequest(FrozenModel):
    api: int = API_VERSION
    method: Annotated[str, Field(max_length=50)]
    arguments: dict[str, Any] = Field(default_factory=dict)


class ErrorReport(FrozenModel):
    """Why a request was not carried out, for people and for programs."""

    code: str
    """Name of an error class of swarm_shared.base.errors, like `AdmissionError`."""
    seen: str
    needed: str = ""
    remedy: str = ""
    """A command, or what else to do."""
    exit_code: int

    def sentence(self) -> str:
        return "; ".join(part for part in (self.seen, self.needed, self.remedy) if part)


class Refusal(FrozenModel):
    error: ErrorReport


# ---------------------------------------------------------------- arguments of the methods


class NoArguments(FrozenModel):
    """Arguments of status, follow, resume, finish, leave, runs, config_show and shutdown."""


class LogArguments(FrozenModel):
    after: int = Field(default=0, ge=0)
    """Lines with a higher number than this one."""
    follow: bool = False


class PauseArguments(FrozenModel):
    seconds: float | None = Field(default=None, gt=0, le=366 * 86400)
    """Duration of the pause; None: until `resume`."""


class JoinArguments(FrozenModel):
    """Options of `join`; also stored with a run, so that it can be continued."""

    invite: Annotated[str, Field(max_length=4096)]
    device: Annotated[str, Field(max_length=1000)] = "auto"
    """One device, or several separated by commas; each of them is a peer with a stage of its
    own."""
    stage: int | None = Field(default=None, ge=0)
    threads: int | None = Field(default=None, ge=1, le=4096)
    """Threads that compute; None: all cores but one."""
    name: Annotated[str, Field(max_length=60)] | None = None
    team: Annotated[str, Field(max_length=200)] | None = None
    listen: Annotated[str, Field(max_length=300)] = "/ip4/0.0.0.0/tcp/0"
    memory_bytes: int | None = Field(default=None, gt=0, le=MAX_EXACT_INTEGER)
    may_relay: bool = True
    preferences: Annotated[
        tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=100)
    ] = ()
    """NAME=VALUE; override the environment and the file."""

    @field_validator("device")
    @classmethod
    def _names_devices(cls, device: str) -> str:
        # Here, so that a wrong name ends no participation in another run: UsageError.
        split_names(device)
        return device


class RunArguments(FrozenModel):
    """Arguments of choose_run and forget_run."""

    run: Annotated[str, Field(min_length=1, max_length=100)]
    """The run's ID, the beginning of it, or its name."""


class ConfigArguments(FrozenModel):
    name: Annotated[str, Field(max_length=100)]
    text: Annotated[str, Field(max_length=10_000)]


# ---------------------------------------------------------------- errors, both ways

_BY_CODE: dict[str, type[SwarmError]] = {
    name: error
    for name, error in vars(errors).items()
    if isinstance(error, type) and issubclass(error, SwarmError)
}


def error_report_of(error: SwarmError) -> ErrorReport:
    """The report of an error. Its text says in one sentence what was observed, what is needed and
    what to do."""
    return ErrorReport(code=type(error).__name__, seen=str(error), exit_code=error.exit_code)


def error_from_report(problem: ErrorReport) -> SwarmError:
    """The error that a command ends with, so that its exit code is the daemon's."""
    return _BY_CODE.get(problem.code, SwarmError)(problem.sentence())


def error_with_exit_code(exit_code: int, sentence: str) -> SwarmError:
    """An error with the exit code of a program that has ended with it."""
    kinds = [kind for kind in _BY_CODE.values() if kind.exit_code == exit_code]
    return (kinds[0] if kinds else SwarmError)(sentence)


def version_mismatch(asked: object) -> ErrorReport:
    """The refusal of a request of another API version."""
    return ErrorReport(
        code="VersionError",
        seen=f"this command uses version {asked} of the control API and the running daemon "
        f"version {API_VERSION}",
        needed="both must come from the same installation",
        remedy="end the daemon with `swarm-client shutdown` of its own installation, or with its "
        "service, and start it again",
        exit_code=errors.VersionError.exit_code,
    )
