"""Tickets at a stage server: nothing is computed that the coordinator has not leased.

A sender chooses neither the token ids of a microbatch nor its targets: the organiser signs their
digests, which the first and the last stage compare with what they get.
"""

from __future__ import annotations

from functools import lru_cache

from swarm_client.membership.membership import CurrentMembership
from swarm_client.stage.protocol.slot_sizes import TOKEN_BYTES
from swarm_shared.base.errors import AdmissionError, FrameError, SignatureError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.identity.work_statements import LeaseTicket, wire_digest
from swarm_shared.protocol import Forward
from swarm_shared.protocol.framing import Buffer

VERIFIED_TICKETS = 4096
"""Tickets whose signatures are remembered: a microbatch may come several times."""


class TicketCheck:
    """Checks the tickets of the microbatches that a stage is sent."""

    def __init__(self, membership: CurrentMembership) -> None:
        self._membership = membership
        self._opened = lru_cache(VERIFIED_TICKETS)(_open)

    def check(self, message: Forward, payload: Buffer) -> None:
        """AdmissionError, with the reason, unless the microbatch is one that the run has leased."""
        member = self._membership.now
        manifest = member.manifest
        try:
            ticket = self._opened(message.ticket, member.organiser)
        except (FrameError, SignatureError) as error:
            raise AdmissionError(f"a microbatch came without a ticket: {error}") from error
        named = (ticket.run, ticket.step, ticket.microbatch)
        if named != (member.run, message.step, message.microbatch):
            raise AdmissionError(
                f"microbatch {message.microbatch} of step {message.step} came with the ticket of "
                f"microbatch {ticket.microbatch} of step {ticket.step}"
            )
        view = memoryview(payload).cast("B")
        target_bytes = manifest.tokens_per_microbatch * TOKEN_BYTES
        if message.stage == 0 and wire_digest(view[:-target_bytes]) != ticket.tokens:
            raise AdmissionError("the token ids are not those that were leased")
        is_last = message.stage == manifest.stage_count - 1
        if is_last and wire_digest(view[-target_bytes:]) != ticket.targets:
            raise AdmissionError("the targets are not those that were leased")


def _open(envelope: str, organiser: PeerId) -> LeaseTicket:
    return LeaseTicket.open(decode_envelope(envelope, "the ticket"), organiser)
