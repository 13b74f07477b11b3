"""A home folder is copied, with its identity, to another machine, and both join the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from swarm_client.machine.home import Home
from swarm_shared.base.errors import AdmissionError

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_the_copy_that_joined_first_ends_with_the_reason_and_no_bit_changes(
    make_run: Callable[..., Any],
) -> None:
    run = make_run(1, steps=12, limits__starting_peers_per_stage=2)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    first, other = swarm.start_volunteer(invite), swarm.start_volunteer(invite)
    run.wait_for_version(2)
    copy = Home.create(swarm.home("volunteer-3"))
    shutil.copy(Home(swarm.home(first.name)).identity_path, copy.identity_path)
    swarm.expect_exit(first)
    second = swarm.start_volunteer(invite)
    assert first.wait(60.0) == AdmissionError.exit_code
    (said,) = first.last_lines(1)
    assert "another program has joined with the same identity since" in said
    assert "remove identity.key from the copy" in said
    history = swarm.watch()
    assert swarm.wait_for_exit() == []
    assert second.exit_code() == other.exit_code() == 0
    # Both copies were one peer, which has the newer one's name.
    assert set(history.names.values()) - {None} == {second.name, other.name}
    run.assert_equals_reference()
