"""What a volunteer refuses to download as the state of its stage."""

from __future__ import annotations

import pytest

from kits.swarm_world.facts import Options, manifest_of
from swarm_client.volunteer.stage_loader import check_file_size
from swarm_shared.base.errors import ProtocolError
from swarm_shared.protocol import AssignStage
from swarm_shared.scheduling.placement.stage_sizes import MAX_STATE_HEADER_BYTES, stage_sizes


@pytest.mark.parametrize("surplus", [-1, MAX_STATE_HEADER_BYTES + 1, 6 << 30])
def test_a_file_that_cannot_be_the_state_of_the_stage_is_not_fetched(surplus: int) -> None:
    manifest = manifest_of(Options())
    size = stage_sizes(manifest)[1].state_bytes
    assignment = AssignStage(
        stage=1, version=3, source="snapshot", item="x", bytes=size, sha256="a" * 64
    )
    check_file_size(manifest, assignment)
    with pytest.raises(ProtocolError, match="another source is needed"):
        check_file_size(manifest, assignment.model_copy(update={"bytes": size + surplus}))
