"""Real runs with modified clients: the kinds of lies, how volunteers are modified, and what a run
must have at its end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kits.runs.real_run import Run
from swarm_coordinator.cli.main import run as run_coordinator
from swarm_coordinator.core.events import StandingRecord, VerdictRecord
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
)

FOLDER = Path(__file__).parent
MODIFIED = FOLDER / "modified_client"
HALF_DRAWS = FOLDER / "half_draws"
HIDDEN_DRAWS = FOLDER / "hidden_draws"

LOSES = "loses"
"""The liar loses an audit, with evidence."""
CLEARED = "is cleared"
"""Nothing of the liar's is counted; it is charged, and may be sent away later."""

HARMLESS = "is not served"
"""What it sends is refused before anything is computed, or is not used."""

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
    "zeros, and auditors that wait": CLEARED,
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
    "another sketch stated": CLEARED,
    "another result stated": CLEARED,
    "sums that do not add up": LOSES,
    "no statement of sums": CLEARED,
    "one added to a sum, and stated as its own part": LOSES,
    "its part against its gradient": LOSES,
    "zeros as its part": LOSES,
    "another norm": CLEARED,
    "accusations": CLEARED,
    "no averages": CLEARED,
    "no updates": CLEARED,
    "another state for others": HARMLESS,
    "outputs that overflow": CLEARED,
}
"""What becomes of the liar of each kind."""

ADAPTIVE = {
    "its part against its gradient, while unwatched": LOSES,
    "its part against its gradient, until doubted": LOSES,
}
"""The same of liars that do as they are audited: with `HIDDEN_DRAWS` they see no audit."""

FIRST_STAGE_ONLY = {
    "outputs of zeros", "outputs scaled", "another output signed", "outputs that overflow",
}  # fmt: skip
"""Of outputs, which the last stage does not have."""
LAST_STAGE_ONLY = {"made-up loss"}


@contextmanager
def modified(run: Run, folder: Path, cheat: str = "", **variables: object) -> Iterator[None]:
    """Processes that are started meanwhile import the `sitecustomize` of this folder, with these
    variables of it."""
    known = os.environ.get("PYTHONPATH", "")
    added = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), known))),
        "SWARM_TEST_CHEAT": cheat,
        **{f"SWARM_TEST_{name.upper()}": str(value) for name, value in variables.items()},
    }
    before = dict(run.swarm.environment)
    run.swarm.environment.update(added)
    try:
        yield
    finally:
        run.swarm.environment.clear()
        run.swarm.environment.update(before)


# ---------------------------------------------------------------- what the store has


def verdicts(run: Run) -> tuple[VerdictRecord, ...]:
    with open_for_reading(run.database) as connection:
        return read_verdicts(connection)


def names(run: Run) -> dict[str, str]:
    """Names by peer ID, of all peers that were ever admitted."""
    with open_for_reading(run.database) as connection:
        rows = connection.execute("SELECT peer, name FROM peers").fetchall()
    return {peer: name for peer, name in rows if name}


def standings(run: Run) -> dict[str, StandingRecord]:
    """Standings by name, of the peers that have one."""
    named = names(run)
    with open_for_reading(run.database) as connection:
        return {named[s.owner]: s for s in read_standings(connection)}


def counted(run: Run) -> Counter[str]:
    """Microbatches by peer ID, without those whose credit is void."""
    found: Counter[str] = Counter()
    with open_for_reading(run.database) as connection:
        for part in read_contributions(connection):
            found[part.peer] += part.microbatches
    return found


# ---------------------------------------------------------------- checks


def check(run: Run, liars: Mapping[str, str]) -> None:
    """The model is the honest one, and those who lost are liars, by evidence that holds.

    `liars`: kinds of lies, by the liar's name.
    """
    run.assert_equals_reference()
    check_names(run, liars, liars)
    check_ledger(run)


def check_names(run: Run, liars: Mapping[str, str], lied: Iterable[str]) -> None:
    """All that lost are liars, those that `lied` in a way that loses have lost, and honest
    volunteers have passed audits and lost none. One that a dispute has sent away may have no
    standing yet."""
    named, stand = names(run), standings(run)
    lost = {named[verdict.peer] for verdict in verdicts(run)}
    assert lost <= set(liars), f"honest volunteers have lost: {lost - set(liars)}"
    outcomes = CHEATS | ADAPTIVE
    assert {name for name in lied if outcomes[liars[name]] == LOSES} <= lost
    honest = [child.name for child in run.swarm.volunteers if child.name not in liars]
    assert all(stand[name].lost == 0 for name in honest if name in stand)
    assert sum(stand[name].passed for name in honest if name in stand) > 0
    for verdict in verdicts(run):
        if verdict.evidence is None:
            opened = [_opened_by_any(s, named) for s in verdict.statements]
            assert {s.step for s in opened} == {verdict.step}
            # Its own sums, with those of the others or with audits of what it had counted; what a
            # member without work puts in is wrong by itself.
            assert verdict.peer in {s.peer for s in opened if isinstance(s, SumStatement)}
            assert len(opened) > 1 or "for which nothing of it counts" in verdict.reason
            audits = [s for s in opened if isinstance(s, AuditStatement)]
            assert all((s.peer, s.stage) == (verdict.peer, verdict.stage) for s in audits)


def check_ledger(run: Run) -> None:
    """A stranger finds every verdict proved by the exported ledger, and no credit that is void."""
    file = run.folder.path / "run.ledger"
    assert run_coordinator(["ledger", "export", str(run.folder.path), str(file)]) == 0
    found = verify_ledger(file.read_bytes().splitlines(keepends=True))
    shown = Counter((v.step, v.peer) for v, _ in found.verdicts)
    shown.update((v.step, v.peer) for v in found.sum_verdicts)
    assert shown == Counter((v.step, v.peer) for v in verdicts(run))
    assert {total.peer: total.microbatches for total in found.totals} == counted(run)


def _opened_by_any(text: str, peers: Iterable[str]) -> SumStatement | AuditStatement:
    """The statement, which one of these peers has signed."""
    envelope = decode_envelope(text, "a statement")
    for peer in peers:
        with suppress(FrameError, SignatureError):
            return SumStatement.open(envelope, PeerId(peer))
        with suppress(FrameError, SignatureError):
            return AuditStatement.open(envelope)
    raise AssertionError("a statement without a valid signature")
