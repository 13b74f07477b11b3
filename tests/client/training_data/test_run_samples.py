"""Which microbatches' data is fetched ahead of need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kits.manifests import manifest_of
from swarm_client.training_data.run_samples import AHEAD_SEQUENCES, RunSamples
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
