"""Errors between the daemon and its stage worker; raised on both sides of the link."""

from __future__ import annotations

from typing import Literal

from swarm_client.ipc.numbered import WorkerDied
from swarm_shared.base.errors import SwarmError

__all__ = ["FailureCode", "RequestFailed", "WorkerDied"]

FailureCode = Literal[
    "not_finite",  # an output or a gradient of this worker holds an infinity or a NaN
    "out_of_memory",
    "bad_input",  # an impossible size, token id or number in the request
    "wrong_step",  # not the step (or version) that this worker is at
    "unknown_microbatch",  # a RunBackward for a microbatch that is not in flight
    "not_repeatable",  # computed again, a microbatch gives something else than was counted of it
    "discarded",  # discarded by the daemon before or during its computation
    "storage",  # a state file that cannot be written or read
    "device",  # the device is missing or does not work
]


class RequestFailed(SwarmError):
    """One request failed; the worker continues and nothing else has changed."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code: FailureCode = code
