"""Liars of a simulated fleet are found by the core's audits, and honest machines are not."""

from __future__ import annotations

import random

import pytest

from benchmarks.trust.detection import HONEST_AUDITS, observed, predicted, swarm_of
from swarm_coordinator.core.trust.audits import AuditSettings
from swarm_coordinator.simulator.audits import lies_in, variant_of, with_liars
from swarm_coordinator.simulator.fleet import HOME, make_fleet
from swarm_shared.base.types import MicrobatchIndex, PeerId, Step


def test_a_share_of_the_machines_lies_in_a_share_of_its_cells() -> None:
    fleet = with_liars(make_fleet(HOME, 10, random.Random(1)), 0.3, 0.2, random.Random(2))
    liars = [machine for machine in fleet if machine.lies]
    assert [machine.lies for machine in liars] == [0.2] * 3
    cells = [(Step(step), MicrobatchIndex(index)) for step in range(100) for index in range(20)]
    lied = [cell for cell in cells if lies_in(PeerId("a"), liars[0], *cell)]
    assert len(lied) / len(cells) == pytest.approx(0.2, abs=0.03)
    assert lied == [cell for cell in cells if lies_in(PeerId("a"), liars[0], *cell)]
    mine, others = (variant_of(PeerId(name), liars[0], *lied[0]) for name in ("a", "b"))
    assert mine >= 100
    assert mine != others


def test_constant_liars_are_found_and_expelled_and_no_other_machine_is() -> None:
    swarm = swarm_of(3, AuditSettings(audit_share=0.25, probation_cells=0), 0.25, 1.0)
    swarm.simulate(0.05)
    figures = swarm.audit_log.figures(swarm.run.audits)
    assert figures["liars"] == figures["liars_found"] == 6
    assert figures["false_verdicts"] == 0
    for peer, machine in swarm.audit_log.machines.items():
        assert (peer in swarm.run.peers) == (not machine.lies)
    # Each microbatch still counts once in each stage.
    for step in swarm.applied:
        assert sum(share.microbatches for share in step.shares) == 2 * 96


def test_unlike_honest_machines_pass_all_audits() -> None:
    swarm = swarm_of(1, AuditSettings(audit_share=1.0, probation_cells=0), 0.0, 1.0)
    swarm.simulate(0.018)  # the run begins after 48 s
    assert len({machine.arithmetic for machine in swarm.audit_log.machines.values()}) == 3
    assert swarm.run.audits.passed > 300
    assert swarm.audit_log.verdicts == []


@pytest.mark.process
@pytest.mark.nightly
def test_audits_take_time() -> None:
    steps = []
    for share in (0.0, 1.0):
        swarm = swarm_of(1, AuditSettings(audit_share=share, probation_cells=0), 0.0, 1.0)
        swarm.simulate(0.03)
        steps.append(len(swarm.applied))
    assert steps[1] < 0.8 * steps[0]


def test_the_formula_is_that_of_independent_draws_until_an_audit_is_due() -> None:
    assert predicted(0.02, 1.0, 139) == pytest.approx(0.940, abs=1e-3)
    assert predicted(0.02, 1.0, 140) == 1.0
    assert predicted(0.02, 0.1, 150) == pytest.approx(0.259, abs=1e-3)
    assert observed({"cells_until_found": [3, 10, 11], "liars": 4}, 10) == 0.5
    assert HONEST_AUDITS == 10_000
