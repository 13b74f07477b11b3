"""The traces of a run that a real coordinator has led, from its own database."""

from __future__ import annotations

from kits.coordinator.shell_world import served
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.tracking.journal_reader import Position
from swarm_coordinator.tracking.trace_reader import read_traces


async def test_every_step_of_a_run_has_the_times_of_its_parts(folder: RunFolder) -> None:
    async with served(folder) as run:
        await run.train()
        steps, stages = run.manifest.training.steps, run.manifest.stage_count
    found = read_traces(folder.database, Position(), steps)
    assert found.finished
    assert [trace.step for trace in found.records] == list(range(1, steps + 1))
    of_stages = [(name, stage) for name in ("average", "apply") for stage in range(stages)]
    for trace in found.records:
        at = {(part.name, part.stage): part for part in trace.parts}
        wholes = [("compute", None), ("close", None), ("apply", None)]
        assert sorted(at, key=str) == sorted([*wholes, *of_stages], key=str)
        compute, close, applying = (at[name] for name in wholes)
        assert compute.began <= compute.ended <= close.began <= close.ended == 0.0
        assert applying.began == 0.0 < applying.ended
        for stage in range(stages):
            average, applied = at["average", stage], at["apply", stage]
            assert close.began <= average.began <= average.ended <= close.ended
            assert 0.0 == applied.began < applied.ended <= applying.ended
    assert any("was admitted" in event.text for event in found.records[0].events)
