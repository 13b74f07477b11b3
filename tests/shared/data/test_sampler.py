from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.manifests import manifest_of, shard
from swarm_shared.base.errors import DataError, ProtocolError
from swarm_shared.data.leaf_files import ShardSamples
from swarm_shared.data.sampler import heldout_slots, permuted, training_slots
from swarm_shared.run.manifest import MAX_STEPS, Manifest

T = 4


def sampled(train: tuple[int, ...] = (41, 22), heldout: int = 25, per_step: int = 3) -> Manifest:
    """Shards of these many tokens; sequences of 4 tokens, 2 to a microbatch."""
    shards = [shard(f"train-{n}", tokens) for n, tokens in enumerate(train)]
    return manifest_of(
        data={"shards": (*shards, shard("heldout-0", heldout))},
        training={"microbatches_per_step": per_step, "seed": 5},
    )


@pytest.fixture
def samples(tmp_path: Path) -> ShardSamples:
    """Those of `sampled()`, from shards in the test's folder."""
    for name, start, end in (("train-0", 0, 41), ("train-1", 100, 122), ("heldout-0", 200, 225)):
        (tmp_path / f"{name}.tokens").write_bytes(bytes(range(start, end)))
    return ShardSamples(tmp_path, sampled())


SLOTS = 10 + 5


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_the_order_of_an_epoch_is_a_permutation(count: int, seed: int, epoch: int):
    order = permuted(np.arange(count), count, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(count))


@given(st.integers(2**20, 2**45), st.data())
@settings(max_examples=40, deadline=None)
def test_a_permutation_of_billions_needs_no_memory_and_collides_nowhere(count: int, data):
    start = data.draw(st.integers(0, count - 1000))
    sent = permuted(np.arange(start, start + 1000), count, 1, 0)
    assert len(np.unique(sent)) == 1000
    assert sent.min() >= 0
    assert sent.max() < count


def test_epochs_and_seeds_have_orders_of_their_own_without_pattern():
    count = 20_000
    orders = [permuted(np.arange(count), count, s, e) for s, e in ((1, 0), (1, 1), (2, 0))]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        # Two random orders agree in about one place.
        assert np.count_nonzero(orders[one] == orders[other]) < 12
        assert abs(np.corrcoef(orders[one], orders[other])[0, 1]) < 0.03
    for order in orders:
        assert abs(np.corrcoef(np.arange(count), order)[0, 1]) < 0.03
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03


def test_an_epoch_visits_every_sequence_once_then_the_next_begins_in_another_order():
    manifest = sampled()
    visited = [
        slot
        for step in range(1, 11)
        for index in range(3)
        for slot in training_slots(manifest, step, index).tolist()
    ]
    epochs = [visited[n * SLOTS : (n + 1) * SLOTS] for n in range(4)]
    assert all(sorted(epoch) == list(range(SLOTS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_step_and_an_evaluation_are_all_their_microbatches_in_order(samples: ShardSamples):
    evaluation = sampled().training.evaluation_microbatches
    for found, expected in (
        (samples.of_step(2), [samples.training(2, index) for index in range(3)]),
        (samples.of_evaluation(), [samples.heldout(index) for index in range(evaluation)]),
    ):
        np.testing.assert_array_equal(np.array(found), np.array(expected))


def test_targets_are_the_inputs_shifted_by_one(samples: ShardSamples):
    inputs_BT, targets_BT = samples.training(1, 0)
    assert inputs_BT.shape == targets_BT.shape == (2, T)
    assert inputs_BT.dtype == targets_BT.dtype == np.int64
    assert inputs_BT.flags.c_contiguous
    assert targets_BT.flags.c_contiguous
    np.testing.assert_array_equal(targets_BT, inputs_BT + 1)


def test_the_order_is_pinned_so_that_a_new_version_continues_old_runs():
    manifest = sampled()
    visited = [training_slots(manifest, step, 1).tolist() for step in (1, 2, 3)]
    assert visited == PINNED
    assert permuted(np.arange(3), 10**12, 2**62, 9).tolist() == PINNED_FAR


PINNED = [[3, 7], [2, 1], [9, 1]]
PINNED_FAR = [390481559126, 831996050686, 382376339520]


def test_a_microbatch_depends_on_its_sample_number_only_not_on_how_steps_are_cut():
    fine, coarse = sampled(per_step=1), sampled(per_step=6)
    one_by_one = [training_slots(fine, step, 0).tolist() for step in range(1, 13)]
    at_once = [training_slots(coarse, step, i).tolist() for step in (1, 2) for i in range(6)]
    assert one_by_one == at_once


def test_heldout_sequences_come_in_order_and_begin_again(samples: ShardSamples):
    firsts = [samples.heldout(index)[0][:, 0].tolist() for index in range(4)]
    assert firsts == [[200, 204], [208, 212], [216, 220], [200, 204]]


def test_a_microbatch_that_does_not_exist_is_refused():
    for step, index in ((0, 0), (1, 3), (1, -1), (-4, 0)):
        with pytest.raises(ProtocolError, match="there is no microbatch"):
            training_slots(sampled(), step, index)
    with pytest.raises(ProtocolError, match="held-out"):
        heldout_slots(sampled(), -1)


def test_data_without_one_whole_sequence_is_refused():
    with pytest.raises(DataError, match="train data holds no sequence of 4 tokens"):
        training_slots(sampled(train=(4, 4)), 1, 0)
    with pytest.raises(DataError, match="heldout data holds no sequence"):
        heldout_slots(sampled(heldout=4), 0)


def test_a_late_step_of_a_large_run_has_samples():
    """Their numbers do not fit into 64 bits, nor do those of the epochs."""
    manifest = manifest_of(
        training={
            "steps": MAX_STEPS, "microbatches_per_step": 60_000, "sequences_per_microbatch": 65_536,
            "evaluation_microbatches": 0,
        },
        data={"shards": (shard("train", 9), shard("heldout"))},
    )  # fmt: skip
    slots = training_slots(manifest, MAX_STEPS, 59_999).tolist()
    assert len(slots) == 65_536
    assert all(sorted(slots[i : i + 2]) == [0, 1] for i in range(0, 65_536, 2))
