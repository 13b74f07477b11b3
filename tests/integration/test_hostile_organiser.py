"""A run whose organiser signs false numbers, and the real program of a volunteer that joins it."""

from __future__ import annotations

import pytest

from kits.memory import takes
from swarm_coordinator.durability.run_files import load_identity
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import CapacityError
from swarm_shared.identity.signed_manifest import sign_manifest

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def test_a_volunteer_leaves_a_run_that_hides_how_much_memory_a_stage_needs(make_run) -> None:
    run = make_run(2, steps=4)
    hidden = tuple(
        stage.model_copy(update={"memory": takes(1000)}) for stage in run.manifest.stages
    )
    lie = run.manifest.model_copy(update={"stages": hidden})
    write_atomically(run.folder.manifest, sign_manifest(load_identity(run.folder), lie))
    invite = run.swarm.start_coordinator()
    volunteer = run.swarm.start_volunteer(invite)
    run.swarm.expect_exit(volunteer)
    assert volunteer.wait(90) == CapacityError.exit_code
    (sentence,) = volunteer.last_lines(1)
    assert sentence.startswith(
        "swarm-client: error: the manifest claims 1000 B of device memory and 0 B of the host's "
        "for stage 0, and a stage of this shape needs at least "
    )
    assert run.version() == 0
