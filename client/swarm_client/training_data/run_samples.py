"""Token ids of the run's microbatches, from leaves that are fetched when or before they are needed.

Satisfies `swarm_client.pipeline.trainer.Samples`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarm_client.training_data.fetch_plan import Lookahead, Sample
from swarm_client.training_data.fetcher import LeafFetcher
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.data.sample_ranges import LeafId, SampleRange, SampleRanges
from swarm_shared.protocol import Lease
from swarm_shared.run.manifest import Manifest

AHEAD_LEAVES = 2048
"""Most leaves fetched ahead, 32 MiB, and at most half of what the disk may hold."""
AHEAD_MICROBATCHES = 64
"""Most microbatches fetched for ahead; naming the leaves of one takes half a millisecond, if it has
a few sequences."""
AHEAD_SEQUENCES = 4096
"""Most sequences of these microbatches: nothing else is done while their leaves are named."""
GROUP_SEQUENCES = 64
"""Sequences whose leaves are in memory at once, 1 MiB or a little more."""


class RunSamples:
    """The samples of one run, by microbatch index."""

    def __init__(self, manifest: Manifest, fetcher: LeafFetcher) -> None:
        self._ranges = SampleRanges(manifest)
        self._heldout = manifest.training.heldout_microbatches
        self._fetcher = fetcher
        self._lookahead = Lookahead(Step(manifest.training.steps))
        self._ahead: set[Sample] = set()
        self._leaves_each = len(leaves_of(self._ranges.training(1, 0)))
        self._most_ahead = min(
            AHEAD_MICROBATCHES, AHEAD_SEQUENCES // manifest.training.sequences_per_microbatch
        )

    async def drawn(self, step: Step, microbatch: MicrobatchIndex) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and targets of a leased microbatch, and fetch ahead for the next
        ones."""
        sample = self._sample(step, microbatch)
        self._lookahead.begun(sample)
        self._fetch_ahead()
        return await self._arrays(self._ranges_of(sample))

    async def audited(
        self, step: Step, microbatch: MicrobatchIndex
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and targets of a microbatch that another peer was leased; nothing is
        fetched ahead for it."""
        return await self._arrays(self._ranges_of(self._sample(step, microbatch)))

    def _sample(self, step: Step, microbatch: MicrobatchIndex) -> Sample:
        return Sample(step, microbatch, heldout=microbatch in self._heldout)

    def _ranges_of(self, sample: Sample) -> tuple[SampleRange, ...]:
        if sample.heldout:
            return self._ranges.heldout(sample.index - self._heldout.start)
        return self._ranges.training(sample.step, sample.index)

    async def _arrays(self, ranges: Sequence[SampleRange]) -> tuple[np.ndarray, np.ndarray]:
        sequences: list[bytes] = []
        for first in range(0, len(ranges), GROUP_SEQUENCES):
            group = ranges[first : first + GROUP_SEQUENCES]
            contents = await self._fetcher.contents(leaves_of(group))
            sequences += [sample_range.cut(contents) for sample_range in group]
        return self._ranges.arrays(sequences)

    # ---- ahead of need

    def expect(self, lease: Lease) -> None:
        """Fetch ahead for the microbatches of a lease that was accepted. Those that the run does
        not have are left to `drawn`, which fails for them alone."""
        indices = [leased.microbatch for leased in lease.microbatches]
        training = [index for index in indices if index < self._heldout.start]
        heldout = [index for index in indices if index in self._heldout]
        self._lookahead.expect(lease.step, training, heldout=False)
        self._lookahead.expect(lease.step, heldout, heldout=True)
        self._fetch_ahead()

    def over(self, oldest: Step | None) -> None:
        """Fetch no more for steps before `oldest`."""
        if oldest is not None:
            self._lookahead.over(oldest)

    def clear(self) -> None:
        """Fetch nothing ahead until the next lease."""
        self._lookahead.clear()
        self._ahead.clear()
        self._fetcher.withdraw_ahead()

    def _fetch_ahead(self) -> None:
        leaves = min(AHEAD_LEAVES, self._fetcher.cache.capacity // 2)
        samples = self._lookahead.ahead(min(self._most_ahead, leaves // self._leaves_each))
        for sample in samples:
            if sample not in self._ahead:
                self._fetcher.ahead(leaves_of(self._ranges_of(sample)))
        self._ahead = set(samples)


def leaves_of(ranges: Sequence[SampleRange]) -> list[LeafId]:
    """Return the leaves of some sequences, each once, in order."""
    return list(dict.fromkeys(leaf for sample_range in ranges for leaf in sample_range.leaves))
