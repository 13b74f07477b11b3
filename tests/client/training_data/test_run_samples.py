"""Which microbatches' data is fetched ahead of need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kits.manifests import manifest_of
from swarm_client.training_data.run_samples import AHEAD_SEQUENCES, RunSamples
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.protocol import Lease, LeasedMicrobatch


@pytest.mark.parametrize(("sequences", "ahead"), [(2, 4), (AHEAD_SEQUENCES + 1, 0)])
def test_a_lease_of_huge_microbatches_is_not_named_ahead(sequences: int, ahead: int) -> None:
    """It would take minutes, in which the volunteer does nothing else."""
    asked: list[Any] = []
    fetcher: Any = SimpleNamespace(cache=SimpleNamespace(capacity=2**20), ahead=asked.append)
    manifest = manifest_of(training={"sequences_per_microbatch": sequences, "steps": 1})
    leased = tuple(LeasedMicrobatch(microbatch=n, accumulate=(0,)) for n in range(4))
    lease = Lease(step=1, lease=1, window=1, microbatches=leased)
    RunSamples(manifest, fetcher).expect(lease)
    assert len(asked) == ahead


@pytest.mark.parametrize(
    ("step", "numbers"),
    [(1, (0, 1000)), (0, (0,)), (2**53 - 1, (15, 16))],
    ids=["no such microbatch", "no such step", "training and held-out data in one lease"],
)
def test_a_lease_that_no_coordinator_makes_leaves_nothing_to_fetch_ahead(
    step: int, numbers: tuple[int, ...]
) -> None:
    """Otherwise each later lease would fail, and what is expected would grow without an end."""
    asked: list[Any] = []
    fetcher: Any = SimpleNamespace(cache=SimpleNamespace(capacity=2**20), ahead=asked.append)
    samples = RunSamples(
        manifest_of(training={"microbatches_per_step": 16, "evaluation_microbatches": 4}), fetcher
    )
    leased = tuple(LeasedMicrobatch(microbatch=n, accumulate=(0,)) for n in numbers)
    samples.expect(Lease(step=step, lease=1, window=1, microbatches=leased))
    for number in numbers:
        samples._lookahead.begun(samples._sample(Step(step), MicrobatchIndex(number)))
    samples._lookahead._newest.clear()
    assert samples._lookahead.ahead(100) == []
    samples.expect(Lease(step=1, lease=2, window=1, microbatches=leased[:1]))
