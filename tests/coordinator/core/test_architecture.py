"""What the core's modules state about themselves: the table of phases, and who assigns what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.swarm_world.event_bench import Bench
from swarm_coordinator.core import transition
from swarm_coordinator.core.state.phases import ALLOWED, RunPhase
from swarm_coordinator.core.state.run import enter_phase

PACKAGE = Path(transition.__file__).parents[1]

INDEXED = {
    "phase", "stage", "version", "transfer", "contact", "certificate", "leaving", "leaving_since",
    "paused", "source_assigned",
}  # fmt: skip
"""Fields of a peer and its transfer that an index of the table depends on, and of no other value
except a run's phase and its history's version."""


def assignments(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(file, function, attribute) of every assignment to an attribute."""
    for path in sorted(folder.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    yield path.relative_to(folder).as_posix(), function.name, node.attr


def documented_table(docstring: str) -> dict[RunPhase, set[RunPhase]]:
    """The phases that follow each phase, by the docstring of `transition`."""
    found: dict[RunPhase, set[RunPhase]] = {phase: set() for phase in RunPhase}
    phase = None
    for first, follows in re.findall(r"^    ([A-Z]+)? +([A-Z]{2,})  +\S", docstring, re.MULTILINE):
        phase = RunPhase[first] if first else phase
        assert phase is not None
        found[phase].add(RunPhase[follows])
    return found


def test_the_table_of_phases_in_the_docstring_is_the_one_that_is_checked() -> None:
    assert documented_table(transition.__doc__ or "") == {p: set(ALLOWED[p]) for p in RunPhase}


@pytest.mark.parametrize("phase", RunPhase)
def test_no_phase_is_entered_that_the_table_does_not_allow(phase: RunPhase) -> None:
    for follows in RunPhase:
        bench = Bench()
        bench.run.phase = phase
        if follows in ALLOWED[phase]:
            enter_phase(bench.run, follows)
            assert bench.run.phase is follows
        else:
            with pytest.raises(ValueError, match=f"from {phase.name} to {follows.name}"):
                enter_phase(bench.run, follows)
            assert bench.run.phase is phase


def test_the_phase_of_a_run_is_assigned_in_one_function() -> None:
    found = {
        (file, function)
        for file, function, attribute in assignments(PACKAGE)
        if attribute == "phase" and file != "core/state/peer_table.py"
    }
    assert found == {("core/state/run.py", "enter_phase")}


def test_what_an_index_of_the_peers_depends_on_is_assigned_by_the_table_alone() -> None:
    found = {
        (file, attribute)
        for file, function, attribute in assignments(PACKAGE / "core")
        if attribute in INDEXED and file != "state/peer_table.py"
    }
    assert found == {("state/run.py", "phase"), ("state/history.py", "version")}
