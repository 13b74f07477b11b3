"""A run's ledger, exported by its organiser and checked by a stranger, with their own programs."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kits import lost_audit
from kits.coordinator import run as run_kit
from kits.coordinator.shell_world import make_run
from swarm_client.cli.main import swarm_client
from swarm_coordinator.cli.ledger import provable_verdicts
from swarm_coordinator.cli.main import cli, run
from swarm_coordinator.core.events import RolledBack, VerdictRecord
from swarm_coordinator.durability.run_files import load_identity, load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.records import PeerSeen
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import RunId, Step, Version
from swarm_shared.identity.credentials import sign_owner_binding
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.trust.evidence import MAX_SUM_STATEMENTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    made = run_kit.with_a_past(make_run(tmp_path_factory.mktemp("ledger") / "run", steps=9))
    run_kit.one_start(
        made, RolledBack(Version(4), "all were lost"), run_kit.step(5, attempt=2),
        PeerSeen(run_kit.ANNA, "anna"),
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def ledger(folder: RunFolder) -> Path:
    file = folder.path / "run.ledger"
    assert run(["ledger", "export", str(folder.path), str(file)]) == 0
    return file


def test_a_stranger_finds_every_number_right(folder: RunFolder, ledger: Path) -> None:
    organiser = load_identity(folder).peer_id
    done = CliRunner().invoke(swarm_client, ["verify-ledger", str(ledger)])
    assert done.exit_code == 0
    assert "every number is correct: 5 steps" in done.output
    assert organiser in done.output
    assert "anna (…KooWAnna)" in done.output
    words = ["verify-ledger", str(ledger), "--organiser", organiser, "--json"]
    told = json.loads(CliRunner().invoke(swarm_client, words).output)
    counted = {one["peer"]: one["microbatches"] for one in told["totals"]}
    known: dict[str, int] = {}
    for part in history(folder.database).contributions:
        known[part.peer] = known.get(part.peer, 0) + part.microbatches
    assert counted == known
    credit = sum(one["credit"] for one in told["totals"])
    assert credit == pytest.approx(5 * load_manifest(folder).tokens_per_step)


def test_a_person_with_two_devices_is_one_row_of_the_ledger(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=9)
    owner, device = Identity.generate(), Identity.generate()
    binding = base64.b64encode(sign_owner_binding(owner, device.peer_id)).decode()
    shares = tuple(
        replace(share, peer=one.peer_id)
        for share, one in zip(run_kit.step(1).shares, (owner, device, device), strict=True)
    )
    run_kit.one_start(
        folder, replace(run_kit.step(1), shares=shares),
        PeerSeen(owner.peer_id, "vera", "", ""), PeerSeen(device.peer_id, "vera", "", binding),
    )  # fmt: skip
    file = tmp_path / "run.ledger"
    assert run(["ledger", "export", str(folder.path), str(file)]) == 0
    done = CliRunner().invoke(swarm_client, ["verify-ledger", str(file)])
    [row] = done.output.splitlines()[1:]
    assert row.startswith(f"  vera (…{owner.peer_id[-8:]}): ")
    assert row.endswith("of 2 devices")
    told = json.loads(
        CliRunner().invoke(swarm_client, ["verify-ledger", str(file), "--json"]).output
    )
    [person] = told["people"]
    assert (person["peer"], len(person["devices"]), len(told["totals"])) == (owner.peer_id, 2, 2)
    assert person["credit"] == pytest.approx(load_manifest(folder).tokens_per_step)


def test_a_stranger_finds_the_verdicts_proved_and_the_void_credit_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=9)
    kit, of = lost_audit, run_id_of(load_manifest(folder))
    proved = VerdictRecord(
        kit.STEP, kit.MICROBATCH, kit.STAGE, kit.AUDITED.peer_id, kit.OWNER.peer_id,
        kit.AUDITED.peer_id, "it lies", Step(1), kit.evidence(of),
    )  # fmt: skip
    unproved = replace(
        proved, peer=run_kit.ANNA, owner=run_kit.ANNA, evidence=kit.evidence(of, receipt="")
    )
    shares = tuple(
        replace(share, peer=peer)
        for share, peer in zip(
            run_kit.step(1).shares, (kit.AUDITED.peer_id, run_kit.BERT, run_kit.ANNA), strict=True
        )
    )
    run_kit.one_start(
        folder, *(replace(run_kit.step(n), shares=shares) for n in (1, 2, 3)), proved, unproved,
        PeerSeen(kit.AUDITED.peer_id, "liar", "", kit.binding(kit.OWNER, kit.AUDITED)),
    )  # fmt: skip
    file = tmp_path / "run.ledger"
    exported = CliRunner().invoke(cli, ["ledger", "export", str(folder.path), str(file)])
    assert f"the verdict against {run_kit.ANNA} in step 9 is left out" in exported.output
    done = CliRunner().invoke(swarm_client, ["verify-ledger", str(file)])
    head, said, *_ = done.output.splitlines()
    assert "verdicts that follow from their evidence: 1" in head
    assert said == (
        f"  …{kit.AUDITED.peer_id[-8:]}, the audited peer, lost the audit of microbatch 3 of step "
        "9 in stage 1: of 3 owners 2 contradict the receipt and 1 agree; credit of steps 2 to 9 "
        "is void"
    )
    told = json.loads(
        CliRunner().invoke(swarm_client, ["verify-ledger", str(file), "--json"]).output
    )
    assert [one["outcome"] for one in told["verdicts"]] == ["lost"]
    counted = {one["peer"]: one["microbatches"] for one in told["totals"]}
    assert counted == {kit.AUDITED.peer_id: 1, run_kit.BERT: 3, run_kit.ANNA: 6}


def test_a_verdict_with_more_statements_than_a_line_takes_does_not_end_the_export() -> None:
    of = RunId("ab" * 32)
    record = VerdictRecord(
        lost_audit.STEP, None, lost_audit.STAGE, run_kit.ANNA, run_kit.ANNA, run_kit.ANNA,
        "it lies",
        statements=(lost_audit.sums(lost_audit.FIRST, of),) * (MAX_SUM_STATEMENTS + 1),
    )  # fmt: skip
    found, [sentence] = provable_verdicts(of, (record,))
    assert found == []
    assert f"the verdict against {run_kit.ANNA} in step 9 is left out" in sentence


def test_a_changed_line_and_another_organiser_are_refused(ledger: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.ledger"
    changed.write_text(
        ledger.read_text().replace(f'["{run_kit.ANNA}",0,1]', f'["{run_kit.ANNA}",0,2]')
    )
    for words in (
        ["verify-ledger", str(changed)],
        ["verify-ledger", str(ledger), "--organiser", run_kit.ANNA],
    ):
        done = CliRunner().invoke(swarm_client, words)
        assert isinstance(done.exception, ProtocolError)
        assert str(done.exception).startswith("line ")


def test_a_run_that_was_never_started_has_no_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run")
    assert run(["ledger", "export", str(folder.path), str(tmp_path / "out")]) == 2
    assert "has not been started yet" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_database_that_begins_in_the_middle_cannot_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run")
    run_kit.one_start(folder, RolledBack(Version(4), "the database is new"), run_kit.step(5))
    assert run(["ledger", "export", str(folder.path), str(tmp_path / "out")]) == 7
    assert "before 5" in capsys.readouterr().err
