"""Web folders with copies of the shards, read by Range requests.

A mirror that fails rests for a while. One that gives wrong bytes is not asked again. Proofs never
come from a mirror, so that nothing of it is trusted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import trio

from swarm_client.connectivity.web_download import WebClient
from swarm_shared.base.backoff import Backoff
from swarm_shared.data.merkle import LEAF_BYTES
from swarm_shared.data.sample_ranges import LeafId, leaf_shape
from swarm_shared.run.manifest import Manifest

log = logging.getLogger(__name__)

BATCH_SECONDS = 20.0
"""Longest time for the leaves of one batch, half a megabyte: a slower mirror rests, and the
coordinator sends instead."""
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 5.0, 600.0
REQUESTS_AT_ONCE = 8
"""Range requests to one mirror at once; at 100 ms each they bring 1.3 MB/s."""


@dataclass(frozen=True, slots=True)
class WebRange:
    """Neighbouring leaves of one shard, as one request."""

    shard: int
    first_leaf: int
    sizes: tuple[int, ...]
    """Bytes of each leaf."""


def joined_ranges(manifest: Manifest, leaves: Sequence[LeafId]) -> list[WebRange]:
    """Return the requests for these leaves, neighbours together. Pure."""
    ranges: list[WebRange] = []
    for leaf in sorted(leaves):
        size = leaf_shape(manifest, leaf).size_bytes
        previous = ranges[-1] if ranges else None
        if (
            previous is not None
            and (previous.shard, previous.first_leaf + len(previous.sizes)) == leaf
        ):
            ranges[-1] = WebRange(previous.shard, previous.first_leaf, (*previous.sizes, size))
        else:
            ranges.append(WebRange(leaf.shard, leaf.leaf, (size,)))
    return ranges


@dataclass(slots=True)
class Mirror:
    """One web folder, its failures so far, and the requests to it."""

    url: str
    rests: Backoff = field(
        default_factory=lambda: Backoff(FIRST_REST_SECONDS, LONGEST_REST_SECONDS)
    )
    rests_until: float = 0.0
    banned: bool = False
    slots: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(REQUESTS_AT_ONCE)
    )


class Mirrors:
    """The mirrors of one run, in the manifest's order: the first that is not resting is asked."""

    def __init__(self, manifest: Manifest, web: WebClient) -> None:
        self._manifest = manifest
        self._web = web
        self._mirrors = [Mirror(url.rstrip("/")) for url in manifest.data.mirrors]

    def pick(self, now: float) -> Mirror | None:
        """Return the mirror to ask at the time `now`; None if all are banned or rest."""
        usable = (
            mirror for mirror in self._mirrors if not mirror.banned and mirror.rests_until <= now
        )
        return next(usable, None)

    def ban(self, mirror: Mirror, reason: str) -> None:
        """Never ask this mirror again in this run."""
        if not mirror.banned:
            log.warning("%s is not used any more: %s", mirror.url, reason)
        mirror.banned = True

    async def read(self, mirror: Mirror, leaves: Sequence[LeafId]) -> dict[LeafId, bytes]:
        """Return the leaves that the mirror gave; nothing is checked yet."""
        contents: dict[LeafId, bytes] = {}
        problems: list[str] = []

        async def read_one(web_range: WebRange) -> None:
            name = self._manifest.data.shards[web_range.shard].name
            try:
                content = await anyio.to_thread.run_sync(
                    self._web.read_range, f"{mirror.url}/{name}",
                    web_range.first_leaf * LEAF_BYTES, sum(web_range.sizes),
                    limiter=mirror.slots, abandon_on_cancel=True,
                )  # fmt: skip
            except (OSError, ValueError) as error:
                problems.append(str(error))
                return
            start = 0
            for place, size in enumerate(web_range.sizes):
                contents[LeafId(web_range.shard, web_range.first_leaf + place)] = content[
                    start : start + size
                ]
                start += size

        with trio.move_on_after(BATCH_SECONDS) as scope:
            async with trio.open_nursery() as nursery:
                for web_range in joined_ranges(self._manifest, leaves):
                    nursery.start_soon(read_one, web_range)
        if scope.cancelled_caught:
            problems.append("it is too slow")
        self._experienced(mirror, problems)
        return contents

    def _experienced(self, mirror: Mirror, problems: list[str]) -> None:
        if not problems:
            mirror.rests.reset()
            return
        seconds = mirror.rests.next()
        mirror.rests_until = trio.current_time() + seconds
        log.warning("%s is not asked for %.0f s: %s", mirror.url, seconds, problems[0])
