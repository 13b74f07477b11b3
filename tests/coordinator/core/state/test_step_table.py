"""The indices of the table of a step agree with a scan of its cells after any changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kits.transcripts import TRANSCRIPT
from swarm_coordinator.core.state.step_table import Cell, CellKey, StepTable
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex

MICROBATCHES, STAGES, PEERS = range(3), range(2), ("a", "b")

changes = st.lists(
    st.tuples(
        st.sampled_from(MICROBATCHES), st.sampled_from(STAGES), st.sampled_from((*PEERS, None))
    ),
    max_size=30,
)
"""Cells, and the peer that has counted each, or None where it is cleared."""


@given(changes)
def test_every_index_agrees_with_a_scan_of_the_cells(
    steps: list[tuple[int, int, str | None]],
) -> None:
    table, cells, reopened = StepTable(), dict[CellKey, str](), set[int]()
    for microbatch, stage, peer in steps:
        key = MicrobatchIndex(microbatch), StageIndex(stage)
        if key in cells:
            reopened.add(microbatch)
        if peer is not None:
            table[key] = Cell(PeerId(peer), 4, None, TRANSCRIPT)
            cells[key] = peer
        elif key in cells:
            del table[key], cells[key]
        assert {key: cell.peer for key, cell in table.items()} == cells
        assert table.reopened == reopened
        for each in MICROBATCHES:
            assert table.filled(MicrobatchIndex(each)) == sum(m == each for m, _ in cells)
        for each in STAGES:
            assert table.filled_of_stage(StageIndex(each)) == sum(s == each for _, s in cells)
        for name in PEERS:
            held = {key for key, holder in cells.items() if holder == name}
            assert set(table.held_by(PeerId(name))) == held
            assert table.holds_any(PeerId(name)) == bool(held)
