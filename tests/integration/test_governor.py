"""The governor of a volunteer in a real run: a game starts, or less memory is allowed, and the
volunteer yields."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kits.runs.real_run import Run
from swarm_client.governor.device_offer import PROGRAM_BYTES
from swarm_client.preferences.file import set_preference
from swarm_coordinator.demo.subprocesses import Subprocess, wait_until
from swarm_shared.host.memory import host_memory

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(420)]

STEPS = 30
GAME = "swarmgame"


def lines(volunteer: Subprocess) -> str:
    return "\n".join(volunteer.last_lines(400))


def counted_at(volunteer: Subprocess) -> dict[int, int]:
    """Return the microbatches that it has counted, by step."""
    found = re.findall(r"step (\d+) applied: stage \d+, (\d+) microbatches", lines(volunteer))
    return {int(step): int(count) for step, count in found}


def start_governed(
    run: Run, preferences: str
) -> tuple[Subprocess, Path, Callable[[str, int], None]]:
    """Start a coordinator, a volunteer and one with preferences; return that one, its home, and a
    function that waits until a text has been in so many of its lines."""
    swarm = run.swarm
    invite = swarm.start_coordinator()
    swarm.start_volunteer(invite)
    home = swarm.home("volunteer-2")
    home.mkdir(parents=True)
    (home / "preferences.toml").write_text(preferences)
    governed = swarm.start_volunteer(invite)

    def wait_for(text: str, times: int) -> None:
        wait_until(lambda: lines(governed).count(text) >= times, swarm.children, 120, text)

    return governed, home, wait_for


def start_game(folder: Path) -> subprocess.Popen[bytes]:
    """Start a program of that name."""
    program = folder / GAME
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    return subprocess.Popen([program, "600"])


def test_a_game_pauses_a_volunteer_and_the_run_equals_the_reference(
    make_run, tmp_path: Path, record_property
) -> None:
    run = make_run(1, steps=STEPS)
    swarm = run.swarm
    governed, home, wait_for = start_governed(
        run, f'exclusive_apps = ["{GAME}"]\nupload_bytes_per_second = {3 * 2**20}\n'
    )

    run.wait_for_version(2)
    game = start_game(tmp_path)
    try:
        begun = time.monotonic()
        wait_for(f"paused (exclusive_app): {GAME} is running", 1)
        record_property("seconds until the reason was shown", time.monotonic() - begun)
        paused_at = run.version()
        run.wait_for_version(paused_at + 4)
    finally:
        game.kill()
        game.wait()
    wait_for("resumed: the preferences allow", 1)
    resumed_at = run.version()
    run.wait_for_version(STEPS)

    assert swarm.wait_for_exit() == []
    counted = counted_at(governed)
    # Steps that began and ended in the pause are applied here with nothing computed for them.
    assert [counted[step] for step in range(paused_at + 2, paused_at + 4)] == [0, 0]
    assert sum(n for step, n in counted.items() if step > resumed_at + 1) > 0
    assert "all-reduce goes over libp2p: the preferences limit the network" in lines(governed)
    transfer = json.loads((home / "transfer.json").read_text())
    assert sum(transfer["days"].values()) > STEPS * 10**6
    run.assert_equals_reference()


def test_a_stage_that_the_preferences_leave_no_memory_is_handed_over_and_taken_again_later(
    make_run,
) -> None:
    run = make_run(1, steps=STEPS)
    swarm = run.swarm
    governed, home, wait_for = start_governed(run, "")

    def leave_for_a_stage(nbytes: int) -> None:
        percent = 100 * (PROGRAM_BYTES + nbytes) / host_memory().total_bytes
        set_preference(home / "preferences.toml", "memory_percent_idle", f"{percent:.3f}")

    run.wait_for_version(2)
    wait_for("holding stage 0", 1)
    leave_for_a_stage(2**20)
    wait_for("stage 0 is handed over: it needs", 1)
    wait_for("no stage of this run fits the memory that is left; waiting", 1)
    alone_at = run.version()
    run.wait_for_version(alone_at + 4)
    leave_for_a_stage(2**30)
    wait_for("holding stage 0", 2)
    back_at = run.version()
    run.wait_for_version(STEPS)

    assert swarm.wait_for_exit() == []
    counted = counted_at(governed)
    assert counted.keys().isdisjoint(range(alone_at + 2, alone_at + 4))
    assert sum(n for step, n in counted.items() if step > back_at + 1) > 0
    run.assert_equals_reference()
