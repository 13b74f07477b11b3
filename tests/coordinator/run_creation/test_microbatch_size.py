"""The choice of a run's microbatches and queues, as properties of pure functions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_coordinator.run_creation.microbatch_size import (
    LARGEST_OVERHEAD,
    MAX_QUEUE,
    PEERS_PER_STAGE,
    StageWork,
    choice_text,
    choose_queue,
    choose_sequences,
    least_microbatches,
    overhead,
)
from swarm_shared.base.types import MAX_MICROBATCHES
from swarm_shared.run.manifest import LimitsConfig, TrainingConfig

works = st.builds(
    StageWork, st.floats(1e6, 1e14), st.integers(0, 64), st.integers(0, 1_000_000_000)
)
pipelines = st.lists(works, min_size=1, max_size=16)
steps = st.integers(1, 5_000)
leasts = st.integers(1, 600)
mosts = st.integers(1, MAX_MICROBATCHES)
EQUAL = [StageWork(1.6e10, 4, 20_000_000)] * 2
"""Stages of 0.1 s a sequence and 64 ms of overhead."""


@given(pipelines, steps, leasts, mosts)
def test_microbatches_hold_the_step_and_keep_within_all_bounds(
    stages: list[StageWork], whole: int, least: int, most: int
) -> None:
    sequences = choose_sequences(stages, whole, least, most)
    assert whole % sequences == 0, "the step's tokens are unchanged"
    microbatches = whole // sequences
    assert 1 <= microbatches <= most
    possible = [whole // size for size in range(1, whole + 1) if whole % size == 0]
    within = [number for number in possible if least <= number <= most]
    if within:
        assert microbatches in within
    else:
        assert microbatches == max(number for number in possible if number <= most)
    TrainingConfig(
        steps=1, microbatches_per_step=microbatches, sequences_per_microbatch=sequences, seed=0,
        evaluation_microbatches=0,
    )  # fmt: skip


@given(pipelines, steps, leasts)
def test_no_smaller_microbatch_would_do(stages: list[StageWork], whole: int, least: int) -> None:
    sequences = choose_sequences(stages, whole, least, MAX_MICROBATCHES)
    smaller = [size for size in range(1, sequences) if whole % size == 0]
    assert all(overhead(stages, size) > LARGEST_OVERHEAD for size in smaller)
    if overhead(stages, sequences) > LARGEST_OVERHEAD:
        larger = (size for size in range(sequences + 1, whole + 1) if whole % size == 0)
        assert all(whole // size < least for size in larger), "only the bound stops it"


@given(pipelines, steps, leasts, st.floats(1, 100), st.integers(0, 64))
def test_more_work_makes_them_finer_and_more_overhead_coarser(
    stages: list[StageWork], whole: int, least: int, factor: float, layers: int
) -> None:
    chosen = choose_sequences(stages, whole, least, MAX_MICROBATCHES)
    faster = [replace(one, flops_per_sequence=one.flops_per_sequence * factor) for one in stages]
    assert choose_sequences(faster, whole, least, MAX_MICROBATCHES) <= chosen
    heavier = [replace(one, layers=one.layers + layers) for one in stages]
    assert choose_sequences(heavier, whole, least, MAX_MICROBATCHES) >= chosen


@given(pipelines, steps, leasts, st.integers(0, 600))
def test_more_peers_or_stages_never_make_them_coarser(
    stages: list[StageWork], whole: int, least: int, more: int
) -> None:
    chosen = choose_sequences(stages, whole, least, MAX_MICROBATCHES)
    assert choose_sequences(stages, whole, least + more, MAX_MICROBATCHES) <= chosen


@given(pipelines, st.integers(1, 64))
def test_overhead_falls_with_the_size(stages: list[StageWork], sequences: int) -> None:
    assert overhead(stages, sequences + 1) <= overhead(stages, sequences) + 1e-12
    assert overhead(stages, sequences) >= -1e-12


def test_a_task_of_equal_stages_is_ten_times_its_overhead():
    assert choose_sequences(EQUAL, 64, 1, 64) == 8
    assert EQUAL[0].overhead_seconds == pytest.approx(0.06414)
    # 6 sequences take 0.6 s, not ten times 64 ms; 7 would do and are possible here.
    assert choose_sequences(EQUAL, 42, 1, 64) == 7


@pytest.mark.parametrize(
    ("stages", "starting", "least"),
    [(1, 1, 8), (2, PEERS_PER_STAGE, 16), (3, 10, 60)],
)
def test_every_peer_gets_two_microbatches_for_each_stage(stages: int, starting: int, least: int):
    assert least_microbatches(stages, starting) == least


seconds = st.floats(1e-6, 1e4)
lines = st.floats(0, 1e4)


@given(
    st.lists(seconds, min_size=1, max_size=64), lines, lines, st.integers(1, MAX_MICROBATCHES)
)  # fmt: skip
def test_queues_are_accepted_by_the_manifest(
    tasks: list[float], activation: float, gradient: float, microbatches: int
) -> None:
    queue = choose_queue(tasks, activation, gradient, microbatches)
    default = LimitsConfig().stage_queue
    assert default <= queue <= max(default, min(microbatches, MAX_QUEUE))
    LimitsConfig.model_validate({"stage_queue": queue, "edge_credits": queue})


def test_a_queue_is_four_times_what_a_pipeline_carries():
    # 20 stages of 1 s: 20 microbatches compute, 1.52 s of hops are 2 more.
    assert choose_queue([1.0] * 20, 0.0, 0.0, 1000) == math.ceil(4 * (20 + 19 * 0.08))
    # Lines of 2 s each way: a middle peer sends for 4 s, so that a pipeline has 1/4 a second.
    assert choose_queue([1.0] * 20, 2.0, 2.0, 1000) == math.ceil(4 * (20 + 19 * 4.08) / 4)
    assert choose_queue([1.0], 2.0, 2.0, 1000) == LimitsConfig().stage_queue


def test_the_reason_says_which_bound_decided():
    whole = choose_sequences(EQUAL, 64, 1, 64)
    text = choice_text(EQUAL, whole, 64 // whole, 8 * 256, 16)
    assert text.startswith("microbatches: 8 a step, of 8 sequence(s), 2048 tokens: the smallest")
    assert text.endswith("(overhead 8% on two processor cores); a peer holds up to 16")
    assert "the largest that leave" in choice_text(EQUAL, 1, 64, 256, 16)
    assert "\n" not in text
