"""Cost in loss and savings of bottlenecks between stages: `make bench-bottlenecks`.

A bottleneck (`[model] bottleneck_size`, decision 0027) is a trained part of the model; a codec is
not. Both reduce the bytes at a stage boundary and can be combined. The model, data, steps and seeds
are those of `benchmarks.loss.quality`; the baseline has neither.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.loss.quality import final_loss, gap_of, loss_benchmark, one_of
from benchmarks.pages.markdown import headed_table
from swarm_shared.run.codec_sizes import ActivationCodec
from swarm_shared.run.manifest import Manifest, with_bottlenecks

WAYS: tuple[tuple[int, ActivationCodec], ...] = (
    (0, "none"),
    (32, "none"),
    (16, "none"),
    (16, "int8"),
    (8, "none"),
)
"""Boundary width of 64 (0: full width) and the codec of both directions; the first is the
baseline."""


def measure(manifest: Manifest, data: Path, seeds: Sequence[int]) -> dict[str, Any]:
    losses: dict[tuple[int, ActivationCodec], list[float]] = {way: [] for way in WAYS}
    bytes_of: dict[tuple[int, ActivationCodec], int] = {}
    for seed in seeds:
        for size, codec in WAYS:
            model = manifest.model.model_copy(update={"bottleneck_size": size})
            model = with_bottlenecks(model, manifest.stages)
            one = one_of(manifest.model_copy(update={"model": model}), seed, codec, codec)
            losses[size, codec].append(final_loss(one, data))
            bytes_of[size, codec] = one.activation_bytes + one.gradient_bytes
            click.echo(
                f"seed {seed}, width {size or model.hidden_size}, {codec}: "
                f"{losses[size, codec][-1]:.4f}",
                err=True,
            )
    baseline = losses[WAYS[0]]
    return {
        "noise": statistics.stdev(baseline),
        "ways": [
            {
                "bottleneck_size": size,
                "codec": codec,
                "bytes_per_microbatch": bytes_of[size, codec],
                **gap_of(losses[size, codec], baseline),
            }
            for size, codec in WAYS
        ],
    }


def bottlenecks_markdown(document: Mapping[str, Any]) -> str:
    """Loss and compression by bottleneck width and codec."""
    ways, full = document["ways"], document["settings"]["model.hidden_size"]
    head = (
        f"{document['measured_at'][:10]}: {document['steps']} steps of "
        f"{document['tokens_per_step']:,} tokens, model and data of the codec table, "
        f"{document['stages']} stages, {len(document['seeds'])} seeds. The noise over the seeds is "
        f"{document['noise']:.4f}."
    )
    rows = [
        (
            str(one["bottleneck_size"] or full),
            one["codec"],
            f"{ways[0]['bytes_per_microbatch'] / one['bytes_per_microbatch']:.2f}",
            f"{statistics.mean(one['losses']):.4f}",
            f"{one['gap_mean']:+.4f} ({100 * one['gap_relative']:+.2f}%)",
            f"{one['gap_spread']:.4f}",
        )
        for one in ways
    ]
    columns = (
        "width at the boundary", "codec", "compression", "mean loss", "mean gap",
        "spread of the gap",
    )  # fmt: skip
    return headed_table(head, columns, "rlrrrr", rows)


if __name__ == "__main__":
    loss_benchmark(
        "bottlenecks",
        "Measure the final held-out loss with bottlenecks, compared with the full width.",
        measure,
        bottlenecks_markdown,
    )()
