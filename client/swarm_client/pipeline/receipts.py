"""Signing of receipts (`swarm_shared.volunteer_rules.stage_account` decides what is signed)."""

from __future__ import annotations

from collections.abc import Callable

from swarm_client.membership.membership import CurrentMembership
from swarm_shared.base.types import StageIndex
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.volunteer_rules.stage_account import Counted


def receipt_signer(
    identity: Identity, membership: CurrentMembership, stage: StageIndex
) -> Callable[[Counted], str]:
    """Return a function that signs this peer's receipts of one stage, as envelopes in base64."""

    def sign(counted: Counted) -> str:
        member = membership.now
        receipt = Receipt(
            run=member.run,
            generation=member.generation,
            step=counted.step,
            microbatch=counted.microbatch,
            stage=stage,
            peer=identity.peer_id,
            samples=member.manifest.training.sequences_per_microbatch,
            tokens=counted.tokens,
            loss_sum=counted.loss_sum,
            transcript=counted.transcript,
        )
        return encode_envelope(receipt.sign(identity))

    return sign
