"""The checkpoint that a late verdict takes the run back to, and when there is none."""

from __future__ import annotations

import pytest

from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.events import Note
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import Step

NO_CHECKPOINT = "and no checkpoint is left to which the run may go back"


def trained(steps: int, *, keep: int) -> Bench:
    """A run that has made some steps and stored a checkpoint after each."""
    bench = joined("a0", "a1", checkpoint_steps=1, keep=keep)
    for _ in range(steps):
        bench.one_step()
        bench.checkpoint()
    return bench


def verdict(bench: Bench, since: int) -> list[str]:
    """An owner with unverified work since a step has lost an audit; what is noted of it."""
    bench.run.audits.unverified_since = Step(since)
    notes = [note.text for note in bench.commands(Note, bench.event_tick())]
    return [text for text in notes if f"the steps since {since} have unverified work" in text]


@pytest.mark.parametrize(("since", "in_part"), [(4, True), (5, False)])
def test_a_checkpoint_of_the_first_unverified_step_has_its_work(since: int, in_part: bool) -> None:
    bench = trained(6, keep=3)
    (note,) = verdict(bench, since)
    assert bench.roll_backs() == [4]
    assert ("so has the oldest checkpoint" in note) == in_part


def test_the_run_does_not_go_back_to_the_version_that_it_is_at() -> None:
    bench = trained(3, keep=1)
    bench.report("a0", 0)
    (note,) = verdict(bench, 1)
    assert note.endswith(NO_CHECKPOINT)
    assert bench.roll_backs() == []
    assert list(bench.step().table) == [(0, 0)]


def test_without_a_checkpoint_the_run_begins_anew_only_once() -> None:
    """It would compute its first steps a third time."""
    bench = joined("a0", "a1")
    bench.one_step()
    verdict(bench, 1)
    assert bench.roll_backs() == [0]
    for peer in ("a0", "a1"):
        bench.ready(peer)
    bench.one_step()
    (note,) = verdict(bench, 1)
    assert note.endswith(NO_CHECKPOINT)
    assert bench.roll_backs() == [0]
    assert bench.run.phase is RunPhase.COLLECT
