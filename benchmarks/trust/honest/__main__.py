"""False verdicts among honest machines that are unlike: `make bench-trust-honest`.

Processes with other kernels and numbers of threads count the same cells of a small run and audit
each other, every cell once for each peer, with the stage worker's own code; the coordinator's core
draws the auditors and decides. For each dtype and pair of codecs no machine may lose. So that this
can fail, one more machine multiplies its gradients by a factor, and must lose each of its audits.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from benchmarks.outcome import conclude, exit_if, out_option, result_head, work_folder
from benchmarks.run_data import RunData
from benchmarks.trust.honest.audits import Found, Stage, count_everywhere
from benchmarks.trust.honest.cells import STAGES, Setting, write_cells
from benchmarks.trust.honest.machine import Machine
from benchmarks.trust.honest.page import honest_markdown
from swarm_coordinator.configuration.run_settings import TOLERANCES
from swarm_coordinator.run_creation.initialise import initialise_run

PACKAGES = ("torch", "numpy")

KINDS: Mapping[str, tuple[int, Mapping[str, str]]] = {
    "1 thread": (1, {}),
    "2 threads": (2, {}),
    "3 threads": (3, {}),
    "AVX2": (1, {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "scalar": (
        1,
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
         "MKL_CBWR": "COMPATIBLE"},
    ),
}  # fmt: skip
"""Threads and environment of each kind of machine: what a processor without some instructions
chooses. Each has two peers in a stage."""

SETTINGS = (
    Setting("float32", "none", "none"),
    Setting("float32", "float16", "float16"),
    Setting("float32", "bfloat16", "bfloat16"),
    Setting("float32", "int8", "int8"),
    Setting("float32", "int4", "topk"),
    Setting("bfloat16", "none", "none"),
    Setting("bfloat16", "int8", "int8"),
    Setting("bfloat16", "int4", "topk"),
)

SIZES = {
    "run.name": "honest", "model.hidden_size": 64, "model.intermediate_size": 176,
    "model.layers": 4, "model.heads": 4, "model.key_value_heads": 2, "model.sequence_length": 32,
    "training.sequences_per_microbatch": 2, "training.microbatches_per_step": 16,
    "training.steps": 200, "training.evaluation_microbatches": 0,
}  # fmt: skip
VERSIONS = (0, 3, 10, 30)
"""Steps that were applied before the cells are counted."""
FACTORS = {"float32": 1.01, "bfloat16": 1.1}
"""By which a machine that lies multiplies its gradients; beyond the tolerance of the dtype."""
LIAR = "liar"
LIES = 20
"""Audits of the liar for each setting and stage."""


def honest_and_liar(
    machines: Mapping[str, Machine], run_dir: Path, setting: Setting, microbatches: int,
    folder: Path,
) -> tuple[Found, Found]:  # fmt: skip
    """The audits of one setting: of the honest machines, and of the one that lies."""
    write_cells(RunData(run_dir), setting, VERSIONS, microbatches, folder)
    honest, liar = Found(), Found()
    for stage in range(STAGES):
        for name, machine in machines.items():
            machine.ask(
                "hold", run_dir=str(run_dir), folder=str(folder), stage=stage,
                setting=[setting.dtype, setting.activation, setting.gradient],
                factor=FACTORS[setting.dtype] if name == LIAR else 1.0,
            )  # fmt: skip
        receipts = audit_honest(machines, setting, stage, microbatches, folder, honest)
        for number in (n % microbatches for n in range(LIES)):
            # A liar is expelled at once, so each audit has a run of its own.
            alone = Stage(stage, machines, TOLERANCES[setting.dtype], 1, f"{number}", folder)
            alone.report(alone.peers(LIAR)[0], number, receipts[number], liar)
    return honest, liar


def audit_honest(
    machines: Mapping[str, Machine], setting: Setting, stage: int, microbatches: int,
    folder: Path, found: Found,
) -> list[dict[str, Any]]:  # fmt: skip
    """Each honest peer counts each cell and is audited; the receipts of the last version."""
    honest = {name: machine for name, machine in machines.items() if name != LIAR}
    cells = 2 * len(honest) * microbatches * len(VERSIONS)
    seed = f"{setting.name} {stage}"
    swarm = Stage(stage, honest, TOLERANCES[setting.dtype], cells, seed, folder)
    order = random.Random(seed)
    receipts: list[dict[str, Any]] = []
    for version in VERSIONS:
        receipts = count_everywhere(machines, range(microbatches), version)
        reports = [
            (peer, n) for n in range(microbatches) for k in honest for peer in swarm.peers(k)
        ]
        order.shuffle(reports)
        for peer, number in reports:
            swarm.report(peer, number, receipts[number], found)
    return receipts


def row(setting: Setting, honest: Found, liar: Found) -> dict[str, Any]:
    return {
        "setting": setting.name, "tolerance": TOLERANCES[setting.dtype], "audits": honest.audits,
        "alike": honest.alike, "unlike": len(honest.distances),
        "median_distance": statistics.median(honest.distances or [0.0]),
        "largest_distance": max(honest.distances, default=0.0), "false_verdicts": honest.lost,
        "cleared": honest.cleared, "left_class": honest.left_class,
        "factor": FACTORS[setting.dtype], "lies": liar.audits, "lies_found": liar.found,
    }  # fmt: skip


@click.command()
@click.option("--microbatches", default=16, show_default=True, type=click.IntRange(1, 16))
@click.option("--only", type=click.IntRange(0, len(SETTINGS) - 1), help="One setting.")
@out_option("trust-honest.json")
def main(microbatches: int, only: int | None, out: Path) -> None:
    """Audit honest machines, and count the verdicts."""
    rows = []
    load = os.getloadavg()
    with work_folder("trust-honest") as work, ExitStack() as stack:
        machines = {
            name: stack.enter_context(Machine(environment, threads))
            for name, (threads, environment) in {**KINDS, LIAR: (1, {})}.items()
        }
        initialise_run(work / "run", "tiny", stages=STAGES, overrides=SIZES)
        for setting in SETTINGS if only is None else SETTINGS[only : only + 1]:
            began = time.monotonic()
            with tempfile.TemporaryDirectory(dir=work) as folder:
                found = honest_and_liar(machines, work / "run", setting, microbatches, Path(folder))
            rows.append(row(setting, *found))
            click.echo(f"{rows[-1]} {time.monotonic() - began:.0f} s", err=True)
    document = {
        **result_head(PACKAGES), "load_average": load, "kinds": list(KINDS),
        "versions": VERSIONS, "microbatches": microbatches, "rows": rows,
    }  # fmt: skip
    conclude(out, document, honest_markdown)
    exit_if(failed(rows))


def failed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must not be in a result."""
    return [
        f"{row['setting']}: {row['false_verdicts']} false verdicts, {row['cleared']} cells "
        f"cleared, {row['lies_found']} of {row['lies']} lies found"
        for row in rows
        if row["false_verdicts"] or row["cleared"] or row["lies_found"] < row["lies"]
    ]


if __name__ == "__main__":
    main()
