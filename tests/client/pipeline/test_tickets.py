"""Tickets at a stage server: nothing is computed that the coordinator has not leased."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kits.members import ORGANISER
from kits.tickets import ticket
from swarm_client.membership.membership import CurrentMembership
from swarm_client.pipeline.tickets import TicketCheck
from swarm_shared.base.errors import AdmissionError
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import Forward

RUN = "ab" * 32
TOKENS_PER_MICROBATCH = 4
TOKENS, TARGETS = b"i" * 16, b"t" * 16
ACTIVATION = b"a" * 40


def checker(stages: int = 3) -> TicketCheck:
    manifest = SimpleNamespace(tokens_per_microbatch=TOKENS_PER_MICROBATCH, stage_count=stages)
    member = SimpleNamespace(run=RUN, organiser=ORGANISER.peer_id, manifest=manifest)
    return TicketCheck(CurrentMembership(member))  # type: ignore[arg-type]


def forward(stage: int, envelope: str, **changes: object) -> Forward:
    message = Forward(
        request=1, step=Step(3), microbatch=MicrobatchIndex(2), stage=StageIndex(stage),
        accumulate=(), input_bytes=16, target_bytes=16, ticket=envelope,
    )  # fmt: skip
    return message.model_copy(update=changes)


def test_what_the_coordinator_has_leased_is_served_in_every_stage() -> None:
    check, leased = checker(), ticket(RUN, 3, 2, TOKENS, TARGETS)
    check.check(forward(0, leased), TOKENS + TARGETS)
    check.check(forward(1, leased), ACTIVATION + TARGETS)
    check.check(forward(2, leased), ACTIVATION + TARGETS)


def test_stage_0_takes_no_other_token_ids() -> None:
    leased = ticket(RUN, 3, 2, TOKENS, TARGETS)
    with pytest.raises(AdmissionError, match="token ids are not those that were leased"):
        checker().check(forward(0, leased), b"x" * 16 + TARGETS)


def test_the_last_stage_takes_no_other_targets() -> None:
    leased = ticket(RUN, 3, 2, TOKENS, TARGETS)
    with pytest.raises(AdmissionError, match="targets are not those that were leased"):
        checker().check(forward(2, leased), ACTIVATION + b"x" * 16)
    checker().check(forward(1, leased), ACTIVATION + b"x" * 16)


@pytest.mark.parametrize(
    "changes",
    [{"step": Step(4)}, {"microbatch": MicrobatchIndex(3)}],
)
def test_a_ticket_is_of_one_microbatch(changes: dict[str, object]) -> None:
    leased = ticket(RUN, 3, 2, TOKENS, TARGETS)
    with pytest.raises(AdmissionError, match="came with the ticket of"):
        checker().check(forward(0, leased, **changes), TOKENS + TARGETS)


def test_a_ticket_of_another_run_is_none() -> None:
    with pytest.raises(AdmissionError, match="came with the ticket of"):
        checker().check(forward(0, ticket("cd" * 32, 3, 2, TOKENS, TARGETS)), TOKENS + TARGETS)


@pytest.mark.parametrize(
    "envelope",
    ["", "AA==", ticket(RUN, 3, 2, TOKENS, TARGETS, organiser=Identity.from_seed(b"x" * 32))],
)
def test_only_the_organiser_signs_tickets(envelope: str) -> None:
    with pytest.raises(AdmissionError, match="without a ticket"):
        checker().check(forward(0, envelope), TOKENS + TARGETS)
