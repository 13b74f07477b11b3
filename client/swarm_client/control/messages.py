"""What is said over `control.sock`: one JSON object a line, each way (docs/control-api.md).

Owns the form of questions, of answers and of refusals. Free of trio, torch and libp2p. A question
of another API version is refused with both versions named; that refusal's form, `Refusal`, is the
same in every version, so that an old command understands a new daemon that much.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError

from swarm_client.control.status_document import API_VERSION
from swarm_shared.base import errors
from swarm_shared.base.errors import SwarmError, UsageError
from swarm_shared.base.frozen_model import FrozenModel

MAX_ANSWER_BYTES = 4 * 2**20
"""A status with a large run's peers; a question has at most 64 KiB."""

MAX_LOG_LINES = 1000
"""In one answer. A reader that wants more asks for what comes after the last of them."""


class ControlRequest(FrozenModel):
    api: int = API_VERSION
    method: Annotated[str, Field(max_length=50)]
    arguments: dict[str, Any] = Field(default_factory=dict)


class ErrorReport(FrozenModel):
    """Why something was not done, for people and for programs."""

    code: str
    """Like `AdmissionError`: a name of swarm_shared.base.errors."""
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
    """Of status, follow, resume, finish, leave, runs, config_show and shutdown."""


class LogArguments(FrozenModel):
    after: int = Field(default=0, ge=0)
    """Lines with a higher number than this."""
    follow: bool = False


class PauseArguments(FrozenModel):
    seconds: float | None = Field(default=None, gt=0, le=366 * 86400)
    """None: until `resume`."""


class JoinArguments(FrozenModel):
    """What `join` asks for; also what is remembered of a run, so that it can be taken up again."""

    invite: Annotated[str, Field(max_length=4096)]
    device: Annotated[str, Field(max_length=1000)] = "auto"
    """Several with commas between them; each is a peer with a stage of its own."""
    stage: int | None = Field(default=None, ge=0)
    threads: int | None = Field(default=None, ge=1, le=4096)
    """None: all cores but one."""
    name: Annotated[str, Field(max_length=60)] | None = None
    team: Annotated[str, Field(max_length=200)] | None = None
    listen: Annotated[str, Field(max_length=300)] = "/ip4/0.0.0.0/tcp/0"
    memory_bytes: int | None = Field(default=None, gt=0)
    may_relay: bool = True
    preferences: Annotated[
        tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=100)
    ] = ()
    """NAME=VALUE, before what environment and file say."""


class RunArguments(FrozenModel):
    """Of choose_run and forget_run."""

    run: Annotated[str, Field(min_length=1, max_length=100)]
    """Its ID, the beginning of it, or its name."""


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
    """Our errors say in one sentence what was seen, what is needed and what to do."""
    return ErrorReport(code=type(error).__name__, seen=str(error), exit_code=error.exit_code)


def error_from_report(problem: ErrorReport) -> SwarmError:
    """The error that a command ends with, so that its exit code is the daemon's."""
    return _BY_CODE.get(problem.code, SwarmError)(problem.sentence())


def error_with_exit_code(exit_code: int, sentence: str) -> SwarmError:
    """The error of a program that ended with this exit code, so that ours is the same."""
    kinds = [kind for kind in _BY_CODE.values() if kind.exit_code == exit_code]
    return (kinds[0] if kinds else SwarmError)(sentence)


def version_mismatch(asked: object) -> ErrorReport:
    """The refusal of a question that this daemon does not speak the language of."""
    return ErrorReport(
        code="VersionError",
        seen=f"this command speaks version {asked} of the control API and the daemon that runs "
        f"here version {API_VERSION}",
        needed="both must come from the same installation",
        remedy="end the daemon with `swarm-client shutdown` of its own installation, or with its "
        "service, and start it again",
        exit_code=errors.VersionError.exit_code,
    )


def read_request(line: dict[str, Any]) -> ControlRequest:
    """The question, or the error to answer with. VersionError comes before everything else."""
    asked = line.get("api")
    if asked != API_VERSION:
        raise errors.VersionError(version_mismatch(asked).sentence())
    try:
        return ControlRequest.model_validate(line)
    except ValidationError as error:
        raise UsageError(f"that is no question: {first_error(error)}") from error


def first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])
