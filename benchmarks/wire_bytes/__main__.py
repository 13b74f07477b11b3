"""Bytes on the wire of a short real run of three stages, by purpose: `make bench-bytes`.

Runs a coordinator and one volunteer per stage over loopback, real programs with an instrument
inside (`instrument`). Counts do not depend on the machine's speed or load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.instruments.inside import prefix_of
from benchmarks.outcome import conclude, out_option, result_head, work_folder
from benchmarks.run_data import PLAIN_BORDERS, preset_sizes
from benchmarks.wire_bytes.accounting import boundaries, kinds
from benchmarks.wire_bytes.gossip import Gossip
from benchmarks.wire_bytes.page import wire_bytes_markdown
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocesses
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.storage.history import History
from swarm_shared.base.errors import SwarmError
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import PRESETS

PACKAGES = ("torch", "libp2p", "hivemind", "swarmtrain")


@click.command()
@click.option("--steps", default=8, show_default=True, type=click.IntRange(1))
@click.option("--stages", default=3, show_default=True, type=click.IntRange(2, 16))
@click.option("--preset", default="tiny", show_default=True, type=click.Choice(list(PRESETS)))
@out_option("wire-bytes.json")
def main(steps: int, stages: int, preset: str, out: Path) -> None:
    """Count the bytes on the wire of a short run, against the least that it takes."""
    with work_folder("bytes") as work:
        document = measure(work, steps, stages, preset)
    conclude(out, document, wire_bytes_markdown)


def measure(work: Path, steps: int, stages: int, preset: str) -> dict[str, Any]:
    run_dir, counts, gossip = work / "run", work / "counts", Gossip()
    counts.mkdir()
    initialise_run(run_dir, preset, stages=stages, overrides={
        "training.steps": steps, "training.evaluation_microbatches": 0, "run.name": "counted",
        "network.listen_host": "127.0.0.1", "limits.starting_peers_per_stage": 1,
        **PLAIN_BORDERS, **preset_sizes(preset),
    })  # fmt: skip
    with Subprocesses() as children:
        swarm = LocalSwarm(run_dir, children)
        swarm.prefix = prefix_of("benchmarks.wire_bytes.instrument", counts)
        invite = swarm.start_coordinator()
        stage_of_name = {
            swarm.start_volunteer(invite, stage=stage).name: stage for stage in range(stages)
        }
        finished = swarm.watch(lambda seen, status: gossip.sample())
        left = swarm.wait_for_exit()
    if left:
        raise SwarmError(f"{', '.join(child.name for child in left)} did not end cleanly")
    processes = [json.loads(path.read_text()) for path in sorted(counts.glob("*.json"))]
    stage_of: dict[str, int] = {
        peer: stage_of_name[name] for peer, name in finished.names.items() if name in stage_of_name
    }
    manifest = load_manifest(swarm.folder)
    return _document(processes, stage_of, manifest, finished, gossip, preset)


def _document(
    processes: list[Mapping[str, Any]], stage_of: Mapping[str, int], manifest: Manifest,
    finished: History, gossip: Gossip, preset: str,
) -> dict[str, Any]:  # fmt: skip
    missing = stage_of.keys() - {process["peer"] for process in processes}
    if missing or not stage_of:
        raise SwarmError(f"of {len(stage_of)} volunteers {len(missing)} left no counts")
    # The presets' codecs are `none`: a gradient has as many bytes as an activation.
    border_bytes = manifest.activation_bytes
    steps = len(finished.steps)
    counted = steps * manifest.training.microbatches_per_step
    rows = boundaries(processes, stage_of, border_bytes, counted)
    return {
        **result_head(PACKAGES),
        "preset": preset,
        "stages": manifest.stage_count,
        "steps": steps,
        "seconds": sum(step.seconds for step in finished.steps),
        "microbatches": counted,
        "border_bytes": border_bytes,
        "boundaries": [
            {**asdict(row), "sent": row.sent, "over_least": row.sent / row.least} for row in rows
        ],
        "kinds": kinds(processes),
        "gossip_bytes": gossip.total_bytes,
    }


if __name__ == "__main__":
    main()
