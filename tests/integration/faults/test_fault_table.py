"""Injected faults at every phase of a step, on real processes, compared with the reference.

A table of cases that a few runs carry out one after the other (`fault_run`). Each case has a test
of its own: the fault was injected where it should, the run continued, and no loss differs from
the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kits.runs.fault_run import STEPS, TINY, WHOLE_STAGE, Case, FaultRun
from kits.runs.real_run import runs
from swarm_client.fault_injection.faults import FaultAction, FaultPoint

A, P = FaultAction, FaultPoint
LONGER = 3.5
"""Seconds of silence, longer than `dead_after_seconds` and `round_stall_seconds`."""
SHORTER = 1.0
"""Seconds of silence that a peer survives."""

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
        Case(A.CORRUPT, P.NORM, 1, peers=3, says="the sums of stage 1 are not those of"),
        Case(A.CORRUPT, P.APPLY, 0, peers=3, says="is flagged: its parameters"),
        Case(A.CORRUPT, P.CHECKPOINT, 0, anybody=True, says="is stored"),
        Case(A.DISK_FULL, P.RECEIPT, 0, 3.0),
        Case(A.DISK_FULL, P.APPLY, 1, 3.0),
        Case(A.DISK_FULL, P.CHECKPOINT, 0, 3.0, anybody=True, says="is stored"),
        Case(A.DISK_FULL, P.STATE_DOWNLOAD, 1, 3.0, newcomer=True, says="could not be fetched"),
        Case(
            A.CORRUPT,
            P.STATE_DOWNLOAD,
            0,
            newcomer=True,
            says="differs from what the stage's holders have",
        ),
        Case(A.DELAY, P.STATE_DOWNLOAD, 1, SHORTER, newcomer=True),
        Case(A.CLOCK_JUMP, P.FORWARD, 0, 100_000.0),
        Case(A.CLOCK_JUMP, P.RECEIPT, 1, -100_000.0),
    ],
}
IN_EVERY_RUN = "deaths"
"""The group that is carried out for every change; the others are left to the nightly tier."""


def parameters(group: str, *case: Case) -> Any:
    """One worker carries out a group, in one run."""
    marks = [pytest.mark.xdist_group(group)]
    if group != IN_EVERY_RUN:
        marks.append(pytest.mark.nightly)
    return pytest.param(group, *case, marks=marks, id=case[0].name if case else group)


CASES = [parameters(group, case) for group, cases in GROUPS.items() for case in cases]

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def carried(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], FaultRun]]:
    """A run that has been through the selected cases of a group; each group is carried out once."""
    selected = [
        item.callspec.params.get("case")
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    done: dict[str, FaultRun] = {}
    with ExitStack() as stack:

        def of(group: str) -> FaultRun:
            if group not in done:
                make = stack.enter_context(runs(tmp_path_factory.mktemp(group)))
                fault_run = FaultRun(make(2, STEPS, **TINY), 2)
                fault_run.start(WHOLE_STAGE)
                fault_run.carry([case for case in GROUPS[group] if case in selected])
                fault_run.finish()
                done[group] = fault_run
            return done[group]

        yield of


@pytest.mark.parametrize(("group", "case"), CASES)
def test_a_fault_changes_no_loss_and_stops_no_run(
    carried: Callable[[str], FaultRun], group: str, case: Case
) -> None:
    carried(group).check(case)


@pytest.mark.parametrize("group", [parameters(group) for group in GROUPS])
def test_after_all_its_faults_a_run_has_the_parameters_of_the_reference(
    carried: Callable[[str], FaultRun], group: str
) -> None:
    fault_run = carried(group)
    assert fault_run.end_problem == "", fault_run.end_problem
    fault_run.run.assert_equals_reference(fault_run.stopped_at)
