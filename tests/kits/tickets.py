"""Tickets of an organiser of tests, for microbatches of any content."""

from __future__ import annotations

import base64
from functools import cache

from kits.members import ORGANISER
from swarm_shared.base.types import MicrobatchIndex, RunId, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.work_statements import LeaseTicket, wire_digest


@cache
def ticket(
    run: RunId, step: int, microbatch: int, tokens: bytes, targets: bytes,
    organiser: Identity = ORGANISER,
) -> str:  # fmt: skip
    """A ticket in base64 for these token ids and targets."""
    content = LeaseTicket(
        run=run, step=Step(step), microbatch=MicrobatchIndex(microbatch),
        tokens=wire_digest(tokens), targets=wire_digest(targets),
    )  # fmt: skip
    return base64.b64encode(content.sign(organiser)).decode()
