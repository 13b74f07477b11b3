"""Time until a volunteer yields to the machine's user: `make bench-yielding`.

A real run of one stage on this machine. One of its volunteers may not compute while a user is
active; a key is typed into a real terminal while its stage worker computes, at moments spread over
the governor's polling interval. Measured from the key press:

    reason     until `swarm-client status` shows the pause and its reason
    work       until its stage worker uses CPU time for the last time
    looking    CPU time of the governor's probes, as a share of one core

The other volunteers continue, and no step closes meanwhile, because the paused volunteer would take
part. Nothing else should run on the machine, and no other terminal of it should receive input.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.outcome import conclude, out_option, result_head, work_folder
from benchmarks.pages.tables import yielding_markdown
from swarm_client.control.client import ask
from swarm_client.governor.governor import TICK_SECONDS
from swarm_client.governor.probes.all import MachineProbes
from swarm_client.preferences import Preferences
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocesses, wait_until
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_shared.base.errors import SwarmError

PACKAGES = ("torch", "psutil", "swarmtrain")

PREFERENCES = {"run_if_user_active": False, "idle_minutes": 0.05}
POLL_SECONDS = 0.01
WATCHED_SECONDS = 4.0
"""Seconds watched after a key press; the user counts as inactive after three seconds at the
earliest."""
PATIENCE_SECONDS = 240.0
LOOKS = 60

SETTINGS: dict[str, object] = {
    "run.name": "yielding",
    "model.hidden_size": 192,
    "model.intermediate_size": 512,
    "model.layers": 6,
    "model.heads": 4,
    "model.key_value_heads": 2,
    "model.sequence_length": 256,
    "training.steps": 100,
    # So many that no step ends during the measurement.
    "training.microbatches_per_step": 20_000,
    "training.sequences_per_microbatch": 4,
    "training.evaluation_microbatches": 0,
    "limits.starting_peers_per_stage": 2,
    "network.listen_host": "127.0.0.1",
}


class Volunteer:
    """The volunteer that pauses while the machine's user is active."""

    def __init__(self, home: Path, pid: int) -> None:
        self._socket = home / "control.sock"
        self._pid = pid
        self._screen, self._program = os.openpty()
        self._worker: psutil.Process | None = None

    def close(self) -> None:
        os.close(self._screen)
        os.close(self._program)

    def status(self) -> dict[str, Any]:
        return ask(self._socket, "status") if self._socket.exists() else {"state": "starting"}

    def types(self) -> None:
        os.write(self._screen, b"x\n")
        os.read(self._program, 2)

    def computed_seconds(self) -> float:
        """Return the CPU seconds of its stage worker, the only worker that computes."""
        if self._worker is None:
            children = psutil.Process(self._pid).children()
            workers = [c for c in children if "swarm_client.stage.worker" in c.cmdline()]
            self._worker = max(workers, key=lambda c: sum(c.cpu_times()[:2]))
        times = self._worker.cpu_times()
        return float(times.user + times.system)

    def is_computing(self) -> bool:
        if self.status()["state"] != "contributing":
            return False
        before = self.computed_seconds()
        time.sleep(0.2)
        return self.computed_seconds() > before

    def yields(self) -> dict[str, float | str]:
        """Press a key while the volunteer computes, and return the measured times."""
        self.types()
        began = time.monotonic()
        seconds, worked_at, shown_at, reason = self.computed_seconds(), began, None, ""
        while (now := time.monotonic()) < began + WATCHED_SECONDS:
            used = self.computed_seconds()
            if used > seconds:
                seconds, worked_at = used, now
            if shown_at is None:
                status = self.status()
                if status["state"] == "paused":
                    shown_at, reason = time.monotonic(), status["reason"]
            time.sleep(POLL_SECONDS)
        if shown_at is None:
            raise SwarmError(f"no pause was shown within {WATCHED_SECONDS:g} s of a key")
        return {
            "reason": reason,
            "reason_seconds": shown_at - began,
            "work_seconds": worked_at - began,
        }


@click.command()
@click.option("--repetitions", default=12, show_default=True, type=click.IntRange(1))
@out_option("yielding.json")
def main(repetitions: int, out: Path) -> None:
    """Measure how soon a volunteer yields to a user who returns to the machine."""
    with work_folder("yielding") as work, Subprocesses() as children:
        document = measure(work, children, repetitions)
    conclude(out, document, yielding_markdown)


def measure(work: Path, children: Subprocesses, repetitions: int) -> dict[str, Any]:
    looking = looking_share(work)
    run_dir = work / "run"
    initialise_run(run_dir, "tiny", stages=1, overrides=SETTINGS)
    swarm = LocalSwarm(run_dir, children)
    invite = swarm.start_coordinator()
    swarm.start_volunteer(invite)
    home = swarm.home("volunteer-2")
    home.mkdir(parents=True)
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in PREFERENCES.items())
    (home / "preferences.toml").write_text("".join(lines))
    volunteer = Volunteer(home, swarm.start_volunteer(invite).pid)
    pauses = random.Random(0)
    found: list[dict[str, float | str]] = []
    try:
        for number in range(repetitions):
            wait_until(volunteer.is_computing, children, PATIENCE_SECONDS, "it to compute")
            # Spread the key presses over the governor's polling interval.
            time.sleep(pauses.uniform(0, 2 * TICK_SECONDS))
            found.append(volunteer.yields())
            click.echo(
                f"{number + 1}: reason after {found[-1]['reason_seconds']:.2f} s, last work after "
                f"{found[-1]['work_seconds']:.2f} s"
            )
        microbatch = 1 / max(0.01, rate(swarm))
    finally:
        volunteer.close()
    swarm.stop()
    return {
        **result_head(PACKAGES),
        "settings": SETTINGS,
        "preferences": PREFERENCES,
        "seconds_per_microbatch": microbatch,
        "looking_share_of_a_core": looking,
        "keys": found,
    }


def rate(swarm: LocalSwarm) -> float:
    """Return the microbatches per second of the fastest volunteer."""
    peers = swarm.status().get("peers", [])
    return max((float(peer["microbatches_per_second"]) for peer in peers), default=0.0)


def looking_share(home: Path) -> float:
    """Return the share of a core that probing at the governor's rate takes, children included."""
    probes = MachineProbes(home)
    preferences = Preferences.model_validate(PREFERENCES)
    probes.read(preferences, ("cpu",), {})
    began, used = time.monotonic(), os.times()
    for _ in range(LOOKS):
        time.sleep(TICK_SECONDS)
        probes.read(preferences, ("cpu",), {})
    now = os.times()
    spent = sum(now[:4]) - sum(used[:4])
    return spent / (time.monotonic() - began)


if __name__ == "__main__":
    main()
