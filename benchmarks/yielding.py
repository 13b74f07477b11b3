"""How soon a machine is its user's again: `make bench-yielding`.

A real run of one stage on this machine. One of its volunteers may not compute while somebody uses
the machine; a key is typed into a real terminal while its stage worker computes, at moments that
fall differently into the governor's looks. Measured from the key on:

    reason     until `swarm-client status` says paused, with the reason
    work       until its stage worker has used processor time for the last time
    looking    processor time that the governor's probes take, of one core

The other volunteers go on, and no step closes meanwhile, in which the paused one would take part.
Nothing else should run on the machine, and nobody type into a terminal of it.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil

from benchmarks.outcome import result_head, work_folder, write_result
from swarm_client.control.client import ask
from swarm_client.governor.governor import TICK_SECONDS
from swarm_client.governor.probes.all import MachineProbes
from swarm_client.preferences import Preferences
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.run_summary import table
from swarm_coordinator.demo.subprocesses import Subprocesses, wait_until
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_shared.base.errors import SwarmError

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "psutil", "swarmtrain")

PREFERENCES = {"run_if_user_active": False, "idle_minutes": 0.05}
POLL_SECONDS = 0.01
WATCHED_SECONDS = 4.0
"""After the key; the person is taken for gone after three seconds at the earliest."""
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
    # So many that none of the steps ends while this is measured.
    "training.microbatches_per_step": 20_000,
    "training.sequences_per_microbatch": 4,
    "training.evaluation_microbatches": 0,
    "limits.starting_peers_per_stage": 2,
    "network.listen_host": "127.0.0.1",
}


class Volunteer:
    """The one whose machine it is."""

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
        """Of its stage worker, the one of its workers that has computed."""
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
        """From a key on; the volunteer computes."""
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
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS / "yielding.json")
def main(repetitions: int, out: Path) -> None:
    """Measure how soon a volunteer yields to somebody who comes back to the machine."""
    with work_folder("yielding") as work, Subprocesses() as children:
        document = measure(work, children, repetitions)
    write_result(out, document)
    click.echo(f"\n{render(document)}\n\nwritten to {out}")


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
            # The governor looks at its own times; a key comes at any.
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
    """Microbatches per second of the fastest."""
    peers = swarm.status().get("peers", [])
    return max((float(peer["microbatches_per_second"]) for peer in peers), default=0.0)


def looking_share(home: Path) -> float:
    """Of one core, what looks as often as the governor's take, children included."""
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


def render(document: dict[str, Any]) -> str:
    rows = []
    for name, what in (("reason_seconds", "the reason is shown"), ("work_seconds", "last work")):
        seconds = [key[name] for key in document["keys"]]
        rows.append((f"{what} after", f"{median(seconds):.2f} s", f"{max(seconds):.2f} s"))
    rows.append(("the probes take, of a core", f"{document['looking_share_of_a_core']:.2%}", ""))
    return table(("what", "median", "longest"), rows, right=(1, 2))


if __name__ == "__main__":
    main()
