"""Tickets and permits: signed statements of each leased microbatch, with the digests of its token
ids, and of each order to audit."""

from __future__ import annotations

from functools import lru_cache

from swarm_coordinator.run_dir.sampled_tokens import REMEMBERED, RunTokens
from swarm_shared.base.types import Generation, MicrobatchIndex, PeerId, RunId, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.identity.work_statements import AuditPermit, LeaseTicket
from swarm_shared.protocol import Audit, Lease


class TicketOffice:
    """Adds tickets to leases, each of which is signed once, and permits to orders to audit."""

    def __init__(
        self, organiser: Identity, run: RunId, generation: Generation, tokens: RunTokens
    ) -> None:
        self._organiser, self._run, self._generation = organiser, run, generation
        self._tokens = tokens
        self._ticket = lru_cache(REMEMBERED)(self._signed)

    def with_tickets(self, lease: Lease) -> Lease:
        """The lease with a ticket for each of its microbatches."""
        leased = tuple(
            one.model_copy(update={"ticket": self._ticket(lease.step, one.microbatch)})
            for one in lease.microbatches
        )
        return lease.model_copy(update={"microbatches": leased})

    def with_permit(self, order: Audit, auditor: PeerId) -> Audit:
        """The order with a permit for its auditor."""
        sources = order.sources
        permit = AuditPermit(
            run=self._run, generation=self._generation, audit=order.audit, step=order.step,
            microbatch=order.microbatch, stage=order.stage, auditor=auditor, peer=order.peer,
            before=None if sources is None else sources.before,
            behind=None if sources is None else sources.behind,
        )  # fmt: skip
        envelope = encode_envelope(permit.sign(self._organiser))
        return order.model_copy(update={"permit": envelope})

    def _signed(self, step: Step, microbatch: MicrobatchIndex) -> str:
        drawn = self._tokens.drawn(step, microbatch)
        ticket = LeaseTicket(
            run=self._run, step=step, microbatch=microbatch, tokens=drawn.tokens,
            targets=drawn.targets,
        )  # fmt: skip
        return encode_envelope(ticket.sign(self._organiser))
