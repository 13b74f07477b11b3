"""Checked sums over the control protocol: signed statements, and those that end a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kits.coordinator.shell_world import (
    Volunteer,
    client,
    crew_of,
    make_run,
    served,
)
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.history import history
from swarm_shared.base.types import Generation, StageIndex, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import JSON_PAYLOAD_TYPE, encode_envelope, seal
from swarm_shared.identity.work_statements import SumDigests, SumStatement
from swarm_shared.protocol import Refused, SumsChecked

SEED = "5eed" * 8


async def test_two_members_of_a_stage_sign_their_sums_in_every_close(tmp_path: Path) -> None:
    # Without audits: the volunteers answer none, and a close waits for the answer.
    folder = make_run(
        tmp_path / "run",
        limits__starting_peers_per_stage=1,
        trust__audit_share=0.0,
        trust__probation_cells=0,
    )
    async with served(folder) as run:
        assert run.manifest.codecs.average == "exact"
        volunteers = crew_of(run.invite, run.manifest, folder.path)
        crew = volunteers[0].crew | {StageIndex(0): Identity.generate()}
        home = folder.path / "second"
        home.mkdir()
        second = Volunteer(run.invite, run.manifest, home, StageIndex(0), crew)
        await run.train(*volunteers, second)
    assert history(folder.database).restored.finished
    assert second.seen.count("sum_check") == volunteers[0].seen.count("sum_check") > 0
    assert second.seen.count("sum_check") >= 2 * second.seen.count("apply"), "two seeds"
    assert "sum_check" not in volunteers[1].seen, "it is alone in its stage"


def statement(signer: Identity, run: str, spaces: int = 0, **changes: Any) -> str:
    values: dict[str, Any] = {
        "run": run, "generation": Generation(1), "step": Step(1), "attempt": 5,
        "stage": StageIndex(0), "peer": signer.peer_id, "seed": SEED,
        "checks": (SumDigests(part="0" * 16, result="0" * 16),),
    }  # fmt: skip
    content = SumStatement(**{**values, **changes}).model_dump_json() + " " * spaces
    return encode_envelope(seal(signer, SumStatement.domain, JSON_PAYLOAD_TYPE, content.encode()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": Step(2)}, "attempt 5 of step 2"),
        ({"attempt": 6}, "attempt 6 of step 1"),
        ({"run": "0" * 64}, "in run 000000000000"),
        ({"signer": "another"}, "must sign is signed by"),
        ({"envelope": "?"}, "is not base64"),
        ({"spaces": 1000}, "white space"),
    ],
    ids=["step", "attempt", "run", "signer", "text", "padding"],
)
async def test_a_statement_that_is_not_the_senders_own_ends_its_session(
    folder: RunFolder, changes: dict[str, Any], reason: str
) -> None:
    async with served(folder) as run:
        one = Identity.generate()
        signer = Identity.generate() if changes.pop("signer", None) else one
        envelope = changes.pop("envelope", None) or statement(
            signer, **{"run": run.invite.run_id, **changes}
        )
        async with client(run.invite, one) as volunteer:
            await volunteer.join()
            await volunteer.send(
                SumsChecked(step=Step(1), attempt=5, details=False, statement=envelope)
            )
            assert reason in (await volunteer.until(Refused)).reason


async def test_a_statement_that_was_not_asked_for_changes_nothing(folder: RunFolder) -> None:
    async with served(folder) as run:
        one = Identity.generate()
        async with client(run.invite, one) as volunteer:
            await volunteer.join()
            envelope = statement(one, run.invite.run_id)
            await volunteer.send(
                SumsChecked(step=Step(1), attempt=5, details=False, statement=envelope)
            )
        await run.train()
    assert history(folder.database).restored.finished
