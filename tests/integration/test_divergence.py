"""A run whose learning rate makes its model diverge says so, and wears out no volunteer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swarm_shared.base.errors import SwarmError

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_a_run_that_diverges_says_where_one_process_would_have_stopped(
    make_run: Callable[..., Any],
) -> None:
    run = make_run(
        2, steps=6, optimizer__learning_rate=1000.0, optimizer__weight_decay=0.0,
        optimizer__warmup_steps=0, limits__starting_peers_per_stage=2,
    )  # fmt: skip
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(4):
        swarm.start_volunteer(invite)

    def sentence() -> str:
        return str(swarm.status().get("diverged", ""))

    # At first one peer may be said to be the only one, while the other is synced anew.
    run.wait_for(
        lambda: " at 2 peers; training has diverged." in sentence(),
        "the status to say that training has diverged",
    )
    status = swarm.status()
    assert " cannot be computed: microbatch " in status["diverged"]
    health = status["health"]
    assert (health["state"], health["sentence"]) == ("degraded", status["diverged"])
    diverged_at = int(sentence().split()[1])
    with pytest.raises(SwarmError, match="the gradient norm of this step is nan"):
        run.reference_losses(diverged_at)
    assert run.losses() == run.reference_losses(diverged_at - 1)
    for volunteer in swarm.volunteers:
        taken = [line for line in volunteer.last_lines(400) if "taking stage" in line]
        assert 1 <= len(taken) <= 2, "its state was downloaded once more at most"
    assert run.stop() == diverged_at - 1
