"""Requests and answers between the daemon and its child processes: numbered messages. No I/O.

Owns the number that pairs a request with its answer. Does not own frames
(`swarm_shared.base.json_messages`), sockets (`swarm_client.ipc.child_process`) nor waiting callers
(`swarm_client.ipc.child_rpc`). Imports no event loop, because trio in the asyncio averaging worker
would cost each volunteer 0.2 s of CPU.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from swarm_shared.base.errors import SwarmError
from swarm_shared.base.frozen_model import FrozenModel

RequestNumber = Annotated[int, Field(ge=0, lt=2**53)]


class Numbered(FrozenModel):
    """Base of requests and answers. 0 is the number of a message that no caller waits for."""

    request: RequestNumber = 0

    def numbered(self, request: int) -> Self:
        """This message under the given request number."""
        return self.model_copy(update={"request": request})


class WorkerDied(SwarmError):
    """A child process has ended; all its state is lost."""


class Failure(Numbered):
    """Base of the answers that report a failed request."""

    def error(self) -> Exception:
        """The exception that the caller of the request gets."""
        raise NotImplementedError
