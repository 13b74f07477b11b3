"""The cells that unlike machines count in the benchmark of honest audits."""

from __future__ import annotations

from pathlib import Path

from benchmarks.run_data import RunData
from benchmarks.trust.honest.__main__ import SIZES
from benchmarks.trust.honest.cells import STAGES, Setting, cell_file, state_file, write_cells
from swarm_coordinator.run_creation.initialise import initialise_run


def test_cells_and_states_are_those_of_a_training_that_goes_on(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"line {number} of the text\n" for number in range(5000)))
    run_dir, folder = tmp_path / "run", tmp_path / "cells"
    folder.mkdir()
    initialise_run(
        run_dir, "tiny", stages=STAGES,
        overrides=SIZES | {"data.source": str(text), "training.microbatches_per_step": 4},
    )  # fmt: skip
    write_cells(RunData(run_dir), Setting("float32", "none", "none"), (0, 2), 4, folder)
    for stage in range(STAGES):
        before, after = (state_file(folder, version, stage).read_bytes() for version in (0, 2))
        assert len(before) == len(after)
        assert before != after
        cells = {
            cell_file(folder, v, number, stage).read_bytes() for v in (0, 2) for number in range(4)
        }
        assert len(cells) == 8
