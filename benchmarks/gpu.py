"""Tokens per second and FLOPs utilisation of one middle stage on a GPU: `make bench-gpu`.

Runs forward, backward and the optimizer's step of the worker's own code in bfloat16, with and
without torch.compile, and then within budgets of memory. Without a GPU it reports that and exits
with code 0.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from benchmarks.gpu_flops import layer_training_flops_per_token, peak_tflops
from benchmarks.gpu_memory import HEADS, cells, measure_budgets
from benchmarks.gpu_stage import StageAtWork, Timed, largest_inner_stage, stage_manifest
from benchmarks.outcome import result_head, write_result
from swarm_client.machine.device_names import FORMS
from swarm_client.stage.worker.accelerator import (
    Accelerator,
    accelerator_named,
    accelerators,
    built_for,
)
from swarm_client.stage.worker.compiling import BACKENDS
from swarm_coordinator.demo.run_summary import table
from swarm_shared.base.errors import SwarmError
from swarm_shared.run.model_config import PRESETS

OUT = Path(__file__).parent / "results" / "gpu.json"
PACKAGES = ("torch", "swarmtrain")
WARM_UP_STEPS = 2


@click.command()
@click.option("--device", "wanted", default="auto", show_default=True, help=f"Device: {FORMS}.")
@click.option("--preset", "presets", multiple=True, type=click.Choice(list(PRESETS)),
              help="Repeatable; default: 1b and 7b.")  # fmt: skip
@click.option(
    "--layers", type=click.IntRange(1), help="Layers of the stage; default: the preset's most."
)
@click.option("--microbatches", default=16, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1))
@click.option("--backend", default=BACKENDS[0], show_default=True, type=click.Choice(BACKENDS))
@click.option("--peak-tflops", type=click.FloatRange(min=0, min_open=True),
              help="The device's peak in bfloat16, if it is not in the table.")  # fmt: skip
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Result file; default: results/gpu.json on a GPU.",
)
def main(
    wanted: str, presets: tuple[str, ...], layers: int | None, microbatches: int, steps: int,
    backend: str, peak_tflops: float | None, out: Path | None,
) -> None:  # fmt: skip
    """Measure one stage: tokens/s, model FLOPs utilisation, and how long the device waits."""
    if wanted == "auto":
        accelerator = next(iter(accelerators()), None)
    else:
        accelerator = accelerator_named(wanted)
    if accelerator is None:
        click.echo(
            "gpu: torch finds no GPU, nothing was measured; --device cpu --preset tiny runs the "
            "same on a CPU"
        )
        return
    accelerator.select()
    try:
        rows = [
            row
            for preset in presets or ("1b", "7b")
            for row in measure(
                preset, accelerator, layers, microbatches, steps, backend, peak_tflops
            )
        ]
    except SwarmError as error:
        click.echo(f"gpu: {error}", err=True)
        sys.exit(error.exit_code)
    budgets = [measure_budgets(preset, accelerator) for preset in presets or ("1b", "7b")]
    document = {
        **result_head(PACKAGES),
        "device": accelerator.label,
        "built_for": built_for(),
        "stages": rows,
        "budgets": budgets,
    }
    click.echo(render(document))
    if out is None and not accelerator.is_processor:
        out = OUT
    if out is not None:
        write_result(out, document)
        click.echo(f"\nwritten to {out}")


def measure(
    name: str, accelerator: Accelerator, layers: int | None, microbatches: int, steps: int,
    backend: str, peak: float | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure one stage of the preset, uncompiled and compiled."""
    preset = PRESETS[name]
    held = layers or largest_inner_stage(preset)
    manifest = stage_manifest(preset, held, "bfloat16")
    peak = peak or peak_tflops(accelerator.label)
    rows = []
    for chosen, repeats in ways_of(accelerator, backend):
        torch.use_deterministic_algorithms(repeats)
        stage = StageAtWork(manifest, accelerator, chosen)
        for _ in range(WARM_UP_STEPS):
            stage.measure(min(2, microbatches))
        timed = [stage.measure(microbatches) for _ in range(steps)]
        tokens = microbatches * manifest.tokens_per_microbatch
        flops = tokens * held * layer_training_flops_per_token(preset.model)
        rows.append(
            {
                "preset": name, "layers": held, "of_layers": preset.model.layers,
                "parameters": stage.parameters, "compiled_by": chosen,
                "kernels_repeat": repeats,
                "microbatches": microbatches, "tokens_per_step": tokens, "flops_per_step": flops,
                "peak_tflops": peak, **figures(timed, tokens, flops, peak),
                "steps": [dataclasses.asdict(one) for one in timed],
            }
        )  # fmt: skip
        del stage
        accelerator.release_cached()
    accelerator.select()
    return rows


def ways_of(accelerator: Accelerator, backend: str) -> list[tuple[str | None, bool]]:
    """Return the ways that are compared: compiled or not, and where it makes a difference, with
    kernels that repeat to the bit or without."""
    repeats = torch.are_deterministic_algorithms_enabled()
    ways: list[tuple[str | None, bool]] = [(None, repeats), (backend, repeats)]
    return [*ways, (None, False)] if repeats else ways


def figures(
    timed: Sequence[Timed], tokens: int, flops: float, peak: float | None
) -> dict[str, float | None]:
    """Return medians over steps: of computing alone, and tokens/s with the optimizer's step."""
    seconds = median(one.seconds for one in timed)
    whole = median(one.seconds + one.optimizer_seconds for one in timed)
    teraflops = flops / seconds / 1e12
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_with_optimizer": tokens / whole,
        "teraflops": teraflops,
        "mfu": teraflops / peak if peak else None,
        "waiting_share": median(1 - one.busy_seconds / one.seconds for one in timed),
        "optimizer_seconds": median(one.optimizer_seconds for one in timed),
    }


def render(document: Mapping[str, Any]) -> str:
    rows = []
    for one in document["stages"]:
        mfu = "unknown peak" if one["mfu"] is None else f"{one['mfu']:.1%}"
        rows.append(
            (
                f"{one['preset']}, {one['layers']} of {one['of_layers']} layers",
                one["compiled_by"] or "no",
                "repeat" if one["kernels_repeat"] else "any",
                f"{one['tokens_per_second']:,.0f}",
                f"{one['tokens_per_second_with_optimizer']:,.0f}",
                f"{one['teraflops']:,.3g}",
                mfu,
                f"{one['waiting_share']:.1%}",
            )
        )
    head = (
        "stage", "compiled", "kernels", "tokens/s", "with optimizer", "TFLOP/s", "MFU",
        "device waits",
    )  # fmt: skip
    parts = [str(document["device"]), table(head, rows, right=(3, 4, 5, 6, 7))]
    for one in document["budgets"]:
        parts += ["", f"{one['layers']} layers of {one['preset']}, {one['dtype']}"]
        parts.append(table(HEADS, cells(one), right=range(len(HEADS))))
    return "\n".join(parts)


if __name__ == "__main__":
    main()
