"""Tokens per second and FLOPs utilisation of one middle stage on a GPU: `make bench-gpu`.

Runs forward, backward and the optimizer's step of the worker's own code in bfloat16, with and
without torch.compile, and then within budgets of memory. Without a GPU it reports that and exits
with code 0.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from benchmarks.outcome import RESULTS, result_head, write_result
from benchmarks.pages.markdown import markdown_table
from benchmarks.stage import gpu_memory
from benchmarks.stage.flops import layer_training_flops_per_token, peak_tflops
from benchmarks.stage.gpu_memory import measure_budgets
from benchmarks.stage.middle_stage import StageAtWork, Timed, largest_inner_stage, stage_manifest
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
    """Measure one stage: tokens/s, model FLOPs utilisation, and what budgets of memory cost."""
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
    document: dict[str, Any] = {
        **result_head(PACKAGES), "device": accelerator.label, "built_for": built_for(),
        "stages": [], "budgets": [],
    }  # fmt: skip
    if out is None and not accelerator.is_processor:
        out = RESULTS / "gpu.json"
    try:
        for preset in presets or ("1b", "7b"):
            document["budgets"].append(measure_budgets(preset, accelerator))
            # What there is stays if a later part takes too long: compiling takes minutes.
            for row in measure(
                preset, accelerator, layers, microbatches, steps, backend, peak_tflops
            ):
                document["stages"].append(row)
                if out is not None:
                    write_result(out, document)
    except SwarmError as error:
        click.echo(f"gpu: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(render(document))
    if out is not None:
        click.echo(f"\nwritten to {out}")


def measure(
    name: str, accelerator: Accelerator, layers: int | None, microbatches: int, steps: int,
    backend: str, peak: float | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Measure one stage of the preset in each way."""
    preset = PRESETS[name]
    held = layers or largest_inner_stage(preset)
    manifest = stage_manifest(preset, held, "bfloat16")
    peak = peak or peak_tflops(accelerator.label)
    for chosen, repeats in ways_of(accelerator, backend):
        torch.use_deterministic_algorithms(repeats)
        stage = StageAtWork(manifest, accelerator, chosen)
        for _ in range(WARM_UP_STEPS):
            stage.measure(min(2, microbatches))
        timed = [stage.measure(microbatches) for _ in range(steps)]
        tokens = microbatches * manifest.tokens_per_microbatch
        flops = tokens * held * layer_training_flops_per_token(preset.model)
        row = {
            "preset": name, "layers": held, "of_layers": preset.model.layers,
            "parameters": stage.parameters, "compiled_by": chosen,
            "kernels_repeat": repeats,
            "microbatches": microbatches, "tokens_per_step": tokens, "flops_per_step": flops,
            "peak_tflops": peak, **figures(timed, tokens, flops, peak),
            "steps": [dataclasses.asdict(one) for one in timed],
        }  # fmt: skip
        del stage
        accelerator.release_cached()
        yield row
    accelerator.select()


def ways_of(accelerator: Accelerator, backend: str) -> list[tuple[str | None, bool]]:
    """Return the ways that are compared: compiled or not, and where it makes a difference, with
    kernels that repeat to the bit or without."""
    repeats = torch.are_deterministic_algorithms_enabled()
    ways: list[tuple[str | None, bool]] = [(None, repeats)]
    return [*ways, *([(None, False)] if repeats else []), (backend, repeats)]


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
        "optimizer_seconds": median(one.optimizer_seconds for one in timed),
    }


HEADS = ("stage", "compiled", "kernels", "tokens/s", "with the optimizer", "TFLOP/s", "MFU")


def cells(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            f"{one['preset']}, {one['layers']} of {one['of_layers']} layers",
            one["compiled_by"] or "no",
            "repeat" if one["kernels_repeat"] else "any",
            f"{one['tokens_per_second']:,.0f}",
            f"{one['tokens_per_second_with_optimizer']:,.0f}",
            f"{one['teraflops']:,.3g}",
            "unknown peak" if one["mfu"] is None else f"{one['mfu']:.1%}",
        )
        for one in stages
    ]


def render(document: Mapping[str, Any]) -> str:
    parts = [str(document["device"]), table(HEADS, cells(document["stages"]), right=(3, 4, 5, 6))]
    for one in document["budgets"]:
        parts += ["", described(one)]
        parts.append(table(gpu_memory.HEADS, gpu_memory.cells(one), right=range(1, 7)))
    return "\n".join(parts)


def described(stage: Mapping[str, Any]) -> str:
    return (
        f"{stage['layers']} layers of {stage['preset']} ({stage['parameters'] / 1e6:.0f} M "
        f"parameters), {stage['dtype']}, a sequence a microbatch"
    )


def gpu_markdown(document: Mapping[str, Any]) -> str:
    """Return the page's tables."""
    machine = document["machine"]
    head = (
        f"{document['device']}, {machine['cpu_count']} processor cores, torch "
        f"{machine['packages']['torch']}, {document['measured_at'][:10]}:"
    )
    lines = [head, "", *markdown_table(HEADS, "lllrrrr", cells(document["stages"]))]
    for one in document["budgets"]:
        lines += ["", f"{described(one)}:", ""]
        lines += markdown_table(gpu_memory.HEADS, "rlrrrrrl", gpu_memory.cells(one))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
