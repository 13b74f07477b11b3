"""Signing of receipts (`swarm_shared.volunteer_rules.stage_account` decides what is signed)."""

from __future__ import annotations

from collections.abc import Callable

from swarm_shared.base.types import Generation, RunId, StageIndex
from swarm_shared.identity.credentials import Receipt, sign_receipt
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.volunteer_rules.stage_account import Counted


def receipt_signer(
    identity: Identity,
    run: RunId,
    stage: StageIndex,
    samples: int,
    generation: Callable[[], Generation],
) -> Callable[[Counted], str]:
    """A function that signs this peer's receipts of one stage, as envelopes in base64.

    `samples` is the number of sequences in a microbatch; `generation` returns that of the
    coordinator to which this peer is attached now.
    """

    def sign(counted: Counted) -> str:
        receipt = Receipt(
            run=run,
            generation=generation(),
            step=counted.step,
            microbatch=counted.microbatch,
            stage=stage,
            peer=identity.peer_id,
            samples=samples,
            tokens=counted.tokens,
            loss_sum=counted.loss_sum,
        )
        return encode_envelope(sign_receipt(identity, receipt))

    return sign
