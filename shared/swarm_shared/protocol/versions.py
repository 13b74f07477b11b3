"""The versions of the protocols, and the refusal of a client that shares none with the coordinator.

A change of any message or stream is a new version. A hello carries the range that its sender
understands, and is compared before anything else of it is parsed. Two things keep their form in
all versions, so that each side can explain itself to any other: these fields of the hello, and
those of the refusal (`HelloVersions`, `VersionRefusal`). Further fields of both are ignored here.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarm_shared import SOFTWARE_VERSION
from swarm_shared.base.errors import VersionError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import SoftwareVersion, Text

ProtocolVersion = Annotated[int, Field(ge=0, le=10_000)]


class VersionRange(FrozenModel):
    """Versions that one side understands, both ends included."""

    oldest: ProtocolVersion
    newest: ProtocolVersion

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.oldest > self.newest:
            raise ValueError(f"the versions {self.oldest} to {self.newest} are no range")
        return self

    def overlaps(self, other: VersionRange) -> bool:
        return self.oldest <= other.newest and other.oldest <= self.newest

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"version {self.oldest}"
        return f"versions {self.oldest} to {self.newest}"


PROTOCOL_VERSIONS: Final = VersionRange(oldest=1, newest=1)
"""Versions that this software understands."""


class _AnyVersion(BaseModel):
    """The part of a message that is the same in all versions."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class HelloVersions(_AnyVersion):
    kind: Literal["hello"]
    software: SoftwareVersion
    protocols: VersionRange


class VersionRefusal(_AnyVersion):
    kind: Literal["refused"]
    code: Literal["version"]
    reason: Text


def check_versions(hello: bytes, ours: VersionRange = PROTOCOL_VERSIONS) -> None:
    """VersionError for the hello of a client that shares no version with this coordinator.

    What is no hello at all is left to the parser of this version.
    """
    try:
        client = HelloVersions.model_validate_json(hello)
    except ValidationError:
        return
    if client.protocols.overlaps(ours):
        return
    if client.protocols.newest < ours.oldest:
        advice = "update swarmtrain on this machine with `swarm-client update`"
    else:
        advice = (
            f"install swarmtrain {SOFTWARE_VERSION} on this machine, or ask the organiser to "
            "update the coordinator"
        )
    raise VersionError(
        f"this run's coordinator (swarmtrain {SOFTWARE_VERSION}) speaks {ours} of the protocol and "
        f"this machine (swarmtrain {client.software}) {client.protocols}: {advice}, then join again"
    )


def version_refusal(answer: bytes) -> VersionError | None:
    """The error in a coordinator's refusal of this client's version; None for other messages."""
    try:
        return VersionError(VersionRefusal.model_validate_json(answer).reason)
    except ValidationError:
        return None
