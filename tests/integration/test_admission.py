"""A volunteer is banned from a real run, and the losses do not change."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import (
    COORDINATOR_MODULE,
    run_to_end,
    wait_until,
)
from swarm_shared.base.errors import AdmissionError
from swarm_shared.host.python_modules import module_command

pytestmark = [pytest.mark.process, pytest.mark.timeout(420)]

STEPS = 16
WITHIN_SECONDS = 5.0
"""Seconds within which the other volunteers have to apply a ban."""


def order(*words: str | Path) -> str:
    """Run a command of the organiser as a process."""
    command = module_command(COORDINATOR_MODULE, *map(str, words))
    return run_to_end(f"swarm-coordinator {words[0]}", command, 30.0)


def peer_of(lines: list[str]) -> str:
    [peer] = re.findall(r"peer (12D3KooW\w+)", "\n".join(lines))
    return peer


def linked_with(swarm: LocalSwarm, reporter: str) -> set[str]:
    """Return the peers that this volunteer reports a connection with."""
    return {path["remote"] for path in swarm.status()["paths"] if path["reporter"] == reporter}


def test_a_banned_volunteer_is_disconnected_in_seconds_and_changes_no_loss(make_run) -> None:
    run = make_run(1, steps=STEPS, limits__starting_peers_per_stage=2, admission__mode="token")
    swarm = run.swarm
    standing = swarm.start_coordinator()
    single_use = order("token", "create", run.folder.path, "--uses", "1").split()[-1]
    bad, good = swarm.start_volunteer(single_use), swarm.start_volunteer(standing)

    run.wait_for_version(2)
    banned, other = peer_of(bad.last_lines(200)), peer_of(good.last_lines(200))
    wait_until(
        lambda: banned in linked_with(swarm, other), swarm.children, 30.0, "a link between the two"
    )
    swarm.expect_exit(bad)
    began = time.monotonic()
    said = order("ban", run.folder.path, banned[-8:], "--reason", "it was seen cheating")
    assert said.strip().splitlines()[-1] == (
        f"banned {banned}; 1 session was ended, 1 volunteer was notified"
    )
    wait_until(
        lambda: (
            banned not in {peer["peer"] for peer in swarm.status()["peers"]}
            and banned not in linked_with(swarm, other)
            and [ban["peer"] for ban in swarm.status()["admission"]["bans"]] == [banned]
        ),
        swarm.children,
        WITHIN_SECONDS,
        "the other volunteer and the status to be rid of it",
    )
    # Its process ends by itself, with the reason and the documented exit code.
    assert bad.wait(30) == AdmissionError.exit_code
    assert time.monotonic() - began < 30
    assert bad.last_lines(1) == [
        "swarm-client: error: the organiser has banned this peer from the run: it was seen cheating"
    ]

    swarm.watch()
    assert swarm.wait_for_exit() == []
    assert good.exit_code() == 0
    run.assert_equals_reference()
    seen = swarm.history()
    assert seen is not None
    assert any("it was seen cheating" in note.text for note in seen.notes)


@pytest.mark.nightly
def test_other_volunteers_close_their_links_with_a_banned_one_that_is_frozen(make_run) -> None:
    """It is stopped while it is banned, so that it receives nothing and its links stay as they
    are; when it resumes, they are closed."""
    run = make_run(2, steps=STEPS, limits__starting_peers_per_stage=1)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    first, second = swarm.start_volunteer(invite, stage=0), swarm.start_volunteer(invite, stage=1)
    bad = swarm.start_volunteer(invite, stage=1)
    run.wait_for_version(2)
    banned = peer_of(bad.last_lines(200))
    swarm.expect_exit(bad)
    bad.signal(signal.SIGSTOP)
    try:
        order("ban", run.folder.path, banned)
        run.wait_for_version(run.version() + 2)
        others = [peer_of(other.last_lines(200)) for other in (first, second)]
        wait_until(  # reported links are a heartbeat and a status file old
            lambda: all(banned not in linked_with(swarm, other) for other in others),
            swarm.children,
            WITHIN_SECONDS,
            "both to have closed their links with it",
        )
    finally:
        bad.signal(signal.SIGCONT)
    assert bad.wait(60) == AdmissionError.exit_code
    swarm.watch()
    assert swarm.wait_for_exit() == []
    assert (first.exit_code(), second.exit_code()) == (0, 0)
    run.assert_equals_reference()
