"""A run of machines whose processors compute otherwise, on real processes."""

from __future__ import annotations

import pytest

from kits.attack.strangers import standings, verdicts
from kits.runs.fault_run import LARGE, TINY

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

OTHER_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": "AVX512_SKX AVX2"}
"""As a processor without AVX2 and fused products and sums, in torch and in numpy."""


@pytest.mark.parametrize("sizes", [TINY, LARGE], ids=["whole gradients", "samples"])
def test_replicas_on_unlike_processors_agree_in_audits_and_end_each_step_with_equal_parameters(
    make_run, sizes: dict[str, object]
) -> None:
    """Their gradients differ in the last bits; sums and steps do not, so that none is synced
    anew."""
    run = make_run(
        1, 6, **sizes, limits__starting_peers_per_stage=3, rebalancing__rule="none",
        trust__audit_share=1.0,
    )  # fmt: skip
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for environment in ({}, {}, OTHER_PROCESSOR):
        here = dict(swarm.environment)
        swarm.environment.update(environment)
        swarm.start_volunteer(invite)
        swarm.environment.clear()
        swarm.environment.update(here)
    swarm.watch()
    assert swarm.wait_for_exit() == []
    log = (run.folder.path / "log" / "coordinator.log").read_text()
    assert log.count("holds stage") == 3
    assert "is flagged" not in log
    assert not verdicts(run)
    cells = 6 * run.manifest.training.microbatches_per_step
    assert sum(standing.passed for standing in standings(run).values()) == cells
