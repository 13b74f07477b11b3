"""The tied part of a gradient: first and last stage sum it, each after elements of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kits.averaging.group import SENTINEL, group
from swarm_shared.run.codec_sizes import AverageCodec

OWN_ELEMENTS = (20_000, 777)
"""Of the first stage and of the last one."""
TIED_ELEMENTS = 10_001


@pytest.mark.parametrize("codec", ["exact", "none"])
@pytest.mark.parametrize(
    "hivemind",
    [
        pytest.param(True, marks=pytest.mark.process, id="in the worker"),
        pytest.param(False, id="in the daemon"),
    ],
)
async def test_stages_of_unlike_sizes_sum_their_tied_parts_and_nothing_else(
    tmp_path: Path, hivemind: bool, codec: AverageCodec
) -> None:
    async with group(tmp_path, [hivemind] * 2, max(OWN_ELEMENTS) + TIED_ELEMENTS) as g:
        for peer, own in zip(g.peers, OWN_ELEMENTS, strict=True):
            peer.use_codec(codec)
            peer.tie(own, TIED_ELEMENTS)
        assert await g.round(part="tied") == {}
        tied = [slice(own, own + TIED_ELEMENTS) for own in OWN_ELEMENTS]
        total = sum(peer.source[part] for peer, part in zip(g.peers, tied, strict=True))
        for peer, part in zip(g.peers, tied, strict=True):
            assert peer.result[part].tobytes() == np.asarray(total).tobytes()
            others = np.delete(peer.result, np.r_[part])
            assert (others == SENTINEL).all()
