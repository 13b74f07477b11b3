"""A real run whose processes each have a machine of the lab, and what its coordinator says."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kits.network_lab import Host
from swarm_coordinator.demo.subprocesses import Subprocess, wait_until

STEPS = 10
MICROBATCHES_PER_STEP = 48
"""Long steps of small microbatches: a test looks at the status file, which is written once a
second, and what it looks for must be seen several times before the run is over."""

TINY: dict[str, object] = {
    "model__layers": 4,
    "model__sequence_length": 64,
    "training__microbatches_per_step": MICROBATCHES_PER_STEP,
    "network__listen_host": "0.0.0.0",
}
"""Smaller than the other integration tests' model: eight processes share two cores for long."""

LONGER_STEPS: dict[str, object] = {"training__microbatches_per_step": 96}
"""Where something must happen in a step's middle."""

BOUNDARY_BYTES_PER_STEP = MICROBATCHES_PER_STEP * (4 * 64) * 96 * 4 * 2
"""Activations and gradients between two stages: microbatches, tokens, width, float32, both ways."""

JOIN_SECONDS = 90.0
MIDDLE_SECONDS = 90.0


@dataclass(frozen=True, eq=False)
class Volunteer:
    host: Host
    child: Subprocess
    started_at: float


@dataclass
class NatRun:
    """A real run whose coordinator and volunteers each have a machine of their own."""

    run: Any
    """Of `make_run`."""
    organiser: Host
    invite: str = ""
    volunteers: list[Volunteer] = field(default_factory=list)

    def start_coordinator(self) -> None:
        self.run.swarm.prefix = self.organiser.prefix
        self.invite = self.run.swarm.start_coordinator()

    def join(self, *hosts: Host, stage: int | None = None) -> list[Volunteer]:
        started: list[Volunteer] = []
        for host in hosts:
            self.run.swarm.prefix = host.prefix
            child = self.run.swarm.start_volunteer(self.invite, stage)
            started.append(Volunteer(host, child, time.monotonic()))
        self.volunteers += started
        return started

    # ---- what the coordinator says

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.run.swarm.status()
        return found

    def peer_id(self, volunteer: Volunteer) -> str | None:
        """None while it is not attached."""
        for peer in self.status().get("peers", ()):
            if peer["name"] == volunteer.child.name:
                return str(peer["peer"])
        return None

    def path(self, one: Volunteer, other: Volunteer) -> dict[str, Any]:
        """How `one` says it is connected to `other`; empty when it is not."""
        reporter, remote = self.peer_id(one), self.peer_id(other)
        for row in self.status().get("paths", ()):
            if (row["reporter"], row["remote"]) == (reporter, remote):
                found: dict[str, Any] = row
                return found
        return {}

    def kind(self, one: Volunteer, other: Volunteer) -> str | None:
        return self.path(one, other).get("kind")

    def wait_for(self, ready: Callable[[], bool], seconds: float, what: str) -> float:
        """How long it took; SwarmError when it took longer, or a process failed meanwhile."""
        began = time.monotonic()
        wait_until(ready, self.run.swarm.children, seconds, what)
        return time.monotonic() - began

    def wait_until_joined(self) -> None:
        """All are members that others may use: from then on they know of each other."""

        def joined() -> bool:
            peers = {peer["name"]: peer for peer in self.status().get("peers", ())}
            names = [volunteer.child.name for volunteer in self.volunteers]
            return all(name in peers and peers[name]["phase"] == "ready" for name in names)

        self.wait_for(joined, JOIN_SECONDS, "all volunteers to hold a stage")

    def wait_for_kind(self, one: Volunteer, other: Volunteer, kind: str, seconds: float) -> float:
        return self.wait_for(
            lambda: self.kind(one, other) == kind, seconds,
            f"{one.child.name} and {other.child.name} to be {kind}",
        )  # fmt: skip

    def wait_for_middle_of_a_step(self, after_version: int) -> int:
        """Returns the step, moments after the coordinator saw a part of it done."""

        def in_the_middle() -> bool:
            status = self.status()
            done, total = status.get("cells_done", 0), status.get("cells_total", 0)
            return status.get("version", 0) >= after_version and 0 < done < total

        self.wait_for(in_the_middle, MIDDLE_SECONDS, "the middle of a step")
        return int(self.status()["step"])

    def finish(self) -> Any:
        """Train to the end; everybody leaves in peace, and one machine computes the same."""
        self.run.swarm.watch()
        history = self.run.history_at_its_end()
        self.run.assert_equals_reference()
        return history
