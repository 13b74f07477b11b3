"""How often the bytes of one activation are copied between two volunteers: counted, not timed."""

from __future__ import annotations

import pytest

from benchmarks.copies.__main__ import HOPS, measure
from swarm_shared.base.errors import CapacityError

SIZE = 4 * 2**20

MOST = {"write": 1.0, "send": 1.0, "receive": 1.5, "fill": 1.0, "read_input": 1.0}
"""Copies in memory per byte; docs/tensor-path.md says what each is for. Half a one in `receive`
for what is moved to the front of the socket's buffer."""


@pytest.mark.process
def test_no_hop_copies_a_tensor_more_often_than_the_page_says() -> None:
    try:
        hops = measure(SIZE)
    except CapacityError as error:
        pytest.skip(str(error))
    assert list(hops) == list(MOST) == list(HOPS)
    slack = 0.02  # headers and the like
    counted = {hop: copied["memory"] / SIZE for hop, copied in hops.items()}
    assert {hop: n for hop, n in counted.items() if n > MOST[hop] + slack} == {}
    # Each moves the tensor once at least: a hop that counts less is not counted right.
    assert {hop: n for hop, n in counted.items() if n < 1.0 - slack} == {}
    for hop, kind in (("send", "to_kernel"), ("receive", "from_kernel")):
        assert 1.0 <= hops[hop][kind] / SIZE < 1.0 + slack
