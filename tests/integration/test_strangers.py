"""A run among strangers: members with a modified client, on real processes.

Each liar is found, named with evidence and sent away; the honest keep their places; and the model
is the one that one honest process trains, to the bit, because every cell of these runs is audited.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kits.runs.fault_run import TINY
from kits.runs.real_run import Run
from swarm_coordinator.cli.main import run as run_coordinator
from swarm_coordinator.core.events import VerdictRecord
from swarm_coordinator.storage.contributions import read_contributions
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.records import read_standings, read_verdicts
from swarm_shared.base.errors import FrameError, SignatureError
from swarm_shared.base.types import PeerId
from swarm_shared.credit.ledger import verify_ledger
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.identity.work_statements import (
    AuditStatement,
    SumStatement,
    open_audit,
    open_sums,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

ATTACK = Path(__file__).parents[1] / "kits" / "attack"
MODIFIED = ATTACK / "modified_client"
HALF_DRAWS = ATTACK / "half_draws"
HONEST_PER_STAGE = 3
STEPS = 6

LOSES = "loses"
"""The liar loses an audit, with evidence."""
CLEARED = "is cleared"
"""Nothing of the liar's is counted; it is charged, and may be sent away later."""

HARMLESS = "is not served"
"""What it sends is refused before anything is computed."""

CHEATS = {
    "zeros": LOSES,
    "zero gradients, honest boundary": LOSES,
    "sign flipped": LOSES,
    "sign flipped, eight times": LOSES,
    "scaled by 1.01": LOSES,
    "huge": LOSES,
    "noise of 1 %": LOSES,
    "one element": LOSES,
    "stale parameters": LOSES,
    "outputs of zeros": LOSES,
    "outputs scaled": LOSES,
    "another output signed": CLEARED,
    "another gradient signed": CLEARED,
    "no inputs for auditors": CLEARED,
    "wrong inputs for auditors": CLEARED,
    "false statements": LOSES,
    "false claim of withheld inputs": CLEARED,
    "made-up loss": LOSES,
    "other token ids": HARMLESS,
    "sum doubled": LOSES,
    "one added to a sum": LOSES,
    "another sum for one member": CLEARED,
    "one added to a sum, and blamed on a member": CLEARED,
    "the largest numbers as its part": CLEARED,
    "another part stated": CLEARED,
    "another result stated": CLEARED,
    "sums that do not add up": LOSES,
    "no statement of sums": CLEARED,
    "one added to a sum, and stated as its own part": LOSES,
    "its part against its gradient": LOSES,
    "zeros as its part": LOSES,
}
LAST_STAGE_ONLY = {"made-up loss"}


@contextmanager
def modified(run: Run, folder: Path, cheat: str = "") -> Iterator[None]:
    """Processes that are started meanwhile import the `sitecustomize` of this folder."""
    environment = run.swarm.environment
    known = os.environ.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), known)))
    environment["SWARM_TEST_CHEAT"] = cheat
    try:
        yield
    finally:
        del environment["PYTHONPATH"], environment["SWARM_TEST_CHEAT"]


def verdicts(run: Run) -> tuple[VerdictRecord, ...]:
    with open_for_reading(run.database) as connection:
        return read_verdicts(connection)


def names(run: Run) -> dict[str, str]:
    """Names by peer ID, of all peers that were ever admitted."""
    with open_for_reading(run.database) as connection:
        rows = connection.execute("SELECT peer, name FROM peers").fetchall()
    return {peer: name for peer, name in rows if name}


def a_run_with(make_run, cheats: dict[int, str], steps: int = STEPS) -> tuple[Run, dict[str, str]]:
    """A run with a liar in some stages, in which every cell and every sum is audited; returns it at
    its end, with the liars' cheats by name."""
    stages = 2
    run = make_run(
        stages, steps,
        **{
            **TINY, "limits__starting_peers_per_stage": HONEST_PER_STAGE, "trust__audit_share": 1.0,
            "rebalancing__rule": "none",
        },
    )  # fmt: skip
    swarm, liars = run.swarm, {}
    with modified(run, HALF_DRAWS):
        invite = swarm.start_coordinator()
    for stage, cheat in cheats.items():
        with modified(run, MODIFIED, cheat):
            liar = swarm.start_volunteer(invite, stage=stage)
        swarm.expect_exit(liar)
        liars[liar.name] = cheat
    for stage in range(stages):
        for _ in range(HONEST_PER_STAGE):
            swarm.start_volunteer(invite, stage=stage)
    swarm.watch(lambda *_: None)
    for child in swarm.volunteers:
        if child.name in liars and child.exit_code() is None:
            child.kill()
    assert swarm.wait_for_exit() == []
    return run, liars


def check(run: Run, liars: dict[str, str]) -> None:
    """The model is the honest one, and those who lost are liars, by evidence that holds."""
    run.assert_equals_reference()
    named = names(run)
    lost = {named[verdict.peer] for verdict in verdicts(run)}
    assert lost <= set(liars), f"honest volunteers have lost: {lost}"
    assert {name for name, cheat in liars.items() if CHEATS[cheat] == LOSES} <= lost
    with open_for_reading(run.database) as connection:
        standings = {named[s.owner]: s for s in read_standings(connection)}
    honest = [child.name for child in run.swarm.volunteers if child.name not in liars]
    assert all(name in standings and standings[name].lost == 0 for name in honest)
    assert sum(standings[name].passed for name in honest) > 0
    for verdict in verdicts(run):
        if verdict.evidence is None:
            opened = [opened_by_any(s, named) for s in verdict.statements]
            assert {s.step for s in opened} == {verdict.step}
            # Its own sums, with those of the others or with audits of what it had counted.
            assert verdict.peer in {s.peer for s in opened if isinstance(s, SumStatement)}
            assert len(opened) > 1
            audits = [s for s in opened if isinstance(s, AuditStatement)]
            assert all((s.peer, s.stage) == (verdict.peer, verdict.stage) for s in audits)
    check_ledger(run)


def check_ledger(run: Run) -> None:
    """A stranger finds every verdict proved by the exported ledger, and no credit that is void."""
    file = run.folder.path / "run.ledger"
    assert run_coordinator(["ledger", "export", str(run.folder.path), str(file)]) == 0
    found = verify_ledger(file.read_bytes().splitlines(keepends=True))
    shown = Counter((v.step, v.peer) for v, _ in found.verdicts)
    shown.update((v.step, v.peer) for v in found.sum_verdicts)
    assert shown == Counter((v.step, v.peer) for v in verdicts(run))
    with open_for_reading(run.database) as connection:
        counted: Counter[str] = Counter()
        for part in read_contributions(connection):
            counted[part.peer] += part.microbatches
    assert {total.peer: total.microbatches for total in found.totals} == counted


def opened_by_any(text: str, peers: Iterable[str]) -> SumStatement | AuditStatement:
    """The statement, which one of these peers has signed."""
    envelope = decode_envelope(text, "a statement")
    for peer in peers:
        with suppress(FrameError, SignatureError):
            return open_sums(envelope, PeerId(peer))
        with suppress(FrameError, SignatureError):
            return open_audit(envelope)
    raise AssertionError("a statement without a valid signature")


def test_a_liar_in_each_stage_is_found_and_changes_no_bit(make_run) -> None:
    run, liars = a_run_with(make_run, {0: "sign flipped", 1: "zeros"})
    check(run, liars)
    assert len({verdict.owner for verdict in verdicts(run)}) == 2


def test_members_that_lie_about_sums_are_found_and_change_no_bit(make_run) -> None:
    run, liars = a_run_with(make_run, {0: "one added to a sum", 1: "zeros as its part"})
    check(run, liars)
    assert [verdict.microbatch for verdict in verdicts(run)] == [None, None]


@pytest.mark.nightly
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_liar_of_each_kind_changes_no_bit(make_run, cheat: str) -> None:
    stage = 1 if cheat in LAST_STAGE_ONLY else 0
    run, liars = a_run_with(make_run, {stage: cheat})
    check(run, liars)
