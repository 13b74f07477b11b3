"""A run among strangers: members with a modified client, on real processes.

Each liar is found, named with evidence and sent away; the honest keep their places; and the model
is the one that one honest process trains, to the bit, because every cell of these runs is audited.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kits.attack.strangers import (
    ADAPTIVE,
    CHEATS,
    HALF_DRAWS,
    HIDDEN_DRAWS,
    LAST_STAGE_ONLY,
    MODIFIED,
    check,
    check_ledger,
    modified,
    names,
    verdicts,
)
from kits.runs.fault_run import LARGE, TINY
from kits.runs.real_run import Run
from swarm_coordinator.core.rules.snapshots import SNAPSHOT_HOLDERS
from swarm_coordinator.demo.subprocesses import Subprocess
from swarm_shared.base.transcript import GRADIENT_BLOCK_BYTES
from swarm_shared.base.types import MAX_SAMPLED_BLOCKS
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

HONEST_PER_STAGE = 3
STEPS = 6


def lied(run: Run, name: str) -> Path:
    """The file that a liar leaves when it has lied."""
    return run.folder.path / f"{name}.lied"


def a_run_with(
    make_run, cheats: dict[int, str], honest: int = HONEST_PER_STAGE, draws: Path = HALF_DRAWS,
    sizes: Mapping[str, object] = TINY, audit_share: float = 1.0,
) -> tuple[Run, dict[str, str]]:  # fmt: skip
    """A run with a liar in some stages, in which mostly every cell is audited; returns it at its
    end, with the liars' cheats by name."""
    stages = 2
    run = make_run(
        stages, STEPS,
        **{
            **sizes, "limits__starting_peers_per_stage": honest,
            "trust__audit_share": audit_share, "trust__probation_cells": round(50 * audit_share),
            "rebalancing__rule": "none", "checkpoint__every_steps": 1,
        },
    )  # fmt: skip
    swarm, liars = run.swarm, {}
    with modified(run, draws):
        invite = swarm.start_coordinator()
    for stage, cheat in cheats.items():
        with modified(run, MODIFIED, cheat, lied=lied(run, cheat)):
            liar = swarm.start_volunteer(invite, stage=stage)
        swarm.expect_exit(liar)
        liars[liar.name] = cheat
    for stage in range(stages):
        for _ in range(honest):
            swarm.start_volunteer(invite, stage=stage)
    swarm.watch()
    for child in swarm.volunteers:
        if child.exit_code() is None and (child.name in liars or _was_refused(child)):
            swarm.expect_exit(child)
            child.kill()
    assert swarm.wait_for_exit() == []
    assert all(lied(run, cheat).exists() for cheat in cheats.values()), "a liar has not lied"
    return run, liars


def _was_refused(child: Subprocess) -> bool:
    """Whether the run has refused a volunteer for a minute, after which it waits for a coordinator
    that has ended. Honest ones are refused, too: a dispute is charged to both sides."""
    return any("the run refuses this volunteer" in line for line in child.last_lines())


def test_a_liar_in_each_stage_is_found_and_changes_no_bit(make_run) -> None:
    run, liars = a_run_with(make_run, {0: "sign flipped", 1: "zeros"})
    check(run, liars)
    assert len({verdict.owner for verdict in verdicts(run)}) == 2


def test_members_that_lie_about_sums_are_found_and_change_no_bit(make_run) -> None:
    run, liars = a_run_with(make_run, {0: "one added to a sum", 1: "zeros as its part"})
    check(run, liars)
    assert [verdict.microbatch for verdict in verdicts(run)] == [None, None]


def test_a_member_that_puts_in_much_more_than_others_is_found_where_no_audit_was_drawn(
    make_run,
) -> None:
    run, liars = a_run_with(make_run, {0: "its part against its gradient"}, audit_share=0.0)
    run.assert_equals_reference()
    check_ledger(run)
    assert {names(run)[verdict.peer] for verdict in verdicts(run)} == set(liars)


@pytest.mark.parametrize("cheat", ADAPTIVE)
def test_a_member_that_adapts_to_audits_is_found_and_changes_no_bit(make_run, cheat: str) -> None:
    """One lies as long as it sees no auditor, one is gone as soon as its sum is doubted. Of whole
    audits the first one sees nothing, and the second one is judged in its absence.

    In a run of its own each: a peer that is gone gives no inputs of what is beside it.
    """
    run, liars = a_run_with(make_run, {0: cheat}, draws=HIDDEN_DRAWS)
    check(run, liars)
    assert not lied(run, cheat).with_suffix(".watched").exists()
    assert [verdict.microbatch for verdict in verdicts(run)] == [None]


@pytest.mark.nightly
@pytest.mark.parametrize("cheat", ["zeros", "zeros, and auditors that wait"])
def test_a_liar_about_a_large_gradient_is_found_by_a_sample_of_it(make_run, cheat: str) -> None:
    run, liars = a_run_with(make_run, {0: cheat}, sizes=LARGE)
    assert (
        stage_sizes(run.manifest)[0].gradient_bytes > 2 * MAX_SAMPLED_BLOCKS * GRADIENT_BLOCK_BYTES
    )
    check(run, liars)


@pytest.mark.nightly
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_liar_of_each_kind_changes_no_bit(make_run, cheat: str) -> None:
    stage = 1 if cheat in LAST_STAGE_ONLY else 0
    # Of more holders of a stage, some are asked for its state, perhaps not the liar.
    honest = SNAPSHOT_HOLDERS - 1 if cheat == "another state for others" else HONEST_PER_STAGE
    run, liars = a_run_with(make_run, {stage: cheat}, honest)
    check(run, liars)
