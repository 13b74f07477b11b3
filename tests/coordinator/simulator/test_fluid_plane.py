"""The simulator's coarse level, beside its fine one on the same machines."""

from __future__ import annotations

import pytest

from benchmarks.simulator.routing.__main__ import simulated
from swarm_coordinator.simulator.fluid_plane import FluidPlane

LARGEST_ERROR = 0.12
"""Of the rate of whole steps. Without the end of a step it is above 0.4 in the second case."""


@pytest.mark.parametrize(("machines", "per_peer"), [(4, 16), (16, 4), (48, 16)])
def test_the_fluid_level_predicts_the_rate_of_whole_steps(machines: int, per_peer: int) -> None:
    fine = simulated("plan", machines, per_peer, 1)
    fluid = simulated("plan", machines, per_peer, 1, FluidPlane)
    assert fluid["share"] == pytest.approx(fine["share"], rel=LARGEST_ERROR)
