"""Tickets: the signed statement of each leased microbatch, with the digests of its token ids."""

from __future__ import annotations

from functools import lru_cache

from swarm_coordinator.run_dir.sampled_tokens import REMEMBERED, RunTokens
from swarm_shared.base.types import MicrobatchIndex, RunId, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.identity.work_statements import LeaseTicket
from swarm_shared.protocol import Lease


class TicketOffice:
    """Adds tickets to leases; each is signed once."""

    def __init__(self, organiser: Identity, run: RunId, tokens: RunTokens) -> None:
        self._organiser, self._run, self._tokens = organiser, run, tokens
        self._ticket = lru_cache(REMEMBERED)(self._signed)

    def with_tickets(self, lease: Lease) -> Lease:
        """The lease with a ticket for each of its microbatches."""
        leased = tuple(
            one.model_copy(update={"ticket": self._ticket(lease.step, one.microbatch)})
            for one in lease.microbatches
        )
        return lease.model_copy(update={"microbatches": leased})

    def _signed(self, step: Step, microbatch: MicrobatchIndex) -> str:
        drawn = self._tokens.drawn(step, microbatch)
        ticket = LeaseTicket(
            run=self._run, step=step, microbatch=microbatch, tokens=drawn.tokens,
            targets=drawn.targets,
        )  # fmt: skip
        return encode_envelope(ticket.sign(self._organiser))
