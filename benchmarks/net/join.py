"""Time from `join` to the first accepted receipt of a volunteer behind a router.

A new run of the demo's model with the coordinator on a public host. Two volunteers with empty homes
join at the same moment, one per stage: no work counts before both are ready. The coordinator's
status file, written once a second, shows the first receipt.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from benchmarks.run_data import preset_sizes
from kits.network_lab import Lab, Nat
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocesses, wait_until
from swarm_coordinator.run_creation.initialise import initialise_run

PRESET = "tiny"
LIMIT_SECONDS = 180.0


def make_template(folder: Path) -> None:
    sizes = preset_sizes(PRESET)
    initialise_run(folder, PRESET, stages=2, overrides={**sizes, "network.listen_host": "0.0.0.0"})


def seconds_to_first_receipt(template: Path, work: Path, nat: Nat) -> float:
    run_dir = work / "run"
    shutil.copytree(template, run_dir)
    with Lab() as lab, Subprocesses() as children:
        swarm = LocalSwarm(run_dir, children, prefix=lab.public_host("organiser").prefix)
        invite = swarm.start_coordinator()
        hosts = [lab.home(f"home{index}", nat)[1] for index in range(2)]
        began = time.monotonic()
        for host in hosts:
            swarm.prefix = host.prefix
            swarm.start_volunteer(invite)
        wait_until(
            lambda: bool(swarm.status().get("cells_done") or swarm.status().get("version")),
            children, LIMIT_SECONDS, "the first accepted receipt",
        )  # fmt: skip
        took = time.monotonic() - began
    shutil.rmtree(work)
    return took
