"""Summation of a step's gradients in the reference, by the rules that the manifest sets for a
swarm.

Plain float32 sums depend on the order of the microbatches, which differs between reference and
swarm: they agree up to rounding. Fixed-point sums (`swarm_shared.model.fixed_point_sums`) do not
depend on the order, so that only the points of rounding must be the same: each microbatch's
gradient once, the two uses of a tied table separately where two stages hold it, and the norm per
stage. A run then equals its reference to the bit, on machines that compute a microbatch alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_shared.model.fixed_point_sums import Quantum, quantum_of
from swarm_shared.model.flat_gradients import (
    FlatLayout,
    bind_gradients,
    global_norm,
    ordered_sum_of_squares,
    squared_norm,
)
from swarm_shared.model.llama import EMBEDDING_NAME, Stage
from swarm_shared.run.manifest import Manifest


def step_sums(computing: Stage, layout: FlatLayout, manifest: Manifest) -> PlainSums | ExactSums:
    """Return the sums that the manifest requires, of the gradients of `computing`."""
    quantum = quantum_of(manifest)
    if quantum is None:
        return PlainSums(computing, layout)
    return ExactSums(computing, layout, manifest, quantum)


class PlainSums:
    """Sums in float32."""

    def __init__(self, computing: Stage, layout: FlatLayout) -> None:
        self._layout = layout
        self._gradient = layout.new_flat(computing.device)
        bind_gradients(computing, layout, self._gradient)

    def add(self, loss: Tensor) -> None:
        """Add the gradient of one microbatch's summed loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def take(self, tokens: int) -> tuple[Tensor, float]:
        """Return the mean gradient over `tokens`, flat, and its norm; reset the sums."""
        mean = self._gradient.cpu() / tokens
        self._gradient.zero_()
        return mean, global_norm([squared_norm(mean)])


class ExactSums:
    """Fixed-point sums, independent of the order."""

    def __init__(
        self, computing: Stage, layout: FlatLayout, manifest: Manifest, quantum: Quantum
    ) -> None:
        self._quantum = quantum
        self._totals = layout.new_flat("cpu", torch.float64)
        self._leaves: list[Tensor] = [parameter for _, parameter in computing.all_parameters()]
        self._views = list(layout.views(self._totals))
        self._ranges = _norm_ranges(layout, manifest)
        table = computing.model.embed_tokens
        if manifest.model.trains_tied_table and manifest.stage_count > 1:
            assert table is not None, "the whole model has a token table"
            computing.head_table = table.weight.detach().requires_grad_()
            self._leaves.append(computing.head_table)
            names = [entry.name for entry in layout.entries]
            self._views.append(self._views[names.index(EMBEDDING_NAME)])

    def add(self, loss: Tensor) -> None:
        """Add the gradients of one microbatch's loss."""
        gradients = torch.autograd.grad(loss, self._leaves)
        self._quantum.add(self._views, [gradient.cpu() for gradient in gradients])

    def take(self, tokens: int) -> tuple[Tensor, float]:
        """Return the mean gradient over `tokens` and its norm; the sums are zero afterwards."""
        mean = self._quantum.mean(self._totals, tokens)
        self._totals.zero_()
        parts = [float(ordered_sum_of_squares(mean[start:end])) for start, end in self._ranges]
        return mean, global_norm(parts)


def _norm_ranges(layout: FlatLayout, manifest: Manifest) -> list[tuple[int, int]]:
    """Return the ranges of the flat vector whose norms are taken separately: one per stage, and one
    for a table that two stages hold."""
    ranges: dict[object, tuple[int, int]] = {}
    for entry in layout.entries:
        part = _norm_part(entry.name, manifest)
        start, _ = ranges.get(part, (entry.offset, 0))
        ranges[part] = (start, entry.offset + entry.count)
    return list(ranges.values())


def _norm_part(name: str, manifest: Manifest) -> object:
    """Return the stage that holds a parameter, or its name where two stages do."""
    words = name.split(".")
    if words[:2] == ["model", "layers"]:
        layer = int(words[2])
        return next(
            index for index, cut in enumerate(manifest.stages)
            if cut.first_layer <= layer < cut.end_layer
        )  # fmt: skip
    if words[1] in ("narrow", "widen"):
        cuts = [cut.first_layer for cut in manifest.stages[1:]]
        return cuts.index(int(words[2])) + (words[1] == "widen")
    if name == EMBEDDING_NAME:
        tied = manifest.model.tie_embeddings and manifest.stage_count > 1
        return name if tied else 0
    return manifest.stage_count - 1
