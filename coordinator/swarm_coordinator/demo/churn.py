"""The churn of the demo: one volunteer is killed in the middle of the run, another one joins.

Owns the moment, the choice of the victim, and the lines that are displayed about both. The kill is
real: SIGKILL to a process that computes, without any preparation of the run. The coordinator learns
of it as it would on the internet, and its own notes are what is displayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocess
from swarm_coordinator.storage.history import History
from swarm_shared.base.text import printable

KILL_DIVISOR = 3
"""The kill comes after this part of the compared steps: the newcomer needs some seconds to start,
and shall compute before the run ends."""

FEWEST_STEPS = 2
"""Least number of steps of a run with a kill: one before it and one after it."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A volunteer that was killed, and the one that was started in its place."""

    victim: str
    pid: int
    exit: str
    """How the process ended, as the operating system reports it."""
    after_step: int
    """Number of steps that were applied at that moment."""
    newcomer: str


def kill_step(compared_steps: int) -> int:
    """Return the step after which a volunteer is killed."""
    return max(1, compared_steps // KILL_DIVISOR)


def choose_victim(status: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return which of these volunteers to kill: one at the stage with the most peers.

    None while none of them is ready. A stage loses its only peer only where every stage has one.
    """
    ready = [peer for peer in status.get("peers", ()) if peer["phase"] == "ready"]
    peers = Counter(peer["stage"] for peer in ready)
    found = [(peers[peer["stage"]], peer["stage"], peer["name"]) for peer in ready]
    return max((one for one in found if one[2] in names), default=(0, 0, None))[2]


def first_counted_step(seen: History, name: str) -> int | None:
    """Return the first step that contains a gradient of this volunteer; None before there is."""
    return min((part.first_step for part in seen.contributions if part.name == name), default=None)


@dataclass(slots=True)
class Churn:
    """Kills one volunteer of a swarm at its moment, starts another one, and reports on both."""

    swarm: LocalSwarm
    invite: str
    after_step: int
    write_line: Callable[[str], None]
    kill: Kill | None = None
    _notes_shown: int = 0
    _joined: bool = False

    def follow(self, seen: History, status: Mapping[str, Any]) -> None:
        """Act on the run as it is now: the kill at its step, afterwards the news of the run."""
        if self.kill is not None:
            self._show_news(seen, self.kill.newcomer)
        elif len(seen.steps) >= self.after_step and not seen.restored.finished:
            volunteers = {child.name: child for child in self.swarm.volunteers}
            name = choose_victim(status, volunteers)
            if name is not None:
                self._notes_shown = len(seen.notes)
                self.kill = self._strike(volunteers[name], len(seen.steps))

    def _strike(self, child: Subprocess, applied: int) -> Kill:
        self.write_line(
            f"step {applied} is done; killing {child.name} (process {child.pid}), like a power cut"
        )
        self.swarm.expect_exit(child)
        child.kill()
        self.write_line(
            f"  {child.name} {child.describe_exit()}; its part of step {applied + 1} is lost"
        )
        newcomer = self.swarm.start_volunteer(self.invite)
        self.write_line(f"  {newcomer.name} is started in its place, with an empty folder")
        return Kill(child.name, child.pid, child.describe_exit(), applied, newcomer.name)

    def _show_news(self, seen: History, newcomer: str) -> None:
        """Display the coordinator's notes until the newcomer has computed."""
        if self._joined:
            return
        for note in seen.notes[self._notes_shown :]:
            self.write_line(f"  coordinator: {printable(note.text)}")
        self._notes_shown = len(seen.notes)
        first = first_counted_step(seen, newcomer)
        if first is not None:
            self._joined = True
            self.write_line(f"  {newcomer} computes: its gradients count from step {first} on")
