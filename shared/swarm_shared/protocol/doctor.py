"""DOCTOR_PROTOCOL: a client measures how the network looks from outside; a server answers.

The coordinator serves it to every client that knows the run, admitted or not; volunteers serve it
to members and to clients with a probe pass of the coordinator's. One stream is one probe session: a
hello, then requests in any order, each with its answer, all within the limits of
`swarm_shared.probe.server`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from swarm_shared import SOFTWARE_VERSION
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.memory import StageMemory, StreamedWork
from swarm_shared.base.types import (
    MAX_STAGES,
    Address,
    Addresses,
    Count,
    Envelope,
    PeerId,
    RunId,
    Seconds,
    SoftwareVersion,
    Text,
    Token,
    UnixSeconds,
)
from swarm_shared.protocol.versions import PROTOCOL_VERSIONS, VersionRange

DOCTOR_PROTOCOL = "/swarmtrain/doctor/1"

MAX_CANDIDATES = 4
MAX_RATE_BYTES = 8 * 2**20
"""Bytes of rate measurements in each direction, per session."""
RATE_CHUNK_BYTES = 64 * 1024


class DoctorHello(FrozenModel):
    kind: Literal["doctor_hello"] = "doctor_hello"
    run: RunId
    software: SoftwareVersion
    protocols: VersionRange = PROTOCOL_VERSIONS
    """Versions that the client understands."""
    token: Token | None = None
    """For the coordinator alone, which checks it without using it up."""
    certificate: Envelope | None = None
    probe_pass: Envelope | None = None


class Neighbour(FrozenModel):
    """A volunteer that answers probes as well."""

    peer: PeerId
    addresses: Addresses


class StageNeeds(FrozenModel):
    """What a stage takes of a machine, and of what that consists."""

    memory: StageMemory
    parameter_memory: StageMemory
    """Of `memory`, what the parameters take: the rest is for activations."""
    parameters: Count
    """Frozen ones included."""
    layers: int = Field(ge=0, le=MAX_STAGES)
    layer_input_bytes: Count
    """Of one microbatch."""
    is_last: bool
    streamed: StreamedWork


class DoctorWelcome(FrozenModel):
    kind: Literal["doctor_welcome"] = "doctor_welcome"
    software: SoftwareVersion = SOFTWARE_VERSION
    software_fits: bool = True
    """Whether the server understands one of the client's `protocols`."""
    observed_address: Address | None = None
    """The source of the client's connection; None when it comes through a relay."""
    admission: Text = ""
    """Why the run would not admit the client; empty when it would, or when it did not check."""
    probe_pass: Envelope | None = None
    neighbours: tuple[Neighbour, ...] = Field(default=(), max_length=MAX_CANDIDATES)
    smallest_stage: StageNeeds | None = None
    """The smallest stage; None when the server does not know the run's."""


class DoctorRefused(FrozenModel):
    """Sent in place of a welcome, or of the answer to one request."""

    kind: Literal["doctor_refused"] = "doctor_refused"
    code: Literal["admission", "busy"]
    reason: Text
    retry_after_seconds: Seconds = 0.0


class Echo(FrozenModel):
    kind: Literal["echo"] = "echo"
    number: Count


class EchoAnswer(FrozenModel):
    kind: Literal["echo_answer"] = "echo_answer"
    number: Count
    unix_seconds: UnixSeconds
    """The server's wall clock."""


class DialBack(FrozenModel):
    """A request to open a new connection to each address; all must have the client's own IP
    address."""

    kind: Literal["dial_back"] = "dial_back"
    addresses: tuple[Address, ...] = Field(min_length=1, max_length=MAX_CANDIDATES)


class DialBackResult(FrozenModel):
    address: Address
    reached: bool
    reason: Text = ""


class DialBackAnswer(FrozenModel):
    """One result per address, in the order of the request."""

    kind: Literal["dial_back_answer"] = "dial_back_answer"
    results: tuple[DialBackResult, ...] = Field(max_length=MAX_CANDIDATES)


class Upload(FrozenModel):
    """The payload, at most RATE_CHUNK_BYTES, is discarded; the last one of a burst is answered."""

    kind: Literal["upload"] = "upload"
    more: bool


class UploadAnswer(FrozenModel):
    kind: Literal["upload_answer"] = "upload_answer"
    bytes: Count
    """Bytes received since the last answer."""


class Download(FrozenModel):
    kind: Literal["download"] = "download"
    bytes: int = Field(ge=1, le=MAX_RATE_BYTES)


class DownloadChunk(FrozenModel):
    """One piece of the download; its payload has no meaning."""

    kind: Literal["download_chunk"] = "download_chunk"


DoctorRequest = Annotated[
    DoctorHello | Echo | DialBack | Upload | Download, Field(discriminator="kind")
]
DoctorAnswer = Annotated[
    DoctorWelcome | DoctorRefused | EchoAnswer | DialBackAnswer | UploadAnswer | DownloadChunk,
    Field(discriminator="kind"),
]

doctor_requests: TypeAdapter[DoctorRequest] = TypeAdapter(DoctorRequest)
doctor_answers: TypeAdapter[DoctorAnswer] = TypeAdapter(DoctorAnswer)
