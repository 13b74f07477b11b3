"""A volunteer whose device lacks memory in the middle of a run hands its stage over."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from swarm_client.fault_injection.faults import PLAN_VARIABLE
from swarm_shared.base.atomic_file import write_atomically

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

STEPS = 24


def test_a_stage_that_no_longer_fits_is_handed_over_and_no_bit_changes(
    make_run: Callable[..., Any],
) -> None:
    run = make_run(2, steps=STEPS, limits__starting_peers_per_stage=1)
    swarm = run.swarm
    plan = run.folder.path / "faults.json"
    plan.write_text(json.dumps({"faults": []}))
    swarm.environment[PLAN_VARIABLE] = str(plan)
    invite = swarm.start_coordinator()
    swarm.start_volunteer(invite, 0)
    # It asks for one stage, so that no smaller one takes its place.
    short = swarm.start_volunteer(invite, 0)
    swarm.expect_exit(short)

    def says(pattern: str) -> bool:
        return any(re.search(pattern, line) for line in short.last_lines(400))

    def ready() -> set[str]:
        peers = swarm.status().get("peers", [])
        return {peer["name"] for peer in peers if peer["phase"] == "ready"}

    # The last stage comes last: from the first step on, both members of the other one compute.
    run.wait_for(lambda: len(ready()) == 2, "both members of stage 0 to be ready")
    swarm.start_volunteer(invite, 1)
    run.wait_for(lambda: says("[1-9][0-9]* microbatches here"), "a step that counts its work")
    fault = {
        "id": "short", "peer": short.name, "phase": "forward", "action": "out of memory",
        "repeats": True,
    }  # fmt: skip
    write_atomically(plan, json.dumps({"faults": [fault]}).encode())
    run.wait_for(lambda: says("has too little memory left for stage 0"), "the shortage")
    history = swarm.watch()
    assert says("the coordinator ended the session")
    assert short.exit_code() is None, "it waits until the memory is there again"
    short.signal(signal.SIGINT)
    assert short.wait(30.0) == 0
    assert swarm.wait_for_exit() == []
    counted = {c.peer: c.microbatches for c in history.contributions}
    assert sum(counted.values()) == STEPS * 12 * 2
    mine = [peer for peer, name in history.names.items() if name == short.name]
    assert counted.get(mine[0], 0) > 0, "what it had counted before stays counted"
    run.assert_equals_reference()
