"""Every fault at every phase of a step, on real processes: the losses are those of one machine.

A table of cases, carried out by a few runs one after the other (`fault_run`). What must not
happen is named by each case's own test: that the fault did not strike where it should, that the
run stood still, that a loss differs from the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kits.runs.fault_run import STEPS, TINY, WHOLE_STAGE, Case, FaultRun
from kits.runs.real_run import runs
from swarm_client.fault_injection.faults import FaultAction, FaultPoint

A, P = FaultAction, FaultPoint
LONGER = 7.0
"""Than silence may last before a peer counts as dead."""
SHORTER = 1.5

IN_A_STEP = (P.FORWARD, P.BACKWARD, P.RECEIPT, P.ALL_REDUCE, P.NORM, P.APPLY)
IN_A_WORKER = (P.FORWARD, P.BACKWARD, P.ALL_REDUCE, P.NORM, P.APPLY)


def at_each(
    action: FaultAction, phases: tuple[FaultPoint, ...], seconds: float = 0.0
) -> list[Case]:
    """On both stages in turn. The last stage has no backward pass of its own."""
    stages = {phase: 0 if phase is P.BACKWARD else i % 2 for i, phase in enumerate(phases)}
    return [Case(action, phase, stage, seconds) for phase, stage in stages.items()]


GROUPS: dict[str, list[Case]] = {
    "deaths": [
        *at_each(A.KILL, IN_A_STEP),
        *at_each(A.KILL_WORKER, IN_A_WORKER),
        Case(A.KILL, P.CHECKPOINT, anybody=True),
        Case(A.KILL, P.STATE_DOWNLOAD, 1, newcomer=True),
        Case(A.KILL_WORKER, P.CHECKPOINT, anybody=True),
    ],
    "silences": [
        *at_each(A.FREEZE, IN_A_STEP, LONGER),
        *at_each(A.PARTITION, IN_A_STEP, LONGER),
        Case(A.FREEZE, P.CHECKPOINT, 0, LONGER, anybody=True),
        Case(A.FREEZE, P.STATE_DOWNLOAD, 1, LONGER, newcomer=True),
        Case(A.PARTITION, P.CHECKPOINT, 0, LONGER, anybody=True),
        Case(A.PARTITION, P.STATE_DOWNLOAD, 0, LONGER, newcomer=True),
        Case(A.FREEZE_WORKER, P.FORWARD, 0),
        Case(A.FREEZE_WORKER, P.NORM, 1),
        Case(A.FREEZE_WORKER, P.ALL_REDUCE, 0),
    ],
    "damage": [
        *at_each(A.DELAY, IN_A_STEP, SHORTER),
        Case(A.DELAY, P.CHECKPOINT, 0, SHORTER, anybody=True),
        Case(A.NAN, P.FORWARD, 0),
        Case(A.NAN, P.BACKWARD, 1),
        Case(A.NAN, P.ALL_REDUCE, 0, says="is flagged: the sum of its gradients was not finite"),
        Case(A.NAN, P.NORM, 1, says="is flagged"),
        Case(A.NAN, P.APPLY, 0, says="is flagged: it could not apply"),
        Case(A.CORRUPT, P.NORM, 1, peers=3, says="is flagged: it averaged to a different gradient"),
        Case(A.CORRUPT, P.APPLY, 0, peers=3, says="is flagged: its parameters"),
        Case(A.CORRUPT, P.CHECKPOINT, 0, anybody=True, says="could not be stored"),
        Case(A.DISK_FULL, P.RECEIPT, 0, 3.0),
        Case(A.DISK_FULL, P.APPLY, 1, 3.0),
        Case(A.DISK_FULL, P.CHECKPOINT, 0, 3.0, anybody=True, says="could not be stored"),
        Case(A.DISK_FULL, P.STATE_DOWNLOAD, 1, 3.0, newcomer=True, says="could not be fetched"),
        Case(
            A.CORRUPT, P.STATE_DOWNLOAD, 0, newcomer=True, says="differs from what its holders have"
        ),
        Case(A.DELAY, P.STATE_DOWNLOAD, 1, SHORTER, newcomer=True),
        Case(A.CLOCK_JUMP, P.FORWARD, 0, 100_000.0),
        Case(A.CLOCK_JUMP, P.RECEIPT, 1, -100_000.0),
    ],
}
CASES = [(group, case) for group, cases in GROUPS.items() for case in cases]

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], FaultRun]]:
    """A run to which every case of a group has happened; each group is carried out once."""
    done: dict[str, FaultRun] = {}
    with ExitStack() as stack:

        def of(group: str) -> FaultRun:
            if group not in done:
                make = stack.enter_context(runs(tmp_path_factory.mktemp(group)))
                fault_run = FaultRun(make(2, STEPS, **TINY), 2)
                fault_run.start(WHOLE_STAGE)
                fault_run.carry(GROUPS[group])
                fault_run.finish()
                done[group] = fault_run
            return done[group]

        yield of


@pytest.mark.parametrize(("group", "case"), CASES, ids=[case.name for _, case in CASES])
def test_a_fault_changes_no_loss_and_stops_no_run(
    carried: Callable[[str], FaultRun], group: str, case: Case
) -> None:
    carried(group).check(case)


@pytest.mark.parametrize("group", GROUPS)
def test_after_all_its_faults_a_run_has_the_parameters_of_one_machine(
    carried: Callable[[str], FaultRun], group: str
) -> None:
    fault_run = carried(group)
    assert fault_run.end_problem == "", fault_run.end_problem
    fault_run.run.assert_equals_reference(fault_run.stopped_at)


def test_the_table_is_large_enough() -> None:
    assert len({case.name for _, case in CASES}) == len(CASES) >= 40
