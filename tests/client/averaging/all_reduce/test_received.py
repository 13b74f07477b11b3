"""What a member keeps of a round for a check of its sums."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from kits.averaging.memory_carrier import MemoryCarrier
from kits.averaging.memory_group import A, B, C, D, Group
from swarm_client.averaging.all_reduce.plan import RoundSpec, partition
from swarm_client.averaging.all_reduce.received import ReceivedPieces
from swarm_shared.base.types import PeerId
from swarm_shared.identity.linear_digest import DigestKey, digest_sum, from_text

SEED = "5eed" * 8


@pytest.mark.parametrize("shares", [None, (0.0, 1.0, 0.7), (1.0, 0.0, 0.0)])
def test_what_a_reducer_received_has_the_digests_of_what_the_members_put_in(
    run: Any, shares: tuple[float, ...] | None
) -> None:
    group = Group((A, B, C), 10_007, codec="exact")
    kept: dict[PeerId, ReceivedPieces] = {}

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            for name in group.names:
                spec = group.spec(name, shares=shares)
                kept[name] = ReceivedPieces(spec)

                async def one(spec: RoundSpec = spec, name: PeerId = name) -> None:
                    await group.member(spec, carriers[name], received=kept[name])

                tasks.start_soon(one)

    run(group, body)
    assert group.failures == {}
    key = DigestKey(SEED, "own")
    for index, name in enumerate(group.names):
        cut = partition(group.spec(name, shares=shares))[index]
        others = [other for other in group.names if other != name]
        found = [from_text(text) for text in kept[name].digests(key)]
        parts = {
            other: key.digest(group.vectors[other][cut.start : cut.stop], cut.start)
            for other in group.names
        }
        assert found == [parts[other] for other in others]
        result = key.digest(group.results[name][cut.start : cut.stop], cut.start)
        assert result == digest_sum(parts.values())


def test_only_rounds_whose_sums_are_exact_and_of_several_members_are_kept() -> None:
    exact = RoundSpec("r/1/1/0", (A, B), A, 10, codec="exact")
    assert ReceivedPieces.for_round(exact) is not None
    assert ReceivedPieces.for_round(RoundSpec("r/1/1/0", (A, B), A, 10, codec="float16")) is None
    assert ReceivedPieces.for_round(RoundSpec("r/1/1/0", (A,), A, 10, codec="exact")) is None


def test_a_sum_beyond_what_honest_parts_make_names_its_reducer(run: Any) -> None:
    group = Group((A, B, C, D), 4_000, codec="exact")
    for vector in group.vectors.values():
        vector[:] = 0.0
        vector[2_500] = 2.0**51 - 1
    group.vectors[C][2_500] = 2.0**51

    run(group)
    assert {failure.culprit for failure in group.failures.values()} == {C}
    assert set(group.failures) == set(group.names)
    assert np.isfinite(group.vectors[A]).all()
