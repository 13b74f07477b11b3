"""Chains of transcripts: what must fit, and where it does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm_coordinator.core.trust.chains import Boundary, breaks_at, complete, fits
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step

LAST = StageIndex(3)
OTHER = "f" * 32


def row(step: int = 1, microbatch: int = 0) -> dict[StageIndex, Transcript]:
    return {
        StageIndex(s): simulated_transcript(
            Step(step), MicrobatchIndex(microbatch), StageIndex(s), LAST
        )
        for s in range(LAST + 1)
    }


def breaks_of(known: dict[StageIndex, Transcript], stage: int) -> tuple[Boundary, ...]:
    return breaks_at(
        StageIndex(stage), known[StageIndex(stage)], known.get(StageIndex(stage - 1)),
        known.get(StageIndex(stage + 1)),
    )  # fmt: skip


def test_the_transcripts_of_honest_stages_fit() -> None:
    honest = row()
    assert all(breaks_of(honest, s) == () for s in range(LAST + 1))


@given(
    stage=st.integers(0, LAST),
    field=st.sampled_from(["input", "output", "output_gradient", "input_gradient"]),
)
def test_any_digest_of_a_boundary_that_differs_breaks_the_chain_there(
    stage: int, field: str
) -> None:
    broken = row()
    of_stage = simulated_transcript(Step(1), MicrobatchIndex(0), StageIndex(stage), LAST)
    broken[StageIndex(stage)] = of_stage.model_copy(update={field: OTHER})
    before, behind = field in ("input", "input_gradient"), field in ("output", "output_gradient")
    expected = []
    if before and stage > 0:
        expected = [(stage - 1, stage)]
    elif behind and stage < LAST:
        expected = [(stage, stage + 1)]
    assert list(breaks_of(broken, stage)) == expected


def test_a_stage_that_computed_something_else_breaks_the_chain_on_both_sides() -> None:
    broken = row()
    broken[StageIndex(1)] = row(microbatch=7)[StageIndex(1)]
    assert breaks_of(broken, 1) == ((0, 1), (1, 2))


def test_a_neighbour_that_is_not_counted_yet_breaks_nothing() -> None:
    broken = row()
    del broken[StageIndex(1)]
    other = simulated_transcript(Step(1), MicrobatchIndex(7), StageIndex(0), LAST)
    broken[StageIndex(0)] = other
    assert breaks_of(broken, 0) == ()


def test_the_parameters_gradient_is_no_part_of_a_chain() -> None:
    earlier, later = (
        simulated_transcript(Step(1), MicrobatchIndex(0), StageIndex(s), LAST) for s in (0, 1)
    )
    assert fits(earlier.model_copy(update={"gradient": OTHER}), later)


def test_only_the_ends_of_the_pipeline_lack_digests() -> None:
    first, middle, last = (
        simulated_transcript(Step(1), MicrobatchIndex(0), StageIndex(s), LAST) for s in (0, 1, 3)
    )
    assert complete(first, first=True, last=False)
    assert complete(middle, first=False, last=False)
    assert complete(last, first=False, last=True)
    assert not complete(middle, first=True, last=False)
    assert not complete(first, first=False, last=False)
    assert not complete(middle, first=False, last=True)
