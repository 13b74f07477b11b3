"""A member's statements about the sums of a step close, for the coordinator's check."""

from __future__ import annotations

from typing import Protocol

from swarm_client.membership.membership import CurrentMembership
from swarm_client.stage.handle.worker_handle import StageWorker
from swarm_shared.base.errors import ProtocolError
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.identity.work_statements import SumDigests, SumStatement
from swarm_shared.protocol import Close, Reduction, SumCheck, SumsChecked


class Digester(Protocol):
    """Computes the digests of a reduction that is done."""

    async def digest(
        self, worker: StageWorker, check: SumCheck, reduction: Reduction
    ) -> SumDigests:
        """Return the digests of one reduction. SwarmError where its data is lost."""


class SumSigner:
    """Signs the statements of sums; a `swarm_client.pipeline.step_close.SumStatements`."""

    def __init__(
        self, identity: Identity, membership: CurrentMembership, digester: Digester
    ) -> None:
        self._identity = identity
        self._membership = membership
        self._digester = digester

    async def state(
        self, check: SumCheck, close: Close, held: StageWorker, prepared: StageWorker | None
    ) -> SumsChecked:
        """Sign the digests of all reductions of the averaged attempt: those of the held stage, then
        those of the one that this peer moves to. SwarmError where one of them is lost."""
        work = [(held, reduction) for reduction in close.reductions]
        if close.moving:
            if prepared is None:
                raise ProtocolError("the next stage was lost")
            work += [(prepared, reduction) for reduction in close.moving]
        member = self._membership.now
        statement = SumStatement(
            run=member.run, generation=member.generation, step=check.step, attempt=check.attempt,
            stage=held.stage, peer=self._identity.peer_id, seed=check.seed, weights=check.weights,
            checks=tuple(
                [
                    await self._digester.digest(worker, check, reduction)
                    for worker, reduction in work
                ]
            ),
        )  # fmt: skip
        return SumsChecked(
            step=check.step, attempt=check.attempt, details=check.details,
            statement=encode_envelope(statement.sign(self._identity)),
        )  # fmt: skip
