"""A lost audit with real signatures: a receipt, its auditors' statements and owner bindings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.types import Generation, MicrobatchIndex, RunId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt, sign_owner_binding
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.identity.work_statements import (
    AuditStatement,
    SumDigests,
    SumStatement,
)
from swarm_shared.trust.evidence import Evidence, SignedStatement, Verdict

AUDITED, OWNER, FIRST, SECOND, THIRD = (
    Identity.from_seed(name * 32) for name in (b"a", b"o", b"f", b"s", b"t")
)
STEP, MICROBATCH, STAGE = Step(9), MicrobatchIndex(3), StageIndex(1)
TRUE, FALSE = (
    simulated_transcript(STEP, MICROBATCH, STAGE, StageIndex(1), variant) for variant in (0, 1)
)


def receipt(run: RunId, *, signer: Identity = AUDITED, **changes: Any) -> str:
    values: dict[str, Any] = {
        "run": run, "generation": Generation(1), "step": STEP, "microbatch": MICROBATCH,
        "stage": STAGE, "peer": AUDITED.peer_id, "samples": 2, "tokens": 32, "loss_sum": 100.0,
        "transcript": FALSE,
    }  # fmt: skip
    return encode_envelope(Receipt(**{**values, **changes}).sign(signer))


def statement(run: RunId, auditor: Identity, **changes: Any) -> str:
    """By default one that differs from a false receipt."""
    values: dict[str, Any] = {
        "run": run, "generation": Generation(1), "audit": 1, "step": STEP,
        "microbatch": MICROBATCH, "stage": STAGE, "peer": AUDITED.peer_id,
        "auditor": auditor.peer_id, "transcript": TRUE, "loss_sum": 100.0, "distance": 1.0,
    }  # fmt: skip
    return encode_envelope(AuditStatement(**{**values, **changes}).sign(auditor))


def sums(member: Identity, run: RunId, **changes: Any) -> str:
    """A statement of what a member put into an average and took out."""
    values: dict[str, Any] = {
        "run": run, "generation": Generation(1), "step": STEP, "attempt": 2, "stage": STAGE,
        "peer": member.peer_id, "seed": "5" * 32,
        "checks": (SumDigests(part="0" * 16, result="1" * 16),),
    }  # fmt: skip
    return encode_envelope(SumStatement(**{**values, **changes}).sign(member))


def binding(owner: Identity, device: Identity) -> str:
    return encode_envelope(sign_owner_binding(owner, device.peer_id))


def evidence(run: RunId, statements: Sequence[str] | None = None, **changes: Any) -> Evidence:
    """The audited peer is a device of OWNER; its auditors are their own owners."""
    found = [statement(run, FIRST), statement(run, SECOND)] if statements is None else statements
    values: dict[str, Any] = {
        "receipt": receipt(run), "binding": binding(OWNER, AUDITED),
        "statements": tuple(SignedStatement(statement=one) for one in found),
        "tolerance": 1e-4, "entitled": 3,
    }  # fmt: skip
    return Evidence(**{**values, **changes})


def verdict(run: RunId, of: Evidence | None = None, **changes: Any) -> Verdict:
    values: dict[str, Any] = {
        "step": STEP, "microbatch": MICROBATCH, "stage": STAGE, "peer": AUDITED.peer_id,
        "owner": OWNER.peer_id, "void_after": Step(4), "evidence": of or evidence(run),
    }  # fmt: skip
    return Verdict(**{**values, **changes})
