"""A stage on a GPU within budgets of its memory: its speed, its peak, and whether its bits change.

Part of `make bench-gpu`. Each plan is built alone, so that the peak is that of the device itself,
by its allocator. All compute the same microbatches, and their sums are compared to the bit.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.stage.memory import BudgetedStage
from benchmarks.stage.middle_stage import MIDDLE, largest_inner_stage, layers_memory, stage_manifest
from swarm_client.stage.worker.accelerator import Accelerator, measured_rates
from swarm_shared.base.memory import MemoryOffer, StageMemory
from swarm_shared.model import profile_layers
from swarm_shared.model.layer_seconds import LayerSeconds
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import PRESETS, ComputeDtype
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

DTYPE: ComputeDtype = "bfloat16"
PLENTY = 2**50
TIMED_MICROBATCHES = 8
ROUNDS = 3
TO_BE_MEASURED = LayerSeconds(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A budget: how much of the memory between the least and the comfortable is added to the least,
    or of what may lie in host memory does so."""

    more: float = 0.0
    streamed: float = 0.0
    graphs_on_host: bool = False


PLANS = (
    Plan(more=1.0), Plan(more=0.75), Plan(more=0.5), Plan(more=0.5, graphs_on_host=True),
    Plan(more=0.25), Plan(more=0.25, graphs_on_host=True), Plan(), Plan(streamed=0.5),
    Plan(streamed=1.0),
)  # fmt: skip
"""The first is the comfortable one, with which the others are compared."""


def measure_budgets(name: str, accelerator: Accelerator) -> dict[str, Any]:
    """Measure the largest inner stage of a preset with each plan that the device can follow."""
    preset = PRESETS[name].model_copy(update={"sequences_per_microbatch": 1})
    layers = largest_inner_stage(preset)
    manifest = stage_manifest(preset, layers, DTYPE)
    memory = layers_memory(profile_layers(preset.model, 1, DTYPE), layers)
    rates = measured_rates(accelerator)
    plans = [
        one for one in PLANS
        if accelerator.streams is not None or not (one.streamed or one.graphs_on_host)
    ]  # fmt: skip
    offer = MemoryOffer(
        device_bytes=0, host_bytes=PLENTY, balance=None if rates is None else rates.balance
    )
    expected, rows = None, list[dict[str, Any]]()
    for plan in plans:
        row, sums = _measured(plan, manifest, memory, offer, accelerator)
        expected = sums if expected is None else expected
        row["same_sums"] = torch.equal(sums, expected)
        row["speed"] = rows[0]["seconds"] / row["seconds"] if rows else 1.0
        rows.append(row)
    return {
        "preset": name, "layers": layers, "parameters": stage_sizes(manifest)[MIDDLE].parameters,
        "dtype": DTYPE, "rates": None if rates is None else asdict(rates),
        **memory.model_dump(), "plans": rows,
    }  # fmt: skip


def _measured(
    plan: Plan, manifest: Manifest, memory: StageMemory, offer: MemoryOffer,
    accelerator: Accelerator,
) -> tuple[dict[str, Any], torch.Tensor]:  # fmt: skip
    streamed = int(plan.streamed * memory.streamable_bytes)
    more = memory.comfortable_bytes - memory.device_bytes
    budget = memory.device_bytes + int(plan.more * more) - streamed
    begin_peak(accelerator)
    stage = BudgetedStage(
        manifest, budget, streamed, accelerator=accelerator,
        graphs_on_host=TO_BE_MEASURED if plan.graphs_on_host else None,
    )  # fmt: skip
    stage.seconds(2)
    timed = [stage.seconds(TIMED_MICROBATCHES) for _ in range(ROUNDS)]
    allocated, reserved = peak_bytes(accelerator)
    sums = stage.sums()
    predicted = stage.predicted_with_copies()
    stage.close()
    if predicted is None:
        predicted = offer.replaced(budget).speed(memory, stage_sizes(manifest)[MIDDLE].streamed)
    row = {
        "budget_bytes": budget, "streamed_bytes": streamed, "graphs_on_host": plan.graphs_on_host,
        "peak_bytes": allocated, "reserved_bytes": reserved, "seconds": median(timed),
        "predicted": predicted,
    }  # fmt: skip
    return row, sums


def begin_peak(accelerator: Accelerator) -> None:
    gc.collect()
    accelerator.release_cached()
    if accelerator.has_own_memory:
        torch.accelerator.reset_peak_memory_stats(accelerator.device)


def peak_bytes(accelerator: Accelerator) -> tuple[int | None, int | None]:
    """Return the most bytes that tensors took of the device, and that torch took for them. None
    where the device has no memory of its own."""
    if not accelerator.has_own_memory:
        return None, None
    device = accelerator.device
    return (
        torch.accelerator.max_memory_allocated(device),
        torch.accelerator.max_memory_reserved(device),
    )


HEADS = (
    "budget, GB", "on the host, GB", "peak, GB", "reserved, GB", "ms a microbatch",
    "share of full speed", "predicted", "sums",
)  # fmt: skip


def cells(stage: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    return [
        (
            f"{row['budget_bytes'] / 1e9:.2f}",
            f"{row['streamed_bytes'] / 1e9:.2f}" + (" and graphs" if row["graphs_on_host"] else ""),
            _gigabytes(row["peak_bytes"]),
            _gigabytes(row["reserved_bytes"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['speed']:.2f}",
            f"{row['predicted']:.2f}",
            "the same" if row["same_sums"] else "others",
        )
        for row in stage["plans"]
    ]


def _gigabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.2f}"
