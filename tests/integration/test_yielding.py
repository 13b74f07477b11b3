"""A key typed into a real terminal pauses a volunteer of a real run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from swarm_client.control.client import ask
from swarm_coordinator.demo.subprocesses import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.nightly,
    pytest.mark.timeout(420),
    pytest.mark.skipif(sys.platform != "linux", reason="terminals are read as Linux writes them"),
]

STEPS = 40
PREFERENCES = "run_if_user_active = false\nidle_minutes = 0.05\n"


class Terminal:
    """A pseudo-terminal: one end types, a program reads the other."""

    def __init__(self) -> None:
        self._screen, self._program = os.openpty()

    def types(self) -> None:
        os.write(self._screen, b"x\n")
        os.read(self._program, 2)

    def close(self) -> None:
        os.close(self._screen)
        os.close(self._program)


@contextmanager
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    try:
        yield opened
    finally:
        opened.close()


def test_a_key_pauses_a_volunteer_with_its_reason_and_the_pipeline_continues(
    make_run: Callable[..., Any],
) -> None:
    """The governed volunteer is one of two at the first stage."""
    run = make_run(2, steps=STEPS, limits__starting_peers_per_stage=1)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    swarm.start_volunteer(invite, 0)
    swarm.start_volunteer(invite, 1)
    home = swarm.home("volunteer-3")
    home.mkdir(parents=True)
    (home / "preferences.toml").write_text(PREFERENCES)
    governed = swarm.start_volunteer(invite, 0)

    def sees() -> dict[str, Any]:
        return ask(home / "control.sock", "status")

    def until(true: Callable[[dict[str, Any]], bool], what: str) -> None:
        wait_until(
            lambda: (home / "control.sock").exists() and true(sees()), swarm.children, 180, what
        )

    with terminal() as person:
        until(lambda s: s["state"] == "contributing", "it to contribute")
        person.types()
        until(lambda s: s["state"] == "paused", "the pause")
        seen = sees()
        assert seen["reason"] == "user_active"
        assert seen["sentence"].startswith("paused: this machine is in use; continues after")
        assert seen["until"] > seen["time"]

        # While typing continues, whole steps pass and nothing is computed here.
        paused_at = run.version()
        given = seen["contribution"]["microbatches"]
        counted: set[int] = set()

        def typing_goes_on() -> bool:
            person.types()
            now = sees()
            assert now["reason"] == "user_active"
            counted.add(now["contribution"]["microbatches"])
            return run.version() >= paused_at + 4

        wait_until(typing_goes_on, swarm.children, 180, "steps without it")
        # Microbatches counted before the pause may have been applied in the first of them.
        assert max(counted) - given <= 12
        [worker] = [
            child
            for child in psutil.Process(governed.pid).children()
            if "swarm_client.stage.worker" in child.cmdline()
        ]
        assert worker.is_running()
        assert sees()["devices"][0]["queued"] == 0

        until(lambda s: s["state"] == "contributing", "it to go on when nobody types any more")
    run.wait_for_version(STEPS)
    assert swarm.wait_for_exit() == []
    run.assert_equals_reference()
