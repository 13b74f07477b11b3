"""Members of a round over an in-process network, with a vector each."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import numpy as np
import trio.testing

from kits.averaging.memory_carrier import MemoryCarrier, MemoryNetwork
from swarm_client.averaging.all_reduce.codec import Totals
from swarm_client.averaging.all_reduce.errors import RoundFailed
from swarm_client.averaging.all_reduce.plan import RoundSpec
from swarm_client.averaging.all_reduce.reduce import all_reduce
from swarm_client.averaging.all_reduce.routes import StreamTraffic
from swarm_shared.base.types import PeerId
from swarm_shared.run.codec_sizes import AverageCodec

A, B, C, D = (PeerId(name) for name in ("A", "B", "C", "D"))
PIECE_ELEMENTS = 1000


def run_on_virtual_time(body: Callable[[], Awaitable[None]]) -> None:
    clock = trio.testing.MockClock(autojump_threshold=0)
    anyio.run(body, backend="trio", backend_options={"clock": clock})


class Group:
    """Members with a vector each, and what became of their rounds."""

    def __init__(
        self,
        names: tuple[PeerId, ...],
        elements: int,
        codec: AverageCodec = "none",
    ) -> None:
        rng = np.random.default_rng(1)
        self.names = names
        self.elements = elements
        self.codec = codec
        self.vectors = {name: _values(rng, elements, codec) for name in names}
        self.results: dict[PeerId, Totals] = {
            name: np.full_like(vector, -7) for name, vector in self.vectors.items()
        }
        self.links: dict[PeerId, tuple[StreamTraffic, ...]] = {}
        self.failures: dict[PeerId, RoundFailed] = {}
        self.scopes: dict[PeerId, anyio.CancelScope] = {}

    def spec(self, me: PeerId, **changes: Any) -> RoundSpec:
        spec = RoundSpec(
            "round 1", self.names, me, self.elements, piece_elements=PIECE_ELEMENTS,
            codec=self.codec,
        )  # fmt: skip
        return dataclasses.replace(spec, **changes)

    def in_order(self, names: tuple[PeerId, ...] | None = None) -> Totals:
        """Return the sum in group order, in the codec's own type: what a lossless round gives."""
        first, *others = names or self.names
        total = self.vectors[first].copy()
        for name in others:
            total += self.vectors[name]
        return total

    def exact(self) -> Any:
        return sum(vector.astype(np.float64) for vector in self.vectors.values())

    async def member(
        self, spec: RoundSpec, carrier: Any, *, stall_seconds: float = 5.0, **options: Any
    ) -> None:
        with anyio.CancelScope() as self.scopes[spec.me]:
            try:
                self.links[spec.me] = await all_reduce(
                    spec,
                    carrier,
                    self.vectors[spec.me],
                    self.results[spec.me],
                    stall_seconds=stall_seconds,
                    **options,
                )
            except RoundFailed as failure:
                self.failures[spec.me] = failure

    async def all(self, carriers: dict[PeerId, MemoryCarrier], **changes: Any) -> None:
        async with anyio.create_task_group() as tasks:
            for name in self.names:
                tasks.start_soon(self.member, self.spec(name, **changes), carriers[name])


async def with_network(
    names: tuple[PeerId, ...],
    body: Callable[[dict[PeerId, MemoryCarrier]], Awaitable[None]],
) -> None:
    async with anyio.create_task_group() as tasks:
        network = MemoryNetwork(tasks)
        await body({name: network.add(name, park_seconds=30.0) for name in names})
        tasks.cancel_scope.cancel()


def _values(rng: np.random.Generator, elements: int, codec: AverageCodec) -> Totals:
    if codec == "exact":
        return rng.integers(-(2**40), 2**40, elements).astype(np.float64)
    return rng.standard_normal(elements).astype(np.float32)
