"""What a member signs about the sums of an attempt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kits.averaging.membership import RUN
from swarm_client.auditing.sum_statements import SumSigner
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import Generation, StageIndex
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.identity.work_statements import SumDigests, SumStatement
from swarm_shared.protocol import Close, Reduction, SumCheck

ME = Identity.generate()
SEED = "5eed" * 8
HELD, NEXT = SimpleNamespace(stage=StageIndex(1)), SimpleNamespace(stage=StageIndex(2))
OWN, TIED = (Reduction(part=part, members=(ME.peer_id,)) for part in ("own", "tied"))


class Digests:
    """Digests that name worker, part and detail."""

    async def digest(self, worker: Any, check: SumCheck, reduction: Reduction) -> SumDigests:
        part = f"{worker.stage}{int(check.details)}{len(reduction.part)}".rjust(16, "0")
        return SumDigests(part=part, result=check.seed[:16])


def signer() -> SumSigner:
    member = SimpleNamespace(run=RUN, generation=Generation(3))
    return SumSigner(ME, SimpleNamespace(now=member), Digests())  # type: ignore[arg-type]


def close(*moving: Reduction) -> Close:
    return Close(step=4, attempt=2, committed=(), reductions=(OWN, TIED), moving=moving)


@pytest.mark.parametrize("details", [True, False])
async def test_a_statement_is_of_the_reductions_in_the_order_of_the_close(details: bool) -> None:
    check = SumCheck(step=4, attempt=2, seed=SEED, details=details)
    answer = await signer().state(check, close(OWN), HELD, NEXT)  # type: ignore[arg-type]
    assert (answer.step, answer.attempt, answer.details) == (4, 2, details)
    statement = SumStatement.open(decode_envelope(answer.statement, "sums"), ME.peer_id)
    assert (statement.run, statement.generation) == (RUN, 3)
    assert (statement.step, statement.attempt, statement.stage) == (4, 2, 1)
    assert (statement.peer, statement.seed) == (ME.peer_id, SEED)
    known = [each.part.lstrip("0") for each in statement.checks]
    assert known == [f"1{int(details)}3", f"1{int(details)}4", f"2{int(details)}3"]


async def test_no_statement_is_made_of_a_move_whose_next_stage_is_gone() -> None:
    check = SumCheck(step=4, attempt=2, seed=SEED)
    with pytest.raises(ProtocolError):
        await signer().state(check, close(OWN), HELD, None)  # type: ignore[arg-type]
