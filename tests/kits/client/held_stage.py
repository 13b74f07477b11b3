"""A held stage around a worker that a test provides."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from kits.transcripts import TRANSCRIPT
from swarm_client.membership.membership import CurrentMembership, Membership
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.receipts import receipt_signer
from swarm_shared.base.types import (
    Generation,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Step,
    Version,
)
from swarm_shared.identity.keys import Identity
from swarm_shared.volunteer_rules.stage_account import StageAccount


def membership_in(run: str, sequences_per_microbatch: int = 1) -> CurrentMembership:
    """A membership of a run whose manifest has only this number."""
    training = SimpleNamespace(sequences_per_microbatch=sequences_per_microbatch)
    return member_of(run, SimpleNamespace(training=training))


def member_of(run: str, manifest: Any, certificate: str = "") -> CurrentMembership:
    return CurrentMembership(
        Membership(RunId(run), PeerId("organiser"), certificate, manifest, Generation(1))
    )


def held_stage(
    identity: Identity,
    worker: Any,
    stage: int,
    *,
    run: str = "ab" * 32,
    counted: Iterable[tuple[int, int]] = (),
) -> Holding:
    """A stage at version 0 with receipts for the `counted` (step, microbatch) pairs."""
    sign = receipt_signer(identity, membership_in(run), StageIndex(stage))
    account = StageAccount(StageIndex(stage), Version(0), 0, sign)
    for step, microbatch in counted:
        count(account, step, microbatch)
    return Holding(worker, account, None)


def count(account: StageAccount[str], step: int, microbatch: int) -> None:
    """Sign the receipt of a microbatch, as after its computation."""
    computation = account.begin(Step(step), MicrobatchIndex(microbatch), (account.stage,))
    account.finish(computation, added=True, tokens=4, loss_sum=None, transcript=TRANSCRIPT)
