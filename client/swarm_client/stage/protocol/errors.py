"""What goes wrong between the daemon and its stage worker; raised on both sides of the link."""

from __future__ import annotations

from swarm_client.stage.protocol.messages import FailureCode
from swarm_shared.base.errors import SwarmError


class WorkerDied(SwarmError):
    """The worker process has ended; everything that was in it is lost."""


class RequestFailed(SwarmError):
    """One request could not be carried out; the worker lives on and nothing else changed."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code: FailureCode = code
