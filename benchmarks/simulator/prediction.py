"""Step times predicted by the simulator, compared with real processes.

    make bench-prediction

Runs a coordinator and volunteers as real programs over loopback, each worker with its own pace
(`benchmarks.instruments.pace`), so that machines of different speeds share the cores. The simulator
gets the same manifest, speeds and stages and follows every microbatch. Compared is the median time
of a step after all peers have joined. Nothing else should run meanwhile: a paced worker without a
free core is slower than its pace. Writes benchmarks/results/prediction.json.
"""

from __future__ import annotations

import datetime
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.instruments.handicap import INSTRUMENT
from benchmarks.instruments.inside import prefix_of
from benchmarks.instruments.pace import PACE_VARIABLE
from benchmarks.machine import describe_machine
from benchmarks.outcome import RESULTS, write_result
from benchmarks.run_data import PLAIN_BORDERS
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocesses
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.simulator.fleet import GIBIBYTE, Hardware
from swarm_coordinator.simulator.microbatch_plane import MicrobatchPlane
from swarm_coordinator.simulator.swarm import Swarm
from swarm_coordinator.simulator.trace import TraceEvent
from swarm_coordinator.simulator.volunteer import SwarmOptions
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.run.manifest import Manifest

LOOPBACK_BYTES_PER_SECOND = 250e6
LOOPBACK_SECONDS = 0.0003
FIRST_STEPS = 2
"""Leading steps that are not compared: processes warm up, and routing learns the peers' speeds."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    seconds: tuple[tuple[float, ...], ...]
    """Seconds per microbatch of each stage's peers."""


CASES = (
    Case("2 stages x 2 alike", ((0.4, 0.4), (0.4, 0.4))),
    Case("2 stages x 3 unlike", ((0.4, 0.8, 1.6), (0.6, 0.6, 1.2))),
    Case("3 stages, the middle one thin", ((0.5, 1.0), (0.9, 0.9), (0.5, 1.0))),
)


def make_run(folder: Path, case: Case, steps: int, microbatches: int) -> Manifest:
    text = folder / "text"
    text.mkdir()
    for index in range(60):
        (text / f"{index}.txt").write_text(f"document {index}: " + "some words of text. " * 200)
    return initialise_run(
        folder / "run", "tiny", str(text), len(case.seconds),
        {
            "model.hidden_size": 96, "model.layers": 6, "training.steps": steps,
            "training.microbatches_per_step": microbatches,
            "training.sequences_per_microbatch": 2, "training.evaluation_microbatches": 0,
            "checkpoint.every_steps": steps, "network.listen_host": "127.0.0.1",
            "rebalancing.rule": "none", **PLAIN_BORDERS,
            "limits.starting_peers_per_stage": min(len(peers) for peers in case.seconds),
        },
    )  # fmt: skip


def pace_of(manifest: Manifest, stage: int, seconds: float) -> float:
    return manifest.stages[stage].work_flops / seconds


def measured(folder: Path, manifest: Manifest, case: Case) -> list[float]:
    """Return the seconds of each step with real processes."""
    with Subprocesses() as children:
        swarm = LocalSwarm(folder / "run", children)
        invite = swarm.start_coordinator()
        swarm.prefix = prefix_of(INSTRUMENT)
        for stage, peers in enumerate(case.seconds):
            for seconds in peers:
                swarm.environment = {PACE_VARIABLE: repr(pace_of(manifest, stage, seconds))}
                swarm.start_volunteer(invite, stage)
        history = swarm.watch()
        swarm.wait_for_exit()
    return [step.seconds for step in history.steps]


def predicted(manifest: Manifest, case: Case) -> list[float]:
    """Return the seconds of each step in the simulator."""
    wanted: dict[str, int] = {}
    fleet: list[Hardware] = []
    for stage, peers in enumerate(case.seconds):
        for seconds in peers:
            wanted[f"volunteer-{len(fleet) + 1}"] = stage
            fleet.append(
                Hardware(
                    kind="paced", flops_per_second=pace_of(manifest, stage, seconds),
                    memory=MemoryOffer(device_bytes=8 * GIBIBYTE),
                    up_bytes_per_second=LOOPBACK_BYTES_PER_SECOND,
                    down_bytes_per_second=LOOPBACK_BYTES_PER_SECOND,
                    latency_seconds=LOOPBACK_SECONDS,
                )
            )  # fmt: skip
    changes = [TraceEvent(0.1 * number, "join", name) for number, name in enumerate(wanted)]
    options = SwarmOptions(heartbeat_seconds=1.0, wanted_stages=wanted)
    swarm = Swarm(manifest, fleet, changes, options, 1, MicrobatchPlane)
    steps = manifest.training.steps
    while len(swarm.applied) < steps and swarm.event_heap.now < 36_000:
        swarm.event_heap.run_until(swarm.event_heap.now + 60)
    return [step.seconds for step in swarm.applied[:steps]]


@click.command()
@click.option("--steps", default=10)
@click.option("--microbatches", default=48, help="Microbatches per step.")
def main(steps: int, microbatches: int) -> None:
    rows: list[dict[str, Any]] = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            manifest = make_run(folder, case, steps, microbatches)
            expected, seen = predicted(manifest, case), measured(folder, manifest, case)
        prediction = statistics.median(expected[FIRST_STEPS:])
        measurement = statistics.median(seen[FIRST_STEPS:])
        rows.append(
            {
                "case": case.name, "peer_seconds": case.seconds,
                "predicted_seconds": prediction, "measured_seconds": measurement,
                "error": prediction / measurement - 1,
                "predicted_steps": expected, "measured_steps": seen,
            }
        )  # fmt: skip
        click.echo(
            f"{case.name}: a step takes {measurement:.2f} s, predicted {prediction:.2f} s "
            f"({100 * rows[-1]['error']:+.1f} %)"
        )
    document = {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(["torch", "libp2p"]),
        "load_average": os.getloadavg(),
        "steps": steps,
        "microbatches_per_step": microbatches,
        "cases": rows,
    }
    write_result(RESULTS / "prediction.json", document)


if __name__ == "__main__":
    main()
