"""How soon audits find liars, in simulated swarms: `make bench-trust-detection`.

Simulates fleets with machines that lie in all or some of their cells, under audits by the core's
rules, until each liar has counted `CELLS` cells or was found, and compares with

    P(n) = 1 - (1 - p q)^n

(p: audited share, q: share of cells in which a liar lies), and with certainty after 2.8 / p cells
for one that lies in all. A further run has honest machines alone, of three kinds that round
differently, and every cell audited: none of them may lose. Writes
benchmarks/results/trust-detection.json and docs/trust.png; needs no run and no network.
"""

from __future__ import annotations

import bisect
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.outcome import conclude, out_option, result_head
from benchmarks.pages.markdown import markdown_table
from benchmarks.pages.pictures import pyplot
from benchmarks.simulator.scenarios import manifest_of
from swarm_coordinator.core.trust.audits import MOST_UNAUDITED, AuditSettings
from swarm_coordinator.simulator.audits import with_liars
from swarm_coordinator.simulator.churn_models import churn_model
from swarm_coordinator.simulator.fleet import FleetFile, HardwareClass, make_fleet
from swarm_coordinator.simulator.microbatch_plane import MicrobatchPlane
from swarm_coordinator.simulator.swarm import Swarm, collect_rarely
from swarm_coordinator.simulator.volunteer import SwarmOptions
from swarm_shared.run.manifest import LimitsConfig

PICTURE = Path(__file__).parents[2] / "docs" / "trust.png"

STAGES, MACHINES, MICROBATCHES = 2, 24, 96
STARTING_PEERS = 8
"""Peers of each stage for which the first step waits: a liar that is alone in its stage has no
auditor, and the formula assumes one."""
LIARS = 0.3
"""Share of the machines."""
SHOWN_CELLS = (10, 50, 150, 500)
HONEST_AUDITS = 10_000

SCENARIOS = ((0.02, 1.0, 150), (0.02, 0.1, 500), (0.25, 1.0, 50), (0.25, 0.1, 150))
"""Audited share, share of cells in which a liar lies, and cells that a liar counts at most."""

KINDS = FleetFile(
    classes=tuple(
        HardwareClass(
            name=f"kind {kind}", machines=1, teraflops=0.02 * (1.0 + 0.2 * kind), spread=0.2,
            memory_gib=8, up_mbit=500, down_mbit=500, latency_ms=5, arithmetic=kind,
        )
        for kind in range(3)
    )
)  # fmt: skip
"""Three kinds of machines that round differently."""


def swarm_of(seed: int, settings: AuditSettings, liars: float, lies: float) -> Swarm:
    fleet = make_fleet(KINDS, MACHINES, random.Random(f"{seed} fleet"))
    fleet = with_liars(fleet, liars, lies, random.Random(f"{seed} liars"))
    names = [f"machine-{number}" for number in range(MACHINES)]
    changes = churn_model("steady").changes(names, 100.0, random.Random(seed))
    limits = LimitsConfig(starting_peers_per_stage=STARTING_PEERS)
    manifest = manifest_of("tiny", STAGES, MICROBATCHES, limits=limits)
    options = SwarmOptions(audits=settings)
    return Swarm(manifest, fleet, changes, options, seed, MicrobatchPlane)


def simulate_until(swarm: Swarm, cells: int) -> None:
    """Simulate until every liar was found or has counted so many cells."""
    hours = 0.0
    while True:
        hours += 0.01
        swarm.simulate(hours)
        log = swarm.audit_log
        found = {peer for peer, _ in log.verdicts}
        liars = [peer for peer, machine in log.machines.items() if machine.lies]
        if swarm.applied and all(p in found or log.signed[p] >= cells for p in liars):
            return


def detection(share: float, lies: float, cells: int, seeds: int) -> dict[str, Any]:
    """Cells until liars are found, of several seeds."""
    settings = AuditSettings(audit_share=share, probation_cells=0)
    found: list[int] = []
    liars = false = audits = 0
    for seed in range(seeds):
        with collect_rarely():
            swarm = swarm_of(seed, settings, LIARS, lies)
            simulate_until(swarm, cells)
        figures = swarm.audit_log.figures(swarm.run.audits)
        found += figures["cells_until_found"]
        liars += figures["liars"]
        false += figures["false_verdicts"]
        audits += figures["passed"] + figures["lost"]
    return {
        "audit_share": share, "lies": lies, "cells": cells, "liars": liars,
        "cells_until_found": sorted(found), "audits": audits, "false_verdicts": false,
    }  # fmt: skip


def honest(audits: int) -> dict[str, Any]:
    """Honest machines of three kinds, until so many audits have ended."""
    with collect_rarely():
        swarm = swarm_of(1, AuditSettings(audit_share=1.0, probation_cells=0), 0.0, 1.0)
        hours = 0.0
        while swarm.run.audits.passed < audits:
            hours += 0.01
            swarm.simulate(hours)
    figures = swarm.audit_log.figures(swarm.run.audits)
    return {name: figures[name] for name in ("passed", "lost", "false_verdicts", "unanswered")}


def predicted(share: float, lies: float, cells: int) -> float:
    certain = lies == 1.0 and cells * share >= MOST_UNAUDITED
    return 1.0 if certain else 1.0 - float((1.0 - share * lies) ** cells)


def observed(row: Mapping[str, Any], cells: int) -> float:
    """Share of the liars that were found in one of their first `cells` cells."""
    liars: int = row["liars"]
    return bisect.bisect_right(row["cells_until_found"], cells) / liars


def detection_markdown(document: Mapping[str, Any]) -> str:
    shown = document["shown_cells"]
    rows = [
        (
            f"{100 * row['audit_share']:g} %", f"{100 * row['lies']:g} %", str(row["liars"]),
            *(
                f"{observed(row, n):.2f} ({predicted(row['audit_share'], row['lies'], n):.2f})"
                if n <= row["cells"]
                else "–"
                for n in shown
            ),
        )
        for row in document["detection"]
    ]  # fmt: skip
    columns = ("audited", "lies in", "liars", *(f"{n} cells" for n in shown))
    alone, rows_of = document["honest"], document["detection"]
    false = sum(row["false_verdicts"] for row in rows_of)
    audits = sum(row["audits"] for row in rows_of)
    return "\n".join(
        (
            f"{document['measured_at'][:10]}: share of the liars found in their first cells, and "
            "in brackets what the formula gives.",
            "",
            *markdown_table(columns, "rr" + "r" * (1 + len(shown)), rows),
            "",
            "Among honest machines of three kinds that round differently, with every cell "
            f"audited, {alone['passed']:,} audits passed and {alone['lost']} were lost. In the "
            f"runs with liars {false} verdicts of {audits:,} audits were against honest machines.",
        )
    )


def draw(document: Mapping[str, Any], path: Path) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for row in document["detection"]:
        share, lies = row["audit_share"], row["lies"]
        cells = sorted({round(10 ** (k / 24)) for k in range(24 * 4) if 10 ** (k / 24) < 700})
        (curve,) = axis.semilogx(
            cells, [predicted(share, lies, n) for n in cells],
            label=f"{100 * share:g} % audited, lies in {100 * lies:g} % of its cells",
        )  # fmt: skip
        points = [n for n in (1, 2, 4, 7, 10, 20, 35, 50, 100, 150, 250, 350, 500)
                  if n <= row["cells"]]  # fmt: skip
        axis.semilogx(
            points, [observed(row, n) for n in points], "o", markersize=4, color=curve.get_color()
        )
    axis.set(
        xlabel="cells that a liar has counted", ylabel="probability that it is found",
        title="P(n) = 1 - (1 - p q)^n, and liars of simulated swarms (points)", ylim=(-0.02, 1.02),
    )  # fmt: skip
    axis.grid(True, which="both", alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


@click.command()
@click.option("--seeds", default=8, help="Simulated swarms of each row.")
@out_option("trust-detection.json")
@click.option("--picture", type=click.Path(path_type=Path), default=PICTURE)
def main(seeds: int, out: Path, picture: Path) -> None:
    rows = []
    for share, lies, cells in SCENARIOS:
        began = time.monotonic()
        rows.append(detection(share, lies, cells, seeds))
        click.echo(f"{share:g} audited, lies in {lies:g}: {time.monotonic() - began:.0f} s")
    document = {
        **result_head(("pydantic",)),
        "load_average": os.getloadavg(),
        "stages": STAGES, "machines": MACHINES, "microbatches_per_step": MICROBATCHES,
        "liars": LIARS, "seeds": seeds, "shown_cells": SHOWN_CELLS,
        "detection": rows,
        "honest": honest(HONEST_AUDITS),
    }  # fmt: skip
    conclude(out, document, detection_markdown)
    draw(document, picture)
    click.echo(f"drawn as {picture}")


if __name__ == "__main__":
    main()
