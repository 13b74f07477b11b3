"""`swarm-coordinator trust`: owners, verdicts and evidence of a run's database."""

from __future__ import annotations

import json
from dataclasses import replace

from click.testing import CliRunner

from kits import lost_audit
from kits.coordinator.run import one_start
from kits.peer_names import named
from swarm_coordinator.cli.main import cli
from swarm_coordinator.core.events import (
    AgreementRecord,
    AgreementsRecord,
    StandingRecord,
    StandingsRecord,
    VerdictRecord,
)
from swarm_coordinator.core.trust.arithmetic_classes import AGREED_CELLS
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.base.types import MicrobatchIndex, RunId, StageIndex, Step
from swarm_shared.identity.signed_manifest import run_id_of

HONEST, LIAR = named("honest"), named("1iar")
VERDICT = VerdictRecord(
    step=Step(9), microbatch=MicrobatchIndex(3), stage=StageIndex(1), peer=LIAR, owner=LIAR,
    audited=LIAR, reason="what it signed is not what the microbatch gives", void_after=Step(4),
    evidence=lost_audit.evidence(RunId("ab" * 32), receipt=""),
)  # fmt: skip


def shown(folder: RunFolder, *arguments: str) -> str:
    result = CliRunner().invoke(cli, ["trust", str(folder.path), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_owners_and_verdicts_are_listed_with_their_evidence(folder: RunFolder) -> None:
    standings = StandingRecord(HONEST, 60, 0, Step(8), 12), StandingRecord(LIAR, 0, 1, Step(4), 3)
    one_start(folder, StandingsRecord(standings), VERDICT)
    honest, liar = shown(folder).splitlines()[1:3]
    assert honest.startswith(HONEST)
    assert honest.endswith("established")
    assert liar.endswith("on probation, 50 more to pass")
    assert shown(folder).splitlines()[-1] == (
        f"verdict 1: step 9: {LIAR} lost an audit: what it signed is not what the microbatch gives "
        "(2 signed statement(s); credit of steps 5 to 9 is void)"
    )
    document = json.loads(shown(folder, "--json"))
    assert document["verdicts"][0]["evidence"] == VERDICT.evidence.model_dump(mode="json")
    assert [owner["passed"] for owner in document["owners"]] in ([60, 0], [0, 60])


def test_machines_that_compute_alike_are_listed_by_class(folder: RunFolder) -> None:
    one, other = sorted((HONEST, LIAR))
    agreed = AgreementRecord(StageIndex(1), one, "cpu", other, "cuda: Some GPU", AGREED_CELLS)
    one_start(folder, AgreementsRecord((agreed, replace(agreed, stage=StageIndex(0), cells=1))))
    lines = [text for text in shown(folder).splitlines() if text.startswith("class")]
    assert lines == [f"class 1, stage 1: {one} (cpu), {other} (cuda: Some GPU)"]
    (group,) = json.loads(shown(folder, "--json"))["classes"]
    assert group[0] == {"stage": 1, "peer": one, "device": "cpu"}


def test_the_evidence_of_a_verdict_is_shown_in_sentences(folder: RunFolder) -> None:
    proved = lost_audit.verdict(run_id_of(load_manifest(folder)))
    shown_in_full = replace(VERDICT, peer=proved.peer, owner=proved.owner, evidence=proved.evidence)
    one_start(folder, VERDICT, shown_in_full)
    assert "its evidence is incomplete" in shown(folder, "--verdict", "1")
    summary, receipt, first, second, terms = shown(folder, "--verdict", "2").splitlines()
    assert summary.startswith(f"step 9: {proved.peer} lost an audit")
    assert f"signed by {proved.peer} (owner {proved.owner})" in receipt
    assert "microbatch 3 of step 9 in stage 1" in receipt
    assert lost_audit.FIRST.peer_id in first
    assert "it computed something else, relative distance 1" in second
    assert terms.endswith("3 owners could vote, distances up to 0.0001 are rounding; from this "
                          "follows: lost")  # fmt: skip
    result = CliRunner().invoke(cli, ["trust", str(folder.path), "--verdict", "3"])
    assert "there is no verdict 3; this run has 2" in str(result.exception)


def test_the_statements_of_a_verdict_about_an_average_are_shown(folder: RunFolder) -> None:
    of = run_id_of(load_manifest(folder))
    statements = (
        lost_audit.sums(lost_audit.AUDITED, of),
        lost_audit.statement(of, lost_audit.FIRST),
    )
    one_start(folder, replace(VERDICT, microbatch=None, evidence=None, statements=statements))
    summary, sums, audit = shown(folder, "--verdict", "1").splitlines()
    assert "2 signed statement(s)" in summary
    assert f"signed by {lost_audit.AUDITED.peer_id}: attempt 2, digests {'0' * 16} in" in sums
    assert f"signed by {lost_audit.FIRST.peer_id}: microbatch 3 of" in audit
    document = json.loads(shown(folder, "--json"))
    assert document["verdicts"][0]["statements"] == list(statements)


def test_a_run_that_was_never_started_has_nothing_to_show(folder: RunFolder) -> None:
    result = CliRunner().invoke(cli, ["trust", str(folder.path)])
    assert "has not been started yet" in (result.output + str(result.exception))
