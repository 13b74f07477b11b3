"""The gate for local steps: its training against the reference, its search, its result file."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import chain

import click
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loss.local_steps import __main__ as program
from benchmarks.loss.local_steps.page import local_steps_markdown
from benchmarks.loss.local_steps.search import (
    DILOCO,
    FIRST_RATE,
    LARGER_BATCH,
    METHODS,
    NESTEROV,
    RATES,
    SYNCHRONOUS,
    Training,
    cohorts,
    train_all,
    training_of,
    tuned_rate,
)
from benchmarks.loss.local_steps.training import (
    Diverged,
    LocalSteps,
    OuterOptimizer,
    cohort_microbatches,
    train_local_steps,
)
from kits.manifests import equal_stages, manifest_of
from swarm_coordinator.offline.reference import train_reference
from swarm_shared.model.optimizer import fingerprint

MICROBATCHES, STEPS = 4, 6
MODEL = program.SMALL


def manifest(average="exact", tied=False, stages=1, rate=0.02):
    return manifest_of(
        model={
            "vocabulary_size": 50, "hidden_size": 16, "intermediate_size": 24, "layers": 2,
            "heads": 2, "tie_embeddings": tied, "sequence_length": 8,
        },
        stages=equal_stages(2, stages),
        training={"steps": STEPS, "microbatches_per_step": MICROBATCHES, "seed": 4},
        optimizer={
            "learning_rate": rate, "warmup_steps": 2, "clip_norm": 0.5, "weight_decay": 0.1,
        },
        codecs={"average": average},
    )  # fmt: skip


def microbatch(step, index):
    """Sequences that count upwards, different in every microbatch."""
    random = np.random.default_rng((step, index))
    tokens = (random.integers(0, 50, (2, 1)) + np.arange(9)) % 50
    return tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)


def of_step(step):
    return [microbatch(step, index) for index in range(MICROBATCHES)]


def run(local, described=None, draw=microbatch):
    records = []
    stage = train_local_steps(described or manifest(), local, draw, records.append)
    return fingerprint(stage), [record.loss for record in records]


@pytest.mark.parametrize("inner_steps", [1, 4, STEPS])
@pytest.mark.parametrize(
    ("average", "tied", "stages"), [("exact", False, 1), ("exact", True, 2), ("none", False, 1)]
)
def test_one_cohort_with_plain_averaging_is_the_reference_to_the_bit(
    average, tied, stages, inner_steps
):
    described = manifest(average, tied, stages)
    records = []
    stage = train_reference(described, of_step, STEPS, records.append, threads=1)
    expected = fingerprint(stage), [record.loss for record in records]
    assert run(LocalSteps(inner_steps=inner_steps), described) == expected


def test_several_cohorts_are_another_computation_even_with_one_inner_step():
    _, synchronous = run(LocalSteps())
    _, divided = run(LocalSteps(cohorts=2))
    assert divided[0] == pytest.approx(synchronous[0], rel=1e-6)
    assert divided[2] != synchronous[2]


def test_moments_that_are_reset_make_another_run_from_the_second_round_on():
    (kept, kept_losses), (reset, reset_losses) = (
        run(LocalSteps(inner_steps=3, moments=moments)) for moments in ("kept", "reset")
    )
    # The first step after a reset has its loss before it.
    assert reset_losses[:4] == kept_losses[:4]
    assert reset_losses[4] != kept_losses[4]
    assert run(LocalSteps(inner_steps=STEPS, moments="reset"))[0] == run(LocalSteps())[0]
    assert reset != kept


@pytest.mark.parametrize("inner_steps", [1, 4])
def test_a_training_takes_each_microbatch_of_each_step_once(inner_steps):
    drawn = Counter()

    def draw(step, index):
        drawn[step, index] += 1
        return microbatch(step, index)

    _, losses = run(LocalSteps(cohorts=2, inner_steps=inner_steps), draw=draw)
    steps = range(1, STEPS + 1)
    assert drawn == Counter((step, index) for step in steps for index in range(MICROBATCHES))
    assert len(losses) == STEPS


@given(st.integers(1, 20), st.integers(1, 20))
def test_cohorts_divide_the_microbatches_of_a_step(count, each):
    microbatches = count * each
    parts = [cohort_microbatches(cohort, count, microbatches) for cohort in range(count)]
    assert [index for part in parts for index in part] == list(range(microbatches))
    for cohort, part in enumerate(parts):
        assert {index // (microbatches // count) for index in part} == {cohort}


def test_two_outer_steps_computed_by_hand():
    outer = OuterOptimizer(rate=0.5, momentum=0.5)
    ends = [torch.tensor([1.0, 4.0]), torch.tensor([3.0, 4.0])]
    # Gradient 4 - 2 = 2 and 4 - 4 = 0; velocity the same; 4 - 0.5 (2 + 0.5 · 2) = 2.5.
    first = outer.step(torch.tensor([4.0, 4.0]), ends)
    assert first.tolist() == [2.5, 4.0]
    # Gradient 2.5 - 2 = 0.5; velocity 0.5 · 2 + 0.5 = 1.5; 2.5 - 0.5 (0.5 + 0.5 · 1.5) = 1.875.
    assert outer.step(first, ends).tolist() == [1.875, 4.0]


@given(
    st.lists(st.lists(st.floats(-2, 2, width=32), min_size=3, max_size=3), min_size=1, max_size=6),
    st.sampled_from([(1.0, 0.0), NESTEROV, DILOCO]),
)
def test_outer_steps_are_those_of_torch(ends, outer):
    rate, momentum = outer
    mine, boundary = OuterOptimizer(rate, momentum), torch.tensor([1.0, 0.0, -1.0])
    theirs = boundary.double().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=rate, momentum=momentum, nesterov=momentum > 0)
    for end in ends:
        values = torch.tensor(end)
        theirs.grad = theirs.detach() - values.double()
        optimizer.step()
        boundary = mine.step(boundary, [values])
        torch.testing.assert_close(boundary.double(), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_not_finite_ends_the_training():
    with pytest.raises(Diverged):
        run(LocalSteps(outer_rate=1e38, outer_momentum=0.9))


@given(st.lists(st.floats(0, 10), min_size=len(RATES), max_size=len(RATES), unique=True))
def test_a_tuned_rate_is_better_than_its_neighbours_and_the_best_of_a_single_valley(losses):
    tried = {}

    def loss(rate):
        assert rate not in tried, "a rate is trained once"
        tried[rate] = losses[RATES.index(rate)]
        return tried[rate]

    found = RATES.index(tuned_rate(loss))
    around = losses[max(0, found - 1) : found + 2]
    assert losses[found] == min(around)
    assert losses[found] == min(tried.values())
    valley = losses.index(min(losses))
    falls = all(losses[i] > losses[i + 1] for i in range(valley))
    rises = all(losses[i] < losses[i + 1] for i in range(valley, len(RATES) - 1))
    if falls and rises:
        assert found == valley


def test_a_rate_at_which_trainings_diverge_is_not_chosen():
    assert tuned_rate(lambda rate: 1 - rate if rate < 1e-3 else math.inf) == 5e-4
    first = RATES[FIRST_RATE]
    assert tuned_rate(lambda rate: 1 - rate if rate <= first else math.inf) == first
    assert tuned_rate(lambda rate: rate) == RATES[0]


def test_the_settings_of_every_training_identify_it():
    settings = []
    for method in chain.from_iterable(METHODS):
        training = Training(MODEL, method, 1e-3, 2)
        assert training_of(training.settings()) == training
        settings.append(json.dumps(training.settings()))
    assert len(set(settings)) == sum(map(len, METHODS))


def made_up(training):
    """A loss that is least at the rate 0.002 and grows with what is not synchronous."""
    rate = abs(math.log2(training.learning_rate / 2e-3))
    method = training.method
    return 2.0 + 0.1 * rate + 0.05 * (method.local.inner_steps + method.batch) + training.seed / 100


class Trained:
    """Stands for the computation; counts it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run_dir, training):
        self.count += 1
        return {
            "heldout_loss": made_up(training), "training_loss": made_up(training) - 0.1,
            "tokens": 1000, "seconds": 1.0, "finished_at": "2026-11-26T22:00:00+00:00",
        }  # fmt: skip


@pytest.fixture
def trained(monkeypatch):
    fake = Trained()
    monkeypatch.setattr(program, "trained", fake)
    return fake


def search(out, methods, minutes=1.0):
    gate = program.Gate(out, {MODEL: out.parent}, minutes)
    train_all(MODEL, (methods,), range(1, 4), gate.loss)


def test_what_is_in_the_result_file_is_not_computed_again(tmp_path, trained):
    out = tmp_path / "found.json"
    methods = (SYNCHRONOUS, cohorts(10))
    search(out, methods)
    # Three rates, two more seeds at the best of them.
    assert trained.count == 2 * (3 + 2)
    rows = program.read_document(out)["trainings"]
    assert {row["learning_rate"] for row in rows if row["seed"] > 1} == {2e-3}
    search(out, methods)
    assert program.read_document(out)["trainings"] == rows
    assert trained.count == 2 * (3 + 2)
    search(out, (*methods, LARGER_BATCH))
    assert trained.count == 3 * (3 + 2)


def test_no_training_begins_when_the_minutes_are_over(tmp_path, trained):
    out = tmp_path / "found.json"
    with pytest.raises(program.OutOfTime):
        search(out, (SYNCHRONOUS,), minutes=0)
    assert trained.count == 0
    search(out, (SYNCHRONOUS,))
    search(out, (SYNCHRONOUS,), minutes=0)


def test_a_result_file_of_other_models_is_refused(tmp_path, trained, monkeypatch):
    out = tmp_path / "found.json"
    search(out, (SYNCHRONOUS,))
    monkeypatch.setattr(program, "MODELS", {MODEL: {"training.steps": 5}})
    with pytest.raises(click.ClickException, match="other settings"):
        program.read_document(out)


def test_the_table_compares_the_same_seeds_at_the_best_rate(tmp_path, trained):
    out = tmp_path / "found.json"
    search(out, (SYNCHRONOUS, LARGER_BATCH, cohorts(10, NESTEROV, "reset")))
    document = program.read_document(out)
    late = Training(MODEL, cohorts(10, NESTEROV, "reset"), 2e-3, 3)
    document["trainings"] = [
        row for row in document["trainings"] if training_of(row) != late
    ]  # fmt: skip
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in local_steps_markdown(document).splitlines()
        if line.startswith("|")
    ]
    assert [row[0] for row in rows[2:]] == [
        "synchronous", "synchronous, batch x 4", "H = 10, Nesterov 0.9, 0.5"
    ]  # fmt: skip
    synchronous, larger, local = rows[2:]
    assert synchronous[1:9] == ["1", "", "1/1", "3", "0.002", "2.1200", "", "-6.6 % (-6.6 to -6.6)"]
    assert larger[3] == "1/4"
    assert local[1:4] == ["4", "reset", "1/10"]
    assert (synchronous[-1], local[-1]) == ("3", "2")
    others = Training(MODEL, SYNCHRONOUS, 2e-3, 1)
    gaps = [
        100 * (made_up(replace(late, seed=seed)) / made_up(replace(others, seed=seed)) - 1)
        for seed in (1, 2)
    ]
    assert local[7] == f"{sum(gaps) / 2:+.1f} % ({min(gaps):+.1f} to {max(gaps):+.1f})"


def test_batches_and_steps_of_a_training_have_the_tokens_of_the_base_run():
    base = manifest()
    training = Training(MODEL, replace(SYNCHRONOUS, batch=2), 5e-3, 9)
    made = program.manifest_of(base, training)
    assert made.tokens_per_step * made.training.steps == base.tokens_per_step * STEPS
    assert (made.training.steps, made.training.seed) == (3, 9)
    assert (made.optimizer.learning_rate, made.optimizer.warmup_steps) == (5e-3, 1)
